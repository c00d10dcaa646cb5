"""Declarations: what an app accepts, and what it says about what it doesn't."""

import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidefast as tf
from tidefast.sdk.app import load_app
from tidefast.sdk.tools import duration_text


class Struct(msgspec.Struct):
    order: str


@dataclass
class Record:
    order: str


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (Struct, '{"order":"o1"}', Struct("o1")),
        (Record, '{"order":"o1"}', Record("o1")),
        (dict[str, int], '{"a":1}', {"a": 1}),
        (str, '"x"', "x"),
        (Any, "[1]", [1]),
        (None, "null", None),
    ],
)
def test_the_input_is_read_as_the_agent_annotates_it(annotation: Any, text: str, value: Any) -> None:
    app = tf.App()

    async def agent(run: tf.Run, input: Any) -> Any:
        return input

    agent.__annotations__["input"] = annotation
    app.agent(agent)
    assert app.agents["agent"].decoder.decode(text) == value


async def two(run: tf.Run, input: Any) -> None: ...
async def one(run: tf.Run) -> None: ...
async def three(run: tf.Run, input: Any, more: Any) -> None: ...
async def odd(run: tf.Run, input: Struct | Record) -> None: ...
async def lost(run: tf.Run, input: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def not_async(run: tf.Run, input: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (not_async, {}, "not an async function"),
        (one, {}, r"expected \(run, input\)"),
        (three, {}, r"expected \(run, input\)"),
        (odd, {}, "can't fill"),
        (lost, {}, "unknown type"),
        (two, {"name": "a b"}, "another name"),
        (two, {"version": ""}, "another name or version"),
        (two, {"on_drift": "ignore"}, "on_drift"),
    ],
)
def test_a_bad_agent_is_refused_where_it_is_declared(function: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(tf.Misuse, match=said):
        tf.App().agent(**options)(function)


def test_names_are_declared_once() -> None:
    app = tf.App()
    app.agent(two)
    app.tool(name="charge")(lambda: None)
    with pytest.raises(tf.Misuse, match="declared twice"):
        app.agent(two)
    with pytest.raises(tf.Misuse, match="declared twice"):
        app.tool(name="charge")(lambda: None)


def test_a_tool_has_the_contract_that_its_decorator_states() -> None:
    app = tf.App()

    @app.tool(key_ttl=timedelta(days=30), margin=60, timeout="3s", retries=2, undo={"tool": "give_back"})
    def charge(order: str, key: str) -> str:
        return order + key

    contract = app.tools["charge"].contract
    assert charge("o", "k") == "ok"
    assert (contract.kind, contract.effect, contract.key, contract.dedups) == ("python", "external", "field:key", True)
    assert (contract.key_ttl_ms, contract.margin_ms, contract.timeout_ms) == (30 * 86_400_000, 60_000, 3_000)
    assert contract.retries == 2
    assert contract.undo is not None and contract.undo.tool == "give_back"


def test_a_bare_tool_is_the_most_dangerous_kind() -> None:
    app = tf.App()

    @app.tool
    async def send(to: str) -> None: ...

    assert (send.contract.effect, send.contract.dedups, send.takes_key) == ("external", False, False)


def positional(order: str, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (one, {"effect": "maybe"}, "effect: expected one of"),
        (one, {"timeout": "soon"}, "timeout: expected a duration"),
        (one, {"timeout": True}, "timeout is no duration"),
        (one, {"timeout": -1}, "0 to 1e9"),
        (one, {"key_ttl": "24h"}, "parameter `key`"),
        (one, {"undo": {"args": {}}}, "undo.tool: expected"),
        (one, {"name": "a/b"}, "another name"),
        (one, {"name": "x", "args": {"a": {1}}}, "args: expected JSON"),
        (positional, {}, "without names: order"),
        (lambda *orders: None, {"name": "x"}, "without names: orders"),
    ],
)
def test_a_bad_tool_is_refused_where_it_is_declared(function: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(tf.Misuse, match=said):
        tf.App().tool(**options)(function)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1s"),
        (0.5, "500ms"),
        (90, "90s"),
        (3600, "1h"),
        (timedelta(days=7), "7d"),
        ("24h", "24h"),
        (0, "0ms"),
        (None, None),
    ],
)
def test_durations_are_spelled_in_their_largest_unit(value: Any, text: str | None) -> None:
    assert duration_text("timeout", value) == text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_colon", "expected MODULE:ATTRIBUTE"),
        (":app", "expected MODULE:ATTRIBUTE"),
        ("no_such_module_here:app", "there is no module no_such_module_here"),
        ("tidefast.nowhere:app", "there is no module tidefast.nowhere"),
        ("tidefast:nothing", "has no nothing"),
        ("tidefast:Error", "is not an App"),
    ],
)
def test_an_app_that_can_not_be_loaded_is_named(name: str, said: str) -> None:
    with pytest.raises(tf.Misuse, match=said):
        load_app(name)


def test_an_app_is_loaded_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_of_test_app.py").write_text("import tidefast\napp = tidefast.App()\n")
    (tmp_path / "broken_shop.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(load_app("shop_of_test_app:app"), tf.App)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_app("broken_shop:app")


def test_importing_tidefast_loads_no_http_client() -> None:
    code = "import sys, tidefast; tidefast.Misuse; print('aiohttp' in sys.modules, 'structlog' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tf.Nothing  # noqa: B018
