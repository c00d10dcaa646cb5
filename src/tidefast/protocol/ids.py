"""Names, keys and epochs: what they look like and how they are derived.

Laws: an idempotency key is a function of (namespace, run, step) and of nothing else; an epoch is
incarnation * 2**32 + n and only ever grows; a derived id is minted by the authority, never by a caller.
"""

import hashlib
import re
import uuid
from typing import Literal, NewType

RunId = NewType("RunId", str)
StepId = NewType("StepId", str)
WorkspaceId = NewType("WorkspaceId", str)
Epoch = NewType("Epoch", int)

ID_LENGTH_MAX = 128
DERIVED_LENGTH_MAX = 160
ID_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
DERIVED_ID_PATTERN = ID_PATTERN + r"(~[a-z0-9]{1,12}){1,4}"
_ID = re.compile(ID_PATTERN, re.ASCII)
_CALL = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127})~\d{1,4}", re.ASCII)
_DERIVED = re.compile(DERIVED_ID_PATTERN, re.ASCII)

EPOCHS_PER_INCARNATION = 2**32
KeyForm = Literal["hex", "uuid"]


def is_id(text: str) -> bool:
    """Whether a caller may give this name to a run, a step, an agent or a workspace."""
    return _ID.fullmatch(text) is not None


def is_derived_id(text: str) -> bool:
    """Whether this is the name of a derived step (`pay~undo`), which callers may name but not mint."""
    return len(text) <= DERIVED_LENGTH_MAX and _DERIVED.fullmatch(text) is not None


def derived_id(step: StepId, word: str) -> StepId:
    """The name of a step that the authority derives from another one."""
    return StepId(f"{step}~{word}")


def asked_by(step: StepId) -> StepId | None:
    """The model step in whose answer this call stands (`plan` for `plan~0`); None for any other name."""
    hit = _CALL.fullmatch(step)
    return StepId(hit.group(1)) if hit else None


def step_key(namespace: bytes, run: RunId, step: StepId) -> str:
    """The idempotency key of a step: 32 hex digits, the same for every attempt, epoch and credential.

    The first 16 bytes of SHA-256 over the three parts, each preceded by its length (4 bytes, big-endian), so that
    run `a` with step `bc` and run `ab` with step `c` can't share a key.
    """
    parts = (namespace, run.encode(), step.encode())
    return hashlib.sha256(b"".join([len(part).to_bytes(4, "big") + part for part in parts])).hexdigest()[:32]


def spell_key(key: str, form: KeyForm) -> str:
    """A stored key as its contract wants it on the wire."""
    return str(uuid.UUID(hex=key)) if form == "uuid" else key


def next_epoch(newest: Epoch, incarnation: int) -> Epoch:
    """The epoch of the next grant: above the newest one and above all that an earlier incarnation can have issued."""
    return Epoch(max(newest, incarnation * EPOCHS_PER_INCARNATION) + 1)


def epochs_from(incarnation: int) -> Epoch:
    """The number below every epoch of an incarnation and above every epoch of those before; never granted itself."""
    return Epoch(incarnation * EPOCHS_PER_INCARNATION)


def incarnation_of(epoch: Epoch) -> int:
    """Which incarnation of the authority's store issued this epoch."""
    return epoch // EPOCHS_PER_INCARNATION
