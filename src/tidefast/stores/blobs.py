"""Contents by digest: what a store of blobs owes, whether it is a file here or a bucket elsewhere.

A blob never changes, so that writing it twice is harmless and reading it needs no fence. What `write` or `finish`
returned from is durable: only then may a join name it. Nothing here knows who names a blob; whoever deletes has looked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

PIECE_BYTES = 256 * 1024


class BlobRefused(Exception):
    """A content is not taken: `mismatch` (other bytes than its digest says), `too_large` or `full`. Nothing is kept."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Upload(Protocol):
    """A content on its way in, in pieces of any size. Not seen by anyone before `finish`."""

    def append(self, piece: bytes) -> None: ...

    def finish(self, digest: str) -> int:
        """Keep it, durably; its length. Raises `BlobRefused`."""

    def discard(self) -> None: ...


class BlobStore(Protocol):
    """Blocking. Any thread may call any of it."""

    def missing(self, digests: Iterable[str]) -> set[str]:
        """Those that aren't here. The others count as touched now, so that a sweep leaves them for a while."""

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Keep small contents, durably and together. Raises `BlobRefused`."""

    def begin(self) -> Upload: ...

    def size(self, digest: str) -> int | None:
        """Its length in bytes; None if it isn't here."""

    def read(self, digest: str) -> Iterator[bytes]:
        """Its bytes in pieces. Raises `KeyError` if it isn't here."""

    def untouched_since(self, at_ms: int, after: str, limit: int) -> Sequence[str]:
        """Digests that were neither written nor asked for since, in order of digests, after the one given."""

    def delete(self, digests: Iterable[str]) -> None: ...

    def close(self) -> None: ...
