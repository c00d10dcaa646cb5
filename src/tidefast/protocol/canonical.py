"""One spelling per JSON value, so that equality and digests mean the same everywhere.

The form is RFC 8785 (JSON Canonicalization Scheme): members sorted by UTF-16 code units, no white space, numbers as
ECMAScript prints them. Values outside I-JSON (NaN, infinities, integers beyond 2**53 - 1, lone surrogates, keys that
are not strings) are refused with `CanonicalError`, never coerced.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

INTEGER_MAX = 2**53 - 1  # RFC 7493 (I-JSON): the largest integer that every JSON reader keeps exact.
DEPTH_MAX = 32
BODY_BYTES_MAX = 1_048_576  # arguments, values, states and results; larger things belong where the run only names them

_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
).encode
_SURROGATE = re.compile("[\ud800-\udfff]")
_quote = json.encoder.encode_basestring


class CanonicalError(ValueError):
    """The value has no canonical form; the message says which part and why."""


class LoneSurrogate(CanonicalError):
    """A string holds half of a UTF-16 pair, which no UTF-8 text can carry."""


def canonical(value: JSON) -> str:
    """The RFC 8785 text of a JSON value. Raises `CanonicalError` for a value that is not I-JSON."""
    text = _encode(value) if _is_plain(value, DEPTH_MAX) else _spell(value)
    if not text.isascii() and _SURROGATE.search(text):
        raise LoneSurrogate("a string holds a lone surrogate, which no UTF-8 text can carry")
    return text


def text_json(text: str) -> str:
    """The canonical text of a string. A lone surrogate becomes a question mark: free text must never be refused."""
    return _quote(text if text.isascii() else text.encode(errors="replace").decode())


def digest(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, as 64 hex digits. Raises `CanonicalError` for a lone surrogate."""
    try:
        return hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise LoneSurrogate("a string holds a lone surrogate, which no UTF-8 text can carry") from error


def call_digest(tool: str, args_json: str) -> str:
    """What makes two calls of a step the same call: the tool's name and the canonical arguments."""
    return digest(f"{len(tool)}:{tool}{args_json}")


def _is_plain(value: JSON, depth: int) -> bool:
    """True if the C encoder already spells this value canonically. Checks the value's types on the way."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return _is_exact(value)  # type: ignore[arg-type]
    if kind is float:
        if math.isfinite(value):  # type: ignore[arg-type]
            return False
        raise CanonicalError("NaN and infinities are not JSON numbers")
    if depth == 0:
        raise CanonicalError(f"the value is nested deeper than {DEPTH_MAX} levels")
    if kind is dict:
        return _is_plain_object(value, depth)  # type: ignore[arg-type]
    if kind is list or kind is tuple:
        plain = True
        for member in value:  # type: ignore[union-attr]
            if type(member) is not str:
                plain = _is_plain(member, depth - 1) and plain
        return plain
    raise CanonicalError(f"a {kind.__name__} is not a JSON value")


def _is_plain_object(value: Mapping[str, JSON], depth: int) -> bool:
    plain = True
    for key, member in value.items():
        if type(key) is not str:
            raise CanonicalError(f"the member name {key!r} is not a string")
        if not key.isascii() and max(key) >= "\ud800":
            plain = False
        if type(member) is not str:  # the commonest member costs no call
            plain = _is_plain(member, depth - 1) and plain
    return plain


def _is_exact(value: int) -> bool:
    if -INTEGER_MAX <= value <= INTEGER_MAX:
        return True
    raise CanonicalError(f"the integer {str(value)[:24]} is beyond 2**53 - 1; send it as a string")


def _spell(value: JSON) -> str:
    """The slow road: values that hold fractions, or names that UTF-16 sorts otherwise than Unicode does."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        members = sorted(value.items(), key=lambda member: member[0].encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{_encode(name)}:{_spell(member)}" for name, member in members) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(_spell(member) for member in value) + "]"
    return _encode(value)


def _number(value: float) -> str:
    """A double as ECMAScript's Number::toString prints it (ECMA-262, 6.1.6.1.20), which RFC 8785 asks for."""
    if value == 0:
        return "0"
    if INTEGER_MAX < abs(value) < 1e21:  # would be spelled as an integer, which no reader may take for exact
        raise CanonicalError(f"the number {value!r} is beyond 2**53 - 1; send it as a string")
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    text, point = "".join(map(str, digits)), len(digits) + int(exponent)
    text = text.rstrip("0")
    if len(text) <= point <= 21:
        body = text + "0" * (point - len(text))
    elif 0 < point <= 21:
        body = f"{text[:point]}.{text[point:]}"
    elif -6 < point <= 0:
        body = "0." + "0" * -point + text
    else:
        mantissa = text[0] + ("." + text[1:] if len(text) > 1 else "")
        body = f"{mantissa}e{'+' if point > 0 else '-'}{abs(point - 1)}"
    return ("-" if sign else "") + body
