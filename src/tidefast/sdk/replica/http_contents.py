"""The authority's contents over HTTP, with the replica's token.

Redirects, proxies and netrc files are ignored: the token goes to its own origin only. Whatever comes is hashed before
it is used, so a lying or cut answer is an answer that didn't come.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct
from yarl import URL

from tidefast.protocol.workspace import Entry, Manifest, entry_problem, is_path
from tidefast.sdk.replica.contents import Unreachable, Wanted

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=30.0)
_HEAD = 64 + 8  # of one content among many: its digest, its length
_PIECE = 1 << 18
BUSY = frozenset((429, 503))
BUSY_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0)


class _Listing(Struct):
    index: int
    entries: dict[str, Entry]


_listing = msgspec.json.Decoder(_Listing)


class HttpContents:
    """Contents of one workspace at one authority. `token` gives the newest token. `close` it in the end."""

    def __init__(self, url: URL, workspace: str, key: str | None, token: Callable[[], str]) -> None:
        self._base = url / "v1" / "workspaces" / workspace
        self._key, self._token = key, token
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def manifest(self, index: int) -> Manifest:
        """See `Contents`. Paths that no manifest may hold are refused here as well."""
        body = b"".join([piece async for piece in self._body("GET", (self._base / "manifest").with_query(index=index))])
        try:
            listing = _listing.decode(body)
        except msgspec.DecodeError as error:
            raise Unreachable(f"the authority's listing can't be read: {error}") from error
        if listing.index != index:
            raise Unreachable("the authority sent another listing")
        for path, entry in listing.entries.items():
            if not is_path(path) or entry_problem(entry):
                raise Unreachable(f"the authority's listing names what can't be: {path[:200]!r}")
        return listing.entries

    async def fetch(self, wanted: Sequence[Wanted]) -> AsyncIterator[tuple[str, bytes]]:
        """See `Contents`: one call for all."""
        asked = msgspec.json.encode({"digests": [item.digest for item in wanted]})
        left = bytearray()
        sizes = {item.digest: item.size for item in wanted}
        async for piece in self._body("POST", self._base / "blobs", asked):
            left += piece
            at = 0
            while len(left) - at >= _HEAD:
                digest = left[at : at + 64].decode("ascii", "replace")
                size = int.from_bytes(left[at + 64 : at + _HEAD], "big")
                if sizes.get(digest) != size:
                    raise Unreachable("the authority sent a content that nobody asked for")
                if len(left) - at < _HEAD + size:
                    break
                yield digest, bytes(left[at + _HEAD : at + _HEAD + size])
                at += _HEAD + size
            del left[:at]
        if left:
            raise Unreachable("the authority's answer was cut")

    async def stream(self, wanted: Wanted) -> AsyncIterator[bytes]:
        """See `Contents`."""
        async for piece in self._body("GET", self._base / "blobs" / wanted.digest):
            yield piece

    async def upload(self, wanted: Wanted, pieces: Callable[[], AsyncIterator[bytes]]) -> None:
        """See `Contents`. A content that changes while it is read is not sent to its end."""

        async def checked() -> AsyncIterator[bytes]:
            state = hashlib.sha256()
            async for piece in pieces():
                state.update(piece)
                yield piece
            if state.hexdigest() != wanted.digest:
                raise Unreachable(f"the content {wanted.digest[:12]} has changed on the disk")

        async for _ in self._body("PUT", self._base / "blobs" / wanted.digest, checked):
            continue

    async def _body(self, method: str, url: URL, data: bytes | Callable[[], Any] | None = None) -> AsyncIterator[bytes]:
        """The pieces of a good answer's body. Asks again while the authority is busy. Raises `Unreachable`."""
        headers = {"Tidefast-Lease": self._token()}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        if isinstance(data, bytes):
            headers["Content-Type"] = "application/json"
        for wait_s in (*BUSY_WAITS_S, None):
            body = data() if callable(data) else data
            try:
                async with self._client().request(
                    method, url, data=body, headers=headers, allow_redirects=False
                ) as answer:
                    if answer.status == 200:
                        async for piece in answer.content.iter_chunked(_PIECE):
                            yield piece
                        return
                    said = (await answer.content.read(2_000)).decode(errors="replace")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Unreachable(f"{method} {url.path}: {type(error).__name__}: {error}") from error
            if answer.status not in BUSY or wait_s is None:
                raise Unreachable(f"{method} {url.path}: {answer.status} {said}")
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))  # noqa: S311 - spreads those that ask again

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=_TIMEOUT, trust_env=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session
