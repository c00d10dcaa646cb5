"""The project's own commits, replayed into a workspace whose disk is lost again and again."""

import asyncio
from pathlib import Path

import pytest
from tests.workspaces.history import commits
from tests.workspaces.replay import WAYS, prove


def test_the_history_is_whole_and_fits_into_calls(tmp_path: Path) -> None:
    found = commits(tmp_path / "bare", 100)
    assert len(found) == 100
    assert all(len(part.encode("utf-8", "surrogateescape")) < 1_000_000 for parts in found for part in parts)


@pytest.mark.rig
def test_a_replay_that_loses_its_disk_in_every_way_ends_with_the_undisturbed_tree(tmp_path: Path) -> None:
    calm, fire = asyncio.run(prove(tmp_path, 7, seed=3, every=2))
    assert calm.wrong == fire.wrong == []
    assert calm.tree == fire.tree and set(fire.losses) == set(WAYS)
    assert sum(fire.losses.values()) * 3 >= fire.steps
