"""Asks providers about doubts: whether a call that nobody heard the end of took effect.

It only reads, and decides nothing: the rules say from when on a step may be asked about and what an answer is worth.
Questions come from the sweep (runs that nobody holds, held steps, frozen runs) and from a live holder that asks for the
step; at most one is out for a step at a time. An answer is dated by the moment before its question was sent.
"""

import asyncio
import itertools

import msgspec
import structlog

from tidefast.engine.engine import Engine
from tidefast.protocol.canonical import JSON, canonical, digest, text_json
from tidefast.protocol.commands import AnswerProbe, ProbeWord
from tidefast.protocol.contracts import Contract, Probe, render_probe, render_request
from tidefast.protocol.doubt import scope_change
from tidefast.protocol.events import object_json
from tidefast.protocol.ids import Epoch, RunId, StepId, spell_key
from tidefast.protocol.patterns import RenderError, fill, member
from tidefast.protocol.probing import read_answer
from tidefast.protocol.records import Step
from tidefast.protocol.verdicts import Refused
from tidefast.services.bodies import Bodies
from tidefast.services.http_sender import HttpSender
from tidefast.services.tools import Outcome, PythonRunner, ToolBook
from tidefast.stores.base import StoreUnavailable

TIMEOUT_MS = 10_000  # a question that takes longer is unclear
ANSWER_CHARS_MAX = 65_536
AT_ONCE_MAX = 32
DROPPED_PAUSE_MS = 10_000  # after an answer that the rules did not take, or a tool that is another one today
log = structlog.get_logger("tidefast.prober")


class Prober:
    """Asks about the doubts of one engine's runs."""

    def __init__(self, engine: Engine, tools: ToolBook, http: HttpSender, python: PythonRunner | None) -> None:
        self._engine = engine
        self._tools = tools
        self._http = http
        self._python = python
        self._bodies = Bodies(engine)
        self._asking: dict[tuple[RunId, StepId], asyncio.Task[None]] = {}
        self._not_before: dict[tuple[RunId, StepId], int] = {}

    async def ask(self, run_id: RunId, step_id: StepId) -> int:
        """Ask about one step, or wait for the question that is out; a caller that is cancelled takes nothing back.

        Answers before when no other question would be sent: 0 if the rules took what the provider said.
        """
        place = run_id, step_id
        if self._engine.clock.now().ms >= self._not_before.get(place, 0):
            await asyncio.shield(self._begin(place))
        return self._not_before.get(place, 0)

    def sweep(self) -> int:
        """Begin to ask about every step that is due, up to a bound. Returns how many questions are out."""
        now_ms = self._engine.clock.now().ms
        self._not_before = {place: until for place, until in self._not_before.items() if until > now_ms}
        for run_id in self._engine.store.probing(now_ms, AT_ONCE_MAX):
            head = self._engine.head(run_id)
            due = [step.step_id for step in head.open if 0 < step.probe_ms <= now_ms] if head is not None else []
            for place in itertools.product([run_id], due):
                if place not in self._not_before and len(self._asking) < AT_ONCE_MAX:
                    self._begin(place)
        return len(self._asking)

    async def stop(self) -> None:
        """Ask nothing more. A question that is out is forgotten: it will be asked again."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _begin(self, place: tuple[RunId, StepId]) -> "asyncio.Task[None]":
        task = self._asking.get(place)
        if task is None:
            task = self._asking[place] = asyncio.create_task(self._ask(*place))
            task.add_done_callback(lambda _: self._asking.pop(place, None))
        return task

    async def _ask(self, run_id: RunId, step_id: StepId) -> None:
        step = self._engine.step(run_id, step_id)
        command = None if step is None or not step.contract else await self._question(run_id, step)
        try:
            refused = command is None or isinstance(await self._engine.submit(command), Refused)
        except StoreUnavailable:
            refused = True
        if command is not None:
            log.info("probe_answered", run=run_id, step=step_id, answer=command.answer, reason=command.reason)
        if refused:
            self._not_before[run_id, step_id] = self._engine.clock.now().ms + DROPPED_PAUSE_MS

    async def _question(self, run_id: RunId, step: Step) -> AnswerProbe | None:
        """What the provider says of a step now; None if it can't be asked as things stand."""
        stored, known = self._engine.contract(step.contract), self._tools.get(step.tool)
        today = None if known is None else known.contract
        if stored.probe is None or today is None or scope_change(stored, today):
            return None
        args_json, _ = self._bodies.stored_call(run_id, step.intent_seq)
        sources: dict[str, JSON] = {"args": msgspec.json.decode(args_json)}
        if stored.key != "none":
            sources["key"] = spell_key(step.key, stored.key_form)
        asked_ms = self._engine.clock.now().ms
        try:
            outcome = await self._send(stored.probe, today, sources, run_id, step)
            word, receipt, reason = read(stored.probe, sources, outcome)
        except RenderError as error:
            word, receipt, reason = "unclear", "null", str(error)[:200]
        return AnswerProbe(run_id, step.step_id, word, asked_ms, len(step.attempts), receipt, reason)

    async def _send(
        self, probe: Probe, today: Contract, sources: dict[str, JSON], run_id: RunId, step: Step
    ) -> Outcome:
        deadline_ms = self._engine.clock.now().ms + TIMEOUT_MS
        args: JSON = fill(dict(probe.args), sources)
        name = f"{run_id}/{step.step_id}"
        if probe.tool:
            return await self.read(probe.tool, args, step.key, deadline_ms, name, step.epoch)
        request = render_probe(probe, sources)
        return await self._http.send(today._replace(expect=None), request, deadline_ms, step=name, epoch=step.epoch)

    async def read(self, tool: str, args: JSON, key: str, deadline_ms: int, name: str, epoch: Epoch) -> Outcome:
        """What a tool that only reads says now, in the name of a step. Raises `RenderError`."""
        known = self._tools.get(tool)
        if known is None or not isinstance(args, dict):
            return Outcome("unsent", reason="tool_gone")
        if known.contract.kind == "http":
            request = render_request(known.contract, args, key)
            return await self._http.send(known.contract, request, deadline_ms, step=name, epoch=epoch)
        if self._python is None:
            return Outcome("unsent", reason="no_python_runner")
        return await self._python(tool, args, key, deadline_ms)


def read(probe: Probe, sources: dict[str, JSON], outcome: Outcome) -> tuple[ProbeWord, str, str]:
    """(word, receipt of the effect as canonical text, why it is unclear). Raises `RenderError`."""
    receipt = msgspec.json.decode(outcome.receipt_json)
    if receipt is None:
        return "unclear", "null", outcome.reason or outcome.kind
    if receipt["truncated"] or len(outcome.receipt_json) > ANSWER_CHARS_MAX:
        return "unclear", "null", "answer_too_large"
    status = receipt["status"]
    if status is None and outcome.kind != "applied":
        return "unclear", "null", outcome.reason
    word = read_answer(probe, sources, status, None if receipt.get("encoding") else receipt["body"])
    reason = (f"status_{status}" if status else "answer_unlike") if word == "unclear" else ""
    if word != "found":
        return word, outcome.receipt_json if word == "many" else "null", reason
    has_record, record = member(receipt["body"], probe.receipt) if probe.receipt else (True, receipt["body"])
    if not has_record:
        return "unclear", "null", "receipt_missing"
    body = canonical(record)
    told = object_json(
        body=body,
        content_type=text_json(receipt["content_type"]),
        digest=f'"{digest(body)}"',
        probed="true",
        status="null" if status is None else str(status),
        truncated="false",
    )
    return "found", told, ""
