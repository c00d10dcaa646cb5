"""Commands: what they see, what they are cut to, and that nothing which they started goes on after their end.

Each way of confinement that this host allows is held to the same tests.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.commands import Commands, Kept, Ran, end_marked
from tidefast.sdk.replica.confine import KINDS, Confinement, Kind, examine, own_cgroup
from tidefast.sdk.replica.refusals import NotDone
from tidefast.wire.workspace import RunCommand

ALLOWED = {kind: examine([kind]) for kind in KINDS}


class Bench:
    """A root with commands under one confinement."""

    def __init__(self, path: Path, confinement: Confinement) -> None:
        path.mkdir()
        self.path, self.confinement = path, confinement
        self.root = Root(path)
        self.lock = os.open(path, os.O_RDONLY)
        self.commands = Commands(self.root, confinement)
        self.heard: list[tuple[str, str]] = []

    async def ran(self, **args: Any) -> Ran:
        return await self.commands.run(RunCommand(**args), self.lock, lambda *said: self.heard.append(said))

    async def result(self, **args: Any) -> dict[str, Any]:
        ran = await self.ran(**args)
        assert not ran.failed, ran
        return ran.result


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    kind: Kind = request.param
    if ALLOWED[kind].kind != kind:
        pytest.skip(f"this host doesn't allow it: {ALLOWED[kind].why_not}")
    made = Bench(tmp_path / "ws", ALLOWED[kind])
    yield made
    os.close(made.lock)
    made.root.close()


async def test_a_command_answers_with_its_end_and_its_output(bench: Bench) -> None:
    said = await bench.result(shell="cat; echo err >&2; pwd; exit 3", stdin="in\n")
    assert (said["exit_code"], said["signal"], said["is_timed_out"]) == (3, None, False)
    assert said["stdout"] == f"in\n{bench.path}\n"
    assert said["stderr"] == "err\n"
    assert ("stdout", "in\n") in bench.heard or ("stdout", f"in\n{bench.path}\n") in bench.heard
    killed = await bench.result(shell="kill -9 $$")
    assert (killed["exit_code"], killed["signal"]) == (None, 9)


async def test_words_are_words_and_no_shell_looks_at_them(bench: Bench) -> None:
    said = await bench.result(argv=["printf", "%s|", "$HOME", "a b", ";rm"])
    assert said["stdout"] == "$HOME|a b|;rm|"


async def test_a_command_that_is_not_there_is_refused_as_such(bench: Bench) -> None:
    assert (await bench.ran(argv=["no-such-program"])).failed == "No such file or directory"
    (bench.path / "plain").write_text("x")
    assert (await bench.ran(argv=["./plain"])).failed == "Permission denied"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({}, "command_format"),
        ({"argv": ["a"], "shell": "b"}, "command_format"),
        ({"argv": ["a\0"]}, "command_format"),
        ({"argv": [""]}, "command_format"),
        ({"shell": "true", "env": {"A=B": "c"}}, "env_format"),
        ({"shell": "true", "env": {"A": "\0"}}, "env_format"),
        ({"shell": "true", "cwd": "../"}, "path_outside"),
        ({"shell": "true", "cwd": "link"}, "path_is_link"),
        ({"shell": "true", "cwd": "none"}, "path_unknown"),
    ],
)
async def test_what_cannot_be_run_is_refused_before_anything_starts(
    bench: Bench, args: dict[str, Any], reason: str
) -> None:
    (bench.path / "link").symlink_to("/etc")
    with pytest.raises(NotDone) as refusal:
        await bench.ran(**args)
    assert refusal.value.reason == reason


async def test_the_environment_holds_nothing_that_nobody_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-7f3a"
    for name in ("TIDEFAST_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, canary)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    said = await bench.result(shell="env; cat /proc/self/environ /proc/$PPID/environ", env={"MINE": "1"})
    assert canary not in said["stdout"]
    assert "MINE=1" in said["stdout"].split("\n")
    assert "LC_ALL=C.UTF-8" in said["stdout"]


async def test_a_command_inherits_no_descriptor_of_ours(bench: Bench) -> None:
    said = await bench.result(argv=[sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd'))[:5])"])
    assert said["stdout"] == "['0', '1', '2', '3']\n"  # the fourth is the listing itself


async def test_a_namespace_shows_no_process_but_the_command_s(bench: Bench) -> None:
    if bench.confinement.kind != "pid_namespace":
        pytest.skip("only a namespace hides other processes")
    said = await bench.result(shell="ls /proc | grep -c '^[0-9]'")
    assert int(said["stdout"]) <= 5


async def test_output_beyond_the_limit_keeps_its_first_and_last_bytes(bench: Bench) -> None:
    said = await bench.result(shell="echo first; yes | head -c 3000000; echo last", output_bytes=1000)
    assert said["is_stdout_cut"]
    assert said["stdout"].startswith("first\ny\n")
    assert said["stdout"].endswith("y\nlast\n")
    assert "[2999011 bytes left out]" in said["stdout"]
    assert len(said["stdout"]) < 1100


async def test_a_command_out_of_time_is_ended_and_says_so(bench: Bench) -> None:
    said = await bench.result(shell="echo begun; sleep 1000", timeout_ms=300)
    assert said["is_timed_out"]
    assert said["exit_code"] is None
    assert said["stdout"] == "begun\n"


async def test_a_cut_command_is_ended_and_is_no_timeout(bench: Bench) -> None:
    running = asyncio.create_task(bench.ran(shell="echo begun; sleep 1000"))
    async with until(lambda: bench.heard):
        bench.commands.cut()
    ran = await running
    assert ran.is_cut
    assert not ran.result["is_timed_out"]


@asynccontextmanager
async def until(condition: Any) -> AsyncIterator[None]:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - files and processes set no event
            await asyncio.sleep(0)
    yield


# Every way in which a child may leave its parent's group: a new session, twice forked, with its output open or closed.
ESCAPEE = """
import os, sys, time
for number in range(int(sys.argv[1])):
    if os.fork():
        continue
    if number % 2:
        os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    if number % 3 == 0:
        os.closerange(0, 3)
    if number % 5 == 0:
        os.execvp("nohup", ["nohup", "sh", "-c", f"while :; do echo x >> late-{number}; done"])
    while True:
        with open(f"late-{number}", "a") as file:
            file.write("x")
