"""The simulation is deterministic, finds what is broken on purpose, and finds nothing in the product."""

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tidefast.cli.main import main
from tidefast.protocol import lease, step
from tidefast.protocol.ids import step_key
from tidefast.services.gateway import Gateway
from tidefast.sim import campaign
from tidefast.sim.campaign import Campaign, as_json, as_text, play, play_world, worlds_of
from tidefast.sim.judging import SOMETIMES
from tidefast.sim.page import page
from tidefast.sim.picture import Fault, draw
from tidefast.sim.virtual import Process, Stopped, VirtualLoop, run_virtual
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore

Patch = pytest.MonkeyPatch
HASHES = """
import sys
from tidefast.sim.campaign import play_world
print(" ".join(play_world(seed, 0.05).log_hash for seed in range(1, 21)))
"""


def begin_hashing(hash_seed: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", HASHES], env=environment, stdout=subprocess.PIPE, text=True)


def test_twenty_seeds_give_the_same_logs_under_any_hash_seed() -> None:
    begun = [begin_hashing("0"), begin_hashing("random")]
    first, second = (each.communicate()[0] for each in begun)
    assert len(set(first.split())) == 20
    assert first == second


def test_a_world_under_fire_breaks_no_law_and_holds_nothing_needlessly() -> None:
    result = play_world(11, 2.0)
    assert result.audit.violations == []
    assert result.is_ok
    assert 3 * result.faulted_steps >= result.audit.mutating_steps > 100
    assert result.audit.preemptions > 60


def test_memory_and_sqlite_give_the_same_history(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "store.db", create=True)
    on_sqlite = play(3, 0.2, store)[0]
    store.close()
    in_memory = play(3, 0.2, MemoryStore(namespace=store.identity().namespace))[0]
    assert on_sqlite.log_hash == in_memory.log_hash


# --- broken on purpose: the seed that finds each mutant is kept here ------------------------------------


def fence_off(patch: Patch) -> None:
    """Nobody asks whether the epoch is live."""
    patch.setattr(lease, "stale", lambda head, right: None)
    patch.setattr(step, "fence", lambda head, right, now: None)


def commit_on_200(patch: Patch) -> None:
    """A success answer commits the step, whoever's epoch is live by then."""
    honest = step._settle_applied

    def settle(view: Any, head: Any, known: Any, attempt: Any, command: Any, now: Any) -> Any:
        if known.state not in ("fenced", "in_doubt"):
            return honest(view, head, known, attempt, command, now)
        data = step.object_json(attempt=str(attempt.number), receipt=command.receipt_json)
        events = step.committing(head, known, attempt.epoch, data, now)
        return step.accept(head, step.Settled("committed", joined=True), *events)

    patch.setattr(step, "_settle_applied", settle)


def receipt_dropped(patch: Patch) -> None:
    """A receipt that comes after the lease was lost is thrown away with the lease."""
    honest = step._settle_applied

    def settle(view: Any, head: Any, known: Any, attempt: Any, command: Any, now: Any) -> Any:
        if head.is_live and attempt.epoch == head.epoch:
            return honest(view, head, known, attempt, command, now)
        return step.accept(head, step._standing(known))

    patch.setattr(step, "_settle_applied", settle)


def key_with_epoch(patch: Patch) -> None:
    """The idempotency key is made anew with each lease."""
    honest = Gateway._send

    async def send(self: Any, right: Any, step_id: Any, out: Any, args_json: Any, request: Any) -> Any:
        if out.is_replay or args_json is None:
            args_json, request = self._bodies.stored_call(right.run_id, out.intent_seq)
        if request is not None and "Idempotency-Key" in request.headers:
            key = step_key(self._engine.identity.namespace, right.run_id, f"{step_id}@{right.epoch}")  # type: ignore[arg-type]
            request = request._replace(headers={**request.headers, "Idempotency-Key": key})
        first = dataclasses.replace(out, is_replay=False)
        return await honest(self, right, step_id, first, args_json, request)

    patch.setattr(Gateway, "_send", send)


def replay_without_a_key(patch: Patch) -> None:
    """A doubt is always answered by sending again, whether or not the provider knows keys."""
    patch.setattr(step, "judge", lambda known, stored, today, now: ("replay", "hope"))


def timeout_is_failure(patch: Patch) -> None:
    """An attempt without an answer is booked as refused."""
    honest = step.settle

    def settle(view: Any, command: Any, now: Any) -> Any:
        if command.outcome == "doubted":
            command = dataclasses.replace(command, outcome="refused")
        return honest(view, command, now)

    patch.setattr(step, "settle", settle)


def checkpoint_over_doubt(patch: Patch) -> None:
    """A checkpoint doesn't wait for effects whose outcome is open."""
    from tidefast.protocol import checkpoint

    patch.setattr(checkpoint, "unsettled_effects", lambda head: [])


def answered_before_the_flush(patch: Patch) -> None:
    """The gateway sends as soon as the intent is decided, not when it is durable."""
    from tidefast.engine.engine import Engine

    async def submit(self: Any, command: Any, then: Any = None) -> Any:
        verdict = self._judge(command)[1].verdict
        if then is not None:
            then(verdict)
        return verdict

    patch.setattr(Engine, "submit", submit)


MUTANTS: list[tuple[Callable[[Patch], None], int, str]] = [
    (fence_off, 1, "unlogged_effect"),
    (commit_on_200, 1, "dead_commit"),
    (receipt_dropped, 1, "lost_fact"),
    (key_with_epoch, 1, "unstable_key"),
    (key_with_epoch, 1, "double_apply"),
    (replay_without_a_key, 1, "double_apply"),
    (timeout_is_failure, 1, "doubt_as_failure"),
    (checkpoint_over_doubt, 3, "stale_checkpoint"),
    (answered_before_the_flush, 1, "lost_fact"),
]


@pytest.mark.parametrize(("mutant", "seed", "law"), MUTANTS, ids=[f"{m.__name__}-{law}" for m, _, law in MUTANTS])
def test_a_mutant_is_found_by_its_seed(
    mutant: Callable[[Patch], None], seed: int, law: str, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    result = play_world(seed, 0.5)
    assert not result.is_ok
    assert result.audit.counts[law] > 0, {name: count for name, count in result.audit.counts.items() if count}


# --- time, processes, reports, pictures ----------------------------------------------------------------


async def passes(virtual_s: float) -> None:
    await asyncio.sleep(virtual_s)


def test_time_jumps_and_a_frozen_process_goes_on_where_it_stopped() -> None:
    async def main(loop: VirtualLoop) -> list[tuple[str, float]]:
        told: list[tuple[str, float]] = []
        process = Process(loop, "p")

        async def work() -> None:
            try:
                for _ in range(3):
                    await passes(3_600)
                    told.append(("step", loop.time()))
            finally:
                told.append(("cleaned up", loop.time()))

        process.spawn(work())
        await passes(5_000)
        process.freeze()
        await passes(20_000)
        process.thaw()
        await passes(1)
        process.kill()
        await passes(50_000)
        return [(what, round(at)) for what, at in told]

    assert run_virtual(main) == [("step", 3_600), ("step", 25_000)]


def test_a_loop_in_which_nothing_can_happen_any_more_says_so() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stopped, match="everything waits"):
        run_virtual(main)


def test_a_campaign_adds_up_its_worlds_and_says_how_to_see_it_again() -> None:
    found = campaign.run(5, 0.2, processes=1)
    assert (found.worlds, found.hours, found.command) == (1, 0.2, "tidefast sim --seed 5 --hours 0.2")
    assert "reproduce: tidefast sim --seed 5 --hours 0.2" in as_text(found)
    told = json.loads(as_json(found))
    assert told["ok"] and told["needless_holds"] == 0 and set(told["sometimes"]) == set(SOMETIMES)
    assert worlds_of(1, 5.0) == [(1, 2.0), (2, 2.0), (3, 1.0)]


def test_a_long_campaign_that_has_not_seen_everything_is_not_ok() -> None:
    found = Campaign(1, campaign.SOMETIMES_FROM_HOURS)
    assert not found.is_ok and "NOT OK: the simulation has not been where it matters" in as_text(found)
    found.sometimes.update(SOMETIMES)
    assert found.is_ok
    found.audit.mutating_steps = 100
    assert not found.is_ok and "fewer than a third" in as_text(found)


def test_a_full_campaign_with_too_few_calls_or_preemptions_is_not_ok() -> None:
    found = Campaign(1, campaign.GATE_HOURS)
    found.sometimes.update(SOMETIMES)
    found.calls, found.audit.preemptions = campaign.GATE_CALLS, campaign.GATE_PREEMPTIONS - 1
    assert not found.is_ok and "NOT OK: too small" in as_text(found)
    found.audit.preemptions += 1
    assert found.is_ok and "too small" not in as_text(found)


def test_a_broken_world_names_its_seed_and_its_logs(monkeypatch: Patch) -> None:
    commit_on_200(monkeypatch)
    found = campaign.run(1, 0.5, processes=1)
    assert found.bad_seeds == [1] and found.command == "tidefast sim --seed 1 --hours 0.5 --log"
    world = play(1, 0.5)[1]
    told = list(campaign.broken_logs(world, found))
    assert told[0].startswith("log of run r") and any(" ! " in line for line in told)


def test_the_page_is_well_formed_loads_nothing_and_shows_runs() -> None:
    found = campaign.run(5, 0.3, processes=1)
    made = page(found, play(5, 0.3)[1])
    root = xml.etree.ElementTree.fromstring(made.removeprefix("<!doctype html>\n"))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}svg")) == 4
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", made)


