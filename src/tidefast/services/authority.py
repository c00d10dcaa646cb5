"""The authority's verbs, one method each, for the server and for programs that embed it.

Every method answers a record or `Refused`. Mutating ones are durable when they return, renewals excepted. A caller is
known here only by its `Right`; who may call which verb is the server's question.
"""

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from zlib import crc32

from tidefast.engine.engine import Engine
from tidefast.protocol.answers import (
    BudgetInfo,
    EventInfo,
    JournalPage,
    LeaseGrant,
    RunCreated,
    RunInfo,
    StepAnswer,
    StepInfo,
)
from tidefast.protocol.budget import Limit, raise_limit
from tidefast.protocol.canonical import JSON
from tidefast.protocol.commands import (
    RUN_VERBS,
    Complete,
    CreateRun,
    Fail,
    Grant,
    Release,
    Renew,
    Resolve,
    ResolveVerdict,
    RunVerb,
    SaveCheckpoint,
    SaveResult,
)
from tidefast.protocol.ids import Epoch, RunId, StepId, is_derived_id, is_id
from tidefast.protocol.records import Right, RunHead
from tidefast.protocol.verdicts import Answer, Done, Granted, Refused, Renewed, Settled, Verdict
from tidefast.services.bodies import Bodies
from tidefast.services.gateway import Gateway
from tidefast.services.model_hop import ModelHop
from tidefast.services.model_sender import ModelSender
from tidefast.services.models import ModelBook
from tidefast.services.reads import LIMIT_MAX, Reads, Troubles, budget_info
from tidefast.services.relay import Relay

RAISABLE = frozenset(("run", "agent", "key", "tool", "day"))  # kinds of budgets; a minute raises itself
JOURNAL_BYTES_MAX = 1_048_576
CLAIM_BYTES = 4 * JOURNAL_BYTES_MAX  # a claim is answered with what it has once its leases hold this much
GRANTS_AT_ONCE = 4  # in one batch of a claim
NOTE_LENGTH_MAX = 4_096
CLAIM_SLICE_MS = 4_000  # a waiting claim is woken if there is a run for it; it looks by itself after once or twice this


