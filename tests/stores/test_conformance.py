"""What every store owes the engine, asked of each of them."""

import json

import pytest
from tests.stores.driver import BOOT, HOLDER, LEASE_MS, LOOK, ROUGH, Driver, everything, journal_whole

from tidefast.protocol import commands as c
from tidefast.protocol.budget import Amount, Budget, Limit, Reservation
from tidefast.protocol.events import Event, first_broken
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.notices import Notice
from tidefast.protocol.records import View
from tidefast.stores.base import (
    JOURNAL_ENTRY_BYTES,
    RUN_KEY_MAX,
    Batch,
    Store,
    StoreCorrupt,
    StoredEvent,
    StoreUnavailable,
)


def key_of(store: Store, run: str) -> int:
    found = store.load_head(RunId(run))
    assert found is not None
    return found[0]


def run_with_steps(driver: Driver, run: str = "r", count: int = 3) -> int:
    driver.create(run)
    driver.grant(run)
    for number in range(count):
        driver.do(run, f"s{number}")
    return key_of(driver.store, run)


def test_an_empty_store_has_nothing_and_says_so(store: Store) -> None:
    assert store.run_key_max() == 0
    assert store.load_head(RunId("r")) is None
    assert store.load_step(1, StepId("s")) is None
    assert store.load_event(1, 1) is None
    assert store.load_contract("d") is None
    assert list(store.load_events(1, 0, 9)) == list(store.load_steps(1, None, 9)) == []
    assert list(store.live_heads()) == list(store.fenced_runs()) == list(store.runs(None, 9, None)) == []
    assert (list(store.journal(1, 0, 99)[0]), store.journal(1, 0, 99)[1]) == ([], 0)
    assert list(store.claimable({"agent": ()}, 10**12, 9)) == list(store.forgotten(1, 0, Epoch(1))) == []
    assert len(store.identity().namespace) == 16


def test_what_was_committed_is_read_back(driver: Driver) -> None:
    key = run_with_steps(driver)
    head = driver.store.load_head(RunId("r"))
    assert head is not None and head[1].seq == 8 and head[1].state == "leased"
    step = driver.store.load_step(key, StepId("s1"))
    assert step is not None and step.state == "committed" and step.dedups is True
    assert driver.store.load_contract(step.contract) == driver.contracts[step.contract].to_json()
    receipt = driver.store.load_event(key, step.receipt_seq)
    assert receipt is not None and receipt.event.data["receipt"] == "ok"
    assert driver.store.run_key_max() == key


def test_an_event_read_back_holds_its_fields_and_nothing_that_a_rule_knew_beside_them(driver: Driver) -> None:
    key = run_with_steps(driver, count=1)
    for stored in driver.store.load_events(key, 0, 99):
        assert type(stored) is StoredEvent
        assert type(stored.event) is Event
        assert stored.event.known is None


def test_folding_the_log_gives_the_heads_and_the_steps(driver: Driver) -> None:
    key = run_with_steps(driver)
    driver.compensate("r", "s0")
    driver.settle("r", "s0~undo")
    driver.admit("r", "left")
    events = driver.store.load_events(key, 0, 1_000)
    view = View(b"", 0, frozenset())
    for stored in events:
        view = evolve(view, stored.event, RunId("r"))
    assert driver.store.load_head(RunId("r")) == (key, view.run)
    assert {step.step_id: step for step in driver.store.load_steps(key, None, 1_000)} == view.steps
    assert first_broken((stored.event, stored.digest) for stored in events) == 0


def test_a_batch_that_fails_in_its_middle_leaves_nothing(driver: Driver) -> None:
    key = run_with_steps(driver)
    before = everything(driver.store)
    batch, _ = driver.gather(
        [driver.admit_command("r", "a"), driver.admit_command("r", "b"), c.CreateRun(RunId("new"), "a", "1", "{}")]
    )
    batch.events.insert(2, StoredEvent(key, Event(1, 1, "run_thawed", Epoch(0), None, "{}"), "0" * 64))
    with pytest.raises(StoreCorrupt, match="contradicts"):
        driver.store.commit(batch)
    assert everything(driver.store) == before


def test_after_a_failed_commit_no_batch_is_taken(driver: Driver) -> None:
    key = run_with_steps(driver)
    good, _ = driver.gather([driver.admit_command("r", "a")])
    bad = Batch(events=[StoredEvent(key, Event(1, 1, "run_thawed", Epoch(0), None, "{}"), "0" * 64)])
    with pytest.raises(StoreCorrupt):
        driver.store.commit(bad)
    before = everything(driver.store)
    with pytest.raises(StoreUnavailable, match="after a failed commit"):
        driver.store.commit(good)
    assert everything(driver.store) == before


