"""What the model hop costs: the same scripted model asked directly, and through an authority over SQLite.

Sequential calls, taking turns, each a step of its own, on real sockets: time to the first piece and to the end, median
of each. The model answers at once, so that what is measured is the relay and its two commits. `--calls N`, `--json`.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from tidefast.cli import wiring
from tidefast.cli.place import own, system_clock
from tidefast.demo.providers.scripted import Said, ScriptedModel
from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.records import Right
from tidefast.server.access import KeyBook
from tidefast.server.app import build_app
from tidefast.server.credentials import Credentials, Signer
from tidefast.server.serve import serve
from tidefast.services.tools import ToolBook

WARM = 20


async def one(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> tuple[float, float]:
    """(seconds to the first piece, seconds to the end) of one streamed answer."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    began, first = time.perf_counter(), 0.0
    async with session.post(url, json=body, headers=headers) as response:
        if response.status != 200:
            raise SystemExit(await response.text())
        async for _ in response.content.iter_any():
            first = first or time.perf_counter() - began
    return first, time.perf_counter() - began


async def measure(calls: int, directory: Path) -> dict[str, float]:
    model = ScriptedModel(lambda request, count: Said("eight words in pieces that can be cut"))
    direct = await model.start()
    file = directory / "models.toml"
    file.write_text(f'[upstreams.local]\nurl = "{direct}"\nmodels = ["small"]\n')
    store = own(str(directory / "store.db"), create=True)
    models, clock = wiring.build_models(file), system_clock(store)
    parts = await wiring.build_authority(store, ToolBook(()), None, None, clock, models)
    signer = Signer((bytes(32),), store.identity().namespace)
    app = build_app(parts.authority, Credentials(KeyBook(bytes(32), None), signer))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.ensure_future(serve(app, "127.0.0.1", 0, ready.set_result, stop))
    url = await ready
    await parts.authority.create_run("r", "a", "1", "null")
    grant = await parts.authority.grant("r", "w", 600_000, "")
    if not isinstance(grant, LeaseGrant):
        raise SystemExit(f"no lease: {grant}")
    token = signer.mint(Right(grant.run_id, grant.epoch, "w"))
    straight, relayed = [], []
    async with aiohttp.ClientSession() as session:
        for number in range(WARM + calls):
            named = {"Tidefast-Lease": token, "Tidefast-Step": f"s{number}"}
            straight.append(await one(session, f"{direct}/chat/completions", {}))
            relayed.append(await one(session, f"{url}/v1/chat/completions", named))
    stop.set()
    await serving
    await parts.stop()
    await model.close()
    found = {}
    for name, times in (("direct", straight[WARM:]), ("relayed", relayed[WARM:])):
        found[f"{name}_first_ms"] = statistics.median(first for first, _ in times) * 1_000
        found[f"{name}_whole_ms"] = statistics.median(whole for _, whole in times) * 1_000
    found["first_added_ms"] = found["relayed_first_ms"] - found["direct_first_ms"]
    found["whole_added_ms"] = found["relayed_whole_ms"] - found["direct_whole_ms"]
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser("relay", description="What the model hop costs.", allow_abbrev=False)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    import uvloop

    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(given.calls, Path(directory)))
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:18}{value:8.3f}")


if __name__ == "__main__":
    main()
