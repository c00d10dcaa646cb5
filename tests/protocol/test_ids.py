"""Names, keys and epochs: pinned values, and no two things that share a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidefast.protocol.ids import (
    DERIVED_LENGTH_MAX,
    EPOCHS_PER_INCARNATION,
    ID_LENGTH_MAX,
    Epoch,
    RunId,
    StepId,
    derived_id,
    incarnation_of,
    is_derived_id,
    is_id,
    next_epoch,
    spell_key,
    step_key,
)

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,12}", fullmatch=True)
NAMESPACES = st.binary(min_size=0, max_size=20)
KEY = "0509a2b990d3073f98fe715bf21b0f74"


def test_the_key_of_a_known_step_never_changes() -> None:
    """Golden: another value here would charge every customer with a step in doubt again."""
    assert step_key(b"0123456789abcdef", RunId("r1"), StepId("pay")) == KEY
    assert spell_key(KEY, "hex") == KEY
    assert spell_key(KEY, "uuid").replace("-", "") == KEY and spell_key(KEY, "uuid").count("-") == 4


@given(NAMESPACES, NAMES, NAMES, NAMESPACES, NAMES, NAMES)
def test_two_steps_share_a_key_only_if_all_three_parts_are_equal(
    a: bytes, run_a: str, step_a: str, b: bytes, run_b: str, step_b: str
) -> None:
    one, other = step_key(a, RunId(run_a), StepId(step_a)), step_key(b, RunId(run_b), StepId(step_b))
    assert (one == other) == ((a, run_a, step_a) == (b, run_b, step_b))


@given(NAMESPACES, st.text("abc~.-_", max_size=8), st.data())
def test_moving_the_border_between_run_and_step_gives_another_key(
    namespace: bytes, text: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(text)))
    other = data.draw(st.integers(0, len(text)).filter(lambda n: n != place)) if text else None
    one = step_key(namespace, RunId(text[:place]), StepId(text[place:]))
    if other is not None:
        assert one != step_key(namespace, RunId(text[:other]), StepId(text[other:]))
    assert len(one) == 32 and set(one) <= set("0123456789abcdef")


@given(NAMES, st.from_regex(r"[a-z0-9]{1,12}", fullmatch=True))
def test_a_derived_name_is_none_that_a_caller_may_give(name: str, word: str) -> None:
    derived = derived_id(StepId(name), word)
    assert is_id(name) and is_derived_id(derived) and not is_id(derived) and not is_derived_id(name)


@pytest.mark.parametrize(
    "text,is_name",
    [
        ("a", True),
        ("_a", True),
        ("A-1.b_c", True),
        ("a" * ID_LENGTH_MAX, True),
        ("a" * (ID_LENGTH_MAX + 1), False),
        ("", False),
        (".a", False),
        ("-a", False),
        ("a b", False),
        ("a\n", False),
        ("a/b", False),
        ("pay~undo", False),
        ("é", False),
        ("١", False),
    ],
)
def test_what_a_caller_may_call_a_thing(text: str, is_name: bool) -> None:
    assert is_id(text) is is_name


@pytest.mark.parametrize(
    "text,is_derived",
    [
        ("pay~undo", True),
        ("plan~0", True),
        ("pay~undo~undo", True),
        ("a" * 128 + "~undo", True),
        ("a" * 128 + "~abcdefghijkl" * 4, False),
        ("~undo", False),
        ("pay~", False),
        ("pay~UNDO", False),
        ("pay", False),
        ("pay~undo\n", False),
    ],
)
def test_what_a_derived_name_looks_like(text: str, is_derived: bool) -> None:
    assert is_derived_id(text) is is_derived and (not is_derived or len(text) <= DERIVED_LENGTH_MAX)


@given(st.integers(0, 2**40), st.integers(0, 100))
def test_the_next_epoch_is_above_the_newest_and_above_all_of_older_incarnations(newest: int, incarnation: int) -> None:
    epoch = next_epoch(Epoch(newest), incarnation)
    assert epoch > newest and epoch > incarnation * EPOCHS_PER_INCARNATION
    assert incarnation_of(epoch) >= incarnation
