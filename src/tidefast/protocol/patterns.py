"""Patterns and templates: what a contract may say about an answer, and how it fills in an address or arguments.

A pattern is matched on the whole answer: a status, and members of the body by dotted path, each of which must have
exactly the value named, or be of the kind that a word names. A template is JSON whose texts may hold placeholders; a
text that is one placeholder becomes the value it names, with its type.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidefast.protocol.canonical import JSON, CanonicalError, canonical

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "object": (Mapping,),
    "list": (list,),
    "null": (type(None),),
}
WORDS = ("string", "integer", "number", "boolean", "object", "list", "null", "empty", "missing", "any")


class RenderError(ValueError):
    """The arguments do not fit the contract's templates; the message names the place."""


class Pattern(NamedTuple):
    """One kind of answer: a status (0: not said), and members of the answer's body.

    A member's value is what the member must equal, or one of `WORDS` for its kind; `{"equals": …}` is for a text that
    happens to be such a word.
    """

    status: int = 0
    members: tuple[tuple[str, JSON], ...] = ()

    def matches(self, status: int, body: JSON) -> bool:
        """Whether an answer is of this kind. A pattern without a status matches any."""
        return self.status in (0, status) and all(_has(body, path, wanted) for path, wanted in self.members)

    def filled(self, sources: Mapping[str, JSON]) -> "Pattern":
        """This pattern with the placeholders of its values filled in. Raises `RenderError`."""
        return Pattern(self.status, tuple((path, fill(wanted, sources)) for path, wanted in self.members))

    def to_json(self) -> JSON:
        """What a contract's stored text holds of it."""
        return [self.status, [list(member) for member in self.members]]


def member(value: JSON, path: str) -> tuple[bool, JSON]:
    """(found, value) of a dotted path; a number is a place in a list."""
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and part.isascii() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def _has(body: JSON, path: str, wanted: JSON) -> bool:
    """Whether a member is what a pattern wants: true is not 1, while 1 and 1.0 are one JSON number."""
    found, value = member(body, path)
    if wanted == "missing":
        return not found
    if isinstance(wanted, str) and wanted in WORDS:
        return found and _is_kind(wanted, value)
    if isinstance(wanted, Mapping) and set(wanted) == {"equals"}:
        wanted = wanted["equals"]
    try:
        return found and canonical(value) == canonical(wanted)
    except CanonicalError:  # what the provider sent is no JSON value that a contract could name
        return False


def _is_kind(word: str, value: JSON) -> bool:
    if word == "any":
        return True
    if word == "empty":
        return isinstance(value, list | Mapping | str) and len(value) == 0
    if isinstance(value, bool):
        return word == "boolean"
    if word == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _KINDS.get(word, ())) and value != ""


def placeholders(template: JSON) -> list[str]:
    """The names that a template's texts ask for."""
    if isinstance(template, str):
        return PLACEHOLDER.findall(template)
    if isinstance(template, Mapping):
        return [name for value in template.values() for name in placeholders(value)]
    if isinstance(template, Sequence):
        return [name for value in template for name in placeholders(value)]
    return []


def fill(template: JSON, sources: Mapping[str, JSON]) -> JSON:
    """A template's value: a text that is one placeholder becomes the value it names, with its type."""
    if isinstance(template, Mapping):
        return {name: fill(value, sources) for name, value in template.items()}
    if isinstance(template, list):
        return [fill(value, sources) for value in template]
    if not isinstance(template, str):
        return template
    whole = PLACEHOLDER.fullmatch(template)
    if whole:
        return _source(whole.group(1), sources)
    return PLACEHOLDER.sub(lambda hit: str(_source(hit.group(1), sources)), template)


def _source(name: str, sources: Mapping[str, JSON]) -> JSON:
    found, value = member(sources, name)
    if not found:
        raise RenderError(f"the contract needs {name}, which the step does not have")
    return value
