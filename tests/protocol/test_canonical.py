"""Canonical JSON against RFC 8785: order of names by UTF-16, numbers as ECMAScript prints them, one text per value."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidefast.protocol.canonical import (
    DEPTH_MAX,
    INTEGER_MAX,
    CanonicalError,
    call_digest,
    canonical,
    digest,
    text_json,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: not INTEGER_MAX < abs(value) < 1e21)
NUMBERS = st.integers(-INTEGER_MAX, INTEGER_MAX) | FLOATS
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)

# RFC 8785, appendix B: the bits of a double and what ECMAScript prints. Its five rows between 2**53 - 1 and 1e21 are
# refused here, because their text is an integer that no reader may take for exact.
NUMBER_VECTORS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


@pytest.mark.parametrize("bits,text", NUMBER_VECTORS)
def test_numbers_are_spelled_as_the_rfc_lists_them(bits: str, text: str) -> None:
    assert canonical(struct.unpack(">d", bytes.fromhex(bits))[0]) == text


def test_names_are_sorted_by_utf_16_code_units_and_not_by_code_points() -> None:
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    found = list(json.loads(canonical(dict.fromkeys(names))))
    assert found == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


def test_the_rfcs_own_example_comes_out_to_the_letter() -> None:
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/",
        "literals": [None, True, False],
    }
    assert canonical(value) == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )


@given(VALUES)
def test_the_text_reads_back_as_the_value_and_is_its_own_canonical_form(value: Any) -> None:
    text = canonical(value)
    again = json.loads(text)
    assert canonical(again) == text and same(again, value)


@given(VALUES, VALUES)
def test_equal_values_and_only_they_have_equal_texts(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == same(one, other)


@given(st.dictionaries(TEXT, VALUES, max_size=5), st.randoms())
def test_the_order_in_which_members_came_makes_no_difference(value: dict[str, Any], random: Any) -> None:
    members = list(value.items())
    random.shuffle(members)
    text = canonical(value)
    assert canonical(dict(members)) == text
    names = list(json.loads(text))
    assert names == sorted(names, key=lambda name: name.encode("utf-16-be"))


@given(FLOATS)
def test_a_numbers_text_is_the_same_double_again(value: float) -> None:
    assert float(canonical(value)) == value


@given(TEXT)
def test_a_texts_own_spelling_is_the_one_inside_values(text: str) -> None:
    assert text_json(text) == canonical(text) == canonical([text])[1:-1]


def same(one: Any, other: Any) -> bool:
    """JSON equality: true is not 1, 1.0 is 1, order of members doesn't count."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    return type(one) is type(other) and bool(one == other)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        INTEGER_MAX + 1,
        -INTEGER_MAX - 1,
        float(INTEGER_MAX + 1),
        -float(INTEGER_MAX + 1),
        999999999999999900000.0,
        {1: 2},
        {"a": {None: 1}},
        {1, 2},
        b"bytes",
        NotImplemented,
        [Ellipsis],
        nested(DEPTH_MAX + 1),
    ],
    ids=repr,
)
def test_what_is_not_i_json_is_refused_and_never_coerced(value: Any) -> None:
    with pytest.raises(CanonicalError):
        canonical(value)


def test_the_deepest_allowed_value_the_largest_integer_and_tuples_are_taken() -> None:
    assert canonical(nested(DEPTH_MAX)).count("[") == DEPTH_MAX
    assert canonical((INTEGER_MAX, -INTEGER_MAX, 1.5)) == f"[{INTEGER_MAX},-{INTEGER_MAX},1.5]"
    assert canonical({"\U0001f600": (1,), "\uffff": "x"}) == '{"\U0001f600":[1],"\uffff":"x"}'


def test_a_digest_of_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(CanonicalError):
        digest("\ud800")


@given(TEXT, TEXT, TEXT, TEXT)
def test_two_calls_share_a_digest_only_if_tool_and_arguments_are_equal(a: str, b: str, c: str, d: str) -> None:
    assert (call_digest(a, b) == call_digest(c, d)) == ((a, b) == (c, d))


def test_the_digest_of_a_known_call_never_changes() -> None:
    assert call_digest("charge", '{"cents":50}') == digest('6:charge{"cents":50}')
    assert call_digest("charge", "{}") == "d43e48e9548be266152e55cd97609daa5ae2fe222d6bdc115d397da10013f8cb"
