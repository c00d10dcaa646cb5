"""An agent replays a project's own commits as patches, a command after each, while its replica is lost again and again.

The replica is a real process (`tidefast sandbox`) against a real server. What is done to it, by seed: killed while it
works, its disk wiped, half wiped, rolled back to an old copy, forked, or frozen past its lease.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.workspaces.house import House

KINDS = ("killed", "wiped", "half wiped", "old copy", "forked", "frozen")
SRC = str(Path(__file__).resolve().parents[2] / "src")
CHECK = "cat $(find . -path ./.tidefast -prune -o -type f -print | LC_ALL=C sort) | cksum > sum.txt; cat sum.txt"


class Box:
    """The machine whose disk vanishes: at most one live replica, under a directory of its own."""

    def __init__(self, top: Path, url: str) -> None:
        self.top, self.url = top, url
        self.number = 0
        self.disk = top / "disk-0"
        self.process: asyncio.subprocess.Process | None = None
        self.stray: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        self.disk.mkdir(exist_ok=True)
        self.process = await self._process(self.disk)

    async def _process(self, disk: Path) -> asyncio.subprocess.Process:
        log = os.open(self.top / "sandbox.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tidefast.cli.main", "sandbox", str(disk), "--workspace", "case",
                "--authority", self.url, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": SRC},
            )  # fmt: skip
        finally:
            os.close(log)

    async def lose(self, kind: str, chance: random.Random) -> None:
        """One loss, and a new life after it."""
        if kind == "frozen":
            await self._freeze()
            return
        await self.kill()
        self.number += 1
        old, self.disk = self.disk, self.top / f"disk-{self.number}"
        if kind == "old copy" and (self.top / "copy").is_dir():
            await asyncio.to_thread(shutil.copytree, self.top / "copy", self.disk, symlinks=True)
        elif kind == "forked":
            await asyncio.to_thread(shutil.copytree, old, self.disk, symlinks=True)
            self.stray.append(await self._process(old))  # two disks of one past, and each claims the workspace
        elif kind == "half wiped":
            os.rename(old, self.disk)
            await asyncio.to_thread(_wipe_half, self.disk, chance)
        elif kind == "killed":
            os.rename(old, self.disk)
        await self.start()

    async def _freeze(self) -> None:
        """Stopped; another box takes over; then the frozen one wakes up and finds out."""
        assert self.process is not None
        if self.process.returncode is None:  # a fork of it may have replaced it, and then it has ended
            self.process.send_signal(signal.SIGSTOP)
            self.stray.append(self.process)
        self.number += 1
        self.disk = self.top / f"disk-{self.number}"
        await self.start()

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def keep_a_copy(self) -> None:
        await asyncio.to_thread(_copy, self.disk, self.top / "copy")

    async def wake(self) -> None:
        """Let those that were frozen or forked go on; each has to end by itself, told that it is replaced."""
        for process in self.stray:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)

    async def end(self) -> None:
        await self.wake()
        await self.kill()
        for process in self.stray:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _copy(disk: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    with contextlib.suppress(shutil.Error):  # files come and go while it is copied, as with any snapshot
        shutil.copytree(disk, to, symlinks=True)


def _wipe_half(disk: Path, chance: random.Random) -> None:
    for top, _, files in os.walk(disk):
        for name in files:
            if chance.random() < 0.5:
                os.unlink(os.path.join(top, name))


async def step(at: House, name: str, verb: str, args: dict[str, Any]) -> Any:
    """One step until it is committed, asked again as an agent's SDK does."""
    while True:
        status, told = await at.apply(name, verb, args, wait_ms=10_000)
        if status == 200 and told["state"] == "committed":
            return told["receipt"]["body"]["result"]
        if status not in (409, 503):
            raise AssertionError(f"{name}: {status} {told}")


async def granted_since(at: House, epoch: int) -> int:
    """The newest replica epoch, once there is a newer one: what was never granted anything can't be lost."""
    while (now := (await at.call("GET", "/v1/workspaces/case"))[1].get("epoch", 0)) <= epoch:  # noqa: ASYNC110
        await asyncio.sleep(random.random() * 0.1)
    return int(now)


async def replay(at: House, box: Box, patches: list[str], losses: int, seed: int) -> Counter[str]:
    """Apply every patch with a command after each, and lose the replica at random steps; what was done to it."""
    chance, done = random.Random(seed), Counter[str]()
    count = 2 * len(patches)
    planned = Counter(chance.randrange(count) for _ in range(losses))
    epoch = (await at.call("GET", "/v1/workspaces/case"))[1].get("epoch", 0)
    await box.start()
    for number in range(count):
        if number % 2 == 0:
            name, verb, args = f"p{number}", "apply_patch", {"patch": patches[number // 2]}
        else:
            name, verb, args = f"c{number}", "run_command", {"shell": CHECK}
        running = asyncio.create_task(step(at, name, verb, args))
        for _ in range(planned[number]):
            kind = KINDS[(sum(done.values()) + seed) % len(KINDS)]
            epoch = await granted_since(at, epoch)
            await asyncio.sleep(chance.random() * 0.3)
            await box.lose(kind, chance)
            done[kind] += 1
        await running
        if chance.random() < 0.2:
            await box.keep_a_copy()
        if chance.random() < 0.2:
            await box.wake()
    return done
