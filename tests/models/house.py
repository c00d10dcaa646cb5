"""A real authority over a store in memory, real sockets, and a scripted model that bills."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from tidefast.demo.providers.scripted import Said, ScriptedModel
from tidefast.engine.clock import Clock, SystemClock
from tidefast.engine.engine import Engine
from tidefast.protocol.answers import LeaseGrant, StepAnswer
from tidefast.protocol.ids import StepId
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Refused
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.http_sender import HttpSender
from tidefast.services.model_hop import ModelHop
from tidefast.services.model_sender import ModelSender, raw_answer
from tidefast.services.models import ModelBook, load_models
from tidefast.services.python_runner import LocalRunner
from tidefast.services.tools import ToolBook
from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore

WAIT_MS = 20_000
MODEL = "small"


def told(text: str = "four words are these", **more: Any) -> Callable[[Any, int], Said]:
    """A script that says the same words each time, numbered so that no two askings sound alike."""
    return lambda request, count: Said(text=f"{text} ({count})", **more)


def question(text: str = "what now?", **more: Any) -> str:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **more})


def config(url: str, upstream: str = "", rest: str = "") -> str:
    return f'[upstreams.local]\nurl = "{url}"\nmodels = ["{MODEL}"]\n{upstream}\n{rest}'


class House:
    """One authority and its model; `right` is a live lease of run `r1`."""

    def __init__(self, authority: Authority, engine: Engine, model: ScriptedModel, clock: Clock) -> None:
        self.authority, self.engine, self.model, self.clock = authority, engine, model, clock
        self.hop: ModelHop = authority.models

    async def lease(self, run: str = "r1", holder: str = "w1", agent: str = "desk") -> Right:
        """A live lease over a run, which is made if it isn't there; an older one is preempted."""
        await self.authority.create_run(run, agent, "1", "null")
        await self.authority.preempt(run, "test", "", None)
        grant = await self.authority.grant(run, holder, 120_000, "")
        assert isinstance(grant, LeaseGrant), grant
        return Right(grant.run_id, grant.epoch, holder)

    async def ask(self, right: Right, step: str = "plan", body: str = "", wait_ms: int = WAIT_MS, **more: Any) -> Any:
        return await self.authority.chat(right, step, body or question(), wait_ms, **more)

    def step(self, step: str = "plan", run: str = "r1") -> Any:
        found = self.engine.step(run, StepId(step))  # type: ignore[arg-type]
        assert found is not None
        return found

    def spent(self, name: str = "run/r1") -> Any:
        return self.engine.budget(name).spent


def text_of(answer: Any) -> str:
    assert isinstance(answer, StepAnswer), answer
    choices = msgspec.json.decode(answer.receipt_json)["body"]["choices"]
    return str(choices[0]["message"].get("content", "")) if choices else ""


def raw_of(answer: Any) -> bytes:
    assert isinstance(answer, StepAnswer), answer
    return raw_answer(msgspec.json.decode(answer.receipt_json))


def says(answer: Any) -> tuple[str, str]:
    assert isinstance(answer, Refused), answer
    return answer.code, answer.reason


async def heard(relay: Any) -> bytes:
    """Everything that a listener hears."""
    pieces = []
    while (piece := await relay.next()) is not None:
        pieces.append(piece)
    return b"".join(pieces)


@contextlib.asynccontextmanager
async def house(
    tmp_path: Path,
    script: Any = None,
    upstream: str = "",
    rest: str = "",
    tools: Sequence[Any] = (),
    functions: Any = None,
    store: Store | None = None,
) -> AsyncIterator[House]:
    model = ScriptedModel(script or told())
    url = await model.start()
    file = tmp_path / "models.toml"
    file.write_text(config(url, upstream, rest))
    clock = SystemClock(0)
    engine = Engine(store or MemoryStore(), clock)
    engine.start()
    http, sender = HttpSender(clock), ModelSender(clock)
    runner = LocalRunner(clock, functions or {}, frozenset())
    gateway = Gateway(engine, ToolBook(tools), http, runner)
    book: ModelBook = load_models(file)
    authority = Authority(engine, gateway, ModelHop(engine, gateway, book, sender))
    try:
        yield House(authority, engine, model, clock)
    finally:
        await model.close()
        await gateway.drain()
        await sender.close()
        await http.close()
        await engine.stop()


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def micros(money: str) -> int:
    return int(Decimal(money) * 1_000_000)
