"""Random walks over the rules about workspaces, with disks that know the truth.

Replicas are lost, forked, revived with leftover files; receipts come late, twice, or from disks that are gone; runs
are taken over; sweeps and people come at any time. After each move the live disk must hold the committed content and at
most the one open write, what escaped must not have happened twice, and at the end the logs must break no law.
"""

import random
from dataclasses import dataclass, field

from tests.protocol.site import CASE, DEPLOY, LEASE_MS, TIMEOUT_MS, WRITE_FILE, A, B, Site
from tests.protocol.walk import Broken

from tidefast.protocol.commands import Write
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.laws import judge
from tidefast.protocol.trace import Violation
from tidefast.protocol.verdicts import AskReplica, ReplicaGranted, Send
from tidefast.protocol.workspace import CHAIN_START, Disk, Entry, delta_json, write_chain
from tidefast.protocol.workspace_laws import WorkspaceHistory, committed_writes, judge_workspace

STEPS = [StepId(f"s{n}") for n in range(12)]
Key = tuple[RunId, StepId]


@dataclass(slots=True)
class Box:
    """One disk: what it holds, what it can prove, and the write that it is ahead by."""

    epoch: int = 0
    index: int = 0
    chain: str = CHAIN_START
    files: dict[str, str] = field(default_factory=dict)
    ahead: tuple[Key, int, Write] | None = None

    def copy(self) -> "Box":
        return Box(self.epoch, self.index, self.chain, dict(self.files), self.ahead)

    @property
    def proof(self) -> Disk:
        return Disk(Epoch(self.epoch), self.index, self.chain, True, self.ahead is not None)


