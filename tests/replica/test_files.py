"""What each file verb does, what it says that it changed, and that a refused one has changed nothing."""

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.replica.place import Place, place

from tidefast.protocol.workspace import Entry, difference, fold
from tidefast.sdk.replica.refusals import NotDone
from tidefast.sdk.replica.tree import scan


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path / "ws") as made:
        yield made


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def told(here: Place, verb: str, **args: object) -> None:
    """Do it, and hold what it says against what a scan sees."""
    before = scan(here.root).manifest()
    done = here.done(verb, **args)
    delta = {path: None if node is None else node.entry for path, node in done.changed.items()}
    after = scan(here.root).manifest()
    assert fold(before, delta) == after
    assert set(difference(before, after)) <= set(delta)


def test_each_verb_says_what_it_changed(here: Place) -> None:
    told(here, "write_file", path="a/b/c.txt", content="one\ntwo\n")
    told(here, "write_file", path="a/b/c.txt", content="one\ntwo\nthree\n", mode=0o755)
    told(here, "edit_file", path="a/b/c.txt", edits=[{"old_text": "two", "new_text": "2"}])
    told(here, "make_dir", path="x/y", mode=0o700)
    told(here, "move", source="a", destination="x/y/a")
    told(here, "write_file", path="plain", content="p")
    told(here, "move", source="plain", destination="x/y/a/b/c.txt", is_replacing=True)
    patch = "--- a/x/y/a/b/c.txt\n+++ b/x/y/a/b/c.txt\n@@ -1 +1 @@\n-p\n\\ No newline at end of file\n+q\n"
    told(here, "apply_patch", patch=patch)
    told(here, "delete", path="x", is_recursive=True)
    assert here.names() == []


def test_a_file_is_read_whole_in_pieces_and_as_bytes(here: Place) -> None:
    text = "naïve €\n" * 3
    assert here.do("write_file", path="t", content=text) == {
        "path": "t", "size": len(text.encode()), "digest": sha(text), "is_new": True,
    }  # fmt: skip
    assert here.do("read_file", path="t")["content"] == text
    whole = here.do("read_file", path="t", encoding="base64")
    assert base64.b64decode(whole["content"]) == text.encode()
    for limit in range(1, 12):
        for offset in range(12):
            piece = here.do("read_file", path="t", offset=offset, limit=limit)
            assert piece["content"] in text
            assert piece["is_truncated"]
    assert not whole["is_truncated"]


def test_bytes_that_are_no_text_are_told_and_read_as_base64(here: Place) -> None:
    here.do("write_file", path="b", content=base64.b64encode(b"\xff\x00").decode(), encoding="base64")
    assert here.why("read_file", path="b") == "not_text"
    assert here.why("edit_file", path="b", edits=[{"old_text": "a", "new_text": "b"}]) == "not_text"
    assert base64.b64decode(here.do("read_file", path="b", encoding="base64")["content"]) == b"\xff\x00"
    assert here.why("write_file", path="b", content="%", encoding="base64") == "content_format"


def test_a_replaced_file_keeps_its_mode_unless_another_is_given(here: Place) -> None:
    here.do("write_file", path="run", content="1", mode=0o755)
    here.do("write_file", path="run", content="2")
    assert here.do("stat", path="run")["mode"] == 0o755


def test_edits_are_done_all_or_none(here: Place) -> None:
    here.do("write_file", path="t", content="aa bb aa")
    edits = [{"old_text": "bb", "new_text": "cc"}, {"old_text": "aa", "new_text": "x"}]
    assert here.why("edit_file", path="t", edits=edits) == "text_ambiguous"
    assert here.why("edit_file", path="t", edits=[edits[0], {"old_text": "z", "new_text": ""}]) == "text_not_found"
    assert here.do("read_file", path="t")["content"] == "aa bb aa"
    edits[1]["is_all"] = True  # type: ignore[assignment]
    assert here.do("edit_file", path="t", edits=edits)["replaced"] == 3
    assert here.do("read_file", path="t")["content"] == "x cc x"


def test_listing_is_sorted_and_says_when_it_is_cut(here: Place) -> None:
    for name in ("b/c", "b/a", "a"):
        here.do("write_file", path=name, content=name)
    assert [item["path"] for item in here.do("list_files")["entries"]] == ["a", "b"]
    recursive = here.do("list_files", is_recursive=True)
    assert [item["path"] for item in recursive["entries"]] == ["a", "b", "b/a", "b/c"]
    assert here.do("list_files", is_recursive=True, limit=2)["is_truncated"]
    assert here.do("list_files", path="b")["entries"][0]["path"] == "b/a"
    assert here.why("list_files", path="a") == "not_a_directory"


