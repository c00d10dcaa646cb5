"""The auditor clears true stores, and names run, step and first event of whatever is wrong with others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.books import CHARGE, NAMESPACE, RUN, Books, Log, store_of
from tests.sim.stories import STORIES, compensated, failing, happy, held, lost_answer, play

from tidefast.protocol.events import CHAIN_START, chain
from tidefast.protocol.ids import Epoch, RunId, StepId, step_key
from tidefast.protocol.laws import Ack
from tidefast.protocol.records import RunHead, Step
from tidefast.sim.audit import NAMED_MAX, AuditReport, audit
from tidefast.sim.history import Ledger, Reader, histories, read_ledger
from tidefast.sim.report import to_text
from tidefast.stores.base import StoredEvent
from tidefast.stores.memory import MemoryStore

PAY = StepId("pay")
KEY = step_key(NAMESPACE, RUN, PAY)


def books_of(story: Callable[[Books], None], run: str = RUN) -> Books:
    books = Books(RunId(run)).create()
    books.grant()
    story(books)
    return books


class Bent:
    """A store that answers some reads otherwise than it should."""

    def __init__(self, store: MemoryStore, **reads: Callable[..., Any]) -> None:
        self._store = store
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        return self._reads.get(name) or getattr(self._store, name)


@pytest.mark.parametrize("name", STORIES)
def test_what_the_rules_wrote_is_cleared(name: str) -> None:
    report = audit(books_of(STORIES[name]).store())
    assert report.is_ok, report.violations
    assert report.runs == 1 and report.events > 1


def test_the_denominators_are_counted() -> None:
    store = books_of(happy, "a").store()
    books_of(compensated, "b").store(store)
    books_of(held("applied"), "c").store(store)
    report = audit(store)
    assert (report.runs, report.mutating_steps, report.preemptions, report.held) == (3, 7, 2, 1)
    assert report.events == sum(len(history.events) for history in histories(store))
    assert report.is_ok and not report.moving


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), max_size=40),
)
def test_heads_and_steps_agree_with_the_second_fold(moves: list[tuple[int, int, int, int]]) -> None:
    books = Books().create()
    books.grant()
    play(books, moves)
    report = audit(books.store(), now_ms=books.ms)
    assert report.is_ok, report.violations


# --- projections -------------------------------------------------------------------------------------------------


def bent_head(**changed: Any) -> AuditReport:
    store = books_of(lost_answer).store()

    def load_head(run_id: RunId) -> tuple[int, RunHead] | None:
        found = store.load_head(run_id)
        return None if found is None else (found[0], found[1]._replace(**changed))

    return audit(Bent(store, load_head=load_head))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"epoch": Epoch(2)}, "epoch 2"),
        ({"is_live": True}, "is_live True"),
        ({"holder": "zombie"}, "holder 'zombie'"),
        ({"checkpoint": 1}, "checkpoint 1"),
        ({"checkpoint_seq": 4}, "checkpoint_seq 4"),
        ({"frozen": "drift"}, "frozen 'drift'"),
        ({"ending": "failing"}, "ending 'failing'"),
        ({"paused": True}, "paused True"),
        ({"to_undo": ("pay",)}, "to_undo ('pay',)"),
        ({"end": ""}, "end ''"),
        ({"digest": "0" * 64}, "last digest"),
    ],
)
def test_a_head_that_says_something_else_is_named(changed: Mapping[str, Any], word: str) -> None:
    report = bent_head(**changed)
    assert report.counts["altered_log"] == 1 and not report.is_ok
    assert word in report.violations[0].why and report.violations[0].run_id == RUN


def test_a_head_that_is_ahead_of_the_log_is_named() -> None:
    report = bent_head(seq=50)
    assert [violation.seq for violation in report.violations] == [9]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"state": "rejected"}, "state 'rejected'"),
        ({"key": "0" * 32}, "key '000"),
        ({"call_digest": ""}, "call_digest ''"),
        ({"attempts": ()}, "attempts 0"),
        ({"closed_by": StepId("pay~undo")}, "closed_by 'pay~undo'"),
        ({"settled_seq": 3}, "settled_seq 3"),
        ({"epoch": Epoch(9)}, "epoch 9"),
    ],
)
def test_a_row_of_a_step_that_says_something_else_is_named(changed: Mapping[str, Any], word: str) -> None:
    store = books_of(lost_answer).store()

    def load_steps(run_key: int, after: StepId | None, limit: int) -> Sequence[Step]:
        return [step._replace(**changed) for step in store.load_steps(run_key, after, limit)]

    report = audit(Bent(store, load_steps=load_steps))  # type: ignore[arg-type]
    first = report.violations[0]
    assert (first.law, first.run_id, first.step_id, first.seq) == ("altered_log", RUN, PAY, 6)
    assert word in first.why and report.counts["altered_log"] == 1


def test_a_step_that_only_one_side_has_is_named() -> None:
    store = books_of(lost_answer).store()
    none = Bent(store, load_steps=lambda *_: [])
    assert "store doesn't know" in audit(none).violations[0].why  # type: ignore[arg-type]
    found = store.load_step(1, PAY)
    assert found is not None
    more = Bent(store, load_steps=lambda *_: [found, found._replace(step_id=StepId("ghost"))])
    report = audit(more)  # type: ignore[arg-type]
    assert [(v.step_id, v.why) for v in report.violations] == [
        ("ghost", "the store has a step that the log doesn't know"),
    ]


# --- the log ------------------------------------------------------------------------------------------------------


def with_events(store: MemoryStore, change: Callable[[list[StoredEvent]], list[StoredEvent]]) -> Bent:
    def load_events(run_key: int, after: int, limit: int) -> Sequence[StoredEvent]:
        return change(list(store.load_events(run_key, 0, 10_000)))[after : after + limit]

    return Bent(store, load_events=load_events)


def test_an_edited_event_is_named_with_its_step_and_place() -> None:
    books_of(happy, "before").store(store := books_of(lost_answer).store())

    def edit(rows: list[StoredEvent]) -> list[StoredEvent]:
        if len(rows) == 8:
            rows[3] = rows[3]._replace(event=rows[3].event._replace(at_ms=1))
        return rows

    report = audit(with_events(store, edit))  # type: ignore[arg-type]
    first = next(violation for violation in report.violations if violation.law == "altered_log")
    assert (first.run_id, first.step_id, first.seq) == (RUN, PAY, 4)


@pytest.mark.parametrize(
    ("log", "law", "step", "seq"),
    [
        (Log().paid().replayed(), "double_apply", "pay", 5),
        (Log().fenced().preempted(1).told("step_committed"), "dead_commit", "pay", 5),
        (Log().fenced().say("run_completed", 1, result=None, result_digest=""), "orphan", "pay", 4),
    ],
)
def test_a_breach_in_a_store_is_named(log: Log, law: str, step: str, seq: int) -> None:
    report = audit(store_of(log))
    assert {violation.law for violation in report.violations} == {law}
    assert (report.violations[0].run_id, report.violations[0].step_id, report.violations[0].seq) == (RUN, step, seq)
    assert report.counts[law] == 1


def test_a_forged_chain_shows_against_the_head() -> None:
    def forge(rows: list[StoredEvent]) -> list[StoredEvent]:
        digest = CHAIN_START
        for place, row in enumerate(rows):
            event = row.event._replace(epoch=Epoch(1)) if place == 0 else row.event
            digest = chain(digest, event)
            rows[place] = row._replace(event=event, digest=digest)
        return rows

    report = audit(with_events(books_of(lost_answer).store(), forge))  # type: ignore[arg-type]
    assert report.counts["altered_log"] == 1


# --- the ledger ---------------------------------------------------------------------------------------------------


def test_a_ledger_that_agrees_is_cleared() -> None:
    ledger = read_ledger(f'[{{"key":"{KEY}","count":1}},{{"key":"{"0" * 32}","count":0}}]')
    report = audit(books_of(lost_answer).store(), ledger)
    assert report.is_ok and report.has_ledger


def test_a_second_effect_is_named() -> None:
    report = audit(books_of(lost_answer).store(), Ledger({KEY: 2}))
    first = report.violations[0]
    assert (first.law, first.step_id, first.seq) == ("double_apply", PAY, 6)
    assert "count should be 1, but it is 2" in first.why


def test_effects_that_never_passed_the_gateway_are_named() -> None:
    ledger = Ledger({KEY: 1, "9" * 32: 1}, {(RUN, StepId("mail")): 1, (RunId("other"), StepId("mail")): 1})
    report = audit(books_of(lost_answer).store(), ledger)
    named = {(violation.run_id, violation.step_id) for violation in report.violations}
    assert named == {(RUN, None), ("", None), ("other", "mail")}
    assert report.counts["unlogged_effect"] == 3
    assert all("which n" in violation.why for violation in report.violations)


def test_a_ledger_may_speak_for_some_tools_only() -> None:
    store = books_of(lost_answer).store()
    assert audit(store, Ledger(tools=frozenset(("mail",)))).is_ok
    assert not audit(store, Ledger(tools=frozenset((CHARGE.tool,)))).is_ok


def test_what_callers_were_told_is_looked_for() -> None:
    store = books_of(failing).store()
    acks = {RUN: (Ack("apply", Epoch(1), 99, PAY),)}
    assert audit(store, acks=acks).counts["lost_ack"] == 1


# --- a store in use, and a large one ------------------------------------------------------------------------------


def test_a_run_that_moves_is_read_again_and_if_it_never_rests_only_its_log_is_judged() -> None:
    store = books_of(lost_answer).store()
    for restless_reads, moving in ((1, 0), (1_000, 1)):
        reads = [0]

        def load_head(run_id: RunId, reads: list[int] = reads, limit: int = restless_reads) -> Any:
            reads[0] += 1
            found = store.load_head(run_id)
            assert found is not None
            return found[0], found[1]._replace(seq=8 if reads[0] > limit else reads[0])

        report = audit(Bent(store, load_head=load_head))  # type: ignore[arg-type]
        assert (report.moving, report.runs, report.is_ok) == (moving, 1, True)


def test_a_run_that_vanishes_is_counted_as_moving() -> None:
    store = books_of(lost_answer).store()
    report = audit(Bent(store, load_head=lambda _: None))  # type: ignore[arg-type]
    assert (report.moving, report.runs) == (1, 0)
    assert list(histories(Bent(store, load_head=lambda _: None))) == []  # type: ignore[arg-type]


def test_many_runs_and_long_logs_are_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidefast.sim.history.PAGE_RUNS", 2)
    monkeypatch.setattr("tidefast.sim.history.PAGE_EVENTS", 3)
    monkeypatch.setattr("tidefast.sim.audit.PAGE_STEPS", 2)
    store = MemoryStore(NAMESPACE)
    for number in range(5):
        books_of(happy, f"r{number}").store(store)
    report = audit(store)
    assert report.is_ok and report.runs == 5
    assert list(Reader(store).run_ids()) == [f"r{number}" for number in range(5)]


def test_every_violation_is_counted_and_the_first_ones_are_kept() -> None:
    report = audit(MemoryStore(NAMESPACE), Ledger({f"{number:032}": 1 for number in range(NAMED_MAX + 5)}))
    assert report.counts["unlogged_effect"] == NAMED_MAX + 5 and len(report.violations) == NAMED_MAX


def test_a_contract_that_cannot_be_read_is_left_out() -> None:
    store = books_of(happy).store()
    for text in (None, "{", '{"tool":"x"}'):
        bent = Bent(store, load_contract=lambda _, text=text: text)
        (history,) = histories(bent)  # type: ignore[arg-type]
        assert history.contracts == {}
    wide = Bent(store, load_contract=lambda _: "[]")
    report = audit(wide)  # type: ignore[arg-type]
    assert set(report.counts) - {"altered_log"} == {law for law, count in report.counts.items() if not count}
    assert all("its intent names was altered" in violation.why for violation in report.violations)


def test_an_intent_that_cannot_be_read_stops_nothing() -> None:
    for text in ("{", "[]", "[" * 100_000):
        log = Log().say("step_fenced", 1, "pay", text=text)
        assert any(violation.law == "altered_log" for violation in audit(store_of(log)).violations)


def test_an_audit_can_be_told() -> None:
    from tidefast.sim.report import from_audit

    text = to_text(from_audit(audit(books_of(lost_answer).store(), Ledger({KEY: 2}))))
    assert "double_apply: run r, step pay, event 6: " in text and "NOT OK" in text
