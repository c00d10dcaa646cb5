"""The verbs of a configuration, each made once: who may say them, with which words, under which contract.

A key names a command in a few words, for the search, the trace and the replay.
"""

from collections.abc import Iterator

from tidefast.protocol.canonical import call_digest, canonical
from tidefast.protocol.commands import (
    RUN_VERBS,
    Admit,
    AnswerProbe,
    Command,
    Compensate,
    Complete,
    CreateRun,
    Fail,
    Grant,
    Lapse,
    MarkLost,
    Preempt,
    Release,
    Renew,
    Resolve,
    SaveCheckpoint,
    SaveResult,
    Settle,
)
from tidefast.protocol.contracts import Contract, Request, contract_digest, render_request
from tidefast.protocol.ids import Epoch, StepId, step_key
from tidefast.protocol.records import Right
from tidefast.sim.check.world import (
    AHEAD,
    ALIVE,
    FIRST_OF_RESTORED,
    LEASE_MS,
    LOOKED,
    NAMESPACE,
    PASSED,
    RUN,
    Book,
    Shape,
)

Key = tuple[str | int, ...]
TOO_EARLY = PASSED - 500
RECEIPT = '{"body":{"id":"1"},"content_type":"application/json","digest":"","status":200,"truncated":false}'
REFUSAL = '{"body":{},"content_type":"application/json","digest":"","status":402,"truncated":false}'
STRANGE = '{"body":{},"content_type":"application/json","digest":"","status":418,"truncated":false}'
RECEIPTS = {"applied": RECEIPT, "refused": REFUSAL, "unlisted": STRANGE}
# How a call may differ from the first one.
USUAL: tuple[str, ...] = ("",)
CHANGES = ("tool gone", "account changed", "wall clock back")
WORDS = ("other words", "stored")


