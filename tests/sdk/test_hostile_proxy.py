"""Workers and clients through a proxy that resets, truncates and doubles: nothing is applied twice, nothing is lost.

Real sockets, a real server, a store on the disk. Each agent charges (a tool with a key), mails (one without), journals,
checkpoints and undoes; clients start runs, wait for them and read everything. Afterwards the tools' own count, the
results and the auditor must agree. A mutant of the client is convicted by the same rig.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.sdk.hostile import FAULTS, HostileProxy
from tests.server.support import credentials

import tidefast as tf
from tidefast.cli.wiring import build_authority, local_runner
from tidefast.sdk.heartbeat import ThreadHeartbeat
from tidefast.sdk.http import HttpAuthority
from tidefast.sdk.line import Backoff
from tidefast.sdk.worker import Worker
from tidefast.server.app import build_app
from tidefast.server.serve import serve
from tidefast.services.tools import ToolBook
from tidefast.sim.audit import audit
from tidefast.sim.history import Ledger
from tidefast.stores.sqlite import SqliteStore

SOON = Backoff(0.002, 0.05)
WORKERS = 3
SHARE = 0.6  # of the calls that are broken
UNDONE = ("7", "9")  # by the agent itself; by the run that fails
LOST = ("answer cut in its body",)  # what was asked is done, and the caller doesn't hear so
FAULTED_LEAST = 5_000  # RELIABILITY's gate for faulted calls
KINDS = (
    (r"POST /v1/runs$", "start"), (r"POST /v1/claims$", "claim"), (r"POST .*/lease/renew$", "renew"),
    (r"POST /v1/leases/renew$", "renew"), (r"POST .*/lease/release$", "release"), (r"POST .*/lease$", "grant"),
    (r"POST .*/result$", "result"), (r"POST .*/compensate$", "compensate"), (r"POST .*/steps/[^/]*$", "apply"),
    (r"POST .*/checkpoints$", "checkpoint"), (r"POST .*/complete$", "complete"), (r"POST .*/fail$", "fail"),
    (r"GET .*/journal", "journal"), (r"GET .*/events", "events"), (r"GET .*/steps/", "step"),
    (r"GET .*/steps", "steps"), (r"GET /v1/runs\?", "runs"), (r"GET /v1/held", "held"), (r"GET /v1/runs/", "run"),
)  # fmt: skip
WANTED = {"start", "claim", "release", "result", "compensate", "apply", "checkpoint", "complete", "fail"}
WANTED |= {"events", "step", "steps", "runs", "run"}


def kind_of(method: str, path: str) -> str:
    return next((kind for pattern, kind in KINDS if re.match(pattern, f"{method} {path}")), path)


class World:
    """The tools, counted by what they did, and the agent that uses them."""

    def __init__(self) -> None:
        self.charges: Counter[str] = Counter()
        self.mails: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()
        self.orders: dict[str, str] = {}  # by the key of the charge
        self.fallen: set[str] = set()
        self.app = tf.App()

        @self.app.tool(key_ttl="24h", undo={"tool": "refund", "args": {"order": "{args.order}"}})
        async def charge(order: str, key: str) -> dict[str, str]:
            self.charges[key] += 1
            self.orders[key] = order
            return {"charged": order}

        @self.app.tool(key_ttl="24h")
        async def refund(order: str, key: str) -> str:
            self.undone[order] += 1
            return order

        @self.app.tool
        async def mail(to: str) -> str:
            self.mails[to] += 1
            return to

        @self.app.agent
        async def desk(run: tf.Run, order: str) -> str:
            await run.tool("pay", charge, order=order)
            noted = await run.step("note", lambda: f"noted {order}")
            await run.checkpoint({"stage": "paid"})
            await run.tool("tell", mail, to=order)
            if order.endswith("3") and order not in self.fallen:
                self.fallen.add(order)
                raise RuntimeError("the agent's own fault, this time only")
            if order.endswith("7"):
                await run.compensate("pay")
            if order.endswith("9"):
                raise tf.Fail(f"no {order}")
            await run.checkpoint({"stage": "told"})
            return str(noted)


@contextlib.asynccontextmanager
async def authority(world: World, file: Path) -> AsyncIterator[int]:
    """A served authority over a store's file: its port."""
    from tidefast.cli.place import system_clock

    store = SqliteStore.open(file, create=True)
    clock = system_clock(store)
    book = ToolBook([tool.contract for tool in world.app.tools.values()])
    parts = await build_authority(store, book, local_runner(clock, world.app), clock=clock)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(build_app(parts.authority, credentials()), "127.0.0.1", 0, ready.set_result, stop)
    )
    try:
        yield int((await ready).rsplit(":", 1)[1])
    finally:
        stop.set()
        await serving
        await parts.stop()


