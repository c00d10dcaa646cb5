"""Four designs in common use, to be shown failing: rules that a scenario can put in place of the product's.

They prove that the scenario bites: the auditor must convict each of them by the laws that its file names.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tidefast.engine import engine as engine_room
from tidefast.protocol.commands import Command, SaveCheckpoint, Settle
from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import Event
from tidefast.protocol.machine import decide
from tidefast.protocol.records import Now, View
from tidefast.protocol.verdicts import Decision, Settled

# The last one is no design of ours: a provider that doesn't do what its contract says.
DESIGNS = ("commit_on_200", "epoch_in_key", "last_writer_wins", "blind_retry", "broken_promise")
DAY_MS = 86_400_000


def commit_on_200(view: View, command: Command, now: Now) -> Decision:
    """A success code is taken for a commit, whatever epoch is live when it arrives."""
    decision = decide(view, command, now)
    if not isinstance(command, Settle) or command.outcome != "applied" or not decision.events:
        return decision
    first = decision.events[0]
    if first.kind not in ("step_applied", "late_receipt"):
        return decision
    event = Event(first.seq, first.at_ms, "step_committed", first.epoch, first.step_id, first.data_json)
    return decision._replace(verdict=Settled("committed", joined=True), events=(event,))


def last_writer_wins(view: View, command: Command, now: Now) -> Decision:
    """A checkpoint is stored if its number is the next one; nobody asks under which epoch it was made."""
    head = view.run
    if not isinstance(command, SaveCheckpoint) or head is None:
        return decide(view, command, now)
    blind = head._replace(
        epoch=command.right.epoch, holder=command.right.holder, is_live=True, expires_at_ms=now.ms + 1
    )
    return decide(view._replace(run=blind), command, now)


def blind_retry(view: View, command: Command, now: Now) -> Decision:
    """What was not answered is sent again, whether or not the provider would know it again."""
    contracts = {name: _trusted(contract) for name, contract in view.contracts.items()}
    return decide(view._replace(contracts=contracts), command, now)


def _trusted(contract: Contract) -> Contract:
    return contract._replace(key="header:Idempotency-Key", key_ttl_ms=DAY_MS)


@contextmanager
def design(name: str) -> Iterator[None]:
    """Put a naive rule in place of the product's while a scenario is played."""
    rules = {"commit_on_200": commit_on_200, "last_writer_wins": last_writer_wins, "blind_retry": blind_retry}
    place = vars(engine_room)
    honest = place["decide"]
    place["decide"] = rules.get(name, honest)
    try:
        yield
    finally:
        place["decide"] = honest
