"""A log read a second time, by a small fold that shares nothing with the rules.

The laws need to know, at each event, which epoch was live, what each step's attempts had come to and what was still
open. `fold` works that out from the events alone, so that a fault in the rules can't hide itself in the check of the
rules. It is total: whatever an altered log's data says, it never raises.
"""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from tidefast.protocol.canonical import INTEGER_MAX, JSON, CanonicalError, call_digest, canonical
from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import Event, Kind
from tidefast.protocol.ids import Epoch, RunId, StepId, incarnation_of, spell_key

KINDS = frozenset(get_args(Kind))
CHANGES_THE_WORLD = frozenset(("external", "workspace"))
OPEN = frozenset(("out", "doubted", "lost"))  # an attempt that may still have had an effect
HARMLESS = frozenset(("unsent", "refused", "absent", "not_applied"))
SETTLED = frozenset(("committed", "rejected", "compensated"))
RECEIPTS = frozenset(("step_committed", "step_applied", "late_receipt"))
OUTCOMES = frozenset(("step_committed", "step_applied", "step_unsent", "step_refused", "step_rejected", "step_doubted"))
PROGRESS = frozenset(
    ("step_committed", "step_rejected", "step_compensated", "step_resolved", "step_result", "checkpoint_saved")
)
INTENTS = frozenset(("step_fenced", "step_presumed"))  # what can make a step known, and adds an attempt to it
NONE = Epoch(0)
DOUBTFUL = frozenset(("in_doubt", "held"))

ACKNOWLEDGED: Mapping[str, frozenset[str]] = {
    "create": frozenset(("run_created",)),
    "grant": frozenset(("lease_granted",)),
    "apply": frozenset(("step_committed", "step_applied", "step_resolved", "step_rejected", "probe_answered")),
    "compensate": frozenset(("step_committed", "step_applied", "step_resolved", "probe_answered")),
    "settle": frozenset((*OUTCOMES, "step_held", "late_receipt")),
    "result": frozenset(("step_result",)),
    "checkpoint": frozenset(("checkpoint_saved",)),
    "release": frozenset(("lease_released",)),
    "complete": frozenset(("run_completed",)),
    "fail": frozenset(("run_failing", "run_failed", "run_cancelled")),
    "resolve": frozenset(("step_resolved",)),
    "preempt": frozenset(("lease_preempted",)),
    "pause": frozenset(("run_paused",)),
    "resume": frozenset(("run_resumed",)),
    "freeze": frozenset(("run_frozen",)),
    "thaw": frozenset(("run_thawed",)),
    "cancel": frozenset(("run_cancelling", "run_cancelled")),
}
TOLD_ITS_EPOCH = frozenset(("grant", "result", "checkpoint", "release", "complete", "fail"))


class Ack(NamedTuple):
    """What one caller was told had been done. `seq` names the event that was said to hold it."""

    verb: str  # one of the words of `ACKNOWLEDGED`
    epoch: Epoch
    seq: int
    step_id: StepId | None = None
    number: int = 0  # of a checkpoint


class History(NamedTuple):
    """All that is known of one run: its log, and what the world says about it."""

    run_id: RunId
    events: tuple[Event, ...]
    digests: tuple[str, ...]
    namespace: bytes
    contracts: Mapping[str, Contract]  # by digest
    applied: Mapping[str, int] | None = None  # the provider's net count by key, or by step id where it takes no key
    acknowledged: tuple[Ack, ...] = ()
    now_ms: int = 0  # taken after the log was read; 0 if unknown
    head_digest: str | None = None  # from the run's head or from an anchor kept elsewhere
    head_seq: int | None = None
    counted: frozenset[str] | None = None  # the tools whose effects `applied` counts; None: all that change the world


class Violation(NamedTuple):
    """One breach: which law, where it shows first, and what a person needs to hear. `seq` 0: no event shows it."""

    law: str
    run_id: RunId
    step_id: StepId | None
    seq: int
    why: str


class Sending(NamedTuple):
    """One attempt of a step."""

    number: int
    seq: int
    epoch: Epoch
    at_ms: int
    wall_ms: int
    deadline_ms: int
    state: str


