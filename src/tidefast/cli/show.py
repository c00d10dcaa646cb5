"""What is printed, and how it is made safe.

Ids, notes, outputs and receipts come from outside; on a terminal a control character in them could rewrite the screen
or worse. So every text passes `safe`, and JSON is written in ASCII. Colour is for people only: on a terminal, through
rich, and nowhere else.
"""

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from tidefast.protocol.ids import EPOCHS_PER_INCARNATION

Cell = tuple[str, str]  # a text, and the style that it has on a terminal

STYLES = {
    "completed": "green",
    "committed": "green",
    "failed": "red",
    "rejected": "yellow",
    "held": "bold red",
    "frozen": "bold red",
    "in_doubt": "magenta",
    "leased": "cyan",
    "compensated": "blue",
}

_output: TextIO | None = None  # where output goes once user code has been sent elsewhere


def safe(text: str) -> str:
    """The text with every character that isn't printable spelled out (`\\x1b`, `\\u202e`)."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else _spelled(mark) for mark in text)


def _spelled(mark: str) -> str:
    return mark.encode("unicode_escape", "surrogatepass").decode("ascii")


def keep_stdout() -> None:
    """Keep standard output for what this command prints: what user code writes there goes to standard error."""
    global _output
    sys.stdout.flush()
    _output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # user code's own prints, which now go where errors go


def write(text: str) -> None:
    """One line of output, at once."""
    print(text, file=_output or sys.stdout, flush=True)


def is_for_people() -> bool:
    return (_output or sys.stdout).isatty()


def line(*cells: str | Cell) -> None:
    """One line of text, each cell a text or a text with its style."""
    parts = [(safe(cell), "") if isinstance(cell, str) else (safe(cell[0]), cell[1]) for cell in cells]
    if not is_for_people() or not any(style for _, style in parts):
        write("".join(text for text, _ in parts))
        return
    from rich.console import Console
    from rich.text import Text

    Console(file=_output or sys.stdout, highlight=False, soft_wrap=True).print(Text.assemble(*parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns; a word that has a style is shown in it."""
    lines = [[safe(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in [list(head), *lines]) for place in range(len(head))]
    line((_aligned(head, widths), "bold"))
    for row in lines:
        cells: list[str | Cell] = []
        for place, cell in enumerate(row):
            is_last = place == len(row) - 1
            cells.append((cell, STYLES.get(cell, "")))
            cells.append("" if is_last else " " * (widths[place] - len(cell) + 2))
        line(*cells)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def document(value: Any) -> None:
    """One JSON document on one line, in ASCII, so that no terminal and no encoding can stumble over it."""
    plain = json.loads(msgspec.json.encode(value))
    write(json.dumps(plain, ensure_ascii=True, separators=(",", ":")).replace("\x7f", "\\u007f"))


def progress(done: int, of: int, what: str) -> None:
    """One line on a terminal that is overwritten as the work goes on."""
    if sys.stderr.isatty():
        end = "\n" if done == of else ""
        print(f"\r{done:,} of {of:,} {what}", end=end, file=sys.stderr, flush=True)


def moment(ms: int) -> str:
    """A time of the authority's clock, for people."""
    return datetime.fromtimestamp(ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if ms else "-"


def epoch(number: int) -> str:
    """An epoch as people read it: its number, after its store's incarnation where that was ever raised."""
    incarnation, count = divmod(number, EPOCHS_PER_INCARNATION)
    if not number:
        return "-"
    return f"{incarnation}.{count}" if incarnation else str(count)


def short(text: str, length: int = 100) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
