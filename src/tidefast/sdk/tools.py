"""Python tools: functions with a contract.

A function becomes a tool by what its decorator says of its effect. The contract is built by the same reader as one from
a TOML file, so both know the same members and the same faults. What a tool raises is what the books hold: `Refused` and
`NotSent` are definite, any other exception is doubt.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tidefast.protocol.canonical import JSON
from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import PYTHON_KEY, Contract
from tidefast.protocol.ids import is_id
from tidefast.sdk.errors import Misuse, NotSent, Refused

Function = Callable[..., Any]
Duration = str | float | timedelta  # "24h", seconds, or a timedelta
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms"))


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A function and its contract. `takes_key`: it has a parameter `key`, which receives the idempotency key.

    `signature` is the function's without that parameter: what an agent may pass.
    """

    name: str
    contract: Contract
    function: Function
    takes_key: bool
    signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain function, unfenced: for tests of the tool itself. Agents call it through `run.tool`."""
        return self.function(*args, **kwargs)

    def misfit(self, args: Mapping[str, Any]) -> str:
        """Why the function can't be called with what an agent passed; empty if it can."""
        try:
            self.signature.bind(**args)
        except TypeError as error:
            return str(error)
        return ""

    def raising(self, refused: Callable[[str, JSON], Exception], not_sent: Callable[[str], Exception]) -> Function:
        """The function with `Refused` and `NotSent` put into the words of whoever runs it.

        Arguments that don't fit it are `not_sent`: the function never began.
        """
        function = self.function

        def check(args: Mapping[str, Any]) -> None:
            passed = {name: value for name, value in args.items() if name != "key"} if self.takes_key else args
            misfit = self.misfit(passed)
            if misfit:
                raise not_sent(misfit)

        if inspect.iscoroutinefunction(function):

            async def call_async(**args: Any) -> Any:
                check(args)
                try:
                    return await function(**args)
                except Refused as refusal:
                    raise refused(refusal.why, refusal.body) from refusal
                except NotSent as error:
                    raise not_sent(str(error)) from error

            return call_async

        def call(**args: Any) -> Any:
            check(args)
            try:
                return function(**args)
            except Refused as refusal:
                raise refused(refusal.why, refusal.body) from refusal
            except NotSent as error:
                raise not_sent(str(error)) from error

        return call


def python_tool(function: Function, name: str | None, members: Mapping[str, object]) -> PythonTool:
    """A tool from a function and the members of its contract. Raises `Misuse` naming every fault."""
    tool = str(name or getattr(function, "__name__", ""))
    where = f"tool {tool}"
    if not is_id(tool):
        raise Misuse(f"{where} needs another name", "letters, digits, dot, dash and underscore, at most 128")
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    unnamed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if unnamed:
        raise Misuse(f"{where} has parameters without names: {', '.join(unnamed)}", "a tool is called by name")
    takes_key = any(p.name == "key" for p in parameters)
    table: dict[str, object] = {"kind": "python", **({"key": PYTHON_KEY} if takes_key else {})}
    table.update((member, value) for member, value in members.items() if value is not None)
    contract, problems = parse_contract(tool, table)
    if contract is None:
        faults = "; ".join(map(str, problems))
        hint = "" if takes_key or members.get("key_ttl") is None else "give the function a parameter `key`"
        raise Misuse(f"{where} has no usable contract", faults, hint)
    passed = signature.replace(parameters=[p for p in parameters if p.name != "key"])
    return PythonTool(tool, contract, function, takes_key, passed)


def duration_text(name: str, value: Duration | None) -> str | None:
    """A duration as contracts spell it; text is passed on for the contract's own check."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise Misuse(f"{name} is no duration", 'expected text like "24h", seconds, or a timedelta')
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not 0 <= seconds < 1e9:
        raise Misuse(f"{name} is no duration", f"expected 0 to 1e9 seconds, found {seconds}")
    ms = round(seconds * 1_000)
    size, unit = next((size, unit) for size, unit in _UNITS if (ms % size == 0 and ms >= size) or size == 1)
    return f"{ms // size}{unit}"


def durations(**members: Duration | None) -> dict[str, str | None]:
    """Members that are durations, as contracts spell them."""
    return {name: duration_text(name, value) for name, value in members.items()}


def tool_table(member: str, table: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """`undo={"tool": …}` and its like as contracts spell it: a `PythonTool` by its name, `lag` as text."""
    if not isinstance(table, Mapping):
        return table
    spelled = dict(table)
    if isinstance(spelled.get("tool"), PythonTool):
        spelled["tool"] = spelled["tool"].name
    if "lag" in spelled:
        spelled["lag"] = duration_text(f"{member}.lag", spelled["lag"])
    return spelled
