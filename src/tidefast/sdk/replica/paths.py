"""What a path may look like, before any file system is asked.

This keeps nobody inside the root: `beneath.py` does, by descriptor. It gives each path one spelling, so that the
manifest has one row for it, and it refuses what no file system of ours should ever be asked.
"""

import re
from collections.abc import Iterable

from tidefast.protocol.workspace import NAME_BYTES_MAX, PATH_BYTES_MAX
from tidefast.sdk.replica.refusals import NotDone

PARTS_MAX = 64
OWN_DIRECTORY = ".tidefast"  # the replica's journal and its half-written files, in the root and never in the manifest

Parts = tuple[str, ...]
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates: no UTF-8 text has them

# Files that another program runs or obeys later, perhaps outside the sandbox. A verb writes them only if the person who
# started the replica allows it by name; a command may, since it could run that program itself.
PROTECTED = frozenset((
    ".git", ".hg", ".svn", ".gitmodules", ".husky", ".envrc", ".vscode", ".idea", ".devcontainer", ".claude", ".cursor",
    ".codex", ".mcp.json", ".ssh", ".bashrc", ".bash_profile", ".profile", ".zshrc", ".zshenv", ".netrc", ".npmrc",
    ".pypirc", "sitecustomize.py", "usercustomize.py",
))  # fmt: skip


def parse(path: str) -> Parts:
    """The parts of a path below the root; `.` and empty parts fall away. Raises `NotDone`."""
    control = _CONTROL.search(path)
    if control is not None:
        raise NotDone("invalid", "path_format", f"the path holds the character {ord(control.group()):#x}")
    if path.startswith("/"):
        if path.strip("/."):
            raise NotDone("invalid", "path_outside", f"{path[:200]}: paths are relative to the workspace's root")
        raise NotDone("invalid", "path_empty", "the path names the root itself; name something in it")
    if len(path.encode()) > PATH_BYTES_MAX:
        raise NotDone(
            "invalid", "path_too_long", f"the path has more than {PATH_BYTES_MAX} bytes", limit=PATH_BYTES_MAX
        )
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if not parts:
        raise NotDone("invalid", "path_empty", "the path names the root itself; name something in it")
    if ".." in parts:
        raise NotDone("invalid", "path_outside", f"{path[:200]}: a path has no `..`", path=path)
    if len(parts) > PARTS_MAX:
        raise NotDone("invalid", "path_too_long", f"the path has more than {PARTS_MAX} parts", limit=PARTS_MAX)
    if any(len(part.encode()) > NAME_BYTES_MAX for part in parts):
        raise NotDone("invalid", "path_too_long", f"a part of the path has more than {NAME_BYTES_MAX} bytes")
    if parts[0].casefold() == OWN_DIRECTORY:
        raise NotDone("forbidden", "path_protected", f"{OWN_DIRECTORY} belongs to the replica", path=path)
    return parts


def parse_directory(path: str) -> Parts:
    """As `parse`, and the root itself (`` or `.`) has no parts."""
    return () if path in ("", ".", "./") else parse(path)


def spell(parts: Iterable[str]) -> str:
    """The one spelling of a path, as the manifest has it."""
    return "/".join(parts)


def refuse_protected(parts: Parts, allowed: frozenset[str]) -> None:
    """Refuse to write what other programs obey. Raises `NotDone`."""
    for part in parts:
        name = part.casefold()
        if (name in PROTECTED or name.endswith(".pth")) and name not in allowed:
            path = spell(parts)
            raise NotDone("forbidden", "path_protected", f"{path}: other programs obey {part}, so no verb writes it",
                          path=path)  # fmt: skip
