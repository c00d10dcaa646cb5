"""The processes of the refund desk: two providers, the authority, the workers. Real ones, on one host.

A child never outlives the desk: where the kernel can, it kills the child with its parent, and `close` ends all in good
order before. Each child leads a process group of its own, so that a Ctrl-C at the terminal reaches the desk alone.
"""

import asyncio
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tidefast.sim.injector import Process, end
from tidefast.sim.points import SCHEME

HERE = Path(__file__).resolve().parent
TICKETS, ORDERS, TOOLS = HERE / "tickets.jsonl", HERE / "orders.jsonl", HERE / "tools.toml"
AGENT = "tidefast.demo.agent:app"
LEASE = "1s"
RUNS_PER_WORKER = 6
READY_S = 20.0
GRACE_S = 5.0
LOOK_S = 0.02
PR_SET_PDEATHSIG = 1
PROVIDERS: Mapping[str, Sequence[str]] = {
    "card": (sys.executable, "-m", "tidefast.demo.providers.card"),
    "mail": (sys.executable, "-m", "tidefast.demo.providers.mail"),
}
CLI = (sys.executable, "-c", "import sys; from tidefast.cli.main import main; sys.exit(main())")


class HouseError(Exception):
    """A process of the house doesn't come up. The message says which one, and where it wrote why."""


@dataclass
class Provider:
    """A running provider and where it listens."""

    process: asyncio.subprocess.Process
    port: int  # of its HTTP
    tool_port: int  # where the tools find it


class House:
    """Starts each process, knows where it listens, and ends what is not the injector's to end."""

    def __init__(self, directory: Path, points: str, providers: Mapping[str, Sequence[str]]) -> None:
        self.directory = directory
        self.store = directory / "store.db"
        self._points = points
        self._commands = providers
        self._tokens = {name: secrets.token_hex(16) for name in providers}
        self._providers: dict[str, Provider] = {}
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    async def start_providers(self) -> None:
        """Start both, and write the contracts with their ports in."""
        for name in self._commands:
            self._providers[name] = await self._start_provider(name)
        text = TOOLS.read_text(encoding="utf-8")
        for name, provider in self._providers.items():
            text = text.replace(f"{name.upper()}_PORT", str(provider.tool_port))
        (self.directory / "tools.toml").write_text(text, encoding="utf-8")

    async def _start_provider(self, name: str) -> Provider:
        options = ["--db", str(self.directory / f"{name}.db")]
        if name == "card":
            options += ["--orders", str(ORDERS)]
        process = await self._spawn(
            name, [*self._commands[name], *options], {f"{name.upper()}_TOKEN": self._tokens[name]}, is_piped=True
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(READY_S):
                ports = json.loads(await process.stdout.readline())
            return Provider(process, int(ports["port"]), int(ports.get("smtp", ports["port"])))
        except (TimeoutError, ValueError, KeyError) as error:
            await end(process, GRACE_S)
            raise HouseError(f"the {name} provider doesn't come up; see {self._log(name)}") from error
        except asyncio.CancelledError:
            await end(process, GRACE_S)
            raise

    async def start_authority(self) -> Process:
        """Start `tidefast serve`, and return once it answers."""
        command = [*CLI, "serve", "--store", f"sqlite:///{self.store}", "--port", str(self._port)]
        command += ["--tools", str(self.directory / "tools.toml")]
        credentials = {"CARD_AUTH": f"Bearer {self._tokens['card']}", "MAIL_PASSWORD": self._tokens["mail"]}
        process = await self._spawn("authority", command, {**credentials, **self._hooked()})
        try:
            async with asyncio.timeout(READY_S), aiohttp.ClientSession(trust_env=False) as session:
                health = f"{self.url}/healthz"
                while process.returncode is None and not await is_up(session, health):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            await end(process, GRACE_S)
            raise HouseError(f"the authority doesn't answer; see {self._log('authority')}") from error
        except asyncio.CancelledError:
            await end(process, GRACE_S)
            raise
        if process.returncode is not None:
            raise HouseError(f"the authority ended at its start; see {self._log('authority')}")
        return process

    async def start_worker(self, name: str) -> Process:
        """Start `tidefast worker`; it is ready whenever it is."""
        command = [*CLI, "worker", AGENT, "--url", self.url, "--lease", LEASE, "--max-runs", str(RUNS_PER_WORKER)]
        return await self._spawn(name, command, self._hooked())

    async def ledger(self, name: str) -> list[dict[str, Any]]:
        """What a provider says it did."""
        provider = self._providers[name]
        headers = {"Authorization": f"Bearer {self._tokens[name]}"}
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.get(f"http://127.0.0.1:{provider.port}/ledger", headers=headers) as response,
        ):
            answer = await response.json()
        rows: list[dict[str, Any]] = answer["effects"] if "effects" in answer else answer["mails"]
        return rows

    async def close(self) -> None:
        """End the providers."""
        for provider in self._providers.values():
            await end(provider.process, GRACE_S)

    def _hooked(self) -> dict[str, str]:
        return {"TIDEFAST_POINTS": f"{SCHEME}{self._points}"}

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    async def _spawn(
        self, name: str, command: Sequence[str], more: Mapping[str, str], is_piped: bool = False
    ) -> asyncio.subprocess.Process:
        environment = {**os.environ, **more, "PYTHONUNBUFFERED": "1"}
        environment.pop("TIDEFAST_URL", None)
        with self._log(name).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if is_piped else log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )


def die_with_parent() -> None:
    """In the child: ask the kernel for SIGKILL when the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A port that was free a moment ago; the authority keeps it over its deaths."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def is_up(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a server answers there."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=1)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