class Facts(NamedTuple):
    """What the log says of one step."""

    step_id: StepId
    state: str
    tool: str = ""
    effect: str = "none"
    call_digest: str = ""
    key: str = ""
    contract: str = ""
    dedups: bool = False
    attempts: tuple[Sending, ...] = ()
    intent_seq: int = 0
    epoch: Epoch = NONE
    undo_of: StepId | None = None
    closed_by: StepId | None = None
    receipts: frozenset[int] = frozenset()  # the events that hold evidence of the effect
    since_seq: int = 0  # the event that brought it into its state
    settled_seq: int = 0
    was_held: bool = False
    lag_ms: int = 0
    is_independent: bool = False

    @property
    def is_mutating(self) -> bool:
        return self.effect in CHANGES_THE_WORLD

    @property
    def is_unsettled(self) -> bool:
        if self.state in ("fenced", "in_doubt", "held", "applied"):
            return True
        if self.state == "pending" and (self.attempts or self.undo_of is not None):
            return True
        return self.closed_by is not None and self.state != "compensated"

    def is_known_since(self, epoch: Epoch) -> bool:
        """Whether an attempt of it is of this epoch's incarnation, so that a restore has lost none since."""
        return any(incarnation_of(sent.epoch) >= incarnation_of(epoch) for sent in self.attempts)

    @property
    def clear_ms(self) -> int:
        """Until when something of it may land or turn up."""
        return max((sent.deadline_ms for sent in self.open_attempts()), default=0) + self.lag_ms

    def attempt(self, number: int) -> Sending | None:
        return self.attempts[number - 1] if 1 <= number <= len(self.attempts) else None

    def open_attempts(self, but: int = 0) -> Iterator[Sending]:
        """The attempts that may have had an effect, one of them left out."""
        return (sent for sent in self.attempts if sent.state in OPEN and sent.number != but)

    def on_the_wire(self, at_ms: int) -> Iterator[Sending]:
        """The attempts whose request may land after this moment and would change something by it."""
        if self.dedups and self.state in ("applied", "committed"):
            return iter(())
        return (sent for sent in self.open_attempts() if sent.deadline_ms > at_ms)


class RunFacts(NamedTuple):
    """What the log says of the run as a whole."""

    live: Epoch = NONE  # 0 when no epoch is live
    newest: Epoch = NONE
    holder: str = ""
    expires_at_ms: int = 0
    checkpoint: int = 0
    frozen: str = ""
    paused: bool = False
    ending: str = ""
    to_undo: tuple[str, ...] = ()
    end: str = ""
    grants: int = 0  # since the last progress
    is_recovered: bool = False  # its newest epoch was granted in the window after a restore
    last_ms: int = 0


class Moment(NamedTuple):
    """One event, with what was true just before it."""

    place: int
    event: Event
    data: Mapping[str, JSON]
    is_readable: bool
    run: RunFacts
    step: Facts | None
    open: Mapping[StepId, Facts]  # the steps that are unsettled or may be on the wire


class Trace(NamedTuple):
    """A whole log, folded."""

    history: History
    moments: tuple[Moment, ...]
    by_kind: Mapping[str, tuple[Moment, ...]]
    run: RunFacts
    steps: Mapping[StepId, Facts]
    granted: Mapping[Epoch, int]  # each epoch with the event that granted it first

    def of(self, *kinds: str) -> Iterator[Moment]:
        """The moments of these kinds, each kind in order."""
        for kind in kinds:
            yield from self.by_kind.get(kind, ())

    def standing(self, moment: Moment) -> str:
        """What the epoch that an event names was worth: `live`, `dead`, `forged` (never granted) or `missing`."""
        epoch = moment.event.epoch
        if not epoch:
            return "missing"
        if epoch == moment.run.live:
            return "live"
        return "dead" if epoch in self.granted and self.granted[epoch] < moment.event.seq else "forged"


class Start(NamedTuple):
    """What a log had come to before the first event that is read."""

    run: RunFacts = RunFacts()
    steps: Mapping[StepId, Facts] = {}
    open: Mapping[StepId, Facts] = {}
    granted: Mapping[Epoch, int] = {}


def fold(history: History, start: Start = Start()) -> Trace:  # noqa: B008 - immutable
    """Read a log from its first event, or from where a start says it had come to, to its last."""
    run = start.run
    steps: dict[StepId, Facts] = dict(start.steps)
    still_open: Mapping[StepId, Facts] = start.open
    granted: dict[Epoch, int] = dict(start.granted)
    moments: list[Moment] = []
    by_kind: dict[str, list[Moment]] = {}
    for place, event in enumerate(history.events):
        read = decode(event)
        data = read or {}
        step = None if event.step_id is None else steps.get(event.step_id)
        is_readable = read is not None and event.kind in KINDS
        moment = Moment(place, event, data, is_readable, run, step, still_open)
        moments.append(moment)
        by_kind.setdefault(event.kind, []).append(moment)
        run = _run_after(run, event, data)
        if event.kind == "lease_granted":
            granted.setdefault(event.epoch, event.seq)
        for changed in _steps_after(steps, step, event, data):
            steps[changed.step_id] = changed
            still_open = _open_after(still_open, changed, event.at_ms)
            if run.to_undo and changed.state in ("rejected", "compensated"):
                gone = (changed.step_id, changed.undo_of)
                run = run._replace(to_undo=tuple(name for name in run.to_undo if name not in gone))
    kinds = {kind: tuple(found) for kind, found in by_kind.items()}
    return Trace(history, tuple(moments), kinds, run, steps, granted)


