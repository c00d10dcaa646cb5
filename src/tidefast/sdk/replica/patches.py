"""Patches as text: unified diffs and the *Begin Patch* envelope, read into one plan per file.

Nothing here opens a file or runs a program. A patch that isn't of these two forms is refused, `ed` scripts and context
diffs among them; modes other than 100644 and 100755 don't exist. What a plan applies to is the content that it states:
each line that a hunk keeps or removes must stand there as it says, at one place only or at the line that the hunk
names. There is no fuzz: a line of context that isn't so means that the patch was made for another base.
"""

import re
from typing import Literal, NamedTuple

from tidefast.sdk.replica.refusals import NotDone, misfit

PATCH_BYTES_MAX = 2 * 2**20
FILES_MAX = 200
HUNKS_MAX = 2000
ENVELOPE = "*** Begin Patch"
_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@.*")
_NO_NEWLINE = "\\ No newline at end of file"
_GIT_LINE = re.compile(
    r"(diff --git |index |similarity index |dissimilarity index |old mode |new mode |new file mode |deleted file mode "
    r"|rename from |rename to |copy from |copy to )"
)
_MODE = re.compile(r"(?:new mode|new file mode) (\d+)")

Action = Literal["create", "update", "delete"]


class Hunk(NamedTuple):
    """Lines that must stand in the old content, and those that take their place. `at` counts from 0; None: anywhere."""

    number: int
    at: int | None
    old: list[str]
    new: list[str]
    label: str = ""  # of the envelope: a line that stands somewhere above
    is_last: bool = False  # of the envelope: it ends the file


class FilePatch(NamedTuple):
    """What a patch does to one path; `to` is its new name, `mode` its new permission bits, if it changes them."""

    action: Action
    path: str
    to: str | None
    hunks: list[Hunk]
    mode: int | None = None


def read_patch(text: str) -> list[FilePatch]:
    """The files of a patch, in its order. Raises `NotDone`."""
    if len(text.encode(errors="replace")) > PATCH_BYTES_MAX:
        raise NotDone("too_large", "patch_too_large", f"a patch has at most {PATCH_BYTES_MAX} bytes")
    lines = text.split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    is_envelope = any(line.strip() for line in lines) and next(line for line in lines if line.strip()) == ENVELOPE
    files = _Envelope(lines).read() if is_envelope else _Unified(lines).read()
    if not files:
        raise NotDone("invalid", "patch_format", "line 1: no unified diff and no *** Begin Patch", line=1)
    if len(files) > FILES_MAX:
        raise NotDone("too_large", "patch_too_large", f"a patch changes at most {FILES_MAX} files")
    if sum(len(file.hunks) for file in files) > HUNKS_MAX:
        raise NotDone("too_large", "patch_too_large", f"a patch has at most {HUNKS_MAX} hunks")
    seen: set[str] = set()
    for file in files:
        for path in (file.path, *(() if file.to is None else (file.to,))):
            if path in seen:
                raise misfit(path, "the patch changes it twice")
            seen.add(path)
    return files


