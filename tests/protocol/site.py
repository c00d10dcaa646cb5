"""Drives the rules about workspaces as an engine would: several runs, one workspace, replicas that come and go."""

from tidefast.protocol.canonical import call_digest
from tidefast.protocol.commands import (
    Admit,
    Command,
    CreateRun,
    Grant,
    GrantReplica,
    LapseReplica,
    LoseWrite,
    MarkLost,
    Preempt,
    ReleaseReplica,
    RenewReplica,
    Resolve,
    Settle,
    Write,
)
from tidefast.protocol.contracts import Contract, contract_digest
from tidefast.protocol.events import Event, first_broken
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId
from tidefast.protocol.laws import History
from tidefast.protocol.machine import decide, needs
from tidefast.protocol.records import Guard, Now, ReplicaRight, Right, Step, View, WorkspaceGuard, WorkspaceHead
from tidefast.protocol.replica import evolve_workspace
from tidefast.protocol.verdicts import Decision, Send
from tidefast.protocol.workspace import EMPTY_DISK, Delta, Disk, Entry, delta_json, write_chain
from tidefast.protocol.write import workspace_of

CASE = WorkspaceId("case")
A, B = RunId("a"), RunId("b")
PUT = StepId("put")
HERE = "boot-1"
TIMEOUT_MS = 30_000
LEASE_MS = 15_000
WRITE_FILE = Contract(
    tool="workspace.write_file", kind="workspace", effect="workspace", url="workspace:case", timeout_ms=TIMEOUT_MS
)
DEPLOY = WRITE_FILE._replace(tool="workspace.run_command", escapes=True)
FILE: Delta = {"f": Entry("file", 0o644, "a" * 64, 1)}


