"""A trip that is booked whole or not at all. In this directory:

tidefast run app:app trip '{"to":"Lisbon","car":true}'    # completed
tidefast run app:app trip '{"to":"Lisbon","car":false}' --run-id t-2    # failed: hotel and flight are given back
tidefast show t-2
"""

from pathlib import Path

import tidefast as tf

app = tf.App()


@app.tool(key_ttl="24h", undo={"tool": "give_back", "args": {"booking": "{receipt.body.booking}"}})
def book(what: str, key: str) -> dict[str, str]:
    Path(f"booked-{key}.txt").write_text(what)  # stands for a provider: one key is one booking
    return {"booking": key}


@app.tool(key_ttl="24h")
def give_back(booking: str, key: str) -> dict[str, str]:
    Path(f"booked-{booking}.txt").unlink(missing_ok=True)
    Path(f"given-back-{key}.txt").write_text(booking)
    return {"given_back": booking}


@app.agent
async def trip(run: tf.Run, wish: dict[str, object]) -> dict[str, object]:
    flight = await run.tool("flight", book, what=f"flight to {wish['to']}")
    hotel = await run.tool("hotel", book, what=f"hotel in {wish['to']}")
    if not wish["car"]:
        raise tf.Fail("no car is left")  # what was booked is given back, newest first; then the run has failed
    return {"flight": flight["booking"], "hotel": hotel["booking"]}
