"""Answers of models that speak the chat completions protocol: when one is whole, and what it says.

A cut stream is not an answer. An answer is whole when each of its choices has a `finish_reason` and, if it was
streamed, the closing `[DONE]` came; only a whole one may be committed, and only what was committed may be acted on.
`Fold` reads a stream event by event and gives back the bytes of each event as they came, so that a relay can pass them
on unchanged and hold back the end until the answer is durable.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MODEL_TOOL = "model:"  # in front of a model's name, in place of a tool's; no tool's name can hold a colon
EVENT_BYTES_MAX = 1_048_576
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_SET_ONCE = frozenset(("role", "id", "type", "object", "model", "finish_reason", "index"))


class ChatCall(NamedTuple):
    """What the gateway has to know of a request; everything else goes through untouched."""

    model: str
    is_stream: bool
    wants_usage: bool  # whether the caller asked for the usage at a stream's end
    answer_tokens: int | None  # the most that the caller lets an answer cost, of all choices; None: it didn't say


class Usage(NamedTuple):
    """What the provider says that an answer cost."""

    input_tokens: int
    output_tokens: int


class StreamEvent(NamedTuple):
    """One event of a stream: its bytes with the blank line, and whether it belongs to the end of the answer."""

    raw: bytes
    is_end: bool
    is_usage: bool  # it holds nothing but the usage


def read_call(body: object) -> ChatCall | str:
    """What a request asks for, or what is wrong with it."""
    if not isinstance(body, Mapping):
        return "expected a JSON object"
    model, messages, is_stream = body.get("model"), body.get("messages"), body.get("stream")
    if not isinstance(model, str) or not 1 <= len(model) <= 200 or not model.isprintable():
        return "`model` must name a model in 1 to 200 printable characters"
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list with at least one message"
    if is_stream is not None and not isinstance(is_stream, bool):
        return "`stream` must be true or false"
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    choices = 1 if body.get("n") is None else body.get("n")
    for name, value in (("max_tokens", 1 if most is None else most), ("n", choices)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_000_000:
            return f"`{name}` must be an integer from 1 to 1,000,000"
    options = body.get("stream_options")
    wants_usage = isinstance(options, Mapping) and options.get("include_usage") is True
    tokens = most * choices if isinstance(most, int) and isinstance(choices, int) else None
    return ChatCall(model, bool(is_stream), wants_usage, tokens)


def usage_of(body: object) -> Usage | None:
    """The usage that an answer or a last event states; None if it states none that can be read."""
    usage = body.get("usage") if isinstance(body, Mapping) else None
    if not isinstance(usage, Mapping):
        return None
    counts = [usage.get("prompt_tokens"), usage.get("completion_tokens", 0)]
    if all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
        return Usage(*counts)
    return None


def unfinished(body: object) -> str:
    """Why this is no whole answer; empty if it is one."""
    if not isinstance(body, Mapping):
        return "answer_unreadable"
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return "answer_incomplete"
    for choice in choices:
        if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
            return "answer_incomplete"
        if not isinstance(choice.get("finish_reason"), str):
            return "answer_incomplete"
    return ""


class Fold:
    """One stream on its way: fed with bytes as they come, it folds them into the answer that they spell."""

    def __init__(self) -> None:
        self.is_done = False  # `[DONE]` came
        self.fault = ""  # why no answer can come of it any more
        self.usage: Usage | None = None
        self._rest = b""
        self._is_ending = False
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def feed(self, data: bytes) -> list[StreamEvent]:
        """The events that are whole with this. What comes after a fault or after `[DONE]` is not looked at."""
        self._rest += data
        events: list[StreamEvent] = []
        start = 0
        for hit in _EVENT_END.finditer(self._rest):
            events.append(self._event(self._rest[start : hit.end()]))
            start = hit.end()
        self._rest = self._rest[start:]
        if len(self._rest) > EVENT_BYTES_MAX:
            self.fault, self._rest = self.fault or "event_too_large", b""
        return events

    def body(self) -> dict[str, Any]:
        """The answer so far, in the form of one that was not streamed."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._top, "object": "chat.completion", "choices": choices}

    def unfinished(self) -> str:
        """Why this stream, which has ended, is no whole answer; empty if it is one."""
        return self.fault or ("" if self.is_done else "stream_cut") or unfinished(self.body())

    def _event(self, raw: bytes) -> StreamEvent:
        lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
        data = b"\n".join(lines)
        is_usage = False
        if data == b"[DONE]":
            self.is_done = self._is_ending = True
        elif data and not self.fault and not self.is_done:
            is_usage = self._chunk(data)
        return StreamEvent(raw, self._is_ending, is_usage)

    def _chunk(self, data: bytes) -> bool:
        """Fold one chunk; answers whether it holds nothing but the usage."""
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if not isinstance(choices, list):
            self.fault = "stream_error" if isinstance(chunk, dict) and "error" in chunk else "stream_unreadable"
            self._is_ending = True
            return False
        self.usage = usage_of(chunk) or self.usage
        self._top.update((name, value) for name, value in chunk.items() if name != "choices" and value is not None)
        for choice in choices:
            if not isinstance(choice, dict) or not isinstance(choice.get("index", 0), int):
                self.fault, self._is_ending = "stream_unreadable", True
                return False
            self._choice(choice)
        return not choices and chunk.get("usage") is not None

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index", 0)
        known = self._choices.setdefault(index, {"index": index, "message": {}, "finish_reason": None})
        delta = choice.get("delta")
        if isinstance(delta, dict):
            _merge(known["message"], delta)
        _merge(known, {name: value for name, value in choice.items() if name not in ("delta", "message")})
        if choice.get("finish_reason") is not None:
            self._is_ending = True


def _merge(known: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a piece: texts are continued, numbered parts are found by their number, everything else is replaced."""
    for name, value in delta.items():
        before = known.get(name)
        if value is None:
            continue
        if isinstance(value, list):
            known[name] = _merged_list(before if isinstance(before, list) else [], value)
        elif isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        elif isinstance(before, str) and isinstance(value, str) and name not in _SET_ONCE:
            known[name] = before + value
        else:
            known[name] = value


def _merged_list(before: list[Any], pieces: list[Any]) -> list[Any]:
    parts = list(before)
    for piece in pieces:
        number = piece.get("index") if isinstance(piece, dict) else None
        known = next(
            (p for p in parts if number is not None and isinstance(p, dict) and p.get("index") == number), None
        )
        if known is None:
            parts.append(piece)
        else:
            _merge(known, piece)
    return parts


class ToolCall(NamedTuple):
    """One call that a model asked for, by its place in the journaled answer; the id that the model minted is `ref`."""

    place: int
    ref: str
    name: str
    arguments: str


def tool_calls(body: object) -> tuple[ToolCall, ...]:
    """The calls of the first choice of a whole answer, in their order. A malformed one has an empty name."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    message = choices[0].get("message") if isinstance(choices, list) and choices else None
    asked = message.get("tool_calls") if isinstance(message, Mapping) else None
    found: list[ToolCall] = []
    for place, call in enumerate(asked if isinstance(asked, list) else ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        members = function if isinstance(function, Mapping) else {}
        ref = call.get("id") if isinstance(call, Mapping) else None
        name, arguments = members.get("name"), members.get("arguments")
        found.append(
            ToolCall(
                place,
                ref if isinstance(ref, str) else "",
                name if isinstance(name, str) else "",
                arguments if isinstance(arguments, str) else "",
            )
        )
    return tuple(found)
