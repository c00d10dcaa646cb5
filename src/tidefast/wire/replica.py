"""What a replica and its authority say to each other.

One WebSocket, `/v1/workspaces/{ws}/replica`, dialled by the replica; each message is one text frame of JSON with its
`kind`. Contents go beside it over HTTP, by digest, with the replica's token in `Tidefast-Lease`: `PUT` and `GET`
`/v1/workspaces/{ws}/blobs/{sha256}`, or many small ones by `POST /v1/workspaces/{ws}/blobs` with `{"digests": […]}`
(see `packed`). The committed tree is `GET /v1/workspaces/{ws}/manifest?index=N`, which answers `{"index", "entries":
{path: [kind, mode, digest, size]}}`.

A conversation:

1. `hello` proves what the disk holds; `grant` answers with the epoch, a token and a plan. With `is_resumed` the socket
   goes on under the epoch that it had: the disk stays as it is, and open steps are asked about.
2. The replica does what the plan says and sends `restored`. Only then it is given work. It sends `renew` at least
   every third of the lease, and does no mutating call once the lease, counted from its newest answered `renew`, ends.
3. `do` asks for a call. The replica refuses it (`unsent`) unless epoch and index are those of its disk. A mutating call
   ends with `receipt`, after which the disk is one write ahead, or with `refused`, after which it is as before.
4. The authority asks for contents that it doesn't have (`want`), and the replica uploads them and sends the receipt
   again. Contents of a few kilobytes may come with the receipt (`inline`).
5. `joined` says that the write is committed. `rollback` says that it never will be: the disk goes back to the index.
6. After a reconnect, `ask` asks the replica's journal about a step: its `receipt` or `refused` again, `running`, or
   `absent`, which promises that it has not begun and, asked for by this attempt, never will.
7. `superseded` ends an epoch. Nothing that the replica sends under it counts any more.

Unknown members, wrong types and numbers out of range are refused on both sides.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tidefast.protocol.canonical import INTEGER_MAX
from tidefast.protocol.workspace import Entry, Plan

MESSAGE_BYTES_MAX = 32 * 2**20  # a delta of 100,000 paths fits
INLINE_BYTES_MAX = 256 * 1024  # of contents that come with a receipt, all together; larger ones are uploaded
FETCH_BYTES_MAX = 16 * 2**20  # of contents asked for at once; larger ones are asked for alone
BLOB_BYTES_MAX = 2**30  # of one content; a larger file can't be kept, and is listed as such

Id = Annotated[str, Meta(min_length=1, max_length=160, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._~-]*\Z")]
Word = Annotated[str, Meta(min_length=1, max_length=128)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Whole = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=4096)]


class Said(Struct, tag_field="kind", tag=lambda name: name.lower(), forbid_unknown_fields=True):
    """One message. Members without a default must be sent."""


# --- the replica says -----------------------------------------------------------------------------------------------


class Hello(Said):
    """The first message of a socket. `boot_id` is drawn by each process; `token` is that of the newest grant."""

    boot_id: Word
    epoch: Epoch
    index: Whole
    chain: Digest
    token: str = ""
    is_whole: bool = True
    is_ahead: bool = False


class Renew(Said):
    """The lease is wanted further. Answered by `renewed`."""

    epoch: Epoch


class Unrestorable(Struct, forbid_unknown_fields=True):
    """Something that a new replica doesn't get back, and why: `ignored`, `special`, `too_large`, `name_invalid`."""

    path: Text
    reason: Word


class Restored(Said):
    """The plan, or a rollback, is done: the disk holds the content at `index`, and nothing else."""

    epoch: Epoch
    index: Whole
    chain: Digest
    files: Whole = 0  # fetched
    bytes: Whole = 0  # fetched
    unrestorable: Annotated[list[Unrestorable], Meta(max_length=1000)] = []


class Receipt(Said):
    """A mutating call was applied: the disk is one write ahead of `index - 1`. Durable on the replica's disk."""

    request_id: Word
    run: Id
    step: Id
    epoch: Epoch
    index: Positive
    delta: dict[str, Entry | None]
    chain: Digest
    result: Any = None  # JSON
    inline: dict[Digest, str] = {}  # contents that the delta names, in base64
    unrestorable: Annotated[list[Unrestorable], Meta(max_length=1000)] = []


class Answer(Said):
    """What an unfenced call read."""

    request_id: Word
    epoch: Epoch
    result: Any  # JSON


