"""A model's whole answer, as agents see it, and what an agent loop is made of."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tidefast.protocol.canonical import JSON
from tidefast.protocol.chat import ToolCall, Usage, tool_calls, usage_of
from tidefast.sdk.errors import Error
from tidefast.sdk.tools import PythonTool

TURNS_MAX = 16
CALLS_MAX = 64
LoopTool = PythonTool | Callable[..., Any] | Mapping[str, Any]


class Completion:
    """One journaled answer. `body` is the chat completion as the upstream gave it, folded if it was streamed."""

    def __init__(self, step_id: str, body: Any) -> None:
        self.step_id = step_id
        self.body: dict[str, Any] = body

    @property
    def message(self) -> dict[str, Any]:
        """The first choice's message, as a conversation goes on with it."""
        found: dict[str, Any] = self.body["choices"][0]["message"]
        return found

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def finish_reason(self) -> str:
        return str(self.body["choices"][0]["finish_reason"])

    @property
    def usage(self) -> Usage | None:
        return usage_of(self.body)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that it asks for. Call n is made as step `STEP~n`, never under the id that the model minted."""
        return tool_calls(self.body)

    def json(self) -> JSON:
        """The text as the JSON value that it spells. Raises `Error` if it spells none, or was cut at its limit."""
        if self.finish_reason == "length":
            raise Error(
                f"the answer of step {self.step_id} is cut", "it reached its limit of tokens", "raise max_tokens"
            )
        try:
            value: JSON = json.loads(self.text)
        except ValueError as error:
            raise Error(f"the answer of step {self.step_id} is no JSON", str(error), "ask as another step") from error
        return value

    def __repr__(self) -> str:
        return f"Completion({self.step_id!r}, {self.finish_reason!r}, {self.text[:60]!r})"
