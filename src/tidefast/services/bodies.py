"""Reads bodies back from the log: stored calls, receipts, inputs, states.

Request and receipt bytes stand once, in events; heads and steps only point at them. Everything read here is durable.
"""

from collections.abc import Mapping

import msgspec

from tidefast.engine.engine import Engine, InvariantViolation
from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.contracts import Request
from tidefast.protocol.events import Event
from tidefast.protocol.ids import RunId
from tidefast.protocol.verdicts import Answer, Refused

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Bodies:
    """The bodies of one engine's runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def data(self, run_id: RunId, seq: int) -> str:
        """The data of an event that must exist, as canonical text."""
        return self._event(run_id, seq).data_json

    def _event(self, run_id: RunId, seq: int) -> Event:
        key = self._engine.run_key(run_id)
        stored = None if key is None else self._engine.store.load_event(key, seq)
        if stored is None:
            raise InvariantViolation(f"run {run_id} names event {seq}, which the store does not hold")
        return stored.event

    def at_ms(self, run_id: RunId, seq: int) -> int:
        """When an event that must exist was decided."""
        return self._event(run_id, seq).at_ms

    def member(self, run_id: RunId, seq: int, name: str) -> str:
        """One member of an event's data as canonical text, `null` if it has none."""
        raw = _members.decode(self.data(run_id, seq)).get(name)
        return "null" if raw is None else bytes(raw).decode()

    def stored_call(self, run_id: RunId, intent_seq: int) -> tuple[str, Request | None]:
        """(arguments, HTTP request) of an intent, byte for byte as they were stored."""
        members = _members.decode(self.data(run_id, intent_seq))
        fields: Mapping[str, object] | None = msgspec.json.decode(members["request"])
        return bytes(members["args"]).decode(), None if fields is None else Request(**fields)  # type: ignore[arg-type]

    def receipt(self, run_id: RunId, receipt_seq: int) -> str:
        """The receipt (or a local step's value) that an event holds, `null` if it has none."""
        members = _members.decode(self.data(run_id, receipt_seq))
        raw = members.get("receipt", members.get("value"))
        return "null" if raw is None else bytes(raw).decode()

    def step_answer(self, run_id: RunId, answer: Answer) -> StepAnswer:
        receipt = self.receipt(run_id, answer.receipt_seq) if answer.receipt_seq else "null"
        return StepAnswer(
            run_id,
            answer.step_id,
            answer.state,
            answer.epoch,
            answer.key,
            answer.replayed,
            receipt,
            answer.closed_by,
        )

    def with_receipt(self, run_id: RunId, refused: Refused) -> Refused:
        """A stored refusal, with the provider's answer beside its reason."""
        seq = refused.facts.get("receipt_seq")
        if not isinstance(seq, int) or seq == 0:
            return refused
        receipt = msgspec.json.decode(self.receipt(run_id, seq))
        return Refused(refused.code, refused.reason, {**refused.facts, "receipt": receipt})
