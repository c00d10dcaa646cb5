"""What a state is, and when two states are the same.

A state is the books (head and steps as the rules see them), the truth (what the provider did, where each request is,
what an operator saw) and the faults that are left. After each move it is brought into its normal form: the present is
always `NOW`, a timer is ahead or passed, an epoch is the live one or older, and what no rule can tell apart any more is
written the same. The rules run on these books as they run in the server, on milliseconds.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tidefast.protocol.commands import OutcomeKind
from tidefast.protocol.contracts import contract_digest
from tidefast.protocol.ids import Epoch, RunId, StepId, derived_id, epochs_from, incarnation_of
from tidefast.protocol.lease import GRANTS_WITHOUT_PROGRESS_MAX
from tidefast.protocol.records import HAD_NO_EFFECT, NOT_SETTLED, Attempt, Now, OpenStep, Recovery, RunHead, Step
from tidefast.protocol.recovery import is_presumed
from tidefast.sim.check.configs import TIMEOUT_MS, TTL_MS, Config, Tool

RUN = RunId("run")
NAMESPACE = b"0123456789abcdef"
ALIVE, GONE = "gateway", "gone"  # owners of attempts: the instance that lives, and any that counts as dead
LEASE_MS = 15_000
NOW = 10**9
EARLIER = NOW - 2_000  # an admission after which an older deadline passed
PASSED = NOW - 1_000  # a deadline that has passed
LOOKED = NOW - 500  # a look after every deadline that has passed
AHEAD = NOW + TIMEOUT_MS
LONG_AGO = NOW - TTL_MS
LEASE_AHEAD = NOW + LEASE_MS
GRANTS_FROM = GRANTS_WITHOUT_PROGRESS_MAX - 3
SEQ, INTENT, RECEIPT, BEFORE, CHECKPOINT, SINCE = 100, 10, 20, 40, 50, 60
DIGEST = "0" * 64

# Where a request is. Answers under way are known to whoever listens; an unheard request has no one who does.
READY, WIRE, UNHEARD, NOWHERE = "ready", "wire", "unheard", "nowhere"
ANSWERS: dict[str, OutcomeKind] = {
    "yes": "applied",
    "no": "refused",
    "unsent": "unsent",
    "unclear": "doubted",
    "strange": "unlisted",
}
UNKNOWN, FRESH, FADING = 0, 1, 2  # what the provider remembers of a step's key
# The window after a restore: lost requests may land, they can land no more, an operator has closed it.
NO_WINDOW, LANDING, LANDED, CLOSED = 0, 1, 2, 3
NO_BACKUP, SPENT = -1, -2  # none was made yet; it was restored
RESTORED = 1  # the incarnation after the restore
FIRST_OF_RESTORED = epochs_from(RESTORED)


class Broken(Exception):
    """A law is broken by the move at hand; the search adds how one gets there."""

    def __init__(self, law: str, why: str) -> None:
        super().__init__(f"{law}: {why}")
        self.law, self.why = law, why


class Book(NamedTuple):
    """What the authority holds: the head, its steps in the order of the configuration, and whether it just started.

    `backup` is the number of the books that a backup holds, `window` how a restore stands.
    """

    head: RunHead
    steps: tuple[Step | None, ...]
    grace: bool = False
    backup: int = NO_BACKUP
    window: int = NO_WINDOW

    @property
    def incarnation(self) -> int:
        return RESTORED if self.window else 0

    @property
    def recovery(self) -> Recovery | None:
        """The store's window, as long as it is open."""
        return None if self.window in (NO_WINDOW, CLOSED) else recovery_of(self.window)


def recovery_of(window: int) -> Recovery:
    """The window in milliseconds: a lost request lands until its timeout after the restore."""
    return Recovery(NOW, NOW, NOW if window == LANDING else PASSED - TIMEOUT_MS)


class Request(NamedTuple):
    """One attempt outside the books."""

    place: str
    had_effect: bool = False


class Look(NamedTuple):
    """What an operator saw at the provider: the net effect, at how many attempts, after all of their deadlines."""

    net: int
    attempts: int
    is_late_enough: bool


