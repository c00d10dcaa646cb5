"""The command `sandbox`: the replica of a workspace, to be started inside the box whose disk may vanish.

Imports nothing of the server: a small box is ready soon.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import checked_id
from tidefast.wire.place import KEY_VARIABLE, URL_DEFAULT, URL_VARIABLE

if TYPE_CHECKING:
    from tidefast.sdk.replica.dial import Dial


def sandbox(
    directory: Path,
    /,
    *,
    workspace: Annotated[str, Parameter(help="The workspace whose files the directory is to hold.")],
    authority: Annotated[str | None, Parameter(help="The server (or TIDEFAST_URL): http://HOST:PORT.")] = None,
    key_file: Annotated[Path | None, Parameter(help="A file with the replica's key, else TIDEFAST_KEY.")] = None,
    ignore: Annotated[tuple[str, ...], Parameter(negative="", help="A glob of paths to leave out; repeat it.")] = (),
    pass_env: Annotated[tuple[str, ...], Parameter(negative="", help="A variable that commands may see.")] = (),
    allow: Annotated[tuple[str, ...], Parameter(negative="", help="A protected name that may be written.")] = (),
) -> int:
    """Make DIRECTORY a replica of a workspace: hold its committed files, and do the calls of its runs.

    Dials out to the authority and listens on nothing. Whatever stands in DIRECTORY and isn't committed is REMOVED. Ends
    with exit code 5 when another replica has taken the workspace.
    """
    from tidefast.cli.log import configure_log
    from tidefast.sdk.replica.secrecy import close_memory, take_variable

    given = take_variable(KEY_VARIABLE)
    close_memory()
    key = _key_in(key_file) if key_file is not None else given
    url = authority or _environment(URL_VARIABLE) or URL_DEFAULT
    configure_log("info")
    return _serve(directory, checked_id(workspace, "--workspace"), url, key, ignore, frozenset(pass_env), allow)


def _serve(
    directory: Path,
    workspace: str,
    url: str,
    key: str | None,
    ignored: tuple[str, ...],
    passed: frozenset[str],
    allowed: tuple[str, ...],
) -> int:
    import structlog

    from tidefast.sdk.replica.confine import examine
    from tidefast.sdk.replica.dial import Dial, Ended
    from tidefast.sdk.replica.replica import InUse, Replica
    from tidefast.sdk.replica.tree import Rules
    from tidefast.wire.replica import BLOB_BYTES_MAX

    confinement = examine()
    structlog.get_logger().info(
        "replica_starts", workspace=workspace, directory=str(directory), commands=confinement.sentence()
    )
    names = frozenset(name.casefold() for name in allowed)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replica = Replica(
            directory, workspace, confinement, rules=Rules(ignored, BLOB_BYTES_MAX), allowed=names, passed=passed
        )
    except InUse as error:
        raise CliError("in_use", str(error), "end it first, or name another directory") from error
    except OSError as error:
        raise CliError("usage", f"{directory}: {error.strerror}", "name a directory that this user may write",
                       ExitCode.USAGE) from error  # fmt: skip
    try:
        dial = Dial(replica, url, key)
        asyncio.run(_until_stopped(dial))
    except ValueError as error:
        raise CliError("usage", str(error), "name the server with --authority", ExitCode.USAGE) from error
    except Ended as error:
        fence = error.code == "stale_epoch"
        todo = "another replica has the workspace" if fence else "look at the key and the workspace's name"
        raise CliError(error.code, str(error), todo, ExitCode.FENCE if fence else ExitCode.OTHER) from error
    finally:
        replica.close()
    return ExitCode.OK


async def _until_stopped(dial: "Dial") -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, dial.stop)
    await dial.run()


def _environment(name: str) -> str | None:
    return os.environ.get(name) or None


def _key_in(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError("usage", f"--key-file {path}: {error}", "name a readable file", ExitCode.USAGE) from error
