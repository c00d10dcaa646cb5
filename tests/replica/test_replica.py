"""One life of a disk and its next one: what it proves, what it adopts, what it rolls back, what it refuses."""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.replica.shore import Shore, made

from tidefast.sdk.replica.contents import Unreachable
from tidefast.sdk.replica.replica import InUse, Replica
from tidefast.sdk.replica.restore import Outcome
from tidefast.sdk.replica.tree import Rules, Tree
from tidefast.wire import replica as r


def content(path: Path) -> dict[str, bytes]:
    """Every file and link beneath a directory, the replica's own left out."""
    found = {}
    for top, dirs, files in os.walk(path):
        if ".tidefast" in dirs:
            dirs.remove(".tidefast")
        for name in (*files, *dirs):
            full = Path(top, name)
            if full.is_symlink():
                found[str(full.relative_to(path))] = b"-> " + os.fsencode(os.readlink(full))
            elif full.is_file():
                found[str(full.relative_to(path))] = full.read_bytes()
    return found


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    return tmp_path / "ws"


@pytest.fixture
def shore() -> Shore:
    return Shore()


@pytest.fixture
def replica(ws: Path) -> Iterator[Replica]:
    one = made(ws)
    yield one
    one.close()


async def test_calls_are_done_joined_and_restored_on_an_empty_disk(
    shore: Shore, replica: Replica, ws: Path, tmp_path: Path
) -> None:
    await shore.grant(replica)
    await shore.do(replica, "write_file", "s1", path="a/b.txt", content="one\n")
    await shore.do(replica, "run_command", "s2", shell="ln -s b.txt a/l; mkdir empty; chmod 700 empty; echo x > 'n\nl'")
    await shore.do(replica, "run_command", "s3", argv=["dd", "if=/dev/urandom", "of=big", "bs=1M", "count=3"])
    assert (await shore.do(replica, "read_file", "-", path="a/b.txt"))["content"] == "one\n"
    other = made(tmp_path / "other")
    restored = await shore.grant(other)
    assert restored is not None
    assert restored.files == 4
    assert content(tmp_path / "other") == content(ws)
    assert (tmp_path / "other" / "empty").stat().st_mode & 0o777 == 0o700
    other.close()


async def test_a_restart_on_a_whole_disk_fetches_nothing(shore: Shore, ws: Path) -> None:
    first = made(ws)
    await shore.grant(first)
    await shore.do(first, "write_file", "s1", path="f", content="1")
    first.close()
    second = made(ws)
    await shore.grant(second)
    assert (shore.plans, shore.fetched) == (["keep", "keep"], 0)
    assert (await shore.do(second, "read_file", "-", path="f"))["content"] == "1"
    second.close()