class Truth(NamedTuple):
    """What the world knows of one step."""

    applied: int = 0
    by_hand: int = 0  # undone by an operator, without the books
    memory: int = UNKNOWN
    look: Look | None = None
    requests: tuple[Request, ...] = ()
    lost: Request | None = None  # of commits that a restore lost, until the books presume it


Truths = tuple[Truth, ...]


class Shape:
    """The names of a configuration's steps, and which undoes which."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.names: list[StepId] = []
        self.tools: list[Tool] = []
        self.undo_of: list[int | None] = []
        self.undone_by: dict[int, int] = {}
        for tool in config.steps:
            self._add(StepId(tool.name), tool, None)
        for place, tool in enumerate(config.steps):
            if tool.undo is not None:
                self.undone_by[place] = len(self.names)
                self._add(derived_id(StepId(tool.name), "undo"), Tool(f"{tool.name}~undo", tool.undo), place)
        if config.local:
            self.names.append(StepId("sum"))
        self.place = {name: place for place, name in enumerate(self.names)}
        self.contracts = {contract_digest(tool.contract): tool.contract for tool in self.tools}

    def _add(self, name: StepId, tool: Tool, undo_of: int | None) -> None:
        self.names.append(name)
        self.tools.append(tool)
        self.undo_of.append(undo_of)

    def net(self, truths: Truths, place: int) -> int:
        """The provider's own count of one step: applied less undone."""
        undo = self.undone_by.get(place)
        truth = truths[place]
        return truth.applied - truth.by_hand - (0 if undo is None else truths[undo].applied)


def now_of(book: Book, *, wall_back: bool = False) -> Now:
    """The moment of every decision. With `wall_back` the wall clock is behind what the store remembers."""
    return Now(NOW, NOW, NOW + TTL_MS if wall_back else 0, NOW if book.grace else 0)


def forgotten(book: Book) -> tuple[StepId, ...]:
    """What a store answers: mutating steps settled since the newest checkpoint that another epoch asked for."""
    head = book.head
    return tuple(
        step.step_id
        for step in book.steps
        if step is not None and step.is_mutating and step.settled_seq > head.checkpoint_seq and step.epoch != head.epoch
    )


# --- normal form of the books


def normal_book(shape: Shape, book: Book) -> Book:
    """The same books with everything written alike that no rule can tell apart."""
    epochs = _epochs(shape.config, book)
    steps = tuple(None if step is None else _normal_step(step, book.head, epochs) for step in book.steps)
    head = _normal_head(shape, book, steps, epochs)
    return Book(head, steps, book.grace and head.is_live, book.backup, book.window)


def _epochs(config: Config, book: Book) -> dict[int, Epoch]:
    """New names for epochs: the newest stays above the others, older ones keep their order, the oldest are one."""
    head = book.head
    top = min(head.epoch, config.workers)
    named: set[int] = {head.checkpoint_epoch}
    for step in book.steps:
        if step is not None:
            named.add(step.epoch)
            named.update(attempt.epoch for attempt in step.attempts)
    if book.window:
        return _epochs_restored(config, head, named)
    keeps_newest = head.is_live or bool(head.end) or top < config.workers
    older = sorted(named - ({0, head.epoch} if keeps_newest else {0}), reverse=True)
    names: dict[int, Epoch] = {epoch: Epoch(max(1, top - 1 - rank)) for rank, epoch in enumerate(older)}
    names[0] = Epoch(0)
    if keeps_newest:
        names[head.epoch] = Epoch(top)
    return names


def _epochs_restored(config: Config, head: RunHead, named: set[int]) -> dict[int, Epoch]:
    """After a restore all epochs of the older incarnation are one; those of the new one are told apart as before."""
    floor = FIRST_OF_RESTORED
    top = newest_name(config, head, RESTORED)
    older = sorted((epoch for epoch in named if floor < epoch < head.epoch), reverse=True)
    names: dict[int, Epoch] = {epoch: Epoch(1) for epoch in named if epoch < floor}
    names |= {epoch: Epoch(max(floor + 1, top - 1 - rank)) for rank, epoch in enumerate(older)}
    return {**names, 0: Epoch(0), floor: floor, head.epoch: top}


