-- Generation 1. Run within one transaction by stores/migrations.py, which also sets user_version and application_id.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;

-- One row per run. `record` is the whole head; the other columns are what statements look at.
CREATE TABLE runs (
    run_key       INTEGER PRIMARY KEY CHECK (run_key BETWEEN 1 AND 2147483647),
    run_id        TEXT    NOT NULL UNIQUE,
    agent         TEXT    NOT NULL,
    agent_version TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    is_busy       INTEGER NOT NULL,  -- live, or with a step in state fenced: read at each start
    is_held       INTEGER NOT NULL,  -- has a held step, whatever its state is
    not_before_ms INTEGER NOT NULL,
    probe_ms      INTEGER NOT NULL,  -- when a provider may be asked about a doubt of it; 0: there is none to ask about
    epoch         INTEGER NOT NULL,
    version       INTEGER NOT NULL,
    record        TEXT    NOT NULL
) STRICT;

-- Partial, so that a leased run's head is written without touching them more than needed.
CREATE INDEX runs_waiting ON runs (agent, run_key) WHERE state IN ('claimable', 'failing', 'cancelling');
CREATE INDEX runs_busy ON runs (run_key) WHERE is_busy = 1;
CREATE INDEX runs_held ON runs (run_key) WHERE is_held = 1;
CREATE INDEX runs_probing ON runs (probe_ms) WHERE probe_ms > 0;
CREATE INDEX runs_state ON runs (state, run_key) WHERE state <> 'leased';

-- The log. event_key = run_key << 32 | seq. Request and receipt bytes stand here and nowhere else. Rows lie in the order
-- of commit, not of event_key: the events of one batch then fill a few pages, where by run each would dirty its own.
CREATE TABLE events (
    position  INTEGER PRIMARY KEY,
    event_key INTEGER NOT NULL UNIQUE,
    at_ms     INTEGER NOT NULL,
    kind      TEXT    NOT NULL,
    epoch     INTEGER NOT NULL,
    step_id   TEXT,
    data      TEXT    NOT NULL,
    digest    BLOB    NOT NULL CHECK (length(digest) = 32)
) STRICT;

-- One row per step, in the order of the record's fields; `attempts` is JSON. Rows lie in the order of first commit, for
-- the same reason as events.
CREATE TABLE steps (
    run_key     INTEGER NOT NULL REFERENCES runs (run_key),
    step_id     TEXT    NOT NULL,
    kind        TEXT    NOT NULL,
    state       TEXT    NOT NULL,
    tool        TEXT    NOT NULL,
    effect      TEXT    NOT NULL,
    call_digest TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    contract    TEXT    NOT NULL,
    scope       TEXT    NOT NULL,
    dedups      INTEGER NOT NULL,
    attempts    TEXT    NOT NULL,
    intent_seq  INTEGER NOT NULL,
    receipt_seq INTEGER NOT NULL,
    epoch       INTEGER NOT NULL,
    undo_of     TEXT,
    closed_by   TEXT,
    reason      TEXT    NOT NULL,
    settled_seq INTEGER NOT NULL,
    lag_ms      INTEGER NOT NULL,
    window_ms   INTEGER NOT NULL,
    is_independent INTEGER NOT NULL,
    probes      INTEGER NOT NULL,
    probed_ms   INTEGER NOT NULL,
    PRIMARY KEY (run_key, step_id)
) STRICT;

CREATE INDEX steps_settled ON steps (run_key, settled_seq) WHERE settled_seq > 0;

CREATE TABLE contracts (
    digest TEXT PRIMARY KEY,
    body   TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- One row per budget of model calls; `record` is the whole of it. No run's decision reads one.
CREATE TABLE budgets (
    name    TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    record  TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

-- The second lock: whatever the program does, an epoch is not reissued and the log is not rewritten.
CREATE TRIGGER runs_only_rise BEFORE UPDATE OF epoch, version ON runs
WHEN new.epoch < old.epoch OR new.version < old.version
BEGIN SELECT RAISE(ABORT, 'an epoch or a version would decrease'); END;

CREATE TRIGGER runs_stay BEFORE DELETE ON runs
BEGIN SELECT RAISE(ABORT, 'a run is never deleted'); END;

CREATE TRIGGER events_are_not_edited BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'an event is never edited'); END;

CREATE TRIGGER events_stay BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'an event is never deleted'); END;