async def customer(url: str, number: int, count: int, results: dict[str, Any]) -> None:
    """One client: starts its runs, waits for each, reads what there is to read."""
    async with tf.AsyncClient(url, patience_s=60, backoff=SOON) as desk:
        for place in range(count):
            run = (await desk.start("desk", f"o-{number}-{place}")).run_id
            try:
                results[run] = await desk.result(run)
            except tf.RunFailed as failed:
                results[run] = failed
            steps = [step.step_id async for step in desk.steps(run)]
            seqs = [event.seq async for event in desk.events(run)]
            if steps != sorted(steps) or seqs != list(range(1, len(seqs) + 1)):
                results[run] = f"pages with holes: {steps} {seqs}"
            await desk.step(run, steps[0])
        _ = [info async for info in desk.runs(state="held")]


async def play(
    world: World, directory: Path, seed: int, customers: int, each: int, faults: Sequence[str]
) -> tuple[HostileProxy, dict[str, Any]]:
    results: dict[str, Any] = {}
    async with (
        authority(world, directory / "store.db") as port,
        HostileProxy(port, seed, SHARE, kind_of, faults) as proxy,
    ):
        lines = [HttpAuthority(proxy.url) for _ in range(WORKERS)]
        workers = [
            Worker(line, world.app, ThreadHeartbeat(lambda: HttpAuthority(proxy.url)), lease_ms=3_000, backoff=SOON)
            for line in lines
        ]
        driving = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            await asyncio.gather(*(customer(proxy.url, number, each, results) for number in range(customers)))
        finally:
            for worker in workers:
                worker.stop()
            await asyncio.gather(*driving)
            for line in lines:
                await line.close()
    return proxy, results


def problems(world: World, directory: Path, results: dict[str, Any], wanted: int) -> Iterator[str]:
    """What is doubled, lost or wrong, by the tools' own count, by the results and by the auditor."""
    for what, counts in (("charge", world.charges), ("mail", world.mails), ("refund", world.undone)):
        yield from (f"{what} {key}: applied {count} times" for key, count in counts.items() if count > 1)
        expected = wanted if what != "refund" else sum(order.endswith(UNDONE) for order in world.mails)
        if len(counts) != expected:
            yield f"{what}: {len(counts)} of {expected} were applied"
    store = SqliteStore.open_read_only(directory / "store.db")
    try:
        net = {key: count - world.undone[world.orders[key]] for key, count in world.charges.items()}
        report = audit(store, Ledger(net, {}, frozenset(("charge",))))
        if report.runs != wanted:
            yield f"{report.runs} runs, {wanted} were asked for"
        yield from (str(violation) for violation in report.violations)
    finally:
        store.close()
    for run, result in results.items():
        if not (isinstance(result, tf.RunFailed) or str(result).startswith("noted o-")):
            yield f"{run}: {result!r}"


def run_rig(
    directory: Path, seed: int, customers: int = 4, each: int = 2, faults: Sequence[str] = FAULTS
) -> tuple[HostileProxy, list[str]]:
    world = World()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        proxy, results = runner.run(asyncio.wait_for(play(world, directory, seed, customers, each, faults), 90))
    return proxy, list(problems(world, directory, results, customers * each))


def test_a_few_runs_through_a_hostile_proxy_end_as_they_should(tmp_path: Path) -> None:
    proxy, found = run_rig(tmp_path, 1)
    assert not found
    assert proxy.faulted > 50


@pytest.mark.rig
@pytest.mark.alone
def test_thousands_of_broken_calls_apply_nothing_twice_and_lose_nothing(tmp_path: Path) -> None:
    proxy, found = run_rig(tmp_path, 2, customers=20, each=24)
    assert not found
    by_kind = Counter[str]()
    for (kind, fault), count in proxy.done.items():
        by_kind[kind] += count if fault in FAULTS else 0
    print(f"\n{proxy.faulted} broken calls of {proxy.done.total()}, {dict(by_kind)}")
    assert by_kind.total() - by_kind["run"] >= FAULTED_LEAST, "a client that waits asks for its run all the time"
    assert set(by_kind) >= WANTED
    assert len({key for key in proxy.done if key[1] in FAULTS}) >= len(WANTED) * len(FAULTS) * 0.9


def test_a_client_that_draws_an_id_for_each_try_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HttpAuthority.create_run

    async def forgetful(self: HttpAuthority, run_id: str | None, *args: Any) -> Any:
        return await honest(self, None, *args)

    monkeypatch.setattr(HttpAuthority, "create_run", forgetful)
    assert any("mail" in problem for problem in run_rig(tmp_path, 3, faults=LOST)[1])


def test_a_worker_that_repeats_as_another_step_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, tries = HttpAuthority.apply, Counter[tuple[str, str]]()

    async def impatient(self: HttpAuthority, token: str, step_id: str, *args: Any) -> Any:
        tries[token, step_id] += 1
        count = tries[token, step_id]
        return await honest(self, token, step_id if count == 1 else f"{step_id}-{count}", *args)

    monkeypatch.setattr(HttpAuthority, "apply", impatient)
    assert any("applied" in problem for problem in run_rig(tmp_path, 4, faults=LOST)[1])