class Said(NamedTuple):
    seq: int
    at_ms: int
    kind: str
    epoch: int
    step_id: str | None
    data_json: str


def test_a_picture_escapes_every_text_and_leaves_out_what_no_xml_holds() -> None:
    evil = '<script>"&\x00\x1b]]>'
    events = [
        Said(1, 0, "run_created", 0, None, "{}"),
        Said(2, 5, "lease_granted", 1, None, json.dumps({"holder": evil})),
        Said(3, 9, "step_fenced", 1, evil, json.dumps({"attempt": evil})),
        Said(4, 9_000, "step_held", 1, evil, json.dumps({"reason": evil})),
        Said(5, 9_001, "step_committed", 1, evil, "no JSON"),
        Said(6, 9_002, "lease_preempted", 1, None, "[]"),
    ]
    made = draw(evil, events, [Fault(7, evil, evil)])
    xml.etree.ElementTree.fromstring(made)
    assert "<script" not in made and "\x00" not in made and "\x1b" not in made
    xml.etree.ElementTree.fromstring(draw("empty", []))


def test_the_command_writes_a_page_and_a_picture_of_a_real_stores_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--hours", "0.1", "--seed", "5", "--report", str(tmp_path / "a.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert "<svg" in (tmp_path / "a.html").read_text(encoding="utf-8")
    store = SqliteStore.open(tmp_path / "store.db", create=True)
    play(5, 0.1, store)
    store.close()
    drawn = tmp_path / "r1.svg"
    assert main(["show", "r1", "--store", str(tmp_path / "store.db"), "--svg", str(drawn)]) == 0
    xml.etree.ElementTree.parse(drawn)
    assert main(["show", "r1", "--store", str(tmp_path / "store.db"), "--svg", str(tmp_path / "no" / "r.svg")]) != 0


@pytest.mark.parametrize(
    "arguments", [["--hours", "0"], ["--hours", "nan"], ["--processes", "0"], ["--log", "--hours", "9"]]
)
def test_the_command_refuses_what_makes_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *arguments]) == 2
    assert "error[usage]" in capsys.readouterr().err
