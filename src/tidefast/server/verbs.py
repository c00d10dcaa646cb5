"""What each address asks of the authority: one short function per verb.

By the time a function here runs, every check of `routes.py` has passed: the message is whole, the right is proved and
was live a moment ago. Whether it still is, the rules decide in the transaction that writes.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.budget import Limit
from tidefast.protocol.commands import RunVerb
from tidefast.protocol.ids import StepId, asked_by, is_id
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Refused, Renewed
from tidefast.server.access import ANYONE, Caller
from tidefast.server.bodies import Info, without_bodies
from tidefast.server.credentials import Signer
from tidefast.server.meters import MEDIA_TYPE as METRICS_TYPE
from tidefast.server.meters import Meters
from tidefast.wire import messages as m
from tidefast.wire.answers import spell, spell_all
from tidefast.wire.problem import Problem, from_refused, invalid, problem

if TYPE_CHECKING:  # loading the services loads an HTTP client
    from tidefast.services.authority import Authority


@dataclass(slots=True)
class Call:
    """One request, filled in by its checks. `right` is there exactly on the addresses that ask for a lease token."""

    authority: "Authority"
    signer: Signer
    meters: Meters
    stopping: asyncio.Event
    run: str = ""
    step: str = ""
    workspace: str = ""
    caller: Caller = ANYONE
    right: Right | None = None
    message: Any = None
    has_waited: bool = False
    wait: str = ""  # the header of that name, where an address reads it

    @property
    def holds(self) -> Right:
        if self.right is None:
            raise TypeError("an address without a lease token asked for its right")
        return self.right


@dataclass(frozen=True, slots=True)
class Told:
    """An answer: what is said, and with which status. Bytes are a text of the media type named."""

    body: dict[str, Any] | bytes
    status: int = 200
    media_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


Outcome = Told | Problem


def told(answer: Any) -> Outcome:
    """A record or a refusal as an outcome."""
    return from_refused(answer) if isinstance(answer, Refused) else Told(spell(answer))


def _shown(call: Call, answer: Info | Refused) -> Outcome:
    """What this caller may see of a record."""
    if isinstance(answer, Refused):
        return from_refused(answer)
    return Told(spell(answer if call.caller.bodies else without_bodies(answer)))


def _shown_all(call: Call, name: str, found: Sequence[Info] | Refused) -> Outcome:
    if isinstance(found, Refused):
        return from_refused(found)
    return Told(spell_all(name, found if call.caller.bodies else [without_bodies(record) for record in found]))


def _grant(call: Call, grant: LeaseGrant) -> LeaseGrant:
    return grant.with_token(call.signer.mint(Right(grant.run_id, grant.epoch, grant.holder)))


async def create_run(call: Call) -> Outcome:
    """A caller with a prefix makes runs of its own only; a run without a name gets one of those."""
    asked: m.CreateRun = call.message
    prefix = call.caller.runs
    run_id = asked.run_id or (f"{prefix}{secrets.token_hex(8)}" if prefix else None)
    if run_id is not None and not call.caller.sees(run_id):
        return problem("forbidden", "run_name", {"prefix": prefix})
    created = await call.authority.create_run(run_id, asked.agent, asked.version, asked.input)
    if isinstance(created, Refused):
        return from_refused(created)
    return Told(spell(created), 201 if created.was_new else 200)


async def claim(call: Call) -> Outcome:
    asked: m.Claim = call.message
    request_id = asked.request_id or secrets.token_hex(16)
    grants = await call.authority.claim(
        asked.agents, asked.holder, asked.lease_ms, asked.max, asked.wait_ms, request_id, call.caller.runs
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
    rights = [_seen(call, token) for token in asked.tokens]
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


def _seen(call: Call, token: str) -> Right | None:
    right = call.signer.verify(token)
    return right if right is not None and call.caller.sees(right.run_id) else None


async def release(call: Call) -> Outcome:
    asked: m.Release = call.message
    return told(await call.authority.release(call.holds, asked.reason, asked.detail))


async def journal(call: Call) -> Outcome:
    asked: m.JournalQuery = call.message
    return told(await call.authority.journal(call.holds, asked.after))


async def apply(call: Call) -> Outcome:
    asked: m.Apply = call.message
    if asked.stored == (asked.args is not None):
        return invalid("field_missing", "send either `args`, or `stored: true` for the stored call", {"field": "args"})
    if not asked.stored and asked.tool is None:
        return invalid("field_missing", "`tool` is missing", {"field": "tool"})
    if not asked.stored and not is_id(call.step) and asked_by(StepId(call.step)) is None:
        return invalid("id_invalid", "a derived step is minted by the authority, not by a caller", {"field": "step"})
    args = None if asked.stored else asked.args
    return told(await call.authority.apply(call.holds, call.step, asked.tool or "", args, asked.wait_ms))


async def save_result(call: Call) -> Outcome:
    asked: m.SaveResult = call.message
    if not is_id(call.step) and asked_by(StepId(call.step)) is None:
        return invalid("id_invalid", "a derived step is minted by the authority, not by a caller", {"field": "step"})
    return told(await call.authority.save_result(call.holds, call.step, asked.value))


async def compensate(call: Call) -> Outcome:
    asked: m.Compensate = call.message
    if (asked.tool is None) != (asked.args is None):
        missing = "tool" if asked.tool is None else "args"
        return invalid("field_missing", "send both `tool` and `args`, or neither", {"field": missing})
    given = None if asked.tool is None or asked.args is None else (asked.tool, asked.args)
    return told(await call.authority.compensate(call.holds, call.step, asked.wait_ms, given))


async def checkpoint(call: Call) -> Outcome:
    asked: m.SaveCheckpoint = call.message
    return told(await call.authority.checkpoint(call.holds, asked.seq, asked.state))


async def complete(call: Call) -> Outcome:
    asked: m.Complete = call.message
    return told(await call.authority.complete(call.holds, asked.result, asked.asked, asked.dropped))


async def fail(call: Call) -> Outcome:
    asked: m.Fail = call.message
    return told(await call.authority.fail(call.holds, asked.error))


def oversee(verb: RunVerb) -> Callable[[Call], Awaitable[Outcome]]:
    """An operator's verb on a run."""

    async def ask(call: Call) -> Outcome:
        asked: m.Oversee = call.message
        expected = None if asked.expect is None else asked.expect.epoch
        return told(await call.authority.oversee(verb, call.run, call.caller.name, asked.note, expected))

    ask.__name__ = verb
    ask.__doc__ = {
        "preempt": "End a run's lease.",
        "pause": "Let nothing new of a run begin.",
        "resume": "Let a paused run go on.",
        "freeze": "Stop a run for a person to look at.",
        "thaw": "Let a frozen run go on.",
        "cancel": "End a run: settle what is open, undo what can be undone.",
    }[verb]
    return ask