def decode(event: Event) -> Mapping[str, JSON] | None:
    """An event's members; None if its data is not an object."""
    try:
        value: JSON = json.loads(event.data_json, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, Mapping) else None


def _integer(text: str) -> int | float:
    """A number that ECMAScript prints without a fraction may still be a double."""
    value = int(text)
    return value if abs(value) <= INTEGER_MAX else float(text)


def number(data: Mapping[str, JSON], name: str) -> int:
    """An integer member; 0 if there is none."""
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def text(data: Mapping[str, JSON], name: str) -> str:
    """A text member; empty if there is none."""
    value = data.get(name)
    return value if isinstance(value, str) else ""


def texts(data: Mapping[str, JSON], name: str) -> tuple[str, ...]:
    """A list of texts; what else is in it is left out."""
    value = data.get(name)
    return tuple(part for part in value if isinstance(part, str)) if isinstance(value, list) else ()


def is_gone(moment: Moment) -> bool:
    """Whether an event tells of a disk that is gone, or of what may have escaped from it."""
    kind, data = moment.event.kind, moment.data
    is_late = kind == "late_receipt" and data.get("is_gone") is True
    return kind == "replica_lost" or is_late or (kind == "step_held" and text(data, "reason") == "escaped")


def _run_after(run: RunFacts, event: Event, data: Mapping[str, JSON]) -> RunFacts:
    run = run._replace(last_ms=max(run.last_ms, event.at_ms))
    if event.kind in PROGRESS:
        run = run._replace(grants=0)
    match event.kind:
        case "lease_granted":
            return run._replace(
                live=event.epoch,
                newest=max(run.newest, event.epoch),
                holder=text(data, "holder"),
                expires_at_ms=number(data, "expires_at_ms"),
                grants=run.grants + 1,
                is_recovered="recovery" in data,
            )
        case "lease_lapsed" | "lease_released" | "lease_preempted":
            return run._replace(live=NONE)
        case "checkpoint_saved":
            return run._replace(checkpoint=number(data, "number"))
        case "run_frozen":
            return run._replace(frozen=text(data, "reason"))
        case "run_thawed":
            return run._replace(frozen="", grants=0)
        case "run_paused" | "run_resumed":
            return run._replace(paused=event.kind == "run_paused")
        case "run_failing" | "run_cancelling":
            return run._replace(ending=event.kind.removeprefix("run_"), to_undo=texts(data, "undo"))
        case "run_completed" | "run_failed" | "run_cancelled":
            return run._replace(live=NONE, end=event.kind.removeprefix("run_"))
        case _:
            return run


def _steps_after(
    steps: Mapping[StepId, Facts], step: Facts | None, event: Event, data: Mapping[str, JSON]
) -> Iterator[Facts]:
    """The steps that an event changes, as they are after it."""
    if event.step_id is None:
        return
    if event.kind in INTENTS:
        yield _fenced(step, event.step_id, event, data)
    elif event.kind == "step_held" and step is None:
        yield _unwritten(event.step_id, event, data)
    elif event.kind == "step_result":
        yield Facts(event.step_id, "committed", epoch=event.epoch, since_seq=event.seq, settled_seq=event.seq)
    elif step is not None:
        yield _step_after(step, event, data)
        target = steps.get(step.undo_of) if step.undo_of is not None else None
        if target is not None and event.kind == "step_resolved" and text(data, "state") == "rejected":
            yield target._replace(closed_by=None)


def _unwritten(step_id: StepId, event: Event, data: Mapping[str, JSON]) -> Facts:
    """An undo that no call could be written for, held before its first attempt."""
    undo_of = StepId(text(data, "undo_of")) or None
    held = Facts(step_id, "held", text(data, "tool"), "external", key=text(data, "key"), undo_of=undo_of)
    return held._replace(epoch=event.epoch, since_seq=event.seq, was_held=True)


