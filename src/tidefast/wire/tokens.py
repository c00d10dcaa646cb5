"""Lease tokens: capabilities that say who was granted which epoch of which run.

A token is `tfl1.` and the base64url of a payload and its HMAC-SHA256, over the authority's namespace, run, epoch and
holder. There is one algorithm, and a token can't name another. A valid signature proves that this authority granted the
lease; it says nothing about whether the lease is live, which is the fence's question and asked anew each time.

Checking works by minting: the payload is read, the token that it would have is made, and the two are compared in
constant time. So each right has one spelling, and a token changed in any character is refused.
"""

import base64
import binascii
import hmac

from tidefast.protocol.ids import DERIVED_LENGTH_MAX, Epoch, RunId
from tidefast.protocol.records import Right

PREFIX = "tfl1."
SECRET_LENGTH = 32
HOLDER_LENGTH_MAX = 128
TOKEN_LENGTH_MAX = 512  # the longest that can be minted has 444 characters
EPOCH_MAX = 2**63 - 1  # what the stores can hold
_MAC_LENGTH = 32
_CONTEXT = b"tidefast lease token 1\0"
REPLICA = b"tidefast replica token 1\0"  # of a right over a workspace: no run's token is one, nor the other way round


def mint(secret: bytes, namespace: bytes, right: Right, context: bytes = _CONTEXT) -> str:
    """The token of a right. Raises `ValueError` for a right that no grant can have given."""
    payload = _payload(right)
    mac = hmac.digest(secret, b"".join((context, len(namespace).to_bytes(4, "big"), namespace, payload)), "sha256")
    return PREFIX + base64.urlsafe_b64encode(payload + mac).rstrip(b"=").decode()


def verify(secret: bytes, namespace: bytes, token: str, context: bytes = _CONTEXT) -> Right | None:
    """The right that a token proves, None if this secret and namespace didn't make it. Says nothing about liveness."""
    right = peek(token)
    if right is None or not hmac.compare_digest(mint(secret, namespace, right, context), token):
        return None
    return right


def peek(token: str) -> Right | None:
    """What a token claims, unproved: for a client that needs the run's name to find the address. Never a check."""
    if len(token) > TOKEN_LENGTH_MAX or not token.startswith(PREFIX) or not token.isascii():
        return None
    body = token[len(PREFIX) :]
    try:
        payload = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))[:-_MAC_LENGTH]
        run_end = 9 + payload[8]
        epoch = int.from_bytes(payload[:8], "big")
        right = Right(RunId(payload[9:run_end].decode("ascii")), Epoch(epoch), payload[run_end:].decode("ascii"))
        return right if _payload(right) == payload else None
    except (binascii.Error, IndexError, ValueError):
        return None


def is_holder(text: str) -> bool:
    """Whether this can name a holder: 1 to 128 visible ASCII characters."""
    return 0 < len(text) <= HOLDER_LENGTH_MAX and text.isascii() and text.isprintable() and " " not in text


def _payload(right: Right) -> bytes:
    run, holder = right.run_id.encode("ascii"), right.holder.encode("ascii")
    if not 0 < len(run) <= DERIVED_LENGTH_MAX or not is_holder(right.holder) or not 0 < right.epoch <= EPOCH_MAX:
        raise ValueError("a right has a run, an epoch from 1 and a holder of 1 to 128 visible ASCII characters")
    return b"".join((right.epoch.to_bytes(8, "big"), bytes((len(run),)), run, holder))
