"""Two ways to make a log: by the real rules (`Books`), and by hand (`Log`), where it may break any law."""

from collections.abc import Mapping, Sequence
from typing import Any

from tidefast.protocol import commands as c
from tidefast.protocol.canonical import call_digest, canonical, digest
from tidefast.protocol.contracts import Contract, Request, Undo, contract_digest, render_request
from tidefast.protocol.events import CHAIN_START, Event, chain
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, RunId, StepId, step_key
from tidefast.protocol.laws import History
from tidefast.protocol.machine import decide
from tidefast.protocol.patterns import Pattern
from tidefast.protocol.records import Now, Right, View
from tidefast.protocol.verdicts import Granted, Verdict
from tidefast.stores.base import Batch, StoredEvent
from tidefast.stores.memory import MemoryStore

RUN = RunId("r")
NAMESPACE = bytes(range(16))
BOOT = "boot"
LEASE_MS = 10_000
SEND_MS = 2_000
DECLINED = '{"body":{},"status":402}'

CHARGE = Contract(
    "charge",
    "http",
    url="https://card.example/c",
    key="header:Idempotency-Key",
    key_ttl_ms=86_400_000,
    refusals=(Pattern(402),),
)
PATIENT = CHARGE._replace(tool="patient", retries=2)
UUID = CHARGE._replace(tool="uuid", key="field:meta.key", key_form="uuid")
ROUGH = Contract("rough", "http", url="https://rough.example", refusals=(Pattern(402),))
LOOK = Contract("look", "http", effect="none", url="https://look.example", refusals=(Pattern(402),))
REFUND = CHARGE._replace(tool="refund")
TRIP = CHARGE._replace(tool="trip", undo=Undo("refund", {"charge": "{receipt.body.id}"}, nothing=Pattern(404)))
LOCAL = Contract("local", "python", key="field:key", key_ttl_ms=86_400_000)
CONTRACTS = {contract_digest(each): each for each in (CHARGE, PATIENT, UUID, ROUGH, LOOK, REFUND, TRIP, LOCAL)}


def request_of(contract: Contract, args: Mapping[str, Any], step: str, run: RunId = RUN) -> Request | None:
    key = step_key(NAMESPACE, run, StepId(step))
    return render_request(contract, args, key) if contract.kind == "http" else None


