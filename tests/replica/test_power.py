"""After a power cut a file has its old content or its new one, never a mix, and what was acknowledged is there."""

import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.replica.place import place
from tests.replica.power import cut, recording
from tests.replica.shore import Shore, made

from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.workspace import CHAIN_START, write_chain
from tidefast.sdk.replica.journal import At, Begun, Call, Done, Journal
from tidefast.wire.replica import Receipt

OLD, NEW = "old line\n" * 700, "new line\n" * 900
PATCH = (
    "--- a/one\n+++ b/one\n@@ -1 +1 @@\n-1\n+one\n--- a/two\n+++ /dev/null\n@@ -1 +0,0 @@\n-2\n"
    "--- /dev/null\n+++ b/new/three\n@@ -0,0 +1 @@\n+3\n"
)
CALLS: dict[str, dict[str, Any]] = {
    "write_file": {"path": "f", "content": NEW},
    "edit_file": {"path": "f", "edits": [{"old_text": "old", "new_text": "new", "is_all": True}]},
    "apply_patch": {"patch": PATCH},
    "run_migration": {"path": "db", "sql": "CREATE TABLE u (a); INSERT INTO u VALUES (randomblob(9000))"},
}


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(item.relative_to(path)): item.read_bytes()
        for item in path.rglob("*")
        if item.is_file() and ".tidefast" not in item.parts
    }


def cuts(top: Path, verb: str, count: int, monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> list[str]:
    """What was wrong after each of so many power cuts while a verb was at work."""
    wrong: list[str] = []
    with place(top / "ws") as here:
        here.do("write_file", path="f", content=OLD)
        here.do("write_file", path="one", content="1\n")
        here.do("write_file", path="two", content="2\n")
        here.do("run_migration", path="db", sql="CREATE TABLE t (a)")
        before = contents(here.path)
        with recording(here.path, monkeypatch, without=without) as seen:
            here.do(verb, **CALLS[verb])
        now = contents(here.path)
        assert before != now
    chance = random.Random(count)
    for number, (at, (what, state)) in zip(range(count), itertools.cycle(enumerate(seen.states, 1)), strict=False):
        to = top / f"cut-{number % 8}"
        shutil.rmtree(to, ignore_errors=True)
        cut(seen, state, chance, to)
        left = contents(to)
        paths = before.keys() | now.keys() | left.keys()
        mixed = [path for path in paths if left.get(path) not in (before.get(path), now.get(path))]
        wrong += [f"{what}: {path} is a mix" for path in mixed]
        if at == len(seen.states) and left != now:
            wrong.append("what was acknowledged is not there")
    return wrong


@pytest.mark.parametrize("verb", CALLS)
def test_a_cut_leaves_old_or_new(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuts(tmp_path, verb, 40, monkeypatch) == []


@pytest.mark.rig
@pytest.mark.parametrize("verb", CALLS)
def test_a_cut_leaves_old_or_new_at_the_gate(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuts(tmp_path, verb, 500, monkeypatch) == []


@pytest.mark.parametrize("without", ["file", "directory"])
def test_the_rig_catches_a_flush_that_is_left_out(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = cuts(tmp_path, "write_file", 80, monkeypatch, without=without)
    assert any(("mix" if without == "file" else "acknowledged") in line for line in wrong)


def receipt(index: int, chain: str) -> Receipt:
    step = f"s{index}"
    following = write_chain(chain, index, RunId("run"), StepId(step), "{}")
    return Receipt("-", "run", step, 1, index, {}, following)


def test_a_cut_journal_says_what_it_was_told_or_less_and_never_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    with recording(folder, monkeypatch) as seen:
        journal, chain, said = Journal(fd, "w"), CHAIN_START, [(0, False)]
        marks: list[tuple[int, int]] = []  # (states until then, how much of `said` was durable)
        for index in range(1, 6):
            call = Call("run", f"s{index}", 1)
            journal.append(Begun(call, 1), is_synced=True)
            done = receipt(index, chain)
            journal.append(Done(call, "what", done), is_synced=True)
            said.append((index - 1, True))
            marks.append((len(seen.states), len(said)))
            chain = done.chain
            journal.append(At("w", 1, index, chain, True), is_synced=True)
            said.append((index, False))
            marks.append((len(seen.states), len(said)))
        journal.close()
    os.close(fd)
    chance = random.Random(7)
    for number, (_, state) in enumerate(itertools.chain(*[seen.states] * 2)):
        at = number % len(seen.states) + 1
        to = tmp_path / "cut"
        shutil.rmtree(to, ignore_errors=True)
        cut(seen, state, chance, to)
        fd = os.open(to, os.O_RDONLY)
        left = Journal(fd, "w")
        claim = (left.disk.log_index, left.ahead is not None)
        durable = max([count for states, count in marks if states <= at], default=1)
        assert claim in said[durable - 1 :]
        left.close()
        os.close(fd)


async def test_a_disk_after_a_cut_is_made_whole_by_the_next_grant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shore = Shore()
    one = made(tmp_path / "ws")
    await shore.grant(one)
    await shore.do(one, "write_file", "s1", path="f", content=OLD)
    await shore.do(one, "write_file", "s2", path="two", content="2\n")
    await shore.do(one, "write_file", "s3", path="one", content="1\n")
    committed = contents(tmp_path / "ws")
    with recording(tmp_path / "ws", monkeypatch) as seen:
        await shore.say(one, "apply_patch", "s4", patch=PATCH)
    one.close()
    chance = random.Random(3)
    for number, (_, state) in enumerate(seen.states):
        to = tmp_path / f"cut-{number}"
        cut(seen, state, chance, to)
        other = made(to)
        await shore.grant(other)
        await shore.do(other, "list_files", "-")
        assert contents(to) == committed
        other.close()
