"""What each address asks of the authority: one short function per verb.

By the time a function here runs, every check of `routes.py` has passed: the message is whole, the right is proved and
was live a moment ago. Whether it still is, the rules decide in the transaction that writes.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidefast.protocol.answers import (
    EventInfo,
    JournalPage,
    LeaseGrant,
    RunCreated,
    RunInfo,
    StepAnswer,
    StepInfo,
)
from tidefast.protocol.commands import ResolveVerdict
from tidefast.protocol.ids import is_id
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused, Renewed, Settled
from tidefast.wire import messages as m
from tidefast.wire import tokens
from tidefast.wire.answers import spell, spell_all
from tidefast.wire.problem import Problem, from_refused, invalid, problem

OPERATOR = "operator"  # whom the log names for a verb that came with the operator's key


class Authority(Protocol):
    """What the server needs of the services. Every method answers or returns `Refused`; mutating ones are durable."""

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused: ...

    async def claim(
        self, agents: dict[str, list[str]], holder: str, lease_ms: int, max_runs: int, wait_ms: int, request_id: str
    ) -> Sequence[LeaseGrant]: ...

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused: ...

    async def journal(self, right: Right, after: int) -> JournalPage | Refused: ...

    async def fence(self, right: Right) -> Refused | None: ...

    async def renew(self, rights: Sequence[Right]) -> Sequence[Renewed | Refused]: ...

    async def release(self, right: Right, reason: str, detail: str, pause_ms: int) -> Done | Refused: ...

    async def apply(
        self, right: Right, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused: ...

    async def save_result(self, right: Right, step_id: str, value_json: str) -> StepAnswer | Refused: ...

    async def compensate(self, right: Right, step_id: str, wait_ms: int) -> StepAnswer | Refused: ...

    async def checkpoint(self, right: Right, number: int, state_json: str) -> Done | Refused: ...

    async def complete(
        self, right: Right, result_json: str, asked: Sequence[str], dropped: Sequence[str]
    ) -> Done | Refused: ...

    async def fail(self, right: Right, error: str) -> Done | Refused: ...

    async def preempt(self, run_id: str, by: str, note: str, expect_epoch: int | None) -> Done | Refused: ...

    async def thaw(self, run_id: str, by: str, note: str) -> Done | Refused: ...

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
    ) -> Settled | Refused: ...

    async def run(self, run_id: str) -> RunInfo | Refused: ...

    async def runs(self, after: str | None, limit: int, state: str | None) -> Sequence[RunInfo]: ...

    async def events(self, run_id: str, after: int, limit: int) -> Sequence[EventInfo] | Refused: ...

    async def steps(self, run_id: str, after: str | None, limit: int) -> Sequence[StepInfo] | Refused: ...

    async def step(self, run_id: str, step_id: str) -> StepInfo | Refused: ...

    async def held(self) -> Sequence[StepInfo]: ...


@dataclass(frozen=True, slots=True)
class Signer:
    """Mints and checks lease tokens; the secret appears in no text."""

    secret: bytes
    namespace: bytes

    def __repr__(self) -> str:
        return "Signer()"

    def mint(self, right: Right) -> str:
        return tokens.mint(self.secret, self.namespace, right)

    def verify(self, token: str) -> Right | None:
        return tokens.verify(self.secret, self.namespace, token)


@dataclass(slots=True)
class Call:
    """One request, filled in by its checks. `right` is there exactly on the addresses that ask for a lease token."""

    authority: Authority
    signer: Signer
    run: str = ""
    step: str = ""
    right: Right | None = None
    message: Any = None

    @property
    def holds(self) -> Right:
        if self.right is None:
            raise TypeError("an address without a lease token asked for its right")
        return self.right


@dataclass(frozen=True, slots=True)
class Told:
    """An answer: what is said, and with which status."""

    body: dict[str, Any]
    status: int = 200


Outcome = Told | Problem


def told(answer: Any) -> Outcome:
    """A record or a refusal as an outcome."""
    return from_refused(answer) if isinstance(answer, Refused) else Told(spell(answer))


def _grant(call: Call, grant: LeaseGrant) -> LeaseGrant:
    return grant.with_token(call.signer.mint(Right(grant.run_id, grant.epoch, grant.holder)))


async def create_run(call: Call) -> Outcome:
    asked: m.CreateRun = call.message
    created = await call.authority.create_run(asked.run_id, asked.agent, asked.version, asked.input)
    if isinstance(created, Refused):
        return from_refused(created)
    return Told(spell(created), 201 if created.was_new else 200)


async def claim(call: Call) -> Outcome:
    asked: m.Claim = call.message
    request_id = asked.request_id or secrets.token_hex(16)
    grants = await call.authority.claim(
        asked.agents, asked.holder, asked.lease_ms, asked.max, asked.wait_ms, request_id
    )
    return Told(spell_all("leases", [_grant(call, grant) for grant in grants]))


async def grant(call: Call) -> Outcome:
    asked: m.Grant = call.message
    request_id = asked.request_id or secrets.token_hex(16)
    granted = await call.authority.grant(call.run, asked.holder, asked.lease_ms, request_id)
    return told(granted if isinstance(granted, Refused) else _grant(call, granted))


async def renew(call: Call) -> Outcome:
    (answer,) = await call.authority.renew([call.holds])
    return told(answer)


async def renew_many(call: Call) -> Outcome:
    """One answer per token, in their order: the new expiry, or the problem."""
    asked: m.RenewMany = call.message
    rights = [call.signer.verify(token) for token in asked.tokens]
    answers = iter(await call.authority.renew([right for right in rights if right is not None]))
    leases: list[dict[str, Any]] = []
    for right in rights:
        answer = Refused("stale_epoch", "bad_token") if right is None else next(answers)
        if isinstance(answer, Renewed):
            leases.append({"expires_at_ms": answer.expires_at_ms})
        else:
            said = problem("bad_token", "bad_token") if right is None else from_refused(answer)
            leases.append({"problem": said.to_record()})
    return Told({"leases": leases})


async def release(call: Call) -> Outcome:
    asked: m.Release = call.message
    return told(await call.authority.release(call.holds, asked.reason, asked.detail, asked.pause_ms))


async def journal(call: Call) -> Outcome:
    asked: m.JournalQuery = call.message
    return told(await call.authority.journal(call.holds, asked.after))


async def apply(call: Call) -> Outcome:
    asked: m.Apply = call.message
    if asked.stored == (asked.args is not None):
        return invalid("field_missing", "send either `args`, or `stored: true` for the stored call", {"field": "args"})
    if not asked.stored and asked.tool is None:
        return invalid("field_missing", "`tool` is missing", {"field": "tool"})
    if not asked.stored and not is_id(call.step):
        return invalid("id_invalid", "a derived step is minted by the authority, not by a caller", {"field": "step"})
    args = None if asked.stored else asked.args
    return told(await call.authority.apply(call.holds, call.step, asked.tool or "", args, asked.wait_ms))


async def save_result(call: Call) -> Outcome:
    asked: m.SaveResult = call.message
    if not is_id(call.step):
        return invalid("id_invalid", "a derived step is minted by the authority, not by a caller", {"field": "step"})
    return told(await call.authority.save_result(call.holds, call.step, asked.value))


async def compensate(call: Call) -> Outcome:
    asked: m.Compensate = call.message
    return told(await call.authority.compensate(call.holds, call.step, asked.wait_ms))


async def checkpoint(call: Call) -> Outcome:
    asked: m.SaveCheckpoint = call.message
    return told(await call.authority.checkpoint(call.holds, asked.seq, asked.state))


async def complete(call: Call) -> Outcome:
    asked: m.Complete = call.message
    return told(await call.authority.complete(call.holds, asked.result, asked.asked, asked.dropped))


async def fail(call: Call) -> Outcome:
    asked: m.Fail = call.message
    return told(await call.authority.fail(call.holds, asked.error))


async def preempt(call: Call) -> Outcome:
    asked: m.Preempt = call.message
    expected = None if asked.expect is None else asked.expect.epoch
    return told(await call.authority.preempt(call.run, OPERATOR, asked.note, expected))


async def thaw(call: Call) -> Outcome:
    asked: m.Thaw = call.message
    return told(await call.authority.thaw(call.run, OPERATOR, asked.note))


async def resolve(call: Call) -> Outcome:
    asked: m.Resolve = call.message
    expected = None if asked.expect is None else asked.expect.attempts
    return told(
        await call.authority.resolve(
            call.run, call.step, asked.verdict, OPERATOR, asked.note, asked.receipt, asked.looked_at_ms, expected
        )
    )


async def run(call: Call) -> Outcome:
    return told(await call.authority.run(call.run))


async def runs(call: Call) -> Outcome:
    asked: m.RunsQuery = call.message
    return Told(spell_all("runs", await call.authority.runs(asked.after, asked.limit, asked.state)))


async def events(call: Call) -> Outcome:
    asked: m.AfterSeqQuery = call.message
    found = await call.authority.events(call.run, asked.after, asked.limit)
    return from_refused(found) if isinstance(found, Refused) else Told(spell_all("events", found))


async def steps(call: Call) -> Outcome:
    asked: m.AfterStepQuery = call.message
    found = await call.authority.steps(call.run, asked.after, asked.limit)
    return from_refused(found) if isinstance(found, Refused) else Told(spell_all("steps", found))


async def step(call: Call) -> Outcome:
    return told(await call.authority.step(call.run, call.step))


async def held(call: Call) -> Outcome:
    return Told(spell_all("steps", await call.authority.held()))


async def healthz(call: Call) -> Outcome:
    """The process answers. Asks nothing of the store, so that a slow disk doesn't get the process killed."""
    return Told({"status": "ok"})


async def readyz(call: Call) -> Outcome:
    """The store answers."""
    await call.authority.runs(None, 1, None)
    return Told({"status": "ready"})
