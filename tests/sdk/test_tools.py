"""A stored call that doesn't fit its function, as an older program may have let one through: nothing was sent."""

import asyncio
from pathlib import Path

import pytest

import tidefast as tf
from tidefast.engine.clock import SystemClock
from tidefast.services.process_runner import ProcessRunner
from tidefast.services.python_runner import LocalRunner, NotSentByTool, RefusedByTool
from tidefast.services.tools import Outcome, PythonRunner

APP = """
import tidefast as tf

app = tf.App()


@app.tool(key_ttl="1h")
async def charge(order: str, key: str) -> str:
    return order


@app.tool
def mail(to: str) -> str:
    return len(5)
"""
LONG_MS = 60_000
UNFIT: list[tuple[str, dict[str, object], str]] = [
    ("charge", {"ordr": "o1"}, "not_sent: missing a required argument: 'order'"),
    ("charge", {"order": "o1", "cents": 1}, "not_sent: got an unexpected keyword argument 'cents'"),
    ("mail", {}, "not_sent: missing a required argument: 'to'"),
    ("mail", {"to": "you", "key": "k"}, "not_sent: got an unexpected keyword argument 'key'"),
]


async def _judge(runner: PythonRunner, clock: SystemClock) -> None:
    late = clock.now().ms + LONG_MS
    for tool, args, reason in UNFIT:
        assert await runner(tool, args, "k", late) == Outcome("unsent", reason=reason)  # type: ignore[arg-type]
    assert (await runner("charge", {"order": "o1"}, "k", late)).kind == "applied"
    assert await runner("mail", {"to": "you"}, "k", late) == Outcome("doubted", reason="TypeError")


def test_a_call_that_does_not_fit_its_tool_was_never_sent_in_this_process() -> None:
    names: dict[str, tf.App] = {}
    exec(APP, names)
    clock, tools = SystemClock(0), names["app"].tools
    functions = {name: tool.raising(RefusedByTool, NotSentByTool) for name, tool in tools.items()}
    asyncio.run(_judge(LocalRunner(clock, functions, frozenset(("charge",))), clock))


def test_a_call_that_does_not_fit_its_tool_was_never_sent_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toolbox.py").write_text(APP)
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        clock = SystemClock(0)
        runner = ProcessRunner(clock, "toolbox:app")
        try:
            await runner.start()
            await _judge(runner, clock)
        finally:
            await runner.stop()

    asyncio.run(main())
