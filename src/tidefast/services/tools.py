"""The tools that a gateway may call: their contracts, and where their credentials come from.

Contracts come from a TOML file or from decorators; both are checked in full before the gateway starts, and every
problem is reported at once with file, key and what was expected.
"""

import os
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tidefast.protocol.canonical import JSON
from tidefast.protocol.commands import OutcomeKind, Write
from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import Contract, contract_digest
from tidefast.protocol.ids import is_id

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


class ConfigError(Exception):
    """The configuration can't be used. The message has one line per problem: file, key, what was expected."""


class Outcome(NamedTuple):
    """What a sender saw of one attempt, with the receipt as canonical text (`null` for none)."""

    kind: OutcomeKind
    receipt_json: str = "null"
    reason: str = ""
    write: Write | None = None  # of a workspace's mutating call


# (tool, decoded arguments, key, deadline in ms of the authority's clock) -> outcome. Never raises.
PythonRunner = Callable[[str, Mapping[str, JSON], str, int], Awaitable[Outcome]]


class Tool(NamedTuple):
    """A contract ready for use."""

    contract: Contract
    digest: str
    validator: "Draft202012Validator | None"

    def problem_with(self, args: Mapping[str, JSON]) -> str | None:
        """Where the arguments don't fit the contract's schema, as a JSON pointer and a sentence; None if they do."""
        if self.validator is None:
            return None
        error = next(iter(self.validator.iter_errors(args)), None)
        if error is None:
            return None
        place = "".join(f"/{part}" for part in error.absolute_path) or "/"
        return f"{place}: {'does not fit the schema' if self.contract.secret else error.message[:200]}"


class ToolBook:
    """All tools of one gateway, checked against each other. Raises `ConfigError`.

    Who only reads contracts and calls nothing needs no credentials.
    """

    def __init__(self, contracts: Iterable[Contract], source: str = "tools", *, needs_credentials: bool = True) -> None:
        self._tools: dict[str, Tool] = {}
        problems: list[str] = []
        for contract in contracts:
            if contract.tool in self._tools:
                problems.append(f"{source}: tools.{contract.tool}: expected one contract, found two")
            self._tools[contract.tool] = Tool(
                contract, contract_digest(contract), _validator(contract, problems, source)
            )
        for tool in self._tools.values():
            problems.extend(self._relations(tool.contract, source))
            if needs_credentials:
                problems.extend(_credential_faults(tool.contract, source))
        if problems:
            raise ConfigError("\n".join(problems))

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def names(self) -> list[str]:
        return sorted(self._tools)

    def contracts(self) -> list[Contract]:
        return [tool.contract for tool in self._tools.values()]

    def _relations(self, contract: Contract, source: str) -> Iterable[str]:
        where = f"{source}: tools.{contract.tool}"
        if contract.undo is not None and contract.undo.tool not in self._tools:
            yield f"{where}.undo: expected the name of a tool that has a contract, found {contract.undo.tool!r}"
        readers = {
            "probe": "" if contract.probe is None else contract.probe.tool,
            "require": "" if contract.require is None else contract.require.tool,
        }
        for member, name in readers.items():
            asked = self._tools.get(name)
            if name and (asked is None or asked.contract.effect != "none"):
                yield f'{where}.{member}: expected the name of a tool whose effect is "none", found {name!r}'


def _credential_faults(contract: Contract, source: str) -> Iterable[str]:
    where = f"{source}: tools.{contract.tool}"
    if contract.credential is not None and not os.environ.get(contract.credential.env):
        yield f"{where}.credential: expected the environment variable {contract.credential.env} to be set"
    elif contract.credential is not None and contract.kind == "smtp":
        if not os.environ[contract.credential.env].isprintable():
            yield f"{where}.credential: expected {contract.credential.env} to be one printable line"
    elif contract.credential is not None and not fits_header(os.environ[contract.credential.env]):
        name = contract.credential.env
        yield f"{where}.credential: expected {name} to be printable ASCII in one line, without spaces around it"


def fits_header(value: str) -> bool:
    """Whether a text can be a header's value as it is."""
    return value.isascii() and value.isprintable() and value == value.strip()


def _validator(contract: Contract, problems: list[str], source: str) -> "Draft202012Validator | None":
    if contract.args is None:
        return None
    from jsonschema import Draft202012Validator  # only where a contract has a schema: it is slow to import
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(contract.args)
    except SchemaError as error:
        problems.append(f"{source}: tools.{contract.tool}.args: expected a JSON Schema: {error.message[:200]}")
        return None
    return Draft202012Validator(contract.args)


def load_contracts(path: Path) -> list[Contract]:
    """The contracts of a TOML file (`[tools.NAME]` tables). Raises `ConfigError` with every problem of the file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable file: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected TOML: {error}") from error
    problems = [f"{path}: {name}: unknown table; expected [tools.NAME]" for name in document if name != "tools"]
    tables = document.get("tools", {})
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{path}: tools: expected tables like [tools.charge]")
    contracts: list[Contract] = []
    for name, table in tables.items():
        if not is_id(name) or not isinstance(table, Mapping):
            problems.append(f"{path}: tools.{name}: expected a table whose name is an id")
            continue
        contract, faults = parse_contract(name, table)
        problems.extend(f"{path}: tools.{name}.{fault}" for fault in faults)
        if contract is not None:
            contracts.append(contract)
    if problems:
        raise ConfigError("\n".join(problems))
    return contracts
