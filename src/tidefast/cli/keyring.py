"""`tidefast keys`: the file of keys that `tidefast serve --keys FILE` reads.

A key is printed once, when it is made; the file holds its digest. A server that runs reads the file again at SIGHUP.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import AsJson, checked_id
from tidefast.server.access import Caller, Role
from tidefast.server.keyfile import add_key, problems_of, read_keys, revoke_key

RELOAD = "a server that runs reads the file again at SIGHUP"


def keys(
    action: Annotated[Literal["add", "list", "revoke"], Parameter(help="What to do.")],
    name: Annotated[str | None, Parameter(help="The key's name: who calls, as the log tells it.")] = None,
    /,
    *,
    keys: Annotated[Path, Parameter(help="The file of keys, the one that `tidefast serve --keys` reads.")],
    role: Annotated[Role | None, Parameter(help="What the key may do; add needs it.")] = None,
    runs: Annotated[str, Parameter(help='The runs that it may see and touch, like "shop-*".')] = "*",
    workspace: Annotated[str | None, Parameter(help="The workspace that a replica's key serves.")] = None,
    bodies: Annotated[
        bool, Parameter(negative="", help="Let a reader see inputs, requests, receipts and results.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Make, list and revoke the keys of a server's callers.

    add prints the key, which can't be printed again: the file holds its digest only.

    Examples:

    tidefast keys add shop --role worker --runs "shop-*" --keys keys.toml

    tidefast keys list --keys keys.toml

    tidefast keys revoke shop --keys keys.toml
    """
    if action == "list":
        return _list(keys, as_json)
    if name is None:
        raise CliError(
            "usage", f"keys {action} needs a NAME", f"tidefast keys {action} NAME --keys FILE", ExitCode.USAGE
        )
    checked_id(name, "NAME")
    if action == "revoke":
        revoke_key(keys, name)
        return _told({"revoked": name}, f"revoked {name}; {RELOAD}", as_json)
    key = add_key(keys, _caller(name, role, runs, workspace, bodies))
    if as_json:
        out.document({"name": name, "role": role, "key": key})
        return ExitCode.OK
    out.write(key)
    print(f"the key of {name} is told only now: {keys} holds its digest; {RELOAD}", file=sys.stderr)
    return ExitCode.OK


def _caller(name: str, role: Role | None, runs: str, workspace: str | None, bodies: bool) -> Caller:
    """Whom a new key names. Raises `CliError` with everything that the file would be refused for."""
    entry: dict[str, object] = {"role": role, "sha256": "0" * 64, "runs": runs}
    entry |= {} if workspace is None else {"workspace": workspace}
    entry |= {"bodies": True} if bodies else {}
    wrong = [problem.removeprefix(f"keys.{name}.") for problem in problems_of(name, entry)]
    if wrong:
        raise CliError("usage", "; ".join(wrong), "tidefast keys --help explains them", ExitCode.USAGE)
    return Caller(name, role, runs.removesuffix("*"), workspace or "", bodies or role != "reader")


def _list(file: Path, as_json: bool) -> int:
    found = sorted((caller.name, caller, digest.hex()) for digest, caller in read_keys(file).items())
    if as_json:
        shown = [
            {"name": name, "role": caller.role, "runs": f"{caller.runs}*", "sha256": digest, "bodies": caller.bodies}
            | ({"workspace": caller.workspace} if caller.workspace else {})
            for name, caller, digest in found
        ]
        return _told({"keys": shown}, "", as_json)
    rows = [(name, str(caller.role), _scope(caller), digest[:12]) for name, caller, digest in found]
    out.table(("name", "role", "sees", "sha256"), rows)
    return ExitCode.OK


def _scope(caller: Caller) -> str:
    if caller.workspace:
        return f"workspace {caller.workspace}"
    return f"runs {caller.runs}*" + ("" if caller.bodies else ", bodies as digests")


def _told(document: dict[str, object], line: str, as_json: bool) -> int:
    if as_json:
        out.document(document)
    else:
        out.line(line)
    return ExitCode.OK
