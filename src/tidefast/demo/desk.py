"""The refund desk under fire: the product's main job, from the first ticket to the exit code.

Real providers, a real authority over a SQLite file, real workers, and a fault injector that kills and freezes them
while they work. When every ticket is completed, refused for a stated reason, or held for a person, everything is
stopped and the books are opened. The exit code is 0 only if every claim that is printed holds.
"""

import argparse
import asyncio
import faulthandler
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from tidefast.demo import account as books
from tidefast.demo import story
from tidefast.demo.account import Account
from tidefast.demo.house import PROVIDERS, TICKETS, House, HouseError
from tidefast.demo.live import Live
from tidefast.protocol.answers import RunInfo
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.sdk.http import HttpAuthority
from tidefast.sim.injector import Fault, Injector, Plan, Strike
from tidefast.stores.sqlite import SqliteStore

DIRECTORY = Path(".tidefast/demo")
MARK = "refund-desk"  # the file that says: this directory may be emptied for the next run
WORKERS = 4
FEW_TICKETS = 20  # so few are worked on so shortly that two deaths of the authority are enough
POLL_S = 0.2
LIMIT_S = 55.0
LOCAL_LIMIT_S = 900.0  # a real model on a busy machine takes its time
LOCAL_CALM_S = 600.0
LOCAL_TICKETS = 8
CALM_S = 38.0  # no fault is begun after this
HARD_LIMIT_S = 20.0  # beyond the limit, should even the event loop be stuck
STUCK_SHOWN = 12
INTERRUPTED = 130
SETTLED = frozenset(("completed", "failed", "held", "frozen"))

# What stands twice is planned twice as often: a step that is struck early has no late point left to be struck at.
# A mail's answer is never kept until the takeover: past its short deadline the doubt would be the injector's doing.
MENUS: Mapping[str, Sequence[Fault]] = {
    "refund": (
        Fault("kill_worker", "sdk.before_apply"),
        Fault("kill_worker", "gateway.before_intent", is_late=True),
        *(Fault("kill_worker", "gateway.after_intent"),) * 2,
        *(Fault("kill_worker", "gateway.after_send", is_late=True),) * 4,
        *(Fault("kill_worker", "sdk.after_apply"),) * 2,
        Fault("freeze_worker", "gateway.before_intent"),
        *(Fault("freeze_worker", "gateway.after_send"),) * 3,
        Fault("freeze_worker", "sdk.after_apply"),
    ),
    "mail": (
        Fault("kill_worker", "sdk.before_apply"),
        Fault("kill_worker", "gateway.before_intent", is_late=True),
        *(Fault("kill_worker", "gateway.after_intent"),) * 2,
        *(Fault("kill_worker", "gateway.after_send"),) * 2,
        *(Fault("kill_worker", "sdk.before_checkpoint"),) * 2,
        Fault("freeze_worker", "gateway.before_intent"),
        Fault("freeze_worker", "sdk.before_checkpoint"),
    ),
}


class Stuck(Exception):
    """The desk didn't get to its end in time. The message names what is stuck."""


@dataclass(frozen=True)
class Options:
    """What one run of the desk is asked to do. `providers` are the commands that start them."""

    seed: int
    tickets: int | None = None
    is_json: bool = False
    has_faults: bool = True
    limit_s: float = LIMIT_S
    directory: Path = DIRECTORY
    providers: Mapping[str, Sequence[str]] = field(default_factory=lambda: PROVIDERS)
    is_local: bool = False

    @property
    def calm_s(self) -> float:
        """When nobody is struck any more."""
        return LOCAL_CALM_S if self.is_local else CALM_S


