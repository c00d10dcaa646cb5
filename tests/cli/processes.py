"""Real `tidefast` processes for tests, and an injector that stops them at a named point."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

APP = """
import os
import tidefast as tf

app = tf.App()
print("printed by the app")


def count(name: str, line: str) -> None:
    with open(name, "a") as file:
        file.write(line + "\\n")


@app.tool(key_ttl="1h", timeout="5s")
def charge(order: str, key: str) -> dict:
    count("charged", key)
    return {"order": order}


@app.tool(timeout="5s")
async def mail(to: str) -> dict:
    count("mailed", to)
    if to == "refused":
        raise tf.Refused("no such address")
    if to.startswith("lost"):
        raise RuntimeError("who knows")
    return {"ok": True}


@app.agent
async def desk(run: tf.Run, input: dict) -> dict:
    paid = await run.tool("pay", "charge", order=input["order"])
    await run.checkpoint({"paid": True})
    try:
        await run.tool("mail", "mail", to=input["to"])
    except tf.Rejected as rejected:
        raise tf.Fail(f"mail: {rejected.reason}")
    return paid


@app.agent
async def shows(run: tf.Run, input: object) -> object:
    return input
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TIDEFAST_")}
COMMAND = (sys.executable, "-m", "tidefast.cli.main")


def tidefast(
    *words: str, cwd: Path, points: Path | None = None, key: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    environment = _environment(points) | ({} if key is None else {"TIDEFAST_KEY": key})
    return subprocess.run(
        [*COMMAND, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def _environment(points: Path | None) -> dict[str, str]:
    return ENVIRONMENT if points is None else {**ENVIRONMENT, "TIDEFAST_POINTS": f"unix:{points}"}


class Running:
    """A process that said it is ready."""

    def __init__(self, words: tuple[str, ...], cwd: Path, points: Path | None, more: Mapping[str, str]) -> None:
        self.log = cwd / f"{words[0]}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *words, "--json"],
                cwd=cwd,
                env={**_environment(points), **more},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.said: dict[str, Any] = json.loads(line)
        assert self.said["ready"] is True

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@contextlib.contextmanager
def running(
    *words: str, cwd: Path, points: Path | None = None, more: Mapping[str, str] | None = None
) -> Iterator[Running]:
    started = Running(words, cwd, points, more or {})
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()


def kill_at(point: str, address: Path, *words: str, cwd: Path) -> int:
    """Run a command, SIGKILL it when it reports the point for the first time, and return how it ended."""

    async def main() -> int:
        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    told = json.loads(line)
                    if told["point"] == point:
                        os.kill(told["pid"], signal.SIGKILL)
                    else:
                        writer.write(json.dumps({"id": told["id"], "go": True}).encode() + b"\n")
            writer.close()

        async with await asyncio.start_unix_server(listen, address):
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                *words,
                cwd=cwd,
                env=_environment(address),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            async with asyncio.timeout(30):
                return await process.wait()

    return asyncio.run(main())
