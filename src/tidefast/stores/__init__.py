"""Where the log and its projections are kept, and how they become durable.

The room owns files, transactions, locks and schema generations. It must not know a rule: it never judges a command, it
folds no event into a head, and what it picks with SQL (claimable runs, forgotten steps) are candidates that the rules
judge again. It has no clock and no thread of its own; the one writer thread and the event loop belong to the engine.

Start at `base` (the seam), then `memory` (the seam in plain dicts), then `sqlite`; `sqlite_file` holds what happens to
the file before the first statement. Every store is held to `tests/stores`.
"""
