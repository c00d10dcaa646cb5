"""What a streaming caller hears while its answer is on the way.

Pieces go through as they come. The end of an answer is held back until the answer is durable, and from the moment when
the caller's lease has ended nothing goes through any more: late tokens are recorded, never delivered.
"""

import asyncio
from collections.abc import Callable

from tidefast.protocol.verdicts import Refused


class Relay:
    """One caller's ear. The hop speaks, the server listens; neither waits for the other."""

    def __init__(self, fence: Callable[[], Refused | None]) -> None:
        self.has_begun = False  # something was delivered: no other attempt's answer may follow
        self.is_whole = False  # the end was delivered as well
        self.cut: Refused | None = None  # why nothing is delivered any more
        self._fence = fence
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held: list[bytes] = []
        self._is_deaf = False

    def piece(self, raw: bytes, is_end: bool) -> None:
        """One event of the stream, in its own bytes."""
        if self._is_deaf:
            return
        if is_end:
            self._held.append(raw)
            return
        self.cut = self._fence()
        if self.cut is not None:
            self.close()
            return
        self.has_begun = True
        self._pieces.put_nowait(raw)

    def committed(self) -> None:
        """The answer is durable and joined: its end may be heard."""
        if not self._is_deaf:
            self.has_begun = self.is_whole = True
            self._pieces.put_nowait(b"".join(self._held))
            self.close()

    def failed(self) -> None:
        """No answer comes of what was delivered."""
        self._held = []
        if self.has_begun:
            self.close()

    def close(self) -> None:
        """Nothing more will be heard; also called by a listener that has gone."""
        if not self._is_deaf:
            self._is_deaf = True
            self._pieces.put_nowait(None)

    async def next(self) -> bytes | None:
        """The next piece; None when there will be none."""
        return await self._pieces.get()
