"""The examples that each command's `--help` ends with. A test runs every one of them, in this order."""

from collections.abc import Mapping
from typing import NamedTuple


class Example(NamedTuple):
    """A command line as one would type it, and what it is good for."""

    line: str
    meaning: str


EXAMPLES: Mapping[str, tuple[Example, ...]] = {
    "run": (
        Example("""tidefast run app:app refund '{"order":"o-1"}' --run-id r-1""", "again, it goes on where it was"),
        Example("tidefast run app:app refund @ticket.json --tools tools.toml", "input and contracts from files"),
    ),
    "runs": (
        Example("tidefast runs --state held", "what waits for somebody"),
        Example("tidefast runs --after r-1 --limit 10 --json", "the next page, for programs"),
    ),
    "show": (
        Example("tidefast show r-1", "what it is, what happened when, each step with its attempts"),
        Example("tidefast show r-1 --svg r-1.svg", "as a picture"),
    ),
    "log": (Example("tidefast log r-1 --after 3", "event by event, with the chain of digests"),),
    "held": (Example("tidefast held", "with the commands that settle each step"),),
    "workspaces": (Example("tidefast workspaces", "with the replica of each"),),
    "workspace": (
        Example("tidefast workspace log case --since 3", "who wrote what after index 3"),
        Example("tidefast workspace diff case --since 1 --index 3", "what changed from one index to another"),
        Example("tidefast workspace tar case --output case.tar", "all that is committed"),
    ),
    "resolve": (
        Example(
            "tidefast resolve r-3 mail not_applied --looked 0s --note 'not in the outbox'", "it will be sent again"
        ),
        Example("""tidefast resolve r-4 mail applied --receipt '{"id":"m-7"}' --note 'seen'""", "it is taken as done"),
    ),
    "audit": (
        Example("tidefast audit", "every law, over every run of the store"),
        Example("tidefast audit --ledger ledger.json", "against what the provider counted"),
    ),
    "serve": (
        Example("tidefast serve --app app:app", "with the python tools of an app"),
        Example(
            "tidefast serve --store sqlite:///desk.db --tools tools.toml --port 0", "with contracts, on a free port"
        ),
    ),
    "worker": (
        Example("tidefast worker app:app", "take runs of the server on this machine"),
        Example("tidefast worker app:app --max-runs 8 --lease 30s", "fewer at once, a longer lease"),
    ),
    "start": (
        Example("""tidefast start refund '{"order":"o-2"}' --run-id r-2""", "again, it changes nothing"),
        Example("tidefast start refund @ticket.json", "under a name drawn by chance"),
    ),
    "preempt": (Example("tidefast preempt r-2 --note 'its machine is going away'", "another worker takes the run"),),
    "pause": (Example("tidefast pause r-6 --note 'the shop is closed'", "nothing new begins; what is out settles"),),
    "resume": (Example("tidefast resume r-6", "a paused run goes on"),),
    "freeze": (Example("tidefast freeze r-6 --note 'this looks wrong'", "until somebody has looked, and thaws it"),),
    "cancel": (
        Example("tidefast cancel r-6 --note 'ordered by mistake'", "what is open settles, what can be is undone"),
    ),
    "budgets": (
        Example("tidefast budgets", "what models have cost, and what may be spent"),
        Example(
            "tidefast budgets agent/refund --calls 100 --note 'enough for today'", "a limit for every run of an agent"
        ),
    ),
    "thaw": (Example("tidefast thaw r-5 --note 'looked at it'", "a frozen run goes on"),),
    "export": (
        Example("tidefast export r-1 --out r-1.jsonl --key anchor.key", "signed, to be shown to somebody else"),
    ),
    "verify": (Example("tidefast verify r-1.jsonl --pub anchor.key.pub", "by whoever has the public key"),),
    "anchor": (
        Example("tidefast anchor keygen --key anchor.key", "once; keep it away from the store"),
        Example("tidefast anchor --key anchor.key --out monday.anchor", "then: tidefast audit --anchor monday.anchor"),
    ),
    "backup": (Example("tidefast backup monday.db", "also beside a running server"),),
    "restore": (Example("tidefast restore monday.db --store new/store.db", "where no store is"),),
    "recover": (
        Example("tidefast recover --store new/store.db", "what the window after a restore holds back"),
        Example("tidefast recover --store new/store.db --nothing-lost --note 'a clean stop'", "close it"),
    ),
    "adopt": (Example("tidefast adopt --store copy.db", "a copied file becomes a store of its own"),),
    "keys": (
        Example("tidefast keys add shop --role worker --runs 'shop-*' --keys keys.toml", "prints the key, once"),
        Example("tidefast keys list --keys keys.toml", "who may call, and as what"),
        Example("tidefast keys revoke shop --keys keys.toml", "send SIGHUP to a running server"),
    ),
    "doctor": (
        Example("tidefast doctor", "this host, and the store where `tidefast run` keeps it"),
        Example(
            "tidefast doctor --store desk.db --tools tools.toml --json", "another store, its contracts, for programs"
        ),
    ),
    "contracts": (
        Example("tidefast contracts", "of well-known providers, with source and date"),
        Example("tidefast contracts show stripe_v1", "to copy into a tools file"),
        Example("tidefast contracts explain tools.toml", "what follows when something dies, tool by tool"),
    ),
    "completion": (Example("tidefast completion bash", "source its output in ~/.bashrc"),),
    "demo": (Example("tidefast demo --tickets 4 --no-faults", "the refund desk without a fault, in seconds"),),
    "scenarios": (Example("tidefast scenarios show late_200_after_preempt", "one order of events, drawn"),),
    "check": (Example("tidefast check --quick", "small runs, in seconds"),),
    "sim": (Example("tidefast sim --acceptance --interleavings 5", "a few interleavings of the two acceptance rules"),),
}


def epilogue(command: str) -> str | None:
    """What a command's help ends with; None for one without examples."""
    examples = EXAMPLES.get(command)
    if examples is None:
        return None
    return "Examples:\n\n" + "\n\n".join(f"  $ {line}\n      {meaning}" for line, meaning in examples)
