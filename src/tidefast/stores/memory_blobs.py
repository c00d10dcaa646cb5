"""Blobs in a dict: for tests, the simulator and programs that keep nothing."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tidefast.stores.blobs import PIECE_BYTES, BlobRefused


class MemoryBlobs:
    """See `BlobStore`."""

    def __init__(self, *, bytes_max: int = 0, clock_ms: Callable[[], int] = lambda: 0) -> None:
        self._blobs: dict[str, bytes] = {}
        self._touched: dict[str, int] = {}
        self._bytes_max = bytes_max
        self._clock_ms = clock_ms
        self._lock = threading.Lock()

    def missing(self, digests: Iterable[str]) -> set[str]:
        with self._lock:
            asked = set(digests)
            self._touched.update({digest: self._clock_ms() for digest in asked & self._blobs.keys()})
            return asked - self._blobs.keys()

    def write(self, contents: Mapping[str, bytes]) -> None:
        for digest, content in contents.items():
            if hashlib.sha256(content).hexdigest() != digest:
                raise BlobRefused("mismatch", f"the content named {digest[:12]} has another digest")
        with self._lock:
            held = sum(map(len, {**self._blobs, **contents}.values()))
            if self._bytes_max and held > self._bytes_max:
                raise BlobRefused("full", f"all contents would take more than {self._bytes_max} bytes")
            self._blobs.update(contents)
            self._touched.update(dict.fromkeys(contents, self._clock_ms()))

    def begin(self) -> "MemoryUpload":
        return MemoryUpload(self)

    def size(self, digest: str) -> int | None:
        content = self._blobs.get(digest)
        return None if content is None else len(content)

    def read(self, digest: str) -> Iterator[bytes]:
        content = self._blobs[digest]
        return (content[n : n + PIECE_BYTES] for n in range(0, len(content), PIECE_BYTES))

    def untouched_since(self, at_ms: int, after: str, limit: int) -> Sequence[str]:
        with self._lock:
            return sorted(d for d in self._blobs if self._touched[d] < at_ms and d > after)[:limit]

    def delete(self, digests: Iterable[str]) -> None:
        with self._lock:
            for digest in digests:
                self._blobs.pop(digest, None)

    def close(self) -> None:
        """Nothing to give back."""


class MemoryUpload:
    """See `Upload`."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        self._blobs, self._content = blobs, bytearray()

    def append(self, piece: bytes) -> None:
        self._content += piece

    def finish(self, digest: str) -> int:
        self._blobs.write({digest: bytes(self._content)})
        return len(self._content)

    def discard(self) -> None:
        self._content.clear()
