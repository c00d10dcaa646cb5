"""A picture of one run, as SVG that needs nothing else: who held it, what was sent, what came back, what struck it.

Time runs from left to right and is compressed where nothing happens. The top lane has a band per epoch; below it each
step has a lane of its own with its attempts as bars and what became of them as signs; then checkpoints; then the faults
that were injected, where they are known. Every sign says in words what it is when it is pointed at. All texts are
escaped, and what no XML may hold is left out.
"""

import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

LEFT, RIGHT, TOP, LANE, BAND = 150, 24, 58, 34, 22
GAP_MIN, GAP_MAX = 13.0, 40.0
EVENTS_MAX = 400
NAME_MAX = 20
_UNFIT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

BANDS = ("#d6e6f5", "#e3efd9", "#f6e7d2", "#e8ddf1")
# What an event of a step is drawn as: (sign, colour, words).
SIGNS: Mapping[str, tuple[str, str, str]] = {
    "step_committed": ("disc", "#1a7f37", "committed: the receipt is booked under the live epoch"),
    "step_applied": ("ring", "#1a7f37", "late receipt kept as a fact; the next holder joins it"),
    "late_receipt": ("ring", "#6e7781", "one more receipt of a settled step, kept"),
    "step_doubted": ("ask", "#b35900", "in doubt: it may have happened, nothing proves it"),
    "step_presumed": ("ask", "#b35900", "presumed sent: commits that a restore lost may hold a sending"),
    "step_held": ("square", "#8250df", "held: a person is asked"),
    "step_resolved": ("square_open", "#8250df", "a person has looked and said what is so"),
    "step_unsent": ("dash", "#6e7781", "never sent"),
    "step_refused": ("cross", "#cf222e", "refused by the provider; may be tried again"),
    "step_rejected": ("cross", "#cf222e", "refused for good: no effect"),
    "step_withdrawn": ("cross", "#6e7781", "withdrawn, because the run ended"),
    "step_compensated": ("back", "#0969da", "undone"),
    "undo_begun": ("dash", "#0969da", "its undo has begun"),
    "step_result": ("disc", "#57606a", "a local value, journaled"),
}
LEGEND = (
    ("bar", "#54708c", "an attempt: from the durable intent to its outcome"),
    ("disc", "#1a7f37", "committed"),
    ("ring", "#1a7f37", "receipt that came after the lease was lost, kept"),
    ("ask", "#b35900", "in doubt"),
    ("cross", "#cf222e", "refused"),
    ("square", "#8250df", "held for a person"),
    ("square_open", "#8250df", "decided by a person"),
    ("back", "#0969da", "undone"),
    ("diamond", "#1a7f37", "checkpoint"),
    ("bolt", "#cf222e", "injected fault"),
)
ENDS = {"lease_lapsed": "lapsed", "lease_preempted": "preempted", "lease_released": "released"}
OVER = frozenset(("run_completed", "run_failed", "run_cancelled"))


