"""What a script says must be so: written by hand, and never rewritten."""

from collections.abc import Callable, Mapping, Sequence

from tidefast.protocol.verdicts import Refused
from tidefast.sim.scenarios.stage import Stage
from tidefast.sim.scenarios.text import Move, ScriptError


class Unmet(ScriptError):
    """An expectation doesn't hold."""


def expect(stage: Stage, move: Move) -> None:
    """Hold one expectation against the stage. Raises `Unmet`."""
    words = [word for word in move.words[1:] if word != "="]
    if not words or words[0] not in EXPECTATIONS:
        raise ScriptError(f"expect one of {', '.join(EXPECTATIONS)}")
    found, wanted = EXPECTATIONS[words[0]](stage, words[1:])
    if found != wanted:
        raise Unmet(f"{move.text}: found {found}")


def _provider(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    """The provider's own net count of a step's effect."""
    return str(stage.provider.net[stage.run, words[0]]), words[1]


def _sends(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    """How many requests of a step reached the provider."""
    return str(stage.provider.sends[stage.run, words[0]]), words[1]


def _bytes(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    """How many different requests (key and body) of a step the provider saw."""
    return str(len(stage.provider.seen.get((stage.run, words[0]), ()))), words[1]


def _run(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    return stage.head().state, words[0]


def _step(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    step = stage.step(words[0])
    return "unknown" if step is None else step.state, words[1]


def _attempts(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    step = stage.step(words[0])
    return str(0 if step is None else len(step.attempts)), words[1]


def _checkpoint(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    return str(stage.head().checkpoint), words[0]


def _epoch(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    return str(stage.head().epoch), words[0]


def _refused(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    """The last answer was a refusal with this code, or code/reason."""
    last = stage.last
    found = f"{last.code}/{last.reason}" if isinstance(last, Refused) else "no refusal"
    return found if "/" in words[0] else found.partition("/")[0], words[0]


def _told(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    """The last answer, as the trace words it, has these words in it."""
    found = "nothing" if stage.last is None else stage.words.answer(stage.last)
    wanted = " ".join(words)
    return (wanted if wanted in found else found), wanted


def _events(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    """How many events of a kind the run's log has."""
    return str(sum(1 for event in stage.events() if event.kind == words[0])), words[1]


def _outcome(stage: Stage, words: Sequence[str]) -> tuple[str, str]:
    """How a worker's pass through the SDK ended."""
    return stage.outcomes.get(words[0], "not ended"), words[1]


EXPECTATIONS: Mapping[str, Callable[[Stage, Sequence[str]], tuple[str, str]]] = {
    "provider": _provider,
    "sends": _sends,
    "requests": _bytes,
    "run": _run,
    "step": _step,
    "attempts": _attempts,
    "checkpoint": _checkpoint,
    "epoch": _epoch,
    "refused": _refused,
    "told": _told,
    "events": _events,
    "outcome": _outcome,
}
