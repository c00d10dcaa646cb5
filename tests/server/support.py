"""A server without a socket, an authority that only takes notes, and a real one over a store in memory."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.answers import BudgetInfo, JournalPage, LeaseGrant, RunCreated, StepAnswer
from tidefast.protocol.contracts import PYTHON_KEY, Contract, Undo
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused, Renewed, Settled
from tidefast.server.access import Caller, KeyBook, key_digest
from tidefast.server.app import build_app
from tidefast.server.credentials import Credentials, Signer
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.http_sender import HttpSender
from tidefast.services.python_runner import LocalRunner
from tidefast.services.reads import Troubles
from tidefast.services.tools import ToolBook
from tidefast.stores.memory import MemoryStore
from tidefast.wire import tokens

SECRET = bytes(range(100, 132))
NAMESPACE = b"n" * 16
OPERATOR_KEY = "tfo1." + "ab" * 32
OPERATOR = {"Authorization": f"Bearer {OPERATOR_KEY}"}
RIGHT = Right(RunId("r1"), Epoch(2**32 + 1), "w1")
TOKEN = tokens.mint(SECRET, NAMESPACE, RIGHT)
STALE = Refused("stale_epoch", "superseded", {"epoch": 1, "live_epoch": 2, "holder": "w2", "ended_at_ms": 9})
GRANT = LeaseGrant(RunId("r1"), "a", "1", RIGHT.epoch, "w1", 15_000, 9, '{"x":1}', 0, "null", False, ())
STEP = StepAnswer(RunId("r1"), StepId("s1"), "committed", RIGHT.epoch, "0" * 32, False, '{"body":1}')


class Spy:
    """Answers every verb with something well formed and writes down that it was asked."""

    def __init__(self, fence: Refused | None = None, error: BaseException | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fence = fence
        self._error = error
        done = Done("done", 7)
        self._answers: dict[str, Any] = {
            "create_run": RunCreated(RunId("r1"), "claimable", True), "claim": [GRANT], "grant": GRANT,
            "journal": JournalPage((), 0), "renew": [Renewed(99)], "release": done, "apply": STEP,
            "save_result": STEP, "compensate": STEP, "checkpoint": done, "complete": done, "fail": done,
            "oversee": done, "resolve": Settled("applied", False), "runs": [], "events": [],
            "list_workspaces": [], "workspace": Refused("not_found", "workspace_unknown", {"workspace": "w1"}),
            "workspace_log": [], "workspace_entries": {"index": 0, "entries": []}, "workspace_diff": {"changes": []},
            "read_workspace": {"result": 1}, "steps": [], "held": [],
            "run": Refused("not_found", "run_unknown", {"run": "r1"}),
            "step": Refused("not_found", "step_unknown", {"step": "s1"}), "troubles": Troubles(1, 2, 3_000),
            "budgets": [], "raise_budget": BudgetInfo("run/r1", *[0] * 9, None, None, None, ""),
        }  # fmt: skip

    @property
    def asked(self) -> list[str]:
        return [name for name, *_ in self.calls]

    async def fence(self, right: Right) -> Refused | None:
        self.calls.append(("fence", right))
        return self._fence

    def __getattr__(self, name: str) -> Any:
        async def verb(*args: Any) -> Any:
            self.calls.append((name, *args))
            if self._error is not None:
                raise self._error
            return self._answers[name]

        return verb


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def says(self) -> tuple[int, str, str]:
        return self.status, self.json["code"], self.json["reason"]


def app_of(authority: Any) -> Any:
    return build_app(authority, credentials())


def credentials(keys: Mapping[bytes, Caller] | None = None) -> Credentials:
    return Credentials(KeyBook(key_digest(OPERATOR_KEY), keys), Signer((SECRET,), NAMESPACE))


async def ask(
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    token: str | None = None,
    chunks: Sequence[bytes] | None = None,
    receive: Any = None,
) -> Reply:
    """One request to an ASGI application. `body` is bytes or something for JSON; `chunks` come without a length."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent = {"Host": "127.0.0.1:7411", **({"Content-Type": "application/json"} if raw or chunks else {})}
    if chunks is None and method == "POST":
        sent["Content-Length"] = str(len(raw))
    if token is not None:
        sent["Tidefast-Lease"] = token
    sent.update(headers or {})
    bare, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": bare, "raw_path": bare.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
    }  # fmt: skip
    parts = list(chunks) if chunks is not None else [raw]
    messages = iter(
        {"type": "http.request", "body": part, "more_body": place < len(parts) - 1} for place, part in enumerate(parts)
    )
    said: list[dict[str, Any]] = []

    async def from_client() -> dict[str, Any]:
        for message in messages:
            return message
        await asyncio.get_running_loop().create_future()  # connected, and waiting for the answer
        raise AssertionError

    async def to_client(message: dict[str, Any]) -> None:
        said.append(message)

    await app(scope, receive or from_client, to_client)
    start, rest = said[0], b"".join(message["body"] for message in said[1:])
    names = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], names, rest)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


class Desk:
    """What the tools of the real authority did: a card provider that counts."""

    def __init__(self) -> None:
        self.charged: list[str] = []

    async def charge(self, order: str, key: str) -> dict[str, str]:
        self.charged.append(key)
        return {"id": f"ch-{order}"}

    async def forget(self) -> None:
        raise RuntimeError("who knows")

    async def refund(self, charge: str, key: str) -> dict[str, str]:
        return {"undone": charge}


@contextlib.asynccontextmanager
async def real_authority(desk: Desk) -> AsyncIterator[tuple[Authority, Engine]]:
    clock = ManualClock()
    engine = Engine(MemoryStore(), clock)
    engine.start()
    undo = Undo("refund", {"charge": "{receipt.body.id}"})
    common: dict[str, Any] = {"kind": "python", "key": PYTHON_KEY, "key_ttl_ms": 86_400_000, "timeout_ms": 5_000}
    tools = ToolBook(
        [Contract("charge", undo=undo, **common), Contract("refund", **common), Contract("forget", kind="python")]
    )
    runner = LocalRunner(
        clock, {"charge": desk.charge, "refund": desk.refund, "forget": desk.forget}, frozenset(("charge", "refund"))
    )
    http = HttpSender(clock)
    try:
        yield Authority(engine, Gateway(engine, tools, http, runner)), engine
    finally:
        await http.close()
        await engine.stop()
