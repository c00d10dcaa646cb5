"""The gateway: the only road to a provider.

Three lines carry the product, and this is where the process may die between them:

1. `Admit` is submitted; when it returns `Send`, the intent is durable and nothing has been sent.
2. The attempt is sent. Death here, or no answer, is doubt: the next holder is judged by the stored contract.
3. `Settle` is submitted; when it returns, the receipt is durable, and joined if the asking epoch is still live.

Only then is the caller answered. The gateway never renews a lease and never shortens an attempt. A caller that hangs up
or is cancelled doesn't cancel a call: each call runs as a task of its own and is finished and recorded.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tidefast.engine.engine import Engine
from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.canonical import JSON, call_digest, canonical, digest
from tidefast.protocol.commands import Admit, Compensate, Settle
from tidefast.protocol.contracts import Contract, Request, Require, Undo, render_request, render_undo
from tidefast.protocol.doubt import is_expected, line_to_add
from tidefast.protocol.events import object_json
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId, derived_id, step_key
from tidefast.protocol.patterns import RenderError, fill
from tidefast.protocol.points import Hook, Point
from tidefast.protocol.records import Right, Step
from tidefast.protocol.verdicts import Answer, Ask, AskReplica, Refused, Send, Settled, Verdict, Wait
from tidefast.services.bodies import Bodies
from tidefast.services.http_sender import HttpSender
from tidefast.services.limits import Limiter, Reserved
from tidefast.services.prober import Prober
from tidefast.services.tools import Outcome, PythonRunner, Tool, ToolBook
from tidefast.services.tracing import mark, span
from tidefast.services.workspace_tools import WorkspaceCall, is_workspace_tool, workspace_call, workspace_named
from tidefast.services.workspaces import Workspaces, without_verbs

RETRY_AFTER_MS = 200  # when to ask again about a doubt or an attempt that never left
DRAIN_S = 60.0  # how long a stopping gateway waits for providers
PATIENCE_MIN_MS = 500  # refusals and stored answers take a flush; a caller without patience still hears them
WAIT_SLICE_MS = 1_000  # a waiting caller asks again at least this often

if TYPE_CHECKING:
    from tidefast.services.smtp_sender import SmtpSender

Asked = Coroutine[Any, Any, StepAnswer | Refused | Wait]
Asking = Callable[[int], Asked]  # takes the time now; a new coroutine each time, so that a question can be repeated


class Gateway:
    """Lets effects out under the live epoch, and answers what the books already hold."""

    def __init__(
        self,
        engine: Engine,
        tools: ToolBook,
        http: HttpSender,
        python: PythonRunner | None,
        hook: Hook | None = None,
        smtp: "SmtpSender | None" = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        self._engine = engine
        self._tools = tools
        self._http = http
        self._smtp = smtp
        self.workspaces = workspaces or without_verbs(engine)
        self._python = python
        self._hook = hook
        self._bodies = Bodies(engine)
        self.prober = Prober(engine, tools, http, python)
        self._limiter = Limiter(engine)
        self._calls: set[asyncio.Task[StepAnswer | Refused | Wait]] = set()

    async def apply(
        self, right: Right, step_id: StepId, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        """One effect, or the stored answer. `args_json` None asks for the stored call.

        Durable when it returns: the receipt of an answered step. Refusals: those of `Admit`, `in_doubt`, `step_pending`
        (nothing left; ask again), `step_rejected`, `step_held`.
        """
        stored = self._engine.step(right.run_id, step_id) if args_json is None else None
        tool = tool if stored is None else stored.tool
        if is_workspace_tool(tool):
            return await self._apply_in_workspace(right, step_id, tool, args_json, stored, wait_ms)
        known = self._tools.get(tool)
        request, problem = self._request(right.run_id, step_id, known, args_json)
        asking = partial(self._admit, right, step_id, tool, known, args_json, request, problem)
        return await self.until(right.run_id, wait_ms, asking)

    async def _apply_in_workspace(
        self,
        right: Right,
        step_id: StepId,
        tool: str,
        args_json: str | None,
        stored: Step | None,
        wait_ms: int,
    ) -> StepAnswer | Refused:
        """A call of a workspace's tool: its contract is made from the call, or from the one that is stored."""
        if args_json is None and stored is not None and stored.contract:
            contract = self._engine.contract(stored.contract)
            known = WorkspaceCall(Tool(contract, stored.contract, None), workspace_named(contract), "")
        else:
            found = workspace_call(tool, args_json or "{}", self.workspaces.check)
            if found is None:
                return await self._engine.fence(right) or Refused("not_found", "tool_unknown", {"tool": tool})
            known = found
        asking = partial(self._admit, right, step_id, tool, known.tool, args_json, None, known.problem)
        return await self.until(right.run_id, wait_ms, partial(asking, workspace_id=known.workspace_id))

    async def compensate(
        self, right: Right, step_id: StepId, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        """The undo of a step, as a fenced step of its own.

        `given`: its tool and arguments, for a step whose contract declares none or that is to be undone otherwise. What
        the books already hold of an undo stands; another given one is a conflict.
        """
        asking = self._prepare_undo(right, step_id, await self._engine.settled_step(right.run_id, step_id), given)
        if isinstance(asking, Refused):
            return await self._engine.fence(right) or asking
        return await self.until(right.run_id, wait_ms, asking)

    async def drain(self, limit_s: float = DRAIN_S) -> None:
        """Wait until every call in flight is settled, or the time is over: what is left then is doubt, by rule."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while self._calls and loop.time() < until:
            await asyncio.wait(self._calls, timeout=until - loop.time())

    async def until(self, run_id: RunId, wait_ms: int, ask: Asking) -> StepAnswer | Refused:
        """Ask until there is an answer, or until the caller's patience ends."""
        now = self._engine.clock.now().ms
        until = now + wait_ms
        while True:
            answer = await self._once(ask(now), until - now)
            if not isinstance(answer, Wait):
                return answer
            now = self._engine.clock.now().ms
            if now >= until:
                return _out_of_patience(answer, run_id)
            pause = min(until - now, max(answer.until_ms - now, 1), WAIT_SLICE_MS)
            if answer.workspace_id is not None:
                await self.workspaces.replicas.wait(answer.workspace_id, pause)
            else:
                await self._engine.wait_for_change(run_id, pause)
            now = self._engine.clock.now().ms

    async def _once(self, asked: Asked, wait_ms: int) -> StepAnswer | Refused | Wait:
        """Ask once, in a task that outlives its caller. What `asyncio.wait` does, at less than half its cost."""
        loop = asyncio.get_running_loop()
        heard = loop.create_future()
        task = loop.create_task(asked)
        self._calls.add(task)
        task.add_done_callback(partial(self._over, heard))
        patience = loop.call_later(max(wait_ms, PATIENCE_MIN_MS) / 1_000, _wake, heard)
        try:
            await heard
        finally:
            patience.cancel()
        if task.done():
            return task.result()
        return Refused("step_in_flight", "in_flight", {"retry_after_ms": RETRY_AFTER_MS})

    def _over(self, heard: asyncio.Future[None], task: asyncio.Task[StepAnswer | Refused | Wait]) -> None:
        self._calls.discard(task)
        _wake(heard)

    async def _admit(
        self,
        right: Right,
        step_id: StepId,
        tool: str,
        known: Tool | None,
        args_json: str | None,
        request: Request | None,
        problem: str,
        now_ms: int,
        workspace_id: WorkspaceId | None = None,
    ) -> StepAnswer | Refused | Wait:
        if self._hook is not None:
            await self.reach("gateway.before_intent", right, step_id)
            now_ms = self._engine.clock.now().ms
        contract = None if known is None else known.contract
        args = "null" if args_json is None else args_json
        command = Admit(
            right=right,
            step_id=step_id,
            tool=tool,
            args_json=args,
            call_digest=call_digest(tool, args),
            contract=contract,
            request=request,
            owner=self._engine.boot,
            deadline_ms=now_ms + (0 if contract is None else contract.timeout_ms),
            stored=args_json is None,
            contract_digest="" if known is None else known.digest,
            args_problem=problem,
            workspace_id=workspace_id,
            replica=self._ready(workspace_id),
        )
        reserved = self._reserve(command, problem)
        if isinstance(reserved, Refused | Wait):
            return await self._engine.fence(right) or reserved
        then = None if reserved is None else partial(self._limiter.admit, reserved)
        verdict = await self._engine.submit(command, then)
        return await self._follow(right, step_id, verdict, args_json, request)

    def _ready(self, workspace_id: WorkspaceId | None) -> Epoch | None:
        """The replica epoch that could take a call of this workspace now."""
        return None if workspace_id is None else self.workspaces.replicas.ready(workspace_id)

    def _reserve(self, command: Admit, problem: str) -> Reserved | Refused | Wait | None:
        """A place in the limits of a tool for a first sending; None where no limit asks for one.

        Nothing may come between this and the intent: they are of one batch.
        """
        contract, right = command.contract, command.right
        if contract is None or contract.limits is None or command.stored or problem:
            return None
        if self._engine.step(right.run_id, command.step_id) is not None:
            return None
        args = msgspec.json.decode(command.args_json)
        return self._limiter.reserve(right.run_id, command.step_id, contract, args, command.deadline_ms)

    def _request(
        self, run_id: RunId, step_id: StepId, tool: Tool | None, args_json: str | None
    ) -> tuple[Request | None, str]:
        """(what a call sends, what is wrong with its arguments); both empty where nothing is to be made."""
        if tool is None or args_json is None:
            return None, ""
        if tool.validator is None and tool.contract.kind == "python":
            return None, ""
        args = msgspec.json.decode(args_json)
        problem = tool.problem_with(args)
        if problem is not None or tool.contract.kind == "python":
            return None, problem or ""
        try:
            return render(tool.contract, args, step_key(self._engine.identity.namespace, run_id, step_id)), ""
        except RenderError as error:
            return None, str(error)

    async def _follow(
        self, right: Right, step_id: StepId, verdict: Verdict, args_json: str | None, request: Request | None
    ) -> StepAnswer | Refused | Wait:
        """Do what a verdict on an admission asks for."""
        match verdict:
            case Send():
                return await self._deliver(right, step_id, verdict, args_json, request)
            case Answer():
                return self._bodies.step_answer(right.run_id, verdict)
            case Refused(code="step_rejected"):
                return self._bodies.with_receipt(right.run_id, verdict)
            case Ask():
                return await self._ask(right.run_id, verdict)
            case AskReplica():
                return await self.workspaces.ask(right.run_id, step_id, verdict)
            case Refused() | Wait():
                return verdict
            case _:
                raise TypeError(f"an admission can't be answered with {verdict!r}")

    async def _ask(self, run_id: RunId, ask: Ask) -> Wait:
        """A holder waits for a doubt that the provider can settle: ask it, or say when it can be asked."""
        due_ms = ask.due_ms
        if due_ms <= self._engine.clock.now().ms:
            due_ms = await self.prober.ask(run_id, ask.step_id)
        return Wait("in_doubt", "probe", due_ms, ask.step_id)

    async def _deliver(
        self, right: Right, step_id: StepId, send: Send, args_json: str | None, request: Request | None
    ) -> StepAnswer | Refused | Wait:
        """Send an attempt whose intent is durable, and settle it."""
        is_watched = self._hook is not None
        if is_watched:
            await self.reach("gateway.after_intent", right, step_id, attempt=send.attempt)
        with span("gateway.send", run=right.run_id, step=step_id, epoch=right.epoch, attempt=send.attempt) as traced:
            outcome = await self._send(right, step_id, send, args_json, request)
            mark(traced, tool=send.contract.tool, outcome=outcome.kind)
        if is_watched:
            await self.reach("gateway.after_send", right, step_id, attempt=send.attempt, outcome=outcome.kind)
        settled = await self._settle(right, step_id, send, outcome)
        if is_watched:
            await self.reach("gateway.after_settle", right, step_id, attempt=send.attempt)
        if not isinstance(settled, Settled):
            raise TypeError(f"a settle of an admitted attempt can't be answered with {settled!r}")
        return self._tell(right, step_id, send, outcome, settled)

    async def _settle(self, right: Right, step_id: StepId, send: Send, outcome: Outcome) -> Verdict:
        command = Settle(
            right.run_id, step_id, send.attempt, outcome.kind, outcome.receipt_json, outcome.reason, outcome.write
        )
        if outcome.write is None or send.write is None:
            return await self._engine.submit(command, self._settling_limits(right.run_id, step_id, send))
        with self.workspaces.pinned(outcome):
            settled = await self._engine.submit(command)
        if not isinstance(settled, Refused):
            return settled
        await self.workspaces.distrust(send.write.workspace_id, send.write.epoch)
        return Settled("pending", joined=False)

    def _settling_limits(self, run_id: RunId, step_id: StepId, send: Send) -> Callable[[Verdict], None] | None:
        if send.contract.limits is None:
            return None
        args = msgspec.json.decode(self._bodies.stored_call(run_id, send.intent_seq)[0])
        return partial(self._limiter.settle, run_id, step_id, send.contract, args)

    def _tell(
        self, right: Right, step_id: StepId, send: Send, outcome: Outcome, settled: Settled
    ) -> StepAnswer | Refused | Wait:
        """The caller's answer after a settle."""
        facts: dict[str, JSON] = {"step": step_id, "attempt": send.attempt, "retry_after_ms": RETRY_AFTER_MS}
        if settled.joined:
            return StepAnswer(right.run_id, step_id, "committed", right.epoch, send.key, False, outcome.receipt_json)
        if settled.is_diverged:
            return Refused("run_frozen", "diverged", {"steps": [step_id]})
        match settled.state:
            case "rejected":
                facts["receipt"] = msgspec.json.decode(outcome.receipt_json)
                reason = "precondition" if outcome.kind == "unmet" else "refused"
                return Refused("step_rejected", reason, facts)
            case "held":
                if send.contract.independent:
                    facts["independent"] = True
                return Refused("step_held", outcome.reason, {**facts, "steps": [step_id], **_to_add(outcome)})
            case _ if settled.state in ("pending", "fenced", "in_doubt") and send.write is not None:
                # The replica, not the call, is why: the agent's one await goes on under the next epoch, or asks again.
                until_ms = self._engine.clock.now().ms + RETRY_AFTER_MS
                return Wait("step_pending", "replica", until_ms, step_id, workspace_id=send.write.workspace_id)
            case "pending":
                return Refused("step_pending", outcome.reason, facts)
            case "applied" | "committed" | "compensated":
                # Another attempt's receipt stands, or the asking epoch has ended: the books say which when asked again.
                return Wait("step_in_flight", "settled", 0, step_id)
            case _:
                return Refused("in_doubt", outcome.reason, facts)

    async def _send(
        self, right: Right, step_id: StepId, send: Send, args_json: str | None, request: Request | None
    ) -> Outcome:
        """One attempt of the stored call; a replay reads its bytes from the log, never from the caller."""
        contract = send.contract
        if send.is_replay or args_json is None:
            args_json, request = self._bodies.stored_call(right.run_id, send.intent_seq)
        if send.is_first and contract.require is not None:
            unmet = await self._precondition(right, step_id, send, contract.require, args_json)
            if unmet is not None:
                return unmet
        if contract.kind == "http" and request is not None:
            name = f"{right.run_id}/{step_id}"
            return await self._http.send(contract, request, send.deadline_ms, step=name, epoch=right.epoch)
        if contract.kind == "smtp" and request is not None and self._smtp is not None:
            return await self._smtp.send(contract, request, send.deadline_ms)
        if contract.kind == "smtp":
            return Outcome("unsent", reason="no_smtp_sender")
        if contract.kind == "workspace":
            return await self.workspaces.send(right, step_id, send, args_json)
        if self._python is None:
            return Outcome("unsent", reason="no_python_runner")
        outcome = await self._python(contract.tool, msgspec.json.decode(args_json), send.key, send.deadline_ms)
        if outcome.kind != "applied" or is_expected(contract, msgspec.json.decode(outcome.receipt_json)["body"]):
            return outcome
        return Outcome("unlisted", outcome.receipt_json, "unexpected_answer")

    async def _precondition(
        self, right: Right, step_id: StepId, send: Send, require: Require, args_json: str
    ) -> Outcome | None:
        """Why the first sending may not go: what must hold doesn't, or nobody could say. None if it may."""
        sources: dict[str, JSON] = {"args": msgspec.json.decode(args_json)}
        try:
            match, args = require.match.filled(sources), fill(dict(require.args), sources)
            name = f"{right.run_id}/{step_id}"
            said = await self.prober.read(require.tool, args, send.key, send.deadline_ms, name, right.epoch)
        except RenderError:
            return Outcome("unsent", reason="precondition_unknown")
        receipt = msgspec.json.decode(said.receipt_json)
        if receipt is None or said.kind != "applied" or receipt["truncated"]:
            return Outcome("unsent", reason="precondition_unknown")
        if match.matches(receipt["status"] or 0, None if receipt.get("encoding") else receipt["body"]):
            return None
        body = canonical({"precondition": require.tool, "answer": receipt["body"]})
        told = object_json(
            body=body, content_type='"application/json"', digest=f'"{digest(body)}"', status="null", truncated="false"
        )
        return Outcome("unmet", told, "precondition")

    def _prepare_undo(
        self, right: Right, step_id: StepId, target: Step | None, given: tuple[str, str] | None
    ) -> Asking | Refused:
        """What the undo of a step would be: as given, as the books hold it, or as the step's stored contract says."""
        is_safe = target is not None and target.contract and self._engine.contract(target.contract).undo_safe_if_absent
        if target is None or not target.contract or not (target.receipt_seq or is_safe):
            return Refused("already_decided", "nothing_to_compensate", {"step": step_id})
        undo_id, problem = derived_id(step_id, "undo"), ""
        begun = self._engine.step(right.run_id, undo_id)
        if given is not None:
            tool, args_json = given
        elif begun is not None and begun.intent_seq:
            tool, args_json = begun.tool, self._bodies.stored_call(right.run_id, begun.intent_seq)[0]
        else:
            undo = self._engine.contract(target.contract).undo
            if undo is None:
                return Refused("invalid", "no_undo", {"step": step_id, "tool": target.tool})
            tool = undo.tool
            args_json, problem = self._undo_args(right.run_id, target, undo)
        known = self._tools.get(tool)
        request, misfit = (None, problem) if problem else self._request(right.run_id, undo_id, known, args_json)
        contract = None if known is None else known.contract
        command = Compensate(
            right=right,
            step_id=step_id,
            undo_step_id=undo_id,
            tool=tool,
            args_json=args_json,
            call_digest=call_digest(tool, args_json),
            contract=contract,
            request=request,
            owner=self._engine.boot,
            deadline_ms=0,
            contract_digest="" if known is None else known.digest,
            problem=problem or misfit,
            is_given=given is not None,
        )
        return partial(self._admit_undo, command)

    def _undo_args(self, run_id: RunId, target: Step, undo: Undo) -> tuple[str, str]:
        """(the arguments of a declared undo, why they can't be written): from the stored call and its receipt."""
        args, _ = self._bodies.stored_call(run_id, target.intent_seq)
        receipt = self._bodies.receipt(run_id, target.receipt_seq) if target.receipt_seq else "null"
        try:
            return canonical(render_undo(undo, msgspec.json.decode(args), msgspec.json.decode(receipt))), ""
        except RenderError as error:
            return "null", str(error)

    async def _admit_undo(self, command: Compensate, now_ms: int) -> StepAnswer | Refused | Wait:
        if self._hook is not None:
            await self.reach("gateway.before_intent", command.right, command.undo_step_id)
            now_ms = self._engine.clock.now().ms
        timeout_ms = 0 if command.contract is None else command.contract.timeout_ms
        command = replace(command, deadline_ms=now_ms + timeout_ms)
        verdict = await self._engine.submit(command)
        return await self._follow(command.right, command.undo_step_id, verdict, command.args_json, command.request)

    async def reach(self, point: Point, right: Right, step_id: StepId, **more: str | int) -> None:
        if self._hook is not None:
            facts: Mapping[str, str | int] = {
                "run": right.run_id,
                "step": step_id,
                "epoch": right.epoch,
                "holder": right.holder,
                **more,
            }
            await self._hook(point, facts)


def _to_add(outcome: Outcome) -> dict[str, JSON]:
    """The entry of `refusals` that an unlisted answer asks for."""
    receipt = msgspec.json.decode(outcome.receipt_json)
    if outcome.kind != "unlisted" or receipt is None or (receipt["status"] or 0) < 300:
        return {}
    body = None if receipt.get("encoding") else receipt["body"]
    return {"refusals_line": line_to_add(receipt["status"], body)}


def render(contract: Contract, args: Mapping[str, JSON], key: str) -> Request:
    """What a call sends, by the kind of its tool. Raises `RenderError`."""
    if contract.kind == "smtp":
        from tidefast.protocol.mail import render_mail  # only where a mail is sent: it loads the email package

        return render_mail(contract, args, key)
    return render_request(contract, args, key)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _out_of_patience(wait: Wait, run_id: RunId) -> Refused:
    """What a caller hears whose patience ends while it would have to wait on."""
    facts: dict[str, JSON] = {"step": wait.blocking_step, "until_ms": wait.until_ms}
    if wait.workspace_id is not None:
        facts |= {"workspace": wait.workspace_id, "run": wait.blocking_run or run_id}
    return Refused(wait.code, wait.reason, facts)
