"""A random walk over the rules in a world that has its own truth: any worker, any epoch, any order, at any time.

The world: a provider that dedups, forgets, declines, answers 500 after it has applied, or swallows the answer; requests
that stay on the wire until their deadline; two instances at a time, which die with what they knew; zombies with every
epoch ever granted; an operator who speaks the truth as of the moment when they looked.

After each move the books are judged against the provider's own count.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.protocol.driver import (
    KEYED,
    KEYLESS,
    MAIL,
    PAY,
    READ,
    REFUND,
    TIMEOUT_MS,
    UNDO,
    Book,
    code,
)

from tidefast.protocol.contracts import Contract
from tidefast.protocol.ids import StepId
from tidefast.protocol.records import HAD_NO_EFFECT
from tidefast.protocol.verdicts import Decision, Send

LOOK = StepId("look")
CONTRACTS: dict[StepId, Contract] = {
    PAY: KEYED._replace(retries=1),
    MAIL: KEYLESS,
    LOOK: READ,
    UNDO: REFUND._replace(retries=1),
}
HALF_HOUR_MS = 1_800_000


@dataclass
class Request:
    """One attempt outside the books. Its fate is its own: nothing here reads what the rules think of it."""

    step_id: StepId
    attempt: int
    key: str
    owner: str
    deadline_ms: int
    place: str = "ready"  # ready, wire, landed, gone
    status: int = 0
    had_effect: bool = False


class Broken(AssertionError):
    """The walk found a state that a law forbids; the message holds the moves that led there."""


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.steps = ((PAY,), (PAY,), (PAY, PAY, MAIL, LOOK))[seed % 3]
        self.book = Book()
        self.seen: Counter[str] = Counter()
        self.applied: Counter[StepId] = Counter()
        self.known: dict[tuple[StepId, str], int] = {}
        self.requests: list[Request] = []
        self.instances = ["boot-1", "boot-2"]
        self.born = 2
        self.looks: list[tuple[StepId, int, int, int]] = []  # step, net, looked at, attempts
        self.trail: list[str] = []
        self._instances()

    def _instances(self) -> None:
        self.book.view = self.book.view._replace(instances=frozenset(self.instances))

    def net(self, step_id: StepId) -> int:
        return self.applied[step_id] - (self.applied[UNDO] if step_id == PAY else 0)

    # --- moves

    def walk(self, moves: int) -> None:
        verbs: list[tuple[int, Any]] = [
            (12, self.ask), (4, self.undo), (9, self.send), (9, self.land), (6, self.hear), (3, self.give_up),
            (2, self.die), (3, self.sweep), (6, self.take_over), (2, self.preempt), (3, self.tick), (2, self.look),
            (4, self.speak), (2, self.checkpoint), (1, self.release), (2, self.end), (1, self.save), (2, self.renew),
            (1, self.oversee),
        ]  # fmt: skip
        names = [verb for weight, verb in verbs for _ in range(weight)]
        for _ in range(moves):
            verb = self.random.choice(names)
            self.trail.append(verb.__name__)
            verb()
            self.judge()
            if self.book.head.end:
                self.seen[f"ended_{self.book.head.end}"] += 1
                break
        self.finish()

    def anyone(self) -> Any:
        """A right of any epoch ever granted: mostly the newest."""
        newest = self.book.head.epoch
        epoch = newest if self.random.random() < 0.7 else self.random.randint(1, max(newest, 1))
        return self.book.right(epoch)

    def say(self, right: Any, decision: Decision) -> Decision:
        head = self.book.head
        self.trail[-1] += f" e{right.epoch} at {self.book.ms}: {code(decision)} {[e.kind for e in decision.events]}"
        if right.epoch != head.epoch:
            self.seen["zombie_refused"] += 1
            if code(decision) not in ("stale_epoch", "run_ended") or decision.events:
                self.fail(f"a zombie got {decision.verdict}")
        return decision

    def asked(self, step_id: StepId, decision: Decision, owner: str) -> None:
        verdict = decision.verdict
        if not isinstance(verdict, Send):
            return
        self.seen["sent"] += 1
        self.seen["replayed"] += verdict.is_replay
        step = self.book.step(step_id)
        if len({attempt.epoch for attempt in step.attempts}) > 1:
            self.seen["sent_again_by_a_successor"] += 1
        self.requests.append(Request(step_id, verdict.attempt, verdict.key, owner, verdict.deadline_ms))

    def ask(self) -> None:
        if not self.book.head.epoch:
            return
        right, step_id = self.anyone(), self.random.choice(self.steps)
        owner = self.random.choice(self.instances)
        args = {"other": 1} if self.random.random() < 0.05 else None
        stored = self.random.random() < 0.1
        decision = self.book.admit(step_id, CONTRACTS[step_id], args, right=right, owner=owner, stored=stored)
        self.asked(step_id, self.say(right, decision), owner)
        self.trail[-1] += f" {step_id}"

    def undo(self) -> None:
        if not self.book.head.epoch:
            return
        right, owner = self.anyone(), self.random.choice(self.instances)
        gone = self.random.random() < 0.05
        contract = None if gone else CONTRACTS[UNDO]
        decision = self.say(right, self.book.compensate(PAY, contract, right=right, owner=owner))
        self.seen["undo_held_unwritten"] += gone and bool(decision.events)
        self.asked(UNDO, decision, owner)

    def pick(self, place: str) -> Request | None:
        there = [request for request in self.requests if request.place == place]
        return self.random.choice(there) if there else None

    def send(self) -> None:
        """The owner's last look at the deadline, then the first byte; what is late is dropped and known as unsent."""
        request = self.pick("ready")
        if request is None:
            return
        if request.owner not in self.instances:
            request.place = "gone"
        elif self.book.ms >= request.deadline_ms or self.random.random() < 0.1:
            request.place = "gone"
            self.seen["unsent"] += 1
            self.settle(request, "unsent")
        else:
            request.place = "wire"

    def land(self) -> None:
        """A request reaches the provider, before its deadline or never."""
        request = self.pick("wire")
        if request is None:
            return
        if self.book.ms >= request.deadline_ms or self.random.random() < 0.1:
            request.place = "gone"
            return
        request.place = "landed"
        if request.owner not in self.instances or request.attempt < len(self.book.step(request.step_id).attempts):
            self.seen["landed_late"] += 1
        request.status = self.provide(request)
        if request.status == 200 and self.random.random() < 0.2:
            request.status = 500
            self.seen["error_after_commit"] += 1

    def provide(self, request: Request) -> int:
        contract = CONTRACTS[request.step_id]
        first = self.known.get((request.step_id, request.key))
        if contract.dedups and first is not None:
            if self.book.ms - first <= contract.key_ttl_ms:
                self.seen["deduped"] += 1
                return 200
            self.seen["forgotten"] += 1
        chance = self.random.random()
        if chance < 0.25 or (request.step_id == UNDO and self.net(PAY) == 0):
            self.seen["declined"] += 1
            return 402
        if chance < 0.3:
            return self.random.choice((418, 500))
        self.applied[request.step_id] += 1
        self.known[(request.step_id, request.key)] = self.book.ms
        request.had_effect = True
        return 200

    def hear(self) -> None:
        """The owner hears the answer, perhaps twice, perhaps long after it gave up."""
        request = self.pick("landed")
        if request is None or request.owner not in self.instances:
            return
        outcome = {200: "applied", 402: "refused", 418: "unlisted"}.get(request.status, "doubted")
        if self.book.step(request.step_id).attempts[request.attempt - 1].epoch != self.book.head.epoch:
            self.seen["late_answer"] += 1
        before = self.book.head.seq
        self.settle(request, outcome)
        if self.random.random() < 0.2:
            after = self.book.head.seq
            self.settle(request, outcome)
            if after > before and self.book.head.seq > after:
                self.fail("the same answer told twice was written twice")
            self.seen["told_twice"] += 1
        if self.random.random() < 0.8:
            request.place = "gone"

    def settle(self, request: Request, outcome: str) -> None:
        decision = self.book.settle(outcome, request.step_id, request.attempt, reason=outcome)
        self.trail[-1] += f" settle {request.step_id}/{request.attempt} {outcome} at {self.book.ms}: {decision.verdict}"
        if "run_frozen" in [event.kind for event in decision.events]:
            self.seen["diverged"] += 1
            if self.book.step(request.step_id).state != "compensated":
                self.fail("an honest world was called diverged")

    def give_up(self) -> None:
        """The owner stops waiting: a doubt, whatever becomes of the request."""
        request = self.pick("wire")
        if request is not None and request.owner in self.instances:
            self.settle(request, "doubted")

    def die(self) -> None:
        """An instance ends with what it knew; what it had on the wire goes its way."""
        gone = self.instances.pop(self.random.randrange(2))
        self.born += 1
        self.instances.append(f"boot-{self.born}")
        self._instances()
        self.trail[-1] += f" {gone}"
        for request in self.requests:
            if request.owner == gone and request.place == "ready":
                request.place = "gone"
        self.seen["instance_died"] += 1

    def sweep(self) -> None:
        for step_id in list(self.book.view.steps):
            decision = self.book.mark_lost(step_id)
            self.seen["booked_lost"] += bool(decision.events)
        self.book.lapse()

    def take_over(self) -> None:
        self.seen["granted"] += code(self.book.grant()) == "Granted"

    def preempt(self) -> None:
        if any(request.place in ("wire", "landed") for request in self.requests) and self.book.head.is_live:
            self.seen["preempted_in_flight"] += 1
        if self.book.step(UNDO).state == "fenced" if UNDO in self.book.view.steps else False:
            self.seen["undo_preempted"] += 1
        self.book.preempt()
        if self.random.random() < 0.7:
            self.take_over()

    def oversee(self) -> None:
        """A person stops the run, lets it go on, or ends it."""
        book = self.book
        stopped = [book.resume] * book.head.paused + [book.thaw] * bool(book.head.frozen)
        verb = self.random.choice(stopped or [book.pause, book.freeze, book.cancel])
        decision = verb()
        self.trail[-1] += f" {verb.__name__}: {code(decision)}"
        self.seen[verb.__name__] += bool(decision.events)

    def tick(self) -> None:
        chance = self.random.random()
        if chance < 0.6:
            self.book.ms += self.random.randint(1, 10_000)
        elif chance < 0.93:
            self.book.ms += TIMEOUT_MS + 1
        else:
            self.book.ms += HALF_HOUR_MS + 60_000
            if self.random.random() < 0.5:
                self.book.wall_offset -= 2 * HALF_HOUR_MS  # the wall clock is set back
            self.book.mark_ms = max(self.book.mark_ms, self.book.now.wall_ms)

    def look(self) -> None:
        """The operator looks at the provider, and may speak of it much later."""
        for step_id, step in self.book.view.steps.items():
            if step.state in ("in_doubt", "held") or self.book.head.frozen:
                self.looks.append((step_id, self.applied[step_id], self.book.ms, len(step.attempts)))

    def speak(self) -> None:
        if self.looks:
            step_id, count, looked_at, attempts = self.looks.pop(self.random.randrange(len(self.looks)))
            verdict = "applied" if count else self.random.choice(("not_applied", "refused"))
            if not (self.book.head.frozen and self.book.step(step_id).state not in ("in_doubt", "held")):
                decision = self.book.resolve(verdict, step_id, looked_at_ms=looked_at, expect_attempts=attempts)
                self.seen["resolved"] += bool(decision.events)
                self.trail[-1] += f" {step_id} {verdict} looked at {looked_at}: {code(decision)}"
        if self.book.head.frozen and self.random.random() < 0.5:
            self.book.thaw()
        if self.book.head.paused:
            self.book.resume()

    def checkpoint(self) -> None:
        if not self.book.head.epoch:
            return
        right, before = self.anyone(), self.book.head
        number = self.random.choice((before.checkpoint, before.checkpoint + 1))
        if self.say(right, self.book.checkpoint(number, right=right)).events:
            self.seen["checkpoint"] += 1
            if number <= before.checkpoint or any(s.is_mutating and s.is_unsettled for s in before.open):
                self.fail("a stale checkpoint, or one over an open effect")

    def release(self) -> None:
        if self.book.head.epoch:
            right = self.anyone()
            self.book.release(right)

    def renew(self) -> None:
        if self.book.head.epoch:
            right = self.anyone()
            self.say(right, self.book.renew(right))

    def save(self) -> None:
        if self.book.head.epoch:
            right = self.anyone()
            self.say(right, self.book.save_result("sum", str(right.epoch), right))

    def end(self) -> None:
        if not self.book.head.epoch:
            return
        right = self.anyone()
        if self.random.random() < 0.6:
            self.say(right, self.book.fail(right))
        elif PAY in self.book.view.steps:
            self.say(right, self.book.complete(right, asked=self.book.view.steps))

    # --- laws

    def judge(self) -> None:
        head = self.book.head
        for step_id, step in self.book.view.steps.items():
            if not step.is_mutating:
                continue
            net = self.net(step_id)
            if not 0 <= net <= 1:
                self.fail(f"double_apply: {step_id} has a net effect of {net}")
            for attempt in step.attempts:
                request = next(r for r in self.requests if (r.step_id, r.attempt) == (step_id, attempt.number))
                if attempt.state in HAD_NO_EFFECT and request.had_effect:
                    self.fail(f"{step_id}: attempt {attempt.number} is booked {attempt.state} but took effect")
            if not self.can_land(step_id) and not self.can_land(UNDO):
                if step.state in ("committed", "applied") and step.closed_by is None and net != 1:
                    self.fail(f"{step_id} is {step.state} with a net effect of {net}")
                if step.state in ("compensated", "rejected", "pending") and net != 0:
                    self.fail(f"{step_id} is {step.state} with a net effect of {net}")
            self.seen[f"state_{step.state}"] += 1
        if head.end and any(step.is_mutating and step.is_unsettled for step in head.open):
            self.fail("orphan: the run ended over an open effect")

    def can_land(self, step_id: StepId) -> bool:
        return any(
            r.step_id == step_id and r.place in ("ready", "wire") and self.book.ms < r.deadline_ms
            for r in self.requests
        )

    def finish(self) -> None:
        book = self.book
        if book.first_broken():
            self.fail("the chain is broken")
        folded = book.refold()
        if folded.steps != book.view.steps or folded.run != book.head._replace(
            expires_at_ms=folded.run.expires_at_ms if folded.run else 0
        ):
            self.fail("the log gives other rows than the store holds")

    def fail(self, why: str) -> None:
        raise Broken("\n".join([why, *self.trail[-60:]]))
