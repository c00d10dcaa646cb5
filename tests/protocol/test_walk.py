"""Random walks of the rules against a provider's truth: no step takes effect twice, and the books say what is so."""

from collections import Counter

import pytest
from tests.protocol.walk import World

WALKS_PER_BLOCK = 100
MOVES = 160

SOMETIMES = (
    *("sent", "replayed", "sent_again_by_a_successor", "unsent", "landed_late", "error_after_commit", "deduped"),
    *("declined", "late_answer", "told_twice", "instance_died", "booked_lost", "granted", "preempted_in_flight"),
    *("undo_preempted", "resolved", "checkpoint", "zombie_refused", "ended_completed", "ended_failed"),
    *("state_fenced", "state_in_doubt", "state_held", "state_applied", "state_committed", "state_rejected"),
    *("state_pending", "state_compensated", "pause", "resume", "freeze", "thaw", "cancel", "ended_cancelled"),
    "undo_held_unwritten",
)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("block", range(8))
def test_no_order_of_events_makes_a_second_effect_or_a_false_book(block: int, seen: Counter[str]) -> None:
    for seed in range(block * WALKS_PER_BLOCK, (block + 1) * WALKS_PER_BLOCK):
        world = World(seed)
        world.walk(MOVES)
        seen.update(world.seen)
        seen["walks"] += 1


def test_the_walks_went_where_the_trouble_is(seen: Counter[str]) -> None:
    if seen["walks"] < 8 * WALKS_PER_BLOCK:  # run alone, or its blocks went to another process
        for seed in range(8 * WALKS_PER_BLOCK):
            world = World(seed)
            world.walk(MOVES)
            seen.update(world.seen)
    missed = [what for what in SOMETIMES if seen[what] == 0]
    assert not missed, f"never happened: {missed}; seen: {dict(seen)}"