class Books:
    """One run, kept by the real rules."""

    def __init__(self, run_id: RunId = RUN) -> None:
        self.view = View(NAMESPACE, 0, frozenset((BOOT,)), contracts=CONTRACTS)
        self.run_id = run_id
        self.ms = 1_000
        self.events: list[Event] = []
        self.digests: list[str] = []
        self.right = Right(run_id, Epoch(0), "w0")

    def do(self, command: c.Command) -> Verdict:
        view = self.view
        if view.run is not None:
            head = view.run
            view = view._replace(
                forgotten=tuple(
                    step.step_id
                    for step in view.steps.values()
                    if step.is_mutating and step.settled_seq > head.checkpoint_seq and step.epoch != head.epoch
                )
            )
        decision = decide(view, command, Now(self.ms, self.ms))
        for event in decision.events:
            self.view = evolve(self.view, event, self.run_id)
            assert self.view.run is not None
            self.events.append(event)
            self.digests.append(self.view.run.digest)
        if isinstance(decision.verdict, Granted):
            self.right = Right(self.run_id, decision.verdict.epoch, decision.verdict.holder)
        return decision.verdict

    def create(self) -> "Books":
        self.do(c.CreateRun(self.run_id, "agent", "1", '{"n":1.5}'))
        return self

    def grant(self, holder: str = "w", again: str = "") -> Verdict:
        return self.do(c.Grant(self.run_id, holder, LEASE_MS, again or f"q{len(self.events)}"))

    def admit(
        self, step: str, tool: Contract = CHARGE, args: Any = None, right: Right | None = None, stored: bool = False
    ) -> Verdict:
        args = {"n": 1} if args is None else args
        text = canonical(args)
        return self.do(
            c.Admit(
                right=right or self.right,
                step_id=StepId(step),
                tool=tool.tool,
                args_json=text,
                call_digest=call_digest(tool.tool, text),
                contract=tool,
                request=request_of(tool, args, step, self.run_id),
                owner=BOOT,
                deadline_ms=self.ms + SEND_MS,
                stored=stored,
            )
        )

    def settle(self, step: str, outcome: c.OutcomeKind = "applied", attempt: int = 1, receipt: str = "") -> Verdict:
        told = receipt or (DECLINED if outcome == "refused" else '{"body":{"id":"x"},"status":200}')
        return self.do(c.Settle(self.run_id, StepId(step), attempt, outcome, told, outcome))

    def pay(self, step: str, tool: Contract = CHARGE) -> None:
        self.admit(step, tool)
        self.settle(step)

    def undo(self, step: str, tool: Contract = REFUND, args: Any = None, **other: Any) -> Verdict:
        args = {"charge": "x"} if args is None else args
        text = canonical(args)
        return self.do(
            c.Compensate(
                right=self.right,
                step_id=StepId(step),
                undo_step_id=StepId(step + "~undo"),
                tool=tool.tool,
                args_json=text,
                call_digest=call_digest(tool.tool, text),
                contract=tool,
                request=request_of(tool, args, step + "~undo", self.run_id),
                owner=BOOT,
                deadline_ms=self.ms + SEND_MS,
                **other,
            )
        )

    def resolve(self, step: str, verdict: c.ResolveVerdict) -> Verdict:
        return self.do(c.Resolve(self.run_id, StepId(step), verdict, "anna", "looked", looked_at_ms=self.ms))

    def preempt(self) -> None:
        self.do(c.Preempt(self.run_id, "anna"))

    def takeover(self, holder: str = "w2") -> None:
        self.preempt()
        self.ms += 61_000
        self.grant(holder)

    def checkpoint(self, number: int, right: Right | None = None) -> Verdict:
        return self.do(c.SaveCheckpoint(right or self.right, number, '{"at":0.5}'))

    def complete(self, asked: Sequence[str] = (), dropped: Sequence[str] = ()) -> Verdict:
        return self.do(c.Complete(self.right, "null", frozenset(map(StepId, asked)), frozenset(map(StepId, dropped))))

    def fail(self, error: str = "no stock") -> Verdict:
        return self.do(c.Fail(self.right, error))

    def history(self, **more: Any) -> History:
        assert self.view.run is not None
        given: dict[str, Any] = {
            "run_id": self.run_id,
            "events": tuple(self.events),
            "digests": tuple(self.digests),
            "namespace": NAMESPACE,
            "contracts": CONTRACTS,
            "now_ms": self.ms,
            "head_digest": self.view.run.digest,
            "head_seq": self.view.run.seq,
        }
        return History(**(given | more))

    def store(self, into: MemoryStore | None = None) -> MemoryStore:
        """The run as a store holds it."""
        store = into or MemoryStore(NAMESPACE)
        assert self.view.run is not None
        key = store.run_key_max() + 1
        batch = Batch(mark_ms=self.ms)
        batch.events = [StoredEvent(key, event, mark) for event, mark in zip(self.events, self.digests, strict=True)]
        batch.heads[key] = self.view.run
        batch.steps = {(key, step.step_id): step for step in self.view.steps.values()}
        batch.contracts = {name: contract.to_json() for name, contract in CONTRACTS.items()}
        store.commit(batch)
        return store