class Refused(Said):
    """A call was refused for good, and nothing of it is visible: the same call would be refused again."""

    request_id: Word
    epoch: Epoch
    code: Literal["conflict", "invalid", "not_found", "forbidden", "too_large", "full", "unsupported", "timed_out"]
    reason: Word
    detail: Text = ""
    facts: dict[str, Any] = {}


class Unsent(Said):
    """A call was not begun and won't be, for a reason that isn't the call's: other epoch or index, late, stopping."""

    request_id: Word
    epoch: Epoch
    reason: Literal["stale_epoch", "lease_lapsed", "index", "late", "busy", "stopping", "not_restored"]


class Absent(Said):
    """The journal knows nothing of the step asked about, and the attempt asked about will never begin."""

    request_id: Word
    epoch: Epoch
    run: Id
    step: Id


class Running(Said):
    """The call asked about has begun and hasn't ended; its end comes under the `request_id` of this question."""

    request_id: Word
    epoch: Epoch


class Output(Said):
    """A piece of a running command's output, for those who watch. The result holds it again, cut to its limit."""

    request_id: Word
    stream: Literal["stdout", "stderr"]
    text: Annotated[str, Meta(max_length=65_536)]


class Bye(Said):
    """The replica ends in order and gives its lease back."""

    epoch: Epoch
    reason: Word = "stopping"


# --- the authority says ---------------------------------------------------------------------------------------------


class Grant(Said):
    """The right over the workspace, and what to do with the disk. `token` changes with each grant and each resume."""

    epoch: Epoch
    token: str
    lease_ms: Positive
    expires_at_ms: Whole
    plan: Plan
    index: Whole
    chain: Digest
    is_resumed: bool = False


class Renewed(Said):
    """The lease counts anew from the moment at which the `renew` that this answers was sent."""

    epoch: Epoch
    lease_ms: Positive
    expires_at_ms: Whole


class Do(Said):
    """A call. `index` is what the disk must hold; a write that it makes has the next one. `within_ms` counts from its
    arrival: a call that can't begin within it is `late`."""

    request_id: Word
    epoch: Epoch
    index: Whole
    verb: Word
    args: dict[str, Any]
    within_ms: Whole
    run: Id | None = None  # these four of a mutating call only
    step: Id | None = None
    attempt: Whole = 0
    run_epoch: Epoch = 0


class Ask(Said):
    """What does the journal say about this attempt of a step?"""

    request_id: Word
    run: Id
    step: Id
    attempt: Positive
    epoch: Epoch


class Want(Said):
    """Upload these contents, then send the receipt again."""

    request_id: Word
    digests: list[Digest]


class Joined(Said):
    """The write at `index` is committed: durable at the authority, whatever becomes of the disk."""

    run: Id
    step: Id
    epoch: Epoch
    index: Positive
    chain: Digest


class Rollback(Said):
    """The unjoined write, if the disk has one, never will be joined. Undo it, and say `restored`."""

    epoch: Epoch
    index: Whole
    chain: Digest


class Superseded(Said):
    """The epoch has ended. After `lapsed` the replica may say `hello` again; after `replaced` another one lives, and
    it should end; after `ended` an operator ended it."""

    epoch: Epoch
    live_epoch: Epoch
    reason: Literal["lapsed", "replaced", "ended"]


class Problem(Said):
    """The socket is closed for this reason. Codes are those of the HTTP interface."""

    code: Word
    reason: Word
    detail: Text = ""


FromReplica = Hello | Renew | Restored | Receipt | Answer | Refused | Unsent | Absent | Running | Output | Bye
FromAuthority = Grant | Renewed | Do | Ask | Want | Joined | Rollback | Superseded | Problem

_encoder = msgspec.json.Encoder()
_from_replica = msgspec.json.Decoder(FromReplica)
_from_authority = msgspec.json.Decoder(FromAuthority)


def encode(message: FromReplica | FromAuthority) -> str:
    """A message as the text of one frame."""
    return _encoder.encode(message).decode()


def packed(digest: str, content: bytes) -> bytes:
    """One of many contents in a body: its digest (64 ASCII hex digits), its length (8 bytes, big-endian), its bytes."""
    return b"".join((digest.encode("ascii"), len(content).to_bytes(8, "big"), content))


def read_from_replica(frame: str | bytes) -> FromReplica:
    """What a replica said. Raises `msgspec.DecodeError` for anything that isn't one of its messages."""
    return _from_replica.decode(frame)


def read_from_authority(frame: str | bytes) -> FromAuthority:
    """What the authority said. Raises `msgspec.DecodeError` for anything that isn't one of its messages."""
    return _from_authority.decode(frame)
