-- Generation 2: workspaces. Their keys come from the same numbers as runs', and their events stand in `events`.

-- One row per workspace. `record` is the whole head; the other columns are what statements look at.
CREATE TABLE workspaces (
    workspace_key INTEGER PRIMARY KEY CHECK (workspace_key BETWEEN 1 AND 2147483647),
    workspace_id  TEXT    NOT NULL UNIQUE,
    is_busy       INTEGER NOT NULL,  -- live, or with an open write: read at each start
    epoch         INTEGER NOT NULL,
    version       INTEGER NOT NULL,
    record        TEXT    NOT NULL
) STRICT;

CREATE INDEX workspaces_busy ON workspaces (workspace_key) WHERE is_busy = 1;

-- The joined writes; `seq` is that of the workspace's event that holds the delta.
CREATE TABLE writes (
    workspace_key INTEGER NOT NULL REFERENCES workspaces (workspace_key),
    log_index     INTEGER NOT NULL,
    run_id        TEXT    NOT NULL,
    step_id       TEXT    NOT NULL,
    at_ms         INTEGER NOT NULL,
    chain         TEXT    NOT NULL,
    seq           INTEGER NOT NULL,
    paths         INTEGER NOT NULL,
    PRIMARY KEY (workspace_key, log_index)
) STRICT, WITHOUT ROWID;

-- What stood at a path from one log index (inclusive) until another (exclusive; null: it stands there now).
CREATE TABLE files (
    workspace_key INTEGER NOT NULL REFERENCES workspaces (workspace_key),
    path          TEXT    NOT NULL,
    since         INTEGER NOT NULL,
    until         INTEGER,
    kind          TEXT    NOT NULL,
    mode          INTEGER NOT NULL,
    digest        TEXT    NOT NULL,
    size          INTEGER NOT NULL,
    PRIMARY KEY (workspace_key, path, since)
) STRICT, WITHOUT ROWID;

CREATE INDEX files_now ON files (workspace_key, path) WHERE until IS NULL;
CREATE INDEX files_digest ON files (digest) WHERE digest <> '';

CREATE TRIGGER workspaces_only_rise BEFORE UPDATE OF epoch, version ON workspaces
WHEN new.epoch < old.epoch OR new.version < old.version
BEGIN SELECT RAISE(ABORT, 'an epoch or a version would decrease'); END;

CREATE TRIGGER workspaces_stay BEFORE DELETE ON workspaces
BEGIN SELECT RAISE(ABORT, 'a workspace is never deleted'); END;

CREATE TRIGGER writes_are_not_edited BEFORE UPDATE ON writes
BEGIN SELECT RAISE(ABORT, 'a write is never edited'); END;

CREATE TRIGGER writes_stay BEFORE DELETE ON writes
BEGIN SELECT RAISE(ABORT, 'a write is never deleted'); END;
