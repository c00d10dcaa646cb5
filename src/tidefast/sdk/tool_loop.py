"""The tool loop: a model asks, tools are called as fenced steps, results go back, until it asks for none.

Turn n is the model step `STEP.n`; the call at place p of its answer is the step `STEP.n~p`. So ids follow from the
journal alone, and a successor makes the very calls that its predecessor made: the finished ones answer from the books.
The authority lets no call out before the answer that asks for it is committed.

A refusal is told to the model as a sentence, because it may know another way. What ends the pass (a lost lease, a held
step) ends the loop.
"""

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tidefast.protocol.canonical import JSON, CanonicalError, canonical
from tidefast.protocol.chat import ToolCall
from tidefast.sdk.completion import Completion, LoopTool
from tidefast.sdk.errors import Error, LimitReached, Misuse, Rejected
from tidefast.sdk.tools import PythonTool

if TYPE_CHECKING:
    from tidefast.sdk.run import Run

SHOWN_CHARS = 2_000  # of a refusal's body, in the sentence that the model reads


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """How a loop ended: its last answer, and the whole conversation with it."""

    answer: Completion
    messages: tuple[JSON, ...]
    turns: int
    calls: int

    @property
    def text(self) -> str:
        return self.answer.text


@dataclass(frozen=True, slots=True)
class _Offer:
    """One tool as the model sees it, and how it is called: through the gateway, or here and journaled."""

    spec: Mapping[str, Any]
    local: Callable[..., Any] | None = None
    arguments: type[msgspec.Struct] | None = None


class ToolLoop:
    """One loop of one pass."""

    def __init__(
        self,
        run: "Run",
        model: str,
        tools: Sequence[LoopTool],
        step: str,
        turns: int,
        calls: int,
        options: Mapping[str, Any],
    ) -> None:
        self._run, self._model, self._step = run, model, step
        self._turns_max, self._calls_max, self._options = turns, calls, options
        self._offers = dict(map(_offer, tools))
        self._calls = 0
        if len(self._offers) != len(tools):
            raise Misuse(f"loop {step} has two tools of one name", "a model calls a tool by its name")

    async def play(self, messages: Sequence[JSON]) -> LoopEnd:
        """The loop's end. Raises `Error` when a limit is reached, or an answer was cut at its own."""
        said = list(messages)
        specs = [offer.spec for offer in self._offers.values()]
        tools = {"tools": specs} if specs else {}
        for turn in range(self._turns_max):
            step_id = f"{self._step}.{turn}"
            answer = await self._run.model(step_id, model=self._model, messages=said, **tools, **self._options)
            said.append(answer.message)
            asked = answer.tool_calls
            if answer.finish_reason in ("length", "content_filter"):
                why = f"it ended with {answer.finish_reason!r}"
                raise Error(f"the answer of step {step_id} is cut", why, "raise max_tokens, or ask otherwise")
            if not asked:
                return LoopEnd(answer, tuple(said), turn + 1, self._calls)
            self._calls += len(asked)
            if self._calls > self._calls_max:
                why = f"the model asked for {self._calls}"
                raise Error(f"loop {self._step} may make {self._calls_max} calls", why, "raise calls=, or stop here")
            said += await self._made(step_id, asked)
        raise Error(f"loop {self._step} is not done after {self._turns_max} turns", "", "raise turns=, or stop here")

    async def _made(self, step_id: str, asked: Sequence[ToolCall]) -> list[JSON]:
        """The results of an answer's calls, in their order; they are made side by side."""
        results = await asyncio.gather(*(self._one(f"{step_id}~{call.place}", call) for call in asked))
        return [
            {"role": "tool", "tool_call_id": call.ref, "content": result}
            for call, result in zip(asked, results, strict=True)
        ]

    async def _one(self, step_id: str, call: ToolCall) -> str:
        """What one call brought, as the model reads it."""
        offer = self._offers.get(call.name)
        if offer is None:
            return f"There is no tool {call.name or 'without a name'}; there are: {', '.join(self._offers) or 'none'}."
        args = _arguments(call)
        if isinstance(args, str):
            return args
        try:
            if offer.local is None:
                return _shown(await self._run.tool(step_id, call.name, **args))
            return await self._here(step_id, offer, args)
        except Rejected as rejected:
            return _refused(call.name, rejected)
        except LimitReached as reached:
            return f"The call of {call.name} was not made, because a limit is reached: {reached.why}."
        except Misuse as misuse:
            return f"The call of {call.name} was not made: {misuse.why or misuse.what}."

    async def _here(self, step_id: str, offer: _Offer, args: Mapping[str, Any]) -> str:
        """A function of the agent's own program: journaled, so that it must cause no effect of its own."""
        if offer.local is None or offer.arguments is None:
            raise TypeError("only a local tool is called here")
        try:
            read = msgspec.convert(args, offer.arguments)
        except msgspec.ValidationError as error:
            return f"The call was not made: {error}."
        members = {name: getattr(read, name) for name in offer.arguments.__struct_fields__}
        function = offer.local

        async def called() -> Any:
            value = function(**members)
            return msgspec.to_builtins(await value if inspect.isawaitable(value) else value)

        return _shown(await self._run.step(step_id, called))


def _offer(tool: LoopTool) -> tuple[str, _Offer]:
    if isinstance(tool, PythonTool):
        _, spec = _spec(tool.name, tool.function, tool.signature)
        return tool.name, _Offer(spec)
    if isinstance(tool, Mapping):
        function = tool.get("function")
        named = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(named, str):
            raise Misuse("a tool has no name", 'expected {"type": "function", "function": {"name": …}}')
        return named, _Offer(tool)
    name = getattr(tool, "__name__", "")
    arguments, spec = _spec(name, tool, inspect.signature(tool))
    return name, _Offer(spec, tool, arguments)


def _spec(name: str, function: Callable[..., Any], signature: inspect.Signature) -> tuple[type[msgspec.Struct], Any]:
    """A function's arguments as a structure, and as the model is told of them."""
    hints = typing.get_type_hints(function)
    fields: list[Any] = []
    for parameter in signature.parameters.values():
        kind = hints.get(parameter.name, Any)
        has_default = parameter.default is not inspect.Parameter.empty
        fields.append((parameter.name, kind, parameter.default) if has_default else (parameter.name, kind))
    arguments = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    definitions = msgspec.json.schema(arguments)["$defs"]
    schema = definitions.pop("Arguments")
    schema.pop("title", None)
    if definitions:
        schema["$defs"] = definitions
    described = {"name": name, "description": inspect.getdoc(function) or name, "parameters": schema}
    return arguments, {"type": "function", "function": described}


def _arguments(call: ToolCall) -> dict[str, Any] | str:
    """The call's arguments, or a sentence on what is wrong with them."""
    try:
        args = json.loads(call.arguments or "{}")
        canonical(args)
    except (ValueError, CanonicalError, RecursionError) as error:
        return f"The arguments of {call.name} are no JSON: {error}."
    return args if isinstance(args, dict) else f"The arguments of {call.name} must be a JSON object."


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else canonical(value)


def _refused(name: str, rejected: Rejected) -> str:
    """A refusal as a sentence: what was refused, that nothing happened, and the provider's own words."""
    words = "" if rejected.body is None else f" Its answer: {_shown(rejected.body)[:SHOWN_CHARS]}"
    return f"The tool {name} refused this call for good ({rejected.reason}); nothing took effect.{words}"
