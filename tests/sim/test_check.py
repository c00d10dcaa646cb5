"""The exhaustive search holds on the rules as they are, and convicts each rule that is broken on purpose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidefast.cli.main import main
from tidefast.protocol import checkpoint, compensation, evolve, lease, machine, oversight, resolve, run, step
from tidefast.protocol.events import object_json
from tidefast.protocol.ids import Epoch, step_key
from tidefast.protocol.verdicts import Answer, Decision, Settled
from tidefast.sim.check.campaign import Campaign
from tidefast.sim.check.configs import LEAN, QUICK, Config, keyed, keyless, undoable
from tidefast.sim.check.search import Result, search
from tidefast.sim.check.trace import play, read_scenario, scenario

Patch = Callable[[pytest.MonkeyPatch], None]
KEYED = Config("keyed", (keyed("pay"),), 2, **LEAN)
DAYS = Config("days", (keyed("pay"),), 2, days=True, **LEAN)
FAILS = Config("fails", (keyed("pay"),), 1, exiles=False, slow_looks=False)
KEYLESS = Config("keyless", (keyless("mail"),), 1, **LEAN)
LOOKS = Config("looks", (keyless("mail"),), 1, fails=False)
UNDO = Config("undo", (undoable("pay"),), 1, **LEAN)
TWO = Config("two", (keyed("pay"), keyless("mail")), 1, **LEAN)
RESTORED = Config("restored", (keyless("mail"),), 1, restores=True, **LEAN)
RESTORED_LATER = Config("restored later", (keyless("mail"),), 2, restores=True, **LEAN)
SAVES = Config("saves", (keyed("pay"),), 1, checkpoints=2, **LEAN)
WORDS = Config("words", (keyed("pay"),), 1, words=True, **LEAN)
COUNTS = Config("counts", (keyed("pay"),), 0, counts_grants=True, **LEAN)


def no_fence(head: Any, right: Any, now: Any) -> None:
    return None


def fence_off_in_admit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "fence", no_fence)


def fence_compares_larger(patch: pytest.MonkeyPatch) -> None:
    """An epoch that the caller made up, above the live one, is taken."""
    true = lease.fence
    patch.setattr(step, "fence", lambda h, r, n: None if h.is_live and r.epoch >= h.epoch else true(h, r, n))


def undo_without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compensation, "fence", no_fence)


def end_without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run, "fence", no_fence)


def checkpoint_without_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "fence", no_fence)


def checkpoint_over_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "unsettled_effects", lambda head: [])


def commit_on_200(patch: pytest.MonkeyPatch) -> None:
    true = step.settle

    def settle(view: Any, command: Any, now: Any) -> Decision:
        decision = true(view, command, now)
        if command.outcome != "applied" or [e.kind for e in decision.events] != ["step_applied"]:
            return decision
        first = decision.events[0]
        committed = type(first)(*first[:2], "step_committed", *first[3:])
        return decision._replace(verdict=Settled("committed", joined=True), events=(committed,))

    patch.setattr(step, "settle", settle)


def epoch_in_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "step_key", lambda n, r, s: step_key(n, r, f"{s}@{id(s)}"))  # type: ignore[arg-type]


def receipt_dropped(patch: pytest.MonkeyPatch) -> None:
    true = step.settle

    def settle(view: Any, command: Any, now: Any) -> Decision:
        decision = true(view, command, now)
        late = any(event.kind == "step_applied" for event in decision.events)
        return decision._replace(events=()) if late else decision

    patch.setattr(step, "settle", settle)


def doubt_booked_as_rejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        step, "_settle_doubted", lambda h, s, a, c, n: step._settled(h, s, a, "step_rejected", c, n, "rejected")
    )


def doubt_booked_as_unsent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "_settle_doubted", lambda h, s, a, c, n: step._settled(h, s, a, "step_unsent", c, n, "pending"))


def refusal_settles_any_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "other_doubt", lambda s, a: ())


def refusal_settles_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "refusal_settles_older", lambda s, a, c, n: True)


def complete_over_unsettled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run, "unsettled_effects", lambda head: [])


def held_without_resolve(patch: pytest.MonkeyPatch) -> None:
    true = resolve.resolve

    def refused(view: Any, command: Any, now: Any) -> Decision:
        decision = true(view, command, now)
        return decision if not decision.events else resolve.refuse(view.run, "already_decided", "never")

    patch.setattr(machine.resolve, "resolve", refused)


def frozen_without_thaw(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(oversight, "thaw", lambda v, c, n: lease.refuse(v.run, "already_decided", "never"))


def undo_admitted_twice(patch: pytest.MonkeyPatch) -> None:
    true = compensation.compensate

    def again(view: Any, command: Any, now: Any) -> Decision:
        undo = view.steps.get(command.undo_step_id)
        if undo is None or undo.state != "committed" or view.run.end:
            return true(view, command, now)
        rest = {name: known for name, known in view.steps.items() if name != command.undo_step_id}
        target = rest[command.step_id]
        return true(view._replace(steps={**rest, command.step_id: target._replace(state="committed")}), command, now)

    patch.setattr(compensation, "compensate", again)


def stale_settle_joins(patch: pytest.MonkeyPatch) -> None:
    """A receipt is joined in the name of whoever is live, though that one never asked."""
    true = step.settle

    def settle(view: Any, command: Any, now: Any) -> Decision:
        decision, head = true(view, command, now), view.run
        if [e.kind for e in decision.events] != ["step_applied"] or not head.is_live:
            return decision
        first = decision.events[0]
        joined = type(first)(first.seq, first.at_ms, "step_committed", head.epoch, *first[4:])
        return decision._replace(verdict=Settled("committed", joined=True), events=(joined,))

    patch.setattr(step, "settle", settle)


def no_overlap_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "blocked_by", lambda *a: None)


def keyless_replayed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "judge", lambda *a: ("replay", "deduped"))


def window_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tidefast.protocol.doubt.window_open", lambda *a: True)


def same_epoch_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "next_epoch", lambda newest, incarnation: Epoch(max(newest, 1)))


def committed_sent_again(patch: pytest.MonkeyPatch) -> None:
    true = step.answer_known

    def known(view: Any, head: Any, known_step: Any, command: Any, now: Any) -> Decision:
        decision = true(view, head, known_step, command, now)
        if not isinstance(decision.verdict, Answer) or decision.events or known_step.closed_by or head.frozen:
            return decision
        return step._send_again(head, known_step, view.contracts[known_step.contract], command, now)

    patch.setattr(step, "answer_known", known)


def look_not_dated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resolve, "_too_early", lambda *a: None)


def other_words_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "_may_restate", lambda h, s, c: True)
    patch.setattr(step, "_send_again", lambda h, s, c, cmd, n, *b: step._restate(h, s, cmd, n))


def grants_never_freeze(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "GRANTS_WITHOUT_PROGRESS_MAX", 99)


def frozen_is_granted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "not_claimable", lambda head, now: None)


def events_say_one_thing_rows_another(patch: pytest.MonkeyPatch) -> None:
    true = evolve._step_event

    def moved(step_id: Any, known: Any, event: Any, data: Any) -> Any:
        after = true(step_id, known, event, data)
        return after._replace(state="committed") if event.kind == "step_applied" else after

    patch.setattr(evolve, "_step_event", moved)


def superseded_booked_as_failed(patch: pytest.MonkeyPatch) -> None:
    """A stale caller ends the attempt that is out, as if it had failed."""
    true = step.admit

    def admit(view: Any, command: Any, now: Any) -> Decision:
        decision = true(view, command, now)
        known = view.steps.get(command.step_id)
        if getattr(decision.verdict, "code", "") != "stale_epoch" or known is None or known.state != "fenced":
            return decision
        data = object_json(attempt=str(len(known.attempts)), reason='"superseded"', receipt="null", state='"pending"')
        failed = step.record(view.run, now, "step_refused", data, step=known.step_id, epoch=known.attempts[-1].epoch)
        return decision._replace(events=(failed,))

    patch.setattr(step, "admit", admit)


def restore_forgets_its_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "window_of", lambda view, head: None)


def incarnation_not_raised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "next_epoch", lambda newest, incarnation: type(newest)(newest + 1))


def pending_sent_as_ever_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "may_be_lost", lambda known, incarnation: False)


MUTANTS: list[tuple[Patch, Config]] = [
    (restore_forgets_its_window, RESTORED),
    (incarnation_not_raised, RESTORED),
    (pending_sent_as_ever_after_a_restore, RESTORED_LATER),
    (fence_off_in_admit, KEYED),
    (fence_compares_larger, KEYED),
    (undo_without_fence, UNDO),
    (end_without_fence, KEYED),
    (checkpoint_without_epoch, SAVES),
    (checkpoint_over_doubt, SAVES),
    (commit_on_200, KEYED),
    (epoch_in_the_key, KEYED),
    (receipt_dropped, KEYED),
    (doubt_booked_as_rejected, KEYED),
    (doubt_booked_as_unsent, KEYED),
    (refusal_settles_any_doubt, KEYED),
    (refusal_settles_early, KEYED),
    (complete_over_unsettled, KEYED),
    (held_without_resolve, KEYLESS),
    (frozen_without_thaw, COUNTS),
    (undo_admitted_twice, UNDO),
    (stale_settle_joins, KEYED),
    (no_overlap_rule, TWO),
    (keyless_replayed, KEYLESS),
    (window_ignored, DAYS),
    (same_epoch_again, KEYED),
    (committed_sent_again, KEYED),
    (look_not_dated, LOOKS),
    (other_words_taken, WORDS),
    (grants_never_freeze, COUNTS),
    (frozen_is_granted, COUNTS),
    (events_say_one_thing_rows_another, KEYED),
    (superseded_booked_as_failed, KEYED),
]


@pytest.mark.parametrize("mutant, config", MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_broken_rule_is_found(mutant: Patch, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    result = search(config)
    assert result.findings, f"not found in {result.states:,} states"
    finding = result.findings[0]
    print(f"{mutant.__name__}: {finding.law} after {result.states:,} states, {len(finding.moves)} moves")
    assert result.cpu_seconds < 10


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [search(config, stop_at_first=False) for config in QUICK]


@pytest.mark.parametrize("place", range(len(QUICK)), ids=[config.name for config in QUICK])
def test_every_law_holds_in_every_state(place: int, results: list[Result]) -> None:
    result = results[place]
    assert result.is_closed and result.states > 100 and result.ended
    assert result.findings == () and result.wedged == 0


def test_the_search_went_where_the_trouble_is(results: list[Result]) -> None:
    campaign = Campaign(tuple(results), 0.0)
    assert campaign.missed == ()
    assert campaign.is_ok and campaign.report().is_ok
    assert not Campaign(tuple(results), 0.0, has_gate=True).is_ok, "too small to be the proof"


def test_the_same_search_finds_the_same_states() -> None:
    first, second = search(KEYLESS), search(KEYLESS)
    assert first[1:8] == second[1:8] and first.seen == second.seen


def test_a_counterexample_is_told_kept_and_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        commit_on_200(patch)
        finding = search(KEYED).findings[0]
        text = scenario(KEYED, finding)
        config, keys = read_scenario(text, {KEYED.name: KEYED})
        played = play(config, keys)
        assert (played.law, played.why) == (finding.law, finding.why) == ("dead_commit", finding.why)
        assert json.loads(text)["story"] == list(played.lines)
        assert any("asks for pay" in line for line in played.lines)
    assert play(config, keys).law == "", "with the true rules the same moves break nothing"


def test_a_file_that_is_no_scenario_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "[]", '{"format": "tidefast-check/1", "configuration": "none", "moves": []}'):
        (tmp_path / "s.json").write_text(text)
        assert main(["check", "--replay", str(tmp_path / "s.json")]) == 3
        assert "--replay" in capsys.readouterr().err