class _Lines:
    """The lines of a patch with a place in them."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.at = lines, 0

    def peek(self) -> str | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def bad(self, why: str, reason: str = "patch_format") -> NotDone:
        return NotDone("invalid", reason, f"line {self.at + 1}: {why}", line=self.at + 1)


class _Unified(_Lines):
    """A unified diff, as `diff -u` and git write it."""

    def read(self) -> list[FilePatch]:
        files: list[FilePatch] = []
        header: list[str] = []
        while (line := self.peek()) is not None:
            if line.startswith("--- "):
                files.append(self._file(header))
                header = []
            elif line.startswith("diff --git ") and header:
                files += self._bare(header)
                header = [line]
                self.at += 1
            elif _GIT_LINE.match(line):
                header.append(line)
                self.at += 1
            elif header or not line.strip() or not files:
                self._refuse_others(line)
                self.at += 1
            else:
                raise self.bad("expected a hunk or the next file")
        return files + self._bare(header)

    def _refuse_others(self, line: str) -> None:
        if line.startswith(("*** ", "GIT binary patch", "Binary files ")) or re.match(r"\d+(,\d+)?[acd]\d*", line):
            raise self.bad("only unified diffs of text are read, no context diff, ed script or binary")

    def _file(self, header: list[str]) -> FilePatch:
        old = self._name("--- ")
        self.at += 1
        if not (self.peek() or "").startswith("+++ "):
            raise self.bad("expected `+++ ` after `--- `")
        new = self._name("+++ ")
        self.at += 1
        hunks: list[Hunk] = []
        while (self.peek() or "").startswith("@@"):
            hunks.append(self._hunk(len(hunks) + 1))
        if not hunks:
            raise self.bad("expected `@@ -line,count +line,count @@`")
        mode = self._mode(header)
        if old is None and new is None:
            raise self.bad("a file has no name on either side")
        if old is None:
            return FilePatch("create", new or "", None, hunks, mode)
        if new is None:
            return FilePatch("delete", old, None, hunks)
        renamed = any(line.startswith("rename to ") for line in header)
        if old != new and not renamed:
            raise self.bad(f"the two sides name different files, {old[:100]} and {new[:100]}, and it is no rename")
        return FilePatch("update", old, new if old != new else None, hunks, mode)

    def _bare(self, header: list[str]) -> list[FilePatch]:
        """A file without hunks: a rename, a new mode, an empty file."""
        if not header:
            return []
        if any(line.startswith(("copy from ", "copy to ")) for line in header):
            raise self.bad("copies aren't read; add the file as a new one")
        told = {line.partition(" ")[0] + " " + line.split(" ")[1]: line for line in header if line.count(" ") > 1}
        mode = self._mode(header)
        if "rename from" in told and "rename to" in told:
            old, new = told["rename from"][12:], told["rename to"][10:]
            return [FilePatch("update", _unquoted(old, self), _unquoted(new, self), [], mode)]
        names = re.fullmatch(r"diff --git a/(.+) b/(.+)", header[0])
        if names is None or names[1] != names[2]:
            raise self.bad("a file without hunks whose name isn't clear")
        if any(line.startswith("new file mode ") for line in header):
            return [FilePatch("create", names[1], None, [], mode)]
        if any(line.startswith("deleted file mode ") for line in header):
            return [FilePatch("delete", names[1], None, [])]
        return [FilePatch("update", names[1], None, [], mode)] if mode is not None else []

    def _mode(self, header: list[str]) -> int | None:
        for line in header:
            found = _MODE.match(line)
            if found is not None:
                if found[1] not in ("100644", "100755"):
                    raise self.bad(f"the mode {found[1][:20]} is not 100644 or 100755")
                return int(found[1], 8) & 0o777
        return None

    def _name(self, lead: str) -> str | None:
        text = (self.peek() or "")[len(lead) :].partition("\t")[0]
        name = _unquoted(text, self)
        if name == "/dev/null":
            return None
        if not name:
            raise self.bad("the file has no name")
        return name[2:] if name[:2] in ("a/", "b/") else name

    def _hunk(self, number: int) -> Hunk:
        found = _HUNK.fullmatch(self.peek() or "")
        if found is None:
            raise self.bad("a hunk's first line is `@@ -line,count +line,count @@`", "patch_malformed")
        old_left, new_left = int(found[2] or 1), int(found[4] or 1)
        at = max(int(found[1]) - (1 if old_left else 0), 0)
        self.at += 1
        old: list[str] = []
        new: list[str] = []
        while old_left or new_left:
            line = self.peek()
            if line is None:
                raise self.bad(f"hunk {number} ends before the lines that its first line counts", "patch_malformed")
            sign, rest = (line[0], line[1:]) if line else (" ", "")  # editors strip the blank of an empty line
            if sign not in " -+":
                raise self.bad(f"hunk {number} has fewer lines than its first line counts", "patch_malformed")
            self.at += 1
            end = "" if self.peek() == _NO_NEWLINE else "\n"
            if not end:
                self.at += 1
            if sign != "+":
                old_left -= 1
                old.append(rest + end)
            if sign != "-":
                new_left -= 1
                new.append(rest + end)
            if old_left < 0 or new_left < 0:
                raise self.bad(f"hunk {number} has other lines than its first line counts", "patch_malformed")
        if (self.peek() or "")[:1] in (" ", "+") or _is_removal(self.peek(), self.lines, self.at):
            raise self.bad(f"hunk {number} has more lines than its first line counts", "patch_malformed")
        return Hunk(number, at, old, new)


class _Envelope(_Lines):
    """The *Begin Patch* envelope that some models write: sections of Add, Update and Delete."""

    def read(self) -> list[FilePatch]:
        while not (self.peek() or "").strip():
            self.at += 1
        self.at += 1
        files: list[FilePatch] = []
        while (line := self.peek()) is not None:
            if line.strip() == "*** End Patch":
                self.at += 1
                while (rest := self.peek()) is not None:
                    if rest.strip():
                        raise self.bad("something stands after *** End Patch")
                    self.at += 1
                return files
            verb, _, path = line.partition(" File: ")
            self.at += 1
            if verb == "*** Add":
                files.append(FilePatch("create", path, None, [Hunk(1, 0, [], self._added())]))
            elif verb == "*** Delete":
                files.append(FilePatch("delete", path, None, []))
            elif verb == "*** Update":
                files.append(self._update(path))
            else:
                self.at -= 1
                raise self.bad("expected *** Add File:, *** Update File:, *** Delete File: or *** End Patch")
        raise self.bad("the patch ends without *** End Patch", "patch_malformed")

    def _added(self) -> list[str]:
        lines: list[str] = []
        while (line := self.peek()) is not None and not line.startswith("*** "):
            if not line.startswith("+"):
                raise self.bad("each line of an added file begins with +", "patch_malformed")
            lines.append(line[1:] + "\n")
            self.at += 1
        return lines

    def _update(self, path: str) -> FilePatch:
        to: str | None = None
        line = self.peek() or ""
        if line.startswith("*** Move to: "):
            to = line.removeprefix("*** Move to: ")
            self.at += 1
        hunks: list[Hunk] = []
        while (head := self.peek()) is not None and not head.startswith("*** "):
            hunks.append(self._section(len(hunks) + 1))
        if not hunks and to is None:
            raise self.bad("an update has at least one section", "patch_malformed")
        return FilePatch("update", path, to if to != path else None, hunks)

    def _section(self, number: int) -> Hunk:
        label, old, new, is_last = "", list[str](), list[str](), False
        line = self.peek() or ""
        if line.startswith("@@"):
            label = line[2:].strip().removesuffix("@@").strip()
            self.at += 1
        elif number > 1:
            raise self.bad("a further section begins with @@", "patch_malformed")
        while self.at < len(self.lines) and not (line := self.lines[self.at]).startswith(("@@", "*** ")):
            sign, rest = (line[0], line[1:]) if line else (" ", "")
            if sign not in " -+":
                raise self.bad("a line of a section begins with a blank, - or +", "patch_malformed")
            if sign != "+":
                old.append(rest + "\n")
            if sign != "-":
                new.append(rest + "\n")
            self.at += 1
        if self.peek() == "*** End of File":
            is_last = True
            self.at += 1
        if not old and not new:
            raise self.bad("a section has no lines", "patch_malformed")
        return Hunk(number, None, old, new, label, is_last)


def patched(content: str, file: FilePatch) -> str:
    """The new content of a file. Raises `NotDone` naming the first line that isn't as the patch says."""
    lines = _split(content)
    out: list[str] = []
    done, shift = 0, 0
    for hunk in file.hunks:
        at = _place(lines, hunk, done, shift, file.path)
        if hunk.at is not None:
            shift = at - hunk.at
        out += lines[done:at]
        out += hunk.new
        done = at + len(hunk.old)
    out += lines[done:]
    if any(not line.endswith("\n") for line in out[:-1]):
        raise misfit(file.path, "a line without an end would stand inside the file")
    return "".join(out)


