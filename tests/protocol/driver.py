"""Drives the pure rules as an engine would: shows them only what `needs` names, moves state by `evolve`, keeps the log.

`Book` is one run. `Provider` is the world outside: it counts for itself what was applied and undone, so that a test
can judge the books against the truth.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tidefast.protocol.canonical import call_digest, canonical
from tidefast.protocol.commands import (
    Admit,
    Cancel,
    Command,
    Compensate,
    Complete,
    CreateRun,
    Fail,
    Freeze,
    Grant,
    Lapse,
    MarkLost,
    Pause,
    Preempt,
    Release,
    Renew,
    Resolve,
    Resume,
    SaveCheckpoint,
    SaveResult,
    Settle,
    Thaw,
)
from tidefast.protocol.contracts import Contract, Undo, contract_digest, render_request
from tidefast.protocol.events import Event, first_broken
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, RunId, StepId, derived_id, step_key
from tidefast.protocol.machine import decide, needs
from tidefast.protocol.patterns import Pattern
from tidefast.protocol.records import Guard, Now, Right, RunHead, Step, View
from tidefast.protocol.verdicts import Decision, Granted, Refused, Renewed, Send

NAMESPACE = b"0123456789abcdef"
RUN = RunId("r1")
PAY = StepId("pay")
MAIL = StepId("mail")
UNDO = derived_id(PAY, "undo")
LEASE_MS = 15_000
TIMEOUT_MS = 30_000
TTL_MS = 3_600_000
HERE = "boot-1"  # the instance that owns attempts unless a test says otherwise

KEYED = Contract(
    tool="charge",
    kind="http",
    url="http://127.0.0.1:9/charges",
    key="header:Idempotency-Key",
    key_ttl_ms=TTL_MS,
    timeout_ms=TIMEOUT_MS,
    refusals=(Pattern(402),),
    undo=Undo("refund", {"charge": "{receipt.body.id}"}),
)
REFUND = KEYED._replace(tool="refund", url="http://127.0.0.1:9/refunds", undo=None)
KEYLESS = KEYED._replace(tool="send", key="none", key_ttl_ms=0, undo=None)
READ = KEYLESS._replace(tool="look", effect="none")


Rules = Callable[[View, Command, Now], Decision]


class Book:
    """One run's rows and log, and the authority's clock."""

    def __init__(self, *, created: bool = True, incarnation: int = 0, rules: Rules = decide) -> None:
        self.rules = rules
        self.view = View(NAMESPACE, incarnation, frozenset((HERE,)))
        self.log: list[Event] = []
        self.digests: list[str] = []
        self.ms = 1_000
        self.wall_offset = 1_000_000
        self.mark_ms = 0
        self.grace_from_ms = 0
        self.contracts: dict[str, Contract] = {}
        if created:
            self.create()

    # --- what a test looks at

    @property
    def head(self) -> RunHead:
        assert self.view.run is not None
        return self.view.run

    @property
    def now(self) -> Now:
        return Now(self.ms, self.ms + self.wall_offset, self.mark_ms, self.grace_from_ms)

    def step(self, step_id: StepId = PAY) -> Step:
        return self.view.steps[step_id]

    def kinds(self, since: int = 0) -> list[str]:
        return [event.kind for event in self.log[since:]]

    def right(self, epoch: int | None = None, holder: str | None = None) -> Right:
        """The live right, or the one that an older grant gave: `w<epoch>` held every epoch that `grant` handed out."""
        epoch = self.head.epoch if epoch is None else epoch
        return Right(RUN, Epoch(epoch), holder or f"w{epoch % 2**32}")

    # --- the engine's part

    def submit(self, command: Command) -> Decision:
        """Decide what only the needed rows can show, then write it as one transaction."""
        wanted = needs(command)
        ids = set(wanted.steps)
        if wanted.effects:
            ids |= {step.step_id for step in self.view.steps.values() if step.is_mutating or step.is_unsettled}
        steps = {step_id: self.view.steps[step_id] for step_id in ids if step_id in self.view.steps}
        shown = self.view._replace(
            steps=steps,
            contracts={step.contract: self.contracts[step.contract] for step in steps.values() if step.contract},
            forgotten=self.forgotten() if wanted.forgotten and self.view.run is not None else (),
        )
        decision = self.rules(shown, command, self.now)
        assert decision == self.rules(shown, command, self.now)
        self._check(decision, shown)
        if isinstance(decision.verdict, Send) and decision.events:
            self.contracts[contract_digest(decision.verdict.contract)] = decision.verdict.contract
        if decision.contract is not None:
            self.contracts[contract_digest(decision.contract)] = decision.contract
        for event in decision.events:
            before, shown = shown, evolve(shown, event, RUN)
            assert shown == evolve(before, Event(*event), RUN), "what an event carries beside its text says otherwise"
            self.log.append(event)
            assert shown.run is not None
            self.digests.append(shown.run.digest)
        if isinstance(decision.verdict, Renewed):
            shown = shown._replace(run=self.head._replace(expires_at_ms=decision.verdict.expires_at_ms))
        self.view = self.view._replace(run=shown.run, steps={**self.view.steps, **shown.steps})
        return decision

    def _check(self, decision: Decision, shown: View) -> None:
        before = shown.run
        if before is not None:
            assert decision.guards == (Guard(before.run_id, before.version),), "a head was read without a guard"
        elif decision.events:
            assert decision.guards == (Guard(RUN, 0),)
        first = 1 if before is None else before.seq + 1
        assert [event.seq for event in decision.events] == list(range(first, first + len(decision.events)))

    def forgotten(self) -> tuple[StepId, ...]:
        """What a store answers: mutating steps settled since the newest checkpoint that another epoch asked for."""
        head = self.head
        found = [
            step
            for step in self.view.steps.values()
            if step.is_mutating and step.settled_seq > head.checkpoint_seq and step.epoch != head.epoch
        ]
        return tuple(step.step_id for step in sorted(found, key=lambda step: step.settled_seq))

    def refold(self) -> View:
        """The view that the log alone gives."""
        view = View(NAMESPACE, self.view.incarnation, self.view.instances)
        for event in self.log:
            view = evolve(view, Event(*event), RUN)
        return view

    def first_broken(self) -> int:
        return first_broken(zip(self.log, self.digests, strict=True))

    # --- the verbs, with what most tests say

    def create(self, **other: Any) -> Decision:
        return self.submit(replace(CreateRun(RUN, "refund", "1", '{"ticket":1}'), **other))

    def grant(self, holder: str | None = None, request_id: str = "") -> Decision:
        if holder is None:
            holder = f"w{max(self.head.epoch, self.view.incarnation * 2**32) % 2**32 + 1}"
        return self.submit(Grant(RUN, holder, LEASE_MS, request_id))

    def granted(self) -> Right:
        """A new grant, whatever stood in its way: the older lease is preempted, a pause is waited for."""
        self.preempt()
        self.ms = max(self.ms, self.head.not_before_ms)
        decision = self.grant()
        assert isinstance(decision.verdict, Granted), decision.verdict
        return self.right()

    def renew(self, right: Right | None = None) -> Decision:
        return self.submit(Renew(right or self.right()))

    def release(self, right: Right | None = None, reason: Any = "done", **other: Any) -> Decision:
        return self.submit(Release(right or self.right(), reason, **other))

    def lapse(self) -> Decision:
        return self.submit(Lapse(RUN))

    def preempt(self, expect: int | None = None) -> Decision:
        return self.submit(Preempt(RUN, "ops", "", None if expect is None else Epoch(expect)))

    def pause(self) -> Decision:
        return self.submit(Pause(RUN, "ops"))

    def resume(self) -> Decision:
        return self.submit(Resume(RUN, "ops"))

    def freeze(self) -> Decision:
        return self.submit(Freeze(RUN, "ops"))

    def thaw(self) -> Decision:
        return self.submit(Thaw(RUN, "ops"))

    def cancel(self) -> Decision:
        return self.submit(Cancel(RUN, "ops", "not wanted any more"))

    def admit(
        self,
        step_id: StepId = PAY,
        contract: Contract | None = KEYED,
        args: Any = None,
        *,
        right: Right | None = None,
        owner: str = HERE,
        stored: bool = False,
        deadline_ms: int | None = None,
    ) -> Decision:
        tool, args_json, request = call_of(step_id, contract, args)
        return self.submit(
            Admit(
                right or self.right(),
                step_id,
                tool,
                args_json,
                call_digest(tool, args_json),
                contract,
                request,
                owner,
                self.ms + TIMEOUT_MS if deadline_ms is None else deadline_ms,
                stored,
            )
        )

    def compensate(
        self,
        step_id: StepId = PAY,
        contract: Contract | None = REFUND,
        args: Any = None,
        *,
        right: Right | None = None,
        owner: str = HERE,
        undo: StepId | None = None,
        **other: Any,
    ) -> Decision:
        undo = undo or derived_id(step_id, "undo")
        tool, args_json, request = call_of(undo, contract, args)
        return self.submit(
            Compensate(
                right or self.right(),
                step_id,
                undo,
                tool,
                args_json,
                call_digest(tool, args_json),
                contract,
                request,
                owner,
                self.ms + TIMEOUT_MS,
                **other,
            )
        )

    def settle(
        self, outcome: Any = "applied", step_id: StepId = PAY, attempt: int = 1, reason: str = "", receipt: str = ""
    ) -> Decision:
        receipt = receipt or ('{"body":{"id":"ch_1"},"status":200}' if outcome == "applied" else "null")
        return self.submit(Settle(RUN, step_id, attempt, outcome, receipt, reason))

    def mark_lost(self, step_id: StepId = PAY) -> Decision:
        return self.submit(MarkLost(RUN, step_id))

    def save_result(self, step_id: str = "sum", value: str = "7", right: Right | None = None) -> Decision:
        return self.submit(SaveResult(right or self.right(), StepId(step_id), value))

    def checkpoint(self, number: int = 1, state: str = "{}", right: Right | None = None) -> Decision:
        return self.submit(SaveCheckpoint(right or self.right(), number, state))

    def complete(
        self, right: Right | None = None, result: str = '"ok"', asked: Any = (), dropped: Any = ()
    ) -> Decision:
        return self.submit(Complete(right or self.right(), result, frozenset(asked), frozenset(dropped)))

    def fail(self, right: Right | None = None, error: str = "no") -> Decision:
        return self.submit(Fail(right or self.right(), error))

    def resolve(self, verdict: Any, step_id: StepId = PAY, **other: Any) -> Decision:
        if verdict != "applied":
            other = {"looked_at_ms": self.ms, "expect_attempts": len(self.step(step_id).attempts), **other}
        return self.submit(Resolve(RUN, step_id, verdict, "ops", "looked", **other))

    # --- short roads to a state

    def die(self, owner: str = HERE) -> None:
        """The instance ends; a new one takes its place."""
        self.view = self.view._replace(instances=self.view.instances - {owner} | {f"{owner}+"})

    def committed(self, step_id: StepId = PAY, contract: Contract = KEYED) -> None:
        self.admit(step_id, contract)
        self.settle(step_id=step_id)
        assert self.step(step_id).state == "committed"


def call_of(step_id: StepId, contract: Contract | None, args: Any) -> tuple[str, str, Any]:
    args = {} if args is None else args
    tool = contract.tool if contract is not None else "charge"
    key = step_key(NAMESPACE, RUN, step_id)
    return tool, canonical(args), None if contract is None else render_request(contract, args, key)


def code(decision: Decision) -> str:
    """The word a test compares: a refusal's code, else the verdict's type."""
    verdict = decision.verdict
    return verdict.code if isinstance(verdict, Refused) else type(verdict).__name__


def wrote(decision: Decision) -> list[str]:
    return [event.kind for event in decision.events]


@dataclass
class Provider:
    """A provider that counts for itself. `ttl_ms` 0: it does not dedup. It forgets refusals unless it stores them."""

    ttl_ms: int = TTL_MS
    stores_failures: bool = False
    declines: bool = False
    applied: int = 0
    known: dict[str, tuple[int, int]] = field(default_factory=dict)  # key -> first seen, status

    def call(self, key: str, at_ms: int) -> int:
        """One request lands: the status of its answer."""
        seen = self.known.get(key)
        if self.ttl_ms and seen is not None and at_ms - seen[0] <= self.ttl_ms:
            return seen[1]
        status = 402 if self.declines else 200
        if status == 200:
            self.applied += 1
        if status == 200 or self.stores_failures:
            self.known[key] = (at_ms, status)
        return status
