"""Commands that prove: `audit` judges a store, `sim` the product, `check` its rules, `demo` shows it under fire."""

import asyncio
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, StoreName
from tidefast.cli.place import store_path

PROGRESS_EVERY = 20


def audit(
    *,
    store: StoreName = DEFAULT_STORE,
    ledger: Annotated[
        Path | None, Parameter(help="A provider's own record: a JSON list of {key, count} or {run, step, count}.")
    ] = None,
    anchor: Annotated[
        list[Path] | None,
        Parameter(negative="", help="A signed anchor that was taken before; several narrow down where a log differs."),
    ] = None,
    anchor_key: Annotated[
        str | None, Parameter(help="The public key that must have signed the anchors: its file, or SHA256:FINGERPRINT.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Judge every log of a store by the laws, without the rules that wrote it. The exit code is 0 only if all hold.

    The store may be in use. With --ledger, effects that never passed the gateway are named too; let it rest for that.
    With --anchor, logs that were cut or rewritten since the anchor was taken are named, however well they were forged.
    """
    from tidefast.cli.evidence import read_anchors, refusals, told_anchors
    from tidefast.sim import audit as auditor
    from tidefast.sim.history import LedgerError, read_ledger
    from tidefast.sim.report import from_audit, to_json, to_text
    from tidefast.stores.sqlite import SqliteStore

    books = None
    if ledger is not None:
        try:
            books = read_ledger(ledger.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, LedgerError) as error:
            raise CliError("config", f"--ledger {ledger}: {error}", "correct the file", ExitCode.CONFIG) from error
    anchors = read_anchors(anchor or [], anchor_key)
    opened = SqliteStore.open_read_only(store_path(store))
    try:
        with refusals("anchor_refused"):
            report = from_audit(auditor.audit(opened, books, anchors=anchors))
    finally:
        opened.close()
    rows, more = told_anchors(anchors)
    text = json.dumps({**json.loads(to_json(report)), **more}) if as_json else rows + to_text(report)
    _print(text, as_json)
    return ExitCode.OK if report.is_ok else ExitCode.OTHER


def sim(
    *,
    acceptance: Annotated[bool, Parameter(negative="", help="The two acceptance rules.")] = False,
    interleavings: Annotated[int, Parameter(help="How many interleavings.")] = 200,
    seed: Annotated[int, Parameter(help="The same seed gives the same interleavings.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Inject preemptions into runs of a real authority, in many orders, and let the auditor judge what came of it."""
    if not acceptance:
        raise CliError("usage", "nothing to simulate was named", "tidefast sim --acceptance", ExitCode.USAGE)
    if interleavings < 1:
        raise CliError("usage", f"--interleavings {interleavings}", "expected 1 or more", ExitCode.USAGE)
    from tidefast.sim import acceptance as campaign
    from tidefast.sim.report import to_json, to_text
    from tidefast.stores.memory import MemoryStore

    is_watched = sys.stderr.isatty()

    def on_step(done: int) -> None:
        if is_watched and (done % PROGRESS_EVERY == 0 or done == interleavings):
            end = "\n" if done == interleavings else ""
            print(f"\r{done:,} of {interleavings:,} interleavings", end=end, file=sys.stderr, flush=True)

    found = asyncio.run(campaign.run(MemoryStore(), interleavings, seed, on_step))
    more = {
        "distinct_orders": found.distinct_orders,
        "late_acks": found.late_acks,
        "preempted_steps": found.preempted_steps,
        "ok": found.is_ok,
    }
    if as_json:
        _print(json.dumps({**json.loads(to_json(found.report)), **more}), as_json)
    else:
        rows = "".join(f"{name.replace('_', ' '):<40} {count:>20,}\n" for name, count in more.items() if name != "ok")
        _print(rows + to_text(found.report), as_json)
    return ExitCode.OK if found.is_ok else ExitCode.OTHER


def check(
    *,
    quick: Annotated[bool, Parameter(negative="", help="Small configurations: seconds instead of minutes.")] = False,
    replay: Annotated[Path | None, Parameter(help="Play the moves of a scenario file against today's rules.")] = None,
    write_scenario: Annotated[Path | None, Parameter(help="Keep the first counterexample in this file.")] = None,
    as_json: AsJson = False,
) -> int:
    """Search every order of everything that can happen to a small run, over the real rules, until nothing is new.

    The exit code is 0 only if every law holds in every state, each frontier is closed, a run can end from each state,
    and everything that the search is there for has happened. A counterexample is told move by move.
    """
    from tidefast.sim.check import campaign, configs
    from tidefast.sim.check.trace import play, scenario

    if replay is not None:
        return _replay(replay)
    chosen = configs.QUICK if quick else configs.GATE

    def on_done(result: Any) -> None:
        if sys.stderr.isatty():
            print(campaign.row(result), file=sys.stderr, flush=True)

    done = campaign.run(chosen, has_gate=not quick, on_done=on_done)
    _print(campaign.campaign_json(done) if as_json else campaign.campaign_text(done), as_json)
    broken = next(((r.config, r.findings[0]) for r in done.results if r.findings), None)
    if broken is not None:
        config, finding = broken
        if write_scenario is not None:
            write_scenario.write_text(scenario(config, finding), encoding="utf-8")
        if not as_json:
            keys = tuple(move.key for move in finding.moves)
            _print(f"\nThe shortest way there, in {config.name}:\n" + "\n".join(play(config, keys).lines), as_json)
    return ExitCode.OK if done.is_ok else ExitCode.OTHER


def _replay(path: Path) -> int:
    """Play a scenario file; the exit code is 0 if no law breaks any more."""
    from tidefast.sim.check import configs
    from tidefast.sim.check.trace import TraceError, play, read_scenario

    try:
        config, keys = read_scenario(path.read_text(encoding="utf-8"), configs.BY_NAME)
        played = play(config, keys)
    except (OSError, UnicodeDecodeError, TraceError) as error:
        raise CliError("config", f"--replay {path}: {error}", "correct the file", ExitCode.CONFIG) from error
    _print("\n".join((*played.lines, "no law is broken" if not played.law else f"broken: {played.law}")), False)
    return ExitCode.OTHER if played.law else ExitCode.OK


def demo(*arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """The refund desk: forty tickets, workers killed and frozen at named points, and the books afterwards."""
    return int(import_module("tidefast.demo.desk").main(list(arguments)))


def _print(text: str, as_json: bool) -> None:
    if as_json:
        out.write(text.replace("\x7f", "\\u007f"))
        return
    for row in text.rstrip("\n").split("\n"):
        out.line(row)
