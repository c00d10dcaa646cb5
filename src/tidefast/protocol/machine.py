"""The three doors of the rules: `needs`, `decide`, `evolve`.

Laws of this room:

1. Every rule about who may do what is in here. SQL, HTTP and SDK hold none; SQL may pick candidates, never verdicts.
2. No input but the arguments. Equal arguments give equal decisions, in every process and year.
3. A worker's verb names the epoch it was granted, or it does not exist.
4. Every head read is guarded, written or not.
5. Facts are recorded, rights are fenced: a late receipt never moves a lease, a checkpoint or a committed step.
6. `decide` never raises for a bad command: a refusal is a value. It has no handle to fetch with.
7. No decision reads two runs.

`evolve` advances a view by one event. Store, engine, simulator and checker all move state by it, so an event means the
same everywhere.
"""

from typing import NamedTuple, assert_never

from tidefast.protocol import (
    checkpoint,
    compensation,
    ending,
    join,
    lease,
    oversight,
    probing,
    replica,
    resolve,
    run,
    step,
    write,
)
from tidefast.protocol.commands import (
    Admit,
    AnswerProbe,
    Cancel,
    Command,
    Compensate,
    Complete,
    CreateRun,
    Fail,
    Freeze,
    Grant,
    GrantReplica,
    Lapse,
    LapseReplica,
    LoseWrite,
    MarkLost,
    Pause,
    Preempt,
    Release,
    ReleaseReplica,
    Renew,
    RenewReplica,
    Resolve,
    Resume,
    SaveCheckpoint,
    SaveResult,
    Settle,
    Thaw,
)
from tidefast.protocol.ids import RunId, StepId, WorkspaceId, asked_by
from tidefast.protocol.records import Now, View
from tidefast.protocol.verdicts import Decision

UNDO_SUFFIX = "~undo"
OfWorkspace = LoseWrite | GrantReplica | RenewReplica | ReleaseReplica | LapseReplica


class Needs(NamedTuple):
    """Which rows a rule must see: the run's head (unless the command is about a workspace alone), and more.

    Where one of `steps` writes to a workspace, its head is among them.
    """

    run_id: RunId | None
    steps: tuple[StepId, ...] = ()
    effects: bool = False  # every open step of the run, and every mutating one
    forgotten: bool = False  # mutating steps settled since the newest checkpoint that the live epoch didn't ask for
    workspace_id: WorkspaceId | None = None


def needs(command: Command) -> Needs:
    """The rows that `decide` must be shown for this command, known from the command alone."""
    match command:
        case Admit():
            return Needs(command.right.run_id, with_target(command.step_id), workspace_id=command.workspace_id)
        case SaveResult():
            return Needs(command.right.run_id, with_target(command.step_id))
        case Settle() | AnswerProbe() | MarkLost() | Resolve():
            return Needs(command.run_id, with_target(command.step_id))
        case Compensate():
            return Needs(command.right.run_id, (command.undo_step_id, command.step_id))
        case Renew() | Release() | SaveCheckpoint():
            return Needs(command.right.run_id)
        case Complete():
            return Needs(command.right.run_id, forgotten=True)
        case Fail():
            return Needs(command.right.run_id, effects=True)
        case Cancel():
            return Needs(command.run_id, effects=True)
        case CreateRun() | Grant() | Lapse() | Preempt() | Pause() | Resume() | Freeze() | Thaw():
            return Needs(command.run_id)
        case GrantReplica() | LapseReplica():
            return Needs(None, workspace_id=command.workspace_id)
        case RenewReplica() | ReleaseReplica():
            return Needs(None, workspace_id=command.right.workspace_id)
        case LoseWrite():
            return Needs(command.run_id, (command.step_id,), workspace_id=command.workspace_id)
        case _:
            assert_never(command)


def with_target(step_id: StepId) -> tuple[StepId, ...]:
    """A step, and the one that it stands or falls with: what an undo reverses, or the model step that asked for it."""
    if step_id.endswith(UNDO_SUFFIX):
        return (step_id, StepId(step_id.removesuffix(UNDO_SUFFIX)))
    asking = asked_by(step_id)
    return (step_id,) if asking is None else (step_id, asking)


def decide(view: View, command: Command, now: Now) -> Decision:
    """Judge a command against what it needed to see. Never raises for a bad command."""
    decision = _decide(view, command, now)
    return decision if view.workspace_id is None else join.beside(view, command, decision, now)


def _decide(view: View, command: Command, now: Now) -> Decision:
    match command:
        case Admit():
            return step.admit(view, command, now)
        case Settle():
            return step.settle(view, command, now)
        case AnswerProbe():
            return probing.answer_probe(view, command, now)
        case SaveResult():
            return step.save_result(view, command, now)
        case SaveCheckpoint():
            return checkpoint.save_checkpoint(view, command, now)
        case Renew():
            return lease.renew(view, command, now)
        case Grant():
            return lease.grant(view, command, now)
        case Complete():
            return run.complete(view, command, now)
        case Release():
            return lease.release(view, command, now)
        case CreateRun():
            return run.create(view, command, now)
        case Compensate():
            return compensation.compensate(view, command, now)
        case _:
            return _decide_rare(view, command, now)


def _decide_rare(
    view: View,
    command: Fail | Cancel | Lapse | MarkLost | Preempt | Pause | Resume | Freeze | Thaw | Resolve | OfWorkspace,
    now: Now,
) -> Decision:
    match command:
        case Fail():
            return ending.fail(view, command, now)
        case Cancel():
            return ending.cancel(view, command, now)
        case Lapse():
            return lease.lapse(view, command, now)
        case MarkLost():
            return step.mark_lost(view, command, now)
        case Preempt():
            return oversight.preempt(view, command, now)
        case Pause():
            return oversight.pause(view, command, now)
        case Resume():
            return oversight.resume(view, command, now)
        case Freeze():
            return oversight.freeze(view, command, now)
        case Thaw():
            return oversight.thaw(view, command, now)
        case Resolve():
            return resolve.resolve(view, command, now)
        case LoseWrite():
            return write.lose_write(view, command, now)
        case GrantReplica():
            return replica.grant_replica(view, command, now)
        case RenewReplica():
            return replica.renew_replica(view, command, now)
        case ReleaseReplica():
            return replica.release_replica(view, command, now)
        case LapseReplica():
            return replica.lapse_replica(view, command, now)
        case _:
            assert_never(command)
