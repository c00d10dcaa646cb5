"""Replica after replica is lost while an agent replays this project's own commits, and nothing committed is missing."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from tests.replica.shore import Shore, made
from tests.workspaces.commits import COUNT, History
from tests.workspaces.house import house
from tests.workspaces.losses import CHECK, Box, replay, step

PARTS = 10


async def undisturbed(top: Path, patches: list[str], *, before: list[str]) -> dict[str, str]:
    """What the same steps leave where nothing is ever lost: each file's digest."""
    shore, replica = Shore(), made(top)
    await shore.grant(replica)
    for number, patch in enumerate(before):
        await shore.do(replica, "apply_patch", f"b{number}", patch=patch)
    for number, patch in enumerate(patches):
        await shore.do(replica, "apply_patch", f"p{number}", patch=patch)
        await shore.do(replica, "run_command", f"c{number}", shell=CHECK)
    replica.close()
    return {path: entry.digest for path, entry in shore.manifests[-1].items() if entry.kind == "file"}


async def lost_again_and_again(top: Path, first: int, last: int, losses: int, seed: int) -> None:
    history = History(top)
    before = history.patches(0, first)
    patches = [patch for number in range(first, last) for patch in history.patches(number, number + 1)]
    expected = await undisturbed(top / "calm", patches, before=before)
    async with house(top / "store.db") as at:
        box = Box(top, at.url)
        try:
            await box.start()
            for number, patch in enumerate(before):
                await step(at, f"b{number}", "apply_patch", {"patch": patch})
            await box.kill()
            done = await replay(at, box, patches, losses, seed)
            files = await at.files()
            # The disk that lives in the end holds the committed content and nothing of an older epoch.
            await box.kill()
            await box.start()
            listed = await step(at, "last", "list_files", {"path": ".", "is_recursive": True, "limit": 10_000})
        finally:
            await box.end()
    assert sum(done.values()) == losses
    assert {path: hashlib.sha256(content).hexdigest() for path, content in files.items()} == expected
    assert {entry["path"] for entry in listed["entries"] if entry["kind"] == "file"} == set(expected)


async def test_a_replay_ends_as_if_nothing_had_been_lost(tmp_path: Path) -> None:
    async with asyncio.timeout(120):
        await lost_again_and_again(tmp_path, 1, 2, 4, 1)


@pytest.mark.rig
@pytest.mark.parametrize("part", range(PARTS))
async def test_two_hundred_losses_over_a_hundred_commits(part: int, tmp_path: Path) -> None:
    first, last = part * COUNT // PARTS, (part + 1) * COUNT // PARTS
    await lost_again_and_again(tmp_path, first, last, 200 // PARTS, part)
