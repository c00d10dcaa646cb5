"""An agent that pays an order back. In this directory: tidefast run app:app refund '{"order":"o-1"}'"""

from pathlib import Path

import tidefast as tf

app = tf.App()


@app.tool(key_ttl="24h")  # the contract: for a day, whoever is called knows a key again
def pay_back(order: str, key: str) -> dict[str, str]:
    Path(f"paid-{key}.txt").write_text(order)  # stands for a provider: one key is one payment, however often it is sent
    return {"paid": order}


@app.agent
async def refund(run: tf.Run, ticket: dict[str, str]) -> dict[str, str]:
    paid: dict[str, str] = await run.tool("pay", pay_back, order=ticket["order"])  # the step "pay" of this run
    await run.checkpoint({"stage": "paid"})
    return paid
