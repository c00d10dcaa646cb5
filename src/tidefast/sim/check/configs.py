"""The small worlds that are searched to the end: which steps, how many workers, how many faults.

Faults are budgeted, resources are not: grants, attempts, takeovers, verdicts and messages are free, so that nothing is
cut off by a limit and every state without a way forward is a real one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tidefast.protocol.contracts import Contract, Probe, Undo
from tidefast.protocol.patterns import Pattern

TIMEOUT_MS = 30_000
MARGIN_MS = 300_000
TTL_MS = 3_600_000

KEYED = Contract(
    tool="charge",
    kind="http",
    url="http://provider/charges",
    key="header:Idempotency-Key",
    key_ttl_ms=TTL_MS,
    margin_ms=MARGIN_MS,
    timeout_ms=TIMEOUT_MS,
    refusals=(Pattern(402),),
)
KEYLESS = KEYED._replace(tool="send", url="http://provider/mails", key="none", key_ttl_ms=0)
REFUND = KEYED._replace(tool="refund", url="http://provider/refunds")
READ = KEYLESS._replace(tool="look", url="http://provider/balance", effect="none")
PROBE = Probe(  # its answers are given in a word; the patterns are tested elsewhere
    found=Pattern(0, (("n", 1),)), absent=Pattern(0, (("n", 0),)), url="http://provider/asked"
)
MODEL = READ._replace(tool="think", url="http://provider/answers", effect="model", retries=1)
UNDOABLE = Undo("refund", {"charge": "{receipt.body.id}"})


class Tool(NamedTuple):
    """One step of the run and what may be done about it."""

    name: str
    contract: Contract
    undo: Contract | None = None


class Config(NamedTuple):
    """One small world. `workers` is how many epochs are told apart: the newest, and the older ones by age."""

    name: str
    steps: tuple[Tool, ...]
    faults: int
    workers: int = 2
    declines: bool = True  # the provider may refuse
    unlisted: bool = False  # it may answer with a status that no contract lists
    doubles: bool = False  # the network may deliver a request twice
    days: bool = False  # a day may pass: keys are forgotten
    changes: bool = False  # contract or account changed, wall clock set back
    words: bool = False  # callers with other arguments, or asking for the stored call
    checkpoints: int = 0
    local: bool = False  # a local step is journaled
    restarts: bool = False  # the authority restarts, which gives every lease its time again
    restores: bool = False  # a backup is made, and restored at any later time
    early_backup: bool = False  # it is made before the books know a step
    exiles: bool = True  # an instance is given up for dead and lives on
    slow_looks: bool = True  # an operator looks, and speaks later
    by_hand: bool = False  # an operator undoes an effect at the provider
    fails: bool = True
    cancels: bool = False  # an operator cancels the run
    pauses: bool = False  # an operator pauses, resumes and freezes it
    counts_grants: bool = False  # grants without progress are counted (from seven on)


def keyed(name: str, **other: Any) -> Tool:
    return Tool(name, KEYED._replace(**other))


def keyless(name: str, **other: Any) -> Tool:
    return Tool(name, KEYLESS._replace(**other))


def askable(name: str, contract: Contract = KEYLESS) -> Tool:
    return Tool(name, contract._replace(probe=PROBE, probe_tries=2))


def undoable(name: str, contract: Contract = KEYED, undo: Contract = REFUND) -> Tool:
    return Tool(name, contract._replace(undo=UNDOABLE), undo)


LEAN: Mapping[str, Any] = {"exiles": False, "slow_looks": False, "fails": False}

ENDS: Mapping[str, Any] = {"declines": False, "exiles": False, "slow_looks": False, "cancels": True}

QUICK: tuple[Config, ...] = (
    Config("quick: keyed + undo", (undoable("pay"),), 1, **LEAN),
    Config("quick: keyed", (keyed("pay"),), 1, doubles=True, days=True, exiles=False),
    Config("quick: keyless", (keyless("mail"),), 1, unlisted=True, by_hand=True, exiles=False, fails=False),
    Config("quick: keyed, keyless", (keyed("pay"), keyless("mail")), 0, **LEAN),
    Config("quick: checkpoints", (keyed("pay"),), 0, checkpoints=2, local=True, **LEAN),
    Config("quick: words", (keyed("pay"),), 1, words=True, changes=True, **LEAN),
    Config("quick: restarts", (keyed("pay", retries=1),), 1, restarts=True, slow_looks=False, fails=False),
    Config("quick: restores", (keyless("mail"),), 1, restores=True, early_backup=True, declines=False, **LEAN),
    Config("quick: restores, keyed", (keyed("pay"),), 1, restores=True, early_backup=True, declines=False, **LEAN),
    Config("quick: keyless, asked", (askable("mail"),), 1, exiles=False, fails=False),
    Config("quick: cancel, pause", (undoable("pay"),), 0, declines=False, cancels=True, pauses=True, **LEAN),
    Config("quick: a model", (Tool("plan", MODEL),), 1, **LEAN),
    Config("quick: grants", (keyed("pay"),), 0, counts_grants=True, **LEAN),
)
GATE: tuple[Config, ...] = (  # the long ones first, so that both cores have work to the end
    Config("keyless × 2, 2 workers, 3 faults", (keyless("mail"), keyless("wire")), 3, declines=False, **LEAN),
    Config("keyed, 2 workers, 2 faults, all kinds", (keyed("pay"),), 2, doubles=True, days=True),
    Config(
        *("keyed, one retry, restarts, 2 faults", (keyed("pay", retries=1),), 2),
        restarts=True,
        exiles=False,
        slow_looks=False,
        fails=False,
    ),
    Config("keyed, other words and accounts, 2 faults", (keyed("pay"),), 2, words=True, changes=True, **LEAN),
    Config("keyed, 3 workers, 2 faults", (keyed("pay"),), 2, workers=3, **LEAN),
    Config("keyed + keyless, 1 fault", (keyed("pay"), keyless("mail")), 1, exiles=False, slow_looks=False),
    Config(
        *("keyless + undo, undone by hand, 1 fault", (undoable("pay", KEYLESS),), 1),
        by_hand=True,
        exiles=False,
        slow_looks=False,
        fails=False,
    ),
    Config("keyed + undo, 1 fault", (undoable("pay"),), 1, days=True),
    Config("two undos in order", (undoable("a"), undoable("b")), 0, **ENDS),
    Config("keyed, checkpoints, a local step, 1 fault", (keyed("pay"),), 1, checkpoints=2, local=True, **LEAN),
    Config("keyless, 3 workers, 3 faults", (keyless("mail"),), 3, workers=3, unlisted=True, by_hand=True),
    Config("keyed, a restore", (keyed("pay"),), 1, restores=True, declines=False, **LEAN),
    Config("keyless, a restore", (keyless("mail"),), 1, restores=True, **LEAN),
    Config("keyless, asked, 3 faults", (askable("mail"),), 3, unlisted=True),
    Config("keyed, asked when its time is over, 1 fault", (askable("pay", KEYED),), 1, days=True),
    Config("a reading, 1 fault", (Tool("look", READ),), 1),
    Config("keyed, grants counted, 1 fault", (keyed("pay"),), 1, counts_grants=True, **LEAN),
)
BY_NAME = {config.name: config for config in (*QUICK, *GATE)}