class Site:
    """All rows of one authority, shown to the rules one decision at a time."""

    def __init__(self, *runs: RunId) -> None:
        self.instances = frozenset((HERE,))
        self.views: dict[RunId, View] = {}
        self.workspace: WorkspaceHead | None = None
        self.contracts: dict[str, Contract] = {}
        self.ms = 1_000
        self.chains: list[str] = []  # after each joined write
        self.writes: list[tuple[Event, str]] = []
        self.log: dict[RunId, list[tuple[Event, str]]] = {}
        for run in runs or (A,):
            self.submit(CreateRun(run, "agent", "1", "{}"))
            self.take(run)

    def submit(self, command: Command) -> Decision:
        need = needs(command)
        view = View(bytes(16), 0, self.instances)
        if need.run_id is not None:
            known = self.views.get(need.run_id, view)
            steps = {step: known.steps[step] for step in need.steps if step in known.steps}
            stored = {s.contract: self.contracts[s.contract] for s in steps.values()}
            view = view._replace(run=known.run, steps=steps, contracts=stored)
        place = need.workspace_id or next(filter(None, map(workspace_of, view.steps.values())), None)
        if place is not None:
            view = view._replace(workspace=self.workspace, workspace_id=place)
        decision = decide(view, command, Now(self.ms, self.ms))
        assert decision == decide(view, command, Now(self.ms, self.ms))
        self._check_guards(view, decision)
        self._write(view, decision, need.run_id)
        return decision

    def _check_guards(self, view: View, decision: Decision) -> None:
        if view.workspace_id is not None:
            version = 0 if view.workspace is None else view.workspace.version
            assert WorkspaceGuard(view.workspace_id, version) in decision.guards, "a head was read without a guard"
        if view.run is not None:
            assert Guard(view.run.run_id, view.run.version) in decision.guards, "a head was read without a guard"

    def _write(self, view: View, decision: Decision, run_id: RunId | None) -> None:
        if isinstance(decision.verdict, Send):
            self.contracts[contract_digest(decision.verdict.contract)] = decision.verdict.contract
        for event in decision.events:
            view = evolve(view, event, run_id)
            if run_id is not None and view.run is not None:
                self.log.setdefault(run_id, []).append((event, view.run.digest))
        if run_id is not None and view.run is not None:
            known = self.views.get(run_id, view)
            self.views[run_id] = view._replace(steps={**known.steps, **view.steps})
        for event in decision.writes:
            before = self.workspace or WorkspaceHead(CASE)
            self.workspace = evolve_workspace(before, event)
            self.writes.append((event, self.workspace.digest))
            if event.kind == "write_committed":
                self.chains.append(self.workspace.chain)
        assert first_broken(self.writes) == 0

    def history(self, run: RunId = A) -> History:
        events, digests = zip(*self.log[run], strict=True)
        return History(run, events, digests, bytes(16), self.contracts, now_ms=self.ms)

    # --- the workspace

    @property
    def place(self) -> WorkspaceHead:
        assert self.workspace is not None
        return self.workspace

    def replica(self, boot: str = "r1", disk: Disk = EMPTY_DISK, there: str | None = None) -> Decision:
        return self.submit(GrantReplica(CASE, boot, LEASE_MS, disk, there))

    def right(self, epoch: int | None = None, boot: str | None = None) -> ReplicaRight:
        return ReplicaRight(CASE, Epoch(epoch or self.place.epoch), boot or self.place.boot_id)

    def renew(self, right: ReplicaRight | None = None) -> Decision:
        return self.submit(RenewReplica(right or self.right()))

    def release(self, right: ReplicaRight | None = None) -> Decision:
        return self.submit(ReleaseReplica(right or self.right(), "stopping"))

    def lapse(self) -> Decision:
        return self.submit(LapseReplica(CASE))

    def lose(self, run: RunId = A, step: StepId = PUT) -> Decision:
        return self.submit(LoseWrite(CASE, run, step))

    # --- runs

    def take(self, run: RunId = A) -> None:
        head = self.views[run].run
        assert head is not None
        if head.is_live:
            self.submit(Preempt(run, "test"))
        self.submit(Grant(run, f"w{head.epoch + 1}", 600_000, ""))

    def run_right(self, run: RunId = A) -> Right:
        head = self.views[run].run
        assert head is not None
        return Right(run, head.epoch, head.holder)

    def step(self, run: RunId = A, step: StepId = PUT) -> Step:
        return self.views[run].steps[step]

    def admit(
        self,
        run: RunId = A,
        step: StepId = PUT,
        contract: Contract = WRITE_FILE,
        *,
        replica: Epoch | None = None,
        is_away: bool = False,
        args: str = "{}",
    ) -> Decision:
        ready = None if is_away or self.workspace is None else self.place.epoch
        return self.submit(
            Admit(
                right=self.run_right(run),
                step_id=step,
                tool=contract.tool,
                args_json=args,
                call_digest=call_digest(contract.tool, args),
                contract=contract,
                request=None,
                owner=HERE,
                deadline_ms=self.ms + contract.timeout_ms,
                workspace_id=CASE,
                replica=replica or ready,
            )
        )

    def written(self, run: RunId = A, step: StepId = PUT, delta: Delta = FILE) -> Write:
        """What the live replica says after it did a step."""
        index = self.place.log_index + 1
        chain = write_chain(self.place.chain, index, run, step, delta_json(delta))
        return Write(self.place.epoch, index, delta, chain)

    def settle(
        self, write: Write | None, run: RunId = A, step: StepId = PUT, attempt: int = 1, outcome: str = "applied"
    ) -> Decision:
        return self.submit(Settle(run, step, attempt, outcome, '{"ok":true}', "", write))  # type: ignore[arg-type]

    def mark_lost(self, run: RunId = A, step: StepId = PUT) -> Decision:
        return self.submit(MarkLost(run, step))

    def resolve(self, verdict: str, run: RunId = A, step: StepId = PUT) -> Decision:
        self.ms += TIMEOUT_MS + 1
        command = Resolve(run, step, verdict, "kay", "", looked_at_ms=self.ms)  # type: ignore[arg-type]
        return self.submit(command)
