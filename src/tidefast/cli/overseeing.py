"""An operator's commands on a run: `preempt`, `pause`, `resume`, `freeze`, `thaw`, `cancel`.

Each one is written into the run's log with its reason, says nothing new when it is repeated, and expects the epoch that
the operator saw: a run that was granted since is refused as `moved`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.desk import must, writing
from tidefast.cli.options import DEFAULT_STORE, AsJson, OperatorKey, StoreName, Url, checked_id
from tidefast.protocol.commands import RunVerb
from tidefast.protocol.ids import RunId
from tidefast.protocol.verdicts import Done
from tidefast.wire.answers import spell

Note = Annotated[str, Parameter(help="Why; it stands in the log for good.")]
ExpectEpoch = Annotated[int | None, Parameter(help="The epoch that you saw; by default the newest one now.")]


def preempt(
    run: str,
    /,
    *,
    note: Note = "",
    expect_epoch: ExpectEpoch = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """End a run's lease. Its holder is told at its next call, its effects are kept, and others may claim the run."""
    return _oversee("preempt", run, note, expect_epoch, url, store, operator_key, as_json)


def pause(
    run: str,
    /,
    *,
    note: Note = "",
    expect_epoch: ExpectEpoch = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """Let nothing new of a run begin until it is resumed. What is in flight settles, and the worker lets go of it."""
    return _oversee("pause", run, note, expect_epoch, url, store, operator_key, as_json)


def resume(
    run: str,
    /,
    *,
    note: Note = "",
    expect_epoch: ExpectEpoch = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """Let a paused run go on where it stands."""
    return _oversee("resume", run, note, expect_epoch, url, store, operator_key, as_json)


def freeze(
    run: str,
    /,
    *,
    note: Note = "",
    expect_epoch: ExpectEpoch = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """Stop a run so that a person can look at it. It goes on only by thaw, or ends by cancel."""
    return _oversee("freeze", run, note, expect_epoch, url, store, operator_key, as_json)


def thaw(
    run: str,
    /,
    *,
    note: Note = "",
    expect_epoch: ExpectEpoch = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """Let a frozen run go on. Its count of grants without progress starts anew."""
    return _oversee("thaw", run, note, expect_epoch, url, store, operator_key, as_json)


def cancel(
    run: str,
    /,
    *,
    note: Note = "",
    expect_epoch: ExpectEpoch = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """End a run. Its lease ends at once; what is open is settled, what can be undone is undone, newest first."""
    return _oversee("cancel", run, note, expect_epoch, url, store, operator_key, as_json)


def _oversee(
    verb: RunVerb,
    run: str,
    note: str,
    expect_epoch: int | None,
    url: str | None,
    store: str,
    operator_key: Path | None,
    as_json: bool,
) -> int:
    name = RunId(checked_id(run, "RUN"))
    done, plan = asyncio.run(_ask(verb, name, note, expect_epoch, url, store, operator_key))
    if as_json:
        out.document(spell(done))
        return 0
    told = f"run {run} is now " if done.was_new else f"nothing to do: run {run} is "
    out.line(told, (done.state, out.STYLES.get(done.state, "bold")))
    for line in plan:
        out.line(line)
    return 0


async def _ask(
    verb: RunVerb,
    run: RunId,
    note: str,
    expect_epoch: int | None,
    url: str | None,
    store: str,
    operator_key: Path | None,
) -> tuple[Done, Sequence[str]]:
    """The answer, and for a run that is ending what will be undone."""
    async with writing(url, store, operator_key) as desk:
        if expect_epoch is None:
            expect_epoch = must(await desk.run(run)).epoch
        done = must(await desk.oversee(verb, run, note, expect_epoch))
        if done.state not in ("failing", "cancelling"):
            return done, ()
        (event,) = must(await desk.events(run, done.seq - 1, 1))
        plan = msgspec.json.decode(event.data_json)
        return done, (
            f"  to undo, in this order: {', '.join(plan['undo']) or 'nothing'}",
            f"  stays, no undo is declared: {', '.join(plan['kept']) or 'nothing'}",
        )
