"""The finished steps of a run, as they came with its grant: what a pass answers from without asking.

Built once per pass; nothing is decoded before it is asked for, and more pages are fetched only when a step isn't found
in those at hand. A run with thousands of finished steps passes them in a few microseconds each.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tidefast.protocol.answers import JournalEntry, JournalPage
from tidefast.protocol.canonical import CanonicalError, call_digest, canonical

_spell = msgspec.json.Encoder(order="sorted").encode


class _Data(msgspec.Struct):
    receipt: Any = None
    value: Any = None


_data = msgspec.json.Decoder(_Data).decode


class Journal:
    """Finished steps by id. `fetch` gives the page after a position."""

    def __init__(
        self, entries: tuple[JournalEntry, ...], following: int, fetch: Callable[[int], Awaitable[JournalPage]]
    ) -> None:
        self.entries: dict[str, JournalEntry] = {entry.step_id: entry for entry in entries}
        self.next = following  # 0: everything is here
        self._fetch = fetch
        self._lock = asyncio.Lock()

    async def find_later(self, step_id: str) -> JournalEntry | None:
        """The step from the pages that aren't here yet; they are kept."""
        async with self._lock:
            while self.next and step_id not in self.entries:
                page = await self._fetch(self.next)
                self.entries.update((entry.step_id, entry) for entry in page.entries)
                self.next = page.next
        return self.entries.get(step_id)


def receipt_of(entry: JournalEntry) -> Any:
    """The receipt of a tool or undo step, None where it has none."""
    return _data(entry.data_json).receipt


def value_of(entry: JournalEntry) -> Any:
    """The value of a local step."""
    return _data(entry.data_json).value


def body_of(receipt: Any) -> Any:
    """What the provider answered: the receipt's body. A receipt that a person wrote may be a bare value."""
    return receipt["body"] if isinstance(receipt, dict) and "body" in receipt else receipt


def is_same_call(entry: JournalEntry, tool: str, args: dict[str, Any]) -> bool:
    """Whether the journaled step is this very call. Raises `CanonicalError` for arguments that aren't JSON.

    A quick spelling is tried first. If its digest is the stored one then it is the stored text, so the call is the
    same; if it isn't, nothing is proved, and the canonical spelling decides.
    """
    try:
        if call_digest(tool, _spell(args).decode()) == entry.call_digest:
            return True
    except (TypeError, ValueError, OverflowError, CanonicalError, RecursionError):
        return call_digest(tool, canonical(args)) == entry.call_digest
    return call_digest(tool, canonical(args)) == entry.call_digest
