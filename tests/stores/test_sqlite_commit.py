"""The commit of the SQLite store: its errors, its second lock, its settings, and how many statements it takes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stores.driver import HOLDER, LEASE_MS, Driver

from tidefast.protocol import commands as c
from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.records import Step
from tidefast.stores import sqlite_rows
from tidefast.stores.base import Batch, StoreCorrupt, StoredEvent, StoreError, StoreUnavailable
from tidefast.stores.sqlite import SqliteStore
from tidefast.stores.sqlite_errors import MEANING, explain


@pytest.fixture
def store(folder: Path) -> Any:
    made = SqliteStore.open(folder / "s.db", create=True)
    yield made
    made.close()


def writer_of(store: SqliteStore) -> apsw.Connection:
    assert store._writer is not None
    return store._writer


# --- errors ----------------------------------------------------------------------------------------------

RAISED = [
    each
    for each in vars(apsw).values()
    if isinstance(each, type) and issubclass(each, Exception) and each != apsw.Error
]


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
def test_every_error_of_sqlite_has_a_meaning(kind: type[Exception]) -> None:
    assert kind in MEANING
    told = explain(kind("why"), "s.db", "committing to")
    assert isinstance(told, StoreError)
    assert str(told).startswith("committing to s.db: ") and "(why)" in str(told)


def test_an_error_that_the_table_lacks_is_an_unknown_outcome() -> None:
    assert isinstance(explain(KeyError("x"), "s.db", "reading"), StoreUnavailable)


class Failing:
    """A connection that fails at the statement that starts with a word."""

    def __init__(self, connection: apsw.Connection, word: str, error: Exception) -> None:
        self._connection, self._word, self._error = connection, word, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, values: Any = ()) -> Any:
        if statement.startswith(self._word):
            raise self._error
        return self._connection.execute(statement, values)


@pytest.mark.parametrize("word", ["BEGIN", "INSERT INTO runs", "INSERT INTO events", "UPDATE meta", "COMMIT"])
@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (apsw.FullError("full"), StoreUnavailable),
        (apsw.IOError("flush"), StoreUnavailable),
        (apsw.BusyError("busy"), StoreUnavailable),
        (apsw.CorruptError("torn"), StoreCorrupt),
        (apsw.NotADBError("what"), StoreCorrupt),
        (MemoryError("memory"), StoreUnavailable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_commit_that_fails_is_rolled_back_told_and_final(
    store: SqliteStore, word: str, error: Exception, meaning: type[StoreError]
) -> None:
    driver = Driver(store)
    driver.create("before")
    connection = writer_of(store)
    store._writer = Failing(connection, word, error)  # type: ignore[assignment]
    driver.ms += 5_000
    with pytest.raises(meaning):
        driver.create("r")
    store._writer = connection
    assert not connection.in_transaction
    assert store.load_head(RunId("r")) is None
    with pytest.raises(StoreUnavailable, match="after a failed commit"):
        driver.create("after")
    assert store.identity().mark_ms == 1_000


def test_an_integer_beyond_64_bits_and_a_lone_surrogate_do_not_get_in(tmp_path: Path) -> None:
    for number, changed in enumerate(({"at_ms": 2**63}, {"epoch": Epoch(2**64)}, {"data_json": '"\ud800"'})):
        store = SqliteStore.open(tmp_path / f"{number}.db", create=True)
        event = Event(1, 1, "run_thawed", Epoch(0), None, "{}")._replace(**changed)  # type: ignore[arg-type]
        with pytest.raises(StoreUnavailable, match=r"64 bits|surrogate"):
            store.commit(Batch(events=[StoredEvent(1, event, "0" * 64)]))
        assert store.load_event(1, 1) is None
        store.close()


def test_a_value_of_the_wrong_type_does_not_get_in(store: SqliteStore) -> None:
    event = Event(1, "9x", "run_thawed", Epoch(0), None, "{}")  # type: ignore[arg-type]
    with pytest.raises(StoreCorrupt, match="cannot store TEXT"):
        store.commit(Batch(events=[StoredEvent(1, event, "0" * 64)]))


# --- the second lock -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET data = '{}'",
        "DELETE FROM events",
        "INSERT OR REPLACE INTO events SELECT 1, event_key, at_ms, kind, epoch, step_id, '{}', digest FROM events",
        "UPDATE runs SET epoch = epoch - 1",
        "UPDATE runs SET version = version - 1",
        "DELETE FROM runs",
        "INSERT INTO events SELECT NULL, event_key, at_ms, kind, epoch, step_id, data, digest FROM events LIMIT 1",
    ],
)
def test_the_file_itself_refuses_to_be_rewritten(store: SqliteStore, statement: str) -> None:
    driver = Driver(store)
    driver.create("r")
    driver.grant("r")
    writer_of(store).pragma("recursive_triggers", True)
    with pytest.raises(apsw.ConstraintError):
        writer_of(store).execute(statement)


# --- settings and plans ----------------------------------------------------------------------------------


def test_the_settings_that_the_promises_rest_on_are_in_force(store: SqliteStore) -> None:
    writer, reader = writer_of(store), store._reader
    assert [writer.pragma(name) for name in ("journal_mode", "synchronous", "foreign_keys")] == ["wal", 2, 1]
    assert reader.pragma("query_only") == 1
    assert reader.readonly("main")
    for table in ("meta", "runs", "events", "steps", "contracts"):
        assert writer.execute("SELECT strict FROM pragma_table_list WHERE name = ?", (table,)).get == 1
    assert tuple(map(int, apsw.sqlite_lib_version().split("."))) >= (3, 51, 3)


def test_the_columns_of_a_step_are_the_fields_of_its_record_in_order(store: SqliteStore) -> None:
    """A field added to the record without a migration shows here."""
    columns = [row[1] for row in store._reader.execute("PRAGMA table_info(steps)")]
    assert columns == ["run_key", *Step._fields]
    assert all(", ".join(Step._fields) in text for text in (sqlite_rows.STEP, sqlite_rows.STEPS))
    assert ", ".join(columns) in sqlite_rows.WRITE_STEPS._texts[1]


READS = [name for name in vars(sqlite_rows) if name.isupper() and str(getattr(sqlite_rows, name)).startswith("SELECT")]


@pytest.mark.parametrize("name", READS)
def test_no_read_walks_a_table_or_sorts(store: SqliteStore, name: str) -> None:
    statement = getattr(sqlite_rows, name)
    plan = store._reader.execute("EXPLAIN QUERY PLAN " + statement, (1,) * statement.count("?"))
    for _, _, _, step in plan:
        assert "TEMP B-TREE" not in step
        assert not step.startswith("SCAN") or step in (
            "SCAN meta",
            "SCAN runs USING INDEX runs_busy",  # holds the runs in work and no others
            "SCAN json_each VIRTUAL TABLE INDEX 1:",
        )


def statements(store: SqliteStore, act: Callable[[], object]) -> int:
    """How many times a statement of the writer was started."""
    count = 0

    def trace(*_: object) -> bool:
        nonlocal count
        count += 1
        return True

    writer_of(store).exec_trace = trace
    act()
    writer_of(store).exec_trace = None
    return count


def test_a_batch_of_a_hundred_runs_takes_at_most_one_more_statement_for_each_table(store: SqliteStore) -> None:
    driver = Driver(store)

    def batches(names: list[str]) -> list[int]:
        counts = [statements(store, lambda: driver.submit(*(c.CreateRun(RunId(n), "agent", "1", "{}") for n in names)))]
        driver.submit(*(c.Grant(RunId(name), HOLDER, LEASE_MS, "q") for name in names))
        counts.append(statements(store, lambda: driver.submit(*(driver.admit_command(name, "s") for name in names))))
        return counts

    driver.ms = 0  # no mark to write
    one = batches(["one"])
    assert one == [4, 6]
    assert batches([f"r{number}" for number in range(sqlite_rows.ROWS_AT_ONCE)]) == one
    assert batches([f"s{number}" for number in range(100)]) == [6, 9]


def test_a_step_costs_no_more_after_a_long_history(store: SqliteStore) -> None:
    """Counted in the virtual machine's own instructions, which no noise moves."""
    driver = Driver(store)
    driver.create("r")
    driver.grant("r")

    def instructions(step: str) -> int:
        count = 0

        def tick() -> bool:
            nonlocal count
            count += 1
            return False

        for connection in (writer_of(store), store._reader):
            connection.set_progress_handler(tick, 1)
        driver.do("r", step)
        for connection in (writer_of(store), store._reader):
            connection.set_progress_handler(None)
        return count

    driver.do("r", "warm")
    early = instructions("early")
    for number in range(500):
        driver.do("r", f"s{number}")
    assert instructions("late") <= early * 1.1


# --- two threads -----------------------------------------------------------------------------------------


def test_reads_on_one_thread_see_whole_batches_while_another_commits(store: SqliteStore) -> None:
    driver = Driver(store)
    names = [f"r{number}" for number in range(10)]
    driver.submit(*(c.CreateRun(RunId(name), "agent", "1", "{}") for name in names))
    driver.submit(*(c.Grant(RunId(name), HOLDER, LEASE_MS, "q") for name in names))
    done, faults = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            seqs = {head.seq for head in store.runs(None, 99, None)}
            if len(seqs) != 1:
                faults.append(seqs)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for number in range(40):
            driver.submit(*(driver.admit_command(name, f"s{number}") for name in names))
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert faults == []
    assert {head.seq for head in store.runs(None, 99, None)} == {42}