def newest_name(config: Config, head: RunHead, incarnation: int) -> Epoch:
    """How the newest epoch is written."""
    if not incarnation:
        return Epoch(min(head.epoch, config.workers))
    return Epoch(1) if head.epoch < FIRST_OF_RESTORED else Epoch(min(head.epoch, FIRST_OF_RESTORED + config.workers))


def _normal_step(step: Step, head: RunHead, epochs: dict[int, Epoch]) -> Step:
    since = step.settled_seq > head.checkpoint_seq
    return step._replace(
        attempts=tuple(_normal_attempts(step, epochs)),
        intent_seq=INTENT if step.intent_seq else 0,
        receipt_seq=RECEIPT if step.receipt_seq else 0,
        epoch=epochs[step.epoch],
        reason="",
        probes=step.probes if step.state == "in_doubt" else 0,
        probed_ms=0,
        settled_seq=0 if not step.settled_seq else (SINCE if since else BEFORE),
    )


def _normal_attempts(step: Step, epochs: dict[int, Epoch]) -> Iterable[Attempt]:
    is_settled = step.settled_seq > 0
    older_doubt = False
    for attempt in step.attempts:
        doubtful = attempt.state in NOT_SETTLED
        older_over = attempt.older_over or not doubtful or not older_doubt
        fresh = NOW if older_over else EARLIER
        is_old = attempt.admitted_ms <= LONG_AGO and not is_settled
        admitted = LONG_AGO if is_old else fresh
        yield Attempt(
            attempt.number,
            epochs[attempt.epoch] if doubtful else (FIRST_OF_RESTORED if incarnation_of(attempt.epoch) else Epoch(1)),
            attempt.owner if doubtful else GONE,
            admitted,
            admitted,
            AHEAD if doubtful and attempt.deadline_ms > NOW else PASSED,
            older_over,
            attempt.state,
        )
        older_doubt = older_doubt or doubtful


def _normal_head(shape: Shape, book: Book, steps: tuple[Step | None, ...], epochs: dict[int, Epoch]) -> RunHead:
    config, head = shape.config, book.head
    top = newest_name(config, head, book.incarnation)
    grants = max(head.grants_without_progress, GRANTS_FROM) if config.counts_grants else 0
    return head._replace(
        version=SEQ,
        seq=SEQ,
        digest=DIGEST,
        created_ms=0,
        epoch=top,
        holder=f"w{top}",
        request_id=f"q{top}",
        lease_ms=LEASE_MS,
        expires_at_ms=0 if not head.is_live else (LEASE_AHEAD if head.expires_at_ms > NOW else PASSED),
        lease_end="" if head.is_live else (head.end or "lapsed"),
        lease_end_seq=0,
        lease_ended_ms=0,
        checkpoint_seq=CHECKPOINT if head.checkpoint else 0,
        checkpoint_epoch=epochs.get(head.checkpoint_epoch, Epoch(0)),
        grants_without_progress=grants,
        not_before_ms=NOW + 1_000 if config.counts_grants and head.not_before_ms > NOW and not head.end else 0,
        last_step=None,
        ending_seq=SINCE if head.ending_seq else 0,
        end_seq=SINCE if head.end_seq else 0,
        open=tuple(_normal_open(shape, head, steps, epochs)),
        recovery=head.recovery and recovery_of(LANDING if book.window == LANDING else LANDED),
    )


def _normal_open(
    shape: Shape, head: RunHead, steps: tuple[Step | None, ...], epochs: dict[int, Epoch]
) -> Iterable[OpenStep]:
    for entry in sorted(head.open, key=lambda entry: shape.place[entry.step_id]):
        if entry.wire_until_ms > NOW:
            epoch = epochs.get(entry.wire_epoch, Epoch(1))
            yield entry._replace(wire_epoch=epoch, wire_until_ms=AHEAD, probe_ms=0)
        elif entry.is_unsettled:
            yield entry._replace(wire_epoch=Epoch(0), wire_until_ms=0, probe_ms=0)