class Log:
    """A log written by hand, one row after the other; nothing checks it, but its chain is right."""

    def __init__(self, *, grant: bool = True) -> None:
        self.events: list[Event] = []
        self.ms = 1_000
        self.say("run_created", agent="agent", agent_version="1", input=None, input_digest=digest("null"), run=RUN)
        if grant:
            self.granted(1)

    def say(self, kind: Any, epoch: int = 0, step: str | None = None, text: str | None = None, **data: Any) -> "Log":
        body = canonical(data) if text is None else text
        name = None if step is None else StepId(step)
        self.events.append(Event(len(self.events) + 1, self.ms, kind, Epoch(epoch), name, body))
        return self

    def granted(self, epoch: int, **data: Any) -> "Log":
        given = {"holder": f"w{epoch}", "lease_ms": LEASE_MS, "expires_at_ms": self.ms + LEASE_MS, "request_id": "q"}
        return self.say("lease_granted", epoch, **(given | data))

    def preempted(self, epoch: int) -> "Log":
        return self.say("lease_preempted", epoch, by="anna", note="")

    def fenced(
        self, step: str = "pay", epoch: int = 1, tool: Contract = CHARGE, args: Any = None, **data: Any
    ) -> "Log":
        """An intent with everything in it; `attempt` and the like can be given."""
        args = {"n": 1} if args is None else args
        request = request_of(tool, args, step)
        given = {
            "args": args,
            "attempt": 1,
            "call_digest": call_digest(tool.tool, canonical(args)),
            "contract": contract_digest(tool),
            "deadline_ms": self.ms + SEND_MS,
            "dedups": tool.dedups,
            "effect": tool.effect,
            "key": step_key(NAMESPACE, RUN, StepId(step)),
            "older_over": True,
            "owner": BOOT,
            "scope": tool.scope,
            "tool": tool.tool,
            "undo_of": None,
            "wall_ms": self.ms,
            "request": None if request is None else request._asdict(),
        }
        return self.say("step_fenced", epoch, step, **(given | data))

    def replayed(self, step: str = "pay", epoch: int = 1, attempt: int = 2, intent: int = 3, **data: Any) -> "Log":
        given = {
            "attempt": attempt,
            "deadline_ms": self.ms + SEND_MS,
            "intent_seq": intent,
            "older_over": False,
            "owner": BOOT,
            "wall_ms": self.ms,
        }
        return self.say("step_fenced", epoch, step, **(given | data))

    def told(self, kind: Any, epoch: int = 1, step: str = "pay", attempt: int = 1, **data: Any) -> "Log":
        """An outcome of an attempt, with a receipt where it has one."""
        return self.say(kind, epoch, step, **({"attempt": attempt, "reason": "", "receipt": None} | data))

    def paid(self, step: str = "pay", epoch: int = 1, tool: Contract = CHARGE) -> "Log":
        return self.fenced(step, epoch, tool).told("step_committed", epoch, step)

    def later(self, ms: int) -> "Log":
        self.ms += ms
        return self

    def history(self, **more: Any) -> History:
        digests: list[str] = []
        for event in self.events:
            digests.append(chain(digests[-1] if digests else CHAIN_START, event))
        given: dict[str, Any] = {
            "run_id": RUN,
            "events": tuple(self.events),
            "digests": tuple(digests),
            "namespace": NAMESPACE,
            "contracts": CONTRACTS,
        }
        return History(**(given | more))


def store_of(log: Log) -> MemoryStore:
    """A hand-made log in a store whose head and steps say what `evolve` makes of it, where it can."""
    store = MemoryStore(NAMESPACE)
    view = View(NAMESPACE, 0, frozenset(), contracts=CONTRACTS)
    digests = log.history().digests
    for event in log.events:
        try:
            view = evolve(view, event, RUN)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            assert view.run is not None
            view = view._replace(run=view.run._replace(seq=event.seq, digest=digests[event.seq - 1]))
    assert view.run is not None
    batch = Batch(mark_ms=log.ms)
    batch.events = [StoredEvent(1, event, mark) for event, mark in zip(log.events, digests, strict=True)]
    batch.heads[1] = view.run
    batch.steps = {(1, step.step_id): step for step in view.steps.values()}
    batch.contracts = {name: contract.to_json() for name, contract in CONTRACTS.items()}
    store.commit(batch)
    return store
