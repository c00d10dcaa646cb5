"""Faults, and the plan that says where they strike.

A place is a point (`tidefast.protocol.points`) of a step, or of a checkpoint: `checkpoint 1` is the first one.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from tidefast.protocol.points import Point

FaultKind = Literal[
    "kill_worker",
    "freeze_worker",
    "preempt",
    "late_answer",
    "kill_authority",
    "commit_and_hang",
    "commit_and_fail",
]
Behaviour = Literal["answer", "commit_and_hang", "commit_and_fail", "hang", "fail", "decline"]
BY_PROVIDER: frozenset[str] = frozenset(("commit_and_hang", "commit_and_fail"))
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
POINTS: tuple[Point, ...] = get_args(Point)
WORDS: Mapping[FaultKind, str] = {
    "kill_worker": "the worker is killed",
    "freeze_worker": "the worker is frozen and thawed after the takeover",
    "preempt": "the run is preempted",
    "late_answer": "the run is preempted and the call goes on only after the takeover",
    "kill_authority": "the authority is killed and started again",
    "commit_and_hang": "the provider commits and never answers",
    "commit_and_fail": "the provider commits and answers with an error",
}


class Fault(NamedTuple):
    """One fault: what happens, at which point of which step, the `nth` time that the run is there."""

    kind: FaultKind
    step: str
    point: Point | None = None  # None: the provider itself, in answer to this step
    nth: int = 1

    def __str__(self) -> str:
        where = f"step {self.step}" if self.point is None else f"{self.point} of {self.step}"
        again = f", time {self.nth}" if self.nth > 1 else ""
        return f"{WORDS[self.kind]} ({where}{again})"


class Faults:
    """A plan. Each method adds one fault and returns the plan, so that they can be written in one line."""

    def __init__(self, *faults: Fault) -> None:
        for fault in faults:
            _check(fault)
        self.planned: list[Fault] = list(faults)

    def kill_worker(self, step: str, point: Point, nth: int = 1) -> "Faults":
        return self._add(Fault("kill_worker", step, point, nth))

    def freeze_worker(self, step: str, point: Point, nth: int = 1) -> "Faults":
        """Frozen past its lease; thawed once another worker has the run, which it then tries to go on with."""
        return self._add(Fault("freeze_worker", step, point, nth))

    def preempt(self, step: str, point: Point, nth: int = 1) -> "Faults":
        return self._add(Fault("preempt", step, point, nth))

    def late_answer(self, step: str, point: Point = "gateway.after_send", nth: int = 1) -> "Faults":
        """Preempted, while the call stands at a point of the gateway and goes on only after the takeover."""
        return self._add(Fault("late_answer", step, point, nth))

    def kill_authority(self, step: str, point: Point, nth: int = 1) -> "Faults":
        return self._add(Fault("kill_authority", step, point, nth))

    def commit_and_hang(self, step: str, nth: int = 1) -> "Faults":
        """The provider does what this step asks, and its answer never comes."""
        return self._add(Fault("commit_and_hang", step, None, nth))

    def commit_and_fail(self, step: str, nth: int = 1) -> "Faults":
        """The provider does what this step asks, and answers 500."""
        return self._add(Fault("commit_and_fail", step, None, nth))

    def _add(self, fault: Fault) -> "Faults":
        _check(fault)
        self.planned.append(fault)
        return self

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.planned)

    def __len__(self) -> int:
        return len(self.planned)


def _check(fault: Fault) -> None:
    """Raise `ValueError` for a fault that could never strike."""
    if fault.kind not in KINDS:
        raise ValueError(f"no fault is called {fault.kind!r}; expected one of {', '.join(KINDS)}")
    if (fault.kind in BY_PROVIDER) != (fault.point is None):
        raise ValueError(f"{fault.kind} takes {'no point' if fault.kind in BY_PROVIDER else 'a point'}")
    if fault.point is not None and fault.point not in POINTS:
        raise ValueError(f"no point is called {fault.point!r}; expected one of {', '.join(POINTS)}")
    if fault.kind == "late_answer" and not str(fault.point).startswith("gateway."):
        raise ValueError("a late answer waits at a point of the gateway")
    if fault.nth < 1:
        raise ValueError(f"nth is {fault.nth}; expected 1 or more")
