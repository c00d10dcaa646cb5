"""What each error of SQLite means to the program, in one table.

The three answers: unavailable (the outcome of a write is unknown or the file can't be reached), corrupt (the file can't
be what was written), and faults of this program, which are treated like an unknown outcome because that stops it.
"""

import apsw

from tidefast.stores.base import StoreCorrupt, StoreError, StoreUnavailable

STOP = "The outcome is unknown: this process must stop, and what was not answered is judged again at its next start."
RESTORE = "Keep the file for study and restore a backup."

MEANING: dict[type[Exception], tuple[type[StoreError], str]] = {
    # the machine
    apsw.FullError: (StoreUnavailable, "the disk is full"),
    apsw.IOError: (StoreUnavailable, "the disk failed to read, write or flush"),
    apsw.CantOpenError: (StoreUnavailable, "the file or its directory can't be opened"),
    apsw.ReadOnlyError: (StoreUnavailable, "the file is read-only"),
    apsw.PermissionsError: (StoreUnavailable, "access to the file is denied"),
    apsw.NoMemError: (StoreUnavailable, "memory ran out"),
    apsw.NoLFSError: (StoreUnavailable, "the file system has no large files"),
    apsw.ProtocolError: (StoreUnavailable, "the file's locks don't work here, as on some network file systems"),
    # other processes
    apsw.BusyError: (StoreUnavailable, "another process holds the file locked"),
    apsw.LockedError: (StoreUnavailable, "another statement holds a table locked"),
    apsw.SchemaChangeError: (StoreUnavailable, "another process changed the schema"),
    apsw.AbortError: (StoreUnavailable, "the statement was ended"),
    apsw.InterruptError: (StoreUnavailable, "the statement was interrupted"),
    apsw.AuthError: (StoreUnavailable, "the statement was forbidden"),
    # the file's content
    apsw.CorruptError: (StoreCorrupt, "the file is damaged"),
    apsw.NotADBError: (StoreCorrupt, "the file is not an SQLite database"),
    apsw.FormatError: (StoreCorrupt, "the file's format is wrong"),
    apsw.EmptyError: (StoreCorrupt, "the file is empty"),
    apsw.SQLError: (StoreCorrupt, "the file lacks a table or column of this program's"),
    apsw.MismatchError: (StoreCorrupt, "a value has the wrong type"),
    apsw.ConstraintError: (StoreCorrupt, "the write contradicts what the file holds"),
    # faults of this program
    apsw.InternalError: (StoreUnavailable, "SQLite failed within"),
    apsw.NotFoundError: (StoreUnavailable, "SQLite lacks an operation"),
    apsw.MisuseError: (StoreUnavailable, "SQLite was called wrongly"),
    apsw.RangeError: (StoreUnavailable, "a statement was given a wrong parameter"),
    apsw.TooBigError: (StoreUnavailable, "a value is too large for SQLite"),
    apsw.BindingsError: (StoreUnavailable, "a statement was given the wrong number of values"),
    apsw.ThreadingViolationError: (StoreUnavailable, "two threads used one connection"),
    apsw.ForkingViolationError: (StoreUnavailable, "a forked process used its parent's connection"),
    apsw.ConnectionClosedError: (StoreUnavailable, "the store is closed"),
    apsw.ConnectionNotClosedError: (StoreUnavailable, "the connection did not close"),
    apsw.CursorClosedError: (StoreUnavailable, "the statement was closed"),
    apsw.IncompleteExecutionError: (StoreUnavailable, "a statement was not read to its end"),
    apsw.ExecutionCompleteError: (StoreUnavailable, "a statement had ended"),
    apsw.InvalidContextError: (StoreUnavailable, "a statement was used out of its place"),
    apsw.ExecTraceAbort: (StoreUnavailable, "a tracer ended the statement"),
    apsw.ExtensionLoadingError: (StoreUnavailable, "an extension did not load"),
    apsw.NoFTS5Error: (StoreUnavailable, "SQLite lacks full-text search"),
    apsw.VFSFileClosedError: (StoreUnavailable, "the file was closed"),
    apsw.VFSNotImplementedError: (StoreUnavailable, "the file system layer lacks an operation"),
    # raised by the bindings before SQLite sees the value
    OverflowError: (StoreUnavailable, "an integer is beyond 64 bits"),
    UnicodeEncodeError: (StoreUnavailable, "a text holds a lone surrogate"),
    UnicodeDecodeError: (StoreCorrupt, "the file holds bytes where a text should be"),
    MemoryError: (StoreUnavailable, "memory ran out"),
}


def explain(error: Exception, path: str, doing: str) -> StoreError:
    """The store's own error for one of SQLite's: what was being done, why it failed, what to do next."""
    for kind in type(error).__mro__:
        if kind in MEANING:
            meaning, why = MEANING[kind]
            break
    else:
        meaning, why = StoreUnavailable, f"unexpected {type(error).__name__}"
    return meaning(f"{doing} {path}: {why} ({error}). {RESTORE if meaning is StoreCorrupt else STOP}")