class Authority:
    """All verbs over one engine and one gateway."""

    def __init__(self, engine: Engine, gateway: Gateway, models: ModelHop | None = None) -> None:
        self.engine = engine
        self.gateway = gateway
        self.models = models or ModelHop(engine, gateway, ModelBook(), ModelSender(engine.clock))
        self.reads = Reads(engine)
        self.workspaces = gateway.workspaces
        self._bodies = Bodies(engine)

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused:
        """A new run, or the same one if it exists with this agent and input (`run_conflict` otherwise)."""
        name = RunId(run_id or f"r-{secrets.token_hex(8)}")
        command = CreateRun(name, agent, agent_version, input_json, is_minted=run_id is None)
        done = _done(await self.engine.submit(command))
        if isinstance(done, Refused):
            return done
        head = self.engine.head(name)
        return RunCreated(name, "claimable" if head is None else head.state, done.was_new)

    async def claim(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        wait_ms: int,
        request_id: str,
        prefix: str = "",
    ) -> Sequence[LeaseGrant]:
        """Leases over up to `max_runs` claimable runs of these agents and versions; waits for the first one.

        Only runs whose ids begin with `prefix`.
        """
        until = self.engine.clock.now().ms + wait_ms
        while True:
            grants = await self._claim_now(agents, holder, lease_ms, max_runs, request_id, prefix)
            left = until - self.engine.clock.now().ms
            if grants or left <= 0:
                return grants
            slice_ms = (
                CLAIM_SLICE_MS + crc32(request_id.encode()) % CLAIM_SLICE_MS
            )  # so that not all look at one moment
            await self.engine.claimers.wait(agents, prefix, min(left, slice_ms))

    async def _claim_now(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        request_id: str,
        prefix: str,
    ) -> list[LeaseGrant]:
        live = (head for head in self.engine.live_runs() if head.run_id.startswith(prefix))
        told = [head.run_id for head in live if _is_of(head, holder, request_id)]
        if told:  # a repeat of a claim whose answer was lost: the same leases again
            again = await asyncio.gather(
                *(self.grant(run, holder, lease_ms, f"{request_id}.{run}") for run in told[:max_runs])
            )
            return [answer for answer in again if isinstance(answer, LeaseGrant)]
        now_ms = self.engine.clock.now().ms
        candidates = self.engine.store.claimable(agents, now_ms, max_runs * 2, prefix)
        free = [run for run in candidates if not self._is_taken(run)][:max_runs]
        grants: list[LeaseGrant] = []
        while free and sum(map(_length, grants)) < CLAIM_BYTES:
            asked = [self.grant(run, holder, lease_ms, f"{request_id}.{run}") for run in free[:GRANTS_AT_ONCE]]
            del free[:GRANTS_AT_ONCE]
            answers = await asyncio.gather(*asked)
            grants += [answer for answer in answers if isinstance(answer, LeaseGrant)]
        return grants

    def _is_taken(self, run_id: RunId) -> bool:
        """Whether a candidate that the store named has been granted since, though not durably yet."""
        head = self.engine.head(run_id)
        return head is None or head.is_live

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused:
        """The run's next epoch for this holder, with input, newest checkpoint and journal."""
        verdict = await self.engine.submit(Grant(RunId(run_id), holder, lease_ms, request_id))
        if isinstance(verdict, Refused):
            return verdict
        if not isinstance(verdict, Granted):
            raise TypeError(f"a grant can't be answered with {verdict!r}")
        return self._lease(RunId(run_id), verdict)

    def _lease(self, run_id: RunId, granted: Granted) -> LeaseGrant:
        head = self.engine.head(run_id)
        if head is None:
            raise TypeError(f"run {run_id} was granted and has no head")
        page = self._journal(run_id, 0)
        state = self._bodies.member(run_id, granted.checkpoint_seq, "state") if granted.checkpoint_seq else "null"
        return LeaseGrant(
            run_id=run_id,
            agent=head.agent,
            agent_version=head.agent_version,
            epoch=granted.epoch,
            holder=granted.holder,
            lease_ms=granted.lease_ms,
            expires_at_ms=granted.expires_at_ms,
            input_json=self._bodies.member(run_id, 1, "input"),
            checkpoint=granted.checkpoint,
            state_json=state,
            is_ending=granted.is_ending,
            unsettled=head.unsettled,
            journal=page.entries,
            journal_next=page.next,
        )

    async def journal(self, right: Right, after: int) -> JournalPage | Refused:
        """More of the finished steps that came with the grant."""
        await self.engine.settled_view(right.run_id)
        return await self.engine.fence(right) or self._journal(right.run_id, after)

    def _journal(self, run_id: RunId, after: int) -> JournalPage:
        key = self.engine.run_key(run_id)
        if key is None:
            return JournalPage((), 0)
        entries, following = self.engine.store.journal(key, after, JOURNAL_BYTES_MAX)
        return JournalPage(tuple(entries), following)

    async def fence(self, right: Right) -> Refused | None:
        """The refusal that this right would meet now; for a caller whose body isn't looked at yet."""
        return await self.engine.fence(right)

    async def renew(self, rights: Sequence[Right]) -> Sequence[Renewed | Refused]:
        """Move the expiry of each lease. Not durable: losing a renewal only shortens a lease."""
        answers: list[Renewed | Refused] = []
        for right in rights:
            verdict = await self.engine.submit(Renew(right))
            answers.append(verdict if isinstance(verdict, Renewed | Refused) else _unexpected(verdict))
        return answers

    async def release(self, right: Right, reason: str, detail: str) -> Done | Refused:
        """Give the lease back; reason `drift` also freezes the run for a person."""
        if reason not in ("done", "error", "held", "shutdown", "drift"):
            return Refused("invalid", "reason", {"reason": reason})
        return _done(await self.engine.submit(Release(right, reason, detail[:500])))  # type: ignore[arg-type]

    async def apply(
        self, right: Right, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        """One effect through the gateway, or the stored answer (see `Gateway.apply`)."""
        stored = self.engine.step(right.run_id, StepId(step_id)) if args_json is None else None
        if stored is not None and stored.effect == "model":
            return await self.models.stored(right, StepId(step_id), stored.tool, wait_ms)
        return await self.gateway.apply(right, StepId(step_id), tool, args_json, wait_ms)

    async def chat(
        self, right: Right, step_id: str, body: str, wait_ms: int, key: str = "", relay: Relay | None = None
    ) -> StepAnswer | Refused:
        """One asking of a model, or the journaled answer (see `ModelHop.ask`)."""
        return await self.models.ask(right, StepId(step_id), body, wait_ms, key, relay)

    async def budgets(self, after: str, limit: int) -> Sequence[BudgetInfo]:
        """What was spent and what may be, in order of the budgets' names; those in which nothing was booked are not."""
        return [self._budget(budget.name) for budget in self.engine.store.budgets(after, limit)]

    async def raise_budget(self, name: str, limit: Limit, by: str, note: str) -> BudgetInfo | Refused:
        """An operator sets limits of one budget, above the configured ones. Durable when it returns."""
        kind, *parts = name.split("/")
        if kind not in RAISABLE or not parts or not all(is_id(part) or is_derived_id(part) for part in parts):
            return Refused("not_found", "budget_unknown", {"budget": name})
        self.engine.book([raise_limit(self.engine.budget(name), limit, f"{by}: {note}" if note else by)])
        await self.engine.booked()
        return self._budget(name)

    def _budget(self, name: str) -> BudgetInfo:
        return budget_info(self.engine.budget(name), self.models.limit_of(name), self.engine.clock.now().ms)

    async def compensate(
        self, right: Right, step_id: str, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        """The undo of a step, declared by its contract or `given` as (tool, arguments) (see `Gateway.compensate`)."""
        return await self.gateway.compensate(right, StepId(step_id), wait_ms, given)

    async def save_result(self, right: Right, step_id: str, value_json: str) -> StepAnswer | Refused:
        """Journal a local step's value; the first value stands."""
        verdict = await self.engine.submit(SaveResult(right, StepId(step_id), value_json))
        if isinstance(verdict, Refused):
            return verdict
        if not isinstance(verdict, Answer):
            return _unexpected(verdict)
        if verdict.replayed:
            return self._bodies.step_answer(right.run_id, verdict)
        return StepAnswer(right.run_id, verdict.step_id, verdict.state, verdict.epoch, verdict.key, False, value_json)

    async def checkpoint(self, right: Right, number: int, state_json: str) -> Done | Refused:
        """Store the run's state under the next number."""
        return _done(await self.engine.submit(SaveCheckpoint(right, number, state_json)))

    async def complete(
        self, right: Right, result_json: str, asked: Collection[str], dropped: Collection[str]
    ) -> Done | Refused:
        """End the run with a result. `asked` names the steps that this pass answered from its journal."""
        command = Complete(right, result_json, frozenset(map(StepId, asked)), frozenset(map(StepId, dropped)))
        return _done(await self.engine.submit(command))

    async def fail(self, right: Right, error: str) -> Done | Refused:
        """End the run with an error, now or once nothing is unsettled (`state` says which: failed or failing)."""
        return _done(await self.engine.submit(Fail(right, error[:2_000])))

    async def preempt(self, run_id: str, by: str, note: str, expect_epoch: int | None) -> Done | Refused:
        """An operator ends the live epoch; the run can be claimed at once."""
        return await self.oversee("preempt", run_id, by, note, expect_epoch)

    async def oversee(self, verb: RunVerb, run_id: str, by: str, note: str, expect_epoch: int | None) -> Done | Refused:
        """An operator's verb on a run. `expect_epoch` is the epoch they saw; an older one is refused as `moved`."""
        expected = None if expect_epoch is None else Epoch(expect_epoch)
        return _done(await self.engine.submit(RUN_VERBS[verb](RunId(run_id), by, note[:NOTE_LENGTH_MAX], expected)))

    async def resolve(
        self,
        run_id: str,
        step_id: str,
        verdict: ResolveVerdict,
        by: str,
        note: str,
        receipt_json: str,
        looked_at_ms: int | None,
        expect_attempts: int | None,
        expect_epoch: int | None = None,
    ) -> Settled | Refused:
        """A person says what became of a step in doubt or held."""
        expected = None if expect_epoch is None else Epoch(expect_epoch)
        command = Resolve(
            RunId(run_id), StepId(step_id), verdict, by, note, receipt_json, looked_at_ms, expect_attempts, expected
        )
        answer = await self.engine.submit(command)
        return answer if isinstance(answer, Settled | Refused) else _unexpected(answer)

    async def run(self, run_id: str) -> RunInfo | Refused:
        return await self.reads.run(RunId(run_id))

    async def runs(self, after: str | None, limit: int, state: str | None, prefix: str = "") -> Sequence[RunInfo]:
        return await self.reads.runs(after, limit, state, prefix)

    async def events(self, run_id: str, after: int, limit: int) -> Sequence[EventInfo] | Refused:
        return await self.reads.events(RunId(run_id), after, limit)

    async def steps(self, run_id: str, after: str | None, limit: int) -> Sequence[StepInfo] | Refused:
        return await self.reads.steps(RunId(run_id), after, limit)

    async def step(self, run_id: str, step_id: str) -> StepInfo | Refused:
        return await self.reads.step(RunId(run_id), StepId(step_id))

    async def list_workspaces(self, after: str, limit: int) -> Sequence[Mapping[str, JSON]]:
        return self.workspaces.reads.list(after, limit)

    async def workspace(self, workspace_id: str) -> Mapping[str, JSON] | Refused:
        return self.workspaces.reads.one(workspace_id)

    async def workspace_log(self, workspace_id: str, after: int, limit: int) -> Sequence[Mapping[str, JSON]] | Refused:
        """Joined writes, in order."""
        return self.workspaces.reads.log(workspace_id, after, limit)

    async def workspace_entries(
        self, workspace_id: str, index: int | None, after: str, limit: int
    ) -> Mapping[str, JSON] | Refused:
        """What stands where, in the newest content or in that of an index."""
        return self.workspaces.reads.entries(workspace_id, index, after, limit)

    async def workspace_diff(self, workspace_id: str, since: int, until: int | None) -> Mapping[str, JSON] | Refused:
        """What changed between two indexes."""
        return self.workspaces.reads.diff(workspace_id, since, until)

    async def read_workspace(
        self, workspace_id: str, verb: str, args_json: str, wait_ms: int
    ) -> Mapping[str, JSON] | Refused:
        """What is on the replica's disk now (see `Workspaces.read_now`)."""
        return await self.workspaces.read_now(workspace_id, verb, args_json, wait_ms)

    async def held(
        self, prefix: str = "", after: tuple[str, str] | None = None, limit: int = LIMIT_MAX
    ) -> Sequence[StepInfo]:
        return await self.reads.held(prefix, after, limit)

    async def has_ended(self, run_id: str) -> bool:
        return await self.reads.has_ended(RunId(run_id))

    async def troubles(self) -> Troubles:
        return await self.reads.troubles()

    async def changed(self, run_id: str, timeout_ms: int) -> None:
        """Return when something of this run became durable, or after the time given."""
        await self.engine.wait_for_change(RunId(run_id), timeout_ms)


def _length(grant: LeaseGrant) -> int:
    """About how many bytes a lease takes in an answer."""
    return len(grant.input_json) + len(grant.state_json) + sum(len(entry.data_json) for entry in grant.journal)


def _is_of(head: RunHead, holder: str, request_id: str) -> bool:
    """Whether this live lease was granted to this very claim."""
    return bool(request_id) and head.holder == holder and head.request_id == f"{request_id}.{head.run_id}"


def _done(verdict: Verdict) -> Done | Refused:
    return verdict if isinstance(verdict, Done | Refused) else _unexpected(verdict)


def _unexpected(verdict: Verdict) -> Refused:
    raise TypeError(f"the rules answered with {verdict!r}, which this verb does not know")