def main(argv: Sequence[str] | None = None, providers: Mapping[str, Sequence[str]] = PROVIDERS) -> int:
    """Run the desk. Returns 0 if every claim holds, 1 if not, 2 for bad options, 130 if interrupted."""
    options = parse(argv, providers)
    faulthandler.dump_traceback_later(options.limit_s + HARD_LIMIT_S, exit=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(interruptible(run_desk(options)))
    except (HouseError, Stuck) as error:
        print(f"NOT OK: {error}", file=sys.stderr)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()


def parse(argv: Sequence[str] | None, providers: Mapping[str, Sequence[str]]) -> Options:
    parser = argparse.ArgumentParser("tidefast demo", description="The refund desk, under fire.", allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=None, help="plan the same faults again")
    parser.add_argument("--tickets", type=int, default=None, metavar="N", help="only the first N of the 40 tickets")
    parser.add_argument("--no-faults", action="store_true", help="nobody is killed or frozen")
    parser.add_argument(
        "--model",
        choices=("scripted", "local"),
        default="scripted",
        help="which model decides; local: a small real one",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help=f"where the files go (default {DIRECTORY})")
    given = parser.parse_args(argv)
    if given.tickets is not None and given.tickets < 1:
        parser.error("--tickets: expected 1 or more")
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    is_local = given.model == "local"
    tickets = given.tickets or (LOCAL_TICKETS if is_local else None)
    limit_s = LOCAL_LIMIT_S if is_local else LIMIT_S
    return Options(seed, tickets, given.json, not given.no_faults, limit_s, given.dir, providers, is_local)


async def interruptible(desk: Coroutine[Any, Any, int]) -> int:
    """Let SIGINT and SIGTERM end the desk in good order."""
    task = asyncio.ensure_future(desk)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        print("interrupted; every process of the desk has been stopped", file=sys.stderr)
        return INTERRUPTED


def plan_for(options: Options, tickets: int) -> Plan:
    """The faults of a seed: who is struck where, and at which call the authority dies."""
    if not options.has_faults:
        return Plan(options.seed, {}, share=0.0, least=0.0)
    chance = random.Random(f"{options.seed}/authority")
    places = [
        Strike("gateway.after_intent", "refund", 1 + int(tickets * chance.uniform(0.05, 0.2))),
        Strike("gateway.after_send", "refund", 1 + int(tickets * chance.uniform(0.5, 0.7))),
        Strike("gateway.after_send", "mail", 1 + int(tickets * chance.uniform(0.2, 0.35))),
        Strike("gateway.after_intent", "mail", 1 + int(tickets * chance.uniform(0.6, 0.75))),
    ]
    if tickets < FEW_TICKETS:
        return Plan(options.seed, MENUS, (places[0], places[2]), share=0.45, least=0.4, most=0.6)
    return Plan(options.seed, MENUS, places, share=0.45, least=0.4, most=1.0)


def fresh(directory: Path) -> Path:
    """An empty directory. One that isn't a former desk's is never emptied."""
    if directory.exists() and any(directory.iterdir()) and not (directory / MARK).exists():
        raise HouseError(f"{directory} is not empty and not a former desk's; name another one with --dir")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / MARK).write_text("Files of one run of the refund desk; the next run deletes them.\n", encoding="utf-8")
    return directory


def read_tickets(count: int | None) -> dict[str, str]:
    """Run ids with their inputs."""
    lines = TICKETS.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["ticket"]: line for line in lines[:count]}


async def run_desk(options: Options) -> int:
    """The whole desk: open, work, close, account."""
    tickets = read_tickets(options.tickets)
    directory = fresh(options.directory)
    live = Live(len(tickets), options.is_json)
    with tempfile.TemporaryDirectory(prefix="tidefast-") as sockets:
        points = f"{sockets}/points"
        injector = Injector(points, plan_for(options, len(tickets)), live.happened)
        house = House(directory, points, options.providers, is_local=options.is_local)
        try:
            async with asyncio.timeout(options.limit_s):
                await open_desk(house, injector, live, options)
                await work(house, injector, live, tickets, options)
                live.say(f"{live.elapsed_s:5.1f} s  every ticket is completed, refused or held; closing")
                await injector.close()
                ledgers = {name: await house.ledger(name) for name in options.providers}
                bill = await house.bill()
        except TimeoutError as error:
            raise Stuck(f"not done after {options.limit_s:g} s. {stuck(injector, live)}") from error
        finally:
            live.stop()
            await injector.close()
            await house.close()
    store = SqliteStore.open_read_only(house.store)
    try:
        account = books.settle_account(store, injector, ledgers, list(tickets), options.seed, bill)
    finally:
        store.close()
    return tell(options, account, injector, house.store, live.elapsed_s)


async def open_desk(house: House, injector: Injector, live: Live, options: Options) -> None:
    how = f"faults by seed {options.seed}" if options.has_faults else "no faults"
    model = "a small real model" if options.is_local else "a scripted model"
    live.say(f"The refund desk: 2 providers, {model}, 1 authority, {WORKERS} workers, {how}")
    await injector.start()
    await house.start_providers()
    await injector.add("authority", "authority", house.start_authority)

    async def add(name: str) -> None:
        await injector.add(name, "worker", lambda: house.start_worker(name))

    await asyncio.gather(*(add(f"worker-{number}") for number in range(1, WORKERS + 1)))


