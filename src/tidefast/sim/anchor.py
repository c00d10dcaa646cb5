"""Signed anchors: how long each log was, and what its last digest was, kept elsewhere than the store.

Whoever can write a store's file can rewrite a log together with its digests, its head and its steps, and no reader of
that file alone could tell. An anchor that was taken before, and is kept where he can't write, tells: it names for every
run the length and the last digest of its log, under a signature (Ed25519). A digest stands for all events before it, so
a log that was cut or rewritten since no longer fits.

A sealed file is lines of canonical JSON. The last line, the seal, holds the SHA-256 of all lines before it and the
signature over that. It is read in one pass: what was read counts only if the seal at the end fits.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tidefast.protocol.canonical import canonical
from tidefast.protocol.ids import RunId
from tidefast.protocol.laws import Violation
from tidefast.stores.base import Store

ANCHOR_FORMAT = "tidefast-anchor/1"
FINGERPRINT = "SHA256:"
KEY_BYTES_MAX = 4_096
LINE_BYTES_MAX = 67_108_864
PAGE_RUNS = 500
TIME_MAX_MS = 253_402_300_800_000  # the year 10000
SEAL_MEMBERS = {"key", "lines", "sha256", "signature"}


class EvidenceRefused(Exception):
    """A key or a sealed file can't be used. The message says which, why, and what to do; it holds no part of a key."""


# --- keys -------------------------------------------------------------------------------------------------------------


