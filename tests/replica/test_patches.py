"""Patches: what fits is applied whole, what doesn't is refused whole, and what isn't a patch is told where."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import unipatch
from hypothesis import given
from hypothesis import strategies as st
from tests.replica.place import Place, place

from tidefast.sdk.replica.patches import FILES_MAX, HUNKS_MAX, FilePatch, patched, read_patch
from tidefast.sdk.replica.refusals import NotDone

TEN = "".join(f"line {number}\n" for number in range(1, 11))


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path / "ws") as made:
        made.do("write_file", path="f", content=TEN)
        yield made


def refusal(text: str) -> NotDone:
    with pytest.raises(NotDone) as caught:
        read_patch(text)
    return caught.value


def applied(here: Place, patch: str) -> str:
    here.do("apply_patch", patch=patch)
    return here.do("read_file", path="f")["content"]  # type: ignore[no-any-return]


NOT_PATCHES = [
    ("", "patch_format"),
    ("<html><body>no</body></html>\n", "patch_format"),
    ("\x00\x01\x02", "patch_format"),
    ("2c\nnew\n.\nw\n", "patch_format"),
    ("1,2c1,2\n< a\n---\n> b\n", "patch_format"),
    ("*** a/f\t2020\n--- b/f\t2020\n***************\n*** 1 ****\n", "patch_format"),
    ("--- a/f\n", "patch_format"),
    ("--- a/f\n+++ b/f\n", "patch_format"),
    ("--- a/f\n+++ b/f\n@@ nonsense @@\n", "patch_malformed"),
    ("--- a/f\n+++ b/f\n@@ -1,3 +1 @@\n-a\n", "patch_malformed"),
    ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n+c\n", "patch_malformed"),
    ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n-c\n", "patch_malformed"),
    ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-a\nxb\n", "patch_malformed"),
    ("--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+a\n", "patch_format"),
    ("--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n", "patch_format"),
    ("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n", "patch_format"),
    ("diff --git a/f b/f\nGIT binary patch\nliteral 3\n", "patch_format"),
    ("*** Begin Patch\n*** Add File: a\n+x\n", "patch_malformed"),
    ("*** Begin Patch\n*** Add File: a\nx\n*** End Patch\n", "patch_malformed"),
    ("*** Begin Patch\nhello\n*** End Patch\n", "patch_format"),
    ("*** Begin Patch\n*** Update File: f\n*** End Patch\n", "patch_malformed"),
    ("*** Begin Patch\n*** Add File: a\n+x\n*** End Patch\nrm -rf /\n", "patch_format"),
    ("*** Begin Patch\n*** End Patch\n", "patch_format"),
]


@pytest.mark.parametrize(("text", "reason"), NOT_PATCHES, ids=range(len(NOT_PATCHES)))
def test_what_is_no_patch_is_refused_with_its_line(text: str, reason: str) -> None:
    told = refusal(text)
    assert (told.code, told.reason) == ("invalid", reason)
    assert int(str(told.facts["line"])) >= 1


OUT = ["../../x", "/abs/x", "a/../../x", "d/\x01"]


@pytest.mark.parametrize("path", OUT)
@pytest.mark.parametrize("form", ["--- /dev/null\n+++ {}\n@@ -0,0 +1 @@\n+x\n",
                                  "*** Begin Patch\n*** Add File: {}\n+x\n*** End Patch\n",
                                  "*** Begin Patch\n*** Update File: f\n*** Move to: {}\n*** End Patch\n"])  # fmt: skip
def test_a_patch_that_names_outside_is_refused(here: Place, form: str, path: str) -> None:
    assert here.why("apply_patch", patch=form.format(path)) in ("path_outside", "path_format")
    assert here.names() == ["f"]


def test_a_unified_diff_is_applied_where_it_says(here: Place) -> None:
    patch = "--- a/f\n+++ b/f\n@@ -2,3 +2,3 @@ in f\n line 2\n-line 3\n+third\n line 4\n"
    patch += "@@ -10 +10,2 @@\n line 10\n+eleven\n"
    text = applied(here, patch)
    assert text == TEN.replace("line 3", "third") + "eleven\n"


def test_a_hunk_that_moved_is_found_if_it_fits_at_one_place_only(here: Place) -> None:
    patch = "--- f\n+++ f\n@@ -1,2 +1,2 @@\n line 5\n-line 6\n+six\n"
    assert applied(here, patch) == TEN.replace("line 6", "six")
    here.do("write_file", path="f", content="a\nb\na\nb\n")
    assert here.why("apply_patch", patch="--- f\n+++ f\n@@ -2 +2 @@\n-a\n+c\n") == "patch_conflict"


def test_context_that_differs_is_a_conflict_that_names_the_line(here: Place) -> None:
    patch = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n line 1\n line two\n-line 3\n+3\n"
    with pytest.raises(NotDone) as caught:
        here.do("apply_patch", patch=patch)
    assert caught.value.reason == "patch_conflict"
    assert caught.value.facts == {"path": "f", "hunk": 1, "line": 2}
    assert here.names() == ["f"]
    assert here.do("read_file", path="f")["content"] == TEN


CONFLICTS = [
    "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n",
    "--- a/none\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
    "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-line 1\n",
    "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-line 1\n+x\n--- a/f\n+++ b/f\n@@ -2 +2 @@\n-line 2\n+y\n",
    "--- a/f\n+++ b/f\n@@ -99,0 +100 @@\n+far\n",
    "*** Begin Patch\n*** Delete File: none\n*** End Patch\n",
    "*** Begin Patch\n*** Update File: f\n@@ no such line\n-line 1\n+x\n*** End Patch\n",
    "diff --git a/f b/f2\nrename from f\nrename to f2\ndiff --git a/f b/f\ndeleted file mode 100644\n",
]


@pytest.mark.parametrize("patch", CONFLICTS, ids=range(len(CONFLICTS)))
def test_a_patch_that_does_not_fit_changes_nothing(here: Place, patch: str) -> None:
    assert here.why("apply_patch", patch=patch) == "patch_conflict"
    assert here.names() == ["f"]
    assert here.do("read_file", path="f")["content"] == TEN


def test_the_envelope_adds_updates_moves_and_deletes(here: Place) -> None:
    here.do("write_file", path="old", content="x\n")
    here.do("write_file", path="moved", content="def a():\n    pass\n\ndef b():\n    pass\n")
    here.do("apply_patch", patch=(
        "*** Begin Patch\n*** Add File: d/new\n+one\n+\n*** Delete File: old\n"
        "*** Update File: moved\n*** Move to: d/to\n"
        "@@ def b():\n-    pass\n+    return 1\n*** End of File\n"
        "*** Update File: f\n line 1\n-line 2\n+2\n@@\n-line 9\n+9\n*** End Patch\n"))  # fmt: skip
    assert here.names() == ["d", "d/new", "d/to", "f"]
    assert here.do("read_file", path="d/new")["content"] == "one\n\n"
    assert here.do("read_file", path="d/to")["content"] == "def a():\n    pass\n\ndef b():\n    return 1\n"
    assert here.do("read_file", path="f")["content"] == TEN.replace("line 2", "2").replace("line 9", "9")


def test_git_s_renames_modes_and_empty_files_are_read(here: Place) -> None:
    here.do("apply_patch", patch=(
        "diff --git a/f b/g\nsimilarity index 90%\nrename from f\nrename to g\n"
        "index 123..456 100644\n--- a/f\n+++ b/g\n"
        "@@ -1 +1 @@\n-line 1\n+one\n"
        "diff --git a/empty b/empty\nnew file mode 100755\nindex 0..e69de29\n"))  # fmt: skip
    assert here.names() == ["empty", "g"]
    assert here.do("stat", path="empty")["mode"] == 0o755
    here.do("apply_patch", patch="diff --git a/g b/g\nold mode 100644\nnew mode 100755\n")
    assert here.do("stat", path="g")["mode"] == 0o755
    here.do("apply_patch", patch="diff --git a/g b/h\nsimilarity index 100%\nrename from g\nrename to h\n")
    assert here.do("read_file", path="h")["content"] == TEN.replace("line 1\n", "one\n")


def test_a_last_line_without_an_end_is_kept_so(here: Place) -> None:
    here.do("write_file", path="f", content="a\nb")
    assert here.why("apply_patch", patch="--- f\n+++ f\n@@ -2 +2 @@\n-b\n+c\n") == "patch_conflict"
    end = "\\ No newline at end of file\n"
    assert applied(here, f"--- f\n+++ f\n@@ -2 +2 @@\n-b\n{end}+c\n{end}") == "a\nc"
    assert applied(here, f"--- f\n+++ f\n@@ -2 +2 @@\n-c\n{end}+c\n") == "a\nc\n"


def test_only_a_newline_ends_a_line(here: Place) -> None:
    here.do("write_file", path="f", content="a\r\nb\x0cc\u2028d\n")
    assert applied(here, "--- f\n+++ f\n@@ -2 +2 @@\n-b\x0cc\u2028d\n+e\n") == "a\r\ne\n"


def test_a_name_that_git_quotes_is_read(here: Place) -> None:
    here.do("apply_patch", patch='--- /dev/null\n+++ "b/na\\303\\257f \\"x\\""\n@@ -0,0 +1 @@\n+x\n')
    assert here.names() == ["f", 'naïf "x"']


def test_limits_are_told() -> None:
    one = "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+x\n"
    assert len(read_patch("".join(one.format(number) for number in range(FILES_MAX)))) == FILES_MAX
    assert refusal("".join(one.format(number) for number in range(FILES_MAX + 1))).code == "too_large"
    hunk = "@@ -{0},0 +{0} @@\n+x\n"
    many = "--- a/f\n+++ b/f\n" + "".join(hunk.format(number) for number in range(HUNKS_MAX + 1))
    assert refusal(many).code == "too_large"
    assert refusal("x" * (2 * 2**20 + 1)).code == "too_large"


# --- against another implementation ---------------------------------------------------------------------------------

LINES = st.lists(st.sampled_from(["a", "b", "c", "", " ", "+", "-", "@@ x"]), max_size=12)


def unified(old: list[str], new: list[str]) -> str:
    import difflib

    lines = difflib.unified_diff([f"{x}\n" for x in old], [f"{x}\n" for x in new], "a/f", "b/f")
    return "".join(lines)


@given(LINES, LINES)
def test_what_a_diff_says_is_what_comes_out_and_another_implementation_agrees(old: list[str], new: list[str]) -> None:
    patch = unified(old, new)
    if old == new or not old or not new:
        return
    before, after = "".join(f"{x}\n" for x in old), "".join(f"{x}\n" for x in new)
    (file,) = read_patch(patch)
    assert patched(before, file) == after
    assert unipatch.apply_patch(before, patch) == after


@given(LINES, LINES, LINES)
def test_a_patch_for_another_content_fits_whole_or_is_refused(old: list[str], new: list[str], there: list[str]) -> None:
    patch = unified(old, new)
    if old == new or not old or not new:
        return
    (file,) = read_patch(patch)
    content = "".join(f"{x}\n" for x in there)
    try:
        result = patched(content, file)
    except NotDone:
        return
    gone = sum(len(hunk.old) - len(hunk.new) for hunk in file.hunks)
    assert result.count("\n") == content.count("\n") - gone


def test_the_two_files_of_a_patch_are_read_in_order() -> None:
    files = read_patch("--- a/x\n+++ b/x\n@@ -1 +1 @@\n--- y\n+++ z\n--- /dev/null\n+++ b/w\n@@ -0,0 +1 @@\n+1\n")
    assert [(file.action, file.path) for file in files] == [("update", "x"), ("create", "w")]
    assert isinstance(files[0], FilePatch) and files[0].hunks[0].old == ["-- y\n"]


# --- fuzz -----------------------------------------------------------------------------------------------------------

SEEDS = [
    "diff --git a/f b/g\nrename from f\nrename to g\n--- a/f\n+++ b/g\n@@ -1,2 +1,2 @@\n line 1\n-line 2\n+two\n",
    "--- a/f\n+++ b/f\n@@ -2,3 +2,3 @@\n line 2\n-line 3\n+third\n line 4\n@@ -10 +10,2 @@\n line 10\n+eleven\n",
    "--- /dev/null\n+++ b/d/new\n@@ -0,0 +1,2 @@\n+a\n+b\n",
    "*** Begin Patch\n*** Update File: f\n*** Move to: h\n@@ line 1\n line 2\n-line 3\n+x\n*** End Patch\n",
    "*** Begin Patch\n*** Add File: ../x\n+one\n*** Delete File: f\n*** End Patch\n",
]
PIECES = [
    "../", "/", "..", "\0", "\n", "--- ", "+++ ", "@@", "@@ -1 +1 @@\n", "*** ", "\\", "/dev/null", "a/", '"', "\t",
    "999999999", "-", "+", " ", "link/", "link", "120000", "rename to ", ".git/", "é", "\r", "copy to ", "0", "~",
    "*** End Patch", "\ud800",
]  # fmt: skip


def mutated(chance: random.Random) -> str:
    text = chance.choice(SEEDS)
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, len(text))
        kind = chance.random()
        if kind < 0.5:
            text = text[:at] + chance.choice(PIECES) + text[at:]
        elif kind < 0.75:
            text = text[:at] + text[at + chance.randint(1, 12) :]
        else:
            other = chance.choice(SEEDS)
            text = text[:at] + other[chance.randint(0, len(other)) :]
    return text


def fuzz_patches(top: Path, tries: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many mutated patches applied. Escapes and undeclared exceptions fail at once."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    chance = random.Random(seed)
    outside = top / "outside"
    outside.mkdir()
    (outside / "f").write_text(TEN)
    done, codes = 0, set[str]()
    with place(top / "ws") as here:
        (here.path / "link").symlink_to(outside)
        for number in range(tries):
            if number % 500 == 0:
                here.do("write_file", path="f", content=TEN)
            text = mutated(chance)
            try:
                files = here.files.apply_patch(_Patch(text))
            except NotDone as told:
                codes.add(told.code)
            else:
                done += 1
                for path in files.changed:
                    if path not in ("f", ".tidefast"):
                        _remove(here, path)
                here.do("write_file", path="f", content=TEN)
        assert codes <= {"invalid", "conflict", "forbidden", "too_large"}
        assert sorted(path.name for path in top.iterdir()) == ["outside", "ws"]
        assert [path.name for path in outside.iterdir()] == ["f"]
        assert (outside / "f").read_text() == TEN
    return done


class _Patch:
    """Arguments that the wire's own checks haven't seen."""

    def __init__(self, patch: str) -> None:
        self.patch = patch
        self.base: dict[str, str] = {}


def _remove(here: Place, path: str) -> None:
    here.why("delete", path=path, is_recursive=True)


def test_mutated_patches_never_escape_and_never_raise_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fuzz_patches(tmp_path, 4_000, 1, monkeypatch) > 20


@pytest.mark.rig
def test_mutated_patches_at_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz_patches(tmp_path, 300_000, 2, monkeypatch) > 1_000