async def work(house: House, injector: Injector, live: Live, tickets: Mapping[str, str], options: Options) -> None:
    """Create one run per ticket, then watch until none is left to be worked on."""
    authority = HttpAuthority(house.url)
    watching = asyncio.ensure_future(watch(authority, injector, live, tickets, options.calm_s))
    broken = asyncio.ensure_future(injector.broken.wait())
    try:
        await asyncio.wait((watching, broken), return_when=asyncio.FIRST_COMPLETED)
        if not watching.done():
            raise HouseError(f"processes keep dying by themselves: {injector.crashes[-1]}; see {house.directory}")
        watching.result()
    finally:
        broken.cancel()
        watching.cancel()
        await asyncio.gather(watching, broken, return_exceptions=True)
        await authority.close()


async def watch(
    authority: HttpAuthority, injector: Injector, live: Live, tickets: Mapping[str, str], calm_s: float
) -> None:
    """Bring the tickets in, then look until each run has come to rest. Late in the day nobody is struck any more."""
    for run, ticket in tickets.items():
        await create(authority, run, ticket)
    states: Counter[str] = Counter()
    while sum(states[state] for state in SETTLED) < len(tickets):
        await asyncio.sleep(POLL_S)
        found = await runs_of(authority)
        if found:
            states = Counter(str(run.state) for run in found)
            live.unsettled = [f"{run.run_id} {run.state}" for run in found if run.state not in SETTLED]
        live.progress(states)
        if live.elapsed_s > calm_s:
            injector.calm()


async def create(authority: HttpAuthority, run: str, ticket: str) -> None:
    """Create a run, however often the authority dies meanwhile: the id makes it one run."""
    while True:
        try:
            created = await authority.create_run(run, "refund-desk", "1", ticket)
        except AuthorityUnavailable:
            await asyncio.sleep(POLL_S)
            continue
        if isinstance(created, Refused):
            raise HouseError(f"the authority doesn't take ticket {run}: {created.code} ({created.reason})")
        return


async def runs_of(authority: HttpAuthority) -> Sequence[RunInfo]:
    """All runs; none while the authority is dead."""
    try:
        return await authority.runs(None, 1000, None)
    except AuthorityUnavailable:
        return ()


def stuck(injector: Injector, live: Live) -> str:
    """What the watchdog found: processes and runs, and where each was last seen."""
    members = ", ".join(f"{member.name} {member.state}" for member in injector.members)
    runs: list[str] = []
    for told in live.unsettled:
        track = injector.tracks.get(told.partition(" ")[0])
        runs.append(f"{told}, last at {track.last}" if track is not None and track.last else told)
    return f"Processes: {members or 'none'}. Runs not at rest: {'; '.join(runs[:STUCK_SHOWN]) or 'none known'}."


def tell(options: Options, account: Account, injector: Injector, store: Path, seconds: float) -> int:
    """Print the account; the exit code is 0 if it shows no problem."""
    problems = list(account.problems())
    if options.is_json:
        print(books.json_report(account, store, seconds))
        return 1 if problems else 0
    run = story.choose(account.traces, injector)
    if run is not None:
        names = {holder: member.name for holder, member in injector.holders.items()}
        section(
            f"One run: {run} ({account.outcomes[run]})", story.timeline(account.traces[run], injector.happenings, names)
        )
    section("Faults", books.tell_faults(account))
    section("Tickets", books.tell_tickets(account))
    section("The books: the providers' ledgers against the log", books.tell_books(account))
    section("", books.tell_hops(account))
    section("Held for a person (nobody guesses; each command settles one)", books.tell_held(account, store))
    section("Acceptance", books.tell_acceptance(account))
    section("", books.tell_problems(account))
    print(f"\n{'NOT OK' if problems else 'ok'}: {seconds:.1f} s, seed {options.seed}, files in {store.parent}")
    return 1 if problems else 0


def section(title: str, lines: Iterable[str]) -> None:
    """A titled block, or nothing if it has no lines."""
    found = list(lines)
    if found:
        print("\n".join(["", *([title, "-" * len(title)] if title else []), *found]))


if __name__ == "__main__":
    sys.exit(main())
