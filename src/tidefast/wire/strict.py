"""JSON as the wire takes it: one meaning per text, or a refusal.

Stricter than most readers: UTF-8 only, no byte order mark, no duplicate member names, no NaN or infinity, at most 32
levels, at most 10,000 members, no lone surrogates, no integer that a double can't hold. `read_object` raises
`BadInput`, which never leaves the wire room.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tidefast.protocol.canonical import DEPTH_MAX, JSON, CanonicalError, LoneSurrogate, canonical

MEMBERS_MAX = 10_000
# Strings are passed over whole; possessive, and with the closing quote optional, so that no text costs two passes.
_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?+|[\[\]{}]', re.DOTALL)


class BadInput(Exception):
    """What was sent can't be taken: a reason that programs know, a sentence for people, facts."""

    def __init__(self, reason: str, detail: str, **facts: JSON) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.facts = reason, detail, facts


def read_object(body: bytes) -> dict[str, JSON]:
    """The members of a JSON object. Raises `BadInput`."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput("encoding_invalid", f"byte {error.start} is not UTF-8", offset=error.start) from error
    if not text.strip(" \t\r\n"):
        raise BadInput("body_missing", "the body is empty; send a JSON object")
    _check_depth(text)
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        raise BadInput("json_invalid", f"not JSON at byte {offset}: {error.msg}", offset=offset) from error
    except ValueError as error:  # an integer too long for Python to read
        raise BadInput("json_invalid", "a number has too many digits") from error
    if not isinstance(value, dict):
        raise BadInput("json_not_object", f"the body is {_article(value)}; send a JSON object")
    if text.count(":") > MEMBERS_MAX and _members(value) > MEMBERS_MAX:
        raise BadInput("json_too_wide", f"more than {MEMBERS_MAX} members", limit=MEMBERS_MAX)
    return value


def canonical_text(value: JSON, where: str) -> str:
    """The canonical text of a decoded value. Raises `BadInput` for what has none."""
    try:
        return canonical(value)
    except LoneSurrogate as error:
        raise BadInput("text_invalid", f"`{where}`: {error}", field=where) from error
    except CanonicalError as error:
        raise BadInput("field_range", f"`{where}`: {error}", field=where) from error


def type_name(value: JSON) -> str:
    """What JSON calls this value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _article(value: JSON) -> str:
    name = type_name(value)
    return name if name == "null" else f"{'an' if name[0] in 'aio' else 'a'} {name}"


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEPTH_MAX:
        return
    depth = 0
    for mark in _MARKS.finditer(text):
        sign = text[mark.start()]
        if sign in "[{":
            depth += 1
            if depth > DEPTH_MAX:
                raise BadInput("json_too_deep", f"nested deeper than {DEPTH_MAX} levels", limit=DEPTH_MAX)
        elif sign in "]}":
            depth -= 1


def _members(value: JSON) -> int:
    """How many members the objects in a value have. The depth is bounded before this is asked."""
    if isinstance(value, Mapping):
        return len(value) + sum(_members(member) for member in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(_members(member) for member in value)
    return 0


def _unique(members: list[tuple[str, JSON]]) -> dict[str, JSON]:
    record = dict(members)
    if len(record) != len(members):
        seen: set[str] = set()
        twice = next(name for name, _ in members if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        shown = twice[:64].encode("ascii", "backslashreplace").decode()
        raise BadInput("json_duplicate", f"the member `{shown}` stands twice", field=shown)
    return record


def _no_constant(name: str) -> NoReturn:
    raise BadInput("json_invalid", f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
