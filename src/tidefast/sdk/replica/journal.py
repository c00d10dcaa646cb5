"""The replica's journal beside the files: what the disk was last known to hold, and the write that isn't joined yet.

One record a line, each with a digest of its own. It is believed as far as the authority's chain goes and no further:
what it claims is offered as a proof, and what the disk holds is read from the disk. A record cut short at the end is a
write that was never acknowledged; a broken one before the end means that the file can't be believed, and then the disk
proves nothing and all of it is read and compared.

A command is written here before it begins, so that after a crash nobody takes it for one that never began.
"""

import hashlib
import os
from typing import NamedTuple

import msgspec
from msgspec import Struct

from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.workspace import EMPTY_DISK, Disk, delta_json, write_chain
from tidefast.wire.replica import Receipt, Refused

COMPACT_BYTES = 1 << 18
_NAME, _FRESH = "journal", "journal.new"
_DIGEST_LENGTH = 16
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Call(NamedTuple):
    """One attempt of a step."""

    run: str
    step: str
    attempt: int


class At(Struct, tag="at"):
    """The disk holds the content at this place of the log. Forgets the write ahead of it and the calls before."""

    workspace: str
    epoch: int
    index: int
    chain: str
    is_whole: bool


class Begun(Struct, tag="begun"):
    """A command is about to begin."""

    call: Call
    epoch: int


class Done(Struct, tag="done"):
    """A call was applied: the disk is one write ahead. `what` is the digest of its verb and arguments."""

    call: Call
    what: str
    receipt: Receipt


class Not(Struct, tag="not"):
    """A call was refused, and is undone or about to be."""

    call: Call
    refused: Refused


Record = At | Begun | Done | Not
_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


class Journal:
    """The journal in an open directory. `append` is durable on return only if it is told to be."""

    def __init__(self, folder: int, workspace: str) -> None:
        self._folder, self._workspace = folder, workspace
        self.disk: Disk = EMPTY_DISK
        self._fd = -1
        self.ahead: Done | None = None
        self.begun: Begun | None = None  # and not ended
        self.refused: dict[tuple[str, str], Not] = {}
        self._load()
        self._rewrite()

    def close(self) -> None:
        os.close(self._fd)

    def append(self, record: Record, *, is_synced: bool) -> None:
        """Note it, on the disk and here. Raises `OSError`; then nobody knows what stands, and the process must end."""
        self._take(record)
        if os.fstat(self._fd).st_nlink == 0 or os.fstat(self._fd).st_size > COMPACT_BYTES:
            self._rewrite()  # a command has removed it, or most of it is past
            return
        _write_all(self._fd, _line(record))
        if is_synced:
            os.fsync(self._fd)

    def move_to(self, folder: int) -> None:
        """Go on in another directory: a command has removed the one that we had."""
        self._folder = folder
        self._rewrite()

    def _take(self, record: Record) -> None:
        match record:
            case At():
                self.disk = Disk(Epoch(record.epoch), record.index, record.chain, record.is_whole)
                self.ahead = self.begun = None
                self.refused = {}
            case Begun():
                self.begun = record
            case Done():
                self.ahead, self.begun = record, None
            case Not():
                self.begun = None
                self.refused[record.call.run, record.call.step] = record

    def _load(self) -> None:
        """Take what the file says, as far as it can be believed. Raises `OSError`."""
        try:
            fd = os.open(_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            return
        with open(fd, "rb") as file:
            lines = file.read().split(b"\n")
        records = [_record(line) for line in lines[:-1]]  # after the last line's end stands nothing, or half a record
        if records and records[-1] is None:  # never acknowledged
            records.pop()
        for record in records:
            if record is None or (isinstance(record, At) and record.workspace != self._workspace):
                self._forget()
                return
            self._take(record)
        if self.ahead is not None and not self._follows(self.ahead.receipt):
            self._forget()

    def _forget(self) -> None:
        self.disk, self.ahead, self.begun, self.refused = EMPTY_DISK, None, None, {}

    def _follows(self, receipt: Receipt) -> bool:
        """Whether the write ahead is the next one of the chain that the disk has."""
        run, step = RunId(receipt.run), StepId(receipt.step)
        chain = write_chain(self.disk.chain, self.disk.log_index + 1, run, step, delta_json(receipt.delta))
        return receipt.index == self.disk.log_index + 1 and receipt.chain == chain

    def _rewrite(self) -> None:
        """The journal with nothing past in it, in the place of the old one. Durable on return."""
        disk = self.disk
        records: list[Record] = [At(self._workspace, disk.epoch, disk.log_index, disk.chain, disk.is_whole)]
        records += self.refused.values()
        records += [record for record in (self.begun, self.ahead) if record is not None]
        fd = os.open(_FRESH, _APPEND | os.O_TRUNC, 0o600, dir_fd=self._folder)
        _write_all(fd, b"".join(map(_line, records)))
        os.fsync(fd)
        os.rename(_FRESH, _NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd


def _line(record: Record) -> bytes:
    body = _encoder.encode(record)
    return hashlib.sha256(body).hexdigest()[:_DIGEST_LENGTH].encode() + b" " + body + b"\n"


def _record(line: bytes) -> Record | None:
    body = line[_DIGEST_LENGTH + 1 :]
    if hashlib.sha256(body).hexdigest()[:_DIGEST_LENGTH].encode() != line[:_DIGEST_LENGTH]:
        return None
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError:
        return None


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
