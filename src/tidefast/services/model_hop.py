"""The model hop: an answer that is paid for, journaled, and handed on instead of being paid for again.

In this order, and this is where the process may die between the lines:

1. A place at the upstream. Nothing is written; a caller whose lease ends meanwhile gives its place up.
2. Budgets are reserved and the intent is made, in one commit. Death here: the successor's asking is a new attempt, and
   the estimate of this one stays booked, because nobody knows what it has cost.
3. The upstream is asked. Pieces go to a streaming caller while its epoch is live, the end is held back.
4. The answer is settled with its usage, in one commit; only then the caller hears its end.

A caller that hangs up or loses its lease cancels nothing: the answer is finished within its bounds, and the successor
finds it in the journal.
"""

import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from tidefast.engine.engine import Engine, InvariantViolation
from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.budget import Amount, Limit, Over, Reservation, admit, reserve, settle
from tidefast.protocol.canonical import JSON, CanonicalError, call_digest, canonical
from tidefast.protocol.chat import MODEL_TOOL, ChatCall, read_call
from tidefast.protocol.commands import Admit, Settle
from tidefast.protocol.contracts import Request
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.lease import fence
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Answer, Refused, Send, Settled, Verdict, Wait
from tidefast.services.bodies import Bodies
from tidefast.services.gateway import RETRY_AFTER_MS, Gateway
from tidefast.services.limits import told_over
from tidefast.services.model_sender import Heard, ModelSender, Question
from tidefast.services.models import Model, ModelBook, cost
from tidefast.services.relay import Relay
from tidefast.services.upstream import Upstream

QUEUED_MS = 1_000  # a second asker of a step that queues looks again after this
NOTHING = Amount()
UNSAID = ChatCall("", False, False, None), ""


class Hop(NamedTuple):
    """One asking of one caller. `body` is what the upstream gets, `args_json` what makes two askings the same."""

    right: Right
    step_id: StepId
    tool: str
    call: ChatCall | None  # None: the stored call is asked for
    args_json: str | None
    body: str
    model: Model | None
    key: str
    until_ms: int
    relay: Relay | None


