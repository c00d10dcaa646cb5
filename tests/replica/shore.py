"""The authority's side of one workspace in a few lines: grants, the log with its chain, blobs, joins.

For tests of the replica alone; it speaks the same messages as the real one, without a socket between.
"""

import base64
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.workspace import (
    CHAIN_START,
    Disk,
    Entry,
    Manifest,
    delta_json,
    delta_problem,
    fold,
    plan_for,
    write_chain,
)
from tidefast.sdk.lease import boot_s
from tidefast.sdk.replica.confine import examine
from tidefast.sdk.replica.contents import Unreachable, Wanted
from tidefast.sdk.replica.replica import Replica
from tidefast.sdk.replica.tree import Rules
from tidefast.wire import replica as r

HERE = examine()
LEASE_MS = 600_000


class Shore:
    """One workspace: `replica` is the live one, and what an older one says is refused."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = [{}]
        self.chains = [CHAIN_START]
        self.blobs: dict[str, bytes] = {}
        self.epochs = itertools.count(1)
        self.epoch = 0
        self.plans: list[str] = []
        self.fetched = 0
        self.fails_after: int | None = None  # contents that still come before the authority is out of reach
        self.calls = itertools.count(1)
        self.output: list[r.FromReplica] = []

    @property
    def index(self) -> int:
        return len(self.chains) - 1

    # --- contents ---------------------------------------------------------------------------------------------------

    async def manifest(self, index: int) -> Manifest:
        return self.manifests[index]

    async def fetch(self, wanted: Sequence[Wanted]) -> AsyncIterator[tuple[str, bytes]]:
        for item in wanted:
            yield item.digest, self._give(item)

    async def stream(self, wanted: Wanted) -> AsyncIterator[bytes]:
        content = self._give(wanted)
        for start in range(0, len(content), 1 << 20):
            yield content[start : start + (1 << 20)]

    async def upload(self, wanted: Wanted, pieces: Callable[[], AsyncIterator[bytes]]) -> None:
        self._keep(wanted.digest, b"".join([piece async for piece in pieces()]))

    def _give(self, wanted: Wanted) -> bytes:
        if self.fails_after is not None:
            if self.fails_after == 0:
                raise Unreachable("cut")
            self.fails_after -= 1
        self.fetched += 1
        return self.blobs[wanted.digest]

    def _keep(self, digest: str, content: bytes) -> None:
        assert hashlib.sha256(content).hexdigest() == digest
        self.blobs[digest] = content

    # --- the right --------------------------------------------------------------------------------------------------

    async def grant(self, replica: Replica) -> r.Restored | None:
        """A new epoch for what says hello. Raises `Unreachable`."""
        said = r.read_from_replica(r.encode(replica.hello()))
        assert isinstance(said, r.Hello)
        disk = Disk(Epoch(said.epoch), said.index, said.chain, said.is_whole, said.is_ahead)
        there = self.chains[said.index] if said.index <= self.index else None
        self.epoch = next(self.epochs)
        plan = plan_for(disk, self.index, there)
        self.plans.append(plan)
        grant = r.Grant(self.epoch, "token", LEASE_MS, 0, plan, self.index, self.chains[-1])
        restored = await replica.granted(grant, boot_s(), self)
        if restored is not None:
            assert (restored.index, restored.chain) == (self.index, self.chains[-1])
        return restored

    def call(self, verb: str, args: dict[str, Any], step: str, attempt: int = 1) -> r.Do:
        return r.Do(f"q{next(self.calls)}", self.epoch, self.index, verb, args, 60_000, "run", step, attempt, 1)

    async def say(self, replica: Replica, verb: str, step: str, **args: Any) -> r.FromReplica | None:
        """Ask for a call; what comes back isn't joined."""
        said = await replica.do(self.call(verb, args, step), self, self.output.append)
        return said if said is None else r.read_from_replica(r.encode(said))

    async def do(self, replica: Replica, verb: str, step: str, **args: Any) -> Any:
        """Ask for a call and join it; its result."""
        said = await self.say(replica, verb, step, **args)
        if isinstance(said, r.Answer):
            return said.result
        assert isinstance(said, r.Receipt), said
        await self.join(replica, said)
        return said.result

    async def join(self, replica: Replica, receipt: r.Receipt) -> None:
        """Commit a write: its epoch is the live one, its chain follows, and its contents are here."""
        assert receipt.epoch == self.epoch
        assert not delta_problem(receipt.delta)
        chain = write_chain(self.chains[-1], self.index + 1, RunId(receipt.run), StepId(receipt.step),
                            delta_json(receipt.delta))  # fmt: skip
        assert (receipt.index, receipt.chain) == (self.index + 1, chain)
        for digest, text in receipt.inline.items():
            self._keep(digest, base64.b64decode(text))
        entries = [entry for entry in receipt.delta.values() if isinstance(entry, Entry) and entry.kind != "dir"]
        missing = sorted({entry.digest for entry in entries} - set(self.blobs))
        if missing:
            again = await replica.upload(r.Want(receipt.request_id, missing), self)
            assert isinstance(again, r.Receipt)
        self.manifests.append(fold(self.manifests[-1], receipt.delta))
        self.chains.append(chain)
        replica.joined(r.Joined(receipt.run, receipt.step, receipt.epoch, receipt.index, chain))


def made(path: Path, *, rules: Rules | None = None, clock: Callable[[], float] = boot_s, **more: Any) -> Replica:
    """A replica of the workspace `w` over a directory."""
    path.mkdir(exist_ok=True)
    return Replica(path, "w", HERE, rules=rules, clock=clock, **more)