while len([name for name in os.listdir(".") if name.startswith("late-")]) < int(sys.argv[1]):
    time.sleep(0.01)
if len(sys.argv) > 2:
    time.sleep(1000)
"""


def written(path: Path) -> dict[str, int]:
    return {name: (path / name).stat().st_size for name in os.listdir(path) if name.startswith("late-")}


@pytest.mark.parametrize("times_out", [False, True], ids=["ends", "times out"])
async def test_fifty_children_that_left_the_group_write_nothing_after_the_end(bench: Bench, times_out: bool) -> None:
    (bench.path / "escape.py").write_text(ESCAPEE)
    more, limit = (["on"], 15_000) if times_out else ([], 60_000)
    args = {"argv": [sys.executable, "-I", "-S", "escape.py", "50", *more], "timeout_ms": limit}
    running = asyncio.create_task(bench.result(**args))
    if times_out:
        async with until(lambda: len(written(bench.path)) == 50):
            bench.commands.cut()
    await running
    at_end = written(bench.path)
    assert len(at_end) == 50
    assert marked_processes(bench.commands.mark) == 0
    await asyncio.to_thread(os.sync)  # time for a survivor to write
    assert written(bench.path) == at_end


def marked_processes(mark: str) -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                count += f"TIDEFAST_REPLICA_OF={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
    return count


async def test_the_rig_catches_a_kill_of_the_process_group_alone(tmp_path: Path) -> None:
    """The mutant: what most sandboxes do. Its escapees go on writing, so the test above can fail."""
    (tmp_path / "escape.py").write_text(ESCAPEE)
    env = {"TIDEFAST_REPLICA_OF": "mutant", "PATH": os.environ["PATH"]}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "escape.py", "6", cwd=tmp_path, start_new_session=True, env=env,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    await process.wait()
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    survivors = marked_processes("mutant")
    assert survivors > 0
    assert end_marked("mutant") >= survivors
    assert marked_processes("mutant") == 0


async def test_a_replica_that_is_killed_leaves_no_process_behind(bench: Bench, tmp_path: Path) -> None:
    """The kernel closes the lifeline of a dead replica, and its supervisor ends everything."""
    (bench.path / "escape.py").write_text(ESCAPEE)
    child = os.fork()
    if child == 0:
        try:
            args = RunCommand(argv=[sys.executable, "-I", "-S", "escape.py", "10", "on"])
            asyncio.new_event_loop().run_until_complete(bench.commands.run(args, bench.lock, lambda *_: None))
        finally:
            os._exit(1)
    async with until(lambda: len(written(bench.path)) == 10):
        os.kill(child, 9)
    await asyncio.to_thread(os.waitpid, child, 0)
    async with until(lambda: marked_processes(bench.commands.mark) == 0):
        at_end = written(bench.path)
    await asyncio.to_thread(os.sync)
    assert written(bench.path) == at_end
    end_marked(bench.commands.mark)
    assert not [name for name in os.listdir(own_cgroup() or "/") if bench.commands.mark.replace(":", "-") in name]


def test_the_confinement_says_plainly_what_it_is_worth() -> None:
    found = examine()
    assert found.kind in KINDS
    assert "PID namespace" in Confinement("pid_namespace", {}).sentence()
    loose = Confinement("subreaper", {"pid_namespace": "Operation not permitted"})
    assert not loose.is_tight
    assert "may leave one that goes on writing" in loose.sentence()
    assert "pid_namespace: Operation not permitted" in loose.sentence()


@pytest.mark.parametrize("limit", [0, 1, 7, 1000])
@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 999, 1000, 1001, 300_000])
def test_what_is_kept_is_the_whole_or_both_ends(limit: int, size: int) -> None:
    kept, source = Kept(limit), bytes(48 + number % 10 for number in range(size))
    for start in range(0, size, 4096):
        kept.add(source[start : start + 4096])
    text = kept.text()
    if size <= limit:
        assert text == source.decode()
        return
    assert kept.is_cut
    first, _, rest = text.partition("\n[")
    note, _, last = rest.partition("left out]\n")
    assert source.decode().startswith(first)
    assert source.decode().endswith(last)
    assert len(first) + len(last) == limit
    assert note == f"{size - limit} bytes "
