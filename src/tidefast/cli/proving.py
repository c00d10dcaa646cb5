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
HOURS = 20.0
HOURS_MAX = 1_000_000


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
    from tidefast.cli.evidence import not_checked, read_anchors, refusals, told_anchors
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
    unchecked = not_checked(anchors, has_ledger=books is not None)
    more = {**more, "not_checked": list(unchecked)}
    rows += "".join(f"not checked: {what}\n" for what in unchecked.values())
    text = json.dumps({**json.loads(to_json(report)), **more}) if as_json else rows + to_text(report)
    _print(text, as_json)
    return ExitCode.OK if report.is_ok else ExitCode.OTHER


def sim(
    *,
    acceptance: Annotated[bool, Parameter(negative="", help="The two acceptance rules.")] = False,
    interleavings: Annotated[int, Parameter(help="With --acceptance: how many interleavings.")] = 200,
    orders: Annotated[bool, Parameter(negative="", help="All 40,320 orders of eight events on one step.")] = False,
    gate: Annotated[bool, Parameter(negative="", help="The full campaign: 1,000 hours, 200,000 calls.")] = False,
    hours: Annotated[float | None, Parameter(help="How many hours under fire; two of them make one world.")] = None,
    seed: Annotated[int, Parameter(help="The same seed gives the same histories.")] = 1,
    processes: Annotated[int | None, Parameter(help="How many processes; one per core by default.")] = None,
    report: Annotated[
        Path | None, Parameter(help="Write the report, with pictures of runs, to this HTML file.")
    ] = None,
    log: Annotated[
        bool, Parameter(negative="", help="Print the log of each run that broke a law (one world).")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Play real authority, workers and agents in virtual time under fire; the auditor judges what came of it."""
    if interleavings < 1:
        raise CliError("usage", f"--interleavings {interleavings}", "expected 1 or more", ExitCode.USAGE)
    if hours is not None and not 0 < hours <= HOURS_MAX:
        raise CliError("usage", f"--hours {hours:g}", f"expected more than 0, at most {HOURS_MAX:,}", ExitCode.USAGE)
    if processes is not None and processes < 1:
        raise CliError("usage", f"--processes {processes}", "expected 1 or more", ExitCode.USAGE)
    if acceptance:
        return _acceptance(interleavings, seed, as_json)
    if orders:
        return _orders(as_json)
    from tidefast.sim.campaign import GATE_HOURS

    return _campaign(seed, hours or (GATE_HOURS if gate else HOURS), processes, report, log, as_json)


def _campaign(seed: int, hours: float, processes: int | None, report: Path | None, log: bool, as_json: bool) -> int:
    from tidefast.sim import campaign as rig
    from tidefast.sim.page import page

    worlds = len(rig.worlds_of(seed, hours))
    if log and worlds > 1:
        raise CliError("usage", "--log prints one world", f"--hours {rig.WORLD_HOURS:g} or fewer", ExitCode.USAGE)

    def on_world(done: rig.Campaign) -> None:
        out.progress(done.worlds, worlds, "worlds")

    found = rig.run(seed, hours, processes, on_world)
    world = None
    if report is not None or (log and found.bad_seeds):
        shown = found.bad_seeds[0] if found.bad_seeds else seed
        world = rig.play(shown, min(hours, rig.WORLD_HOURS))[1]
    if report is not None:
        try:
            report.write_text(page(found, world), encoding="utf-8")
        except OSError as error:
            raise CliError("config", f"--report {report}: {error}", "name a writable file", ExitCode.CONFIG) from error
    _print(rig.as_json(found) if as_json else rig.as_text(found), as_json)
    if log and world is not None and found.bad_seeds and not as_json:
        for line in rig.broken_logs(world, found):
            out.line(line)
    return ExitCode.OK if found.is_ok else ExitCode.OTHER


def _orders(as_json: bool) -> int:
    from tidefast.sim import orders as rig
    from tidefast.sim.report import to_json, to_text

    found = rig.run(list(rig.all_orders()), rig.CHARGE, lambda done: out.progress(done, rig.ALL, "orders"))
    more = {
        "orders": found.orders,
        "preempted_steps": found.preempted,
        "late_acks": found.late_acks,
        "distinct_logs": len(found.distinct_logs),
        "stuck": len(found.stuck),
        "ok": found.is_ok,
    }
    if as_json:
        _print(json.dumps({**json.loads(to_json(found.report)), **more}), as_json)
    else:
        rows = "".join(f"{name.replace('_', ' '):<40} {count:>20,}\n" for name, count in more.items() if name != "ok")
        _print(rows + to_text(found.report), as_json)
    return ExitCode.OK if found.is_ok else ExitCode.OTHER


def _acceptance(interleavings: int, seed: int, as_json: bool) -> int:
    from tidefast.sim import acceptance as campaign
    from tidefast.sim.report import to_json, to_text
    from tidefast.stores.memory import MemoryStore

    def on_step(done: int) -> None:
        if done % PROGRESS_EVERY == 0 or done == interleavings:
            out.progress(done, interleavings, "interleavings")

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
