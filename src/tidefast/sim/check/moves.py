"""What can happen next: every verb of every worker that ever was, the provider, the network, deaths, people and time.

A worker has no state: a zombie is every verb under every right that was ever granted, and one that never was. Decisions
are remembered by the rows that they were shown (`needs`), so that equal questions are asked once; each answer is judged
when it is first given. A refused verb leaves its state as it was and is counted.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tidefast.protocol import evolve as evolution
from tidefast.protocol import machine
from tidefast.protocol.commands import Command, Grant, Lapse, OperatorVerb, Release, Renew, Settle
from tidefast.protocol.contracts import Contract
from tidefast.protocol.ids import StepId
from tidefast.protocol.records import NOT_SETTLED, Step, View
from tidefast.protocol.recovery import is_presumed
from tidefast.protocol.run import blank
from tidefast.protocol.trace import Start
from tidefast.protocol.verdicts import Decision, Refused, Renewed
from tidefast.sim.check import world
from tidefast.sim.check.commands import Commands, Key
from tidefast.sim.check.configs import Config
from tidefast.sim.check.properties import (
    judge_events,
    judge_receipt,
    judge_repeat,
    judge_truth,
    judge_verdict,
    start_of,
)
from tidefast.sim.check.sometimes import seen_in
from tidefast.sim.check.world import (
    ALIVE,
    ANSWERS,
    CLOSED,
    FRESH,
    LANDED,
    LANDING,
    NAMESPACE,
    NO_BACKUP,
    NOW,
    NOWHERE,
    PASSED,
    READY,
    RUN,
    SPENT,
    UNHEARD,
    UNKNOWN,
    WIRE,
    Book,
    Look,
    Request,
    Shape,
    Truth,
    Truths,
    faded,
    landed,
    moved,
    unheard,
    with_truth,
)

State = int  # books, truth and faults left, each by its number: at most 64 bits, and never two states on one
TRUTH_BITS, FAULT_BITS = 24, 4
FAULT_MASK, TRUTH_MASK = (1 << FAULT_BITS) - 1, (1 << TRUTH_BITS) - 1


ABOUT_THE_LEASE = (Grant, Lapse, OperatorVerb, Release, Renew)


class Move(NamedTuple):
    """One thing that happened. `key` names it for a replay, `cost` is 1 if it is a fault."""

    key: Key
    cost: int = 0


class Plan(NamedTuple):
    """A command and which rows it must be shown; `places` None: every step."""

    command: Command
    wall_back: bool
    places: tuple[int, ...] | None
    forgotten: bool


class Outcome(NamedTuple):
    """What one verb does to one set of books."""

    book: int
    answer: str
    wrote: tuple[str, ...]
    seen: tuple[str, ...]


class Moves:
    """All states of one configuration and what leads from each to the next."""

    def __init__(self, config: Config) -> None:
        self.config, self.shape = config, Shape(config)
        self.commands = Commands(self.shape)
        self.books: list[Book] = []
        self.truths: list[Truths] = []
        self._book_ids: dict[Book, int] = {}
        self._truth_ids: dict[Truths, int] = {}
        self._row_ids: dict[object, int] = {}
        self._rows: list[tuple[int, ...]] = []  # of each book: the numbers of its head and steps
        self._plans: dict[Key, Plan] = {}
        self._last_start: tuple[int, Start] = (-1, Start())
        self._leases: dict[tuple[object, ...], View] = {}
        self._refused: set[tuple[object, ...]] = set()
        self._outcomes: list[dict[Key, Outcome]] = []
        self._by_verbs: dict[int, tuple[tuple[tuple[Move, Outcome], ...], int, int]] = {}
        self._settled_forms: dict[tuple[int, int], tuple[int, int]] = {}
        self.seen: Counter[str] = Counter()
        self.asking: Move = Move(())  # what is being tried, for whoever must tell of it when a law breaks

    # --- numbers for records

    def book_id(self, book: Book) -> int:
        found = self._book_ids.get(book)
        if found is None:
            found = self._book_ids[book] = len(self.books)
            self.books.append(book)
            self._outcomes.append({})
            rows = self._row_ids
            parts = ((book.head, book.grace, book.window), *book.steps)
            self._rows.append(tuple(rows.setdefault(part, len(rows)) for part in parts))
        return found

    def truth_id(self, truths: Truths) -> int:
        found = self._truth_ids.get(truths)
        if found is None:
            found = self._truth_ids[truths] = len(self.truths)
            self.truths.append(truths)
            if found > TRUTH_MASK:
                raise OverflowError("more truths than a state has room for")
        return found

    def state(self, book: int, truth: int, faults: int) -> State:
        return (book << (TRUTH_BITS + FAULT_BITS)) | (truth << FAULT_BITS) | faults

    def parts(self, state: State) -> tuple[int, int, int]:
        return state >> (TRUTH_BITS + FAULT_BITS), (state >> FAULT_BITS) & TRUTH_MASK, state & FAULT_MASK

    def first(self) -> State:
        created = self.commands.created()
        empty = View(NAMESPACE, 0, frozenset((ALIVE,)))
        view = empty
        for event in machine.decide(empty, created, world.now_of(Book(blank(RUN), ()))).events:
            view = evolution.evolve(view, event, RUN)
        assert view.run is not None
        book = world.normal_book(self.shape, Book(view.run, (None,) * len(self.shape.names)))
        return self.state(self.book_id(book), self.truth_id((Truth(),) * len(self.shape.tools)), self.config.faults)

    # --- the rules

    def outcome(self, book_id: int, key: Key) -> Outcome:
        """What a verb does to these books; decided, applied and judged when it is first asked."""
        found = self._outcomes[book_id].get(key)
        if found is None:
            found = self._ask(book_id, key)
            if found.book != book_id or key[0] in ("settle", "resolve"):
                self._outcomes[book_id][key] = found
        return found

    def _ask(self, book_id: int, key: Key) -> Outcome:
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(key)
        self.asking = Move(key)
        book = self.books[book_id]
        places = plan.places
        if places is None:
            places = tuple(range(len(self.shape.names)))
        missing = world.forgotten(book) if plan.forgotten else ()
        rows = self._rows[book_id]
        asked = (key, rows[0], missing, *[rows[place + 1] for place in places])
        if asked in self._refused:  # refused before, by the same rows
            return Outcome(book_id, "refused", (), ())
        shown = self._shown(book, places, missing)
        now = world.now_of(book, wall_back=plan.wall_back)
        command = plan.command
        decision = machine.decide(shown, command, now)
        is_lapsed = book.head.is_live and now.ms >= max(book.head.expires_at_ms, now.grace_from_ms + world.LEASE_MS)
        judge_verdict(book, command, decision, is_lapsed)
        if not decision.events and not isinstance(decision.verdict, Renewed):
            seen = seen_in(book, command, decision, None)
            for name in seen:
                self.seen[name] += 1
            if isinstance(command, Settle):
                self._receipt(book, book.steps, command)
            self._refused.add(asked)
            return Outcome(book_id, answer_of(decision), (), seen)
        return self._write(book_id, shown, plan, decision)

    def _plan(self, key: Key) -> Plan:
        command, wall_back = self.commands.of(key)
        wanted = machine.needs(command)
        places = tuple(self.shape.place[name] for name in wanted.steps if name in self.shape.place)
        return Plan(command, wall_back, None if wanted.effects else places, wanted.forgotten)

    def _shown(self, book: Book, places: tuple[int, ...], missing: tuple[StepId, ...]) -> View:
        steps = {step.step_id: step for place in places if (step := book.steps[place]) is not None}
        contracts = {step.contract: self.shape_contract(step) for step in steps.values() if step.contract}
        alive = frozenset((ALIVE,))
        return View(NAMESPACE, book.incarnation, alive, book.head, steps, contracts, missing, book.recovery)

    def shape_contract(self, step: Step) -> Contract:
        return self.commands.contracts[step.contract]

    def _write(self, book_id: int, shown: View, plan: Plan, decision: Decision) -> Outcome:
        book, command = self.books[book_id], plan.command
        view = self._judged(book_id, shown, plan, decision)
        steps = tuple(view.steps.get(name, book.steps[place]) for place, name in enumerate(self.shape.names))
        assert view.run is not None
        after = book._replace(head=view.run, steps=steps)
        if isinstance(command, Settle):
            self._receipt(book, steps, command)
        seen = seen_in(book, command, decision, after)
        next_id = self.book_id(world.normal_book(self.shape, after))
        return Outcome(next_id, answer_of(decision), tuple(event.kind for event in decision.events), seen)

    def _judged(self, book_id: int, shown: View, plan: Plan, decision: Decision) -> View:
        """What a decision leads to, judged by the laws. A verb about the lease alone is judged once for each head."""
        book = self.books[book_id]
        about_lease = plan.places == () and not book.head.end and isinstance(plan.command, ABOUT_THE_LEASE)
        asked = (id(plan), self._rows[book_id][0])
        if about_lease and asked in self._leases:
            return self._leases[asked]
        view = shown
        for event in decision.events:
            view = evolution.evolve(view, event, RUN)
        if isinstance(decision.verdict, Renewed) and view.run is not None:
            view = view._replace(run=view.run._replace(expires_at_ms=decision.verdict.expires_at_ms))
        steps = tuple(view.steps.get(name, book.steps[place]) for place, name in enumerate(self.shape.names))
        assert view.run is not None
        after = book._replace(head=view.run, steps=steps)
        judge_events(self._start(book_id), decision.events, after, self.commands.contracts)
        again = machine.decide(view, plan.command, world.now_of(after))
        judge_repeat(decision, again, plan.command)
        if about_lease:
            self._leases[asked] = view
        return view

    def _receipt(self, book: Book, after: tuple[Step | None, ...], command: Settle) -> None:
        place = self.shape.place[command.step_id]
        old, new = book.steps[place], after[place]
        if old is not None and new is not None:
            judge_receipt(old, command, new)

    def _start(self, book_id: int) -> Start:
        if self._last_start[0] != book_id:
            self._last_start = (book_id, start_of(self.books[book_id]))
        return self._last_start[1]

    # --- one step of the world

    def successors(self, state: State) -> Iterator[tuple[Move, State, tuple[str, ...]]]:
        """Every move that changes something, with what it leads to and what is worth counting in it."""
        book, truth, faults = self.parts(state)
        for move, outcome in self.by_verbs(book)[0]:
            if move.cost <= faults:
                self.asking = move
                yield move, self._next(outcome.book, truth, faults - move.cost), outcome.seen
        for move, book2, truths, seen in self._by_world(book, truth, faults > 0):
            if move.cost <= faults:
                self.asking = move
                yield move, self._next(book2, self.truth_id(truths), faults - move.cost), seen

    def stays(self, state: State) -> tuple[int, int]:
        """How many verbs change nothing here, and how many of them were told that their epoch is dead."""
        return self.by_verbs(self.parts(state)[0])[1:]

    def by_verbs(self, book: int) -> tuple[tuple[tuple[Move, Outcome], ...], int, int]:
        """What verbs and clocks do to books whatever the truth is, and how many verbs do nothing."""
        found = self._by_verbs.get(book)
        if found is not None:
            return found
        changing: list[tuple[Move, Outcome]] = []
        stays = stale = 0
        for key, cost, is_stale in self.commands.verbs(self.books[book]):
            outcome = self.outcome(book, key)
            if outcome.book == book:
                stays += 1
                stale += is_stale
            else:
                changing.append((Move(key, cost), outcome))
        changing.extend(self._by_clock(book))
        found = self._by_verbs[book] = (tuple(changing), stays, stale)
        return found

    def _by_clock(self, book_id: int) -> Iterator[tuple[Move, Outcome]]:
        book = self.books[book_id]
        head = book.head
        if head.is_live and (head.expires_at_ms > NOW or book.grace):
            late = book._replace(head=head._replace(expires_at_ms=PASSED), grace=False)
            yield Move(("lease passes",)), self._quiet(late)
        if head.not_before_ms > NOW:
            yield Move(("pause passes",)), self._quiet(book._replace(head=head._replace(not_before_ms=0)))

    def _quiet(self, book: Book, *seen: str) -> Outcome:
        return Outcome(self.book_id(world.normal_book(self.shape, book)), "", (), seen)

    def _next(self, book: int, truth: int, faults: int) -> State:
        """The normal form of books and truth together."""
        pair = (book, truth)
        found = self._settled_forms.get(pair)
        if found is None:
            found = self._settled_forms[pair] = self._settle_form(book, truth)
        return self.state(found[0], found[1], faults)

    def _settle_form(self, book_id: int, truth_id: int) -> tuple[int, int]:
        book, truths = self.books[book_id], list(self.truths[truth_id])
        steps = list(book.steps)
        for place in range(len(truths)):
            step = book.steps[place]
            truths[place] = world.normal_truth(step, truths[place])
            if step is not None:
                truths[place] = self._heard_out(book_id, place, step, truths[place])
        judge_truth(self.shape, book, tuple(truths))
        for place, truth in enumerate(truths):
            step = book.steps[place]
            if step is None or not step.attempts:
                continue
            if world.can_be_stripped(step, truth):
                steps[place], truths[place] = world.stripped(step, truth)
            elif self.config.restores and not book.window:
                continue  # a backup may hold fewer attempts: each request must keep its place
            elif not step.settled_seq:
                retries = self.shape.tools[place].contract.retries
                steps[place], truths[place] = world.shortened(step, truth, retries)
        if steps != list(book.steps):
            book_id = self.book_id(world.normal_book(self.shape, book._replace(steps=tuple(steps))))
        return book_id, self.truth_id(tuple(truths))

    def _heard_out(self, book_id: int, place: int, step: Step, truth: Truth) -> Truth:
        """Without the answers that would change nothing, and without unheard requests that can't."""
        requests = list(truth.requests)
        for number, request in enumerate(requests, 1):
            if request.place in ANSWERS:
                if self.outcome(book_id, ("settle", place, number, ANSWERS[request.place])).book == book_id:
                    requests[number - 1] = request._replace(place=NOWHERE)
            elif request.place == UNHEARD and truth.memory == FRESH and step.dedups:
                requests[number - 1] = request._replace(place=NOWHERE)
        return truth._replace(requests=tuple(requests))

    # --- what depends on the truth

    def _by_world(self, book: int, truth: int, has_faults: bool) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        truths = self.truths[truth]
        for place, known in enumerate(truths):
            step = self.books[book].steps[place]
            if step is None:
                continue
            for number, request in enumerate(known.requests, 1):
                yield from self._request_moves(book, truths, place, step, number, request)
            yield from self._operator_moves(book, truths, place, step)
        if self.config.restores:
            yield from self._window_moves(book, truths)
        if has_faults:
            yield from self._disasters(book, truths)

    def _request_moves(
        self, book: int, truths: Truths, place: int, step: Step, number: int, request: Request
    ) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        attempt = step.attempts[number - 1]
        is_ahead = attempt.deadline_ms > NOW
        if request.place == READY and is_ahead:
            yield Move(("send", place, number)), book, moved(truths, place, number, WIRE), ()
            yield Move(("not sent", place, number), 1), book, moved(truths, place, number, "unsent"), ("unsent",)
        if request.place in (WIRE, UNHEARD) and is_ahead:
            yield from self._landings(book, truths, place, number, request)
        if request.place in ANSWERS:
            key: Key = ("settle", place, number, ANSWERS[request.place])
            outcome = self.outcome(book, key)
            yield Move(key), outcome.book, moved(truths, place, number, NOWHERE), outcome.seen
        if request.place in (WIRE, "yes", "no") and attempt.state == "out":
            key = ("settle", place, number, "doubted")
            outcome = self.outcome(book, key)
            yield Move(("give up", place, number), 1), outcome.book, truths, (*outcome.seen, "gave_up")
        if is_ahead and attempt.state in NOT_SETTLED and not is_presumed(attempt):
            yield self._deadline(book, truths, place, number, request)

    def _deadline(
        self, book: int, truths: Truths, place: int, number: int, request: Request
    ) -> tuple[Move, int, Truths, tuple[str, ...]]:
        """A deadline goes by. It is a fault if somebody still waits for that attempt; waiting out a doubt is none."""
        step = self.books[book].steps[place]
        assert step is not None
        attempt = step.attempts[number - 1]
        then = {READY: "unsent", WIRE: "unclear", UNHEARD: NOWHERE}.get(request.place, request.place)
        waits = attempt.state == "out" and attempt.owner == ALIVE and request.place != NOWHERE
        outcome = self._quiet(world.passed(self.books[book], place, number))
        seen = ("deadline_in_flight",) if waits else ()
        return Move(("deadline", place, number), int(waits)), outcome.book, moved(truths, place, number, then), seen

    def _landings(
        self, book: int, truths: Truths, place: int, number: int, request: Request
    ) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        """A request reaches its provider, before its deadline."""
        for word, answer, applies, cost, seen in self._answers(truths, place):
            key: Key = ("land", place, number, word)
            heard = answer if request.place == WIRE else NOWHERE
            after = landed(truths, place, number, heard, applies)
            if request.place == UNHEARD and cost:
                continue  # nobody hears which answer it was
            late = ("landed_unheard",) if request.place == UNHEARD and applies else ()
            yield Move(key, cost), book, after, (*seen, *late)
        if self.config.doubles and request.place == WIRE and self.shape.tools[place].contract.dedups:
            for word, _, applies, cost, seen in self._answers(truths, place):
                if not cost:
                    after = landed(truths, place, number, WIRE, applies)
                    if after != truths:
                        yield Move(("double", place, number, word), 1), book, after, (*seen, "doubled_request")
        if request.place == UNHEARD:
            yield Move(("lost", place, number)), book, moved(truths, place, number, NOWHERE), ()

    def _answers(self, truths: Truths, place: int) -> Iterator[tuple[str, str, bool, int, tuple[str, ...]]]:
        """(word, answer under way, takes effect, is a fault, what is worth counting) for one landing."""
        truth, contract = truths[place], self.shape.tools[place].contract
        knows = contract.dedups and truth.memory != UNKNOWN
        if knows:
            yield "known", "yes", False, 0, ("deduped",)
            yield "known, answer lost", "unclear", False, 1, ("deduped",)
        if knows and truth.memory == FRESH:
            return
        new = ("forgotten_key",) if knows else ()
        target = self.shape.undo_of[place]
        if target is not None and self.shape.net(truths, target) == 0:
            yield "nothing to undo", "no", False, 0, ("nothing_to_undo",)
            return
        acts = contract.effect != "none"
        yield "applied", "yes", acts, 0, new
        if self.config.declines:
            yield "declined", "no", False, 0, ("declined",)
        yield "applied, answer lost", "unclear", acts, 1, ("error_after_commit", *new)
        yield "lost on the way", "unclear", False, 1, ("lost_request",)
        if self.config.unlisted:
            yield "applied, strange answer", "strange", acts, 1, ("strange_answer", *new)
            yield "strange answer", "strange", False, 1, ("strange_answer",)

    def _operator_moves(
        self, book: int, truths: Truths, place: int, step: Step
    ) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        """People say the truth, of the moment when they looked."""
        is_diverged = step.step_id in self.books[book].head.diverged
        if step.state not in ("in_doubt", "held", "fenced") and not is_diverged:
            return
        truth = truths[place]
        net = self.shape.net(truths, place)
        has_passed = all(a.deadline_ms <= NOW for a in step.attempts if a.state in NOT_SETTLED)
        for verdict in ("applied", "compensated") if net else ("not_applied", "refused", "compensated"):
            if verdict == "compensated" and (is_diverged != (net == 0) or not (is_diverged or self.config.by_hand)):
                continue
            key: Key = ("resolve", place, verdict, "late" if has_passed else "early", len(step.attempts))
            outcome = self.outcome(book, key)
            if outcome.book != book:
                after = with_truth(
                    truths, place, truth._replace(by_hand=truth.by_hand + (verdict == "compensated" and net))
                )
                yield Move(key), outcome.book, after, outcome.seen
        yield from self._probe_moves(book, truths, place, "late" if has_passed else "early", net, len(step.attempts))
        if not self.config.slow_looks:
            return
        look = Look(net, len(step.attempts), has_passed and self.books[book].window != LANDING)
        if truth.look is None and step.state != "fenced":
            yield Move(("look", place)), book, with_truth(truths, place, truth._replace(look=look)), ()
        if truth.look is not None:
            yield from self._speaks(book, truths, place, truth.look)

    def _probe_moves(
        self, book: int, truths: Truths, place: int, when: str, net: int, attempts: int
    ) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        """A provider that can be asked says the truth of the moment when it was asked, or nothing clear."""
        if self.shape.tools[place].contract.probe is None:
            return
        for word in ("found" if net else "absent", "unclear"):
            key: Key = ("probe", place, word, when, attempts)
            outcome = self.outcome(book, key)
            if outcome.book != book:
                yield Move(key), outcome.book, truths, (*outcome.seen, f"probe_{word}")

    def _speaks(
        self, book: int, truths: Truths, place: int, look: Look
    ) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        """An operator speaks of what was seen a while ago."""
        for verdict in ("applied",) if look.net else ("not_applied", "refused"):
            key: Key = ("resolve", place, verdict, "late" if look.is_late_enough else "early", look.attempts)
            outcome = self.outcome(book, key)
            after = with_truth(truths, place, truths[place]._replace(look=None))
            seen = (*outcome.seen, "spoke_late") if outcome.book != book else ("spoke_too_late",)
            yield Move(("speak", *key[1:])), outcome.book, after, seen
        when = "late" if look.is_late_enough else "early"
        for move, heard, _, seen in self._probe_moves(book, truths, place, when, look.net, look.attempts):
            after = with_truth(truths, place, truths[place]._replace(look=None))
            yield Move(("heard", *move.key[1:])), heard, after, (*seen, "probe_heard_late")

    def _window_moves(self, book_id: int, truths: Truths) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        """A backup is made; lost requests land, until they can no more; an operator who knows closes the window."""
        book = self.books[book_id]
        is_time = not self.config.early_backup or not any(book.steps)
        if book.backup == NO_BACKUP and not book.head.end and is_time:
            yield Move(("backup",)), self.book_id(book._replace(backup=book_id)), truths, ()
        for place, truth in enumerate(truths):
            if book.window == LANDING and truth.lost is not None and truth.lost.place == UNHEARD:
                applies = not (self.shape.tools[place].contract.dedups and truth.memory != UNKNOWN)
                lost = Request(NOWHERE, truth.lost.had_effect or applies)
                landed_now = truth._replace(applied=truth.applied + applies, memory=FRESH, lost=lost)
                yield Move(("lost lands", place)), book_id, with_truth(truths, place, landed_now), ("lost_landed",)
        if book.window == LANDING:
            over = tuple(world.no_longer_lost(step, truth) for step, truth in zip(book.steps, truths, strict=False))
            yield Move(("lost time passes",)), self._quiet(world.lost_time_over(book)).book, over, ()
        if book.window == LANDED and not any(truth.lost is not None and truth.lost.had_effect for truth in truths):
            closed = self._quiet(book._replace(window=CLOSED)).book
            yield Move(("close window",)), closed, tuple(truth._replace(lost=None) for truth in truths), ()

    def _restore(self, book: Book, truths: Truths) -> tuple[Move, int, Truths, tuple[str, ...]]:
        """The store is lost and its backup put into service; every lease in it is ended before anybody is served."""
        old = world.owners_gone(self.books[book.backup])._replace(backup=SPENT, window=LANDING, grace=False)
        after = tuple(world.restored_truth(step, truth) for step, truth in zip(old.steps, truths, strict=False))
        restored = self.book_id(world.normal_book(self.shape, old))
        if old.head.is_live:
            restored = self.outcome(restored, ("preempt",)).book
        seen = (
            "restored",
            *(("restored_over_a_lost_effect",) if any(t.lost and t.lost.had_effect for t in after) else ()),
        )
        return Move(("restore",), 1), restored, after, seen

    def _disasters(self, book_id: int, truths: Truths) -> Iterator[tuple[Move, int, Truths, tuple[str, ...]]]:
        book = self.books[book_id]
        owned = any(a.owner == ALIVE for step in book.steps if step is not None for a in step.attempts)
        heard = any(r.place not in (UNHEARD, NOWHERE) for truth in truths for r in truth.requests)
        if heard or (self.config.restarts and book.head.is_live and not book.grace):
            after = tuple(unheard(truth) for truth in truths)
            seen = _at_death(truths)
            if heard:
                yield Move(("gateway dies",), 1), self._quiet(world.owners_gone(book)).book, after, seen
            if self.config.restarts and book.head.is_live:
                restarted = world.owners_gone(book)._replace(grace=True)
                restarted = restarted._replace(head=book.head._replace(expires_at_ms=PASSED))
                yield Move(("restart",), 1), self._quiet(restarted).book, after, (*seen, "restarted")
        if book.backup >= 0:
            yield self._restore(book, truths)
        if self.config.exiles and owned and heard:
            yield Move(("exile",), 1), self._quiet(world.owners_gone(book)).book, truths, ("exiled",)
        if self.config.days:
            waiting = any(
                a.state in NOT_SETTLED and a.deadline_ms > NOW
                for step in book.steps
                if step is not None
                for a in step.attempts
            )
            later = self._quiet(world.a_day_later(book)).book
            if not waiting and later != book_id:
                yield Move(("a day",), 1), later, tuple(faded(truth) for truth in truths), ("day_passed",)


def _at_death(truths: Truths) -> tuple[str, ...]:
    places = {request.place for truth in truths for request in truth.requests}
    seen = [
        *(("death_between_intent_and_send",) if READY in places else ()),
        *(("death_between_send_and_receipt",) if WIRE in places or places & set(ANSWERS) else ()),
    ]
    return tuple(seen)


def answer_of(decision: Decision) -> str:
    verdict = decision.verdict
    return f"{verdict.code}: {verdict.reason}" if isinstance(verdict, Refused) else type(verdict).__name__
