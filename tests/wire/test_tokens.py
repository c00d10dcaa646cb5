"""Lease tokens: what was minted is taken, and nothing else."""

import base64
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.records import Right
from tidefast.wire import tokens

SECRET, NAMESPACE = bytes(range(32)), b"n" * 16
RIGHT = Right(RunId("run-1"), Epoch(2**32 + 7), "worker-1")
TOKEN = tokens.mint(SECRET, NAMESPACE, RIGHT)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.=+/ \n\0é"

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)
rights = st.builds(
    Right, names.map(RunId), st.integers(1, 2**63 - 1).map(Epoch), st.text("abc:@/~-", min_size=1, max_size=128)
)


@given(rights)
def test_a_minted_token_proves_its_right(right: Right) -> None:
    token = tokens.mint(SECRET, NAMESPACE, right)
    assert len(token) <= tokens.TOKEN_LENGTH_MAX
    assert tokens.verify(SECRET, NAMESPACE, token) == right
    assert tokens.peek(token) == right


@given(rights, st.integers(0, 500), st.sampled_from(ALPHABET))
def test_a_token_changed_in_one_character_is_refused(right: Right, place: int, sign: str) -> None:
    token = tokens.mint(SECRET, NAMESPACE, right)
    place %= len(token)
    changed = token[:place] + sign + token[place + 1 :]
    assert changed == token or tokens.verify(SECRET, NAMESPACE, changed) is None


def test_every_single_character_change_of_one_token_is_refused() -> None:
    for place in range(len(TOKEN)):
        for sign in ALPHABET:
            changed = TOKEN[:place] + sign + TOKEN[place + 1 :]
            assert changed == TOKEN or tokens.verify(SECRET, NAMESPACE, changed) is None


@given(st.text(max_size=600) | st.binary(max_size=400).map(lambda raw: tokens.PREFIX + base64.b64encode(raw).decode()))
def test_what_was_never_minted_is_refused_and_never_raises(token: str) -> None:
    assert tokens.verify(SECRET, NAMESPACE, token) is None


@pytest.mark.parametrize(
    "other",
    [
        RIGHT._replace(run_id=RunId("run-2")),
        RIGHT._replace(epoch=Epoch(RIGHT.epoch + 1)),
        RIGHT._replace(holder="worker-2"),
    ],
)
def test_a_payload_with_the_mac_of_another_right_is_refused(other: Right) -> None:
    def raw(token: str) -> bytes:
        body = token.removeprefix(tokens.PREFIX)
        return base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))

    forged = raw(tokens.mint(SECRET, NAMESPACE, other))[:-32] + raw(TOKEN)[-32:]
    assert (
        tokens.verify(SECRET, NAMESPACE, tokens.PREFIX + base64.urlsafe_b64encode(forged).decode().rstrip("=")) is None
    )


def test_another_secret_or_namespace_is_refused() -> None:
    assert tokens.verify(bytes(32), NAMESPACE, TOKEN) is None
    assert tokens.verify(SECRET, b"m" * 16, TOKEN) is None
    assert tokens.verify(SECRET, NAMESPACE[:-1], TOKEN) is None


@pytest.mark.parametrize(
    "token",
    [
        "", "tfl1.", "tfl2." + TOKEN[5:], TOKEN + "=", TOKEN + "A", TOKEN[:-1], " " + TOKEN, TOKEN + " ", TOKEN[5:],
        "eyJhbGciOiJub25lIn0.eyJydW4iOiJydW4tMSJ9.", TOKEN.upper(), "tfl1." + "A" * 507, "tfl1.é",
    ],
)  # fmt: skip
def test_other_spellings_are_refused(token: str) -> None:
    assert tokens.verify(SECRET, NAMESPACE, token) is None


def test_a_token_of_64_kib_costs_nothing() -> None:
    began = time.perf_counter()
    assert tokens.verify(SECRET, NAMESPACE, "tfl1." + "A" * 65_536) is None
    assert time.perf_counter() - began < 0.005


@pytest.mark.parametrize("holder", ["", "a b", "x" * 129, "é", "a\n"])
def test_a_right_that_no_grant_can_give_is_not_minted(holder: str) -> None:
    with pytest.raises(ValueError):
        tokens.mint(SECRET, NAMESPACE, RIGHT._replace(holder=holder))
