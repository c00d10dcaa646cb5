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

from tidefast.demo.agent import MODEL
from tidefast.sim.injector import Process, end
from tidefast.sim.points import SCHEME

HERE = Path(__file__).resolve().parent
TICKETS, ORDERS, TOOLS = HERE / "tickets.jsonl", HERE / "orders.jsonl", HERE / "tools.toml"
AGENT = "tidefast.demo.agent:app"
LEASE = "1s"
RUNS_PER_WORKER = 6
READY_S = 20.0
LOADED_S = 180.0
MODELS = """[upstreams.desk]
url = "{url}"
models = ["{model}"]
{patience}
[prices.{model}]
input = 0.15
output = 0.60

[budgets]
run = {{ calls = 20, tokens = 100_000, money = 1.0 }}
"""
SLOW = 'concurrency = 2\nqueue_wait = "10m"\nfirst_token = "5m"'
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

    def __init__(
        self, directory: Path, points: str, providers: Mapping[str, Sequence[str]], *, is_local: bool = False
    ) -> None:
        self.directory = directory
        self.store = directory / "store.db"
        self._points = points
        self._commands = providers
        self._tokens = {name: secrets.token_hex(16) for name in providers}
        self._providers: dict[str, Provider] = {}
        self._model: asyncio.subprocess.Process | None = None
        self._is_local = is_local
        self._model_url = ""
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    async def start_providers(self) -> None:
        """Start all, and write the contracts and the models' file with their ports in."""
        await self._start_model()
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

    async def _start_model(self) -> None:
        """The model's server: by script, or the small real one, which takes a while to load its weights."""
        command = [sys.executable, "-m", "tidefast.demo.providers.model", *(["--local"] if self._is_local else [])]
        process = await self._spawn("model", command, {}, is_piped=True)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(LOADED_S if self._is_local else READY_S):
                said = json.loads(await process.stdout.readline())
        except (TimeoutError, ValueError) as error:
            await end(process, GRACE_S)
            raise HouseError(f"the model doesn't come up; see {self._log('model')}") from error
        except asyncio.CancelledError:
            await end(process, GRACE_S)
            raise
        self._model = process
        self._model_url = f"http://127.0.0.1:{said['port']}/v1"
        patience = SLOW if self._is_local else ""
        file = MODELS.format(url=self._model_url, model=MODEL, patience=patience)
        (self.directory / "models.toml").write_text(file, encoding="utf-8")

    async def bill(self) -> list[dict[str, Any]]:
        """What the scripted model would be paid for; the real one keeps no bill."""
        if self._is_local:
            return []
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.get(f"{self._model_url}/bill") as response,
        ):
            rows: list[dict[str, Any]] = (await response.json())["bill"]
        return rows

    async def start_authority(self) -> Process:
        """Start `tidefast serve`, and return once it answers."""
        command = [*CLI, "serve", "--store", f"sqlite:///{self.store}", "--port", str(self._port)]
        command += ["--tools", str(self.directory / "tools.toml"), "--models", str(self.directory / "models.toml")]
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
        """End the providers and the model."""
        if self._model is not None:
            await end(self._model, GRACE_S)
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
