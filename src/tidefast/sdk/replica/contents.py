"""Where contents come from and go to: the authority's blobs, by digest.

Everything that comes is hashed before it is used. A call that fails is tried again by whoever asks, because what has
arrived by then isn't asked for again.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from tidefast.protocol.workspace import Manifest


class Unreachable(Exception):
    """The authority doesn't answer, or not with what was asked for. What was done so far stays done."""


class Wanted(NamedTuple):
    """A content by its SHA-256, and its length in bytes."""

    digest: str
    size: int


class Contents(Protocol):
    """The authority's contents of one workspace."""

    async def manifest(self, index: int) -> Manifest:
        """The committed content at an index of the log. Raises `Unreachable`."""
        ...

    def fetch(self, wanted: Sequence[Wanted]) -> AsyncIterator[tuple[str, bytes]]:
        """Small contents, each whole, in any order. Raises `Unreachable`."""
        ...

    def stream(self, wanted: Wanted) -> AsyncIterator[bytes]:
        """A large content in pieces. Raises `Unreachable`."""
        ...

    async def upload(self, wanted: Wanted, pieces: Callable[[], AsyncIterator[bytes]]) -> None:
        """Give the authority a content, read anew each time it is sent. Durable there on return.

        Raises `Unreachable`.
        """
        ...


def checked(digest: str, content: bytes) -> bytes:
    """The content, if it is the one that was asked for. Raises `Unreachable`."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise Unreachable(f"the authority sent another content than {digest[:12]}")
    return content
