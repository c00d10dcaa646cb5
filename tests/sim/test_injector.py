"""The fault injector against real, tiny child processes that do nothing but report points."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidefast.protocol.points import Point
from tidefast.sim.injector import Fault, Happening, Injector, Plan, Process, Strike, end
from tidefast.sim.points import Reporter, connect

CHILD = """
import asyncio, sys
from tidefast.sim.points import connect

async def main(path, holder, epoch, *points):
    hook = connect(path)
    for point in points:
        await hook(point, {"run": "r", "step": "pay", "epoch": int(epoch), "holder": holder})
        print(point, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
LIMIT_S = 30
NONE = Plan(1, {}, share=0.0, least=0.0)


class Stage:
    """An injector with children; `next` waits for the next happening of a kind."""

    def __init__(self, directory: str, plan: Plan, keep_up: int) -> None:
        self.path = f"{directory}/points"
        self.heard: asyncio.Queue[Happening] = asyncio.Queue()
        self.injector = Injector(self.path, plan, self.heard.put_nowait, keep_up)
        self.children: list[asyncio.subprocess.Process] = []
        self.here = Reporter(self.path)

    async def child(self, holder: str, epoch: int, *points: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CHILD, self.path, holder, str(epoch), *points), stdout=asyncio.subprocess.PIPE
        )
        self.children.append(process)
        return process

    async def next(self, what: str) -> Happening:
        while True:
            happening = await self.heard.get()
            if happening.what == what:
                return happening

    async def report(self, point: Point, epoch: int, holder: str = "here", step: str = "pay") -> None:
        """Report a point from this very process, as the child's successor or as the gateway."""
        await self.here(point, {"run": "r", "step": step, "epoch": epoch, "holder": holder})


def play(plan: Plan, scene: Callable[[Stage], Awaitable[None]], keep_up: int = 0) -> None:
    async def run() -> None:
        with TemporaryDirectory(prefix="points") as directory:
            stage = Stage(directory, plan, keep_up)
            await stage.injector.start()
            try:
                async with asyncio.timeout(LIMIT_S):
                    await scene(stage)
            finally:
                await stage.here.close()
                await stage.injector.close(grace_s=1)

    asyncio.run(run())


async def line(process: Process) -> str:
    stdout: Any = process.stdout  # type: ignore[attr-defined]
    return str((await stdout.readline()).decode().strip())


def always(*faults: Fault, strikes: tuple[Strike, ...] = ()) -> Plan:
    return Plan(7, {"pay": faults}, strikes, share=1.0, least=0.0)


# --- the reporting end ----------------------------------------------------------------------------------------------


def test_without_an_injector_points_let_go_at_once(tmp_path: Path) -> None:
    hook = connect(f"unix:{tmp_path}/nobody")
    asyncio.run(asyncio.wait_for(hook("sdk.before_apply", {"run": "r"}), LIMIT_S))  # type: ignore[arg-type]


def test_an_injector_that_goes_away_lets_go_of_what_waits() -> None:
    async def scene() -> None:
        with TemporaryDirectory(prefix="points") as directory:
            arrived: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

            async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readline()
                await reader.readline()
                arrived.put_nowait(writer)

            server = await asyncio.start_unix_server(take, f"{directory}/points")
            hook = Reporter(f"{directory}/points")
            waiting = [asyncio.ensure_future(hook("sdk.before_apply", {"run": name})) for name in "ab"]
            writer = await arrived.get()
            assert not any(task.done() for task in waiting)
            writer.close()
            await asyncio.gather(*waiting)
            await hook("sdk.after_apply", {"run": "c"})
            server.close()

    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


def test_what_is_no_injector_holds_up_nobody() -> None:
    async def scene() -> None:
        with TemporaryDirectory(prefix="points") as directory:

            async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"hello?\n")
                await reader.read()
                writer.close()

            server = await asyncio.start_unix_server(babble, f"{directory}/points")
            hook = Reporter(f"{directory}/points")
            await hook("sdk.before_apply", {"run": "r"})
            await hook.close()
            server.close()

    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


# --- the plan -------------------------------------------------------------------------------------------------------


def test_a_seed_plans_the_same_faults_again() -> None:
    menu = {"pay": (Fault("kill_worker", "sdk.after_apply"), Fault("freeze_worker", "sdk.before_apply"))}
    runs = [f"r{number}" for number in range(200)]
    first, again, other = ([Plan(seed, menu, share=0.5).fault(run, "pay") for run in runs] for seed in (1, 1, 2))
    assert first == again != other
    struck = [fault for fault in first if fault is not None]
    assert 60 <= len(struck) <= 140
    assert set(struck) == set(menu["pay"])
    assert Plan(1, menu).fault("r1", "other") is None


# --- the faults -----------------------------------------------------------------------------------------------------


def test_a_worker_is_really_killed_at_its_point_and_started_again() -> None:
    async def scene(stage: Stage) -> None:
        fault = Fault("kill_worker", "sdk.after_apply")
        stage.injector.plan = always(fault)
        epochs = iter((1, 2))

        async def start() -> Process:
            return await stage.child(f"w{len(stage.children)}", next(epochs), "sdk.before_apply", "sdk.after_apply")

        member = await stage.injector.add("worker", "worker", start)
        killed = await stage.next("killed")
        assert (killed.run, killed.step, killed.epoch, killed.who) == ("r", "pay", 1, "worker")
        await stage.next("restarted")
        first, second = stage.children
        assert first.returncode == -signal.SIGKILL
        assert (await line(first), await line(first)) == ("sdk.before_apply", "")
        assert (await line(second), await line(second)) == ("sdk.before_apply", "sdk.after_apply")
        assert member.starts == 2 and not stage.injector.crashes
        assert stage.injector.preempted == {("r", "pay")}
        assert dict(stage.injector.faults) == {fault.name: 1}
        assert len(stage.injector.orders()) == 1

    play(NONE, scene)


