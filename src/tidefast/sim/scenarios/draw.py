"""A scenario as a picture in text: one lane per party, time downwards, in at most 100 columns."""

import textwrap
from collections.abc import Iterator

from tidefast.sim.scenarios.play import Played
from tidefast.sim.scenarios.stage import AUTHORITY, PERSON, PROVIDER, Note

WIDTH = 100
TIME = 7
WORKERS_MAX = 3  # more of them share one lane
REMARK_MAX = 34
LIFE = {"frozen": ":", "dies": " ", "goes on": "|"}
LEGEND = (
    "w1, w2 … workers that drive the run · person: a client or an operator · authority: decides, keeps the log, and "
    "calls providers · lane of dots: frozen · --> asks or sends · <-- answers · [ ] written to the log"
)


def draw(played: Played) -> list[str]:
    """The picture's lines, with the question above and the answer below."""
    header = played.scenario.header
    lines = [header["name"], ""]
    lines += _paragraph("Question", header["question"])
    lines.append("")
    lines += _Chart(played).lines()
    lines.append("")
    lines += _paragraph("Answer", header["answer"])
    lines += _paragraph("Why", header["why"])
    if played.scenario.naive:
        lines += _paragraph("Broken", f"{', '.join(sorted(played.broken))}, as this design must be")
    return [*lines, "", *textwrap.wrap(LEGEND, WIDTH)]


def _paragraph(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name + ':':<10}{text}", WIDTH, subsequent_indent=" " * 10)


class _Chart:
    """Lanes at fixed columns, and rows that are drawn over them."""

    def __init__(self, played: Played) -> None:
        self._played = played
        notes = [note for notes in played.notes for note in notes]
        parties = [party for note in notes for party in (note.source, note.target) if party]
        workers = [party for party in dict.fromkeys(parties) if party not in (AUTHORITY, PROVIDER, PERSON, "gateway")]
        self._shared = len(workers) > WORKERS_MAX
        lanes = ["workers"] if self._shared else workers
        lanes = [PERSON] * (PERSON in parties) + lanes + [AUTHORITY] + [PROVIDER] * (PROVIDER in parties)
        step = (WIDTH - TIME) // len(lanes)
        self._center = {lane: TIME + step * place + step // 2 for place, lane in enumerate(lanes)}
        self._life = dict.fromkeys(lanes, "|")
        self._workers = frozenset(workers)
        self._at_ms = -1

    def lines(self) -> Iterator[str]:
        yield self._row(*((center - len(lane) // 2, lane) for lane, center in self._center.items()), bare=True)
        for move, notes in zip(self._played.scenario.moves, self._played.notes, strict=False):
            for caption in move.captions:
                yield from self._band(caption, " ")
            for note in notes:
                yield from self._note(note)

    def _note(self, note: Note) -> Iterator[str]:
        source, target = self._lane(note.source), self._lane(note.target)
        if not source:
            yield from self._band(note.told, "-")
            return
        text = f"{note.source}: {note.told}" if self._shared and note.source in self._workers else note.told
        if source == target:
            self._life[source] = LIFE.get(note.told, self._life[source])
            yield from self._remark(f"[{text}]" if note.mark == "+" else f"({text})", self._center[source], note)
        else:
            yield from self._arrow(text, source, target, note)

    def _arrow(self, text: str, source: str, target: str, note: Note) -> Iterator[str]:
        """The text stands in the arrow where it fits, else above it."""
        left, right = sorted((self._center[source], self._center[target]))
        room = right - left - 1
        is_answer = note.mark == "=" or source == PROVIDER
        shaft = ("- " * room if is_answer else "-" * room)[: room - 1]
        if len(text) <= room - 5:
            start = (room - 1 - len(text)) // 2
            shaft = f"{shaft[: start - 1]} {text} {shaft[start + len(text) + 1 :]}"
        else:
            for row in textwrap.wrap(text, room - 2):
                yield self._row((left + 1 + (room - len(row)) // 2, row), note=note)
        yield self._row((left + 1, shaft + ">" if self._center[source] == left else "<" + shaft), note=note)

    def _remark(self, text: str, center: int, note: Note) -> Iterator[str]:
        for row in textwrap.wrap(text, REMARK_MAX):
            start = min(max(center - len(row) // 2, TIME), WIDTH - len(row))
            yield self._row((start, row), note=note)

    def _band(self, text: str, mark: str) -> Iterator[str]:
        for row in textwrap.wrap(text, WIDTH - TIME - 8):
            yield (" " * TIME + f" {row} ".center(WIDTH - TIME, mark)).rstrip()

    def _row(self, *texts: tuple[int, str], note: Note | None = None, bare: bool = False) -> str:
        cells = [" "] * WIDTH
        for lane, center in self._center.items():
            cells[center] = " " if bare else self._life[lane]
        if note is not None and note.at_ms != self._at_ms:
            self._at_ms = note.at_ms
            texts = ((0, f"{note.at_ms / 1_000:g}s"), *texts)
        for start, text in texts:
            for place, mark in enumerate(text[: WIDTH - start], start):
                cells[place] = mark
        return "".join(cells).rstrip()

    def _lane(self, party: str) -> str:
        if party == "gateway":
            return AUTHORITY
        return "workers" if self._shared and party in self._workers else party
