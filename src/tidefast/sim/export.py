"""Exports: one run's log with the contracts that its intents name, sealed, to be judged where no store is at hand.

The file is lines of canonical JSON: what the run is, its contracts, its events with their digests, the seal. An event's
line holds the very text that the chain digests, so that anybody can follow the chain with SHA-256 alone. `verify`
follows it, checks each contract against the digest that intents name it by, and judges the laws; nothing of the rules
that wrote the log takes part.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tidefast.protocol.canonical import CanonicalError, canonical, digest
from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.laws import History, Violation
from tidefast.protocol.trace import fold
from tidefast.sim.anchor import EvidenceRefused, Seal, SealedFile, is_time, seal, wall_ms
from tidefast.sim.audit import AuditReport, judge_log, named_contracts
from tidefast.stores.base import Store

EXPORT_FORMAT = "tidefast-export/1"
PAGE_EVENTS = 1_000
EVENT_MEMBERS = {"at_ms", "data", "epoch", "kind", "seq", "step_id"}


class Exported(NamedTuple):
    """What an export was found to be."""

    run_id: RunId
    at_ms: int
    seal: Seal | None  # None: the seal doesn't fit; `refused` says why
    refused: str
    report: AuditReport

    @property
    def is_ok(self) -> bool:
        return self.seal is not None and self.report.is_ok


def export_run(
    store: Store,
    run_id: RunId,
    path: Path,
    key: Ed25519PrivateKey | None = None,
    now_ms: Callable[[], int] = wall_ms,
) -> int:
    """Write one run's log to a new file, signed if a key is given; how many events. Raises `EvidenceRefused`.

    The store may be in use: the log is exported up to the head that was read first.
    """
    found = store.load_head(run_id)
    if found is None:
        raise EvidenceRefused(f"the store has no run {run_id}")
    seal(path, EXPORT_FORMAT, _lines(store, found[0], run_id, now_ms()), key, 0o600)  # it holds bodies
    return found[1].seq


def _lines(store: Store, run_key: int, run_id: RunId, at_ms: int) -> Iterator[str]:
    identity, found = store.identity(), store.load_head(run_id)
    if found is None:
        return
    head = found[1]
    yield canonical(
        {
            "at_ms": at_ms,
            "digest": head.digest,
            "format": EXPORT_FORMAT,
            "incarnation": identity.incarnation,
            "namespace": identity.namespace.hex(),
            "run": run_id,
            "seq": head.seq,
        }
    )
    for name in sorted(set(_contract_names(store, run_key, head.seq))):
        text = store.load_contract(name)
        if text is not None:
            yield f'{{"contract":{text},"digest":"{name}"}}'
    for event, mark in _events(store, run_key, head.seq):
        if _read_event(event.canonical()) is None:
            raise EvidenceRefused(f"run {run_id}: event {event.seq} is not in canonical form; audit the store")
        yield f'{{"digest":"{mark}","event":{event.canonical()}}}'


def _events(store: Store, run_key: int, length: int) -> Iterator[tuple[Event, str]]:
    after = 0
    while after < length and (page := store.load_events(run_key, after, min(PAGE_EVENTS, length - after))):
        for stored in page:
            yield stored.event, stored.digest
        after += len(page)


def _contract_names(store: Store, run_key: int, length: int) -> Iterator[str]:
    for event, _ in _events(store, run_key, length):
        yield from (name for name, _ in named_contracts([event]))


def verify(path: Path, pin: str = "") -> Exported:
    """Judge an export, with nothing but the file. Raises `EvidenceRefused` if it is none.

    A file whose seal doesn't fit is judged all the same, so that the first altered event can be named.
    """
    file = SealedFile(path, EXPORT_FORMAT, pin, must_be_signed=False)
    lines, refused = list[str](), ""
    try:
        lines += file.lines()
    except EvidenceRefused as error:
        refused = str(error)
        lines = _torn(path)
    head = _loads(lines[0]) if lines else {}
    if head.get("format") != EXPORT_FORMAT or not isinstance(head.get("run"), str):
        raise EvidenceRefused(f"{path}: it is no export of this version ({EXPORT_FORMAT})")
    history, faults = _history(head, lines[1:])
    report = AuditReport()
    for violation in faults:
        report.add(violation)
    judge_log(report, fold(history), history.events)
    at_ms = head["at_ms"] if is_time(head.get("at_ms")) else 0
    return Exported(history.run_id, at_ms, file.seal, refused, report)


def _torn(path: Path) -> list[str]:
    """The lines of a file whose seal doesn't fit, as far as they can be read."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise EvidenceRefused(f"{path}: can't be read: {error.strerror}") from error
    return text.split("\n")


def _history(head: Mapping[str, Any], lines: list[str]) -> tuple[History, list[Violation]]:
    """The run as the laws are judged on, and what can't be read of it."""
    run_id = RunId(str(head["run"]))
    contracts: dict[str, Contract] = {}
    events: list[Event] = []
    digests: list[str] = []
    faults: list[Violation] = []
    for line in lines:
        row = _loads(line)
        name = str(row.get("digest"))
        if set(row) == {"contract", "digest"}:
            contract = _contract(line, name, row["contract"])
            if contract is not None:
                contracts[name] = contract
        elif set(row) == {"digest", "event"}:
            event = _read_event(line.removeprefix(f'{{"digest":"{name}","event":').removesuffix("}"))
            if event is None:
                why = "this line holds no event in canonical form"
                faults.append(Violation("altered_log", run_id, None, len(events) + 1, why))
                break
            events.append(event)
            digests.append(name)
    try:
        namespace = bytes.fromhex(str(head.get("namespace")))
    except ValueError:
        namespace = b""
    seq = head.get("seq")
    history = History(
        run_id=run_id,
        events=tuple(events),
        digests=tuple(digests),
        namespace=namespace,
        contracts=contracts,
        head_digest=str(head.get("digest")),
        head_seq=seq if isinstance(seq, int) else 0,
    )
    return history, faults


def _contract(line: str, name: str, value: object) -> Contract | None:
    """A contract whose text is what its name says; None for another one."""
    text = line.removeprefix('{"contract":').removesuffix(f',"digest":"{name}"}}')
    try:
        return Contract.from_json(value) if digest(text) == name and isinstance(value, dict) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _read_event(text: str) -> Event | None:
    """The event of a canonical text; None if the text is not that of any event."""
    row = _loads(text)
    step = row.get("step_id")
    if set(row) != EVENT_MEMBERS or not all(type(row[name]) is int for name in ("at_ms", "epoch", "seq")):
        return None
    try:
        data_json = canonical(row["data"])
    except CanonicalError:
        return None
    name = None if step is None else StepId(str(step))
    event = Event(row["seq"], row["at_ms"], row["kind"], Epoch(row["epoch"]), name, data_json)
    return event if event.canonical() == text else None


def _loads(text: str) -> dict[str, Any]:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
