"""Commands through the real rules into a store, without an engine: load, decide, evolve, one batch, commit."""

from collections.abc import Sequence
from typing import Any

from tidefast.protocol import commands as c
from tidefast.protocol.canonical import call_digest, canonical
from tidefast.protocol.contracts import Contract, contract_digest, render_request
from tidefast.protocol.events import CHAIN_START, chain
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.machine import decide, needs
from tidefast.protocol.records import Now, Right, RunHead, Step, View
from tidefast.protocol.verdicts import Granted, Verdict
from tidefast.stores.base import Batch, Store, StoredEvent

CHARGE = Contract("charge", "http", url="https://card.example", key="header:Idempotency-Key", key_ttl_ms=86_400_000)
ROUGH = Contract("rough", "http", url="https://rough.example")  # promises nothing: a doubt about it is held
LOOK = Contract("look", "http", effect="none", url="https://look.example")
REFUND = Contract(
    "refund", "http", url="https://card.example/refund", key="header:Idempotency-Key", key_ttl_ms=9_000_000
)
LEASE_MS = 10_000
SEND_MS = 2_000
BOOT = "boot"
HOLDER = "worker"


class Driver:
    """Feeds one store. Each `submit` is one batch; several commands in one call are decided in order within it."""

    def __init__(self, store: Store, ms: int = 1_000) -> None:
        self.store = store
        self.ms = ms
        self.instances = frozenset((BOOT,))
        self.contracts = {contract_digest(each): each for each in (CHARGE, ROUGH, LOOK, REFUND)}
        self.rights: dict[RunId, Right] = {}

    def submit(self, *commands: c.Command) -> Verdict:
        """Decide the commands, commit what they wrote, answer the last verdict."""
        batch, verdicts = self.gather(commands)
        if batch.events or batch.heads:
            self.store.commit(batch)
        return verdicts[-1]

    def gather(self, commands: Sequence[c.Command]) -> tuple[Batch, list[Verdict]]:
        """The batch that these commands make, not committed."""
        batch = Batch(mark_ms=self.ms)
        return batch, [self._decide(batch, command) for command in commands]

    def _decide(self, batch: Batch, command: c.Command) -> Verdict:
        key, view = self._view(batch, command)
        decision = decide(view, command, Now(self.ms, self.ms, self.ms))
        if isinstance(decision.verdict, Granted):
            run_id = needs(command).run_id
            self.rights[run_id] = Right(run_id, decision.verdict.epoch, decision.verdict.holder)
        touched: set[StepId] = set()
        for event in decision.events:
            before = CHAIN_START if view.run is None else view.run.digest
            view = evolve(view, event, needs(command).run_id)
            batch.events.append(StoredEvent(key, event, chain(before, event)))
            if event.step_id is not None:
                touched |= {event.step_id, view.steps[event.step_id].undo_of or event.step_id}
        if decision.events:
            assert view.run is not None
            batch.heads[key] = view.run
        for step_id in touched:
            step = view.steps[step_id]
            batch.steps[key, step_id] = step
            if step.contract:
                batch.contracts[step.contract] = self.contracts[step.contract].to_json()
        return decision.verdict

    def _view(self, batch: Batch, command: c.Command) -> tuple[int, View]:
        need = needs(command)
        identity = self.store.identity()
        view = View(identity.namespace, identity.incarnation, self.instances, contracts=self.contracts)
        gathered = [(key, head) for key, head in batch.heads.items() if head.run_id == need.run_id]
        found = gathered[0] if gathered else self.store.load_head(need.run_id)
        if found is None:
            return max((self.store.run_key_max(), *batch.heads)) + 1, view
        key, head = found
        wanted = need.steps
        if need.effects:
            in_batch = [step.step_id for (run, _), step in batch.steps.items() if run == key and step.is_mutating]
            wanted = (*self.store.effects(key), *in_batch, *(step.step_id for step in head.open))
        steps = {name: batch.steps.get((key, name)) or self.store.load_step(key, name) for name in wanted}
        forgotten = self.store.forgotten(key, head.checkpoint_seq, head.epoch) if need.forgotten else ()
        return key, view._replace(
            run=head,
            steps={name: step for name, step in steps.items() if step is not None},
            forgotten=tuple(forgotten),
        )

    # --- commands in few words --------------------------------------------------------------------------------------

    def create(self, run: str, agent: str = "agent", version: str = "1") -> Verdict:
        return self.submit(c.CreateRun(RunId(run), agent, version, '{"n":1}'))

    def grant(self, run: str) -> Verdict:
        return self.submit(c.Grant(RunId(run), HOLDER, LEASE_MS, f"request-{self.ms}"))

    def admit(self, run: str, step: str, contract: Contract = CHARGE, args: Any = None) -> Verdict:
        return self.submit(self.admit_command(run, step, contract, args))

    def admit_command(self, run: str, step: str, contract: Contract = CHARGE, args: Any = None) -> c.Admit:
        args_json = canonical(args if args is not None else {"step": step})
        return c.Admit(
            right=self.right(run),
            step_id=StepId(step),
            tool=contract.tool,
            args_json=args_json,
            call_digest=call_digest(contract.tool, args_json),
            contract=contract,
            request=render_request(contract, {"step": step}, "0" * 32),
            owner=BOOT,
            deadline_ms=self.ms + SEND_MS,
        )

    def settle(
        self, run: str, step: str, outcome: c.OutcomeKind = "applied", attempt: int = 1, receipt: Any = "ok"
    ) -> Verdict:
        return self.submit(c.Settle(RunId(run), StepId(step), attempt, outcome, canonical(receipt)))

    def do(self, run: str, step: str, contract: Contract = CHARGE, receipt: Any = "ok") -> None:
        self.admit(run, step, contract)
        self.settle(run, step, receipt=receipt)

    def compensate(self, run: str, step: str) -> Verdict:
        args_json = canonical({"undo": step})
        command = c.Compensate(
            right=self.right(run),
            step_id=StepId(step),
            undo_step_id=StepId(step + "~undo"),
            tool=REFUND.tool,
            args_json=args_json,
            call_digest=call_digest(REFUND.tool, args_json),
            contract=REFUND,
            request=None,
            owner=BOOT,
            deadline_ms=self.ms + SEND_MS,
        )
        return self.submit(command)

    def complete(self, run: str, asked: Sequence[str] = ()) -> Verdict:
        return self.submit(c.Complete(self.right(run), '{"done":true}', frozenset(map(StepId, asked))))

    def right(self, run: str) -> Right:
        return self.rights.get(RunId(run), Right(RunId(run), Epoch(1), HOLDER))