def passed(book: Book, place: int, number: int) -> Book:
    """The books when the deadline of one attempt has gone by; nobody has written anything."""
    step = book.steps[place]
    assert step is not None
    attempts = tuple(
        attempt._replace(deadline_ms=PASSED) if attempt.number == number else attempt for attempt in step.attempts
    )
    steps = (*book.steps[:place], step._replace(attempts=attempts), *book.steps[place + 1 :])
    if any(attempt.state in NOT_SETTLED and attempt.deadline_ms > NOW for attempt in attempts):
        return book._replace(steps=steps)
    still = tuple(
        entry._replace(wire_until_ms=PASSED) if entry.step_id == step.step_id else entry for entry in book.head.open
    )
    return book._replace(head=book.head._replace(open=still), steps=steps)


def owners_gone(book: Book) -> Book:
    """The books when every instance that owned an attempt counts as dead."""
    return book._replace(
        steps=tuple(
            step and step._replace(attempts=tuple(attempt._replace(owner=GONE) for attempt in step.attempts))
            for step in book.steps
        )
    )


def a_day_later(book: Book) -> Book:
    """The books when so much time has passed that no key is surely remembered."""
    steps = tuple(
        step
        and step._replace(
            attempts=tuple(
                attempt._replace(admitted_ms=LONG_AGO, admitted_wall_ms=LONG_AGO) for attempt in step.attempts
            )
        )
        for step in book.steps
    )
    head = book.head._replace(expires_at_ms=PASSED if book.head.is_live else 0, not_before_ms=0)
    return book._replace(head=head, steps=steps, grace=False)


def lost_time_over(book: Book) -> Book:
    """The books when no request of the lost commits can land any more."""
    for place, step in enumerate(book.steps):
        for attempt in () if step is None else step.attempts:
            if is_presumed(attempt):
                book = passed(book, place, attempt.number)
    return book._replace(window=LANDED)


# --- normal form of the truth, given the books


def normal_truth(step: Step | None, truth: Truth) -> Truth:
    """Room for each attempt that the books know; what nobody will ever hear of, or look at, is dropped."""
    if step is None:
        return truth
    fresh = step.attempts[len(truth.requests) :]
    was_lost = truth.lost or Request(NOWHERE)
    requests = truth.requests + tuple(was_lost if is_presumed(attempt) else Request(READY) for attempt in fresh)
    lost = None if any(map(is_presumed, fresh)) or step.settled_seq else truth.lost
    kept = tuple(
        [
            Request(request.place) if request.had_effect and attempt.state == "applied" else request
            for attempt, request in zip(step.attempts, requests, strict=True)
        ]
    )
    look = truth.look
    if look is not None and (look.attempts != len(step.attempts) or step.state not in ("fenced", "in_doubt", "held")):
        look = None
    return Truth(truth.applied, truth.by_hand, truth.memory, look, kept, lost)


def restored_truth(step: Step | None, truth: Truth) -> Truth:
    """The truth of one step when the books are those of a backup: requests that these don't know are lost ones."""
    known = 0 if step is None else len(step.attempts)
    places = [UNHEARD if request.place in (WIRE, UNHEARD) else NOWHERE for request in truth.requests]
    pairs = [Request(place, request.had_effect) for place, request in zip(places, truth.requests, strict=True)]
    kept = tuple((pairs + [Request(NOWHERE)] * known)[:known])
    in_flight = UNHEARD in places[known:]
    had_effect = truth.applied - truth.by_hand > 0 and not any(request.had_effect for request in kept)
    is_settled = step is not None and step.settled_seq > 0
    has_lost = (in_flight or had_effect) and not is_settled
    lost = Request(UNHEARD if in_flight else NOWHERE, had_effect) if has_lost else None
    return Truth(truth.applied, truth.by_hand, FRESH if truth.applied else UNKNOWN, None, kept, lost)