@pytest.mark.parametrize("member", ["epoch", "version"])
def test_an_epoch_and_a_version_never_decrease(driver: Driver, member: str) -> None:
    key = run_with_steps(driver)
    loaded = driver.store.load_head(RunId("r"))
    assert loaded is not None
    lower = loaded[1]._replace(**{member: getattr(loaded[1], member) - 1})
    with pytest.raises(StoreCorrupt, match="decrease"):
        driver.store.commit(Batch(heads={key: lower}))
    assert driver.store.load_head(RunId("r")) == loaded


def test_a_renewal_moves_the_expiry_and_no_version(driver: Driver) -> None:
    key = run_with_steps(driver)
    loaded = driver.store.load_head(RunId("r"))
    assert loaded is not None
    renewed = loaded[1]._replace(expires_at_ms=99_000)
    driver.store.commit(Batch(heads={key: renewed}))
    assert driver.store.load_head(RunId("r")) == (key, renewed)
    assert list(driver.store.live_heads()) == [(key, renewed)]


def test_a_step_of_an_unknown_run_is_refused(driver: Driver) -> None:
    key = run_with_steps(driver)
    step = driver.store.load_step(key, StepId("s0"))
    assert step is not None
    with pytest.raises(StoreCorrupt):
        driver.store.commit(Batch(steps={(key + 1, StepId("s0")): step}))


def test_two_runs_of_one_name_are_refused(driver: Driver) -> None:
    key = run_with_steps(driver)
    loaded = driver.store.load_head(RunId("r"))
    assert loaded is not None
    with pytest.raises(StoreCorrupt):
        driver.store.commit(Batch(heads={key + 1: loaded[1]}))


def test_the_highest_run_key_fits_and_the_next_does_not(driver: Driver) -> None:
    driver.create("r")
    loaded = driver.store.load_head(RunId("r"))
    event = driver.store.load_event(1, 1)
    assert loaded is not None and event is not None
    last = StoredEvent(RUN_KEY_MAX, event.event, event.digest)
    driver.store.commit(Batch(events=[last], heads={RUN_KEY_MAX: loaded[1]._replace(run_id=RunId("last"))}))
    assert driver.store.run_key_max() == RUN_KEY_MAX
    assert list(driver.store.load_events(RUN_KEY_MAX, 0, 9)) == [last]
    assert list(driver.store.load_events(RUN_KEY_MAX - 1, 0, 9)) == []
    with pytest.raises(StoreCorrupt):
        driver.store.commit(Batch(heads={RUN_KEY_MAX + 1: loaded[1]._replace(run_id=RunId("beyond"))}))


def test_several_moves_in_one_batch_keep_the_last_state(driver: Driver) -> None:
    driver.create("r")
    driver.grant("r")
    settle = c.Settle(RunId("r"), StepId("s"), 1, "applied", '"ok"')
    driver.submit(driver.admit_command("r", "s"), settle, driver.admit_command("r", "t"))
    key = key_of(driver.store, "r")
    assert [step.state for step in driver.store.load_steps(key, None, 9)] == ["committed", "fenced"]
    assert len(driver.store.load_events(key, 0, 99)) == 5


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_batch_may_carry_any_number_of_runs(driver: Driver, count: int) -> None:
    names = [f"r{number:03d}" for number in range(count)]
    driver.submit(*(c.CreateRun(RunId(name), "agent", "1", "{}") for name in names))
    assert [head.run_id for head in driver.store.runs(None, 1_000, None)] == names
    driver.submit(*(c.Grant(RunId(name), HOLDER, LEASE_MS, "q") for name in names))
    driver.submit(*(driver.admit_command(name, "s") for name in names))
    assert len(driver.store.fenced_runs()) == len(driver.store.live_heads()) == count


def test_a_contract_is_kept_as_first_written(store: Store) -> None:
    driver = Driver(store)
    driver.create("r")
    head = store.load_head(RunId("r"))
    assert head is not None
    store.commit(Batch(heads={head[0]: head[1]}, contracts={"d": "first", "e": "other"}))
    store.commit(Batch(heads={head[0]: head[1]}, contracts={"d": "second"}))
    assert (store.load_contract("d"), store.load_contract("e")) == ("first", "other")


def test_the_mark_rises_with_the_batches_and_never_falls(store: Store) -> None:
    def mark_after(ms: int) -> int:
        store.commit(Batch(mark_ms=ms))
        return store.identity().mark_ms

    assert [mark_after(ms) for ms in (5_000, 5_999, 6_000, 4_000, 0)] == [5_000, 5_000, 6_000, 6_000, 6_000]


