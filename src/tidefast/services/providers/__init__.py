"""Dated contracts of well-known providers: what their own docs state, with the source, and what they don't.

Each file is a tools file to copy. Its first line says what it is for; the comment lines below say where its claims are
from (`source`), which date or version the page gives itself (`stated`), when a stored copy of it was read (`read`),
what it `states`, what is `unknown`, and what to mind (`note`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SAID = ("source", "stated", "read", "states", "unknown", "note")


class Provider(NamedTuple):
    """One file: its name, what it is for, what is said about it, and its text."""

    name: str
    title: str
    said: Mapping[str, tuple[str, ...]]
    text: str


def all_providers() -> list[Provider]:
    """Every contract that is shipped, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.toml"))]


def _read(path: Path) -> Provider:
    text = path.read_text(encoding="utf-8")
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    pairs = [line.partition(": ") for line in comments[1:]]
    said = {word: tuple(told for name, _, told in pairs if name == word) for word in SAID}
    return Provider(path.stem, comments[0], said, text)
