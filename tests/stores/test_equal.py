"""Random sequences of commands give equal reads from every store, also after the file was closed and opened again."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stores.driver import CHARGE, HOLDER, LEASE_MS, LOOK, ROUGH, Driver, everything

from tidefast.protocol import commands as c
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.records import View
from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore

RUNS = st.sampled_from(["a", "b", "c"])
STEPS = st.sampled_from(["s", "t", "u"])
TOOLS = st.sampled_from([CHARGE, ROUGH, LOOK])
OUTCOMES = st.sampled_from(["applied", "refused", "unsent", "doubted", "unlisted"])
WORDS = st.sampled_from(["applied", "not_applied", "refused", "compensated"])
Act = Callable[[Driver], object]


def acts() -> st.SearchStrategy[Act]:
    return st.one_of(
        st.builds(lambda r: lambda d: d.submit(c.Grant(RunId(r), HOLDER, LEASE_MS, str(d.ms))), RUNS),
        st.builds(lambda r, s, t: lambda d: d.admit(r, s, t), RUNS, STEPS, TOOLS),
        st.builds(lambda r, s, t: lambda d: d.admit(r, s, t), RUNS, STEPS, TOOLS),
        st.builds(lambda r, s, o, n: lambda d: d.settle(r, s, o, n), RUNS, STEPS, OUTCOMES, st.integers(1, 3)),
        st.builds(lambda r, s: lambda d: d.settle(r, s), RUNS, STEPS),
        st.builds(lambda r, s: lambda d: d.compensate(r, s), RUNS, STEPS),
        st.builds(lambda r, s: lambda d: d.settle(r, s + "~undo"), RUNS, STEPS),
        st.builds(lambda r, s: lambda d: d.submit(c.MarkLost(RunId(r), StepId(s))), RUNS, STEPS),
        st.builds(
            lambda r, s, w: lambda d: d.submit(c.Resolve(RunId(r), StepId(s), w, "anna", "looked")), RUNS, STEPS, WORDS
        ),
        st.builds(lambda r, s: lambda d: d.submit(c.SaveResult(d.right(r), StepId("l" + s), "1")), RUNS, STEPS),
        st.builds(lambda r, n: lambda d: d.submit(c.SaveCheckpoint(d.right(r), n, "{}")), RUNS, st.integers(1, 3)),
        st.builds(
            lambda r, w: lambda d: d.submit(c.Release(d.right(r), w)), RUNS, st.sampled_from(["done", "error", "drift"])
        ),
        st.builds(lambda r: lambda d: d.submit(c.Thaw(RunId(r), "anna")), RUNS),
        st.builds(lambda r: lambda d: d.submit(c.Preempt(RunId(r), "anna")), RUNS),
        st.builds(lambda r: lambda d: d.submit(c.Fail(d.right(r), "gave up")), RUNS),
        st.builds(lambda r: lambda d: d.complete(r), RUNS),
        st.builds(lambda ms: lambda d: setattr(d, "ms", d.ms + ms), st.sampled_from([1, 900, 2_500, 12_000])),
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(acts(), min_size=5, max_size=60))
def test_random_commands_give_equal_reads_from_memory_and_sqlite(folder: Path, sequence: list[Act]) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "s.db"
        file = SqliteStore.open(path, create=True)
        # One namespace, so that both derive the same keys.
        memory = MemoryStore(file.identity().namespace)
        for store in (memory, file):
            play(store, sequence)
        assert everything(memory) == everything(file)
        file.close()
        again = SqliteStore.open(path, create=False)
        assert everything(memory) == everything(again)
        fold_and_compare(again)
        again.close()


def play(store: Store, sequence: list[Act]) -> None:
    driver = Driver(store)
    for name in "abc":
        driver.create(name, version=str(len(name)))
        driver.grant(name)
    for act in sequence:
        act(driver)


def fold_and_compare(store: Store) -> None:
    """The log folded again gives what the store holds as heads and steps."""
    for name in "abc":
        loaded = store.load_head(RunId(name))
        assert loaded is not None
        view = View(b"", 0, frozenset())
        for stored in store.load_events(loaded[0], 0, 10_000):
            view = evolve(view, stored.event, RunId(name))
            assert view.run is not None and view.run.digest == stored.digest
        assert view.run == loaded[1]
        assert view.steps == {step.step_id: step for step in store.load_steps(loaded[0], None, 10_000)}
