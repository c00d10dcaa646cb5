"""A counterexample told to people, kept in a file, and played again.

A trace is the shortest row of moves from a new run to the broken law. It is kept as data (configuration and moves), so
that it can be played against other rules: those of tomorrow, or mended ones.
"""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tidefast.protocol.records import Step
from tidefast.sim.check.commands import Key
from tidefast.sim.check.configs import Config
from tidefast.sim.check.moves import Moves, State
from tidefast.sim.check.search import Finding
from tidefast.sim.check.world import Broken, Request, Truths

FORMAT = "tidefast-check/1"


class TraceError(ValueError):
    """A file is no trace, or its moves can't be made; the message says what is wrong."""


class Played(NamedTuple):
    """What came of playing a row of moves: a line per move, and the law that broke, if one did."""

    lines: tuple[str, ...]
    law: str = ""
    why: str = ""


def play(config: Config, keys: tuple[Key, ...]) -> Played:
    """Make these moves one after the other against the rules as they are now."""
    moves, lines = Moves(config), []
    state = moves.first()
    for number, key in enumerate(keys, 1):
        try:
            state, answer = _make(moves, state, key)
        except Broken as broken:
            lines.append(f"{number:>3}. {sentence(moves, key)}")
            return Played((*lines, f"     {broken.law}: {broken.why}"), broken.law, broken.why)
        lines.append(f"{number:>3}. {sentence(moves, key)}{answer}")
        lines.append(f"     {standing(moves, state)}")
    return Played(tuple(lines))


def _make(moves: Moves, state: State, key: Key) -> tuple[State, str]:
    """The state after one move, with what was answered."""
    for move, after, _ in moves.successors(state):
        if move.key == key:
            return after, _answer(moves, state, key)
    if key[0] in VERBS:
        return state, _answer(moves, state, key)
    raise TraceError(f"the move {list(key)} can't be made here")


def _answer(moves: Moves, state: State, key: Key) -> str:
    if key[0] not in VERBS:
        return ""
    outcome = moves.outcome(moves.parts(state)[0], (SAID_LATE.get(str(key[0]), key[0]), *key[1:]))
    wrote = f"; written: {', '.join(outcome.wrote)}" if outcome.wrote else "; nothing is written"
    return f" -> {outcome.answer}{wrote}"


SAID_LATE = {"speak": "resolve", "heard": "probe"}  # what is said of an earlier look or question
VERBS = frozenset(
    (
        *("apply", "compensate", "renew", "release", "complete", "fail", "checkpoint", "result", "grant", "lapse"),
        *("preempt", "thaw", "mark lost", "settle", "resolve", "speak", "probe", "heard"),
    )
)
TOLD: Mapping[str, str] = {
    "grant": "worker w{1} claims the run",
    "lapse": "the sweep ends a lease that is past its time",
    "preempt": "an operator preempts the lease",
    "thaw": "an operator thaws the run",
    "mark lost": "the sweep gives up the newest attempt of {step}",
    "settle": "the gateway settles attempt {2} of {step} as {3}",
    "resolve": "an operator who looked ({3}) resolves {step} as {2}",
    "probe": "the provider, asked about {step} ({3}), says {2}",
    "heard": "a provider's answer about {step} ({3}) is heard late: {2}",
    "speak": "an operator who looked a while ago ({3}) resolves {step} as {2}",
    "look": "an operator looks at the provider for {step}",
    "apply": "worker w{2} with epoch {1} asks for {step}{variant}",
    "compensate": "worker w{2} with epoch {1} asks for the undo of {step}{variant}",
    "renew": "worker w{2} with epoch {1} renews",
    "release": "worker w{2} with epoch {1} releases ({3})",
    "complete": "worker w{2} with epoch {1} completes the run ({3})",
    "fail": "worker w{2} with epoch {1} fails the run",
    "checkpoint": "worker w{2} with epoch {1} saves checkpoint {3} ({4})",
    "result": "worker w{2} with epoch {1} journals a local step",
    "send": "the gateway sends attempt {2} of {step}",
    "not sent": "attempt {2} of {step} never gets out (fault)",
    "land": "attempt {2} of {step} reaches the provider: {3}",
    "double": "a copy of attempt {2} of {step} reaches the provider: {3} (fault)",
    "give up": "the gateway gives up attempt {2} of {step}, in doubt (fault)",
    "deadline": "the deadline of attempt {2} of {step} passes",
    "lost": "attempt {2} of {step} is lost on the wire",
    "lease passes": "the lease's time passes",
    "pause passes": "the pause between grants passes",
    "gateway dies": "the gateway dies (fault)",
    "exile": "the gateway is given up for dead, but lives on (fault)",
    "restart": "the authority restarts (fault)",
    "a day": "a day passes (fault)",
    "backup": "a backup is made",
    "restore": "the store is lost, and the backup is put into service (fault)",
    "lost lands": "a request of {step} that the lost commits knew reaches the provider",
    "lost time passes": "no request of the lost commits can land any more",
    "close window": "an operator who knows that nothing was lost closes the window",
}


