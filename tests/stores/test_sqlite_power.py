"""Power cuts, failing disks and killed processes: what was acknowledged is there, and the file opens."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.stores.driver import Driver
from tests.stores.shim import Shim, cut, under

from tidefast.protocol.events import first_broken
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import RunId
from tidefast.protocol.records import View
from tidefast.stores.base import Batch, StoreError, StoreUnavailable
from tidefast.stores.sqlite import SqliteStore

STEPS = 16
CUTS_EACH = 2  # each moment is cut twice, with another choice of what the disk kept


def history(store: SqliteStore, shim: Shim) -> list[tuple[int, int]]:
    """A run's life, one commit at a time: where in the shim's log the event of which seq was acknowledged."""
    driver = Driver(store)
    acks: list[tuple[int, int]] = []
    driver.create("r")
    driver.grant("r")
    for number in range(STEPS):
        driver.admit("r", f"s{number}")
        acks.append((len(shim.log), 3 + 2 * number))
        driver.settle("r", f"s{number}", receipt="x" * 300 * (number % 5))
        acks.append((len(shim.log), 4 + 2 * number))
    return acks


def recorded(
    folder: Path, patch: pytest.MonkeyPatch, synchronous: str
) -> tuple[Shim, dict[str, bytes], list[tuple[int, int]]]:
    path = folder / "s.db"
    SqliteStore.open(path, create=True).close()
    start = {"s.db": path.read_bytes()}
    shim = Shim()
    with under(shim, patch, synchronous):
        store = SqliteStore.open(path, create=False, adopt=True)
        acks = history(store, shim)
        store.close()
    return shim, start, acks


def lost(folder: Path, files: dict[str, bytes], acknowledged: int) -> str:
    """What a store opened over these files has lost; empty if nothing."""
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        store = SqliteStore.open(folder / "s.db", create=False, adopt=True)
    except StoreError as error:
        return f"does not open: {error}"
    try:
        return lost_in(store, acknowledged)
    finally:
        store.close()


def lost_in(store: SqliteStore, acknowledged: int) -> str:
    loaded = store.load_head(RunId("r"))
    events = [] if loaded is None else store.load_events(loaded[0], 0, 10_000)
    if len(events) < acknowledged:
        return f"{acknowledged - len(events)} events"
    if first_broken((stored.event, stored.digest) for stored in events):
        return "the chain"
    view = View(b"", 0, frozenset())
    for stored in events:
        view = evolve(view, stored.event, RunId("r"))
    if loaded is not None and (view.run, view.steps) != (
        loaded[1],
        {step.step_id: step for step in store.load_steps(loaded[0], None, 10_000)},
    ):
        return "the projections"
    return ""


def losses(folder: Path, patch: pytest.MonkeyPatch, synchronous: str) -> Iterator[str]:
    """One report per power cut, at each write, truncation and flush of a history; empty where nothing is lost."""
    (folder / "live").mkdir()
    (folder / "cut").mkdir()
    shim, start, acks = recorded(folder / "live", patch, synchronous)
    for at in range(1, len(shim.log) + 1):
        acknowledged = max((seq for ack, seq in acks if ack <= at), default=0)
        for seed in range(CUTS_EACH):
            files = cut(shim.log[:at], start, random.Random(f"{at} {seed}"))
            yield lost(folder / "cut", files, acknowledged)


def test_no_power_cut_loses_what_was_acknowledged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = list(losses(folder, monkeypatch, "FULL"))
    assert [report for report in reports if report] == []
    assert len(reports) >= 400


def test_the_power_cut_rig_catches_a_store_that_does_not_flush(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("events" in report for report in losses(folder, monkeypatch, "NORMAL"))


# SQLite goes on over some failures (of a hint, of a clean-up); the bindings then report ours as not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("for_good", [False, True])
def test_a_write_or_flush_that_fails_stops_the_store_and_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    failures = 0
    for at in range(1, 10_000, 4):
        path = folder / f"{at}.db"
        SqliteStore.open(path, create=True).close()
        shim = Shim()
        acknowledged = fail_at(path, shim, monkeypatch, at, for_good)
        if acknowledged is None:
            break
        failures += 1
        store = SqliteStore.open(path, create=False, adopt=True)
        assert lost_in(store, acknowledged) == "", at
        store.close()
        path.unlink()
    assert failures > 40


def fail_at(path: Path, shim: Shim, patch: pytest.MonkeyPatch, at: int, for_good: bool) -> int | None:
    """Commits until the planted failure; how many were acknowledged, None if the failure was never reached."""
    with under(shim, patch):
        store = SqliteStore.open(path, create=False, adopt=True)
        shim.calls, shim.fail_at, shim.for_good = 0, at, for_good
        driver = Driver(store)
        acknowledged, told = 0, ""
        try:
            for act in acts(driver):
                act()
                acknowledged += 1
        except StoreUnavailable as error:
            told = str(error)
        reached = shim.calls >= at
        if told:
            with pytest.raises(StoreUnavailable, match="after a failed commit"):
                store.commit(Batch(mark_ms=10**9))
        shut(store)
    assert not told or "outcome is unknown" in told
    return acknowledged if reached else None


def acts(driver: Driver) -> Iterator[Callable[[], object]]:
    yield lambda: driver.create("r")
    yield lambda: driver.grant("r")
    for number in range(12):
        yield partial(driver.admit, "r", f"s{number}")
        yield partial(driver.settle, "r", f"s{number}", receipt="x" * 300)


def shut(store: SqliteStore) -> None:
    try:
        store.close()
    except StoreUnavailable:
        """The planted failure met the last checkpoint."""


COMMIT = """
import os, sys
from tests.stores.driver import Driver
from tidefast.protocol.commands import Preempt, Thaw
from tidefast.stores.sqlite import SqliteStore
store = SqliteStore.open(sys.argv[1], create=True)
driver = Driver(store, ms=10**6 * int(sys.argv[2]))
driver.create("r")
driver.submit(Preempt("r", "test"))
driver.submit(Thaw("r", "test"))
driver.grant("r")
number = 0
while True:
    driver.do("r", f"s{sys.argv[2]}-{number}", receipt="x" * 400)
    number += 1
    os.write(1, b"%d\\n" % store.load_head("r")[1].seq)
"""
KILLS = 30


def test_a_process_killed_at_any_moment_loses_nothing_acknowledged(folder: Path) -> None:
    path, chance = folder / "s.db", random.Random(7)
    environment = {**os.environ, "PYTHONPATH": f"{os.getcwd()}{os.pathsep}{os.getcwd()}/src"}
    for kill in range(1, KILLS + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMIT, str(path), str(kill)], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        told = b"".join(process.stdout.readline() for _ in range(chance.randrange(1, 25)))
        process.kill()
        told += process.communicate()[0]  # what it said between our last look and its death counts too
        store = SqliteStore.open(path, create=False, adopt=True)
        assert lost_in(store, int(told.splitlines()[-1])) == ""
        store.close()
