"""The proof on real input: an agent replays this project's commits into a workspace whose disk is lost again and again.

A real server on a socket, replicas as processes that are really killed, and six ways to lose a disk: the process is
killed, the disk wiped, half wiped, rolled back to an old copy, forked, or frozen past its lease while another takes
over. At the end the committed tree must be that of an undisturbed replay, every content there, every log lawful, and
the last replica's disk must hold that tree and nothing else.

    python -m tests.workspaces.replay --commits 12
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from tests.workspaces.history import commits
from tests.workspaces.house import House, house

from tidefast.protocol.ids import WorkspaceId
from tidefast.protocol.workspace import tree_digest
from tidefast.sim.audit import audit

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("kill", "wipe", "half_wipe", "old_copy", "fork", "freeze")
LEASE_MS = 1_500
STEP_S = 120.0
COMMAND = "ls | sort > .listing; wc -l < .listing >> .counts; sleep 0.05"


@dataclass(slots=True)
class Told:
    """What a replay came to."""

    commits: int = 0
    steps: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    again: int = 0  # steps that were sent more than once
    tree: str = ""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        lost = ", ".join(f"{count} {way}" for way, count in sorted(self.losses.items())) or "none"
        return (
            f"{self.commits} commits, {self.steps} committed steps, {sum(self.losses.values())} losses ({lost}), "
            f"{self.again} steps sent again, tree {self.tree[:12]}, {len(self.wrong)} wrong, {self.seconds:.1f} s"
        )


class Box:
    """The machine that the sandbox runs on: directories, processes, and somebody who pulls the plug."""

    def __init__(self, place: Path, at: House, workspace: str, seed: int) -> None:
        self.place, self.at, self.workspace = place, at, workspace
        self.chance = random.Random(seed)
        self.count = 0
        self.disk = place / "disk-0"
        self.live: asyncio.subprocess.Process | None = None
        self.others: list[asyncio.subprocess.Process] = []
        self.old: Path | None = None
        self.busy = asyncio.Lock()  # nobody starts a replica on a disk that is just being spoiled

    async def start(self) -> None:
        self.disk.mkdir(exist_ok=True)
        self.live = await self._spawn(self.disk)

    async def _spawn(self, disk: Path) -> asyncio.subprocess.Process:
        words = ("-m", "tidefast.cli.main", "sandbox", str(disk), "--workspace", self.workspace)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with (self.place / "sandbox.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, *words, "--authority", self.at.url, env=environment, stdout=log, stderr=log
            )

    def _new_disk(self) -> Path:
        self.count += 1
        return self.place / f"disk-{self.count}"

    async def _kill(self) -> None:
        if self.live is not None and self.live.returncode is None:
            self.live.kill()
            await self.live.wait()

    async def lose(self, way: str) -> None:
        """Lose the disk in one of the ways, and have a box run again."""
        async with self.busy:
            await self._lose(way)

    async def _lose(self, way: str) -> None:
        if way == "fork":
            copy = self._new_disk()
            await asyncio.to_thread(_copy, self.disk, copy)
            if self.live is not None:
                self.others.append(self.live)
            self.disk = copy
        elif way == "freeze" and self.live is not None and self.live.returncode is None:
            frozen = self.live
            frozen.send_signal(signal.SIGSTOP)
            await self.lapsed()
            self.disk = self._new_disk()
            await self.start()
            frozen.send_signal(signal.SIGCONT)
            self.others.append(frozen)
            return
        else:
            await self._kill()
            await asyncio.to_thread(self._spoil, way)
        await self.start()

    def _spoil(self, way: str) -> None:
        if way == "wipe":
            shutil.rmtree(self.disk, ignore_errors=True)
        elif way == "half_wipe":
            files = sorted(path for path in self.disk.rglob("*") if path.is_file() and ".tidefast" not in path.parts)
            for path in self.chance.sample(files, len(files) // 2):
                path.unlink()
        elif way == "old_copy" and self.old is not None:
            disk = self._new_disk()
            _copy(self.old, disk)
            self.disk = disk

    async def lapsed(self) -> None:
        """Return once the workspace's lease has run out, or after twice its time: then it was never this box's."""
        name, engine = WorkspaceId(self.workspace), self.at.parts.engine
        until = asyncio.get_running_loop().time() + 2 * LEASE_MS / 1_000
        place = engine.places.find(name)
        epoch = 0 if place is None or place.head is None else place.head.epoch
        while place is not None and place.head is not None and place.head.is_live and place.head.epoch == epoch:
            await engine.wait_for_change(name, 1_000)
            place = engine.places.find(name)
            if asyncio.get_running_loop().time() > until:
                return

    async def keep_copy(self) -> None:
        """A snapshot for later, as the platform takes it: while everything runs."""
        self.old = self.place / f"old-{self.count}"
        shutil.rmtree(self.old, ignore_errors=True)
        await asyncio.to_thread(_copy, self.disk, self.old)

    async def keep_one(self) -> None:
        """If the box's replica has given way to another one that is gone by now, start one."""
        while True:
            assert self.live is not None
            await asyncio.gather(*(process.wait() for process in (*self.others, self.live)))
            async with self.busy:
                if all(other.returncode is not None for other in (*self.others, self.live)):
                    await self.start()

    async def stop(self) -> None:
        for process in (*self.others, self.live):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


