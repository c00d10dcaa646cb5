"""What a contract makes of a death: each moment is played through the real rules, and what they decided is told.

No rule is repeated here. A row is a few commands to `decide`, over a run of one step, and the verdict at their end; its
words are the verdict's own. What the books can't tell apart (an intent that was not yet sent, and one whose answer was
lost) is played the same way and so has the same answer.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidefast.protocol.canonical import call_digest
from tidefast.protocol.commands import (
    Admit,
    AnswerProbe,
    Command,
    CreateRun,
    Grant,
    OutcomeKind,
    Preempt,
    ProbeWord,
    SaveCheckpoint,
    Settle,
)
from tidefast.protocol.contracts import Contract, Request, contract_digest
from tidefast.protocol.doubt import clear_ms, outcome_of
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.lease import LEASE_DEFAULT_MS
from tidefast.protocol.machine import decide
from tidefast.protocol.records import Now, Right, RunHead, Step, View
from tidefast.protocol.verdicts import Answer, Ask, Refused, Send, Verdict, Wait

RUN, STEP = RunId("run"), StepId("step")
OLD, NEW = "gateway-1", "gateway-2"  # the gateway before and after a death
WALL_MS = 1_700_000_000_000
RECEIPT = '{"body":null,"content_type":"","digest":"","status":200,"truncated":false}'
WAITS_MAX = 4
HELD_WORDS = {
    "no_key": "the provider remembers no key",
    "key_window": "the provider may have forgotten the key",
    "tool_gone": "the tool has no contract any more",
    "scope_changed": "another account would not know the key",
    "unlisted_answer": "the contract doesn't list this answer",
    "probe_unclear": "the provider's answers stayed unclear",
}


class Row(NamedTuple):
    """One moment, the rules' verdict as a word, and what it means for people."""

    moment: str
    verdict: str
    told: str


class _Play:
    """One run with one step, moved by the real rules. Nothing is sent anywhere."""

    def __init__(self, contract: Contract) -> None:
        self.contract, self.ms = contract, 1_000
        self.view = View(b"foresight", 0, frozenset((OLD,)))
        self.owner = OLD
        self.submit(CreateRun(RUN, "agent", "1", "null"))
        self.claim()

    @property
    def step(self) -> Step:
        return self.view.steps[STEP]

    @property
    def head(self) -> RunHead:
        if self.view.run is None:
            raise LookupError("the run was not created")
        return self.view.run

    @property
    def right(self) -> Right:
        return Right(RUN, self.head.epoch, self.head.holder)

    def submit(self, command: Command) -> Verdict:
        decision = decide(self.view, command, Now(self.ms, WALL_MS + self.ms))
        verdict = decision.verdict
        if isinstance(verdict, Send):
            stored = {**self.view.contracts, contract_digest(verdict.contract): verdict.contract}
            self.view = self.view._replace(contracts=stored)
        for event in decision.events:
            self.view = evolve(self.view, event, RUN)
        return verdict

    def claim(self) -> None:
        self.submit(Preempt(RUN, "foresight"))
        self.ms = max(self.ms, self.head.not_before_ms) + 1
        self.submit(Grant(RUN, f"worker-{self.head.epoch + 1}", LEASE_DEFAULT_MS, ""))

    def ask(self, contract: Contract | None = None, *, gone: bool = False, right: Right | None = None) -> Verdict:
        """The live worker (or another one) asks for the step under today's contract."""
        today = None if gone else contract or self.contract
        request = Request("POST", self.contract.url, {}, "")
        deadline_ms = self.ms + self.contract.timeout_ms
        name = self.contract.tool
        return self.submit(
            Admit(
                right or self.right, STEP, name, "{}", call_digest(name, "{}"), today, request, self.owner, deadline_ms
            )
        )

    def ask_on(self) -> tuple[Verdict, bool]:
        """(the verdict, whether it had to be waited for)."""
        verdict, is_late = self.ask(), False
        for _ in range(WAITS_MAX):
            if not isinstance(verdict, Wait):
                break
            is_late, self.ms = True, max(self.ms + 1, verdict.until_ms)
            self.claim()
            verdict = self.ask()
        return verdict, is_late

    def gateway_dies(self) -> None:
        self.owner = NEW
        self.view = self.view._replace(instances=frozenset((NEW,)))
        self.claim()

    def settle(self, outcome: OutcomeKind, reason: str = "") -> Verdict:
        receipt = RECEIPT if outcome in ("applied", "refused") else "null"
        return self.submit(Settle(RUN, STEP, len(self.step.attempts), outcome, receipt, reason))

    def probed(self, answer: ProbeWord) -> None:
        self.ms = max(self.ms, clear_ms(self.step)) + 1
        receipt = RECEIPT if answer == "found" else "null"
        self.submit(AnswerProbe(RUN, STEP, answer, self.ms, len(self.step.attempts), receipt))
        self.claim()


def foresee(contract: Contract) -> list[Row]:
    """What happens to a step of this tool, moment by moment."""
    return [*_deaths(contract), *_answers(contract), *_later(contract), *_probes(contract)]


def _row(moment: str, play: _Play) -> Row:
    """Ask for the step once more, and tell the verdict."""
    verdict, is_late = play.ask_on()
    word, told = _told(play, verdict)
    return Row(moment, word, f"once no older request can land: {told}" if is_late else told)