def _fenced(step: Facts | None, step_id: StepId, event: Event, data: Mapping[str, JSON]) -> Facts:
    before = step or Facts(step_id, "")
    is_presumed = event.kind == "step_presumed"
    sent = Sending(
        len(before.attempts) + 1,
        event.seq,
        Epoch(number(data, "epoch")) if is_presumed else event.epoch,
        number(data, "sent_ms") if is_presumed else event.at_ms,
        number(data, "wall_ms"),
        number(data, "deadline_ms"),
        "lost" if is_presumed else "out",
    )
    state = "fenced" if not is_presumed else "held" if before.state == "held" else "in_doubt"
    after = before._replace(
        state=state, attempts=(*before.attempts, sent), epoch=event.epoch, since_seq=event.seq, settled_seq=0
    )
    if "tool" not in data:
        return after
    return after._replace(
        tool=text(data, "tool"),
        effect=text(data, "effect"),
        call_digest=text(data, "call_digest"),
        key=before.key or text(data, "key"),
        contract=text(data, "contract"),
        dedups=data.get("dedups") is True,
        lag_ms=number(data, "lag_ms"),
        is_independent=data.get("independent") is True,
        intent_seq=event.seq,
        undo_of=StepId(text(data, "undo_of")) or None,
    )


def _step_after(step: Facts, event: Event, data: Mapping[str, JSON]) -> Facts:
    """A known step after one of its events."""
    place = number(data, "attempt")
    if event.kind in RECEIPTS and "attempt" in data:
        step = step._replace(receipts=step.receipts | {event.seq})
    match event.kind:
        case "step_committed":
            committed = _booked(step, place, "applied")._replace(epoch=event.epoch)
            return _moved(committed, "committed", event.seq)
        case "step_applied":
            return _moved(_booked(step, place, "applied"), "applied", event.seq)
        case "step_unsent" | "step_refused":
            outcome = event.kind.removeprefix("step_")
            booked = _booked(step, place, outcome)
            if outcome == "refused" and text(data, "state") == "pending":
                booked = _all_open(booked, "refused")
            return _moved(booked, text(data, "state"), event.seq)
        case "step_rejected":
            return _moved(_all_open(step, "refused"), "rejected", event.seq)
        case "step_doubted":
            outcome = "lost" if data.get("is_lost") is True else "doubted"
            return _moved(_booked(step, place, outcome), text(data, "state") or "in_doubt", event.seq)
        case "step_held":
            return _moved(_booked(step, place, "refused"), "held", event.seq)._replace(was_held=True)
        case "probe_answered":
            return _probed(step, event, data)
        case "step_resolved":
            return _resolved(step, event, data)
        case "step_withdrawn":
            return _moved(step, "rejected", event.seq)
        case "undo_begun":
            closed = step._replace(closed_by=StepId(text(data, "undo")))
            return _moved(closed, "in_doubt", event.seq) if step.state == "held" else closed
        case "step_compensated":
            return _moved(step, "compensated", event.seq)
        case "late_receipt":
            return step if data.get("is_gone") is True else _booked(step, place, "applied")
        case "replica_lost":
            return _moved(_all_but_harmless(step, "absent"), "pending", event.seq)._replace(receipts=frozenset())
        case _:
            return step


def _moved(step: Facts, state: str, seq: int) -> Facts:
    return step._replace(state=state, since_seq=seq, settled_seq=seq if state in SETTLED else 0)


def _booked(step: Facts, place: int, state: str) -> Facts:
    attempts = tuple(sent._replace(state=state) if sent.number == place else sent for sent in step.attempts)
    return step._replace(attempts=attempts)


def _all_but_harmless(step: Facts, state: str) -> Facts:
    """Each attempt that had or may have had its effect: it is gone with the disk that it was made on."""
    attempts = tuple(sent if sent.state in HARMLESS else sent._replace(state=state) for sent in step.attempts)
    return step._replace(attempts=attempts)


def _all_open(step: Facts, state: str) -> Facts:
    attempts = tuple(sent._replace(state=state) if sent.state in OPEN else sent for sent in step.attempts)
    return step._replace(attempts=attempts)


def _probed(step: Facts, event: Event, data: Mapping[str, JSON]) -> Facts:
    state, answer = text(data, "state"), text(data, "answer")
    if answer == "absent":
        step = _all_open(step, "absent")
    if answer == "found":
        step = step._replace(receipts=step.receipts | {event.seq})
    return step if state == step.state else _moved(step, state, event.seq)


def _resolved(step: Facts, event: Event, data: Mapping[str, JSON]) -> Facts:
    verdict = text(data, "verdict")
    if verdict in ("not_applied", "refused"):
        step = _all_open(step, "not_applied")
    if verdict == "applied":
        step = step._replace(receipts=step.receipts | {event.seq}, closed_by=None)
    return _moved(step, text(data, "state"), event.seq)