def sentence(moves: Moves, key: Key) -> str:
    """One move in words."""
    words = {str(place): part for place, part in enumerate(key)}
    text = TOLD.get(str(key[0]), str(key[0]))
    names = moves.shape.names
    verb = key[0]
    place = key[3] if verb in ("apply", "compensate") else (key[1] if len(key) > 1 else 0)
    if "{step}" in text:
        text = text.replace("{step}", names[int(place)])
    variant = str(key[-1]) if verb in ("apply", "compensate") and key[-1] else ""
    text = text.replace("{variant}", f" ({variant})" if variant else "")
    for name, word in words.items():
        text = text.replace("{" + name + "}", str(word))
    return text


def standing(moves: Moves, state: State) -> str:
    """Where everything stands, in one line."""
    book_id, truth_id, faults = moves.parts(state)
    book, truths = moves.books[book_id], moves.truths[truth_id]
    head = book.head
    parts = [f"run {head.state}, epoch {head.epoch}" + ("" if head.is_live or head.end else " ended")]
    parts += list(_steps(moves, book.steps, truths))
    return "; ".join(parts) + f"; faults left {faults}"


def _steps(moves: Moves, steps: tuple[Step | None, ...], truths: Truths) -> Iterator[str]:
    for place, truth in enumerate(truths):
        step = steps[place]
        if step is None:
            continue
        attempts = [attempt.state for attempt in step.attempts]
        where = [_place(request) for request in truth.requests]
        told = ", ".join(f"{state} ({place_})" for state, place_ in zip(attempts, where, strict=False))
        yield f"{moves.shape.names[place]} {step.state} [{told}] net {moves.shape.net(truths, place)}"


def _place(request: Request) -> str:
    return request.place + (", took effect" if request.had_effect else "")


# --- files


def scenario(config: Config, finding: Finding) -> str:
    """A finding as text that `read_scenario` reads back: configuration, moves, and the story for people."""
    keys = tuple(move.key for move in finding.moves)
    return (
        json.dumps(
            {
                "format": FORMAT,
                "configuration": config.name,
                "law": finding.law,
                "why": finding.why,
                "moves": [list(key) for key in keys],
                "story": list(play(config, keys).lines),
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )


def read_scenario(text: str, configs: Mapping[str, Config]) -> tuple[Config, tuple[Key, ...]]:
    """The configuration and the moves of a scenario file. Raises `TraceError` for anything else."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TraceError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TraceError(f'expected an object with "format": "{FORMAT}"')
    config = configs.get(str(data.get("configuration")))
    if config is None:
        raise TraceError(f"no configuration is called {data.get('configuration')!r}; there are {', '.join(configs)}")
    moves = data.get("moves")
    if not isinstance(moves, list) or not all(_is_key(move) for move in moves):
        raise TraceError('expected "moves" to be a list of lists of words and numbers')
    return config, tuple(tuple(move) for move in moves)


def _is_key(move: object) -> bool:
    return isinstance(move, list) and bool(move) and all(type(part) in (str, int) for part in move)
