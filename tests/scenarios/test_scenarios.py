"""Every scenario holds, over both stores, with exactly the trace that its file says; and the rig can fail."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tidefast.sim.scenarios import naive, shelf, tell
from tidefast.sim.scenarios.draw import WIDTH, draw
from tidefast.sim.scenarios.play import complaints, play, summary
from tidefast.sim.scenarios.text import Scenario, ScriptError, parse, spell
from tidefast.stores.sqlite import SqliteStore

ROOT = Path(__file__).resolve().parents[2]
ALL = shelf.load()
BY_NAME = {each.name: each for each in ALL}
MEMORY = Path("/dev/shm")  # a file system without a disk, where there is one: the flushes are tested elsewhere


def changed(name: str, *changes: tuple[str, str]) -> Scenario:
    """A shipped scenario with some of its text replaced."""
    text = shelf.path_of(BY_NAME[name]).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text, name)


@pytest.mark.parametrize("scenario", ALL, ids=[each.name for each in ALL])
def test_it_holds_with_the_trace_that_its_file_says(scenario: Scenario, rewrite: bool) -> None:
    played = play(scenario)
    path = shelf.path_of(scenario)
    if rewrite:
        path.write_text(spell(scenario, played.traces), encoding="utf-8")
        assert [*played.problems, *played.verdict] == []
    else:
        assert complaints(played) == []
        assert path.read_text(encoding="utf-8") == spell(scenario, played.traces)
    assert all(len(row) <= WIDTH for row in draw(played))


def test_all_of_them_leave_the_same_traces_over_sqlite() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for scenario in ALL:
            file = Path(folder) / f"{scenario.name}.db"
            played = play(scenario, lambda file=file: SqliteStore.open(file, create=True))  # type: ignore[misc]
            assert complaints(played) == [], scenario.name


def test_the_denominators_are_what_the_page_of_orders_promises() -> None:
    total = summary(map(play, ALL))
    assert total.is_ok
    assert total.scenarios == len(total.orders) == len(BY_NAME) >= 90
    assert total.moves >= 1_000
    assert {each.header["class"] for each in ALL} == set(shelf.CLASSES)
    assert total.preemptions * 3 >= total.mutating_steps
    assert set(total.convicted) >= {"double_apply", "dead_commit", "stale_checkpoint"}


@pytest.mark.parametrize("scenario", ALL, ids=[each.name for each in ALL])
def test_it_expects_something_by_hand(scenario: Scenario) -> None:
    assert any(move.verb == "expect" for move in scenario.moves)


def test_the_list_in_the_docs_is_current(rewrite: bool) -> None:
    page = ROOT / "docs" / "scenarios.md"
    if rewrite:
        page.write_text(tell.page(shelf.load()), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == tell.page(ALL)


# --- the rig can fail -----------------------------------------------------------------------------------


def test_a_wrong_expectation_is_named_with_its_line_and_what_was_found() -> None:
    played = play(changed("commit_no_ack", ("expect provider pay = 1", "expect provider pay = 2")))
    assert not played.holds
    assert played.problems[0].endswith("expect provider pay = 2: found 1")


def test_another_trace_is_shown_as_a_diff() -> None:
    played = play(changed("commit_no_ack", ("= w1: checkpoint 1 saved", "= w1: checkpoint 1 refused")))
    assert not played.holds
    assert "- = w1: checkpoint 1 refused" in played.drift
    assert "+ = w1: checkpoint 1 saved" in played.drift


def test_an_effect_that_the_provider_counts_twice_is_a_violation_unless_it_is_announced() -> None:
    lying = changed("provider_breaks_its_promise", ("naive: broken_promise\n", ""), ("breaks: double_apply\n", ""))
    played = play(lying)
    assert not played.holds
    assert summary([played]).violations["double_apply"] > 0


@pytest.mark.parametrize("name", [each.name for each in ALL if each.naive and each.naive != "broken_promise"])
def test_the_product_itself_is_not_convicted_where_a_naive_design_is(name: str) -> None:
    honest = changed(
        name, (f"naive: {BY_NAME[name].naive}\n", ""), (f"breaks: {', '.join(BY_NAME[name].breaks)}\n", "")
    )
    assert play(honest).broken == {}
    unmasked = changed(name, (f"naive: {BY_NAME[name].naive}", "naive: broken_promise"))
    assert play(unmasked).verdict == [f"the naive design was not caught breaking {law}" for law in BY_NAME[name].breaks]


@pytest.mark.parametrize(
    ("design", "law", "at_least"),
    [
        ("commit_on_200", "dead_commit", 5),
        ("last_writer_wins", "stale_checkpoint", 5),
        ("blind_retry", "double_apply", 3),
    ],
)
def test_scenarios_written_for_the_product_convict_a_naive_design(design: str, law: str, at_least: int) -> None:
    caught = 0
    for scenario in ALL:
        if not scenario.naive:
            played = play(Scenario({**scenario.header, "naive": design, "breaks": law}, scenario.moves))
            caught += law in played.broken
    assert caught >= at_least


def test_a_naive_rule_is_taken_out_again() -> None:
    from tidefast.engine import engine

    honest = vars(engine)["decide"]
    with naive.design("commit_on_200"):
        assert vars(engine)["decide"] is not honest
    assert vars(engine)["decide"] is honest


def test_a_scenario_played_twice_is_the_same_scenario() -> None:
    first, second = play(BY_NAME["many_grants_one_effect"]), play(BY_NAME["many_grants_one_effect"])
    assert first.notes == second.notes


# --- the format -----------------------------------------------------------------------------------------

HEAD = "name: x\nquestion: q\nanswer: a\nwhy: w\nclass: A\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\n\nstart r1\n", "the header lacks question, answer, why, class"),
        ("title: x\n\nstart r1\n", "x:1: expected one of name"),
        (HEAD, "expected moves below the header"),
        (HEAD + "naive: blind_retry\n\nstart r1\n", "the header lacks naive or breaks"),
        (HEAD + "\n  + an event\n", "x:7: a trace stands below its move"),
        (HEAD + '\nfail w1 "why\n', "x:7: No closing quotation"),
    ],
)
def test_what_is_no_scenario_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ScriptError, match=says):
        parse(text, "x")


@pytest.mark.parametrize(
    ("moves", "says"),
    [
        ("dance w1", "no move is called 'dance'"),
        ("start r1\ncheckpoint w1 1", "w1 was never granted r1"),
        ("start r1\ngrant w1\nfreeze w1\nrenew w1", "w1 is frozen"),
        ("start r1\nadvance 3 hours", "expected a duration like 16s, found '3'"),
        ("start r1\nlate ack pay", "no answer of pay is held up"),
        ("start r1\nwake gateway", "the gateway doesn't stand still"),
        ("start r1\nwake w1", "w1 isn't frozen"),
        ("start r1\ngrant w1\napply w1 pay charge lose=hope", "expected withhold=request"),
        ("start r1\nexpect luck", "expect one of provider"),
        ("start r1\nstore holds", "expected: store fails before"),
        ("expect run leased", "there is no run ''"),
    ],
)
def test_a_move_that_cannot_be_made_is_named(moves: str, says: str) -> None:
    problems = play(parse(f"{HEAD}\n{moves}\n", "x")).problems
    assert len(problems) == 1
    assert says in problems[0]


def test_captions_and_long_headers_survive_being_written_anew() -> None:
    long = " ".join(["word"] * 60)
    text = HEAD.replace("why: w", f"why: {long}") + "\n# a caption\nstart r1\n# the end\n"
    once = spell(parse(text, "x"), [["= said"]])
    assert max(map(len, once.splitlines())) <= 110
    again = parse(once, "x")
    assert (again.header["why"], again.moves[0].captions, again.captions) == (long, ["a caption"], ["the end"])
    assert spell(again, [["= said"]]) == once


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("y", lambda text: text, "its name is x"),
        ("x", lambda text: text.replace("class: A", "class: Z"), "no class is called Z"),
    ],
)
def test_a_file_is_found_by_its_name_and_class(
    tmp_path: Path, name: str, change: Callable[[str], str], says: str
) -> None:
    (tmp_path / f"{name}.txt").write_text(change(HEAD + "\nstart r1\n"))
    with pytest.raises(ScriptError, match=says):
        shelf.load(tmp_path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("naive: hope\nbreaks: overlap\n", "no naive design is called hope"),
        ("naive: blind_retry\nbreaks: gravity\n", "no law is called gravity"),
    ],
)
def test_a_naive_design_and_the_laws_it_breaks_must_exist(header: str, says: str) -> None:
    assert play(parse(HEAD + header + "\nstart r1\n", "x")).problems == [says]
