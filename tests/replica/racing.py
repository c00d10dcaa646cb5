"""A process that swaps a directory for a link to outside as fast as it can, and a verb that is tried meanwhile."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.replica.place import NO_TREE, Place

from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.paths import Parts
from tidefast.sdk.replica.refusals import NotDone
from tidefast.wire.workspace import read_args

RENAME_EXCHANGE = 2
OUTSIDE = "outside"
EXPECTED = {"victim": OUTSIDE, "moved": OUTSIDE}
BASE = "--- a/d/victim\n+++ b/d/victim\n@@ -1 +1 @@\n"

END = "\\ No newline at end of file\n"

# What is tried again and again. `d` is a directory of the workspace one moment and a link to outside the next.
TRIES: dict[str, list[tuple[str, dict[str, object]]]] = {
    "read": [("read_file", {"path": "d/victim"})],
    "write": [("write_file", {"path": "d/new", "content": "x"})],
    "patch": [
        ("apply_patch", {"patch": f"{BASE}-{OUTSIDE}\n+x\n"}),
        ("apply_patch", {"patch": f"{BASE}-inside\n{END}+inside\n{END}"}),
    ],
    "move": [
        ("move", {"source": "d/moved", "destination": "taken"}),
        ("move", {"source": "taken", "destination": "d/moved"}),
    ],
    "mkdir": [("make_dir", {"path": "d/made"}), ("delete", {"path": "d/made"})],
    "unlink": [("delete", {"path": "d/victim"}), ("write_file", {"path": "d/victim", "content": "inside"})],
}  # fmt: skip


class RealpathRoot(Root):
    """The mutant: looks at the real path first, and opens by name when it has found that good."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.path = os.path.realpath(path)

    def open(self, parts: Parts, flags: int, mode: int = 0) -> int:
        real = os.path.realpath(os.path.join(self.path, *parts))
        if real != self.path and not real.startswith(self.path + "/"):
            raise OSError(18, "outside")
        return os.open(os.path.join(self.path, *parts), (flags | os.O_CLOEXEC) & ~os.O_NOFOLLOW, mode)


def outside_of(top: Path) -> dict[str, str]:
    """What stands outside now."""
    outside = top / "outside"
    return {name: (outside / name).read_text() if (outside / name).is_file() else "?" for name in os.listdir(outside)}


@contextmanager
def swapping(top: Path) -> Iterator[None]:
    """`ws/d` is exchanged with a link to `outside` without pause."""
    (top / "outside").mkdir()
    for name, text in EXPECTED.items():
        (top / "outside" / name).write_text(text)
    real, link = top / "ws" / "d", top / "ws" / "link"
    real.mkdir(parents=True)
    (real / "victim").write_text("inside")
    (real / "moved").write_text("inside")
    link.symlink_to(top / "outside")
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        a, b = os.fsencode(real), os.fsencode(link)
        while True:
            libc.syscall(316 if os.uname().machine == "x86_64" else 276, -100, a, -100, b, RENAME_EXCHANGE)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def race(here: Place, verb: str, tries: int) -> tuple[int, int]:
    """(escapes, calls that went through). Stops early only for a broken rig."""
    top = here.path.parent
    escapes = done = 0
    calls = [
        (getattr(here.files, name), read_args(name, args), (NO_TREE,) if name in ("move", "delete") else ())  # type: ignore[arg-type]
        for name, args in TRIES[verb]
    ]
    for number in range(tries):
        call, args, more = calls[number % len(calls)]
        try:
            said = call(args, *more)
        except (NotDone, OSError):
            continue
        done += 1
        if verb == "read":
            escapes += said["content"] == OUTSIDE
        elif outside_of(top) != EXPECTED if number % 64 == 0 else False:
            escapes += _repair(top)
    return escapes + (_repair(top) if outside_of(top) != EXPECTED else 0), done


def _repair(top: Path) -> int:
    outside = top / "outside"
    for name in os.listdir(outside):
        if name not in EXPECTED:
            (outside / name).rmdir() if (outside / name).is_dir() else (outside / name).unlink()
    for name, text in EXPECTED.items():
        (outside / name).write_text(text)
    return 1


if __name__ == "__main__":
    sys.exit("this is a part of tests/replica/test_race.py")