class Commands:
    """Makes and keeps the commands of one configuration."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.config = shape, shape.config
        self.contracts: dict[str, Contract] = dict(shape.contracts)
        self._made: dict[Key, tuple[Command, bool]] = {}
        self._verbs: dict[tuple[int, bool, int, bool], tuple[tuple[Key, int, bool], ...]] = {}
        for tool in shape.tools:
            moved = tool.contract._replace(key_scope="other")
            self.contracts[contract_digest(moved)] = moved

    def of(self, key: Key) -> tuple[Command, bool]:
        """The command of a key, and whether the wall clock is behind when it is decided."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (self._make(key), key[-1] == "wall clock back")
        return found

    def created(self) -> CreateRun:
        return CreateRun(RUN, "agent", "1", "{}")

    def verbs(self, book: Book) -> tuple[tuple[Key, int, bool], ...]:
        """(key, cost, whether its right is not the live one) of every verb that can be said whatever the truth is."""
        which = (book.head.epoch, book.head.is_live, book.head.checkpoint, bool(book.window))
        found = self._verbs.get(which)
        if found is None:
            found = self._verbs[which] = tuple(self._all_verbs(book))
        return found

    def _all_verbs(self, book: Book) -> Iterator[tuple[Key, int, bool]]:
        top = book.head.epoch
        rights = [(epoch, epoch) for epoch in self._epochs(book)]
        if top > 1:
            rights += [(top, 1), (1, top)]  # the newest epoch in another's hands, an older one in the newest holder's
        elif top == 1:
            rights += [(1, 2)]
        for epoch, holder in rights:
            is_stale = not (book.head.is_live and epoch == holder == top)
            for key in self._worker_verbs(epoch, holder, book.head.checkpoint):
                yield key, 0, is_stale
        yield ("grant", top + 1), 0, False
        yield ("grant", top), 0, False
        yield ("lapse",), 0, False
        yield ("preempt",), 0, False
        yield ("thaw",), 0, False
        for name in ("cancel",) * self.config.cancels + ("pause", "resume", "freeze") * self.config.pauses:
            yield (name,), 0, False
        for place in range(len(self.shape.tools)):
            yield ("mark lost", place), 0, False

    def _epochs(self, book: Book) -> list[int]:
        """Every epoch that can be named: granted ones, one that never was, and those of commits that a restore lost."""
        top = book.head.epoch
        if not book.window:
            return list(range(top + 1, 0, -1))
        lost = [self.config.workers + 1, 2, 1]
        return [*range(max(top, FIRST_OF_RESTORED) + 1, FIRST_OF_RESTORED - 1, -1), *lost]

    def _worker_verbs(self, epoch: int, holder: int, checkpoint: int) -> Iterator[Key]:
        config = self.config
        variants = USUAL + (CHANGES if config.changes else ()) + (WORDS if config.words else ())
        for place in range(len(config.steps)):
            for variant in variants:
                yield "apply", epoch, holder, place, variant
            if place in self.shape.undone_by:
                for variant in USUAL + (CHANGES if config.changes else ()):
                    yield "compensate", epoch, holder, place, variant
        yield "renew", epoch, holder
        yield "release", epoch, holder, "done"
        yield "complete", epoch, holder, "asked"
        yield "complete", epoch, holder, "not asked"
        if config.fails or config.cancels:
            yield "fail", epoch, holder
        if config.checkpoints:
            for number in range(max(1, checkpoint - 1), min(checkpoint + 1, config.checkpoints) + 1):
                for state in ("a", "b"):
                    yield "checkpoint", epoch, holder, number, state
            yield "complete", epoch, holder, "dropped"
        if config.words:
            yield "release", epoch, holder, "drift"
        if config.local:
            yield "result", epoch, holder

    def _make(self, key: Key) -> Command:
        match key:
            case ("grant", int(number)):
                return Grant(RUN, f"w{number}", LEASE_MS, f"q{number}")
            case ("lapse",):
                return Lapse(RUN)
            case ("preempt",):
                return Preempt(RUN, "operator")
            case (("thaw" | "cancel" | "pause" | "resume" | "freeze") as verb,):
                return RUN_VERBS[verb](RUN, "operator")
            case ("mark lost", int(place)):
                return MarkLost(RUN, self.shape.names[place])
            case ("settle", int(place), int(number), str(outcome)):
                receipt = RECEIPTS.get(outcome, "null")
                return Settle(RUN, self.shape.names[place], number, outcome, receipt, outcome)  # type: ignore[arg-type]
            case ("resolve", int(place), str(verdict), str(when), int(attempts)):
                looked = LOOKED if when == "late" else TOO_EARLY
                name = self.shape.names[place]
                return Resolve(RUN, name, verdict, "operator", "", "null", looked, attempts)  # type: ignore[arg-type]
            case ("probe", int(place), str(word), str(when), int(attempts)):
                asked = LOOKED if when == "late" else TOO_EARLY
                receipt = RECEIPT if word == "found" else "null"
                return AnswerProbe(RUN, self.shape.names[place], word, asked, attempts, receipt)  # type: ignore[arg-type]
            case (str(verb), int(epoch), int(holder), *rest):
                return self._worker(verb, Right(RUN, Epoch(epoch), f"w{holder}"), rest)
            case _:
                raise ValueError(f"no such move: {key}")

    def _worker(self, verb: str, right: Right, rest: list[str | int]) -> Command:
        match verb, rest:
            case "apply", [int(place), str(variant)]:
                return self._apply(right, place, variant)
            case "compensate", [int(place), str(variant)]:
                return self._compensate(right, place, variant)
            case "renew", _:
                return Renew(right)
            case "release", [str(reason)]:
                return Release(right, reason)  # type: ignore[arg-type]
            case "complete", [str(how)]:
                names = frozenset(self.shape.names)
                nothing: frozenset[StepId] = frozenset()
                return Complete(
                    right, '"done"', names if how == "asked" else nothing, names if how == "dropped" else nothing
                )
            case "fail", _:
                return Fail(right, "no")
            case "checkpoint", [int(number), str(state)]:
                return SaveCheckpoint(right, number, f'"{state}"')
            case "result", _:
                return SaveResult(right, StepId("sum"), "1")
            case _:
                raise ValueError(f"no such verb: {verb} {rest}")

    def _apply(self, right: Right, place: int, variant: str) -> Admit:
        name = self.shape.names[place]
        tool, args, digest, contract, request = self._call(place, variant)
        return Admit(
            right, name, tool, args, digest, contract, request, ALIVE, AHEAD, variant == "stored", _digest(contract)
        )

    def _compensate(self, right: Right, place: int, variant: str) -> Compensate:
        undo = self.shape.undone_by[place]
        tool, args, digest, contract, request = self._call(undo, variant)
        names = self.shape.names
        return Compensate(
            *(right, names[place], names[undo], tool, args, digest, contract, request),
            ALIVE,
            AHEAD,
            _digest(contract),
        )

    def _call(self, place: int, variant: str) -> tuple[str, str, str, Contract | None, Request | None]:
        contract: Contract | None = self.shape.tools[place].contract
        tool = self.shape.tools[place].contract.tool
        args: dict[str, str] = {"for": "another" if variant == "other words" else "order"}
        if variant == "tool gone":
            contract = None
        elif variant == "account changed":
            contract = self.shape.tools[place].contract._replace(key_scope="other")
        key = step_key(NAMESPACE, RUN, self.shape.names[place])
        text = canonical(dict(args))
        request = None if contract is None else render_request(contract, dict(args), key)
        return tool, text, call_digest(tool, text), contract, request


def _digest(contract: Contract | None) -> str:
    return "" if contract is None else contract_digest(contract)
