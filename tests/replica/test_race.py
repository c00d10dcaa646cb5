"""While a directory is swapped for a link as fast as a process can, no verb reaches what the link points to."""

import os
from pathlib import Path

import pytest
from tests.replica.place import Place, place
from tests.replica.racing import TRIES, RealpathRoot, race, swapping

from tidefast.sdk.replica.beneath import has_openat2

GATE = 200_000
WAYS = {"openat2": True, "step by step": False}


def raced(top: Path, verb: str, tries: int, use_openat2: bool | None, monkeypatch: pytest.MonkeyPatch) -> int:
    if use_openat2 and not has_openat2():
        pytest.skip("this kernel has no openat2")
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # the race is for names; waiting for the disk makes it rarer
    with swapping(top), place(top / "ws", use_openat2=use_openat2) as here:
        escapes = done = made = 0
        while made < tries or not 0 < done < made:  # on a busy machine the other process may not have begun yet
            found, through = race(here, verb, tries)
            escapes, done, made = escapes + found, done + through, made + tries
            assert made < 1_000 * tries, "the swapped directory was never met in one of its two shapes"
    return escapes


@pytest.mark.parametrize("verb", TRIES)
def test_no_verb_follows_a_swapped_directory(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert raced(tmp_path, verb, 1_500, None, monkeypatch) == 0


@pytest.mark.rig
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", TRIES)
def test_no_verb_follows_a_swapped_directory_at_the_gate(
    verb: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert raced(tmp_path, verb, GATE, WAYS[way], monkeypatch) == 0


@pytest.mark.parametrize("verb", ["read", "write"])
def test_the_rig_catches_a_check_of_the_real_path(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with swapping(tmp_path):
        root = RealpathRoot(tmp_path / "ws")
        here = Place(tmp_path / "ws", root)
        escapes = 0
        for _ in range(60):
            escapes += race(here, verb, 1_000)[0]
            if escapes:
                break
        here.stage.close()
        root.close()
    assert escapes > 0, "the mutant did not escape, so the rig proves nothing"
