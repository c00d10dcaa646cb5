"""Statements and rows: how records become rows of the SQLite store and rows records.

A head is stored as one JSON array beside the columns that statements look at; a step is stored column by column, which
costs a write no more and lets the journal be read without decoding.
"""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import apsw
import msgspec

from tidefast.protocol.budget import Amount, Budget, Limit, Reservation
from tidefast.protocol.events import Event
from tidefast.protocol.records import Attempt, OpenStep, OpenWrite, RunHead, Step, WorkspaceHead
from tidefast.stores.base import StoreCorrupt, StoredEvent

SEQ_BITS = 32
SEQ_MAX = 2**SEQ_BITS - 1
ROWS_AT_ONCE = 64

Row = tuple[Any, ...]

encode = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(RunHead).decode
_decode_budget = msgspec.json.Decoder(Budget).decode
_decode_attempts = msgspec.json.Decoder(tuple[Attempt, ...]).decode

SHAPED = (RunHead, OpenStep, Attempt, Step, Budget, Reservation, Amount, Limit, WorkspaceHead, OpenWrite)
# What the stored arrays mean, place by place. A file keeps it, so that a field that was added or moved without a
# migration is refused when the file is opened, instead of being read as another field.
SHAPE = json.dumps({record.__name__: record._fields for record in SHAPED})


def decode_head(text: str) -> RunHead:
    try:
        return _decode_head(text)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"a run's record can't be read ({error}): {text[:200]}. Restore a backup.") from error


def decode_budget(text: str) -> Budget:
    try:
        return _decode_budget(text)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"a budget can't be read ({error}): {text[:200]}. Restore a backup.") from error


def budget_row(budget: Budget) -> Row:
    return budget.name, budget.version, encode(budget).decode()


