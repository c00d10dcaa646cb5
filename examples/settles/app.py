"""An agent that pays an order. In this directory, beside `python bank.py`:

tidefast run app:app pay '{"order":"o-502"}' --tools tools.toml
"""

from typing import Any

import tidefast as tf

app = tf.App()


@app.agent
async def pay(run: tf.Run, ticket: dict[str, str]) -> Any:
    paid = await run.tool("pay", "transfer", order=ticket["order"], cents=500)
    await run.checkpoint({"stage": "paid"})
    return paid