def everything(store: Store) -> dict[str, Any]:
    """All that the seam can be asked, in one comparable value."""
    heads = store.runs(None, 10_000, None)
    found: dict[str, Any] = {
        "runs": list(heads),
        "key_max": store.run_key_max(),
        "live": list(store.live_heads()),
        "fenced": list(store.fenced_runs()),
        "mark": store.identity().mark_ms,
    }
    for state in ("claimable", "leased", "held", "frozen", "failing", "completed", "failed"):
        found["state " + state] = list(store.runs(None, 10_000, state))
    for now_ms in (0, 5_000, 10**12):
        found[f"claimable {now_ms}"] = list(store.claimable({"agent": (), "other": ("2",)}, now_ms, 100))
    for head in heads:
        found[head.run_id] = everything_of(store, head)
    return found


def everything_of(store: Store, head: RunHead) -> dict[str, Any]:
    loaded = store.load_head(head.run_id)
    assert loaded is not None
    key = loaded[0]
    steps: list[Step] = list(store.load_steps(key, None, 10_000))
    return {
        "key": key,
        "head": loaded[1],
        "events": list(store.load_events(key, 0, 10_000)),
        "event": [store.load_event(key, seq) for seq in range(head.seq + 2)],
        "steps": steps,
        "step": [store.load_step(key, step.step_id) for step in steps],
        "contracts": {step.contract: store.load_contract(step.contract) for step in steps},
        "journal": journal_whole(store, key, 700),
        "forgotten": [list(store.forgotten(key, since, Epoch(2))) for since in (0, head.seq // 2)],
    }


def journal_whole(store: Store, key: int, bytes_max: int) -> list[Any]:
    """Every page of a journal."""
    pages, after = [], 0
    while True:
        entries, after = store.journal(key, after, bytes_max)
        pages.append(list(entries))
        if not after:
            return pages
