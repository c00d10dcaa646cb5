"""The errors of every room as a command tells them: code, what, what to do, exit code.

An exception that no room announced is a fault of this program or of a user's module: its traceback is shown first.
"""

import traceback

from tidefast.cli.errors import CliError, ConfigProblems, ExitCode
from tidefast.sdk.errors import Error, Misuse, Unavailable
from tidefast.server.keyfile import KeysRefused
from tidefast.services.tools import ConfigError
from tidefast.stores.base import StoreCorrupt, StoreError, StoreRefused
from tidefast.wire.secretfile import SecretRefused


def told(error: Exception) -> CliError:
    """What to say about an exception that left a command."""
    match error:
        case CliError():
            return error
        case ConfigError():
            return ConfigProblems(str(error).splitlines())
        case SecretRefused() | KeysRefused():
            return ConfigProblems(str(error).splitlines())
        case StoreRefused():
            return CliError("store_refused", *_halves(str(error)), ExitCode.CONFIG)
        case StoreCorrupt():
            return CliError("store_corrupt", *_halves(str(error)), ExitCode.OTHER)
        case StoreError():
            return CliError("store_unavailable", *_halves(str(error)), ExitCode.UNKNOWN)
        case Misuse():
            return CliError("config", _what(error), error.next, ExitCode.CONFIG)
        case Unavailable():
            return CliError("unreachable", _what(error), error.next, ExitCode.UNREACHABLE)
        case Error():
            return CliError("refused", _what(error), error.next)
        case _:
            traceback.print_exception(error)
            todo = "see the traceback above; nothing that was answered is lost"
            return CliError("internal", f"{type(error).__name__}: {error}", todo)


def _what(error: Error) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


def _halves(text: str) -> tuple[str, str]:
    """(what, what to do) of a store's message, whose last sentence says what to do."""
    what, stop, todo = text.rstrip(".").rpartition(". ")
    return (what, todo) if stop else (text, "look at the file and its directory")
