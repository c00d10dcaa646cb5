"""The addresses: for each, its methods; for each method, who may call, what may be asked, and what it asks.

To add an address, add its row. Who may call is a guard of `access.MAY`; a new kind of caller is a row there. Door,
keys, lease, method and body are checked by `routes.py` for every row alike, and the tests that call each address with
every role, the page about HTTP and `/openapi.json` are made from this table.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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
from tidefast.protocol.commands import RUN_VERBS
from tidefast.protocol.verdicts import Done, Renewed, Settled
from tidefast.server import verbs
from tidefast.server.access import Guard
from tidefast.server.chat import ChatStream, chat
from tidefast.server.meters import MEDIA_TYPE as METRICS_TYPE
from tidefast.server.verbs import Call, Outcome
from tidefast.wire import messages as m
from tidefast.wire.chat import CHAT_PATH


@dataclass(frozen=True, slots=True)
class Listed:
    """Records of one kind under a name."""

    name: str
    of: type


@dataclass(frozen=True, slots=True)
class Verb:
    """One method of one address. `may_repeat`: the verb can end its own epoch, and be asked again after that.

    `may_wait`: a wait that is given up when the server stops or its caller is gone; nothing is lost by that.
    `named_by_headers`: the lease token names the run, and the header Tidefast-Step the step.
    `is_stream`: with `Accept: text/event-stream` it is told as it happens. `answer` is the record that is told, records
    under a name, or the media type of a text; None is an object that needs no description.
    """

    guard: Guard
    message: type[m.Message]
    ask: Callable[[Call], Awaitable[Outcome | ChatStream]]
    may_repeat: bool = False
    may_wait: bool = False
    is_stream: bool = False
    named_by_headers: bool = False
    answer: type | Listed | str | None = None
    statuses: tuple[int, ...] = (200,)


RUN = "/v1/runs/{run}"
STEP = RUN + "/steps/{step}"
WORKSPACE = "/v1/workspaces/{ws}"
VERBS: dict[str, dict[str, Verb]] = {
    "/v1/runs": {
        "GET": Verb("read", m.RunsQuery, verbs.runs, answer=Listed("runs", RunInfo)),
        "POST": Verb("start", m.CreateRun, verbs.create_run, answer=RunCreated, statuses=(200, 201)),
    },
    RUN: {"GET": Verb("read", m.Empty, verbs.run, answer=RunInfo)},
    RUN + "/events": {
        "GET": Verb("read", m.AfterSeqQuery, verbs.events, is_stream=True, answer=Listed("events", EventInfo))
    },
    RUN + "/steps": {"GET": Verb("read", m.AfterStepQuery, verbs.steps, answer=Listed("steps", StepInfo))},
    STEP: {
        "GET": Verb("read", m.Empty, verbs.step, answer=StepInfo),
        "POST": Verb("lease", m.Apply, verbs.apply, answer=StepAnswer),
    },
    STEP + "/result": {"POST": Verb("lease", m.SaveResult, verbs.save_result, answer=StepAnswer)},
    STEP + "/compensate": {"POST": Verb("lease", m.Compensate, verbs.compensate, answer=StepAnswer)},
    STEP + "/resolve": {"POST": Verb("operator", m.Resolve, verbs.resolve, answer=Settled)},
    "/v1/claims": {"POST": Verb("work", m.Claim, verbs.claim, may_wait=True, answer=Listed("leases", LeaseGrant))},
    RUN + "/lease": {"POST": Verb("work", m.Grant, verbs.grant, answer=LeaseGrant)},
    RUN + "/lease/renew": {"POST": Verb("lease", m.Empty, verbs.renew, answer=Renewed)},
    RUN + "/lease/release": {"POST": Verb("lease", m.Release, verbs.release, may_repeat=True, answer=Done)},
    "/v1/leases/renew": {"POST": Verb("work", m.RenewMany, verbs.renew_many)},
    "/v1/workspaces": {"GET": Verb("watch", m.WorkspacesQuery, verbs.workspaces)},
    WORKSPACE: {"GET": Verb("watch", m.Empty, verbs.workspace)},
    WORKSPACE + "/log": {"GET": Verb("watch", m.AfterSeqQuery, verbs.workspace_log)},
    WORKSPACE + "/files": {"GET": Verb("watch", m.EntriesQuery, verbs.workspace_entries)},
    WORKSPACE + "/diff": {"GET": Verb("watch", m.DiffQuery, verbs.workspace_diff)},
    WORKSPACE + "/read": {"POST": Verb("work", m.ReadWorkspace, verbs.read_workspace, may_wait=True)},
    RUN + "/checkpoints": {"POST": Verb("lease", m.SaveCheckpoint, verbs.checkpoint, answer=Done)},
    RUN + "/complete": {"POST": Verb("lease", m.Complete, verbs.complete, may_repeat=True, answer=Done)},
    RUN + "/fail": {"POST": Verb("lease", m.Fail, verbs.fail, may_repeat=True, answer=Done)},
    RUN + "/journal": {"GET": Verb("lease", m.JournalQuery, verbs.journal, answer=JournalPage)},
    **{f"{RUN}/{verb}": {"POST": Verb("operator", m.Oversee, verbs.oversee(verb), answer=Done)} for verb in RUN_VERBS},
    CHAT_PATH: {"POST": Verb("lease", m.Chat, chat, named_by_headers=True)},
    "/v1/budgets": {
        "GET": Verb("watch", m.BudgetsQuery, verbs.budgets, answer=Listed("budgets", BudgetInfo)),
        "POST": Verb("operator", m.RaiseBudget, verbs.raise_budget, answer=BudgetInfo),
    },
    "/v1/held": {"GET": Verb("read", m.HeldQuery, verbs.held, answer=Listed("steps", StepInfo))},
    "/metrics": {"GET": Verb("watch", m.Empty, verbs.metrics, answer=METRICS_TYPE)},
    "/openapi.json": {"GET": Verb("public", m.Empty, verbs.openapi)},
    "/healthz": {"GET": Verb("public", m.Empty, verbs.healthz)},
    "/readyz": {"GET": Verb("public", m.Empty, verbs.readyz)},
}