def _copy(source: Path, target: Path) -> None:
    """Copy a directory that is being written to: what vanishes meanwhile is not in the copy."""
    with contextlib.suppress(shutil.Error, OSError):
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


async def replay(place: Path, history: Sequence[Sequence[str]], *, losses: bool, seed: int = 1, every: int = 3) -> Told:
    """Replay the history; with `losses` a disk is lost on at least each `every`th step."""
    began, told = time.monotonic(), Told(commits=len(history))
    place.mkdir()
    async with house(place / "s.db", replica_lease_ms=LEASE_MS) as at:
        box = Box(place, at, "case", seed)
        await box.start()
        keeping = asyncio.create_task(box.keep_one())
        try:
            ways = _ways(seed)
            for number, parts in enumerate(history):
                calls = [(f"patch-{number}-{n}", "apply_patch", {"patch": part}) for n, part in enumerate(parts)]
                calls.append((f"look-{number}", "run_command", {"shell": COMMAND}))
                for step, verb, args in calls:
                    told.steps += 1
                    asked = asyncio.create_task(_apply(at, step, verb, args))
                    if losses and told.steps % every == 0:
                        await asyncio.wait({asked}, timeout=box.chance.uniform(0.0, 0.15))  # lost while it is out
                        way = next(ways)
                        told.losses[way] += 1
                        await box.lose(way)
                    await _finish(asked, step, told)
                if losses and number % 5 == 2:
                    await box.keep_copy()
            await _judge(at, box, told)
        finally:
            keeping.cancel()
            await box.stop()
    told.seconds = time.monotonic() - began
    return told


def _ways(seed: int) -> Iterator[str]:
    chance = random.Random(seed)
    while True:
        order = list(WAYS)
        chance.shuffle(order)
        yield from order


async def _apply(at: House, step: str, verb: str, args: dict[str, str]) -> tuple[int, dict[str, object]]:
    """What the SDK's one await does: ask again while the authority says so."""
    until = time.monotonic() + STEP_S
    while True:
        status, told = await at.apply(step, verb, args, wait_ms=20_000)
        if status not in (409, 503) or told["code"] == "step_held" or time.monotonic() > until:
            return status, told


async def _finish(asked: "asyncio.Task[tuple[int, dict[str, object]]]", step: str, told: Told) -> None:
    status, answer = await asked
    if (status, answer.get("state")) != (200, "committed"):
        told.wrong.append(f"{step}: {status} {answer}")


async def _judge(at: House, box: Box, told: Told) -> None:
    """The committed tree, its contents, the logs, and the disk that is left."""
    workspaces = at.parts.gateway.workspaces
    found = workspaces.reads.manifest("case", None)
    assert isinstance(found, tuple), found
    index, manifest = found
    told.tree = tree_digest(manifest)
    if index != told.steps:
        told.wrong.append(f"{index} writes were joined for {told.steps} steps")
    named = {entry.digest for entry in manifest.values() if entry.digest}
    missing = await workspaces.contents.missing(named)
    told.wrong += [f"the content {digest} is missing" for digest in sorted(missing)]
    report = audit(at.parts.store)
    told.wrong += [str(violation) for violation in report.violations]
    for step in at.parts.store.load_steps(at.parts.engine.run_key("r1") or 0, None, 100_000):  # type: ignore[arg-type]
        told.again += len(step.attempts) > 1
    while workspaces.replicas.ready(WorkspaceId("case")) is None:
        await workspaces.replicas.wait(WorkspaceId("case"), 1_000)
    listing = {"shell": "find . -path ./.tidefast -prune -o -type f -print0 | sort -z | xargs -0 sha256sum"}
    _, seen = await at.apply("last", "run_command", {**listing, "output_bytes": 1_048_576})
    result = seen["receipt"]["body"]["result"]
    lines = [line.split("  ./", 1) for line in result["stdout"].splitlines()]
    stands = {path: digest for digest, path in lines}
    expected = {path: entry.digest for path, entry in manifest.items() if entry.kind == "file"}
    wrong = sorted(path for path in stands.keys() | expected.keys() if stands.get(path) != expected.get(path))
    told.wrong += [f"disk and log differ in {path}" for path in wrong]


async def prove(place: Path, count: int, *, seed: int, every: int, said: bool = True) -> tuple[Told, Told]:
    """(the undisturbed replay, the one under fire)."""
    history = await asyncio.to_thread(commits, place / "bare", count)
    calm = await replay(place / "calm", history, losses=False)
    if said:
        print(f"undisturbed: {calm.line()}", flush=True)
    fire = await replay(place / "fire", history, losses=True, seed=seed, every=every)
    if said:
        print(f"under fire:  {fire.line()}", flush=True)
    if calm.tree != fire.tree:
        fire.wrong.append("the trees differ")
    return calm, fire


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=3)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as name:
        calm, fire = asyncio.run(prove(Path(name), given.commits, seed=given.seed, every=given.every))
    wrong = [*calm.wrong, *fire.wrong]
    for line in wrong[:20]:
        print(f"wrong: {line}")
    print("ok: the tree is the undisturbed one, and nothing committed is missing" if not wrong else "VIOLATED")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