def test_events_come_in_pages(driver: Driver) -> None:
    key = run_with_steps(driver)
    run_with_steps(driver, "other")
    whole = list(driver.store.load_events(key, 0, 1_000))
    assert [stored.event.seq for stored in whole] == list(range(1, 9))
    assert list(driver.store.load_events(key, 3, 2)) == whole[3:5]
    assert list(driver.store.load_events(key, 8, 2)) == []


def test_steps_come_in_order_of_their_ids(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    for name in ("b", "a10", "a1", "_x", "Z"):
        driver.do("r", name)
    names = [step.step_id for step in driver.store.load_steps(key, None, 9)]
    assert names == ["Z", "_x", "a1", "a10", "b"]
    assert [step.step_id for step in driver.store.load_steps(key, StepId("_x"), 2)] == ["a1", "a10"]


def test_the_ids_of_a_run_are_its_own_and_at_most_as_many_as_asked_for(driver: Driver) -> None:
    key = run_with_steps(driver, "r")
    run_with_steps(driver, "other", 1)
    assert sorted(driver.store.step_ids(key, 9)) == ["s0", "s1", "s2"]
    assert len(driver.store.step_ids(key, 2)) == 2
    assert list(driver.store.step_ids(99, 9)) == []


def test_the_journal_holds_finished_steps_in_order_of_settling(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    driver.admit("r", "late")
    driver.do("r", "early", receipt={"id": "ü"})
    driver.settle("r", "late")
    driver.submit(c.SaveResult(driver.right("r"), StepId("local"), "[1]"))
    driver.admit("r", "no")
    driver.settle("r", "no", "refused", receipt={"status": 402})
    driver.admit("r", "open")
    entries, go_on = driver.store.journal(key, 0, 10**6)
    told = [(entry.step_id, entry.kind, entry.state, entry.reason) for entry in entries]
    assert go_on == 0
    assert told == [
        ("early", "tool", "committed", ""),
        ("late", "tool", "committed", ""),
        ("local", "local", "committed", ""),
        ("no", "tool", "rejected", "refused"),
    ]
    assert json.loads(entries[0].data_json)["receipt"] == {"id": "ü"}
    for entry in entries:
        step = driver.store.load_step(key, entry.step_id)
        assert step is not None
        assert (entry.key, entry.call_digest, entry.settled_seq) == (step.key, step.call_digest, step.settled_seq)


def test_an_undone_step_stands_in_the_journal_with_its_undo(driver: Driver) -> None:
    key = run_with_steps(driver, count=1)
    driver.compensate("r", "s0")
    assert [(entry.state, entry.undo) for entry in driver.store.journal(key, 0, 10**6)[0]] == [("committed", "s0~undo")]
    driver.settle("r", "s0~undo")
    entries = driver.store.journal(key, 0, 10**6)[0]
    assert [(entry.step_id, entry.kind, entry.state) for entry in entries] == [
        ("s0~undo", "undo", "committed"),
        ("s0", "tool", "compensated"),
    ]


def test_a_withdrawn_step_stands_in_the_journal_without_a_receipt(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    driver.admit("r", "s")
    driver.settle("r", "s", "unsent", receipt=None)
    driver.submit(c.Fail(driver.right("r"), "gave up"))
    entries = driver.store.journal(key, 0, 10**6)[0]
    assert [(entry.state, entry.reason, entry.data_json) for entry in entries] == [("rejected", "withdrawn", "{}")]


def test_journal_pages_join_without_a_gap_whatever_their_size(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    for number in range(7):
        driver.do("r", f"s{number}", receipt="é" * 40 * number)
    whole = journal_whole(driver.store, key, 10**9)
    assert len(whole) == 1
    for bytes_max in (0, 1, 300, 700, 1_500, 4_000):
        pages = journal_whole(driver.store, key, bytes_max)
        assert [entry for page in pages for entry in page] == whole[0]
        for page in pages:
            size = sum(JOURNAL_ENTRY_BYTES + len(entry.data_json.encode()) for entry in page)
            assert size <= bytes_max or len(page) == 1
    assert len(journal_whole(driver.store, key, 0)) == 7


def test_forgotten_steps_are_mutating_settled_since_and_of_another_epoch(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    driver.do("r", "before")
    driver.submit(c.SaveCheckpoint(driver.right("r"), 1, "{}"))
    driver.do("r", "since")
    driver.do("r", "read", LOOK)
    driver.submit(c.SaveResult(driver.right("r"), StepId("local"), "1"))
    driver.submit(c.Release(driver.right("r"), "shutdown"))
    driver.grant("r")
    driver.do("r", "mine")
    driver.admit("r", "open")
    head = driver.store.load_head(RunId("r"))
    assert head is not None
    assert list(driver.store.forgotten(key, head[1].checkpoint_seq, head[1].epoch)) == ["since"]
    assert list(driver.store.forgotten(key, 0, head[1].epoch)) == ["before", "since"]
    assert list(driver.store.forgotten(key, head[1].seq, head[1].epoch)) == []
    assert list(driver.store.forgotten(key, 0, Epoch(99))) == ["before", "since", "mine"]


def test_live_heads_are_those_whose_epoch_no_event_has_ended(driver: Driver) -> None:
    for name in ("new", "live", "released", "done", "diverged"):
        driver.create(name)
    for name in ("live", "released", "done", "diverged"):
        driver.grant(name)
    driver.submit(c.Release(driver.right("released"), "done"))
    driver.complete("done")
    freeze_live(driver, "diverged")
    assert [head.run_id for _, head in driver.store.live_heads()] == ["live", "diverged"]


def freeze_live(driver: Driver, run: str) -> None:
    driver.admit(run, "s")
    driver.settle(run, "s", "refused")
    driver.settle(run, "s", "applied")
    loaded = driver.store.load_head(RunId(run))
    assert loaded is not None and loaded[1].frozen == "diverged" and loaded[1].is_live


def test_fenced_runs_are_those_with_a_step_on_its_way(driver: Driver) -> None:
    for name in ("a", "b", "c", "d"):
        driver.create(name)
        driver.grant(name)
    driver.admit("a", "s")
    driver.do("b", "s")
    driver.admit("c", "s")
    driver.submit(c.Release(driver.right("c"), "shutdown"))
    driver.admit("d", "s")
    driver.settle("d", "s", "doubted", receipt=None)
    assert list(driver.store.fenced_runs()) == ["a", "c"]
    assert [head.run_id for _, head in driver.store.live_heads()] == ["a", "b", "d"]
    driver.settle("c", "s")
    assert list(driver.store.fenced_runs()) == ["a"]


def test_claimable_are_runs_that_a_worker_of_these_agents_could_be_granted(driver: Driver) -> None:
    for name in ("z-first", "leased", "ended", "held", "frozen", "resting", "last"):
        driver.create(name)
    driver.create("other", agent="other")
    driver.create("newer", version="2")
    for name in ("leased", "ended", "held", "frozen", "resting"):
        driver.grant(name)
    driver.complete("ended")
    hold(driver, "held")
    driver.submit(c.Release(driver.right("held"), "held"))
    driver.submit(c.Release(driver.right("frozen"), "drift"))
    driver.submit(c.Release(driver.right("resting"), "error"))
    for _ in range(2):  # the third grant without progress makes a run rest
        driver.grant("resting")
        driver.submit(c.Release(driver.right("resting"), "error"))
    now, claimable = driver.ms, driver.store.claimable
    assert list(claimable({"agent": ("1",)}, now, 99)) == ["z-first", "last"]
    assert list(claimable({"agent": ("1",)}, now + 999, 99)) == ["z-first", "last"]
    assert list(claimable({"agent": ("1",)}, now + 1000, 99)) == ["z-first", "resting", "last"]
    assert list(claimable({"agent": ()}, now, 99)) == ["z-first", "last", "newer"]
    assert list(claimable({"agent": ("2", "3")}, now, 99)) == ["newer"]
    assert list(claimable({"agent": ("1",), "other": ("1",)}, now, 99)) == ["z-first", "last", "other"]
    assert list(claimable({"other": (), "agent": ()}, now, 2)) == ["z-first", "last"]
    assert list(claimable({"agent": ("3",), "none": ()}, now, 99)) == list(claimable({}, now, 99)) == []


def hold(driver: Driver, run: str) -> None:
    driver.admit(run, "s", ROUGH)
    driver.settle(run, "s", "doubted", receipt=None)
    driver.ms += 3_000
    driver.admit(run, "s", ROUGH)
    loaded = driver.store.load_head(RunId(run))
    assert loaded is not None and loaded[1].held_steps == ("s",)


def test_a_failing_run_that_nobody_holds_is_claimable(driver: Driver) -> None:
    driver.create("r")
    driver.grant("r")
    driver.admit("r", "s")
    driver.submit(c.Fail(driver.right("r"), "gave up"))
    driver.submit(c.Release(driver.right("r"), "shutdown"))
    assert [head.run_id for head in driver.store.runs(None, 9, "failing")] == ["r"]
    assert list(driver.store.claimable({"agent": ()}, driver.ms, 9)) == ["r"]


def test_runs_come_in_order_of_creation_in_pages_and_by_state(driver: Driver) -> None:
    names = ["m", "z", "a", "k", "b"]
    for name in names:
        driver.create(name)
    driver.grant("z")
    driver.grant("b")
    driver.complete("b")

    def named(after: str | None, limit: int, state: str | None) -> list[str]:
        return [head.run_id for head in driver.store.runs(None if after is None else RunId(after), limit, state)]

    assert named(None, 99, None) == names
    assert named(None, 2, None) == ["m", "z"]
    assert named("z", 2, None) == ["a", "k"]
    assert named("b", 2, None) == []
    assert named("unknown", 99, None) == []
    assert named(None, 99, "claimable") == ["m", "a", "k"]
    assert named("m", 1, "claimable") == ["a"]
    assert named(None, 99, "leased") == ["z"]
    assert named("z", 99, "leased") == []
    assert named(None, 99, "completed") == ["b"]
    assert named(None, 99, "failed") == named(None, 99, "nonsense") == []


def test_bodies_with_every_kind_of_text_come_back_as_they_were(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    body = {"quotes": "\"'\\", "nul": "\x00", "wide": "😀", "é": [None, 1.5, True]}
    driver.do("r", "s", receipt=body)
    events = driver.store.load_events(key, 0, 99)
    assert events[-1].event.data["receipt"] == body
    assert first_broken((stored.event, stored.digest) for stored in events) == 0


def test_a_body_of_a_megabyte_comes_back_as_it_was(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    driver.do("r", "s", receipt="x" * 2**20)
    assert driver.store.load_events(key, 3, 1)[0].event.data["receipt"] == "x" * 2**20


def test_an_attempt_list_comes_back_as_it_was(driver: Driver) -> None:
    key = run_with_steps(driver, count=0)
    driver.admit("r", "s")
    driver.settle("r", "s", "doubted", receipt=None)
    driver.ms += 2_500
    driver.admit("r", "s")
    step = driver.store.load_step(key, StepId("s"))
    assert step is not None
    assert [(each.number, each.owner, each.state, each.older_over) for each in step.attempts] == [
        (1, BOOT, "doubted", True),
        (2, BOOT, "out", True),
    ]


def test_budgets_come_back_as_they_were_and_in_order_of_their_names(store: Store) -> None:
    assert store.load_budget("run/r") is None
    held = Reservation("r/plan/1", Amount(1, 20, 300), 9_000, True)
    first = Budget("run/r", 3, Amount(1, 2, 3), Amount(0, 1, 2), Limit(None, 0, 7), (held,), "ops: why")
    store.commit(Batch(budgets={"run/r": first, "agent/a": Budget("agent/a")}))
    assert store.load_budget("run/r") == first
    assert [budget.name for budget in store.budgets("", 9)] == ["agent/a", "run/r"]
    assert [budget.name for budget in store.budgets("agent/a", 1)] == ["run/r"]
    store.commit(Batch(budgets={"run/r": first._replace(version=4, open=())}))
    assert store.load_budget("run/r") == first._replace(version=4, open=())


def test_notices_are_due_in_their_order_and_gone_once_they_are_told(store: Store) -> None:
    late, soon = Notice("n_b", "{}", 0, 20), Notice("n_a", "{}", 0, 10)
    store.commit(Batch(notices={late.id: late, soon.id: soon}))
    assert list(store.notices(9, 9)) == []
    assert list(store.notices(20, 9)) == [soon, late]
    assert list(store.notices(20, 1)) == [soon]
    store.commit(Batch(notices={soon.id: soon._replace(tries=1, due_ms=30), late.id: None}))
    assert list(store.notices(99, 9)) == [soon._replace(tries=1, due_ms=30)]


def test_held_runs_are_found_whatever_their_state_is_and_nothing_else_is(driver: Driver) -> None:
    for name in ("plain", "held", "leased", "frozen"):
        driver.create(name)
        driver.grant(name)
        if name != "plain":
            hold(driver, name)
    driver.submit(c.Release(driver.right("held"), "held"))
    driver.submit(c.Freeze(RunId("frozen"), "ann"))
    assert [head.run_id for head in driver.store.held_runs(None, 9)] == ["held", "leased", "frozen"]
    assert [head.run_id for head in driver.store.held_runs(RunId("held"), 1)] == ["leased"]
    assert [head.run_id for head in driver.store.held_runs(None, 9, "fro")] == ["frozen"]
    assert list(driver.store.held_runs(RunId("nobody"), 9)) == []