class Told(Protocol):
    """One event of a log, from a store or from a server."""

    @property
    def seq(self) -> int: ...
    @property
    def at_ms(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def step_id(self) -> str | None: ...
    @property
    def data_json(self) -> str: ...


class Fault(NamedTuple):
    """Something that was done to the run from outside."""

    at_ms: int
    kind: str
    step_id: str = ""


def text(value: object, most: int = 200) -> str:
    """A text for XML: escaped, without what XML can't carry, and not longer than is good."""
    plain = _UNFIT.sub("\ufffd", str(value))
    return html.escape(plain if len(plain) <= most else plain[: most - 1] + "…", quote=True)


def draw(run_id: str, events: Sequence[Told], faults: Sequence[Fault] = ()) -> str:
    """The picture of a run as one `<svg>` element."""
    return _Picture(run_id, events, faults).svg()


class _Picture:
    def __init__(self, run_id: str, events: Sequence[Told], faults: Sequence[Fault]) -> None:
        self._run = run_id
        self._events = list(events[:EVENTS_MAX])
        self._left_out = len(events) - len(self._events)
        last_ms = self._events[-1].at_ms if self._events else 0
        self._faults = [fault for fault in faults if fault.at_ms <= last_ms] if self._left_out else list(faults)
        self._x = _places(
            [*(each.at_ms for each in self._events), *(each.at_ms for each in self._faults)], len(self._events)
        )
        steps = dict.fromkeys(each.step_id for each in self._events if each.step_id)
        self._lanes = {step: place for place, step in enumerate(steps, 1)}
        self._checkpoints = len(self._lanes) + 1
        self._fault_lane = self._checkpoints + 1
        self._width = LEFT + (max(self._x.values(), default=0.0)) + RIGHT + 60
        self._parts: list[str] = []

    def svg(self) -> str:
        self._frame()
        self._epochs()
        for place, event in enumerate(self._events):
            self._event(place, event)
        for number, fault in enumerate(self._faults):
            at = LEFT + self._x["fault", number]
            words = f"injected: {fault.kind}" + (f" (aimed at {fault.step_id})" if fault.step_id else "")
            self._sign("bolt", at, self._y(self._fault_lane), "#cf222e", words)
        lanes = self._fault_lane + (1 if self._faults else 0)
        legend_y = TOP + lanes * LANE + 30
        self._legend(legend_y)
        height = legend_y + 24 * math.ceil(len(LEGEND) / 3) + 10
        width = max(self._width, 900)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="12">'
        )
        title = f"<title>Run {text(self._run)}: who held it and what became of its effects</title>"
        return f'{head}{title}<rect width="100%" height="100%" fill="#ffffff"/>{"".join(self._parts)}</svg>'

    def _y(self, lane: int) -> float:
        return TOP + lane * LANE

    def _write(self, x: float, y: float, words: object, **more: str) -> None:
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{text(words, 120)}</text>')

    def _frame(self) -> None:
        self._write(12, 22, f"run {self._run}", font_size="15", font_weight="600")
        if self._events:
            length = (self._events[-1].at_ms - self._events[0].at_ms) / 1_000
            more = f"; {self._left_out} more events are not drawn" if self._left_out else ""
            self._write(12, 40, f"{length:,.1f} s, {len(self._events)} events{more}", fill="#57606a")
        lanes = [("epoch and holder", 0), *((str(step), lane) for step, lane in self._lanes.items())]
        lanes.append(("checkpoints", self._checkpoints))
        if self._faults:
            lanes.append(("injected faults", self._fault_lane))
        for name, lane in lanes:
            y = self._y(lane)
            self._write(12, y + 4, name if len(name) <= NAME_MAX else name[: NAME_MAX - 1] + "…", fill="#24292f")
            line = f'x1="{LEFT - 8}" y1="{y:.1f}" x2="{self._width - RIGHT:.1f}" y2="{y:.1f}"'
            self._parts.append(f'<line {line} stroke="#e4e7eb"/>')

    def _epochs(self) -> None:
        """A band from each grant to what ended it."""
        count, open_band = 0, None
        for place, event in enumerate(self._events):
            x = LEFT + self._x["event", place]
            if event.kind == "lease_granted":
                open_band = (x, event, count)
                count += 1
            elif open_band is not None and (event.kind in ENDS or event.kind in OVER):
                self._band(*open_band, x, ENDS.get(event.kind, "ended with the run"))
                open_band = None
        if open_band is not None:
            self._band(*open_band, self._width - RIGHT, "live")

    def _band(self, start: float, granted: Told, count: int, end: float, how: str) -> None:
        lanes = self._checkpoints + 0.5
        colour, width, y = BANDS[count % len(BANDS)], max(end - start, 3), self._y(0) - BAND / 2
        shape = f'x="{start:.1f}" y="{y:.1f}" width="{width:.1f}"'
        self._parts.append(f'<rect {shape} height="{lanes * LANE + BAND / 2:.1f}" fill="{colour}" opacity="0.35"/>')
        holder = _data(granted).get("holder", "")
        epoch = granted.epoch & 0xFFFFFFFF
        words = f"epoch {epoch}, held by {holder}: {how}"
        self._parts.append(f'<rect {shape} height="{BAND}" rx="3" fill="{colour}"><title>{text(words)}</title></rect>')
        room = int((width - 8) / 6.4)
        label = next(
            (each for each in (f"{epoch} {holder}: {how}", f"{epoch}: {how}", str(epoch)) if len(each) <= room), ""
        )
        self._write(start + 4, self._y(0) + 4, label, font_size="11")
        if how in ("lapsed", "preempted"):
            line = f'x1="{end:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{self._y(self._checkpoints) + 12:.1f}"'
            self._parts.append(f'<line {line} stroke="#cf222e" stroke-dasharray="4 3"/>')

    def _event(self, place: int, event: Told) -> None:
        x = LEFT + self._x["event", place]
        if event.kind == "step_fenced" and event.step_id is not None:
            self._attempt(place, event, x)
        elif event.kind in SIGNS and event.step_id is not None:
            sign, colour, words = SIGNS[event.kind]
            data = _data(event)
            told = ", ".join(
                f"{name} {data[name]}" for name in ("attempt", "reason", "verdict", "by") if data.get(name)
            )
            self._sign(
                sign, x, self._y(self._lanes[event.step_id]), colour, f"{words}{' (' + told + ')' if told else ''}"
            )
        elif event.kind == "checkpoint_saved":
            words = f"checkpoint {_data(event).get('number', '')} saved"
            self._sign("diamond", x, self._y(self._checkpoints), "#1a7f37", words)
        elif event.kind in OVER or event.kind in ("run_frozen", "run_failing"):
            self._write(x + 6, self._y(self._checkpoints) + 4, event.kind.replace("_", " "), font_weight="600")

    def _attempt(self, place: int, event: Told, x: float) -> None:
        """A bar from the intent to this attempt's outcome, open to the right if none is in the log."""
        data = _data(event)
        number, end = data.get("attempt", 1), self._width - RIGHT
        for later in range(place + 1, len(self._events)):
            other = self._events[later]
            is_outcome = other.kind in SIGNS and other.kind not in ("undo_begun", "step_held", "step_resolved")
            if other.step_id == event.step_id and (is_outcome or other.kind == "step_fenced"):
                end = LEFT + self._x["event", later]
                break
        y = self._y(self._lanes[event.step_id or ""])
        words = f"attempt {number} of {event.step_id}, sent under epoch {event.epoch & 0xFFFFFFFF}"
        shape = f'x="{x:.1f}" y="{y - 5:.1f}" width="{max(end - x, 4):.1f}" height="10" rx="2"'
        self._parts.append(f'<rect {shape} fill="#54708c" opacity="0.75"><title>{text(words)}</title></rect>')

    def _sign(self, sign: str, x: float, y: float, colour: str, words: str) -> None:
        self._parts.append(f"<g><title>{text(words)}</title>{_shape(sign, x, y, colour)}</g>")

    def _legend(self, top: float) -> None:
        for place, (sign, colour, words) in enumerate(LEGEND):
            x, y = 20 + place % 3 * 330, top + place // 3 * 24
            self._parts.append(_shape(sign, x, y, colour))
            self._write(x + 18, y + 4, words, fill="#24292f")