DAMAGE = {
    "wiped": lambda ws: shutil.rmtree(ws),
    "half wiped": lambda ws: shutil.rmtree(ws / "d"),
    "journal gone": lambda ws: shutil.rmtree(ws / ".tidefast"),
    "a file more": lambda ws: (ws / "evil").write_text("left over"),
    "a file changed": lambda ws: (ws / "d" / "f").write_text("wrong"),
    "a link in the way": lambda ws: (shutil.rmtree(ws / "d"), (ws / "d").symlink_to("/tmp")),
    "a directory in the way": lambda ws: ((ws / "g").unlink(), (ws / "g" / "x").mkdir(parents=True)),
    "a pipe": lambda ws: os.mkfifo(ws / "pipe"),
    "modes": lambda ws: ((ws / "g").chmod(0o600), (ws / "d").chmod(0o500)),
    "journal cut": lambda ws: os.truncate(ws / ".tidefast" / "journal", 40),
    "journal broken": lambda ws: (ws / ".tidefast" / "journal").write_bytes(b"0" * 100 + b"\n" + b"1" * 9),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_whatever_became_of_the_disk_it_holds_the_committed_content_again(
    shore: Shore, ws: Path, damage: str
) -> None:
    first = made(ws)
    await shore.grant(first)
    await shore.do(first, "write_file", "s1", path="d/f", content="1")
    await shore.do(first, "write_file", "s2", path="g", content="2", mode=0o755)
    await shore.do(first, "write_file", "s3", path="d/same", content="2")
    expected = content(ws)
    first.close()
    DAMAGE[damage](ws)
    second = made(ws)
    await shore.grant(second)
    assert content(ws) == expected
    assert (ws / "g").stat().st_mode & 0o777 == 0o755
    assert (ws / "d").stat().st_mode & 0o777 == 0o755
    await shore.do(second, "write_file", "s4", path="d/f", content="3")
    second.close()


@pytest.mark.parametrize("damage", ["a file more", "a file changed"])
async def test_the_rig_catches_a_restore_that_believes_the_journal(
    shore: Shore, ws: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a disk whose journal proves the newest index is taken as it is."""
    first = made(ws)
    await shore.grant(first)
    await shore.do(first, "write_file", "s1", path="d/f", content="1")
    expected = content(ws)
    first.close()
    DAMAGE[damage](ws)

    async def believing(*args: object, **_: object) -> Outcome:
        return Outcome(Tree({}, {}), 0, 0)

    monkeypatch.setattr("tidefast.sdk.replica.replica.restore", believing)
    second = made(ws)
    await shore.grant(second)
    assert content(ws) != expected
    second.close()


async def test_an_old_copy_and_a_fork_prove_what_they_hold_and_no_more(shore: Shore, ws: Path, tmp_path: Path) -> None:
    first = made(ws)
    await shore.grant(first)
    await shore.do(first, "write_file", "s1", path="f", content="1")
    first.close()
    shutil.copytree(ws, tmp_path / "copy")
    second = made(ws)
    await shore.grant(second)
    await shore.do(second, "write_file", "s2", path="f", content="2")
    await shore.do(second, "write_file", "s3", path="g", content="3")
    fork = made(tmp_path / "copy")
    restored = await shore.grant(fork)
    assert shore.plans[-1] == "rollback"
    assert restored is not None and restored.files == 2
    assert content(tmp_path / "copy") == content(ws)
    call = r.Do("q", second.epoch, 3, "write_file", {"path": "f", "content": "x"}, 1000, "run", "s4", 1, 1)
    late = await second.do(call, shore, shore.output.append)
    assert isinstance(late, r.Receipt) and late.epoch != shore.epoch, "the authority's join refuses it, not the replica"
    fork.close()
    second.close()


async def test_a_restore_that_is_interrupted_again_and_again_is_right_in_the_end(
    shore: Shore, ws: Path, tmp_path: Path
) -> None:
    first = made(ws)
    await shore.grant(first)
    script = "for i in $(seq 300); do mkdir -p d$((i % 7)); echo $i > d$((i % 7))/f$i; done"
    await shore.do(first, "run_command", "s1", shell=script)
    first.close()
    rounds = 0
    while True:
        other = made(tmp_path / "other")
        shore.fails_after = 47
        try:
            await shore.grant(other)
            break
        except Unreachable:
            rounds += 1
        finally:
            other.close()
    assert rounds >= 1
    assert content(tmp_path / "other") == content(ws)
    assert shore.fetched < 300 * 3


async def test_a_write_that_was_not_joined_is_rolled_back(shore: Shore, replica: Replica, ws: Path) -> None:
    await shore.grant(replica)
    await shore.do(replica, "run_command", "s1", shell="mkdir d; echo old > d/f; echo gone > g")
    expected = content(ws)
    said = await shore.say(replica, "run_command", "s2", shell="echo new > d/f; rm g; mkdir -p e/e; echo x > e/e/x")
    assert isinstance(said, r.Receipt)
    restored = await replica.rollback(r.Rollback(shore.epoch, shore.index, shore.chains[-1]), shore)
    assert restored is not None
    assert content(ws) == expected
    assert not (ws / "e").exists()
    await shore.do(replica, "read_file", "-", path="g")


async def test_a_checked_command_that_fails_and_one_out_of_time_leave_nothing(
    shore: Shore, replica: Replica, ws: Path
) -> None:
    await shore.grant(replica)
    await shore.do(replica, "write_file", "s1", path="f", content="old")
    failed = await shore.say(replica, "run_command", "s2", shell="echo new > f; echo why >&2; exit 3", is_checked=True)
    assert isinstance(failed, r.Refused)
    assert (failed.code, failed.reason, failed.facts["exit_code"], failed.facts["stderr"]) == (
        "conflict", "exit_code", 3, "why\n",
    )  # fmt: skip
    late = await shore.say(replica, "run_command", "s3", shell="echo new > f; sleep 100", timeout_ms=200)
    assert isinstance(late, r.Refused) and late.code == "timed_out"
    assert content(ws) == {"f": b"old"}
    kept = await shore.do(replica, "run_command", "s4", shell="echo new > f; exit 3")
    assert kept["exit_code"] == 3
    assert content(ws) == {"f": b"new\n"}


async def test_a_command_whose_receipt_was_lost_is_adopted_and_not_run_again(shore: Shore, ws: Path) -> None:
    first = made(ws)
    await shore.grant(first)
    await shore.do(first, "write_file", "s1", path="f", content="1")
    call = {"shell": "date +%s%N > when"}
    said = await shore.say(first, "run_command", "s2", **call)
    assert isinstance(said, r.Receipt)
    when = (ws / "when").read_bytes()
    first.close()
    second = made(ws)
    assert second.hello().is_ahead
    await shore.grant(second)
    again = await shore.say(second, "run_command", "s2", **call)
    assert isinstance(again, r.Receipt)
    assert (again.delta, again.index, again.epoch) == (said.delta, said.index, shore.epoch)
    await shore.join(second, again)
    assert (ws / "when").read_bytes() == when
    second.close()


@pytest.mark.parametrize("other", ["a read", "another step", "another call", "a changed disk"])
async def test_what_was_set_aside_is_seen_by_nobody_else(shore: Shore, ws: Path, other: str) -> None:
    first = made(ws)
    await shore.grant(first)
    await shore.do(first, "write_file", "s1", path="f", content="1")
    await shore.say(first, "run_command", "s2", shell="echo dead > f; echo dead > g")
    first.close()
    if other == "a changed disk":
        (ws / "g").write_text("changed")
    second = made(ws)
    await shore.grant(second)
    if other == "a read":
        assert (await shore.do(second, "read_file", "-", path="f"))["content"] == "1"
    elif other == "another step":
        await shore.do(second, "write_file", "s3", path="h", content="h")
        (ws / "h").unlink()
    elif other == "another call":
        await shore.do(second, "run_command", "s2", shell="true")
    assert content(ws) == {"f": b"1"}
    second.close()


async def test_a_command_that_was_killed_with_its_replica_leaves_nothing(shore: Shore, ws: Path) -> None:
    first = made(ws)
    await shore.grant(first)
    await shore.do(first, "write_file", "s1", path="f", content="1")
    running = asyncio.create_task(shore.say(first, "run_command", "s2", shell="echo dead > f; echo now; sleep 1000"))
    await _heard(shore)
    await first.stop()
    await asyncio.gather(running, return_exceptions=True)
    first.close()
    second = made(ws)
    assert not second.hello().is_ahead
    await shore.grant(second)
    assert content(ws) == {"f": b"1"}
    second.close()


async def test_a_call_of_another_epoch_or_index_is_not_begun(shore: Shore, replica: Replica, ws: Path) -> None:
    call = shore.call("write_file", {"path": "f", "content": "x"}, "s1")
    assert await _unsent(replica, shore, call) == "not_restored"
    await shore.grant(replica)
    call = shore.call("write_file", {"path": "f", "content": "x"}, "s1")
    for changes, why in (({"epoch": 99}, "stale_epoch"), ({"index": 1}, "index")):
        assert await _unsent(replica, shore, r.Do(**{**_fields(call), **changes})) == why
    assert content(ws) == {}


async def _heard(shore: Shore) -> None:
    while not shore.output:  # noqa: ASYNC110 - a list sets no event
        await asyncio.sleep(0)


def _fields(call: r.Do) -> dict[str, object]:
    return {name: getattr(call, name) for name in call.__struct_fields__}


async def _unsent(replica: Replica, shore: Shore, call: r.Do) -> str:
    said = await replica.do(call, shore, shore.output.append)
    return said.reason if isinstance(said, r.Unsent) else f"not unsent: {said}"


async def test_out_of_touch_for_the_lease_s_time_it_refuses_writes_by_itself(shore: Shore, ws: Path) -> None:
    now = [1000.0]
    one = made(ws, clock=lambda: now[0])
    await shore.grant(one)
    one._until_s = now[0] + 15
    call = shore.call("write_file", {"path": "f", "content": "x"}, "s1")
    now[0] += 14.9
    one.renewed(now[0] - 5, 15_000)
    now[0] += 10.2
    assert not one.is_in_touch
    assert await _unsent(one, shore, call) == "lease_lapsed"
    assert (await shore.do(one, "list_files", "-"))["entries"] == []
    one.renewed(now[0], 15_000)
    await shore.do(one, "write_file", "s1", path="f", content="x")
    one.close()


async def test_the_journal_answers_for_its_steps(shore: Shore, replica: Replica) -> None:
    await shore.grant(replica)
    ask = r.Ask("a1", "run", "s1", 1, shore.epoch)
    assert isinstance(replica.ask(ask), r.Absent)
    call = shore.call("write_file", {"path": "f", "content": "x"}, "s1")
    assert await _unsent(replica, shore, call) == "late", "absent promised that this attempt never begins"
    second = shore.call("write_file", {"path": "f", "content": "x"}, "s1", 2)
    said = await replica.do(second, shore, shore.output.append)
    found = replica.ask(r.Ask("a2", "run", "s1", 2, shore.epoch))
    assert isinstance(said, r.Receipt) and isinstance(found, r.Receipt)
    assert (found.request_id, found.chain) == ("a2", said.chain)
    await shore.join(replica, said)
    refused = await shore.say(replica, "run_command", "s2", shell="exit 1", is_checked=True)
    again = replica.ask(r.Ask("a3", "run", "s2", 1, shore.epoch))
    assert isinstance(refused, r.Refused) and isinstance(again, r.Refused)
    assert (again.request_id, again.reason) == ("a3", refused.reason)


async def test_while_a_command_runs_it_is_said_so_and_reads_go_on(shore: Shore, replica: Replica, ws: Path) -> None:
    await shore.grant(replica)
    running = asyncio.create_task(
        shore.say(replica, "run_command", "s1", shell="echo now; while [ ! -e go ]; do sleep 0.01; done")
    )
    await _heard(shore)
    assert isinstance(replica.ask(r.Ask("a1", "run", "s1", 1, shore.epoch)), r.Running)
    assert await _unsent(replica, shore, shore.call("write_file", {"path": "f", "content": ""}, "s2")) == "busy"
    assert (await shore.do(replica, "list_files", "-"))["entries"] == []
    (ws / "go").touch()
    said = await running
    assert isinstance(said, r.Receipt) and said.request_id == "a1"


async def test_search_finds_lines_and_gives_up_patterns_that_never_end(
    shore: Shore, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shore.grant(replica)
    await shore.do(replica, "write_file", "s1", path="d/a.py", content="import os\nx = 1\n")
    await shore.do(replica, "write_file", "s2", path="b.txt", content="import\n" + "a" * 40 + "!\n")
    found = await shore.do(replica, "search", "-", pattern=r"^import\b")
    assert [(hit["path"], hit["line"]) for hit in found["matches"]] == [("b.txt", 1), ("d/a.py", 1)]
    globbed = await shore.do(replica, "search", "-", pattern="import", glob="*.py")
    assert [hit["path"] for hit in globbed["matches"]] == ["d/a.py"]
    assert (await shore.do(replica, "search", "-", pattern="import", path="d/a.py"))["matches"][0]["path"] == "d/a.py"
    assert (await shore.do(replica, "search", "-", pattern="import", limit=1))["is_truncated"]
    bad = await shore.say(replica, "search", "-", pattern="(")
    assert isinstance(bad, r.Refused) and bad.reason == "pattern_invalid"
    monkeypatch.setattr("tidefast.sdk.replica.searching.LIMIT_S", 0.3)
    slow = await shore.say(replica, "search", "-", pattern="(a+)+$", path="b.txt")
    assert isinstance(slow, r.Refused) and slow.reason == "timed_out"


async def test_a_migration_takes_effect_whole_or_not_at_all(shore: Shore, replica: Replica, ws: Path) -> None:
    await shore.grant(replica)
    table = "CREATE TABLE t (a INTEGER) STRICT; INSERT INTO t VALUES (1), (2);"
    assert await shore.do(replica, "run_migration", "s1", path="db.sqlite", sql=table) == {"changes": 2}
    before = content(ws)
    for number, (sql, reason) in enumerate((
        ("INSERT INTO t VALUES (3); INSERT INTO none VALUES (1)", "sql_refused"),
        ("ATTACH '/etc/passwd' AS p", "sql_refused"),
        ("INSERT INTO t VALUES (3); ATTACH 'x' AS p", "sql_refused"),
        ("VACUUM INTO 'copy.db'", "sql_refused"),
        ("BEGIN; INSERT INTO t VALUES (3)", "transaction_open"),
    )):  # fmt: skip
        said = await shore.say(replica, "run_migration", f"bad{number}", path="db.sqlite", sql=sql)
        assert isinstance(said, r.Refused) and said.reason == reason, (sql, said)
        assert content(ws) == before
    await shore.do(replica, "write_file", "s2", path="plain", content="no database at all, whatever it says")
    said = await shore.say(replica, "run_migration", "s3", path="plain", sql="SELECT 1")
    assert isinstance(said, r.Refused) and said.reason == "not_a_database"
    said = await shore.say(replica, "run_migration", "s4", path="../db", sql="SELECT 1")
    assert isinstance(said, r.Refused) and said.reason == "path_outside"


async def test_a_database_s_log_is_played_in_before_a_migration(shore: Shore, replica: Replica, ws: Path) -> None:
    import apsw

    await shore.grant(replica)
    await shore.do(replica, "run_migration", "s1", path="db", sql="PRAGMA journal_mode=wal; CREATE TABLE t (a)")
    script = "import apsw, os; c = apsw.Connection('db'); c.execute('INSERT INTO t VALUES (7)')"
    await shore.do(replica, "run_command", "s2", argv=[sys.executable, "-c", f"{script}; os._exit(0)"])
    assert (ws / "db-wal").stat().st_size > 0
    await shore.do(replica, "run_migration", "s3", path="db", sql="INSERT INTO t VALUES (8)")
    assert not (ws / "db-wal").exists()
    connection = apsw.Connection(str(ws / "db"), flags=apsw.SQLITE_OPEN_READONLY)
    assert connection.execute("SELECT a FROM t").fetchall() == [(7,), (8,)]
    connection.close()


async def test_a_command_may_remove_what_is_ours_and_nothing_is_lost(shore: Shore, ws: Path) -> None:
    one = made(ws)
    await shore.grant(one)
    await shore.do(one, "write_file", "s1", path="f", content="1")
    await shore.do(one, "run_command", "s2", shell="rm -rf .tidefast; echo 2 > f")
    await shore.do(one, "write_file", "s3", path="g", content="3")
    one.close()
    two = made(ws)
    assert (two.hello().index, two.hello().chain) == (3, shore.chains[-1])
    two.close()


async def test_ignored_paths_stay_out_and_are_listed(shore: Shore, ws: Path, tmp_path: Path) -> None:
    one = made(ws, rules=Rules(("node_modules", "*.log"), 1000))
    await shore.grant(one)
    script = "mkdir node_modules; echo x > node_modules/x; echo x > a.log; mkfifo pipe; echo k > k"
    said = await shore.say(one, "run_command", "s1", shell=script + "; head -c 2000 /dev/zero > big")
    assert isinstance(said, r.Receipt)
    assert sorted(said.delta) == ["k"]
    assert {lost.path: lost.reason for lost in said.unrestorable} == {
        "node_modules": "ignored", "a.log": "ignored", "pipe": "special", "big": "too_large",
    }  # fmt: skip
    await shore.join(one, said)
    one.close()
    again = made(ws, rules=Rules(("node_modules", "*.log"), 1000))
    restored = await shore.grant(again)
    assert restored is not None and {lost.path for lost in restored.unrestorable} == {"node_modules", "a.log", "big"}
    again.close()


async def test_two_replicas_do_not_share_a_directory(ws: Path) -> None:
    one = made(ws)
    with pytest.raises(InUse):
        made(ws)
    one.close()
    made(ws).close()


async def test_a_journal_of_another_workspace_proves_nothing(shore: Shore, ws: Path) -> None:
    one = made(ws)
    await shore.grant(one)
    await shore.do(one, "write_file", "s1", path="f", content="1")
    one.close()
    other = Replica(ws, "other", one._commands._confinement)
    assert (other.hello().epoch, other.hello().index) == (0, 0)
    other.close()
