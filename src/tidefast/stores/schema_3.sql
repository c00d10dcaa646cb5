-- Generation 3: notices that were not delivered yet. Written with the event that they tell of, deleted once delivered.

CREATE TABLE notices (
    id     TEXT    PRIMARY KEY,
    body   TEXT    NOT NULL,
    tries  INTEGER NOT NULL,
    due_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX notices_due ON notices (due_ms);