def no_longer_lost(step: Step | None, truth: Truth) -> Truth:
    """The truth when lost requests, presumed ones among them, can land no more."""
    attempts = () if step is None else step.attempts
    requests = tuple(
        request._replace(place=NOWHERE) if number < len(attempts) and is_presumed(attempts[number]) else request
        for number, request in enumerate(truth.requests)
    )
    lost = Request(NOWHERE, True) if truth.lost is not None and truth.lost.had_effect else None
    return truth._replace(requests=requests, lost=lost)


def can_be_stripped(step: Step, truth: Truth) -> bool:
    """Whether a settled step's attempts are history: nothing of it is under way and no deadline is waited for."""
    if not step.settled_seq or len(step.attempts) == 0 or truth.lost is not None:
        return False
    if any(request.place != NOWHERE for request in truth.requests):
        return False
    waited_for = any(attempt.state in NOT_SETTLED and attempt.deadline_ms > NOW for attempt in step.attempts)
    return not waited_for or (step.dedups and step.state == "committed")


def stripped(step: Step, truth: Truth) -> tuple[Step, Truth]:
    """A settled step with one attempt for all of its history."""
    state = "applied" if step.state != "rejected" else "refused"
    only = Attempt(1, Epoch(1), GONE, NOW, NOW, PASSED, True, state)  # type: ignore[arg-type]
    quiet = truth._replace(memory=UNKNOWN, look=None, requests=(Request(NOWHERE),))
    return step._replace(attempts=(only,)), quiet


def shortened(step: Step, truth: Truth, retries: int) -> tuple[Step, Truth]:
    """An unsettled step without the attempts that are known to have had no effect and that no rule counts.

    Counted are the oldest that was sent (a key's window begins with it) and as many refusals as the contract retries.
    """
    first, kept, refusals = step.first_sent, [], 0
    for attempt, request in zip(step.attempts, truth.requests, strict=True):
        counted = attempt is first or attempt.state not in HAD_NO_EFFECT or request.place != NOWHERE
        if not counted and attempt.state == "refused" and refusals < retries:
            counted = True
        counted = counted or is_presumed(attempt)
        refusals += attempt.state == "refused"
        if counted:
            kept.append((attempt, request))
    if not kept:
        kept = [(step.attempts[-1], truth.requests[-1])]
    if len(kept) == len(step.attempts):
        return step, truth
    attempts = tuple(attempt._replace(number=number) for number, (attempt, _) in enumerate(kept, 1))
    look = truth.look and truth.look._replace(attempts=len(kept))
    return (
        step._replace(attempts=attempts),
        truth._replace(look=look, requests=tuple(request for _, request in kept)),
    )


# --- changes of the truth


def with_truth(truths: Truths, place: int, truth: Truth) -> Truths:
    return (*truths[:place], truth, *truths[place + 1 :])


def moved(truths: Truths, place: int, number: int, where: str) -> Truths:
    """The truth with one request somewhere else."""
    return _with_request(truths, place, number, Request(where, truths[place].requests[number - 1].had_effect))


def _with_request(truths: Truths, place: int, number: int, request: Request) -> Truths:
    truth = truths[place]
    requests = (*truth.requests[: number - 1], request, *truth.requests[number:])
    changed = Truth(truth.applied, truth.by_hand, truth.memory, truth.look, requests)
    return (*truths[:place], changed, *truths[place + 1 :])


def landed(truths: Truths, place: int, number: int, where: str, applies: bool) -> Truths:
    truth = truths[place]
    request = truth.requests[number - 1]
    truths = _with_request(truths, place, number, Request(where, request.had_effect or applies))
    if not applies:
        return truths
    truth = truths[place]
    return with_truth(truths, place, truth._replace(applied=truth.applied + 1, memory=FRESH))


def unheard(truth: Truth) -> Truth:
    """The truth when whoever listened is dead: what was not sent never will be, answers reach nobody."""
    where = {WIRE: UNHEARD, UNHEARD: UNHEARD}
    return truth._replace(requests=tuple(r._replace(place=where.get(r.place, NOWHERE)) for r in truth.requests))


def faded(truth: Truth) -> Truth:
    return truth._replace(memory=FADING if truth.memory == FRESH else truth.memory)
