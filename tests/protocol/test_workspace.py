"""Entries, deltas, the fold, the chain, and what a disk proves."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidefast.protocol.canonical import canonical
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.workspace import (
    CHAIN_START,
    DELTA_PATHS_MAX,
    EMPTY_DISK,
    SIZE_MAX,
    Disk,
    Entry,
    delta_json,
    delta_problem,
    difference,
    entry_problem,
    fold,
    is_digest,
    is_path,
    plan_for,
    tree_digest,
    write_chain,
)

SHA = hashlib.sha256(b"x").hexdigest()
FILE, DIR, LINK = Entry("file", 0o644, SHA, 1), Entry("dir", 0o755, "", 0), Entry("symlink", 0o777, SHA, 1)
names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=4).filter(
    lambda name: name not in (".", "..")
)
entries = st.sampled_from([FILE, LINK, Entry("file", 0o600, hashlib.sha256(b"y").hexdigest(), 1)])
deltas = st.dictionaries(names, st.none() | entries, max_size=6)


@pytest.mark.parametrize("path", ["a", "a/b", "...", "a b", "ü/é", ".hidden", "a" * 255])
def test_a_relative_name_is_a_path(path: str) -> None:
    assert is_path(path)


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", ".", "a/./b", "..", "a/../b", "a\0", "a" * 256, "a/" * 2048 + "a", "\ud800"]
)
def test_what_leaves_the_root_or_names_nothing_is_no_path(path: str) -> None:
    assert not is_path(path)


def test_a_digest_is_64_lower_case_hex_digits() -> None:
    assert is_digest(SHA)
    assert not is_digest(SHA.upper())
    assert not is_digest(SHA[1:])


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (FILE._replace(mode=0o4755), "mode"),
        (DIR._replace(size=1), "directory"),
        (FILE._replace(digest=""), "SHA-256"),
        (FILE._replace(size=SIZE_MAX + 1), "size"),
    ],
)
def test_an_entry_that_can_not_be_is_named(entry: Entry, word: str) -> None:
    assert word in entry_problem(entry)
    assert word in delta_problem({"a": entry})


def test_a_whole_delta_has_no_problem() -> None:
    assert delta_problem({"d": DIR, "d/f": FILE, "d/gone": None, "l": LINK, "elsewhere/f": FILE}) == ""


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        ({"../a": FILE}, "no path below the root"),
        ({"f": FILE, "f/g": FILE}, "below what is no directory"),
        ({"d": None, "d/e/f": FILE}, "below what is no directory"),
        ({f"f{n}": FILE for n in range(DELTA_PATHS_MAX + 1)}, "paths changed"),
    ],
)
def test_a_delta_that_can_not_be_is_named(delta: dict[str, Entry | None], words: str) -> None:
    assert words in delta_problem(delta)


def test_a_directory_may_be_removed_with_all_that_was_in_it() -> None:
    assert delta_problem({"d": None, "d/f": None}) == ""


@given(deltas, deltas)
def test_the_difference_of_two_contents_makes_one_out_of_the_other(
    first: dict[str, Entry | None], second: dict[str, Entry | None]
) -> None:
    before = fold({}, first)
    after = fold(before, second)
    assert fold(before, difference(before, after)) == after
    assert difference(after, after) == {}
    assert (tree_digest(before) == tree_digest(after)) == (before == after)


@given(deltas)
def test_the_chain_digests_the_canonical_text_of_the_write(delta: dict[str, Entry | None]) -> None:
    text = delta_json(delta)
    whole = canonical({"index": 3, "run": "r", "step": "s", "delta": {p: e and list(e) for p, e in delta.items()}})
    assert write_chain(SHA, 3, RunId("r"), StepId("s"), text) == hashlib.sha256((SHA + whole).encode()).hexdigest()


def test_a_new_workspace_keeps_an_empty_disk() -> None:
    assert plan_for(EMPTY_DISK, 0, CHAIN_START) == "keep"


@pytest.mark.parametrize(
    ("disk", "there", "plan"),
    [
        (Disk(Epoch(3), 5, SHA), SHA, "keep"),
        (Disk(Epoch(3), 4, SHA), SHA, "rollback"),
        (Disk(Epoch(3), 5, SHA, is_ahead=True), SHA, "rollback"),
        (Disk(Epoch(3), 5, SHA, is_whole=False), SHA, "fetch_all"),
        (Disk(Epoch(3), 5, CHAIN_START), SHA, "fetch_all"),
        (Disk(Epoch(3), 6, SHA), None, "fetch_all"),
        (Disk(Epoch(0), 5, SHA), SHA, "fetch_all"),
        (EMPTY_DISK, CHAIN_START, "fetch_all"),
    ],
)
def test_a_plan_believes_a_disk_only_what_the_chain_proves(disk: Disk, there: str | None, plan: str) -> None:
    assert plan_for(disk, 5, there) == plan
