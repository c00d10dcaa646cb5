"""What a caller that may not see bodies is shown: for each body its SHA-256 and length.

Members of events are shown by name. One that isn't listed here counts as a body, so a new kind of event can't show what
nobody thought about.
"""

import hashlib
import json
from dataclasses import replace
from typing import get_args

from tidefast.protocol.answers import EventInfo, RunInfo, StepInfo
from tidefast.protocol.canonical import JSON, canonical
from tidefast.protocol.records import RunState, StepState

SHOWN = frozenset((
    "agent", "agent_version", "answer", "asked_ms", "attempt", "attempts", "by", "call_digest", "contract",
    "deadline_ms", "dedups", "dropped", "effect", "error_digest", "expires_at_ms", "grants", "holder",
    "independent", "input_digest", "intent_seq", "is_lost", "key", "lag_ms", "lease_ms", "not_before_ms", "number",
    "older_over", "owner", "reason", "receipt_seq", "result_digest", "run", "scope", "state_digest", "step", "tool",
    "undo", "undo_of", "verdict", "wall_ms", "window_ms",
))  # fmt: skip
STATES = frozenset((*get_args(StepState), *get_args(RunState)))
Info = RunInfo | EventInfo | StepInfo


def without_bodies(record: Info) -> Info:
    """The record with digests in place of bodies."""
    match record:
        case RunInfo():
            return replace(record, input_json=_digest(record.input_json), result_json=_digest(record.result_json))
        case StepInfo():
            return replace(record, intent_json=_members(record.intent_json), receipt_json=_members(record.receipt_json))
        case EventInfo():
            return replace(record, data_json=_members(record.data_json))


def _members(data_json: str) -> str:
    data: JSON = json.loads(data_json)
    if not isinstance(data, dict):
        return _digest(data_json)
    return canonical(
        {name: value if _is_shown(name, value) else _told(canonical(value)) for name, value in data.items()}
    )


def _is_shown(name: str, value: JSON) -> bool:
    return name in SHOWN or value is None or (name == "state" and value in STATES)


def _digest(text: str) -> str:
    return text if text == "null" else canonical(_told(text))


def _told(text: str) -> dict[str, JSON]:
    raw = text.encode()
    return {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
