"""A scenario as text: a header, then moves, each with the trace that it must leave.

    name: late_ack
    question: The answer comes after the takeover. Does it count?
    answer: Replay.
    why: …
    class: interleaving

    start r1
      + run_created: agent shop
      = person: r1 claimable

Lines that begin with `#` are captions. Indented lines are the trace: `+` an event that became durable, `~` what
the provider saw or said, `=` what a caller was told, `!` what happened to a process. A rewrite replaces the trace and
nothing else; `expect` moves are written by hand and stay.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HEADER = ("name", "question", "answer", "why", "class", "needs", "naive", "breaks")
NEEDED = ("name", "question", "answer", "why", "class")
_OPTION = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)


class ScriptError(Exception):
    """The text is no scenario, or a move can't be made. The message names the line."""


@dataclass(slots=True)
class Move:
    """One move: its words, its options, the captions above it and the trace that was written below it."""

    line: int
    text: str
    words: Sequence[str]
    options: Mapping[str, str]
    captions: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    @property
    def verb(self) -> str:
        return self.words[0]


@dataclass(slots=True)
class Scenario:
    """A parsed file."""

    header: Mapping[str, str]
    moves: list[Move]
    captions: list[str] = field(default_factory=list)  # below the last move

    @property
    def name(self) -> str:
        return self.header["name"]

    @property
    def naive(self) -> str:
        """The naive design that is shown, empty for the product itself."""
        return self.header.get("naive", "")

    @property
    def breaks(self) -> frozenset[str]:
        """The laws that the naive design must be caught breaking."""
        return frozenset(self.header.get("breaks", "").replace(",", " ").split())


def parse(text: str, source: str) -> Scenario:
    """A scenario from its text. Raises `ScriptError`."""
    lines = text.splitlines()
    end = next((place for place, line in enumerate(lines) if not line.strip()), len(lines))
    header = _header(lines[:end], source)
    moves: list[Move] = []
    captions: list[str] = []
    for number, line in enumerate(lines[end:], end + 1):
        if not line.strip():
            continue
        if line.startswith("#"):
            captions.append(line[1:].strip())
        elif line[0].isspace():
            if not moves or captions:
                raise ScriptError(f"{source}:{number}: a trace stands below its move")
            moves[-1].trace.append(line.strip())
        else:
            moves.append(_move(line, number, source, captions))
            captions = []
    if not moves:
        raise ScriptError(f"{source}: expected moves below the header")
    return Scenario(header, moves, captions)


def _header(lines: Sequence[str], source: str) -> Mapping[str, str]:
    header: dict[str, str] = {}
    last = ""
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition(":")
        if line[0].isspace() and last:
            header[last] += " " + line.strip()
        elif colon and name in HEADER and name not in header:
            header[name], last = value.strip(), name
        else:
            raise ScriptError(f"{source}:{number}: expected one of {', '.join(HEADER)}, each once")
    missing = [name for name in NEEDED if not header.get(name)]
    if missing or bool(header.get("naive")) != bool(header.get("breaks")):
        raise ScriptError(f"{source}: the header lacks {', '.join(missing) or 'naive or breaks'}")
    return header


def _move(line: str, number: int, source: str, captions: list[str]) -> Move:
    try:
        tokens = shlex.split(line)
    except ValueError as error:
        raise ScriptError(f"{source}:{number}: {error}") from error
    words: list[str] = []
    options: dict[str, str] = {}
    for token in tokens:
        option = _OPTION.fullmatch(token)
        if option is None:
            words.append(token)
        else:
            options[option[1]] = option[2]
    if not words:
        raise ScriptError(f"{source}:{number}: expected a move")
    return Move(number, line.strip(), words, options, captions)


def spell(scenario: Scenario, traces: Sequence[Sequence[str]]) -> str:
    """The file's text with these traces below its moves."""
    lines = [line for name in HEADER if name in scenario.header for line in _folded(name, scenario.header[name])]
    lines.append("")
    for move, trace in zip(scenario.moves, traces, strict=True):
        lines += [f"# {caption}".rstrip() for caption in move.captions]
        lines.append(move.text)
        lines += [f"  {line}" for line in trace]
    lines += [f"# {caption}".rstrip() for caption in scenario.captions]
    return "\n".join(lines) + "\n"


def _folded(name: str, value: str) -> list[str]:
    lines, line = [], f"{name}:"
    for word in value.split():
        if len(line) + 1 + len(word) > 110:
            lines.append(line)
            line = " "
        line += f" {word}"
    return [*lines, line]
