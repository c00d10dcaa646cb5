"""Each law convicts a log that breaks it, and that law alone; no law convicts a log that the rules wrote."""

import ast
import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.books import CHARGE, LOOK, NAMESPACE, PATIENT, REFUND, ROUGH, RUN, TRIP, UUID, Books, Log
from tests.sim.stories import STORIES, compensated, failing, happy, lost_answer, play

from tidefast.protocol import laws, laws_of_runs, trace
from tidefast.protocol.events import CHAIN_START, Event, chain
from tidefast.protocol.ids import Epoch, StepId, step_key
from tidefast.protocol.laws import LAWS, Ack, History, judge

NAMES = (  # noqa: SIM905
    "double_apply dead_commit stale_checkpoint unstable_key changed_bytes unlogged_effect overlap lost_fact "
    "doubt_as_failure orphan unfenced_verb superseded_as_failed stuck time_allowed forged_right reissued_epoch "
    "lost_ack altered_log"
).split()
DAY_MS = 86_400_000


def key_of(step: str) -> str:
    return step_key(NAMESPACE, RUN, StepId(step))


TOO_LARGE = f'{{"args":1e999,"attempt":1,"key":"{key_of("pay")}","tool":"charge"}}'


def two_epochs() -> Log:
    return Log().preempted(1).granted(2)


def doubted(tool: Any = CHARGE, reason: str = "lost") -> Log:
    return Log().fenced(tool=tool).told("step_doubted", reason=reason)


def grants(count: int) -> Log:
    log = Log(grant=False)
    for epoch in range(1, count + 1):
        log.granted(epoch).preempted(epoch)
    return log


def undone(log: Log) -> Log:
    return log.say("undo_begun", 1, "pay", undo="pay~undo").fenced("pay~undo", tool=REFUND, undo_of="pay")


def found_nothing(status: int) -> Log:
    """The undo of a step whose contract takes 404 for *there was nothing to undo*."""
    log = Log().paid(tool=TRIP).say("undo_begun", 1, "pay", undo="pay~undo")
    log.fenced("pay~undo", tool=REFUND, undo_of="pay")
    return log.told("step_held", 1, "pay~undo", reason="undo_nothing", receipt={"status": status, "body": None})


def trips() -> Log:
    return Log().paid("a", tool=TRIP).paid("b", tool=TRIP)


def ending(log: Log) -> Log:
    return log.say("run_failing", 1, error="x", undo=["b", "a"], kept=[])


def probed(log: Log, answer: str, state: str = "in_doubt", **data: Any) -> Log:
    """A provider's word on `pay`, asked for at that moment."""
    given = {"answer": answer, "state": state, "asked_ms": log.ms, "attempts": 1, "receipt": None}
    return log.say("probe_answered", 0, "pay", **(given | data))


def told(verb: str, epoch: int, seq: int, step: str | None = None, number: int = 0) -> Ack:
    return Ack(verb, Epoch(epoch), seq, None if step is None else StepId(step), number)


