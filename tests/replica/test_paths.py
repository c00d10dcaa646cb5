"""No path leads out of the root, whatever its text and whatever stands there. Both ways of opening are held to it."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.replica.place import Place, place

from tidefast.sdk.replica.beneath import has_openat2
from tidefast.sdk.replica.paths import PARTS_MAX, PROTECTED

SECRET = "outside"


@pytest.fixture(params=[True, False], ids=["openat2", "step by step"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param and not has_openat2():
        pytest.skip("this kernel has no openat2")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    with place(tmp_path / "ws", use_openat2=request.param) as made:
        (made.path / "d").mkdir()
        (made.path / "d" / "f").write_text("inside")
        yield made
    assert (outside / "secret").read_text() == SECRET
    assert os.listdir(outside) == ["secret"]


WRITING = {
    "write_file": {"content": "x"},
    "edit_file": {"edits": [{"old_text": "outside", "new_text": "x"}]},
    "make_dir": {},
    "delete": {},
    "move": {"destination": "elsewhere"},
}
READING = {"read_file": {}, "stat": {}, "list_files": {}}
EVERY = {**WRITING, **READING}


def why(here: Place, verb: str, path: str) -> str:
    name = "source" if verb == "move" else "path"
    return here.why(verb, **{name: path}, **EVERY[verb])


TEXTS = [
    ("../../etc/passwd", "path_outside"),
    ("/etc/passwd", "path_outside"),
    ("a/../../b", "path_outside"),
    ("..", "path_outside"),
    ("d/..", "path_outside"),
    ("a\0b", "path_format"),
    ("a\nb", "path_format"),
    ("a\x1bb", "path_format"),
    ("a\x85b", "path_format"),
    ("x" * 256, "path_too_long"),
    ("/".join(["y" * 200] * 21)[:4095] + "", "path_too_long"),
    ("/".join(["p"] * (PARTS_MAX + 1)), "path_too_long"),
    (".tidefast/journal", "path_protected"),
]


@pytest.mark.parametrize(("path", "reason"), TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("verb", EVERY)
def test_a_path_that_means_outside_is_refused_by_each_verb(here: Place, verb: str, path: str, reason: str) -> None:
    if len(path) > 1000:
        path = "/".join(["é" * 127] * 17)  # 4,334 bytes in 2,175 characters
    assert why(here, verb, path) == reason
    assert here.names() == ["d", "d/f"]


@pytest.mark.parametrize("path", ["/", ".", "./.", "//"])
@pytest.mark.parametrize("verb", [*WRITING, "read_file"])
def test_the_root_itself_is_no_file(here: Place, verb: str, path: str) -> None:
    assert why(here, verb, path) == "path_empty"


@pytest.mark.parametrize("path", ["%2e%2e%2fsecret", "..\\..\\secret", "....//secret", "~/secret", "$HOME"])
def test_what_other_programs_would_expand_is_a_plain_name(here: Place, path: str) -> None:
    here.do("write_file", path=path, content="plain")
    assert here.do("read_file", path=path)["content"] == "plain"


LINKS = ["link", "link/secret", "dangling", "d/up", "d/up/outside/secret", "proc", "file_link"]


@pytest.mark.parametrize("verb", ["write_file", "edit_file", "read_file"])
@pytest.mark.parametrize("path", LINKS)
def test_no_link_is_followed(here: Place, verb: str, path: str) -> None:
    outside = here.path.parent / "outside"
    (here.path / "link").symlink_to(outside)
    (here.path / "file_link").symlink_to(here.path / "d" / "f")
    (here.path / "dangling").symlink_to(outside / "new")
    (here.path / "d" / "up").symlink_to("../..")
    (here.path / "proc").symlink_to("/proc/self/root/etc/passwd")
    assert why(here, verb, path) == "path_is_link"


@pytest.mark.parametrize("verb", ["make_dir", "delete", "move", "list_files", "stat"])
def test_no_link_on_the_way_is_followed(here: Place, verb: str) -> None:
    (here.path / "link").symlink_to(here.path.parent / "outside")
    assert why(here, verb, "link/secret") == "path_is_link"


def test_a_link_itself_can_be_looked_at_moved_and_removed(here: Place) -> None:
    (here.path / "link").symlink_to(here.path.parent / "outside")
    assert here.do("stat", path="link")["kind"] == "symlink"
    here.do("move", source="link", destination="other")
    here.do("delete", path="other", is_recursive=True)
    assert here.names() == ["d", "d/f"]


def test_nothing_is_moved_through_a_link(here: Place) -> None:
    (here.path / "link").symlink_to(here.path.parent / "outside")
    assert here.why("move", source="d/f", destination="link/f") == "path_is_link"
    assert here.why("move", source="link/secret", destination="f") == "path_is_link"


@pytest.mark.parametrize("verb", ["read_file", "write_file", "edit_file"])
def test_pipes_sockets_and_devices_are_refused_at_once(here: Place, verb: str) -> None:
    os.mkfifo(here.path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(here.path / "socket"))
    assert why(here, verb, "pipe") == "not_a_file"
    assert why(here, verb, "socket") == "not_a_file"
    if os.geteuid() == 0:
        os.mknod(here.path / "null", 0o020666, os.makedev(1, 3))
        assert why(here, verb, "null") == "not_a_file"


@pytest.mark.parametrize("verb", ["read_file", "write_file", "edit_file"])
def test_a_file_with_a_second_name_is_refused(here: Place, verb: str) -> None:
    os.link(here.path.parent / "outside" / "secret", here.path / "hard")
    try:
        assert why(here, verb, "hard") == "hard_link"
    finally:
        (here.path / "hard").unlink()


PLANTED = [*sorted(PROTECTED), "a/.git/hooks/pre-commit", ".GIT/config", "lib/evil.pth", ".vscode/tasks.json"]


@pytest.mark.parametrize("path", PLANTED)
@pytest.mark.parametrize("verb", WRITING)
def test_what_other_programs_obey_is_not_written(here: Place, verb: str, path: str) -> None:
    assert why(here, verb, path) == "path_protected"


def test_a_protected_name_is_no_destination_and_no_patch_writes_it(here: Place) -> None:
    assert here.why("move", source="d/f", destination=".git/config") == "path_protected"
    patch = "--- /dev/null\n+++ b/.git/hooks/pre-commit\n@@ -0,0 +1 @@\n+rm\n"
    assert here.why("apply_patch", patch=patch) == "path_protected"
    assert here.names() == ["d", "d/f"]


def test_the_owner_allows_a_protected_name(tmp_path: Path) -> None:
    with place(tmp_path / "ws", allowed=frozenset((".vscode",))) as here:
        here.do("write_file", path=".vscode/settings.json", content="{}")
        assert here.why("write_file", path=".git/config", content="") == "path_protected"


def test_a_file_in_the_way_and_a_directory_in_the_way_are_told_apart(here: Place) -> None:
    assert here.why("write_file", path="d/f/g", content="") == "not_a_directory"
    assert here.why("write_file", path="d", content="") == "is_a_directory"
    assert here.why("read_file", path="d") == "is_a_directory"
    assert here.why("read_file", path="d/none") == "path_unknown"
    assert here.why("make_dir", path="d/f") == "not_a_directory"