def make_key(path: Path) -> str:
    """Write a new private key (mode 0600), and its public key beside it as `FILE.pub`; its fingerprint.

    Raises `EvidenceRefused` if either file is there already: a key is never overwritten.
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    beside = public_path(path)
    if beside.exists():
        raise EvidenceRefused(f"{beside} is there already; name another file, or move the old key away")
    _write_new(path, private, 0o600)
    _write_new(beside, public, 0o644)
    return fingerprint(key.public_key())


def public_path(path: Path) -> Path:
    return path.with_name(path.name + ".pub")


def read_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a file that nobody else can read. Raises `EvidenceRefused`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "make one: tidefast anchor keygen --key FILE"
        raise EvidenceRefused(f"{path}: the key can't be read: {error.strerror}; {hint}") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise EvidenceRefused(f"{path}: not a plain file")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise EvidenceRefused(f"{path}: others may read it (mode {mode:04o}); run: chmod 600 {path}")
        text = os.read(handle, KEY_BYTES_MAX)
    finally:
        os.close(handle)
    try:
        key = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise EvidenceRefused(f"{path}: not an Ed25519 private key in PEM without a password")
    return key


def read_pin(text: str) -> str:
    """The fingerprint that a user pins, as `SHA256:…` or as the file of a public key. Raises `EvidenceRefused`."""
    if text.startswith(FINGERPRINT):
        digits = text.removeprefix(FINGERPRINT)
        if len(digits) != 64 or set(digits) - set("0123456789abcdef"):
            raise EvidenceRefused(f"{text[:100]}: not a fingerprint; expected SHA256: and 64 hex digits")
        return text
    try:
        with Path(text).open("rb") as file:
            key = serialization.load_pem_public_key(file.read(KEY_BYTES_MAX))
    except OSError as error:
        raise EvidenceRefused(f"{text}: the public key can't be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise EvidenceRefused(f"{text}: not an Ed25519 public key in PEM")
    return fingerprint(key)


def fingerprint(key: Ed25519PublicKey) -> str:
    """The name of a public key, short enough to be read over the telephone in a pinch."""
    return FINGERPRINT + hashlib.sha256(key.public_bytes_raw()).hexdigest()


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise EvidenceRefused(f"{path} is there already; name another file") from error
    except OSError as error:
        raise EvidenceRefused(f"{path}: can't be written: {error.strerror}") from error
    try:
        os.fchmod(handle, mode)
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(handle)
    finally:
        os.close(handle)


# --- sealed files -----------------------------------------------------------------------------------------------------


class Seal(NamedTuple):
    """Whose word a sealed file is: the fingerprint of the key that signed it, empty if none did."""

    key: str
    is_pinned: bool  # the reader named that key beforehand


def seal(path: Path, format_name: str, lines: Iterable[str], key: Ed25519PrivateKey | None, mode: int = 0o644) -> int:
    """Write lines and their seal to a new file; how many lines. Raises `EvidenceRefused`; half a file is never left."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    if path.exists():
        raise EvidenceRefused(f"{path} is there already, and evidence is never overwritten; name another file")
    state, count = hashlib.sha256(), 0
    try:
        with fresh.open("xb") as file:
            os.fchmod(file.fileno(), mode)
            for line in lines:
                data = line.encode() + b"\n"
                state.update(data)
                count += 1
                file.write(data)
            file.write(_seal_line(format_name, state.digest(), count, key).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)
    except FileExistsError as error:
        raise EvidenceRefused(
            f"{path} is there already, and evidence is never overwritten; name another file"
        ) from error
    except OSError as error:
        raise EvidenceRefused(f"{path}: can't be written: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)
    return count


def _seal_line(format_name: str, digest: bytes, count: int, key: Ed25519PrivateKey | None) -> str:
    return canonical(
        {
            "key": None if key is None else key.public_key().public_bytes_raw().hex(),
            "lines": count,
            "sha256": digest.hex(),
            "signature": None if key is None else key.sign(_signed(format_name, digest)).hex(),
        }
    )


def _signed(format_name: str, digest: bytes) -> bytes:
    """What is signed: no signature for one purpose can be taken for another."""
    return b"tidefast\0" + format_name.encode() + b"\0" + digest


class SealedFile:
    """Reads a sealed file in one pass. `seal` is there once `lines` has come to its end without an exception."""

    def __init__(self, path: Path, format_name: str, pin: str = "", *, must_be_signed: bool = True) -> None:
        self.path, self._format, self._pin, self._must_be_signed = path, format_name, pin, must_be_signed
        self.seal: Seal | None = None

    def lines(self) -> Iterator[str]:
        """Every line but the seal. Raises `EvidenceRefused` at the end if the seal doesn't fit: forget them then."""
        state, count, last = hashlib.sha256(), 0, b""
        try:
            with self.path.open("rb") as file:
                while data := file.readline(LINE_BYTES_MAX):
                    if last:
                        state.update(last)
                        count += 1
                        yield last.decode().removesuffix("\n")
                    last = data
        except OSError as error:
            raise EvidenceRefused(f"{self.path}: can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise EvidenceRefused(f"{self.path}: line {count} is not UTF-8") from error
        self.seal = self._check(last, state.digest(), count)

    def _check(self, line: bytes, digest: bytes, count: int) -> Seal:
        found = _object(line)
        if set(found) != SEAL_MEMBERS or not line.endswith(b"\n"):
            raise EvidenceRefused(f"{self.path}: its last line is no seal: the file is cut, or no {self._format}")
        if (found["lines"], found["sha256"]) != (count, digest.hex()):
            raise EvidenceRefused(f"{self.path}: its seal doesn't fit its lines: the file was altered")
        if found["signature"] is None and found["key"] is None:
            if self._must_be_signed or self._pin:
                raise EvidenceRefused(f"{self.path}: it is not signed")
            return Seal("", False)
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(str(found["key"])))
            key.verify(bytes.fromhex(str(found["signature"])), _signed(self._format, digest))
        except (ValueError, InvalidSignature) as error:
            raise EvidenceRefused(f"{self.path}: its signature doesn't fit: the file was altered") from error
        name = fingerprint(key)
        if self._pin and name != self._pin:
            raise EvidenceRefused(f"{self.path}: it is signed by {name}, not by the key that you named ({self._pin})")
        return Seal(name, bool(self._pin))


def _object(line: str | bytes) -> Mapping[str, Any]:
    """The JSON object in a line; an empty one if it is none."""
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# --- anchors ----------------------------------------------------------------------------------------------------------


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def write_anchor(
    store: Store, path: Path, key: Ed25519PrivateKey, now_ms: Callable[[], int] = wall_ms
) -> tuple[int, str]:
    """Sign the length and last digest of every log of a store, which may be in use; (runs, fingerprint).

    Raises `EvidenceRefused` if a head and its log contradict each other: what is wrong already must not be signed.
    """
    lines = _anchor_lines(store, now_ms())
    return seal(path, ANCHOR_FORMAT, lines, key) - 1, fingerprint(key.public_key())


def _anchor_lines(store: Store, at_ms: int) -> Iterator[str]:
    identity = store.identity()
    yield canonical(
        {
            "at_ms": at_ms,
            "format": ANCHOR_FORMAT,
            "incarnation": identity.incarnation,
            "namespace": identity.namespace.hex(),
        }
    )
    after: RunId | None = None
    while heads := store.runs(after, PAGE_RUNS, None):
        for head in heads:
            found = store.load_head(head.run_id)
            last = None if found is None else store.load_event(found[0], head.seq)
            if last is None or last.digest != head.digest:
                raise EvidenceRefused(f"run {head.run_id}: its head and its log contradict each other; audit the store")
            yield canonical({"digest": head.digest, "run": head.run_id, "seq": head.seq})
        after = heads[-1].run_id


def is_time(value: object) -> bool:
    """Whether a member of a file that anybody may have written is a time that can be shown."""
    return isinstance(value, int) and 0 <= value < TIME_MAX_MS


class Anchor:
    """An anchor's file, compared with a store. `seal`, `at_ms` and `runs` are there after the comparison."""

    def __init__(self, path: Path, pin: str = "") -> None:
        self._file = SealedFile(path, ANCHOR_FORMAT, pin)
        self.path, self.at_ms, self.runs = path, 0, 0

    @property
    def seal(self) -> Seal | None:
        return self._file.seal

    def points(self) -> Iterator[tuple[RunId, int, str]]:
        """(run, length, last digest) of each log. Raises `EvidenceRefused` at the end if the seal doesn't fit."""
        lines = self._file.lines()
        self.namespace = self._begin(next(lines, ""))
        self.runs = 0
        for line in lines:
            row = _object(line)
            run, seq, digest = row.get("run"), row.get("seq"), row.get("digest")
            if len(row) != 3 or not isinstance(run, str) or not isinstance(seq, int) or not isinstance(digest, str):
                raise EvidenceRefused(f"{self.path}: line {self.runs + 2} is none of an anchor: the file was altered")
            self.runs += 1
            yield RunId(run), seq, digest

    def _begin(self, line: str) -> str:
        head = _object(line)
        if head.get("format") != ANCHOR_FORMAT or not is_time(head.get("at_ms")):
            raise EvidenceRefused(f"{self.path}: it is no anchor of this version ({ANCHOR_FORMAT})")
        self.at_ms = head["at_ms"]
        return str(head.get("namespace"))


def against_anchors(store: Store, anchors: Sequence[Anchor]) -> list[Violation]:
    """Each log that is shorter than an anchor says, or another one. Raises `EvidenceRefused` for a bad anchor.

    Several anchors narrow down where a rewritten log begins to differ.
    """
    agreed: dict[RunId, int] = {}
    differing: dict[RunId, tuple[int, Anchor]] = {}
    found: dict[RunId, Violation] = {}
    for anchor in anchors:
        for run_id, seq, digest in anchor.points():
            violation = _missing(store, run_id, seq)
            if violation is not None:
                found.setdefault(run_id, violation)
            elif _digest(store, run_id, seq) == digest:
                agreed[run_id] = max(seq, agreed.get(run_id, 0))
            elif run_id not in differing or seq < differing[run_id][0]:
                differing[run_id] = (seq, anchor)
        if anchor.namespace != store.identity().namespace.hex():
            why = f"this is not the store that {anchor.path.name} was taken of: its namespace is another one"
            found.setdefault(RunId(""), Violation("altered_log", RunId(""), None, 0, why))
    for run_id, (seq, anchor) in differing.items():
        first = agreed.get(run_id, 0) + 1
        where = f"the event {seq}" if first >= seq else f"one of the events {first} to {seq}"
        why = f"{where} was rewritten: its log is not the one that {anchor.path.name} holds"
        found[run_id] = Violation("altered_log", run_id, None, min(first, seq), why)
    return list(found.values())


def _missing(store: Store, run_id: RunId, seq: int) -> Violation | None:
    """The breach if a log doesn't reach as far as it did."""
    head = store.load_head(run_id)
    if head is None:
        return Violation("altered_log", run_id, None, 1, f"the run is gone; it had {seq} events")
    if store.load_event(head[0], seq) is not None:
        return None
    length = seq - 1
    while length and store.load_event(head[0], length) is None:
        length -= 1
    return Violation("altered_log", run_id, None, length + 1, f"the log was cut: it had {seq} events and has {length}")


def _digest(store: Store, run_id: RunId, seq: int) -> str:
    head = store.load_head(run_id)
    event = None if head is None else store.load_event(head[0], seq)
    return "" if event is None else event.digest
