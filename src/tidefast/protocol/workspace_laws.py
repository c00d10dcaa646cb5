"""The laws of a workspace, over its own log and those of the runs that wrote to it.

Like `laws.py` they ask no rule: who was live is folded from the grants and ends, and each chain digest is worked out
again. What a disk really held no log can show; that what is committed has its content is for whoever holds the blobs.
They are total: whatever an altered log's data says, nothing is raised.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tidefast.protocol.canonical import JSON, CanonicalError, canonical
from tidefast.protocol.events import CHAIN_START, Event, chain
from tidefast.protocol.ids import RunId, StepId, WorkspaceId
from tidefast.protocol.trace import Violation, decode, number, text

ENDS = frozenset(("lease_lapsed", "lease_released", "lease_preempted"))
Key = tuple[RunId, StepId]


class WorkspaceHistory(NamedTuple):
    """All that is known of one workspace.

    `committed` are the steps that runs' logs commit with a receipt of it, None if those logs were not read with it.
    """

    workspace_id: WorkspaceId
    events: tuple[Event, ...]
    digests: tuple[str, ...]
    committed: Mapping[Key, int] | None  # the run's event that committed the step with a replica's receipt
    head_digest: str | None = None
    head_seq: int | None = None
    head_index: int | None = None
    head_chain: str | None = None


class _Fold:
    """What the log had come to."""

    def __init__(self) -> None:
        self.live = self.newest = self.index = 0
        self.chain = CHAIN_START
        self.open: Key | None = None
        self.deltas: dict[int, JSON] = {}
        self.joined: dict[Key, int] = {}


def committed_writes(run_id: RunId, events: Iterable[Event]) -> Iterator[tuple[WorkspaceId, Key, int]]:
    """(workspace, step, seq) for each step of a run that was committed with a receipt of a workspace's replica."""
    scopes: dict[StepId, str] = {}
    by_hand: set[StepId] = set()
    for event in events:
        if event.step_id is None:
            continue
        if event.kind == "step_fenced":
            data = decode(event) or {}
            if text(data, "effect") == "workspace":
                scopes[event.step_id] = text(data, "scope")
        elif event.kind == "step_resolved":
            by_hand.add(event.step_id)
        elif event.kind == "step_committed" and event.step_id in scopes and event.step_id not in by_hand:
            name = WorkspaceId(scopes[event.step_id].removeprefix("workspace:"))
            yield name, (run_id, event.step_id), event.seq


def judge_workspace(history: WorkspaceHistory) -> tuple[Violation, ...]:
    """Every breach, in the order of the log; then what the log lacks."""
    state = _Fold()
    found = [*_altered(history)]
    for event in history.events:
        found += _judge(history, state, event, decode(event) or {})
    for key, seq in (history.committed or {}).items():
        if key not in state.joined:
            why = f"event {seq} of run {key[0]} commits it, but no write of workspace {history.workspace_id} holds it"
            found.append(Violation("lost_fact", key[0], key[1], seq, why))
    if history.head_index is not None and (history.head_index, history.head_chain) != (state.index, state.chain):
        why = f"the log has {state.index} writes, the head says {history.head_index} or another digest"
        found.append(Violation("altered_log", RunId(history.workspace_id), None, len(history.events), why))
    return tuple(found)


def _altered(history: WorkspaceHistory) -> Iterator[Violation]:
    digest, name = CHAIN_START, RunId(history.workspace_id)
    for place, event in enumerate(history.events):
        digest = chain(digest, event)
        stored = history.digests[place] if place < len(history.digests) else ""
        if event.seq != place + 1 or digest != stored:
            why = f"the event numbered {event.seq} is not the one that was written as {place + 1}"
            yield Violation("altered_log", name, event.step_id, place + 1, why)
            return
    length = len(history.events)
    if history.head_seq is not None and (history.head_seq, history.head_digest) != (length, digest):
        why = f"the log has {length} events, the head says {history.head_seq} or another digest"
        yield Violation("altered_log", name, None, min(history.head_seq, length) + 1, why)


def _judge(history: WorkspaceHistory, state: _Fold, event: Event, data: Mapping[str, JSON]) -> list[Violation]:
    """What an event breaks, and what it changes."""
    key = (RunId(text(data, "run")), event.step_id or StepId(""))
    said: list[tuple[str, str]] = []
    if event.kind == "lease_granted":
        if event.epoch <= state.newest:
            said.append(("reissued_epoch", f"epoch {event.epoch} was granted after epoch {state.newest}"))
        state.live, state.newest = event.epoch, max(state.newest, event.epoch)
    elif event.kind in ENDS:
        state.live = 0
    elif event.kind == "write_fenced":
        if event.epoch != state.live:
            said.append(("unlogged_effect", f"it was sent to replica epoch {event.epoch}, live was {state.live}"))
        if state.open is not None:
            said.append(("overlap", f"it was sent while {'/'.join(state.open)} was open"))
        state.open = key
    elif event.kind == "write_applied":
        state.deltas[event.seq] = data.get("delta")
    elif event.kind == "write_committed":
        said += _judge_join(history, state, event, data, key)
        state.open = None
    elif event.kind == "write_dropped":
        state.open = None
    else:
        said.append(("altered_log", f"no workspace has an event of kind {event.kind}"))
    name = RunId(history.workspace_id)
    return [Violation(law, name, event.step_id, event.seq, why) for law, why in said]


def _judge_join(
    history: WorkspaceHistory, state: _Fold, event: Event, data: Mapping[str, JSON], key: Key
) -> Iterator[tuple[str, str]]:
    if event.epoch != state.live:
        yield "dead_commit", f"a write of replica epoch {event.epoch} was joined, live was {state.live}"
    if key != state.open:
        yield "unlogged_effect", "a write was joined that was not open"
    if key in state.joined:
        yield "double_apply", f"it was joined at index {state.joined[key]} already"
    if history.committed is not None and key not in history.committed:
        yield "dead_commit", f"it was joined, but run {key[0]} does not commit it"
    index, seq = number(data, "index"), number(data, "write_seq")
    delta = data.get("delta") if "delta" in data else state.deltas.get(seq)
    if index != state.index + 1 or text(data, "chain") != _chain_after(state, index, key, delta):
        yield "altered_log", f"the write at index {index} doesn't follow from the log"
    state.joined[key], state.index, state.chain = index, index, text(data, "chain")


def _chain_after(state: _Fold, index: int, key: Key, delta: JSON) -> str:
    try:
        text_ = canonical({"delta": delta, "index": index, "run": key[0], "step": key[1]})
    except CanonicalError:
        return ""
    return hashlib.sha256((state.chain + text_).encode()).hexdigest()