def test_delete_wants_to_be_told_that_a_tree_is_meant(here: Place) -> None:
    here.do("write_file", path="d/a/f", content="")
    assert here.why("delete", path="d") == "directory_not_empty"
    assert here.do("delete", path="d", is_recursive=True)["removed"] == 3
    assert here.why("delete", path="d") == "path_unknown"
    assert os.listdir(here.path / ".tidefast" / "stage") == []


def test_a_move_replaces_nothing_unless_told(here: Place) -> None:
    here.do("write_file", path="a", content="a")
    here.do("write_file", path="b", content="b")
    assert here.why("move", source="a", destination="b") == "path_exists"
    here.do("move", source="a", destination="b", is_replacing=True)
    assert here.do("read_file", path="b")["content"] == "a"
    here.do("make_dir", path="d")
    assert here.why("move", source="d", destination="d/e") == "move_into_itself"


def test_a_patch_whose_last_file_fails_leaves_the_first_as_it_was(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    here.do("write_file", path="one", content="1\n")
    here.do("write_file", path="three", content="3\n")
    patch = (
        "--- a/one\n+++ b/one\n@@ -1 +1 @@\n-1\n+11\n--- /dev/null\n+++ b/new/two\n@@ -0,0 +1 @@\n+2\n"
        "--- a/three\n+++ /dev/null\n@@ -1 +0,0 @@\n-3\n"
    )
    before = scan(here.root).manifest()
    real, count = os.fsync, 0

    def failing(fd: int) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise OSError(28, "no space")
        real(fd)

    for at in range(1, 7):
        count = 0
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", failing)
            assert here.why("apply_patch", patch=patch) == "workspace_full", at
        assert scan(here.root).manifest() == before
        assert os.listdir(here.path / ".tidefast" / "stage") == []
    assert here.do("apply_patch", patch=patch) == {"paths": ["new/two", "one", "three"]}
    assert here.names() == ["new", "new/two", "one"]


def test_a_patch_for_another_base_is_refused_whole(here: Place) -> None:
    here.do("write_file", path="f", content="1\n")
    patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n"
    assert here.why("apply_patch", patch=patch, base={"f": sha("0\n")}) == "base_moved"
    assert here.do("apply_patch", patch=patch, base={"f": sha("1\n")}) == {"paths": ["f"]}
    assert here.why("apply_patch", patch=patch) == "patch_conflict"


def test_a_disk_that_is_full_is_told_and_old_content_stays(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    here.do("write_file", path="f", content="old")

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(NotDone) as refusal:
            here.do("write_file", path="f", content="new")
    assert (refusal.value.code, refusal.value.reason) == ("full", "workspace_full")
    assert here.do("read_file", path="f")["content"] == "old"
    assert os.listdir(here.path / ".tidefast" / "stage") == []


def test_a_scan_reads_again_only_what_changed(here: Place) -> None:
    here.do("write_file", path="a", content="1")
    here.do("write_file", path="b", content="1")
    past = 1_500_000_000
    first = scan(here.root)
    for name in ("a", "b"):
        os.utime(here.path / name, (past, past))
    nodes = {path: node._replace(signature=_signature(here.path / path)) for path, node in first.nodes.items()}
    lying = nodes["a"]._replace(entry=Entry("file", 0o644, "0" * 64, 1))
    known = first._replace(nodes={**nodes, "a": lying})
    assert scan(here.root, known).nodes["a"] is lying
    (here.path / "a").write_text("2")
    os.utime(here.path / "a", (past, past))
    assert scan(here.root, known).nodes["a"].entry.digest == sha("2")


def _signature(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def test_what_no_manifest_can_hold_is_listed(here: Place) -> None:
    os.mkfifo(here.path / "pipe")
    (here.path / "link").symlink_to("nowhere")
    with open(os.path.join(os.fsencode(here.path), b"\xff"), "w"):
        pass
    tree = scan(here.root)
    assert tree.left_out == {"pipe": "special", "\udcff": "name_invalid"}
    assert tree.nodes["link"].entry == Entry("symlink", 0o777, sha("nowhere"), 7)
