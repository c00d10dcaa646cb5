"""Reads the members of one configuration table: each with its type, every problem at once, unknown members named."""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from tidefast.protocol.canonical import JSON, CanonicalError, canonical
from tidefast.protocol.patterns import Pattern

Word = TypeVar("Word", bound=str)

DURATION_MAX_MS = 10 * 366 * 86_400_000
_DURATION = re.compile(r"(\d{1,9})(ms|s|m|h|d)", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Problem(NamedTuple):
    """One fault of a contract: which member, what was expected."""

    member: str
    expected: str

    def __str__(self) -> str:
        return f"{self.member}: {self.expected}"


def duration_ms(text: str) -> int | None:
    """`30s`, `24h`, `500ms`, `5m`, `7d` as milliseconds; None for anything else."""
    hit = _DURATION.fullmatch(text)
    return int(hit.group(1)) * _UNIT_MS[hit.group(2)] if hit else None


class Fields:
    """The members of one table; `place` stands before their names in problems."""

    def __init__(self, table: Mapping[str, object], place: str = "") -> None:
        self._table = table
        self._place = place
        self._known: list[str] = []
        self._problems: list[Problem] = []

    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._problems)

    def unknown(self) -> tuple[Problem, ...]:
        """A problem for each member that nobody asked for."""
        known = ", ".join(sorted(self._known))
        return tuple(
            Problem(f"{self._place}{name}", f"unknown member; known ones are {known}")
            for name in self._table
            if name not in self._known
        )

    def fault(self, name: str, expected: str) -> None:
        self._problems.append(Problem(f"{self._place}{name}", expected))

    def get(self, name: str) -> object:
        self._known.append(name)
        return self._table.get(name)

    def inner(self, name: str, value: object, example: str) -> "Fields | None":
        """The members of an inner table; `closed` takes its problems over."""
        if isinstance(value, Mapping):
            return Fields(value, f"{self._place}{name}.")
        self.fault(name, f"expected a table like {example}")
        return None

    def closed(self, inner: "Fields") -> None:
        self._problems += inner.problems() + inner.unknown()

    def choice(self, name: str, allowed: tuple[Word, ...], default: Word | None = None) -> Word:
        value = self.get(name)
        if value is None and default is not None:
            return default
        chosen = next((word for word in allowed if word == value), None)
        if chosen is None:
            self.fault(name, f"expected one of {', '.join(allowed)}, found {value!r}")
        return chosen or allowed[0]

    def text(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > 2_048 or not value.isprintable():
            self.fault(name, "expected printable text of at most 2,048 characters")
            return ""
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fault(name, "expected true or false")
        return False

    def number(self, name: str, default: int, maximum: int, least: int = 0) -> int:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= maximum:
            self.fault(name, f"expected an integer from {least} to {maximum}")
            return default
        return value

    def duration(self, name: str, default: int) -> int:
        value = self.get(name)
        if value is None:
            return default
        length = duration_ms(value) if isinstance(value, str) else None
        if length is None or length > DURATION_MAX_MS:
            self.fault(name, f'expected a duration like "30s" or "24h", at most ten years, found {value!r}')
            return default
        return length

    def table(self, name: str) -> Mapping[str, JSON] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fault(name, "expected a table")
            return None
        return self.json(name, value)

    def json(self, name: str, value: Mapping[str, JSON]) -> Mapping[str, JSON] | None:
        """A table of JSON values; None, and a problem, for anything else."""
        try:
            canonical(value)
        except CanonicalError as error:
            self.fault(name, f"expected JSON values: {error}")
            return None
        return value

    def pattern(self, name: str) -> Pattern | None:
        """What an answer must be like; its integer member `status` is the answer's status."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not value:
            self.fault(name, 'expected a table like { "data.0.id" = "string" }')
            return None
        status = value.get("status")
        if isinstance(status, bool) or not isinstance(status, int):
            status = 0
        elif not 200 <= status <= 599:
            self.fault(name, f"expected a status from 200 to 599, found {status}")
        members = {path: wanted for path, wanted in value.items() if path != "status" or not status}
        if self.json(name, members) is None:
            return None
        return Pattern(status, tuple(sorted(members.items())))