async def resolve(call: Call) -> Outcome:
    asked: m.Resolve = call.message
    expected = asked.expect or m.Expect()
    verdict, note, receipt, looked = asked.verdict, asked.note, asked.receipt, asked.looked_at_ms
    return told(
        await call.authority.resolve(
            *(call.run, call.step, verdict, call.caller.name, note, receipt, looked, expected.attempts, expected.epoch)
        )
    )


async def run(call: Call) -> Outcome:
    return _shown(call, await call.authority.run(call.run))


async def runs(call: Call) -> Outcome:
    asked: m.RunsQuery = call.message
    if asked.after is not None and not call.caller.sees(asked.after):
        return Told({"runs": []})  # what is told after a run that doesn't exist
    found = await call.authority.runs(asked.after, asked.limit, asked.state, call.caller.runs)
    return _shown_all(call, "runs", found)


async def events(call: Call) -> Outcome:
    asked: m.AfterSeqQuery = call.message
    found = await call.authority.events(call.run, asked.after, asked.limit)
    return _shown_all(call, "events", found)


async def steps(call: Call) -> Outcome:
    asked: m.AfterStepQuery = call.message
    found = await call.authority.steps(call.run, asked.after, asked.limit)
    return _shown_all(call, "steps", found)


async def step(call: Call) -> Outcome:
    return _shown(call, await call.authority.step(call.run, call.step))


async def held(call: Call) -> Outcome:
    """Steps that wait for a person, in order of runs and steps."""
    asked: m.HeldQuery = call.message
    run_id, _, step_id = (asked.after or "").partition("/")
    if run_id and not call.caller.sees(run_id):
        return Told({"steps": []})
    after = (run_id, step_id) if asked.after else None
    return _shown_all(call, "steps", await call.authority.held(call.caller.runs, after, asked.limit))


async def budgets(call: Call) -> Outcome:
    asked: m.BudgetsQuery = call.message
    return Told(spell_all("budgets", await call.authority.budgets(asked.after, asked.limit)))


async def raise_budget(call: Call) -> Outcome:
    asked: m.RaiseBudget = call.message
    limit = Limit(asked.calls, asked.tokens, asked.micros)
    return told(await call.authority.raise_budget(asked.name, limit, call.caller.name, asked.note))


async def healthz(call: Call) -> Outcome:
    """The process answers. Asks nothing of the store, so that a slow disk doesn't get the process killed."""
    return Told({"status": "ok"})


async def readyz(call: Call) -> Outcome:
    """The store answers, and the server isn't stopping."""
    if call.stopping.is_set():
        return problem("store_unavailable", "stopping")
    await call.authority.runs(None, 1, None)
    return Told({"status": "ready"})


def _of_workspace(found: Any) -> Outcome:
    """A record about a workspace."""
    return from_refused(found) if isinstance(found, Refused) else Told(dict(found))


async def workspaces(call: Call) -> Outcome:
    asked: m.WorkspacesQuery = call.message
    return Told({"workspaces": list(await call.authority.list_workspaces(asked.after or "", asked.limit))})


async def workspace(call: Call) -> Outcome:
    return _of_workspace(await call.authority.workspace(call.workspace))


async def workspace_log(call: Call) -> Outcome:
    asked: m.AfterSeqQuery = call.message
    found = await call.authority.workspace_log(call.workspace, asked.after, asked.limit)
    return from_refused(found) if isinstance(found, Refused) else Told({"writes": list(found)})


async def workspace_entries(call: Call) -> Outcome:
    asked: m.EntriesQuery = call.message
    return _of_workspace(await call.authority.workspace_entries(call.workspace, asked.index, asked.after, asked.limit))


async def workspace_diff(call: Call) -> Outcome:
    asked: m.DiffQuery = call.message
    return _of_workspace(await call.authority.workspace_diff(call.workspace, asked.since, asked.until))


async def read_workspace(call: Call) -> Outcome:
    """What is on the replica's disk now: no step, no log, and nothing that a later pass could rely on."""
    asked: m.ReadWorkspace = call.message
    return _of_workspace(await call.authority.read_workspace(call.workspace, asked.verb, asked.args, asked.wait_ms))


async def metrics(call: Call) -> Outcome:
    """What the server counts, for Prometheus."""
    return Told(call.meters.text(await call.authority.troubles()), media_type=METRICS_TYPE)


async def openapi(call: Call) -> Outcome:
    """This description."""
    from tidefast.server.openapi import document  # only now: it reads the table that names this function

    return Told(document())
