"""Commands that decide about a step or a store: `resolve`, `adopt`.

A verdict expects what the operator saw: a step that has had another attempt, or a run that has had another epoch since,
is refused as `moved` instead of being decided on old evidence.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.desk import must, writing
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, Looked, OperatorKey, StoreName, Url, checked_id, json_text
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.verdicts import Settled
from tidefast.wire.answers import spell

VERDICT = Literal["applied", "not_applied", "refused", "compensated"]
Note = Annotated[str, Parameter(help="Why; it stands in the log for good.")]


def resolve(
    run: str,
    step: str,
    verdict: VERDICT,
    /,
    *,
    note: Note,
    receipt: Annotated[str, Parameter(help="What the provider says about it, as JSON or @FILE.")] = "null",
    looked: Looked = None,
    expect_attempts: Annotated[
        int | None, Parameter(help="How many attempts the step had when you looked; by default as many as now.")
    ] = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> int:
    """Say what became of a step in doubt or held: applied, not_applied, refused or compensated.

    Look at the provider first. `not_applied` lets the step be sent again; `refused` settles it for good, as never done.
    """
    names = (checked_id(run, "RUN"), checked_id(step, "STEP", derived=True))
    receipt_json = json_text(receipt, "--receipt")
    if looked is None and verdict != "applied":
        what = f"{verdict} rests on a look at the provider, and nothing says when that was"
        todo = "add --looked 0s if you looked just now, --looked 5m if it was five minutes ago"
        raise CliError("usage", what, todo, ExitCode.USAGE)
    settled = asyncio.run(
        _resolve(names, verdict, note, receipt_json, looked, expect_attempts, url, store, operator_key)
    )
    if as_json:
        out.document(spell(settled))
    else:
        out.line(f"step {step} of run {run} is now ", (settled.state, out.STYLES.get(settled.state, "bold")))
    return 0


async def _resolve(
    names: tuple[str, str],
    verdict: VERDICT,
    note: str,
    receipt_json: str,
    looked_ms: int | None,
    expect_attempts: int | None,
    url: str | None,
    store: str,
    operator_key: Path | None,
) -> Settled:
    run, step = names
    async with writing(url, store, operator_key) as desk:
        seen = must(await desk.step(RunId(run), StepId(step)))
        expected = len(seen.attempts) if expect_attempts is None else expect_attempts
        looked_at_ms = None if looked_ms is None else seen.now_ms - looked_ms
        return must(await desk.resolve(run, step, verdict, note, receipt_json, looked_at_ms, expected))
