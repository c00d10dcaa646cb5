"""A provider's ledger against the logs: what fits is cleared, and each kind of misfit is convicted."""

import json

import pytest

from tidefast.protocol.canonical import JSON
from tidefast.protocol.events import Event, Kind
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.laws import History
from tidefast.protocol.trace import Trace, fold
from tidefast.sim.books import Books, Effect, compare, read_effects, to_ledger

KEY = "0123456789abcdef0123456789abcdef"
UUID = "01234567-89AB-CDEF-0123-456789ABCDEF"
Happened = tuple[Kind, str | None, dict[str, JSON]]


def log(*happened: Happened, run: str = "r1") -> Trace:
    events = tuple(
        Event(seq, 1_000 + seq, kind, Epoch(1), None if step is None else StepId(step), json.dumps(data))
        for seq, (kind, step, data) in enumerate(happened, 1)
    )
    return fold(History(RunId(run), events, (), b"", {}))


def fenced(step: str = "pay", key: str = KEY, tool: str = "charge", **more: JSON) -> Happened:
    return ("step_fenced", step, {"tool": tool, "effect": "external", "key": key, "attempt": 1, **more})


def committed(step: str = "pay") -> Happened:
    return ("step_committed", step, {"attempt": 1})


def rejected(step: str = "pay") -> Happened:
    return ("step_rejected", step, {"attempt": 1})


def judged(books: Books) -> dict[str, int]:
    parts = ("doubles", "missing", "unbooked", "strangers")
    found = {part: len(getattr(books, part)) for part in parts}
    assert books.is_ok == (not any(found.values()))
    return {part: count for part, count in found.items() if count}


def test_one_effect_of_one_committed_step_fits() -> None:
    books = compare([Effect(KEY)], [log(fenced(), committed())])
    assert judged(books) == {} and books.applied == 1 and books.count("committed") == 1


def test_a_provider_that_takes_uuids_counts_the_same_key() -> None:
    assert judged(compare([Effect(UUID)], [log(fenced(), committed())])) == {}


def test_a_provider_without_keys_is_matched_by_run_and_step() -> None:
    traces = [log(fenced("mail"), committed("mail"), run=run) for run in ("r1", "r2")]
    both = [Effect(run="r1", step="mail"), Effect(run="r2", step="mail")]
    assert judged(compare(both, traces)) == {}
    assert judged(compare(both[:1], traces)) == {"missing": 1}


@pytest.mark.parametrize(
    ("effects", "happened", "found"),
    [
        ([Effect(KEY), Effect(KEY)], (fenced(), committed()), {"doubles": 1}),
        ([Effect(KEY), Effect(run="r1", step="pay")], (fenced(), committed()), {"doubles": 1}),
        ([], (fenced(), committed()), {"missing": 1}),
        ([Effect(KEY, is_undone=True)], (fenced(), committed()), {"missing": 1}),
        ([Effect(KEY)], (fenced(), rejected()), {"unbooked": 1}),
        ([Effect("f" * 32)], (fenced(), committed()), {"missing": 1, "strangers": 1}),
        ([Effect(KEY), Effect(run="r9", step="pay")], (fenced(), committed()), {"strangers": 1}),
        ([Effect(KEY, is_undone=True), Effect(KEY)], (fenced(), committed()), {}),
        ([], (fenced(), rejected()), {}),
    ],
)
def test_each_misfit_is_convicted(effects: list[Effect], happened: tuple[Happened, ...], found: dict[str, int]) -> None:
    assert judged(compare(effects, [log(*happened)])) == found


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_held_step_may_have_happened_or_not_but_not_twice(count: int) -> None:
    trace = log(fenced(), ("step_doubted", "pay", {"attempt": 1}), ("step_held", "pay", {}))
    books = compare([Effect(KEY)] * count, [trace])
    assert judged(books) == ({"doubles": 1} if count == 2 else {})
    assert [entry.net for entry in books.open] == [count]


def test_a_provider_is_asked_only_about_its_own_tools() -> None:
    trace = log(fenced(), committed(), fenced("mail", "e" * 32, "send"), committed("mail"))
    assert judged(compare([Effect(KEY)], [trace], {"charge"})) == {}
    assert judged(compare([Effect(KEY)], [trace])) == {"missing": 1}


def test_reads_are_no_effects() -> None:
    trace = log(("step_fenced", "look", {"tool": "get", "effect": "none", "key": KEY, "attempt": 1}), committed("look"))
    assert compare([], [trace]).entries == []


def test_rows_of_both_kinds_are_read() -> None:
    rows = [
        {"key": KEY, "id": "re_1", "undone": True, "step": "r1/pay"},
        {"key": None, "step": "r2/mail", "id": "ml_1"},
    ]
    assert read_effects(rows) == [Effect(KEY, name="re_1", is_undone=True), Effect(run="r2", step="mail", name="ml_1")]


@pytest.mark.parametrize("row", [{}, {"key": ""}, {"step": "no-run"}, {"key": 7}])
def test_a_row_that_names_nothing_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="effect 1: expected a key"):
        read_effects([row])


def test_the_auditor_gets_net_counts() -> None:
    ledger = to_ledger(
        [Effect(KEY), Effect(UUID, is_undone=True), Effect(run="r", step="m"), Effect(run="r", step="m")]
    )
    assert ledger.keys == {KEY: 1}
    assert ledger.steps == {(RunId("r"), StepId("m")): 2}
