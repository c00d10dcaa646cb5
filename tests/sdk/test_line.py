"""How long a question waits before it is put again, and what the log tells of a long wait."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.verdicts import Done, Refused
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.sdk.errors import PassEnded
from tidefast.sdk.lease import HeldLease
from tidefast.sdk.line import Backoff, Line

GRANT = LeaseGrant(RunId("r1"), "a", "1", Epoch(1), "w1", 600_000, 9, "null", 0, "null", False, ())
DONE = Done("done", 1)


def waits(monkeypatch: pytest.MonkeyPatch, *answers: Any, took_s: float = 0.0) -> list[float]:
    """How long the line waits after each of these answers; each question takes a while by its clock."""
    delays: list[float] = []
    now_s = [0.0]
    rest = [*answers, DONE]

    async def main() -> None:
        lease = HeldLease(GRANT, 0.0)
        line = Line(None, GRANT, lease, Backoff(), lambda: now_s[0])  # type: ignore[arg-type]

        async def pause(delay_s: float, is_deaf: bool) -> None:
            delays.append(delay_s)
            lease.from_s = now_s[0]  # a heartbeat

        async def question() -> Any:
            now_s[0] += took_s
            answer = rest.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(line, "_pause", pause)
        assert await line.ask(question, "pay") is DONE

    asyncio.run(main())
    return delays


def doubt(**facts: Any) -> Refused:
    return Refused("in_doubt", "no_answer", facts)


def test_doubt_that_stays_is_asked_about_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    assert waits(monkeypatch, *[doubt()] * 12) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0]
    assert waits(monkeypatch, *[Refused("step_pending", "older_attempt")] * 12)[-1] == 60.0
    for other in (Refused("step_in_flight", "in_flight"), AuthorityUnavailable("cut off")):
        assert waits(monkeypatch, *[other] * 12)[-1] == 5.0
        assert waits(monkeypatch, *[other] * 12, doubt())[-1] == 0.1  # each kind has a count of its own


def test_the_authority_says_when_asking_again_has_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("in_doubt", "step_in_flight"):
        said = [Refused(code, "x", {"retry_after_ms": after}) for after in (20_000, 3_600_000)]  # type: ignore[arg-type]
        assert waits(monkeypatch, *said) == [20.0, 60.0]
    assert waits(monkeypatch, doubt(until_ms=3_600_000)) == [5.0]  # its latest moment; it may be over sooner


def test_a_long_wait_is_told_after_ten_seconds_and_at_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as lines:
        waits(monkeypatch, *[doubt()] * 9, AuthorityUnavailable("cut off"), *[doubt()] * 20, took_s=6.0)
    assert [(line["waited_s"], line["code"], line["reason"]) for line in lines] == [
        (12, "in_doubt", "no_answer"),
        (24, "in_doubt", "no_answer"),
        (42, "in_doubt", "no_answer"),
        (84, "in_doubt", "no_answer"),
        (162, "in_doubt", "no_answer"),
    ]
    assert {(line["event"], line["run"], line["step"], line["log_level"]) for line in lines} == {
        ("still_waiting", "r1", "pay", "warning")
    }
    with capture_logs() as lines:
        waits(monkeypatch, *[doubt()] * 9)
    assert lines == []


def test_a_long_wait_is_cut_short_by_a_stop() -> None:
    async def main() -> None:
        line = Line(None, GRANT, HeldLease(GRANT, 0.0), Backoff(), lambda: 0.0)  # type: ignore[arg-type]
        line.end(PassEnded("r1", "done", "the agent has returned"))

        heard = asyncio.Event()

        async def question() -> Any:
            heard.set()
            return doubt(retry_after_ms=3_600_000)

        asking = asyncio.create_task(line.ask(question, "pay", is_ending=True))
        await heard.wait()
        await asyncio.sleep(0)
        assert not asking.done()
        line.stop()
        with pytest.raises(PassEnded):
            await asyncio.wait_for(asking, 5)

    asyncio.run(main())
