"""Python tools in a process of their own: what each way to end means for the attempt."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tidefast.engine.clock import SystemClock
from tidefast.services.process_runner import ProcessRunner
from tidefast.services.tools import ConfigError, Outcome

APP = """
import asyncio, os, subprocess, sys, threading
import tidefast as tf

app = tf.App()
print("printed while importing")


@app.tool(key_ttl="1h")
def charge(order: str, key: str) -> dict:
    print("printed by a tool")
    os.write(1, b'{"call": 1, "kind": "applied", "body": "forged"}\\n')
    subprocess.run([sys.executable, "-c", "print('printed by a child')"], check=True)
    return {"order": order, "key": key}


@app.tool
async def echo(value: object) -> object:
    return value


@app.tool
def refuse() -> None:
    raise tf.Refused("no such card", {"code": "declined"})


@app.tool
async def refuse_bare() -> None:
    raise tf.Refused("no such card")


@app.tool
def not_sent() -> None:
    raise tf.NotSent("no route")


@app.tool
async def broken() -> None:
    raise RuntimeError("secret detail")


@app.tool
def leaves() -> None:
    sys.exit(3)


@app.tool
def hangs(mark: str) -> None:
    open(mark, "w").close()
    threading.Event().wait()


@app.tool
async def blocks_the_loop(mark: str) -> None:
    open(mark, "w").close()
    threading.Event().wait()


@app.tool
def dies(mark: str) -> None:
    os.mkfifo(mark + ".never")
    subprocess.Popen(["cat", mark + ".never"])
    os._exit(9)


@app.tool
def odd() -> object:
    return {1, 2}


@app.tool
def large() -> str:
    return "x" * 2_000_000


@app.tool
def ours() -> dict:
    return {"names": sorted(name for name in os.environ if name.startswith("TIDEFAST_")), "pid": os.getpid()}
"""
LONG_MS = 20_000
Test = Callable[[ProcessRunner, SystemClock], Awaitable[None]]


@pytest.fixture(autouse=True)
def _app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolbox.py").write_text(APP)
    (tmp_path / "hollow.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEFAST_URL", "http://127.0.0.1:1")


def run(test: Test) -> None:
    async def main() -> None:
        clock = SystemClock(0)
        runner = ProcessRunner(clock, "toolbox:app")
        try:
            await test(runner, clock)
        finally:
            await runner.stop()

    asyncio.run(main())


def body(outcome: Outcome) -> object:
    return json.loads(outcome.receipt_json)["body"]


def test_answers_and_what_a_tool_raises(capfd: pytest.CaptureFixture[str]) -> None:
    async def test(runner: ProcessRunner, clock: SystemClock) -> None:
        contracts = {contract.tool: contract for contract in await runner.start()}
        assert contracts["charge"].dedups and contracts["charge"].kind == "python"
        late = clock.now().ms + LONG_MS
        charged = await runner("charge", {"order": "ü-1"}, "k1", late)
        assert (charged.kind, body(charged)) == ("applied", {"order": "ü-1", "key": "k1"})
        assert body(await runner("echo", {"value": [1, None, 0.5]}, "k", late)) == [1, None, 0.5]
        refused = await runner("refuse", {}, "k", late)
        assert (refused.kind, body(refused)) == ("refused", {"code": "declined"})
        assert body(await runner("refuse_bare", {}, "k", late)) == {"refused": "no such card"}
        assert await runner("not_sent", {}, "k", late) == Outcome("unsent", reason="not_sent: no route")
        assert await runner("broken", {}, "k", late) == Outcome("doubted", reason="RuntimeError")
        assert await runner("leaves", {}, "k", late) == Outcome("doubted", reason="SystemExit")
        assert await runner("nothing", {}, "k", late) == Outcome("unsent", reason="tool_gone")
        assert await runner("echo", {"value": 1}, "k", clock.now().ms - 1) == Outcome("unsent", reason="deadline")
        for tool in ("odd", "large"):
            lost = await runner(tool, {}, "k", late)
            assert (lost.kind, json.loads(lost.receipt_json)["truncated"]) == ("applied", True)
        assert body(await runner("ours", {}, "k", late))["names"] == []  # type: ignore[index]

    run(test)
    captured = capfd.readouterr()
    assert captured.out == ""
    for source in ("while importing", "by a tool", "by a child"):
        assert f"printed {source}" in captured.err


@pytest.mark.parametrize("tool", ["hangs", "blocks_the_loop"])
def test_a_call_past_its_deadline_costs_its_process(tool: str, tmp_path: Path) -> None:
    async def test(runner: ProcessRunner, clock: SystemClock) -> None:
        await runner.start()
        late = clock.now().ms + LONG_MS
        before = body(await runner("ours", {}, "k", late))["pid"]  # type: ignore[index]
        other = asyncio.create_task(runner("hangs", {"mark": str(tmp_path / "other")}, "k", late))
        await asyncio.sleep(0)
        outcome = await runner(tool, {"mark": str(tmp_path / "mark")}, "k", clock.now().ms + 1_000)
        assert outcome == Outcome("doubted", reason="deadline")
        assert await other == Outcome("doubted", reason="tool_process_ended")
        assert (tmp_path / "mark").exists() and (tmp_path / "other").exists()
        after = body(await runner("ours", {}, "k", clock.now().ms + LONG_MS))["pid"]  # type: ignore[index]
        assert after != before

    run(test)


def test_a_process_that_dies_leaves_doubt_and_is_replaced(tmp_path: Path) -> None:
    async def test(runner: ProcessRunner, clock: SystemClock) -> None:
        await runner.start()
        late = clock.now().ms + LONG_MS
        # The tool's child outlives it with our socket's copy at most: the end of the process must count.
        assert await runner("dies", {"mark": str(tmp_path / "mark")}, "k", late) == Outcome(
            "doubted", reason="tool_process_ended"
        )
        assert body(await runner("echo", {"value": 7}, "k", late)) == 7

    run(test)


def test_a_call_that_was_never_written_is_unsent() -> None:
    async def test(runner: ProcessRunner, clock: SystemClock) -> None:
        # The process needs longer to start than this call has, so nothing was written.
        assert await runner("echo", {"value": 1}, "k", clock.now().ms + 1) == Outcome("unsent", reason="deadline")
        await runner.start()
        await runner.stop()
        stopped = await runner("echo", {"value": 1}, "k", clock.now().ms + LONG_MS)
        assert stopped == Outcome("unsent", reason="tool_process_failed")

    run(test)


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        ("nowhere:app", "there is no module nowhere"),
        ("toolbox:nothing", "has no nothing"),
        ("toolbox:tf", "is not an App"),
        ("toolbox", "expected MODULE:ATTRIBUTE"),
        ("hollow:app", "importing it raised ModuleNotFoundError"),
    ],
)
def test_an_app_that_cannot_be_used_is_a_config_error(app: str, expected: str) -> None:
    async def main() -> None:
        runner = ProcessRunner(SystemClock(0), app)
        with pytest.raises(ConfigError) as raised:
            await runner.start()
        await runner.stop()
        assert str(raised.value).startswith(f"--app {app}: ")
        assert expected in str(raised.value)

    asyncio.run(main())