def _split(content: str) -> list[str]:
    """Lines as patches count them: only a newline ends one."""
    pieces = content.split("\n")
    return [piece + "\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


def _place(lines: list[str], hunk: Hunk, low: int, shift: int, path: str) -> int:
    """Where a hunk's old lines stand: where it says, or at the only place from `low` on."""
    if hunk.at is not None:
        stated = hunk.at + shift
        if low <= stated <= len(lines) and (lines[stated : stated + len(hunk.old)] == hunk.old):
            return stated
    if not hunk.old:
        return _insert_at(lines, hunk, low, path)
    if hunk.label:
        low = _after_label(lines, hunk, low, path)
    places = _find(lines, hunk.old, low)
    if hunk.is_last:
        places = [place for place in places if place + len(hunk.old) == len(lines)]
    if len(places) == 1 or (places and hunk.label):
        return places[0]
    raise _misfit(lines, hunk, low, shift, path, len(places))


def _insert_at(lines: list[str], hunk: Hunk, low: int, path: str) -> int:
    if hunk.at is None:
        return _after_label(lines, hunk, low, path) if hunk.label else len(lines)
    raise misfit(path, f"hunk {hunk.number} inserts at line {hunk.at + 1} of {len(lines)}", hunk=hunk.number)


def _after_label(lines: list[str], hunk: Hunk, low: int, path: str) -> int:
    for number in range(low, len(lines)):
        if lines[number].strip() == hunk.label:
            return number + 1
    raise misfit(path, f"section {hunk.number}: no line reads {hunk.label[:100]!r}", hunk=hunk.number)


def _find(lines: list[str], wanted: list[str], low: int) -> list[int]:
    """The first two places where the wanted lines stand."""
    places: list[int] = []
    count = len(wanted)
    for start in range(low, len(lines) - count + 1):
        if lines[start] == wanted[0] and lines[start : start + count] == wanted:
            places.append(start)
            if len(places) == 2:
                break
    return places


def _misfit(lines: list[str], hunk: Hunk, low: int, shift: int, path: str, places: int) -> NotDone:
    if places > 1:
        return misfit(path, f"hunk {hunk.number} fits at more than one place; give more context", hunk=hunk.number)
    start = low if hunk.at is None else max(hunk.at + shift, low)
    for line, wanted in enumerate(hunk.old, start):
        there = lines[line] if line < len(lines) else None
        if there != wanted:
            shown = "the file ends" if there is None else f"it reads {there.rstrip()[:120]!r}"
            why = f"hunk {hunk.number} doesn't fit: line {line + 1} should read {wanted.rstrip()[:120]!r}, and {shown}"
            return misfit(path, why, hunk=hunk.number, line=line + 1)
    return misfit(path, f"hunk {hunk.number} doesn't fit", hunk=hunk.number)


def _unquoted(name: str, lines: _Lines) -> str:
    """A name as git quotes it where it holds other than plain characters."""
    name = name.rstrip("\r")
    if not name.startswith('"'):
        return name.strip()
    found = re.fullmatch(r'"((?:[^"\\]|\\(?:[abtnvfr"\\]|[0-7]{3}))*)"\s*', name)
    if found is None:
        raise lines.bad("a quoted name that doesn't end")
    plain = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
    raw = re.sub(
        rb'\\([abtnvfr"\\]|[0-7]{3})',
        lambda hit: bytes((int(hit[1], 8) & 0xFF if len(hit[1]) == 3 else plain[hit[1].decode()],)),
        found[1].encode(errors="replace"),
    )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise lines.bad("a quoted name isn't UTF-8") from error


def _is_removal(line: str | None, lines: list[str], at: int) -> bool:
    """Whether a line after a hunk removes one, and isn't the next file's `--- `."""
    if line is None or not line.startswith("-"):
        return False
    following = lines[at + 1] if at + 1 < len(lines) else ""
    return not (line.startswith("--- ") and following.startswith("+++ "))