class ModelHop:
    """Asks models for the runs of one engine. Shares the gateway's patience and its orderly end."""

    def __init__(self, engine: Engine, gateway: Gateway, book: ModelBook, sender: ModelSender) -> None:
        self.book = book
        self.upstreams = {name: Upstream(settings, engine.clock) for name, settings in book.upstreams.items()}
        self._engine = engine
        self._gateway = gateway
        self._sender = sender
        self._bodies = Bodies(engine)
        self._queued: set[tuple[RunId, StepId]] = set()
        self._numbers = itertools.count(1)

    async def ask(
        self, right: Right, step_id: StepId, body: str, wait_ms: int, key: str = "", relay: Relay | None = None
    ) -> StepAnswer | Refused:
        """An answer to this request, from the model or from the journal. `key` is the name of the caller's API key.

        Durable when it returns. Refusals: those of `Admit`, `overloaded`, `limit_reached`, `in_doubt` (ask again).
        """
        try:
            value = msgspec.json.decode(body)
            call, args_json = read_call(value), canonical(value)
        except (msgspec.DecodeError, CanonicalError, RecursionError) as error:
            call, args_json = str(error), ""
        if isinstance(call, str):
            facts: dict[str, JSON] = {"tool": "model", "step": step_id, "problem": call}
            return await self._engine.fence(right) or Refused("invalid", "args", facts)
        model = self.book.models.get(call.model)
        if model is None and self._engine.step(right.run_id, step_id) is None:
            facts = {"model": call.model, "models": [*sorted(self.book.models)]}
            return await self._engine.fence(right) or Refused("not_found", "model_unknown", facts)
        until_ms = self._engine.clock.now().ms + wait_ms
        sent = self._as_sent(model, call, body)
        hop = Hop(right, step_id, MODEL_TOOL + call.model, call, args_json, sent, model, key, until_ms, relay)
        return await self._gateway.until(right.run_id, wait_ms, partial(self._ask, hop))

    async def stored(
        self, right: Right, step_id: StepId, tool: str, wait_ms: int, key: str = ""
    ) -> StepAnswer | Refused:
        """The stored request of a model step, asked again where the books allow it."""
        until_ms = self._engine.clock.now().ms + wait_ms
        model = self.book.models.get(tool.removeprefix(MODEL_TOOL))
        hop = Hop(right, step_id, tool, None, None, "", model, key, until_ms, None)
        return await self._gateway.until(right.run_id, wait_ms, partial(self._ask, hop))

    def listen(self, right: Right) -> Relay:
        """An ear for a caller who wants to hear the answer as it comes, as long as its lease is live."""
        return Relay(partial(self._fence_now, right))

    def _as_sent(self, model: Model | None, call: ChatCall, body: str) -> str:
        """The caller's own bytes, or with the question for the usage added where nobody else would ask it."""
        asks = model is not None and self.book.upstreams[model.upstream].table.ask_usage
        if not (asks and call.is_stream) or call.wants_usage:
            return body
        members = json.loads(body)
        options = members.get("stream_options")
        members["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return json.dumps(members, ensure_ascii=False, separators=(",", ":"))

    def _fence_now(self, right: Right) -> Refused | None:
        head = self._engine.head(right.run_id)
        decision = None if head is None else fence(head, right, self._engine.clock.now())
        return decision.verdict if decision is not None and isinstance(decision.verdict, Refused) else None

    async def _ask(self, hop: Hop, now_ms: int) -> StepAnswer | Refused | Wait:
        """Ask once: from the books if they know, else from the upstream once it has a place."""
        await self._gateway.reach("gateway.before_intent", hop.right, hop.step_id)
        if hop.model is None or not self._would_send(hop):
            return await self._follow(hop, None, await self._engine.submit(self._admit(hop)))
        name = (hop.right.run_id, hop.step_id)
        if name in self._queued:
            return Wait("step_in_flight", "queued", now_ms + QUEUED_MS, hop.step_id)
        upstream = self.upstreams[hop.model.upstream]
        until_ms = min(hop.until_ms, now_ms + upstream.settings.queue_wait_ms)
        self._queued.add(name)
        try:
            refused = await upstream.enter(until_ms, lambda: self._fence_now(hop.right) is None)
        finally:
            self._queued.discard(name)
        if refused is not None:
            return await self._engine.fence(hop.right) or refused
        try:
            return await self._ask_with_place(hop, upstream)
        finally:
            upstream.leave()

    def _would_send(self, hop: Hop) -> bool:
        """Whether the books leave it to the upstream. Only a guess of what `Admit` will say: it decides."""
        step = self._engine.step(hop.right.run_id, hop.step_id)
        if step is None or step.state in ("pending", "in_doubt"):
            return True
        last = step.attempts[-1] if step.state == "fenced" else None
        is_lost = last is not None and (
            last.owner != self._engine.boot or self._engine.clock.now().ms >= last.deadline_ms
        )
        return is_lost

    async def _ask_with_place(self, hop: Hop, upstream: Upstream) -> StepAnswer | Refused | Wait:
        command = self._admit(hop)
        reserved = self._reserve(hop, command.deadline_ms)
        if isinstance(reserved, Over):
            return await self._engine.fence(hop.right) or told_over(reserved, "budget")
        verdict = await self._engine.submit(command, partial(self._book_admit, reserved))
        return await self._follow(hop, upstream, verdict, reserved)

    def _admit(self, hop: Hop) -> Admit:
        args = "null" if hop.args_json is None else hop.args_json
        contract = None if hop.model is None else hop.model.contract
        return Admit(
            right=hop.right,
            step_id=hop.step_id,
            tool=hop.tool,
            args_json=args,
            call_digest=call_digest(hop.tool, args),
            contract=contract,
            request=None if hop.call is None else Request("POST", "", {}, hop.body),
            owner=self._engine.boot,
            deadline_ms=self._engine.clock.now().ms + (0 if contract is None else contract.timeout_ms),
            stored=hop.args_json is None,
            contract_digest="" if hop.model is None else hop.model.digest,
        )

    # --- budgets ---------------------------------------------------------------------------------------------------

    def _reserve(self, hop: Hop, until_ms: int) -> "_Reserved | Over":
        """Room for one asking in each budget that it is booked in; in all of them or in none."""
        head = self._engine.head(hop.right.run_id)
        if hop.model is None:
            raise TypeError("only a model that is served can be reserved for")
        call, body = self._question(hop)
        amount = self.book.estimate(hop.model, call, len(body.encode()))
        limits = self.book.limits(hop.right.run_id, "" if head is None else head.agent, hop.key)
        name = f"{hop.right.run_id}/{hop.step_id}/{self._engine.boot}-{next(self._numbers)}"
        pairs = [(self._engine.budget(budget), limit) for budget, limit in limits]
        booked = reserve(pairs, Reservation(name, amount, until_ms), self._engine.clock.now().ms)
        if isinstance(booked, Over):
            return booked
        self._engine.book(booked)
        return _Reserved(name, [budget.name for budget in booked])

    def _question(self, hop: Hop) -> tuple[ChatCall, str]:
        """What would be asked now: the caller's own request, or the stored one once it may have been sent."""
        step = self._engine.step(hop.right.run_id, hop.step_id)
        if hop.call is not None and (step is None or step.first_sent is None):
            return hop.call, hop.body
        return UNSAID if step is None else self._stored_question(hop, step.intent_seq)

    def _stored_question(self, hop: Hop, intent_seq: int) -> tuple[ChatCall, str]:
        args_json, request = self._bodies.stored_call(hop.right.run_id, intent_seq)
        call = read_call(msgspec.json.decode(args_json))
        if request is None or isinstance(call, str):
            raise InvariantViolation(f"the intent of {hop.right.run_id}/{hop.step_id} holds no request to a model")
        return call, request.body

    def _book_admit(self, reserved: "_Reserved", verdict: Verdict) -> None:
        """With the intent: the reservation stands until it is settled. Without one it returns at once."""
        for budget in map(self._engine.budget, reserved.budgets):
            is_out = isinstance(verdict, Send)
            self._engine.book([admit(budget, reserved.name) if is_out else settle(budget, reserved.name, NOTHING)])

    def _book_settle(self, reserved: "_Reserved", amount: Amount | None, verdict: Verdict) -> None:
        self._engine.book([settle(self._engine.budget(name), reserved.name, amount) for name in reserved.budgets])

    # --- from the intent on ----------------------------------------------------------------------------------------

    async def _follow(
        self, hop: Hop, upstream: Upstream | None, verdict: Verdict, reserved: "_Reserved | None" = None
    ) -> StepAnswer | Refused | Wait:
        match verdict:
            case Send():
                return await self._deliver(hop, upstream, verdict, reserved)
            case Answer():
                return self._bodies.step_answer(hop.right.run_id, verdict)
            case Refused(code="step_rejected"):
                return self._bodies.with_receipt(hop.right.run_id, verdict)
            case Refused() | Wait():
                return verdict
            case _:
                raise TypeError(f"an admission can't be answered with {verdict!r}")

    async def _deliver(
        self, hop: Hop, upstream: Upstream | None, send: Send, reserved: "_Reserved | None"
    ) -> StepAnswer | Refused | Wait:
        """Ask the upstream under an intent that is durable, and settle what it said."""
        await self._gateway.reach("gateway.after_intent", hop.right, hop.step_id, attempt=send.attempt)
        if upstream is None or reserved is None:
            heard = Heard("unsent", "no_place")  # it was lost between the look and the intent; asked again, it queues
        else:
            heard = await self._send(hop, upstream, send)
        await self._gateway.reach(
            "gateway.after_send", hop.right, hop.step_id, attempt=send.attempt, outcome=heard.kind
        )
        then = None
        if reserved is not None:
            then = partial(self._book_settle, reserved, self._amount(hop, heard))
        settled = await self._engine.submit(
            Settle(hop.right.run_id, hop.step_id, send.attempt, heard.kind, heard.receipt_json, heard.reason), then
        )
        await self._gateway.reach("gateway.after_settle", hop.right, hop.step_id, attempt=send.attempt)
        if not isinstance(settled, Settled):
            raise TypeError(f"a settle of an admitted attempt can't be answered with {settled!r}")
        if hop.relay is not None:
            (hop.relay.committed if settled.joined else hop.relay.failed)()
        return self._tell(hop, send, heard, settled)

    async def _send(self, hop: Hop, upstream: Upstream, send: Send) -> Heard:
        call, body = hop.call, hop.body
        if send.is_replay or call is None:
            call, body = self._stored_question(hop, send.intent_seq)
        began_ms = self._engine.clock.now().ms
        listener = _deaf if hop.relay is None else hop.relay.piece
        question = Question(body, f"{hop.right.run_id}/{hop.step_id}", hop.right.epoch)
        heard = await self._sender.send(upstream.settings, call, question, send.deadline_ms, listener)
        if heard.kind in ("applied", "refused"):
            upstream.worked(self._engine.clock.now().ms - began_ms)
        elif heard.busy_ms:
            upstream.is_busy(heard.busy_ms)
        else:
            upstream.failed()
        return heard

    def _amount(self, hop: Hop, heard: Heard) -> Amount | None:
        """What an asking has cost: nothing if it surely wasn't billed, None if nobody knows."""
        if heard.kind in ("unsent", "refused") or hop.model is None:
            return NOTHING
        return None if heard.usage is None else cost(hop.model, heard.usage)

    def _tell(self, hop: Hop, send: Send, heard: Heard, settled: Settled) -> StepAnswer | Refused | Wait:
        facts: dict[str, JSON] = {"step": hop.step_id, "attempt": send.attempt, "retry_after_ms": RETRY_AFTER_MS}
        if settled.joined:
            right = hop.right
            return StepAnswer(right.run_id, hop.step_id, "committed", right.epoch, send.key, False, heard.receipt_json)
        match settled.state:
            case "rejected":
                facts["receipt"] = _refusal_shown(heard.receipt_json)
                return Refused("step_rejected", "refused", facts)
            case "pending":
                facts["retry_after_ms"] = heard.busy_ms or RETRY_AFTER_MS
                return Refused("overloaded", "upstream_away", {**facts, "why": heard.reason})
            case "applied" | "committed":
                return Wait("step_in_flight", "settled", 0, hop.step_id)
            case _:
                return Refused("in_doubt", heard.reason, facts)

    # --- for people ------------------------------------------------------------------------------------------------

    def limit_of(self, name: str) -> Limit:
        """What a budget allows now: an operator's word above the configuration."""
        return self._engine.budget(name).raised.over(self.book.limit(name))


class _Reserved(NamedTuple):
    """A reservation by its name, and the budgets that hold it."""

    name: str
    budgets: Sequence[str]


def _deaf(raw: bytes, is_end: bool) -> None:
    """For callers who hear the whole answer and nothing before it."""


def _refusal_shown(receipt_json: str) -> JSON:
    receipt: dict[str, JSON] = msgspec.json.decode(receipt_json)
    return {name: value for name, value in receipt.items() if name != "raw"}
