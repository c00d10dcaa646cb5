"""Commands around the loss of a store: `backup`, `restore`, `adopt`, `recover`.

A backup is older than the store that it replaces. So what it makes gets epochs above all that were ever issued, and a
window in which every first sending is taken for one that may have been lost. Only an operator closes it.
"""

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, StoreName
from tidefast.cli.place import own, store_path
from tidefast.engine.clock import wall_ms
from tidefast.stores.base import Identity
from tidefast.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from tidefast.protocol.records import RunHead, Step

PAGE = 200
CLOSE = "when all is looked at, or if nothing was lost: tidefast recover --nothing-lost --note WHY"


def backup(file: Path, /, *, store: StoreName = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """Copy a store to FILE as it is at one moment, whether or not a server owns it. A file that is there is kept.

    What is committed afterwards is not in it. Keep the secret and the operator's key as well: they are files of their
    own. The copy can be read (audit, show) and restored, not served.
    """
    from tidefast.stores.sqlite_blobs import copy_contents
    from tidefast.stores.sqlite_recovery import backup as copy

    made = copy(store_path(store), file, _progress)
    held = copy_contents(store_path(store), file)  # after the store: it holds whatever the copy of the store names
    if as_json:
        out.document({**made._asdict(), "path": str(made.path), "contents_bytes": held})
    else:
        out.line(f"backup {made.path}: {made.runs:,} runs, {made.events:,} events, {made.bytes:,} bytes")
        if held:
            out.line(f"contents of workspaces beside it: {held:,} bytes")
        out.line(f"last commit {out.moment(made.last_commit_ms)} UTC; whole: every page was read back")
    return ExitCode.OK


def restore(file: Path, /, *, store: StoreName = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """Make a store of a backup, at a place where none is. The store that it replaces must be gone for good.

    Every older token is refused, and every new epoch is above all that were ever issued. Until you say
    tidefast recover --nothing-lost, a tool that takes no key is held before its first sending: it may have been sent
    after the backup was made.
    """
    from tidefast.stores.sqlite_blobs import copy_contents
    from tidefast.stores.sqlite_recovery import restore as copy

    path = store_path(store)
    copy_contents(file, path)  # before the store: where that stands, nothing that it names is missing
    identity = copy(file, path, wall_ms(), _progress)
    _tell(f"{path} was restored", identity, as_json)
    return ExitCode.OK


def adopt(*, store: StoreName = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """Make a copied store's file a store of its own. Say it once, and only if the original is gone for good.

    The same as a restore, for a file that already stands where it shall be served.
    """
    opened = own(store, create=False, adopt=True)
    identity = opened.identity()
    opened.close()
    _tell(f"{store} is a store of its own now", identity, as_json)
    return ExitCode.OK


def recover(
    *,
    nothing_lost: Annotated[
        bool, Parameter(negative="", help="Close the window: nothing was lost, or you have looked at all of it.")
    ] = False,
    commits_lost: Annotated[
        bool,
        Parameter(negative="", help="Open it: this file stands where it always stood, but on an older disk image."),
    ] = False,
    note: Annotated[str, Parameter(help="Why; kept with the store.")] = "",
    store: StoreName = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Say how a store stands after a restore: since when commits may be missing, and what waits for it."""
    if nothing_lost and commits_lost:
        what = "--nothing-lost closes the window, --commits-lost opens it"
        raise CliError("usage", what, "say one of them", ExitCode.USAGE)
    if nothing_lost and not note:
        what = "closing the window lets calls be sent that may have been sent before, and nothing says why"
        raise CliError("usage", what, "add --note WHY", ExitCode.USAGE)
    if commits_lost:
        opened = own(store, create=False)
        opened.open_window(wall_ms())
    elif nothing_lost:
        opened = own(store, create=False)
        opened.close_window(getpass.getuser(), note, wall_ms())
    else:
        opened = SqliteStore.open_read_only(store_path(store))
    try:
        _tell_window(opened, as_json)
    finally:
        opened.close()
    return ExitCode.OK


def _tell(what: str, identity: Identity, as_json: bool) -> None:
    if as_json:
        out.document({"incarnation": identity.incarnation, "recovery": _members(identity)})
        return
    out.line(f"{what}, incarnation {identity.incarnation}")
    _tell_open(identity)


def _members(identity: Identity) -> dict[str, int] | None:
    return None if identity.recovery is None else identity.recovery._asdict()


def _tell_open(identity: Identity) -> None:
    window = identity.recovery
    if window is None:
        return
    out.line(
        ("recovery window open", "bold red"),
        f"  commits after {out.moment(window.point_ms)} UTC may be missing; restored {out.moment(window.restored_ms)}",
    )
    out.line("  first sendings since then: with a key they are replayed, without one they are held")
    out.line(f"  {CLOSE}")


def _tell_window(store: SqliteStore, as_json: bool) -> None:
    identity = store.identity()
    runs = [head for head in _open_runs(store) if identity.recovery is None or head.created_ms <= _restored(identity)]
    waiting = [(head, step) for head in runs for step in _waiting(store, head)]
    if as_json:
        found = [{"run": head.run_id, "step": step.step_id, "tool": step.tool} for head, step in waiting]
        members: dict[str, Any] = {"incarnation": identity.incarnation, "recovery": _members(identity)}
        out.document({**members, "open_runs": len(runs), "held": found})
        return
    if identity.recovery is None:
        out.line(f"no recovery window is open; incarnation {identity.incarnation}")
    _tell_open(identity)
    out.line(f"  {len(runs):,} runs that have not ended, {len(waiting):,} steps held because of lost commits")
    for head, step in waiting:
        out.line(("held", "bold red"), f"  run {head.run_id}, step {step.step_id}: {step.tool}")


def _restored(identity: Identity) -> int:
    return 0 if identity.recovery is None else identity.recovery.restored_ms


def _open_runs(store: SqliteStore) -> "list[RunHead]":
    found: list[RunHead] = []
    page = store.runs(None, PAGE, None)
    while page:
        found += [head for head in page if not head.end]
        page = store.runs(page[-1].run_id, PAGE, None)
    return found


def _waiting(store: SqliteStore, head: "RunHead") -> "list[Step]":
    """The steps of a run that are held because a restore may have lost their sending."""
    row = store.load_head(head.run_id)
    steps = [store.load_step(row[0], step_id) for step_id in head.held_steps] if row is not None else []
    return [step for step in steps if step is not None and step.reason == "lost_commits"]


def _progress(done: int, of: int) -> None:
    out.progress(done, of, "pages")
