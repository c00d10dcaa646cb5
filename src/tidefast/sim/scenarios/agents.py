"""The agents that scenarios drive through the real SDK. Tools are named, not defined here: they are the gateway's."""

import asyncio
from typing import Any

from tidefast.sdk.app import App
from tidefast.sdk.errors import Preempted, Rejected
from tidefast.sdk.run import Run

app = App()


@app.agent
async def shop(run: Run, input: Any) -> str:
    """Charges, saves, mails."""
    await run.tool("pay", "charge", cents=500)
    await run.checkpoint({"paid": True})
    await run.tool("note", "mail", to="ann")
    return "sold"


@app.agent
async def three(run: Run, input: Any) -> str:
    """Three charges, and a checkpoint only at the very end."""
    for name in ("a", "b", "c"):
        await run.tool(name, "charge", cents=500)
    await run.checkpoint({"paid": 3})
    return "sold"


@app.agent
async def batch(run: Run, input: Any) -> str:
    """Three charges side by side, under names of their own."""
    await asyncio.gather(*(run.tool(name, "charge", cents=500) for name in ("a", "b", "c")))
    return "sold"


@app.agent
async def zealot(run: Run, input: Any) -> str:
    """Catches everything, its own preemption included, and tries to go on."""
    try:
        await run.tool("pay", "charge", cents=500)
    except Preempted:
        pass
    await run.tool("more", "charge", cents=900)
    return "sold"


@app.agent
async def saga(run: Run, input: Any) -> str:
    """Undoes the charge if the second one is refused."""
    await run.tool("pay", "charge", cents=500)
    try:
        await run.tool("fee", "charge", cents=1)
    except Rejected:
        await run.compensate("pay")
        return "undone"
    return "sold"


@app.agent
async def talker(run: Run, input: Any) -> str:
    """Words its mail anew in each pass, as a language model does."""
    await run.tool("note", "mail", to="ann", text=f"pass {run.epoch}")
    return "told"


@app.agent(on_drift="stored")
async def listener(run: Run, input: Any) -> str:
    """Words its charge anew in each pass, and takes the stored call for the answer."""
    await run.tool("pay", "charge", cents=500, memo=f"pass {run.epoch}")
    return "sold"
