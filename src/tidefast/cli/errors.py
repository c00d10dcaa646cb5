"""What a command says when it can't do what was asked: one line on stderr, and an exit code that scripts can read.

    error[code]: what happened — what to do

A line holds no control character, whoever's text it quotes.
"""

import re
from enum import IntEnum

from tidefast.cli.show import moment, safe
from tidefast.protocol.verdicts import Refused
from tidefast.wire.problem import from_refused, problem


class ExitCode(IntEnum):
    """The exit codes, as `tidefast --help` explains them."""

    OK = 0
    OTHER = 1
    USAGE = 2
    CONFIG = 3
    UNREACHABLE = 4
    FENCE = 5
    UNKNOWN = 6
    PERSON = 7


HELP = """Exit codes:

0  what was asked is so (run: completed; audit, sim: every law holds)
1  any other reason, such as a run that has failed or is not there
2  usage: an unknown command or option, a value of the wrong form
3  configuration: a file, a key in it, a store that can't be opened
4  the server can't be reached, or the store is owned by another process
5  refused by the fence: the lease or what you expected has moved on
6  the outcome is unknown: look before you repeat it
7  the run waits for a person: held, frozen or paused; the command to settle it is printed"""

FENCE_CODES = frozenset(("stale_epoch", "lease_lapsed", "lease_held", "moved"))
KEY_HINT = "name its file with --operator-key, or the store that it stands beside with --store"
_EPOCH_MS = re.compile(r"\b1[6-9]\d{11}\b")  # a time from 2020 to 2033 in a sentence
UNKNOWN_CODES = frozenset(("in_doubt", "step_in_flight", "store_unavailable", "internal"))


class CliError(Exception):
    """A command ends with this line and this exit code."""

    def __init__(self, code: str, what: str, todo: str, exit_code: ExitCode = ExitCode.OTHER) -> None:
        super().__init__(what)
        self.code, self.what, self.todo, self.exit_code = code, what, todo, exit_code

    def line(self) -> str:
        what, todo = safe(self.what.strip().rstrip(".")), safe(self.todo.strip().rstrip("."))
        return f"error[{self.code}]: {what} — {todo}" if todo else f"error[{self.code}]: {what}"


class ConfigProblems(CliError):
    """Everything that is wrong with the configuration, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("config", "; ".join(problems), "", ExitCode.CONFIG)
        self.problems = problems

    def line(self) -> str:
        count = len(self.problems)
        todo = "correct it and start again" if count == 1 else f"correct all {count} and start again"
        lines = [f"error[config]: {safe(problem)}" for problem in self.problems]
        lines[-1] += f" — {todo}"
        return "\n".join(lines)


def refusal(refused: Refused) -> CliError:
    """A refusal of the authority, in the words of the wire, with the exit code that its code asks for."""
    code = str(refused.facts.get("code", refused.code))
    if code == refused.code:
        said = from_refused(refused)
    else:
        said = problem(code, refused.reason, refused.facts)
    exit_code = ExitCode.OTHER
    if code in FENCE_CODES:
        exit_code = ExitCode.FENCE
    elif code in UNKNOWN_CODES:
        exit_code = ExitCode.UNKNOWN
    todo = KEY_HINT if code == "unauthenticated" else said.next
    what = str(refused.facts["detail"]) if code == "invalid" and "detail" in refused.facts else said.detail
    return CliError(code, _with_moments(what), _with_moments(todo), exit_code)


def _with_moments(text: str) -> str:
    """Times as people read them: the authority counts milliseconds since 1970."""
    return _EPOCH_MS.sub(lambda hit: f"{moment(int(hit.group()))} UTC", text)
