"""No order of events shows a byte of a lost disk, commits to a dead one, or does twice what escaped."""

from collections import Counter

from tests.protocol.workspace_walk import WorkspaceWorld


def test_no_order_of_events_commits_to_a_dead_disk_or_shows_its_bytes() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        world = WorkspaceWorld(seed)
        world.walk(120)
        seen.update(event.kind for event, _ in world.site.writes)
        for run in world.site.log:
            seen.update(event.kind for event, _ in world.site.log[run])
    for kind in ("write_committed", "write_applied", "write_dropped", "replica_lost", "late_receipt", "step_held"):
        assert seen[kind] > 5, (kind, seen)