def test_a_frozen_worker_is_thawed_by_the_takeover_and_by_nothing_else() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            return await stage.child("w", 1, "sdk.before_apply", "sdk.before_checkpoint")

        await stage.injector.add("worker", "worker", start)
        await stage.next("frozen")
        child = stage.children[0]
        await stopped(child.pid)
        await stage.report("gateway.before_intent", 1)
        await stage.report("sdk.after_apply", 1, holder="w")
        assert stage.heard.empty() and state_of(child.pid) == "T"
        await stage.report("sdk.before_apply", 2)
        await stage.next("takeover")
        await stage.next("thawed")
        assert (await line(child), await line(child)) == ("sdk.before_apply", "sdk.before_checkpoint")
        assert stage.injector.preempted == {("r", "pay")}

    play(always(Fault("freeze_worker", "sdk.before_checkpoint")), scene)


def test_a_late_call_waits_at_the_gateway_for_the_takeover() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            return await stage.child("w", 1, "sdk.before_apply")

        await stage.injector.add("worker", "worker", start)
        assert await line(stage.children[0]) == "sdk.before_apply"
        call = asyncio.ensure_future(stage.report("gateway.before_intent", 1, holder="w"))
        await stage.next("killed")
        assert not call.done()
        await stage.report("sdk.before_apply", 2, holder="successor")
        await call
        late = await stage.next("late")
        assert (late.epoch, late.where) == (1, "gateway.before_intent")
        assert stage.injector.late == {("r", "pay", 1): "gateway.before_intent"}

    play(always(Fault("kill_worker", "gateway.before_intent", is_late=True)), scene)


def test_the_authority_dies_at_the_nth_call_and_comes_back() -> None:
    async def scene(stage: Stage) -> None:
        points = ["gateway.after_intent", "gateway.after_settle"] * 3

        async def start() -> Process:
            return await stage.child("w", 1, *(points if not stage.children else ()))

        await stage.injector.add("authority", "authority", start)
        struck = await stage.next("struck")
        assert (struck.step, struck.where) == ("pay", "between intent and send")
        await stage.next("restarted")
        first = stage.children[0]
        seen = [await line(first) for _ in range(3)]
        assert seen == ["gateway.after_intent", "gateway.after_settle", ""]
        assert first.returncode == -signal.SIGKILL
        assert stage.injector.preempted == {("r", "pay")}

    play(Plan(1, {}, (Strike("gateway.after_intent", "pay", 2),), share=0.0, least=0.0), scene)


def test_too_few_preemptions_are_made_up_for() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            return await stage.child("w", 1, "sdk.before_apply", "sdk.after_apply")

        await stage.injector.add("worker", "worker", start)
        assert (await stage.next("killed")).where == "between receipt and checkpoint"

    play(Plan(1, {"pay": (Fault("kill_worker", "sdk.before_checkpoint"),)}, share=0.0, least=0.4, most=0.0), scene)


def test_nobody_is_struck_where_too_few_workers_would_be_left() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            return await stage.child("w", 1, "sdk.before_apply", "sdk.after_apply")

        await stage.injector.add("worker", "worker", start)
        child = stage.children[0]
        assert (await line(child), await line(child)) == ("sdk.before_apply", "sdk.after_apply")
        await stage.injector.close(grace_s=1)
        assert not stage.injector.faults and child.returncode is not None

    play(always(Fault("kill_worker", "sdk.before_apply")), scene, keep_up=1)


def test_calm_lets_go_of_what_is_frozen() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            return await stage.child("w", 1, "sdk.before_apply")

        await stage.injector.add("worker", "worker", start)
        await stage.next("frozen")
        stage.injector.calm()
        assert await line(stage.children[0]) == "sdk.before_apply"

    play(always(Fault("freeze_worker", "sdk.before_apply")), scene)


# --- supervision ----------------------------------------------------------------------------------------------------


def test_a_death_that_nobody_injected_is_named() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            return await stage.child("w", 1, "sdk.before_apply")

        await stage.injector.add("worker", "worker", start)
        stage.children[0].kill()
        await stage.next("died")
        await stage.next("restarted")
        assert stage.injector.crashes == ["worker ended by itself with exit code -9"]
        assert not stage.injector.broken.is_set()

    play(NONE, scene)


def test_a_member_that_never_stays_up_breaks_the_whole() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            return await asyncio.create_subprocess_exec("false")

        await stage.injector.add("worker", "worker", start)
        await stage.injector.broken.wait()
        assert len(stage.injector.crashes) > 1

    play(NONE, scene)


def test_a_member_that_cant_be_started_again_breaks_the_whole() -> None:
    async def scene(stage: Stage) -> None:
        async def start() -> Process:
            if stage.children:
                raise OSError("no more processes")
            return await stage.child("w", 1, "sdk.before_apply")

        await stage.injector.add("worker", "worker", start)
        stage.children[0].kill()
        await stage.injector.broken.wait()
        assert stage.injector.crashes[-1] == "worker can't be started: no more processes"

    play(NONE, scene)


def test_what_ignores_sigterm_is_killed() -> None:
    async def scene() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", STUBBORN, stdout=asyncio.subprocess.PIPE)
        assert await line(process) == "up"
        assert await end(process, 0.1) == -signal.SIGKILL
        assert await end(process, 0.1) == -signal.SIGKILL

    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def stopped(pid: int) -> None:
    """Return once the kernel has stopped the process."""
    while state_of(pid) != "T":  # noqa: ASYNC110 - the kernel sets no event
        await asyncio.sleep(0)
