"""Refusals as RFC 9457 problem details, and back.

A problem names a stable `code`, a finer `reason`, what was refused, what is kept and what to do next, with the facts
(epochs, holder, steps, times) under `facts`. `from_refused` and `to_refused` are inverse for every code of the
protocol. No problem ever holds a stack, a path of the host, or any part of a credential.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, get_args

from tidefast.protocol.canonical import JSON
from tidefast.protocol.verdicts import Code, Refused
from tidefast.wire.refusals import REASONS, ROWS, Words

MEDIA_TYPE = "application/problem+json"
CODES: frozenset[str] = frozenset(get_args(Code))
SECRETS = ("tfl1.", "tfk1.", "tfo1.")  # how lease tokens, callers' keys and the operator's key begin
HIDDEN = "(a secret)"
UNREADABLE = frozenset(("internal", "store_unavailable", "overloaded"))  # whether the call acted is unknown


@dataclass(frozen=True, slots=True)
class Problem:
    """One refusal as the wire tells it. `retry_after_ms` 0 means: asking again doesn't help."""

    status: int
    code: str
    reason: str
    title: str
    detail: str
    kept: str
    next: str
    retry_after_ms: int = 0
    facts: Mapping[str, JSON] = field(default_factory=dict)

    def to_record(self) -> dict[str, JSON]:
        record: dict[str, JSON] = {
            "type": f"urn:tidefast:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "reason": self.reason,
            "kept": self.kept,
            "next": self.next,
        }
        if self.retry_after_ms:
            record["retry_after_ms"] = self.retry_after_ms
        if self.facts:
            record["facts"] = self.facts
        return record

    def to_json(self) -> bytes:
        return json.dumps(self.to_record(), separators=(",", ":")).encode()


def problem(code: str, reason: str, facts: Mapping[str, JSON] | None = None) -> Problem:
    """The problem of a code and a reason; a reason without words of its own gets its code's."""
    row, words = ROWS[code], REASONS.get((code, reason), Words())
    known = {name: _without_secret(value) for name, value in (facts or {}).items()}
    retry = known.get("retry_after_ms")
    shown = _Shown({"reason": reason, **known})
    return Problem(
        status=words.status or row.status,
        code=code,
        reason=reason,
        title=row.title,
        detail=(words.detail or row.detail).format_map(shown),
        kept=row.kept,
        next=(words.next or row.next).format_map(shown),
        retry_after_ms=retry if type(retry) is int and retry > 0 else row.retry_ms,
        facts=known,
    )


def from_refused(refused: Refused) -> Problem:
    """A refusal of the protocol as a problem."""
    return problem(refused.code, refused.reason, refused.facts)


def to_refused(told: Problem) -> Refused:
    """The refusal behind a problem, for a client that speaks in the protocol's words.

    A token that the authority doesn't take gives no right, so its bearer is told what a stale one is told; every other
    code that only the wire knows is a request that this client should not have sent. A sentence that was made for one
    request goes along as the fact `detail`.
    """
    if told.code in CODES:
        refused = Refused(cast(Code, told.code), told.reason, told.facts)
        is_own = told.code == "invalid" and told.detail != from_refused(refused).detail
        return Refused(refused.code, refused.reason, {**told.facts, "detail": told.detail}) if is_own else refused
    code: Code = "stale_epoch" if told.code == "bad_token" else "invalid"
    reason = "bad_token" if told.code == "bad_token" else told.reason
    return Refused(code, reason, {**told.facts, "code": told.code, "detail": told.detail})


def from_json(status: int, body: bytes) -> Problem | None:
    """The problem in an answer; None if the answer holds none, as when something else than Tidefast answered."""
    try:
        record = json.loads(body)
    except ValueError:
        return None
    return from_record(status, record)


def from_event(raw: bytes) -> Problem | None:
    """The problem with which a broken stream of a model ends; None if this event is none."""
    try:
        return from_record(0, json.loads(raw.removeprefix(b"data:"))["error"]["problem"])
    except (ValueError, KeyError, TypeError):
        return None


def from_record(status: int, record: object) -> Problem | None:
    """The problem in a decoded answer; None if it is none."""
    if not isinstance(record, dict) or not isinstance(record.get("code"), str):
        return None
    texts = {name: str(record.get(name, "")) for name in ("reason", "title", "detail", "kept", "next")}
    facts, retry = record.get("facts", {}), record.get("retry_after_ms", 0)
    return Problem(
        status=status,
        code=record["code"],
        retry_after_ms=retry if type(retry) is int else 0,
        facts=facts if isinstance(facts, dict) else {},
        **texts,
    )


def invalid(reason: str, detail: str, facts: Mapping[str, JSON] | None = None) -> Problem:
    """The refusal of a request's form, with its own sentence: always 400, and nothing was looked at further."""
    row = ROWS["invalid"]
    return Problem(400, "invalid", reason, row.title, f"{_sentence(detail)}.", row.kept, row.next, 0, dict(facts or {}))


def too_large() -> Problem:
    return problem("too_large", "body_too_large", {"limit": 1024 * 1024})


def _without_secret(value: JSON) -> JSON:
    """A fact, unless it is one of our own secrets, which somebody has put where a name belongs."""
    return HIDDEN if isinstance(value, str) and value.startswith(SECRETS) else value


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


class _Shown(dict[str, JSON]):
    """Facts as they stand in a sentence: lists with commas, and a word for what isn't known."""

    def __missing__(self, name: str) -> str:
        return "unknown"

    def __getitem__(self, name: str) -> JSON:
        value = super().__getitem__(name) if name in self else self.__missing__(name)
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value)) or "none"
        return "no one" if name == "holder" and value == "" else value
