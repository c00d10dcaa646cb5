"""An agent that charges an order. In this directory, beside `python shop.py`:

tidefast run app:app buy '{"order":"o-flaky"}' --tools tools.toml
"""

from typing import Any

import tidefast as tf

app = tf.App()


@app.agent
async def buy(run: tf.Run, ticket: dict[str, str]) -> Any:
    return await run.tool("pay", "charge", order=ticket["order"])
