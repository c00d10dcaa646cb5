"""What a program offers: its agents and its python tools.

    import tidefast as tf

    app = tf.App()

    @app.tool(key_ttl="24h")
    def charge(order: str, cents: int, key: str) -> dict: ...

    @app.agent(version="1")
    async def refund(run: tf.Run, ticket: Ticket) -> str: ...

Everything that can be wrong with a declaration is said where it stands, at import.
"""

import importlib
import inspect
import os
import sys
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import msgspec

from tidefast.protocol.canonical import JSON
from tidefast.protocol.ids import is_id
from tidefast.sdk.errors import Misuse
from tidefast.sdk.tools import Duration, Function, PythonTool, durations, python_tool, tool_table

if typing.TYPE_CHECKING:
    from tidefast.sdk.run import Run

OnDrift = Literal["freeze", "stored"]
AgentFunction = TypeVar("AgentFunction", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """An agent: its function, how its input is read, and what it says about itself."""

    name: str
    version: str
    accepts: tuple[str, ...]  # older versions whose runs this one can go on with
    dropped: tuple[str, ...]  # steps of older versions that a run may complete without
    on_drift: OnDrift
    function: Callable[..., Awaitable[Any]]
    decoder: "msgspec.json.Decoder[Any]"

    @property
    def versions(self) -> list[str]:
        return [self.version, *self.accepts]

    def start(self, run: "Run", input_json: str) -> Awaitable[Any]:
        """The agent's coroutine. Raises `Misuse` if the run's input doesn't fit the function's annotation."""
        try:
            value = self.decoder.decode(input_json)
        except msgspec.ValidationError as error:
            hint = "start the run with another input, or release a version that accepts this one"
            raise Misuse(f"the input doesn't fit agent {self.name}", str(error), hint) from error
        return self.function(run, value)


class App:
    """The agents and python tools of one program.

    `on_drift` says what happens when an agent asks for a step with another call than the stored one: the run is frozen
    for a person (`freeze`), or the stored receipt is the answer (`stored`). An agent may say otherwise for itself.
    """

    def __init__(self, *, on_drift: OnDrift = "freeze") -> None:
        self.on_drift = _drift(on_drift)
        self.agents: dict[str, AgentSpec] = {}
        self.tools: dict[str, PythonTool] = {}

    @overload
    def agent(self, function: AgentFunction, /) -> AgentFunction: ...

    @overload
    def agent(
        self,
        /,
        *,
        name: str | None = None,
        version: str = "1",
        accepts: Sequence[str] = (),
        dropped: Sequence[str] = (),
        on_drift: OnDrift | None = None,
    ) -> Callable[[AgentFunction], AgentFunction]: ...

    def agent(
        self,
        function: AgentFunction | None = None,
        /,
        *,
        name: str | None = None,
        version: str = "1",
        accepts: Sequence[str] = (),
        dropped: Sequence[str] = (),
        on_drift: OnDrift | None = None,
    ) -> Any:
        """Declare an async function `(run, input)` as an agent. Raises `Misuse`.

        `version` is recorded with each run; a worker takes runs of this version and of those in `accepts`. `dropped`
        names steps of older versions that a run may complete without having asked for them.
        """

        def declare(function: AgentFunction) -> AgentFunction:
            agent = name or function.__name__
            if agent in self.agents:
                raise Misuse(f"agent {agent} is declared twice", "", "give one of them a name of its own")
            versions = (version, *accepts)
            if not is_id(agent) or not all(is_id(str(each)) for each in versions):
                raise Misuse(f"agent {agent} needs another name or version", _ID_FORM)
            decoder = _input_decoder(agent, function)
            drift = self.on_drift if on_drift is None else _drift(on_drift)
            spec = AgentSpec(agent, version, tuple(accepts), tuple(dropped), drift, function, decoder)
            self.agents[agent] = spec
            return function

        return declare if function is None else declare(function)

    @overload
    def tool(self, function: Function, /) -> PythonTool: ...

    @overload
    def tool(
        self,
        /,
        *,
        name: str | None = None,
        effect: str = "external",
        key_form: str | None = None,
        key_ttl: Duration | None = None,
        key_scope: str | None = None,
        margin: Duration | None = None,
        timeout: Duration | None = None,
        retries: int = 0,
        stored_failures: bool = False,
        undo: Mapping[str, Any] | None = None,
        args: Mapping[str, JSON] | None = None,
        ttl_from: str | None = None,
        expect: Mapping[str, JSON] | None = None,
        probe: Mapping[str, Any] | None = None,
        probe_tries: int | None = None,
        undo_safe_if_absent: bool = False,
        independent: bool = False,
        require: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        secret: Sequence[str] = (),
    ) -> Callable[[Function], PythonTool]: ...

    def tool(
        self,
        function: Function | None = None,
        /,
        *,
        name: str | None = None,
        effect: str = "external",
        key_form: str | None = None,
        key_ttl: Duration | None = None,
        key_scope: str | None = None,
        margin: Duration | None = None,
        timeout: Duration | None = None,
        retries: int = 0,
        stored_failures: bool = False,
        undo: Mapping[str, Any] | None = None,
        args: Mapping[str, JSON] | None = None,
        ttl_from: str | None = None,
        expect: Mapping[str, JSON] | None = None,
        probe: Mapping[str, Any] | None = None,
        probe_tries: int | None = None,
        undo_safe_if_absent: bool = False,
        independent: bool = False,
        require: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        secret: Sequence[str] = (),
    ) -> Any:
        """Declare a sync or async function as a tool, with what it promises. Raises `Misuse` naming every fault.

        A function with a parameter `key` receives the idempotency key; `key_ttl` says how long the other side surely
        remembers it (without it, a doubt is held for a person). Durations are "30s", seconds, or timedeltas. `args` is
        a JSON Schema. What nobody declares is the most dangerous kind: external, no memory of keys.
        """
        members: dict[str, object] = {
            "effect": effect,
            "key_form": key_form,
            "key_scope": key_scope,
            "retries": retries,
            **durations(key_ttl=key_ttl, margin=margin, timeout=timeout),
            "stored_failures": stored_failures,
            "undo": tool_table("undo", undo),
            "args": args,
            "ttl_from": ttl_from,
            "expect": expect,
            "probe": tool_table("probe", probe),
            "probe_tries": probe_tries,
            "undo_safe_if_absent": undo_safe_if_absent,
            "independent": independent,
            "require": tool_table("require", require),
            "limits": limits,
            "secret": list(secret),
        }

        def declare(function: Function) -> PythonTool:
            made = python_tool(function, name, members)
            if made.name in self.tools:
                raise Misuse(f"tool {made.name} is declared twice", "", "give one of them a name of its own")
            self.tools[made.name] = made
            return made

        return declare if function is None else declare(function)

    def versions(self) -> dict[str, list[str]]:
        """What a claim asks for: each agent with the versions whose runs it can drive."""
        return {name: spec.versions for name, spec in self.agents.items()}


_ID_FORM = "names and versions are 1 to 128 letters, digits, dots, dashes and underscores"


def _drift(value: OnDrift) -> OnDrift:
    if value not in ("freeze", "stored"):
        raise Misuse("on_drift is unknown", f'expected "freeze" or "stored", found {value!r}')
    return value


def _input_decoder(agent: str, function: Callable[..., Any]) -> "msgspec.json.Decoder[Any]":
    """Reads the input as the second parameter is annotated: a Struct, a dataclass, a dict, text, or anything."""
    if not inspect.iscoroutinefunction(function):
        raise Misuse(f"agent {agent} is not an async function", "", "write it as `async def`")
    parameters = list(inspect.signature(function).parameters.values())
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if len(parameters) < 2 or len(needed) > 2 or parameters[1].kind is parameters[1].KEYWORD_ONLY:
        raise Misuse(f"agent {agent} takes the wrong parameters", "expected (run, input)")
    try:
        annotation = typing.get_type_hints(function).get(parameters[1].name, Any)
    except NameError as error:
        hint = "move the type to the module's top level, or don't annotate the input"
        raise Misuse(f"agent {agent} annotates its input with an unknown type", str(error), hint) from error
    try:
        return msgspec.json.Decoder(annotation)
    except TypeError as error:
        hint = "annotate the input with a dataclass, a msgspec Struct, dict or str"
        raise Misuse(f"agent {agent} annotates its input with a type that JSON can't fill", str(error), hint) from error


def load_app(name: str) -> App:
    """The `App` at "module:attribute", the working directory being importable. Raises `Misuse`.

    An error inside the module itself is not caught: its own traceback says most.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise Misuse(f"{name!r} names no app", "expected MODULE:ATTRIBUTE, like refunds:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        hint = "start in the directory that holds it, or install it"
        raise Misuse(f"there is no module {error.name}", "", hint) from error
    if not hasattr(module, attribute):
        raise Misuse(f"module {module_name} has no {attribute}", "", f"define it there: {attribute} = tidefast.App()")
    app = getattr(module, attribute)
    if not isinstance(app, App):
        raise Misuse(f"{name} is not an App", f"it is a {type(app).__name__}")
    return app
