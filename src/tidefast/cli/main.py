"""The command `tidefast`: which commands there are, and how each of them ends.

A command's file is imported when the command is used, so that `tidefast serve` loads what a server needs and no more.
"""

import errno
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from tidefast import __version__
from tidefast.cli.errors import HELP, CliError, ExitCode
from tidefast.cli.examples import epilogue

COMMANDS = {
    "run": ("running:run", "Drive one run here, without a server: created, or resumed with --run-id."),
    "serve": ("serving:serve", "Serve an authority and its gateway over HTTP."),
    "worker": ("serving:worker", "Claim runs at a server and drive them."),
    "sandbox": ("sandboxing:sandbox", "Make a directory a replica of a workspace, inside the box that may vanish."),
    "start": ("running:start", "Create a run at a server, for its workers."),
    "runs": ("looking:runs", "List runs."),
    "show": ("looking:show", "One run: its timeline, steps, attempts and receipts."),
    "log": ("looking:log", "The log of a run, event by event."),
    "held": ("looking:held", "Steps that wait for a person, and the commands that settle them."),
    "workspaces": ("workspaces:workspaces", "List workspaces and their replicas."),
    "workspace": ("workspaces:workspace", "One workspace: its state, log, files, differences, or all as a tar file."),
    "resolve": ("deciding:resolve", "Say what became of a step in doubt or held."),
    "preempt": ("overseeing:preempt", "End a run's lease, so that another worker takes it."),
    "pause": ("overseeing:pause", "Let nothing new of a run begin."),
    "resume": ("overseeing:resume", "Let a paused run go on."),
    "freeze": ("overseeing:freeze", "Stop a run for a person to look at."),
    "thaw": ("overseeing:thaw", "Let a frozen run go on."),
    "cancel": ("overseeing:cancel", "End a run: settle what is open, undo what can be undone."),
    "budgets": ("spending:budgets", "What models have cost, what may be spent, and raising a limit."),
    "backup": ("recovering:backup", "Copy a store to a file as it is at one moment, while it is served."),
    "restore": ("recovering:restore", "Make a store of a backup: old tokens refused, lost sendings presumed."),
    "adopt": ("recovering:adopt", "Make a copied store's file a store of its own."),
    "recover": ("recovering:recover", "How a store stands after a restore, and the end of its recovery window."),
    "keys": ("keyring:keys", "Make, list and revoke the keys of a server's callers."),
    "audit": ("proving:audit", "Judge every log of a store by the laws, and against a provider's ledger."),
    "anchor": ("evidence:anchor", "Sign how long each log is and what its last digest was, to be kept elsewhere."),
    "export": ("evidence:export", "Write one run's log with its contracts to a file that proves itself."),
    "verify": ("evidence:verify", "Judge an exported run, with nothing but its file."),
    "doctor": ("doctor:doctor", "Whether this host, the store and its files can keep what is promised."),
    "contracts": ("contracts:contracts", "Contracts of well-known providers, and what one makes of each death."),
    "completion": ("completion:completion", "Print what makes a shell complete commands and flags."),
    "demo": ("proving:demo", "The refund desk under fire: workers killed and frozen, the books afterwards."),
    "scenarios": (
        "stories:scenarios",
        "Named orders of events that people argue about, their answers, and whether they hold.",
    ),
    "check": ("proving:check", "Search every interleaving of small runs over the real rules."),
    "sim": ("proving:sim", "Play the product in virtual time under fire, by seed, and judge every log."),
}
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def build() -> App:
    app = App(
        name="tidefast",
        version=__version__,
        help=f"Runs of AI agents whose effects survive the loss of their workers.\n\n{HELP}",
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    for name, (place, text) in COMMANDS.items():
        app.command(f"tidefast.cli.{place}", name=name, help=text, help_epilogue=epilogue(name))
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = build()(given, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain about it once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OTHER
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _say(CliError("output", f"the output can't be written: {error.strerror}", "name another place for it"))
    except CycloptsError as error:
        known = given[0] if given and given[0] in COMMANDS else ""
        todo = f"tidefast {known} --help".replace("  ", " ")
        what = " ".join(str(error).split()).partition(" Available commands:")[0]
        return _say(CliError("usage", what, todo, ExitCode.USAGE))
    except CliError as error:
        return _say(error)
    except Exception as error:
        from tidefast.cli.faults import told  # only now: it knows the errors of every room

        return _say(told(error))
    return result if isinstance(result, int) else ExitCode.OK


def _say(error: CliError) -> int:
    print(error.line(), file=sys.stderr, flush=True)
    return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