class Write:
    """One INSERT for any number of rows.

    Rows go in as one long VALUES list, not by `executemany`: each step of a statement lets go of Python's global lock
    and must win it back from a busy event loop, which costs up to a switch interval. 64 rows are then one wait, not 64.
    """

    def __init__(self, into: str, columns: int, conflict: str = "") -> None:
        row = "(" + ",".join("?" * columns) + ")"
        self._texts = [f"{into} {','.join([row] * count)} {conflict}" for count in range(ROWS_AT_ONCE + 1)]

    def run(self, connection: apsw.Connection, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            connection.execute(self._texts[len(part)], list(chain.from_iterable(part)))


WRITE_EVENTS = Write("INSERT INTO events (event_key, at_ms, kind, epoch, step_id, data, digest) VALUES", 7)
WRITE_RUNS = Write(
    "INSERT INTO runs"
    " (run_key, run_id, agent, agent_version, state, is_busy, is_held, not_before_ms, probe_ms, epoch, version, record)"
    " VALUES",
    12,
    "ON CONFLICT (run_key) DO UPDATE SET state = excluded.state, is_busy = excluded.is_busy,"
    " is_held = excluded.is_held, not_before_ms = excluded.not_before_ms, probe_ms = excluded.probe_ms,"
    " epoch = excluded.epoch, version = excluded.version, record = excluded.record",
)
WRITE_STEPS = Write(
    "INSERT INTO steps (run_key, step_id, kind, state, tool, effect, call_digest, key, contract, scope, dedups,"
    " attempts, intent_seq, receipt_seq, epoch, undo_of, closed_by, reason, settled_seq, lag_ms, window_ms,"
    " is_independent, probes, probed_ms) VALUES",
    24,
    "ON CONFLICT (run_key, step_id) DO UPDATE SET state = excluded.state, tool = excluded.tool,"
    " effect = excluded.effect, call_digest = excluded.call_digest, contract = excluded.contract,"
    " scope = excluded.scope, dedups = excluded.dedups, attempts = excluded.attempts,"
    " intent_seq = excluded.intent_seq, receipt_seq = excluded.receipt_seq, epoch = excluded.epoch,"
    " closed_by = excluded.closed_by, reason = excluded.reason, settled_seq = excluded.settled_seq,"
    " lag_ms = excluded.lag_ms, window_ms = excluded.window_ms, is_independent = excluded.is_independent,"
    " probes = excluded.probes, probed_ms = excluded.probed_ms",
)
WRITE_CONTRACTS = Write("INSERT INTO contracts (digest, body) VALUES", 2, "ON CONFLICT (digest) DO NOTHING")
WRITE_BUDGETS = Write(
    "INSERT INTO budgets (name, version, record) VALUES",
    3,
    "ON CONFLICT (name) DO UPDATE SET version = excluded.version, record = excluded.record",
)
WRITE_NOTICES = Write(
    "INSERT INTO notices (id, body, tries, due_ms) VALUES",
    4,
    "ON CONFLICT (id) DO UPDATE SET tries = excluded.tries, due_ms = excluded.due_ms",
)
DELETE_NOTICES = "DELETE FROM notices WHERE id IN (SELECT value FROM json_each(?))"
WRITE_MARK = "UPDATE meta SET value = ? WHERE name = 'mark_ms'"

META = "SELECT name, value FROM meta"
RUN_KEY_MAX = "SELECT coalesce(max(run_key), 0) FROM runs"
HEAD = "SELECT run_key, record FROM runs WHERE run_id = ?"
BUSY_HEADS = "SELECT run_key, record FROM runs WHERE is_busy = 1 ORDER BY run_key"
CONTRACT = "SELECT body FROM contracts WHERE digest = ?"

NOTICES = "SELECT id, body, tries, due_ms FROM notices WHERE due_ms <= ? ORDER BY due_ms, id LIMIT ?"
BUDGET = "SELECT record FROM budgets WHERE name = ?"
BUDGETS = "SELECT record FROM budgets WHERE name > ? ORDER BY name LIMIT ?"

EVENT = "SELECT event_key, at_ms, kind, epoch, step_id, data, digest FROM events WHERE event_key = ?"
EVENTS = (
    "SELECT event_key, at_ms, kind, epoch, step_id, data, digest FROM events"
    " WHERE event_key > ? AND event_key <= ? ORDER BY event_key LIMIT ?"
)
STEP = (
    "SELECT step_id, kind, state, tool, effect, call_digest, key, contract, scope, dedups, attempts, intent_seq,"
    " receipt_seq, epoch, undo_of, closed_by, reason, settled_seq, lag_ms, window_ms, is_independent, probes,"
    " probed_ms FROM steps WHERE run_key = ? AND step_id = ?"
)
STEP_IDS = "SELECT step_id FROM steps WHERE run_key = ? LIMIT ?"  # read from the key's index alone
STEPS = (
    "SELECT step_id, kind, state, tool, effect, call_digest, key, contract, scope, dedups, attempts, intent_seq,"
    " receipt_seq, epoch, undo_of, closed_by, reason, settled_seq, lag_ms, window_ms, is_independent, probes,"
    " probed_ms FROM steps"
    " WHERE run_key = ? AND step_id > ? ORDER BY step_id LIMIT ?"
)
# `settled_seq > 0` repeats the partial index's own condition: without it SQLite may not use the index.
FORGOTTEN = (
    "SELECT step_id, effect FROM steps WHERE run_key = ? AND settled_seq > ? AND settled_seq > 0 AND epoch <> ?"
    " AND state IN ('committed', 'rejected', 'compensated') ORDER BY settled_seq"
)
EFFECTS = "SELECT step_id, effect FROM steps WHERE run_key = ?"
JOURNAL = (
    "SELECT s.step_id, s.kind, s.state, s.epoch, s.key, s.call_digest, s.settled_seq, s.reason,"
    " coalesce(e.data, '{}'), s.closed_by FROM steps s LEFT JOIN events e"
    " ON s.receipt_seq > 0 AND e.event_key = (s.run_key << 32 | s.receipt_seq)"
    " WHERE s.run_key = ? AND s.settled_seq > ? AND s.settled_seq > 0"
    " AND s.state IN ('committed', 'rejected', 'compensated') ORDER BY s.settled_seq"
)
CLAIMABLE = (
    "SELECT run_key, run_id FROM runs WHERE agent = ? AND state IN ('claimable', 'failing', 'cancelling')"
    " AND not_before_ms <= ? AND (? OR agent_version IN (SELECT value FROM json_each(?)))"
    " AND substr(run_id, 1, length(?)) = ? ORDER BY run_key LIMIT ?"
)
PROBING = "SELECT run_id FROM runs WHERE probe_ms > 0 AND probe_ms <= ? ORDER BY probe_ms LIMIT ?"
RUN_KEY = "SELECT run_key FROM runs WHERE run_id = ?"
RUNS = "SELECT record FROM runs WHERE run_key > ? AND substr(run_id, 1, length(?)) = ? ORDER BY run_key LIMIT ?"
RUNS_HELD = (
    "SELECT record FROM runs WHERE is_held = 1 AND run_key > ? AND substr(run_id, 1, length(?)) = ?"
    " ORDER BY run_key LIMIT ?"
)
RUNS_LEASED = (
    "SELECT record FROM runs WHERE is_busy = 1 AND state = 'leased' AND run_key > ?"
    " AND substr(run_id, 1, length(?)) = ? ORDER BY run_key LIMIT ?"
)
RUNS_OF_STATE = (
    "SELECT record FROM runs WHERE state = ? AND state <> 'leased' AND run_key > ?"
    " AND substr(run_id, 1, length(?)) = ? ORDER BY run_key LIMIT ?"
)


def head_row(key: int, head: RunHead) -> Row:
    is_busy = head.is_live or any(step.state == "fenced" for step in head.open)
    return (
        key,
        head.run_id,
        head.agent,
        head.agent_version,
        head.state,
        is_busy,
        bool(head.held_steps),
        head.not_before_ms,
        head.probe_ms,
        head.epoch,
        head.version,
        encode(head).decode(),
    )


def step_row(key: int, step: Step) -> Row:
    return (key, *step[:10], encode(step.attempts).decode(), *step[11:])


def step_of(row: Row) -> Step:
    try:
        attempts = _decode_attempts(row[10])
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"the attempts of step {row[0]} can't be read ({error}). Restore a backup.") from error
    return Step._make((*row[:9], bool(row[9]), attempts, *row[11:20], bool(row[20]), *row[21:]))


def event_key(run_key: int, seq: int) -> int:
    return run_key << SEQ_BITS | seq


def event_row(stored: StoredEvent) -> Row:
    run_key, (seq, at_ms, kind, epoch, step_id, data_json), digest = stored
    return run_key << SEQ_BITS | seq, at_ms, kind, epoch, step_id, data_json, bytes.fromhex(digest)


def event_of(row: Row) -> StoredEvent:
    key, at_ms, kind, epoch, step_id, data_json, digest = row
    seq = key & SEQ_MAX
    return StoredEvent(key >> SEQ_BITS, Event(seq, at_ms, kind, epoch, step_id, data_json), digest.hex())