def _places(times: Sequence[int], events: int) -> dict[tuple[str, int], float]:
    """Where each event and each fault stands: in order of time, gaps compressed."""
    order = sorted(range(len(times)), key=lambda place: (times[place], place >= events, place))
    found: dict[tuple[str, int], float] = {}
    x, before = 12.0, times[order[0]] if order else 0
    for place in order:
        x += min(GAP_MIN + 4 * math.log1p(max(times[place] - before, 0) / 1_000), GAP_MAX)
        before = times[place]
        found["event" if place < events else "fault", place if place < events else place - events] = x
    return found


def _shape(sign: str, x: float, y: float, colour: str) -> str:
    at, line = f"{x:.1f} {y:.1f}", f'fill="none" stroke="{colour}" stroke-width="2.2"'
    match sign:
        case "disc":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>'
        case "ring":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="#ffffff" stroke="{colour}" stroke-width="2.2"/>'
        case "cross":
            return f'<path d="M{at}m-5 -5l10 10m0 -10l-10 10" {line}/>'
        case "square":
            return f'<rect x="{x - 6:.1f}" y="{y - 6:.1f}" width="12" height="12" fill="{colour}"/>'
        case "square_open":
            return f'<rect x="{x - 5.5:.1f}" y="{y - 5.5:.1f}" width="11" height="11" {line}/>'
        case "diamond":
            return f'<path d="M{at}m0 -7l7 7l-7 7l-7 -7z" fill="{colour}"/>'
        case "bolt":
            return f'<path d="M{at}m2 -8l-7 9h4l-2 7l8 -10h-4z" fill="{colour}"/>'
        case "ask":
            centre = f'x="{x:.1f}" y="{y + 5:.1f}" text-anchor="middle"'
            disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7.5" fill="#fff1e0" stroke="{colour}" stroke-width="1.5"/>'
            return f'{disc}<text {centre} font-size="12" font-weight="700" fill="{colour}">?</text>'
        case "back":
            return f'<path d="M{at}m6 4a6 6 0 1 0 -10 -7m0 -5v6h6" {line}/>'
        case "bar":
            return (
                f'<rect x="{x - 8:.1f}" y="{y - 5:.1f}" width="16" height="10" rx="2" fill="{colour}" opacity="0.75"/>'
            )
        case _:
            return f'<path d="M{at}m-6 0h12" {line}/>'


def _data(event: Told) -> Mapping[str, Any]:
    try:
        decoded = json.loads(event.data_json)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def interesting(events: Sequence[Told]) -> int:
    """How much there is to see in a run: takeovers, late receipts, doubts, undos, holds, in a picture of fair size."""
    kinds = [event.kind for event in events]
    if len(kinds) > 55:
        return 0
    worth = {"lease_preempted": 3, "lease_lapsed": 3, "step_applied": 6, "step_doubted": 3, "step_held": 4}
    worth |= {"step_compensated": 5, "checkpoint_saved": 1, "step_rejected": 2}
    return sum(min(kinds.count(kind), 2) * points for kind, points in worth.items())


def lines(values: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Rows of an HTML table, escaped."""
    for name, value in values:
        yield f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>"
