"""This project's own commits, out of a bundle kept here, as patches that an agent can apply one after the other."""

import subprocess
from pathlib import Path

BUNDLE = Path(__file__).with_name("history.bundle")
PATCH_BYTES_MAX = 800_000  # of one call; a larger commit goes in several patches


def git(place: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(place), *words], capture_output=True, check=True)
    return done.stdout.decode("utf-8", "surrogateescape")


def commits(scratch: Path, count: int) -> list[list[str]]:
    """The first commits of the history, each as its patches; applied in order they make the tree of the last one."""
    subprocess.run(["git", "clone", "-q", "--bare", str(BUNDLE), str(scratch)], check=True, capture_output=True)
    names = git(scratch, "rev-list", "--reverse", "--topo-order", "history").split()[:count]
    before = git(scratch, "hash-object", "-t", "tree", "/dev/null").strip()
    found: list[list[str]] = []
    for name in names:
        found.append(patches(git(scratch, "diff", "--no-renames", "--no-color", "--text", before, name)))
        before = name
    return found


def patches(diff: str) -> list[str]:
    """A diff in parts that a call can carry, each of whole files. Files without a line are out: no patch says them."""
    files = ["diff --git " + part for part in ("\n" + diff).split("\ndiff --git ")[1:]]
    parts: list[str] = []
    for file in (file if file.endswith("\n") else file + "\n" for file in files if "\n@@" in file):
        if parts and len((parts[-1] + file).encode("utf-8", "surrogateescape")) < PATCH_BYTES_MAX:
            parts[-1] += file
        else:
            parts.append(file)
    return parts
