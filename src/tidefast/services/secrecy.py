"""Keeps what a contract calls secret out of what people are shown: views of the log, receipts, messages.

The stored request alone holds it, because a replay sends that. A secret is hidden where its path says, and wherever its
text turns up: in the rendered request, percent-encoded in a url, echoed in an answer.
"""

import json
import urllib.parse
from collections.abc import Iterator, Sequence

from tidefast.protocol.canonical import JSON, canonical
from tidefast.protocol.patterns import member

MASK = "[secret]"
TEXT_LENGTH_MIN = 4  # a shorter text turns up by chance; it is hidden at its own place only


def masked(data_json: str, paths: Sequence[str], args: JSON) -> str:
    """Canonical text of an event's data without the secrets of the call whose arguments these are."""
    values = list(_values(paths, args))
    if not values:
        return data_json
    data: JSON = json.loads(data_json)
    texts = sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)
    shown = _without(data, texts, [value for value in values if not isinstance(value, str)])
    if isinstance(shown, dict) and "args" in shown:
        for path in paths:
            shown["args"] = _hidden(shown["args"], path.split("."))
    return canonical(shown)


def _values(paths: Sequence[str], args: JSON) -> Iterator[JSON]:
    """The scalars that stand at the paths or below them."""
    left: list[JSON] = [value for found, value in (member(args, path) for path in paths) if found]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif value is not None and not isinstance(value, bool):
            yield value


def _forms(value: JSON) -> Iterator[str]:
    """How a value may be spelled inside a text."""
    text = value if isinstance(value, str) else canonical(value)
    if len(text) >= TEXT_LENGTH_MIN:
        yield from (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        yield from (urllib.parse.quote(text, safe=""), urllib.parse.quote_plus(text))


def _without(value: JSON, texts: Sequence[str], numbers: Sequence[JSON]) -> JSON:
    if isinstance(value, dict):
        return {name: _without(inner, texts, numbers) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without(inner, texts, numbers) for inner in value]
    if isinstance(value, str):
        for text in texts:
            value = value.replace(text, MASK)
        return value
    is_secret = not isinstance(value, bool) and value is not None and len(canonical(value)) >= TEXT_LENGTH_MIN
    return MASK if is_secret and value in numbers else value


def _hidden(value: JSON, path: Sequence[str]) -> JSON:
    """The value with whatever stands at a path replaced."""
    if not path:
        return MASK
    if isinstance(value, dict) and path[0] in value:
        return {**value, path[0]: _hidden(value[path[0]], path[1:])}
    if isinstance(value, list) and path[0].isdecimal() and int(path[0]) < len(value):
        place = int(path[0])
        return [*value[:place], _hidden(value[place], path[1:]), *value[place + 1 :]]
    return value