def _told(play: _Play, verdict: Verdict) -> tuple[str, str]:
    if play.head.frozen:
        return "frozen", "the run is frozen: the answer contradicts the books, a person looks"
    step = play.view.steps.get(STEP)
    if step is not None and step.state == "held":
        return "hold", f"HELD for a person: {HELD_WORDS.get(step.reason, step.reason)}"
    match verdict:
        case Send(is_replay=False):
            return "send", "nothing has happened yet; it is sent for the first time"
        case Send() if verdict.is_first:
            return "send", "nothing has happened yet; it is sent"
        case Send() if not play.step.is_mutating:
            return "ask_again", "it is simply asked again: a read changes nothing"
        case Send() if not play.step.doubts[:-1]:
            return "send_again", "it surely had no effect, so it is sent again by itself"
        case Send():
            return "replay", "repeated by itself, same request, same key: the provider does it once"
        case Answer():
            return "answer", "answered from the books; nothing is sent"
        case Ask():
            return "probe", "the provider is asked whether it happened"
        case Refused(code="step_rejected"):
            return "rejected", "refused for good: nothing happened, the agent is told"
        case Refused():
            return verdict.code, "refused: this worker was replaced, nothing goes out"
        case _:
            raise AssertionError(f"no words for {verdict}")


def _sent(contract: Contract) -> _Play:
    play = _Play(contract)
    play.ask()
    return play


def _deaths(contract: Contract) -> Iterator[Row]:
    play = _Play(contract)
    play.claim()
    yield _row("worker dies before the intent is written", play)
    play = _Play(contract)
    play.gateway_dies()
    yield _row("gateway dies before the intent is written", play)
    for moment in (
        "gateway dies with the intent written, nothing sent",
        "gateway dies after sending, no answer yet",
        "gateway dies with an answer that it hasn't recorded",
    ):
        play = _sent(contract)
        play.gateway_dies()
        yield _row(moment, play)
    play = _sent(contract)
    play.claim()
    play.settle("applied")
    yield _row("worker dies while the gateway calls", play)
    play = _sent(contract)
    play.settle("applied")
    play.gateway_dies()
    yield _row("either dies with the answer recorded, no checkpoint yet", play)
    play = _sent(contract)
    play.settle("applied")
    play.submit(SaveCheckpoint(play.right, 1, "null"))
    play.gateway_dies()
    yield _row("either dies after the checkpoint", play)
    play = _Play(contract)
    old = play.right
    play.claim()
    yield Row("worker sleeps past its lease, wakes and asks", *_told(play, play.ask(right=old)))


def _answers(contract: Contract) -> Iterator[Row]:
    """What the provider may say, or not."""

    def after(moment: str, outcome: OutcomeKind) -> Row:
        play = _sent(contract)
        play.settle(outcome)
        play.ms += contract.timeout_ms
        play.claim()
        return _row(moment, play)

    yield after("the provider can't be reached (no connection)", "unsent")
    yield after("no answer by the deadline", "doubted")
    if contract.kind == "smtp":
        yield after("the mail server refuses (5xx)", "refused")
    elif contract.kind == "python":
        yield after("the function raises tf.Refused", "refused")
        yield after("the function raises anything else", "doubted")
    else:
        yield from _http_answers(contract, after)
    if contract.expect is not None:
        yield after("a success that doesn't look as declared", "unlisted")
    if contract.payload_bound:
        yield after("the key is known there with another body", "key_reused")


def _http_answers(contract: Contract, after: Callable[[str, OutcomeKind], Row]) -> Iterator[Row]:
    for status, moment in (
        (500, "the provider fails (500)"),
        (429, "too many requests (429)"),
        (409, "conflict (409)"),
    ):
        yield after(moment, outcome_of(contract, status, None)[0])
    if contract.refusals:
        statuses = sorted({pattern.status for pattern in contract.refusals})
        tries = "" if contract.stored_failures or not contract.retries else f", first of {contract.retries + 1}"
        yield after(f"a refusal that is listed ({', '.join(map(str, statuses))}){tries}", "refused")
    unlisted = next((s for s in range(400, 500) if outcome_of(contract, s, None)[0] == "unlisted"), 0)
    if unlisted:
        yield after(f"a refusal that isn't listed (such as {unlisted})", outcome_of(contract, unlisted, None)[0])


def _later(contract: Contract) -> Iterator[Row]:
    """Doubts that are looked at late, or under another contract."""
    if contract.dedups:
        play = _sent(contract)
        play.gateway_dies()
        play.ms += contract.window_ms
        play.claim()
        yield _row("in doubt, and the key's time is over", play)
    for moment, change in (
        ("in doubt, and the tool's contract is gone", {"gone": True}),
        ("in doubt, and the account has changed", {"contract": contract._replace(key_scope="another account")}),
    ):
        play = _sent(contract)
        play.gateway_dies()
        yield Row(moment, *_told(play, play.ask(**change)))


def _probes(contract: Contract) -> Iterator[Row]:
    """What follows from each answer of a provider that can be asked."""
    probe = contract.probe
    if probe is None:
        return
    words: list[tuple[ProbeWord, str, int]] = [("found", "asked, it says: it happened", 1)]
    if probe.absent is not None:
        words.append(("absent", "asked, it says: it did not happen", 1))
    words.append(("unclear", f"asked, its answer is unclear {contract.probe_tries} times", contract.probe_tries))
    if probe.many is not None:
        words.append(("many", "asked, it says: more than one time", 1))
    for word, moment, times in words:
        play = _sent(contract)
        play.gateway_dies()
        play.ms += contract.window_ms
        play.claim()
        play.ask()
        for _ in range(times):
            play.probed(word)
        yield _row(moment, play)