# law, step, first seq, log
GUILTY: list[tuple[str, str | None, int, History]] = [
    ("double_apply", "pay", 4, Log().paid().history(applied={key_of("pay"): 2})),
    ("double_apply", "pay", 4, Log().paid().history(applied={})),
    ("double_apply", "pay", 4, Log().paid(tool=ROUGH).history(applied={"pay": 2}, counted=frozenset(("rough",)))),
    (
        "double_apply",
        "pay",
        4,
        Log().fenced().told("step_rejected", reason="declined").history(applied={key_of("pay"): 1}),
    ),
    ("double_apply", "pay", 4, doubted().history(applied={key_of("pay"): 2})),
    ("double_apply", "pay", 5, Log().paid().replayed().history()),
    ("double_apply", "pay", 5, Log().fenced().say("step_held", 1, "pay", reason="gone").replayed().history()),
    ("double_apply", "pay", 5, doubted(ROUGH).replayed().history()),
    ("double_apply", "pay", 5, doubted(ROUGH).replayed().history(contracts={})),
    ("double_apply", "pay", 5, doubted().later(DAY_MS).replayed().history()),
    ("double_apply", "pay", 5, doubted().replayed(wall_ms=DAY_MS).history()),
    ("double_apply", "pay", 7, undone(Log().paid()).replayed().history()),
    ("double_apply", "pay", 7, undone(Log().paid()).say("undo_begun", 1, "pay", undo="pay~undo").history()),
    ("double_apply", "pay", 7, undone(Log().paid()).say("step_compensated", 1, "pay", undo="pay~undo").history()),
    ("double_apply", "pay", 5, undone(doubted().later(60_000)).history()),
    ("dead_commit", "pay", 6, Log().fenced().preempted(1).granted(2).told("step_committed", 1).history()),
    ("dead_commit", "pay", 5, Log().fenced().preempted(1).told("step_committed", 1).history()),
    ("dead_commit", "pay", 6, Log().fenced().preempted(1).granted(2).told("step_committed", 2).history()),
    ("stale_checkpoint", None, 5, two_epochs().say("checkpoint_saved", 1, number=1).history()),
    (
        "stale_checkpoint",
        None,
        4,
        Log().say("checkpoint_saved", 1, number=2).say("checkpoint_saved", 1, number=2).history(),
    ),
    ("stale_checkpoint", "pay", 4, Log().fenced().say("checkpoint_saved", 1, number=1).history()),
    ("stale_checkpoint", "pay", 7, undone(Log().paid()).say("checkpoint_saved", 1, number=1).history()),
    ("unstable_key", "pay", 3, Log().fenced(key=key_of("pay2"), request=None).history()),
    ("unstable_key", "pay", 3, Log().fenced(request={"headers": {"Idempotency-Key": "no"}}).history()),
    ("unstable_key", "pay", 3, Log().fenced(request={"headers": 1}).history()),
    ("unstable_key", "pay", 3, Log().fenced(tool=UUID, request={"body": "{}"}).history()),
    ("changed_bytes", "pay", 3, Log().fenced(call_digest="0" * 64).history()),
    ("changed_bytes", "pay", 3, Log().fenced(text=TOO_LARGE).history()),
    ("changed_bytes", "pay", 5, doubted().replayed(intent=1).history()),
    ("changed_bytes", "pay", 5, doubted().fenced(attempt=2, older_over=False).history()),
    (
        "changed_bytes",
        "pay",
        5,
        Log().fenced(tool=PATIENT).told("step_refused", state="pending").fenced(args={"n": 2}, attempt=2).history(),
    ),
    (
        "changed_bytes",
        "pay",
        5,
        Log().fenced().told("step_unsent", state="pending").fenced(args={"n": 2}, attempt=2).history(),
    ),
    ("unlogged_effect", "pay", 5, two_epochs().fenced("pay", 1).history()),
    ("unlogged_effect", "pay", 4, Log().say("run_frozen", reason="drift").fenced().history()),
    ("unlogged_effect", "pay", 4, Log().say("run_paused", by="anna").fenced().history()),
    ("unlogged_effect", "x~undo", 3, Log().say("step_held", 1, "x~undo", reason="tool_gone", undo_of="x").history()),
    ("unlogged_effect", "pay", 3, Log().fenced(attempt=2).history()),
    ("unlogged_effect", "pay~0", 4, Log().fenced().fenced("pay~0").history()),
    ("unlogged_effect", "pay", 3, Log().told("step_applied").history()),
    ("unlogged_effect", "pay", 4, Log().fenced().told("step_applied", attempt=2).history()),
    ("unlogged_effect", None, 0, Log().paid().history(applied={key_of("pay"): 1, "f" * 32: 1, "e" * 32: 0})),
    ("overlap", "b", 6, Log().fenced("a").preempted(1).granted(2).fenced("b", 2).history()),
    ("overlap", "b", 6, doubted().say("step_held", 1, "pay", reason="key_window").later(5_000).fenced("b").history()),
    ("lost_fact", "pay", 5, Log().fenced().told("step_applied").replayed().history()),
    ("lost_fact", "pay", 5, Log().fenced().told("step_unsent", state="pending").told("late_receipt").history()),
    (
        "lost_fact",
        "pay",
        5,
        Log().fenced().told("step_rejected").told("late_receipt").say("run_frozen", reason="drift").history(),
    ),
    ("lost_fact", "pay", 5, Log().paid().told("step_doubted", reason="lost").history()),
    ("lost_fact", "pay", 5, Log().fenced().told("step_applied").told("step_refused", state="in_doubt").history()),
    ("lost_fact", "pay", 5, Log().fenced().told("step_unsent", state="pending").told("step_applied").history()),
    ("lost_fact", "pay", 4, Log().fenced().say("step_committed", 1, "pay", receipt_seq=3).history()),
    (
        "lost_fact",
        "pay",
        5,
        Log().paid().say("step_resolved", 0, "pay", by="anna", verdict="refused", state="rejected").history(),
    ),
    ("doubt_as_failure", "pay", 6, doubted().replayed().told("step_rejected", attempt=2).history()),
    ("doubt_as_failure", "pay", 6, doubted().replayed().told("step_unsent", attempt=2, state="pending").history()),
    (
        "doubt_as_failure",
        "pay",
        6,
        doubted().later(5_000).replayed().later(DAY_MS).told("step_refused", attempt=2, state="pending").history(),
    ),
    ("doubt_as_failure", "pay", 4, Log().fenced().told("step_rejected", receipt={"status": 500}).history()),
    (
        "doubt_as_failure",
        "pay",
        4,
        Log().fenced().told("step_rejected", receipt={"status": 409, "truncated": True}).history(),
    ),
    ("doubt_as_failure", "pay", 6, doubted().later(5_000).replayed().told("step_rejected").history()),
    ("doubt_as_failure", "pay", 6, doubted().later(5_000).replayed().say("step_withdrawn", 1, "pay").history()),
    ("doubt_as_failure", "pay~undo", 7, found_nothing(410).history()),
    ("orphan", "pay", 4, Log().fenced().say("run_completed", 1).history()),
    ("orphan", "pay", 5, Log().fenced().told("step_applied").say("run_failed", 1, error="x").history()),
    ("orphan", "pay", 4, Log().say("run_failing", 1, error="x").fenced().history()),
    ("orphan", "pay", 5, Log().paid(tool=TRIP).say("run_failed", 1, error="x").history()),
    ("orphan", "pay", 5, Log().paid(tool=TRIP).say("run_failing", 1, error="x", undo=[]).history()),
    ("orphan", None, 7, trips().say("run_cancelling", by="anna", undo=["a", "b"]).history()),
    (
        *("orphan", "a", 8),
        ending(trips()).say("undo_begun", 1, "a", undo="a~undo").fenced("a~undo", tool=REFUND, undo_of="a").history(),
    ),
    ("orphan", "c", 8, ending(trips()).say("undo_begun", 1, "c", undo="c~undo").history()),
    ("orphan", "b", 8, ending(trips()).say("run_failed", 1, error="x").history()),
    ("orphan", "pay", 4, Log().say("run_failing", 1, error="x").fenced(tool=TRIP).history()),
    ("orphan", None, 4, Log().say("run_failing", 1, error="x", undo="?").say("run_completed", 1).history()),
    ("unfenced_verb", None, 3, Log().say("run_cancelled").history()),
    ("unfenced_verb", None, 3, Log().say("run_paused").history()),
    ("unfenced_verb", None, 3, Log().say("run_frozen", reason="operator").history()),
    ("unfenced_verb", None, 5, two_epochs().say("lease_released", 1).history()),
    ("unfenced_verb", "pay", 3, Log().fenced("pay", 0).history()),
    ("unfenced_verb", "pay", 5, Log().fenced(tool=LOOK).preempted(1).told("step_committed").history()),
    ("unfenced_verb", None, 4, Log().preempted(1).preempted(1).history()),
    ("unfenced_verb", "pay", 6, Log().fenced().preempted(1).granted(2).told("step_applied", 2).history()),
    ("unfenced_verb", None, 3, Log().say("lease_preempted", 1, by="").history()),
    ("superseded_as_failed", "pay", 4, Log().fenced().told("step_rejected", reason="stale_epoch").history()),
    ("superseded_as_failed", None, 3, Log().say("run_failed", 1, error="lease_lapsed").history()),
    ("stuck", None, 22, grants(10).granted(11).history()),
    ("stuck", None, 20, grants(9).say("run_frozen", reason="no_progress").history()),
    ("stuck", "pay", 5, doubted().say("step_held", 1, "pay", reason="").history()),
    ("stuck", "pay", 4, Log().paid().say("undo_begun", 1, "pay", undo="pay~undo").history()),
    ("stuck", "pay", 7, undone(Log().paid()).told("step_committed", 1, "pay~undo").history()),
    (
        "time_allowed",
        "pay",
        5,
        doubted().say("step_resolved", 0, "pay", by="anna", verdict="not_applied", state="pending").history(),
    ),
    ("lost_fact", "pay", 5, probed(Log().paid(), "found", "applied").history()),
    ("lost_fact", "pay", 7, probed(undone(Log().fenced().told("step_applied")), "found", "applied").history()),
    ("lost_fact", "pay", 5, probed(doubted().later(60_000), "absent", "pending", attempts=2).history()),
    ("time_allowed", "pay", 5, probed(doubted(), "absent", "pending").history()),
    ("time_allowed", "pay", 5, probed(doubted().later(60_000), "absent", "pending", asked_ms=99_000).history()),
    (
        "time_allowed",
        "pay",
        5,
        probed(Log().fenced(lag_ms=90_000).told("step_doubted").later(60_000), "unclear").history(),
    ),
    ("time_allowed", "pay", 5, undone(doubted()).history(contracts={})),
    ("time_allowed", "pay", 5, doubted().replayed(older_over=True).history()),
    ("time_allowed", None, 3, Log().say("lease_lapsed", 1, expires_at_ms=0).history()),
    ("time_allowed", "pay", 3, Log().later(-1).fenced().history()),
    ("time_allowed", "pay", 3, Log().later(1).fenced().history(now_ms=1_000)),
    ("forged_right", "pay", 4, Log().fenced().told("step_applied", 9).history()),
    ("forged_right", "pay", 3, Log().fenced("pay", 2).history()),
    ("forged_right", None, 4, Log().fenced("pay", 1, LOOK).say("run_completed", 7).history()),
    ("forged_right", None, 4, Log().say("run_completed", 1).granted(2).history()),
    ("forged_right", None, 4, Log().say("run_frozen", reason="drift").granted(2).history()),
    ("forged_right", None, 4, Log().say("run_paused", by="anna").granted(2).history()),
    ("reissued_epoch", None, 4, Log().preempted(1).granted(1).history()),
    ("reissued_epoch", None, 4, Log(grant=False).granted(3).preempted(3).granted(2).history()),
    ("lost_ack", "pay", 9, Log().paid().history(acknowledged=(told("apply", 1, 9, "pay"),))),
    ("lost_ack", "pay", 3, Log().paid().history(acknowledged=(told("apply", 1, 3, "pay"),))),
    ("lost_ack", None, 3, Log().paid().history(acknowledged=(told("wave", 1, 3),))),
    ("lost_ack", None, 2, Log().history(acknowledged=(told("grant", 4, 2),))),
    (
        "lost_ack",
        None,
        3,
        Log().say("checkpoint_saved", 1, number=1).history(acknowledged=(told("checkpoint", 1, 3, None, 2),)),
    ),
    ("altered_log", None, 3, Log().history(head_seq=3)),
    ("altered_log", "pay", 3, Log().fenced().history(digests=Log().history().digests)),
    ("altered_log", None, 2, Log().history(head_digest="0" * 64)),
    ("altered_log", None, 3, Log().say("run_moved").history()),
    ("altered_log", None, 3, Log().say("run_failing", 1, text="[]").history()),
    ("altered_log", None, 3, Log().say("run_failing", 1, text="{").history()),
    ("altered_log", None, 3, Log().say("run_created").history()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("law", "step", "seq", "history"), GUILTY, ids=[f"{row[0]}-{place}" for place, row in enumerate(GUILTY)]
)
def test_a_breach_is_convicted_by_its_law_alone(law: str, step: str | None, seq: int, history: History) -> None:
    found = judge(history)
    assert {violation.law for violation in found} == {law}, found
    first = found[0]
    assert (first.run_id, first.step_id, first.seq) == (RUN, step, seq), found
    assert first.why and len(first.why) < 160


def test_every_law_convicts_something_and_explains_itself() -> None:
    assert list(LAWS) == NAMES
    assert {row[0] for row in GUILTY} == set(NAMES)
    for place, (name, law) in enumerate(LAWS.items(), 1):
        assert f"Law {place}: " in (law.__doc__ or ""), name
        assert "Judged from" in (law.__doc__ or ""), name


def test_the_laws_do_not_ask_the_rules() -> None:
    allowed = {"canonical", "contracts", "events", "ids", "trace", "laws_of_runs"}
    for module in (laws, laws_of_runs, trace):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tidefast"):
                assert (node.module or "").rpartition(".")[2] in allowed


def test_an_undo_that_found_nothing_is_booked_so_if_the_undone_steps_contract_says_it() -> None:
    assert judge(found_nothing(404).history()) == ()


def test_two_laws_may_be_broken_at_once() -> None:
    """An epoch that a restore issued anew: it was told to somebody, and is somewhere else now."""
    lost = Log(grant=False).preempted(0).granted(1).history(acknowledged=(told("grant", 1, 2),))
    assert {violation.law for violation in judge(lost)} >= {"reissued_epoch", "lost_ack"}
    keyless = doubted(ROUGH).later(5_000).replayed().told("step_rejected", attempt=2)
    assert {violation.law for violation in judge(keyless.history())} == {"double_apply", "doubt_as_failure"}
    undo = undone(Log().paid()).told("step_rejected", 1, "pay~undo")
    assert {violation.law for violation in judge(undo.history())} == {"orphan", "stuck"}


def test_laws_can_be_chosen() -> None:
    assert judge(Log().paid().replayed().history(), {"orphan": laws.orphan}) == ()


def test_an_altered_log_never_stops_the_judge() -> None:
    nested = Log().say("step_fenced", 1, "pay", text="[" * 100_000)
    big = Log().say("step_fenced", 1, "pay", text='{"attempt":1,"deadline_ms":1e20,"wall_ms":100000000000000000000}')
    odd = Log().fenced(key="zz", tool=UUID).say("run_created", 0, "pay").say("late_receipt", 1, "pay")
    undo = (
        Log().fenced("u", tool=REFUND, undo_of="gone").say("step_resolved", 0, "u", state="rejected", verdict="refused")
    )
    for log in (nested, big, odd, undo):
        assert judge(log.history())
    assert judge(Log().history(events=(), digests=(), head_seq=2))
    started = Log(grant=False).events[:0]
    first = Event(1, 0, "step_compensated", Epoch(0), StepId("a"), "{}")
    assert judge(Log().history(events=(*started, first), digests=(chain(CHAIN_START, first),)))


# --- logs that the rules wrote ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORIES)
def test_no_law_convicts_what_the_rules_wrote(name: str) -> None:
    books = Books().create()
    books.grant()
    STORIES[name](books)
    whole = books.history()
    assert judge(whole) == ()
    for length in range(1, len(whole.events)):  # in flight, too, wherever a transaction may have ended
        if whole.events[length].at_ms != whole.events[length - 1].at_ms:
            part = whole._replace(events=whole.events[:length], digests=whole.digests[:length])
            assert judge(part._replace(head_seq=length, head_digest=None)) == ()


def test_the_count_of_a_provider_agrees_with_true_books() -> None:
    books = Books().create()
    books.grant()
    compensated(books)
    books.grant()
    counts = {key_of("pay"): 0, key_of("pay~undo"): 1}
    assert judge(books.history(applied=counts)) == ()
    mail = Books().create()
    mail.grant()
    mail.pay("mail", ROUGH)
    mail.pay("look", LOOK)
    mail.pay("pay")
    assert judge(mail.history(applied={"mail": 1}, counted=frozenset(("rough",)))) == ()
    undoing = Books().create()
    undoing.grant()
    undoing.pay("pay")
    undoing.undo("pay")
    for count in (0, 1):
        assert judge(undoing.history(applied={key_of("pay"): count})) == ()


def test_what_callers_were_told_is_found() -> None:
    books = Books().create()
    books.grant()
    happy(books)
    seqs = {(event.kind, event.step_id): event.seq for event in books.events}
    acks = (
        told("create", 0, 1),
        told("grant", 1, 2),
        told("apply", 1, seqs["step_committed", StepId("pay")], "pay"),
        told("checkpoint", 1, seqs["checkpoint_saved", None], None, 1),
        told("complete", 1, len(books.events)),
    )
    assert judge(books.history(acknowledged=acks)) == ()


# --- random commands through the rules ----------------------------------------------------------------------------

COMMANDS = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=5, max_size=40
)


