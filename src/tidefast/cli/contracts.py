"""`tidefast contracts`: contracts of well-known providers, and what a contract makes of each death.

`explain` plays the moments through the rules that a gateway runs; it calls nobody and needs no credential.
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli import wiring
from tidefast.cli.errors import CliError, ConfigProblems, ExitCode
from tidefast.cli.options import AsJson
from tidefast.protocol.contracts import Contract
from tidefast.services.foresight import Row, foresee
from tidefast.services.providers import all_providers
from tidefast.services.tools import ConfigError


def contracts(
    action: Annotated[Literal["list", "show", "explain"], Parameter(help="What to do.")] = "list",
    name: Annotated[str | None, Parameter(help="show: a provider of the list. explain: a tools file.")] = None,
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """Contracts of well-known providers, and what will happen when something dies.

    list names the contracts that are shipped, with source and date. show NAME prints one, to copy into a tools file.
    explain FILE tells of each tool what will happen when a worker or the gateway dies, and at every answer.
    """
    if action == "list":
        if name is not None:
            raise CliError(
                "usage", f"contracts list takes no {name!r}", f"tidefast contracts show {name}", ExitCode.USAGE
            )
        return _list(as_json)
    if name is None:
        wanted = "NAME" if action == "show" else "FILE"
        raise CliError("usage", f"contracts {action} needs a {wanted}", "tidefast contracts --help", ExitCode.USAGE)
    return _show(name, as_json) if action == "show" else _explain(Path(name), as_json)


def _list(as_json: bool) -> int:
    found = all_providers()
    if as_json:
        out.document({"contracts": [{"name": each.name, "title": each.title, **each.said} for each in found]})
        return ExitCode.OK
    rows = [
        (each.name, each.title, each.said["read"][0], each.said["stated"][0], each.said["source"][0]) for each in found
    ]
    out.table(("name", "for", "read", "what its docs say of their date", "source"), rows)
    return ExitCode.OK


def _show(name: str, as_json: bool) -> int:
    found = next((each for each in all_providers() if each.name == name), None)
    if found is None:
        raise CliError("not_found", f"no contract is called {name!r}", "tidefast contracts lists them", ExitCode.USAGE)
    if as_json:
        out.document({"name": found.name, "title": found.title, **found.said, "toml": found.text})
    else:
        out.write(found.text.rstrip())
    return ExitCode.OK


def _explain(file: Path, as_json: bool) -> int:
    try:
        tools = wiring.build_tools(file, "", (), needs_credentials=False).contracts()
    except ConfigError as error:
        raise ConfigProblems(str(error).splitlines()) from error
    told = [(contract, foresee(contract)) for contract in tools]
    if as_json:
        out.document({"tools": [{"tool": each.tool, "rows": [row._asdict() for row in rows]} for each, rows in told]})
        return ExitCode.OK
    for place, (contract, rows) in enumerate(told):
        _tell(contract, rows, is_first=not place)
    return ExitCode.OK


def _tell(contract: Contract, rows: list[Row], *, is_first: bool) -> None:
    if not is_first:
        out.line("")
    out.line((contract.tool, "bold"), f"  {_promise(contract)}")
    out.table(("when", "then"), [(row.moment, row.told) for row in rows])


def _promise(contract: Contract) -> str:
    """What the contract promises, in one line."""
    if contract.effect == "none":
        return "only reads"
    parts = ["changes the world"]
    if contract.dedups:
        parts.append(f"a doubt may be repeated for {_length(contract.window_ms)} after the first sending")
    else:
        parts.append("the provider surely remembers no key")
    parts.append("can be asked whether it happened" if contract.probe is not None else "can't be asked")
    parts.append(f"undone by {contract.undo.tool}" if contract.undo is not None else "can't be undone")
    return "; ".join(parts)


def _length(ms: int) -> str:
    """A duration for people, its two largest units: `23h 54m`."""
    units = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
    parts: list[str] = []
    for unit, length in units:
        count, ms = divmod(ms, length)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
