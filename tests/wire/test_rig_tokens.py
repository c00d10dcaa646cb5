"""A million changed tokens, and none is taken; a checker that forgets the signature takes many."""

import base64
import random
from collections.abc import Callable, Iterator

import pytest

from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.records import Right
from tidefast.wire import tokens

SECRET, OTHER, NAMESPACE = bytes(range(7, 39)), bytes(range(8, 40)), b"n" * 16
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=+/ .\n\x00é１"
Verify = Callable[[bytes, bytes, str], Right | None]


def body_of(token: str) -> bytearray:
    body = token.removeprefix(tokens.PREFIX)
    return bytearray(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))


def spelled(body: bytes) -> str:
    return tokens.PREFIX + base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def changed(draw: random.Random, token: str, right: Right) -> str:
    """A token changed in one of the ways that somebody would try."""
    place, kind = draw.randrange(len(token)), draw.randrange(12)
    match kind:
        case 0:
            return token[:place] + draw.choice(ALPHABET) + token[place + 1 :]
        case 1:
            return token[:place] + draw.choice(ALPHABET) + token[place:]
        case 2:
            return token[:place] + token[place + 1 :]
        case 3:
            return token[:place]
        case 4:
            return token + "".join(draw.choices(ALPHABET, k=draw.randrange(1, 9)))
        case 5:  # one bit
            body = body_of(token)
            body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
            return spelled(body)
        case 6:  # a higher epoch under the old signature
            body = body_of(token)
            body[:8] = (right.epoch + draw.randrange(1, 2**20)).to_bytes(8, "big")
            return spelled(body)
        case 7:  # another run, another holder
            return spelled(bytes(body_of(tokens.mint(OTHER, NAMESPACE, right)))[: -draw.randrange(1, 33)])
        case 8:  # an empty, a zero or a made-up signature
            mac = draw.choice([b"", bytes(32), draw.randbytes(32)])
            return spelled(bytes(body_of(token))[:-32] + mac)
        case 9:  # signed by somebody else, or for another authority
            secret, space = draw.choice([(OTHER, NAMESPACE), (SECRET, b"m" * 16), (b"", NAMESPACE)])
            return tokens.mint(secret, space, right)
        case 10:  # the borders between the parts moved
            body = body_of(token)
            body[8] = (body[8] + draw.randrange(1, 256)) % 256
            return spelled(body)
        case _:
            return draw.choice([token.upper(), token.lower(), token[5:], f" {token}", token[::-1], "tfl2." + token[5:]])


def mutations(count: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(15)
    for number in range(count):
        right = Right(RunId(f"r-{number % 97}"), Epoch(2**32 + number), draw.choice(["w", "w-1f3a", "h" * 128]))
        token = tokens.mint(SECRET, NAMESPACE, right)
        yield token, changed(draw, token, right)


def accepted(verify: Verify, count: int) -> int:
    """How many changed tokens are taken. What is still the same token doesn't count, and must be taken."""
    taken = 0
    for token, mutated in mutations(count):
        if mutated != token:
            taken += verify(SECRET, NAMESPACE, mutated) is not None
        else:
            assert verify(SECRET, NAMESPACE, mutated) is not None
    return taken


def without_signature(secret: bytes, namespace: bytes, token: str) -> Right | None:
    return tokens.peek(token)


def with_part_of_it(secret: bytes, namespace: bytes, token: str) -> Right | None:
    """Takes the signature for as long as it is: an empty one fits."""
    right = tokens.peek(token)
    if right is None:
        return None
    sent, own = bytes(body_of(token)), bytes(body_of(tokens.mint(secret, namespace, right)))
    return right if own[-32:].startswith(sent[len(own) - 32 :]) else None


def test_no_changed_token_is_taken() -> None:
    assert accepted(tokens.verify, 10_000) == 0


@pytest.mark.parametrize("mutant", [without_signature, with_part_of_it])
def test_a_checker_that_neglects_the_signature_is_found(mutant: Verify) -> None:
    assert accepted(mutant, 3_000) > 0


@pytest.mark.rig
def test_a_million_changed_tokens_and_none_is_taken() -> None:
    assert accepted(tokens.verify, 1_000_000) == 0