class WorkspaceWorld:
    """One workspace, two runs, and everything that can happen to them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.site = Site(A, B)
        self.boxes: list[Box] = [Box()]  # every disk there ever was, as it was when it was last seen
        self.live: Box | None = None
        self.receipts: list[tuple[Key, int, Write]] = []
        self.escaped: dict[Key, int] = {}
        self.committed: dict[str, str] = {}
        self.joined = 0

    def walk(self, moves: int) -> None:
        for _ in range(moves):
            move = self.chance.choice((
                *[self.ask] * 8, *[self.hear] * 6, *[self.take] * 2, *[self.dial] * 2,
                self.lose, self.lapse, self.release, self.wait, self.doubt, self.person,
            ))  # fmt: skip
            move()
            self.check()
        violations = self.violations()
        if violations:
            raise Broken(f"{violations[0].law}: {violations[0].why}")

    # --- moves

    def dial(self) -> None:
        """A replica dials in: a new disk, a leftover one, or a fork of one that lives."""
        box = self.chance.choice((Box(), self.chance.choice(self.boxes).copy()))
        there = self._chain_at(box.index)
        granted = self.site.replica(f"b{len(self.boxes)}", box.proof, there).verdict
        assert isinstance(granted, ReplicaGranted)
        if granted.plan != "keep":
            box.files, box.index, box.chain, box.ahead = dict(self.committed), granted.log_index, granted.chain, None
        box.epoch = granted.epoch
        self.live = box
        self.boxes.append(box)

    def _chain_at(self, index: int) -> str | None:
        if not index:
            return CHAIN_START
        return self.site.chains[index - 1] if index <= len(self.site.chains) else None

    def ask(self) -> None:
        """A live holder asks for a step; a replica that lives does what it is sent, and its receipt is on its way."""
        run, step = self.chance.choice((A, B)), self.chance.choice(STEPS)
        contract = DEPLOY if step in STEPS[-3:] else WRITE_FILE
        is_ready = self.live is not None and self.site.workspace is not None and self.site.place.is_live
        told = self.site.admit(run, step, contract, is_away=not is_ready).verdict
        if isinstance(told, AskReplica):
            self._journal((run, step), told.attempt)
        elif isinstance(told, Send) and told.write is not None and self.chance.random() < 0.9:
            self._do((run, step), told.attempt, told.write.epoch, told.write.log_index, contract.escapes)

    def _do(self, key: Key, attempt: int, epoch: int, index: int, escapes: bool) -> None:
        box = self.live
        assert box is not None
        if (box.epoch, box.index) != (epoch, index) or box.ahead is not None:
            raise Broken(f"a call for index {index} of epoch {epoch} reached a disk at {box.index} of {box.epoch}")
        if escapes:
            self.escaped[key] = self.escaped.get(key, 0) + 1
            if self.escaped[key] > 1:
                raise Broken(f"{key} escaped twice")
        content = f"{self.chance.getrandbits(256):064x}"
        path = "-".join(key)
        delta = {path: Entry("file", 0o644, content, 1)}
        chain = write_chain(box.chain, index + 1, *key, delta_json(delta))
        write = Write(Epoch(epoch), index + 1, delta, chain)
        box.files[path] = content
        box.ahead = (key, attempt, write)
        self.receipts.append(box.ahead)

    def _journal(self, key: Key, attempt: int) -> None:
        """A doubt is put to the disk that lives: found or absent."""
        ahead = None if self.live is None else self.live.ahead
        if ahead is not None and ahead[0] == key:
            self._settle(ahead)
        else:
            self.site.settle(None, *key, attempt, "unsent")

    def hear(self) -> None:
        """A receipt arrives, whenever and however often."""
        if self.receipts:
            self._settle(self.chance.choice(self.receipts[-3:]))

    def _settle(self, receipt: tuple[Key, int, Write]) -> None:
        (run, step), attempt, write = receipt
        self.site.settle(write, run, step, attempt)

    def take(self) -> None:
        self.site.take(self.chance.choice((A, B)))

    def lose(self) -> None:
        write = None if self.site.workspace is None else self.site.place.open
        if write is not None:
            self.site.lose(write.run_id, write.step_id)

    def lapse(self) -> None:
        self.site.ms += self.chance.choice((10, LEASE_MS))
        self.site.lapse()

    def release(self) -> None:
        if self.site.workspace is not None:
            self.site.release()

    def wait(self) -> None:
        self.site.ms += self.chance.choice((1, 1_000, TIMEOUT_MS))
        if self.site.workspace is not None:
            self.site.renew()

    def doubt(self) -> None:
        write = None if self.site.workspace is None else self.site.place.open
        if write is not None:
            self.site.settle(None, write.run_id, write.step_id, write.attempt, "doubted")

    def person(self) -> None:
        """Somebody looks at a held step, and at the world outside."""
        for run in (A, B):
            for step in list(self.site.views[run].steps.values()):
                if step.state == "held":
                    did = self.escaped.get((run, step.step_id), 0)
                    self.site.resolve("applied" if did else "not_applied", run, step.step_id)

    # --- what must hold

    def check(self) -> None:
        for event, _ in self.site.writes[self.joined :]:
            self.joined += 1
            if event.kind == "write_committed":
                data = event.data
                seq = data.get("write_seq")
                delta = data.get("delta") or self.site.writes[int(str(seq)) - 1][0].data["delta"]
                for path, entry in delta.items():  # type: ignore[union-attr]
                    self.committed[path] = entry[2]
                self._hear_joined(str(data["chain"]), int(str(data["index"])))
            elif event.kind == "write_dropped" and self.live is not None and event.epoch == self.live.epoch:
                self.live.files, self.live.ahead = dict(self.committed), None
        place = self.site.workspace
        write = None if place is None else place.open
        if write is not None and self.site.step(write.run_id, write.step_id).state in (
            "pending",
            "rejected",
            "committed",
        ):
            raise Broken(f"the workspace waits for {write.step_id}, which is settled")
        if self.live is None or place is None or not place.is_live or self.live.epoch != place.epoch:
            return
        ahead = {} if self.live.ahead is None else {p: e.digest for p, e in self.live.ahead[2].delta.items() if e}
        if self.live.files != {**self.committed, **ahead}:
            raise Broken("the live disk shows bytes that are neither committed nor of the open write")

    def _hear_joined(self, chain: str, index: int) -> None:
        box = self.live
        if box is not None and box.ahead is not None and box.ahead[2].chain == chain:
            box.index, box.chain, box.ahead = index, chain, None

    def violations(self) -> list[Violation]:
        found = [broken for run in self.site.log for broken in judge(self.site.history(run))]
        committed = {
            key: seq
            for run in self.site.log
            for name, key, seq in committed_writes(run, (event for event, _ in self.site.log[run]))
            if name == CASE
        }
        if self.site.workspace is None:
            return found
        place = self.site.place
        events, digests = zip(*self.site.writes, strict=True)
        history = WorkspaceHistory(
            CASE, events, digests, committed, place.digest, place.seq, place.log_index, place.chain
        )
        return [*found, *judge_workspace(history)]
