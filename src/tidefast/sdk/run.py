"""What an agent sees of its run.

On resume the agent's function runs again from the top, and each finished step is answered from the journal that came
with the grant: nothing is asked, nothing is sent. The first step that the journal doesn't know goes to the authority.
Step ids are explicit; one id is asked for once in a pass. Every method raises `Preempted` once the lease is lost and
`PassEnded` once the pass is over.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from tidefast.protocol.answers import JournalEntry, JournalPage, LeaseGrant, StepAnswer
from tidefast.protocol.canonical import BODY_BYTES_MAX, JSON, CanonicalError, call_digest, canonical
from tidefast.protocol.chat import MODEL_TOOL
from tidefast.protocol.ids import StepId, asked_by, is_id
from tidefast.protocol.points import Hook, Point
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.app import OnDrift
from tidefast.sdk.completion import CALLS_MAX, TURNS_MAX, Completion, LoopTool
from tidefast.sdk.errors import Error, Held, LimitReached, Misuse, PassEnded, Rejected
from tidefast.sdk.journal import Journal, body_of, is_same_call, receipt_of, value_of
from tidefast.sdk.line import UNDO_SUFFIX, WAIT_MS, Line, Question
from tidefast.sdk.tools import PythonTool
from tidefast.sdk.workspace import Workspace

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tidefast.sdk.tool_loop import LoopEnd

ENVELOPE_BYTES = 4_096  # what a call over HTTP has around a body
BODY_CHARS_SURE = (BODY_BYTES_MAX - ENVELOPE_BYTES) // 4  # short enough whatever its characters are


class Run:
    """One pass of a run, under one lease. Made by the worker; agents receive it."""

    def __init__(
        self,
        grant: LeaseGrant,
        line: Line,
        on_drift: OnDrift = "freeze",
        hook: Hook | None = None,
        tools: Mapping[str, PythonTool] = MappingProxyType({}),  # those of the agent's own program
    ) -> None:
        self.id: str = grant.run_id
        self.agent: str = grant.agent
        self.agent_version: str = grant.agent_version
        self.epoch: int = grant.epoch
        self.answered: list[str] = []  # effects that the books answered since this pass's newest checkpoint
        self._holder = grant.holder
        self._line, self._authority, self._token = line, line.authority, grant.token
        self._on_drift, self._hook, self._tools = on_drift, hook, tools
        self._journal = Journal(grant.journal, grant.journal_next, self._journal_page)
        self._asked: set[str] = set()
        self._effects_out = 0
        self._no_effects = asyncio.Event()
        self._no_effects.set()
        self._stored = grant.checkpoint
        self._count = 0  # the number of the newest checkpoint that this pass has asked for
        self._has_checkpointed = False
        self._state_json = grant.state_json
        self._checkpointing = asyncio.Lock()

    @property
    def state(self) -> Any:
        """The newest checkpoint's state, None if there is none.

        A pass that reads it before its first checkpoint goes on from there: its next checkpoint has the number after
        the stored one. A pass that never reads it runs from the top, and its n-th checkpoint has number n.
        """
        if not self._has_checkpointed:
            self._count = self._stored
        return msgspec.json.decode(self._state_json)

    async def tool(self, step_id: str, tool: str | PythonTool, /, **args: Any) -> Any:
        """Cause an effect, or answer what the books hold of it: the body of its receipt.

        Durable when it returns. Raises `Rejected` if the effect is finally refused, `Misuse` for arguments that are not
        JSON or, if the tool is this program's own, don't fit its function. A stored step with another call ends the
        pass and freezes the run, or answers the stored receipt (`on_drift="stored"`).
        """
        name = tool if isinstance(tool, str) else tool.name
        entry = self._journal.entries.get(self._first(step_id)) or await self._later(step_id)
        if entry is not None:
            return self._replay_tool(entry, name, args)
        args_json = self._call(step_id, self._tools.get(name) if isinstance(tool, str) else tool, args)
        with self._line.guard():
            if self._hook is not None:
                await self._reach("sdk.before_apply", step_id)
            answer = await self._effect(step_id, name, args_json)
            if self._hook is not None:
                await self._reach("sdk.after_apply", step_id)
        return body_of(self._receipt(step_id, answer))

    def workspace(self, name: str) -> Workspace:
        """A workspace by its name: files that outlive the sandbox they lie in. Runs may share one."""
        return Workspace(self, name)

    async def model(self, step_id: str, /, *, model: str, messages: Sequence[JSON], **options: Any) -> Completion:
        """Ask a model, or answer what the journal holds: one whole answer, paid for once.

        `options` are members of the request (`temperature`, `tools`, `response_format` …), sent as they are. With
        `stream=True` the upstream is asked for pieces, so that a silent one is noticed early; the answer is told whole
        all the same. Durable when it returns, and only then.
        Raises `Rejected` if the upstream refuses the request or never answers whole.
        """
        body = {"model": model, "messages": messages, **options}
        name = MODEL_TOOL + model
        entry = self._journal.entries.get(self._first(step_id)) or await self._later(step_id)
        if entry is not None:
            return Completion(step_id, self._replay_tool(entry, name, body))
        args_json = self._question(step_id, body)
        text = json.dumps(body, ensure_ascii=False)  # the order of members means something to models
        with self._line.guard():
            await self._reach("sdk.before_apply", step_id)
            asking = partial(self._authority.chat, self._token, step_id, text, WAIT_MS)
            answer = await self._effect(step_id, name, args_json, asking)
            await self._reach("sdk.after_apply", step_id)
        return Completion(step_id, body_of(self._receipt(step_id, answer)))

    def openai(self, step_id: str | None = None, **options: Any) -> "AsyncOpenAI":
        """A stock client of this authority's models: base URL, key, lease and (if given here) step are filled in.

        Each call is a step: name it here, or per call by `extra_headers={"Tidefast-Step": "plan"}`. Streams go through.
        A lost lease raises `Preempted` from the call. `options` go to the client. Needs the extra `openai`.
        """
        from tidefast.sdk.openai_client import client_of

        return client_of(self._authority, self._token, self._line, step_id, options)

    async def agent_loop(
        self,
        model: str,
        tools: Sequence[LoopTool],
        *,
        messages: Sequence[JSON],
        step: str = "loop",
        turns: int = TURNS_MAX,
        calls: int = CALLS_MAX,
        **options: Any,
    ) -> "LoopEnd":
        """Let a model ask for tools until it answers without asking for one (see `sdk.tool_loop`)."""
        from tidefast.sdk.tool_loop import ToolLoop

        return await ToolLoop(self, model, tools, step, turns, calls, options).play(messages)

    async def compensate(self, step_id: str, tool: str | PythonTool | None = None, /, **args: Any) -> Any:
        """Undo a step: the body of the undo's receipt. Durable when it returns.

        By the tool that the step's contract declares, or by the one given here with its arguments. The undo is a step
        of its own (`STEP~undo`) under a key of its own, finished once however often it is asked for.
        """
        undo_id = step_id + UNDO_SUFFIX
        entry = self._journal.entries.get(self._first(undo_id, of=step_id)) or await self._later(undo_id)
        if entry is not None:
            return self._settled(entry)
        given = None if tool is None else self._given(undo_id, tool, args)
        with self._line.guard():
            await self._reach("sdk.before_apply", undo_id)
            self._effects_out += 1
            self._no_effects.clear()
            try:
                answer = await self._line.ask(
                    lambda: self._authority.compensate(self._token, step_id, WAIT_MS, given), undo_id
                )
            finally:
                self._effect_back()
            await self._reach("sdk.after_apply", undo_id)
        return body_of(self._receipt(undo_id, answer))

    def _given(self, undo_id: str, tool: str | PythonTool, args: dict[str, Any]) -> tuple[str, str]:
        """The tool and arguments of an undo that the agent says."""
        known = self._tools.get(tool) if isinstance(tool, str) else tool
        return tool if isinstance(tool, str) else tool.name, self._call(undo_id, known, args)

    async def step(self, step_id: str, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a local function once and journal its value, which must be JSON. Durable when it returns.

        A later pass is answered with the journaled value. If the process dies before that, the function runs again, so
        it must cause no effect of its own. What it raises goes through: nothing is journaled, and the id is free again.
        """
        entry = self._journal.entries.get(self._first(step_id)) or await self._later(step_id)
        if entry is not None:
            if entry.kind != "local":
                self._drift(step_id, "a local step", f"the journal holds a call of a tool ({entry.kind})")
            return value_of(entry)
        try:
            with self._line.translated():
                value = function(*args)
                if inspect.isawaitable(value):
                    value = await value
            value_json = self._json(step_id, f"the value of {getattr(function, '__name__', 'the function')}", value)
        except BaseException:
            self._asked.discard(step_id)
            raise
        with self._line.guard():
            answer = await self._line.ask(
                lambda: self._authority.save_result(self._token, step_id, value_json), step_id
            )
        return self._receipt(step_id, answer)

    async def checkpoint(self, state: JSON) -> None:
        """Store the run's state, a JSON value, under the next number. Durable when it returns.

        Waits until the effects of parallel branches are settled. A checkpoint that an earlier pass has already stored
        is not sent again.
        """
        with self._line.guard():
            async with self._checkpointing:
                await self._no_effects.wait()
                self._line.check()
                self._has_checkpointed = True
                number = self._count + 1
                if number <= self._stored:
                    self._count = number
                    return
                state_json = self._json(f"checkpoint {number}", "its state", state)
                await self._save(number, state_json)

    def same_state(self) -> tuple[int, str]:
        """A checkpoint after the newest one that changes no state."""
        return self._stored + 1, self._state_json

    async def _save(self, number: int, state_json: str) -> None:
        await self._reach("sdk.before_checkpoint", "", number=number)
        answered = len(self.answered)
        answer = await self._line.ask_settled(lambda: self._authority.checkpoint(self._token, number, state_json))
        if isinstance(answer, Refused):
            raise self._refusal(f"checkpoint {number}", answer)
        self._count = self._stored = number
        self._state_json = state_json
        del self.answered[:answered]  # a run is asked only for what was settled since its newest checkpoint
        await self._reach("sdk.after_checkpoint", "", number=number)

    def _first(self, step_id: str, of: str = "") -> str:
        """The id, once checked: well-formed, and not asked for before in this pass."""
        if self._line.ended is not None:  # a journaled answer needs no more: it writes nothing, so no clock is read
            self._line.check()
        if step_id in self._asked:
            hint = "give each step of a pass an id of its own, in a loop by its place in the loop"
            raise Misuse(f"step {step_id} is asked for twice in one pass", "one id is one effect", hint)
        is_call = asked_by(StepId(step_id)) in self._asked  # of an answer that this pass has asked for
        if step_id not in self._journal.entries and not is_id(of or step_id) and not is_call:
            hint = "1 to 128 letters, digits, dots, dashes and underscores, not starting with a dot or dash"
            raise Misuse(f"{step_id[:160]!r} can't be the id of a step", hint)
        self._asked.add(step_id)
        return step_id

    async def _later(self, step_id: str) -> JournalEntry | None:
        """The step from those pages of the journal that aren't here yet."""
        if not self._journal.next:
            return None
        with self._line.guard():
            return await self._journal.find_later(step_id)

    async def _journal_page(self, after: int) -> JournalPage:
        page = await self._line.ask(lambda: self._authority.journal(self._token, after))
        if isinstance(page, Refused):
            raise self._refusal("the journal", page)
        return page

    def _replay_tool(self, entry: JournalEntry, tool: str, args: dict[str, Any]) -> Any:
        """The journal's answer to a call, if it is the call that the journal holds."""
        try:
            is_same = entry.kind == "tool" and is_same_call(entry, tool, args)
        except CanonicalError as error:
            raise _not_json(entry.step_id, "its arguments", error) from error
        if not is_same and (self._on_drift == "freeze" or entry.kind != "tool"):
            asked = call_digest(tool, canonical(args))
            self._drift(entry.step_id, f"{tool} with call digest {asked}", f"the stored one is {entry.call_digest}")
        return self._settled(entry)

    def _settled(self, entry: JournalEntry) -> Any:
        self.answered.append(entry.step_id)
        if entry.state == "rejected":
            raise Rejected(entry.step_id, entry.reason, receipt_of(entry))
        return body_of(receipt_of(entry))

    async def _effect(
        self, step_id: str, tool: str, args_json: str, asking: Question[StepAnswer] | None = None
    ) -> StepAnswer | Refused:
        """Ask for an effect, counted while it is out. Drift is met as the agent said it should be."""
        self._effects_out += 1
        self._no_effects.clear()
        try:
            line, authority, token = self._line, self._authority, self._token
            applying = asking or (lambda: authority.apply(token, step_id, tool, args_json, WAIT_MS))
            answer = await line.ask(applying, step_id)
            if not isinstance(answer, Refused) or answer.code != "step_conflict":
                return answer
            if self._on_drift == "stored" and answer.reason != "other_kind":
                return await line.ask(lambda: authority.apply(token, step_id, tool, None, WAIT_MS), step_id)
        finally:
            self._effect_back()
        asked = f"{tool} with call digest {call_digest(tool, args_json)}"
        self._drift(step_id, asked, f"the stored one is {answer.facts.get('stored_digest', answer.reason)}")

    def _effect_back(self) -> None:
        self._effects_out -= 1
        if not self._effects_out:
            self._no_effects.set()

    def _drift(self, step_id: str, asked: str, stored: str) -> NoReturn:
        """The agent's code no longer makes the call that the books hold: a person must look."""
        why = f"step {step_id} drifted: asked for {asked}; {stored}"
        ended = PassEnded(
            self.id, "drift", why, "the run is frozen; release code that makes the stored call, then thaw it"
        )
        self._line.end(ended)
        raise ended

    def _receipt(self, step_id: str, answer: StepAnswer | Refused) -> Any:
        if isinstance(answer, Refused):
            if answer.code == "step_rejected":
                self.answered.append(step_id)
            raise self._refusal(f"step {step_id}", answer, step_id)
        if answer.replayed:
            self.answered.append(step_id)
        return msgspec.json.decode(answer.receipt_json)

    def _refusal(self, what: str, refused: Refused, step_id: str = "") -> Exception:
        """A refusal that is neither to be waited for nor the end of the pass, as an exception for the agent."""
        if refused.code == "step_rejected":
            return Rejected(step_id, refused.reason, refused.facts.get("receipt"))
        if refused.code == "limit_reached":
            return LimitReached(step_id, refused.facts)
        if refused.code == "step_held":
            return Held(step_id, refused.reason)
        if refused.code == "step_conflict":
            self._drift(step_id, "a step of this kind", f"the journal holds another one ({refused.reason})")
        told = ", ".join(f"{name} {value}" for name, value in refused.facts.items() if name != "receipt")
        why = f"{refused.code} ({refused.reason})" + (f": {told}" if told else "")
        kind = Misuse if refused.code in ("invalid", "not_found", "already_decided") else Error
        return kind(f"{what} was refused", why, "nothing was sent; mend the call")

    def _call(self, step_id: str, tool: PythonTool | None, args: dict[str, Any]) -> str:
        """A call's arguments as they are sent. One that can't be made is said before anything is; its id stays free."""
        try:
            misfit = "" if tool is None else tool.misfit(args)
            if tool is not None and misfit:
                hint = f"call it as {tool.name}{tool.signature}"
                raise Misuse(f"step {step_id}: {tool.name} can't be called like this", misfit, hint)
            return self._json(step_id, "its arguments", args)
        except Misuse:
            self._asked.discard(step_id)
            raise

    def _question(self, step_id: str, body: dict[str, Any]) -> str:
        """A request to a model in canonical form. One that can't be sent leaves its id free."""
        try:
            return self._json(step_id, "its request", body)
        except Misuse:
            self._asked.discard(step_id)
            raise

    def _json(self, step_id: str, part: str, value: Any) -> str:
        try:
            return within_limit(canonical(value))
        except CanonicalError as error:
            raise _not_json(step_id, part, error) from error

    async def _reach(self, point: Point, step_id: str, **more: int) -> None:
        if self._hook is not None:
            facts: Mapping[str, str | int] = {
                "run": self.id,
                "step": step_id,
                "epoch": self.epoch,
                "holder": self._holder,
                **more,
            }
            await self._hook(point, facts)


def within_limit(text: str) -> str:
    """The text, if a call can carry it. Raises `CanonicalError` if it is too long."""
    if len(text) > BODY_CHARS_SURE and len(text.encode()) > BODY_BYTES_MAX - ENVELOPE_BYTES:
        raise CanonicalError(f"it has {len(text.encode()):,} bytes, {BODY_BYTES_MAX - ENVELOPE_BYTES:,} can be stored")
    return text


def _not_json(step_id: str, part: str, error: CanonicalError) -> Misuse:
    hint = "pass dicts, lists, texts, numbers, booleans and None"
    return Misuse(f"{step_id}: {part} can't be journaled", f"not JSON: {error}", hint)