def _open_after(before: Mapping[StepId, Facts], step: Facts, at_ms: int) -> Mapping[StepId, Facts]:
    candidates = {**before, step.step_id: step}
    return {
        name: facts
        for name, facts in candidates.items()
        if facts.is_unsettled or any(True for _ in facts.on_the_wire(at_ms))
    }


def remembered(step: Facts, contract: Contract, at_ms: int, wall_ms: int) -> bool:
    """Whether the provider surely still knows the key while one more attempt is on its way."""
    first = next(sent for sent in step.attempts if sent.state != "unsent")
    elapsed = max(at_ms - first.at_ms, wall_ms - first.wall_ms)
    return elapsed + contract.timeout_ms + contract.margin_ms < contract.key_ttl_ms


def carries(request: Mapping[str, JSON], contract: Contract, key: str) -> bool:
    """Whether a stored request holds the key where its contract puts it."""
    place, _, name = contract.key.partition(":")
    try:
        spelled = spell_key(key, contract.key_form)
    except ValueError:
        return False
    if place == "header":
        headers = request.get("headers")
        return isinstance(headers, Mapping) and headers.get(name) == spelled
    return place != "field" or spelled in text(request, "body")


def digest_of_call(data: Mapping[str, JSON]) -> str:
    """The digest of an intent's own tool and arguments; a word that is no digest if they have none."""
    try:
        return call_digest(text(data, "tool"), canonical(data.get("args")))
    except CanonicalError:
        return "none"


def is_listed(trace: Trace, moment: Moment, step: Facts) -> bool:
    """Whether a refusal is one that the contract calls definite; true where the log can't tell."""
    contract = trace.history.contracts.get(step.contract)
    receipt = moment.data.get("receipt")
    if contract is None or not isinstance(receipt, Mapping) or not number(receipt, "status"):
        return True
    is_whole = receipt.get("truncated") is not True and "encoding" not in receipt
    status, body = number(receipt, "status"), receipt.get("body")
    target = None if step.undo_of is None else trace.steps.get(step.undo_of)
    undone = None if target is None else trace.history.contracts.get(target.contract)
    nothing = None if undone is None or undone.undo is None else undone.undo.nothing
    if nothing is not None and nothing.matches(status, body):
        return True
    return any(line.matches(status, body) if is_whole else line.status == status for line in contract.refusals)


def froze(trace: Trace, moment: Moment) -> bool:
    after = trace.moments[moment.place + 1] if moment.place + 1 < len(trace.moments) else None
    return after is not None and after.event.kind == "run_frozen" and text(after.data, "reason") == "diverged"


def is_risky_undo(trace: Trace, step: Facts) -> bool:
    """Whether the undo of a doubt may do harm, as far as the contract is known."""
    contract = trace.history.contracts.get(step.contract)
    return step.state in DOUBTFUL and contract is not None and not contract.undo_safe_if_absent


def overtaken(moment: Moment, step: Facts) -> str:
    """Why a provider's word on a doubt came too late to count; empty if it didn't."""
    if step.state not in ("in_doubt", "held") or step.closed_by is not None:
        return f"a provider's word on it was taken though it was {step.state}" + (" and closed" * bool(step.closed_by))
    asked = number(moment.data, "attempts")
    if asked != len(step.attempts):
        return f"a provider was asked about {asked} attempts, but its word was taken about {len(step.attempts)}"
    return ""


def asked_early(moment: Moment, step: Facts) -> str:
    """Why a provider was asked too early to know; empty if it wasn't."""
    asked_ms = number(moment.data, "asked_ms")
    if asked_ms <= step.clear_ms:
        return f"the provider was asked at {asked_ms}, but what it says counts from after {step.clear_ms} on only"
    return f"its answer came before the question at {asked_ms}" if moment.event.at_ms < asked_ms else ""


def unsettled(moment: Moment) -> Iterator[Facts]:
    """The mutating steps whose outcome was open just before an event."""
    return (step for step in moment.open.values() if step.is_mutating and step.is_unsettled)


def who_was_live(moment: Moment) -> str:
    """Half a sentence on the epoch that was live just before an event."""
    live = moment.run.live
    return f"when epoch {live} was live" if live else "when no epoch was live"


def at(trace: Trace, law: str, moment: Moment, why: str, step_id: StepId | None = None) -> Violation:
    """A breach that shows at this event."""
    return Violation(law, trace.history.run_id, step_id or moment.event.step_id, moment.event.seq, why)