@settings(max_examples=400)
@given(COMMANDS)
def test_no_law_convicts_any_sequence_of_commands(moves: list[tuple[int, int, int, int]]) -> None:
    books = Books().create()
    books.grant("w0")
    play(books, moves)
    found = judge(books.history())
    assert found == (), [(event.seq, event.kind, event.step_id, event.epoch, event.at_ms) for event in books.events]


# --- tampering ---------------------------------------------------------------------------------------------------


def other_log() -> History:
    books = Books().create()
    books.grant("zombie")
    lost_answer(books)
    return books.history()  # an agent with the same input, so its first event is the same to the byte


def whole_log() -> History:
    books = Books().create()
    books.grant()
    failing(books)
    return books.history()


WHOLE, OTHER = whole_log(), other_log()
Rows = list[tuple[Event, str]]


def tamper(rows: Rows, how: int, place: int, other: int, letter: int) -> tuple[Rows, int]:
    """A changed log and the first seq at which it differs from what was written; 0 if it doesn't."""
    event, mark = rows[place]
    end = max(place + 1, other)
    match how:
        case 0:
            text = event.data_json
            spot = letter % len(text)
            changed = text[:spot] + chr((ord(text[spot]) + 1 + letter) % 128) + text[spot + 1 :]
            return [*rows[:place], (event._replace(data_json=changed), mark), *rows[place + 1 :]], place + 1
        case 1:
            edits: tuple[dict[str, Any], ...] = ({"at_ms": event.at_ms + 1}, {"epoch": Epoch(event.epoch + 1)})
            edits += ({"step_id": StepId("x")}, {"kind": "run_thawed"}, {"seq": event.seq + 1})
            return [*rows[:place], (event._replace(**edits[letter % 5]), mark), *rows[place + 1 :]], place + 1
        case 2:
            return rows[:place], place + 1
        case 3:
            swapped = list(rows)
            last = end % len(rows)
            swapped[place], swapped[last] = swapped[last], swapped[place]
            return swapped, min(place, last) + 1
        case 4:
            return rows[:place] + rows[place + 1 :], place + 1
        case 5:
            return [*rows[: place + 1], *rows[place:]], place + 2
        case 6:
            theirs = list(zip(OTHER.events, OTHER.digests, strict=True))
            mixed = [*rows[:place], *theirs[place:]]
            return mixed, next((n for n, (a, b) in enumerate(zip(mixed, rows, strict=False), 1) if a != b), 0)
        case _:
            return [*rows[:place], (event, mark[:-1] + "g"), *rows[place + 1 :]], place + 1


@settings(max_examples=2_000)
@given(st.integers(0, 7), st.integers(0, len(WHOLE.events) - 1), st.integers(0, 40), st.integers(0, 500), st.booleans())
def test_tampering_is_found_at_its_first_event(how: int, place: int, other: int, letter: int, again: bool) -> None:
    rows: Rows = list(zip(WHOLE.events, WHOLE.digests, strict=True))
    changed, first = tamper(rows, how, place, other, letter)
    if changed == rows:
        return
    if how == 6 and place >= len(OTHER.events):
        first = place + 1  # a splice beyond the other log's end is a cut
    history = WHOLE._replace(events=tuple(event for event, _ in changed), digests=tuple(mark for _, mark in changed))
    named = next(violation for violation in judge(history) if violation.law == "altered_log")
    if (how, place) not in ((6, 0), (6, 1)):  # another run's whole log is chained well: only the head tells
        assert named.seq == first
    if again and how != 7:  # the forger chains the log anew: the head, or an anchor, still tells
        digests: list[str] = []
        for event in history.events:
            digests.append(chain(digests[-1] if digests else CHAIN_START, event))
        assert any(violation.law == "altered_log" for violation in judge(history._replace(digests=tuple(digests))))
