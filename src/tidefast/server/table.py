"""The addresses: for each, its methods; for each method, who may call, what may be asked, and what it asks.

To add an address, add its row. Who may call is a guard of `access.MAY`; a new kind of caller is a row there. Door,
keys, lease, method and body are checked by `routes.py` for every row alike, and the tests that call each address with
every role, the page about HTTP and `/openapi.json` are made from this table.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tidefast.server import verbs
from tidefast.server.access import Guard
from tidefast.server.verbs import Call, Outcome
from tidefast.wire import messages as m


@dataclass(frozen=True, slots=True)
class Verb:
    """One method of one address. `may_repeat`: the verb can end its own epoch, and be asked again after that.

    `may_wait`: a wait that is given up when the server stops or its caller is gone; nothing is lost by that.
    """

    guard: Guard
    message: type[m.Message]
    ask: Callable[[Call], Awaitable[Outcome]]
    may_repeat: bool = False
    may_wait: bool = False


RUN = "/v1/runs/{run}"
STEP = RUN + "/steps/{step}"
WORKSPACE = "/v1/workspaces/{ws}"
VERBS: dict[str, dict[str, Verb]] = {
    "/v1/runs": {
        "GET": Verb("read", m.RunsQuery, verbs.runs),
        "POST": Verb("start", m.CreateRun, verbs.create_run),
    },
    RUN: {"GET": Verb("read", m.Empty, verbs.run)},
    RUN + "/events": {"GET": Verb("read", m.AfterSeqQuery, verbs.events)},
    RUN + "/steps": {"GET": Verb("read", m.AfterStepQuery, verbs.steps)},
    STEP: {"GET": Verb("read", m.Empty, verbs.step), "POST": Verb("lease", m.Apply, verbs.apply)},
    STEP + "/result": {"POST": Verb("lease", m.SaveResult, verbs.save_result)},
    STEP + "/compensate": {"POST": Verb("lease", m.Compensate, verbs.compensate)},
    STEP + "/resolve": {"POST": Verb("operator", m.Resolve, verbs.resolve)},
    "/v1/claims": {"POST": Verb("work", m.Claim, verbs.claim, may_wait=True)},
    RUN + "/lease": {"POST": Verb("work", m.Grant, verbs.grant)},
    RUN + "/lease/renew": {"POST": Verb("lease", m.Empty, verbs.renew)},
    RUN + "/lease/release": {"POST": Verb("lease", m.Release, verbs.release, may_repeat=True)},
    "/v1/leases/renew": {"POST": Verb("work", m.RenewMany, verbs.renew_many)},
    RUN + "/checkpoints": {"POST": Verb("lease", m.SaveCheckpoint, verbs.checkpoint)},
    RUN + "/complete": {"POST": Verb("lease", m.Complete, verbs.complete, may_repeat=True)},
    RUN + "/fail": {"POST": Verb("lease", m.Fail, verbs.fail, may_repeat=True)},
    RUN + "/journal": {"GET": Verb("lease", m.JournalQuery, verbs.journal)},
    RUN + "/preempt": {"POST": Verb("operator", m.Preempt, verbs.preempt)},
    RUN + "/thaw": {"POST": Verb("operator", m.Thaw, verbs.thaw)},
    "/v1/workspaces": {"GET": Verb("watch", m.WorkspacesQuery, verbs.workspaces)},
    WORKSPACE: {"GET": Verb("watch", m.Empty, verbs.workspace)},
    WORKSPACE + "/log": {"GET": Verb("watch", m.AfterSeqQuery, verbs.workspace_log)},
    WORKSPACE + "/files": {"GET": Verb("watch", m.EntriesQuery, verbs.workspace_entries)},
    WORKSPACE + "/diff": {"GET": Verb("watch", m.DiffQuery, verbs.workspace_diff)},
    WORKSPACE + "/read": {"POST": Verb("work", m.ReadWorkspace, verbs.read_workspace, may_wait=True)},
    "/v1/held": {"GET": Verb("read", m.Empty, verbs.held)},
    "/healthz": {"GET": Verb("public", m.Empty, verbs.healthz)},
    "/readyz": {"GET": Verb("public", m.Empty, verbs.readyz)},
}
