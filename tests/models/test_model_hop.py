"""A model's answer is asked for under a live lease, paid for within a budget, journaled, and handed on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.models.house import (
    House,
    heard,
    house,
    micros,
    question,
    raw_of,
    run,
    says,
    text_of,
    told,
)

from tidefast.demo.providers.scripted import Said
from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.budget import Amount, Limit
from tidefast.protocol.ids import StepId
from tidefast.protocol.records import Right

PRICES = "[prices.small]\ninput = 1.0\noutput = 2.0\n"
SLOW = "concurrency = 1"


def inside(tmp_path: Path, play: Any, script: Any = None, **more: Any) -> None:
    async def whole() -> None:
        async with house(tmp_path, script, **more) as home:
            await play(home)

    run(whole())


async def until(holds: Any) -> None:
    """Wait for something that the model server will come to."""
    while not holds():  # noqa: ASYNC110 - it is another server's state, which has no event of ours
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_is_asked_for_once_and_its_bytes_are_the_same_ever_after(tmp_path: Path, is_stream: bool) -> None:
    async def play(home: House) -> None:
        right, body = await home.lease(), question(stream=is_stream)
        first = await home.ask(right, body=body)
        again = await home.ask(right, body=body)
        later = await home.ask(await home.lease(holder="w2"), body=body)
        assert text_of(first) == "four words are these (0)"
        assert raw_of(first) == raw_of(again) == raw_of(later)
        assert (first.replayed, again.replayed, later.replayed) == (False, True, True)
        assert len(home.model.bill) == 1
        assert home.step().effect == "model"

    inside(tmp_path, play)


def test_the_upstream_gets_the_callers_own_bytes_and_the_gateways_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALL_KEY", "sk-1")

    async def play(home: House) -> None:
        body = '{ "model":"small","zeta":1.0, "messages":[{"role":"user","content":"h\u00e9"}],"alpha":{"b":1,"a":2}}'
        await home.ask(await home.lease(), body=body)
        assert home.model.raw == [body.encode()]
        assert home.model.headers[0]["authorization"] == "Bearer sk-1"

    inside(tmp_path, play, upstream='credential = { env = "SMALL_KEY" }')


def test_the_usage_of_a_stream_is_asked_for_and_kept_from_a_caller_who_did_not_ask(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        answer = await home.ask(right, body=question(stream=True, stream_options={"x": 1}))
        assert home.model.asked[0]["stream_options"] == {"x": 1, "include_usage": True}
        assert b'"usage"' not in raw_of(answer)
        assert msgspec.json.decode(answer.receipt_json)["body"]["usage"]["prompt_tokens"] > 0
        wanted = await home.ask(right, "2", question(stream=True, stream_options={"include_usage": True}))
        assert b'"usage"' in raw_of(wanted)

    inside(tmp_path, play)


def test_the_same_step_with_another_request_is_a_conflict(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        await home.ask(right)
        assert says(await home.ask(right, body=question("something else"))) == ("step_conflict", "other_call")
        assert says(await home.ask(right, body=question(stream=True))) == ("step_conflict", "other_call")
        assert len(home.model.bill) == 1

    inside(tmp_path, play)


def test_a_stale_caller_is_refused_before_a_token_is_spent(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        old = await home.lease()
        await home.lease(holder="w2")
        assert says(await home.ask(old)) == ("stale_epoch", "superseded")
        assert says(await home.ask(old, body="{")) == ("stale_epoch", "superseded")
        assert home.model.asked == []
        assert home.spent() == Amount()

    inside(tmp_path, play)


def test_what_is_no_request_or_no_model_here_is_named(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        assert says(await home.ask(right, body='{"model": "small"}')) == ("invalid", "args")
        assert says(await home.ask(right, body="{")) == ("invalid", "args")
        unknown = await home.ask(right, body=json.dumps({"model": "big", "messages": [{}]}))
        assert says(unknown) == ("not_found", "model_unknown")
        assert unknown.facts["models"] == ["small"]

    inside(tmp_path, play)


# --- streams --------------------------------------------------------------------------------------------


def test_pieces_go_through_as_they_come_and_the_end_waits_for_the_commit(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        relay = home.hop.listen(right)
        task = asyncio.ensure_future(home.ask(right, body=question(stream=True), relay=relay))
        first = await relay.next()
        assert first is not None
        assert b'"role": "assistant"' in first
        assert home.step().state == "fenced"  # a piece was heard before the answer was whole
        rest = await heard(relay)
        assert home.step().state == "committed"
        assert first + rest == raw_of(await task)
        assert rest.endswith(b"data: [DONE]\n\n")

    inside(tmp_path, play, told(pace_s=0.01))


@pytest.mark.parametrize("cut_after", [0, 1, 4, 7, 8])
def test_a_cut_stream_is_no_answer_and_says_so(tmp_path: Path, cut_after: int) -> None:
    def script(request: Any, count: int) -> Said:
        return Said(text=f"a b c d {count}", cut_after=cut_after if count == 0 else None)

    async def play(home: House) -> None:
        right = await home.lease()
        relay = home.hop.listen(right)
        answer = await home.ask(right, body=question(stream=True), relay=relay)
        assert answer.code == "in_doubt"
        relay.close()
        assert b"[DONE]" not in await heard(relay)
        assert home.step().state == "in_doubt"
        again = await home.ask(right, body=question(stream=True))
        assert text_of(again) == "a b c d 1"
        assert len(home.model.bill) == len(home.step().attempts) == 2

    inside(tmp_path, play, script)


def test_an_answer_whose_lease_ends_in_mid_stream_is_finished_for_the_successor_and_not_for_its_caller(
    tmp_path: Path,
) -> None:
    async def script(request: Any, count: int) -> Said:
        return Said(text=f"one two three four {count}", pace_s=0.02)

    async def play(home: House) -> None:
        old = await home.lease()
        relay = home.hop.listen(old)
        body = question(stream=True)
        task = asyncio.ensure_future(home.ask(old, body=body, relay=relay))
        assert await relay.next() is not None
        new = await home.lease(holder="w2")
        late = await heard(relay)
        assert b"[DONE]" not in late
        assert relay.cut is not None and relay.cut.code == "stale_epoch"
        answer = await home.ask(new, body=body)
        assert says(await task)[0] == "stale_epoch"
        assert text_of(answer) == "one two three four 0"
        assert answer.replayed
        assert len(home.model.bill) == 1

    inside(tmp_path, play, script)


def test_a_caller_that_hangs_up_cancels_nothing(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        task = asyncio.ensure_future(home.ask(right))
        await until(lambda: home.model.asked)
        task.cancel()
        answer = await home.ask(right)
        assert text_of(answer) == "w (0)"
        assert len(home.model.bill) == 1

    inside(tmp_path, play, told("w", think_s=0.05))


# --- what surely was not billed, and what may have been --------------------------------------------------


def test_a_model_that_is_not_there_costs_nothing_and_is_asked_again_later(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        await home.model.close()
        answer = await home.ask(right)
        assert says(answer) == ("overloaded", "upstream_away")
        assert (home.step().state, home.spent()) == ("pending", Amount())

    inside(tmp_path, play)


@pytest.mark.parametrize("status", [401, 403, 429])
def test_an_upstream_that_turns_a_call_away_is_left_alone_for_as_long_as_it_says(tmp_path: Path, status: int) -> None:
    def script(request: Any, count: int) -> Said:
        return Said("busy", status=status, headers={"retry-after": "7"}) if count == 0 else Said("there")

    async def play(home: House) -> None:
        right = await home.lease()
        answer = await home.ask(right)
        assert says(answer) == ("overloaded", "upstream_away")
        assert answer.facts["retry_after_ms"] == 7_000
        other = await home.ask(right, "other")
        assert says(other) == ("overloaded", "upstream_busy")
        assert 6_000 < other.facts["retry_after_ms"] <= 7_000
        assert len(home.model.asked) == 1
        assert home.spent() == Amount()

    inside(tmp_path, play, script)


def test_a_status_that_is_declared_unbilled_counts_as_never_asked(tmp_path: Path) -> None:
    def script(request: Any, count: int) -> Said:
        return Said("full", status=503, headers={"retry-after-ms": "100"}) if count == 0 else Said("there")

    async def play(home: House) -> None:
        assert says(await home.ask(await home.lease())) == ("overloaded", "upstream_away")
        assert home.spent() == Amount()

    inside(tmp_path, play, script, upstream="unbilled = [503]")


def test_a_request_that_the_upstream_refuses_is_refused_for_good_and_costs_nothing(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        first, again = await home.ask(right), await home.ask(right)
        assert says(first) == says(again) == ("step_rejected", "refused")
        assert first.facts["receipt"]["body"]["error"]["message"] == "context too long"
        assert (len(home.model.asked), home.spent()) == (1, Amount())

    inside(tmp_path, play, lambda request, count: Said("context too long", status=400))


def test_a_model_that_never_answers_whole_is_asked_so_often_and_each_time_counts(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        for _ in range(3):
            assert (await home.ask(right)).code == "in_doubt"
        assert says(await home.ask(right)) == ("step_rejected", "unanswered")
        assert len(home.model.bill) == 3
        assert home.spent().calls == 3
        assert home.engine.budget("run/r1").estimated == home.spent()

    inside(tmp_path, play, lambda request, count: Said("x", cut_after=0))


def test_the_first_token_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        answer = await home.ask(await home.lease(), body=question(stream=True))
        assert says(answer) == ("in_doubt", "first_token")

    inside(tmp_path, play, told(think_s=5.0), upstream='first_token = "50ms"')


def test_the_whole_answer_has_a_deadline(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        assert says(await home.ask(right, body=question(stream=True))) == ("in_doubt", "timeout")

    inside(tmp_path, play, told("a b c d e f", pace_s=0.2), upstream='timeout = "250ms"')


def test_after_failures_in_a_row_the_upstream_is_left_alone(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        for name in "ab":
            assert (await home.ask(right, name)).code == "in_doubt"
        assert says(await home.ask(right, "c")) == ("overloaded", "circuit_open")
        assert len(home.model.asked) == 2

    inside(tmp_path, play, lambda r, c: Said("x", status=500), upstream='failures = 2\npause = "60s"')


# --- the queue --------------------------------------------------------------------------------------------


def test_no_more_run_at_once_than_configured_and_no_more_wait(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        asked = [asyncio.ensure_future(home.ask(right, f"s{n}")) for n in range(6)]
        answers = await asyncio.gather(*asked)
        refused = [a for a in answers if not isinstance(a, StepAnswer)]
        assert [says(a) for a in refused] == [("overloaded", "queue_full")] * 2
        assert all(a.facts["retry_after_ms"] > 0 for a in refused)
        assert home.model.most_running == 2

    inside(tmp_path, play, told(think_s=0.05), upstream="concurrency = 2\nqueue = 2")


def test_a_place_in_the_queue_is_given_up_with_the_lease(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        first, other = await home.lease("r1"), await home.lease("r2")
        running = asyncio.ensure_future(home.ask(first))
        await until(lambda: home.model.asked)
        waiting = asyncio.ensure_future(home.ask(other))
        await until(lambda: home.hop.upstreams["local"].queued)
        await home.lease("r2", holder="w2")
        assert says(await waiting)[0] == "stale_epoch"
        assert home.hop.upstreams["local"].queued == 0
        await running
        assert len(home.model.asked) == 1

    inside(tmp_path, play, told(think_s=0.7), upstream=SLOW)


def test_a_caller_waits_in_the_queue_only_so_long(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        running = asyncio.ensure_future(home.ask(right, "a"))
        await until(lambda: home.model.asked)
        assert says(await home.ask(right, "b")) == ("overloaded", "queue_wait")
        assert home.engine.step(right.run_id, StepId("b")) is None  # nothing was written for it
        await running

    inside(tmp_path, play, told(think_s=0.3), upstream=f'{SLOW}\nqueue_wait = "50ms"')


# --- budgets ----------------------------------------------------------------------------------------------


def test_a_call_is_booked_by_the_providers_usage_for_run_agent_and_key(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        await home.ask(await home.lease(), key="ci")
        bill = home.model.bill[0]
        paid = Amount(1, bill.input_tokens + bill.output_tokens, bill.input_tokens + 2 * bill.output_tokens)
        assert [home.spent(name) for name in ("run/r1", "agent/desk", "key/ci")] == [paid] * 3
        assert home.engine.budget("run/r1").open == ()

    inside(tmp_path, play, rest=PRICES)


@pytest.mark.parametrize("budget", ["[budgets.run]", "[budgets.agent.desk]", "[budgets.key.ci]"])
def test_zero_means_zero(tmp_path: Path, budget: str) -> None:
    async def play(home: House) -> None:
        answer = await home.ask(await home.lease(), key="ci")
        assert says(answer) == ("limit_reached", "budget")
        name = answer.facts["budget"]
        assert answer.facts["command"] == f"tidefast budgets {name} --calls 1"
        assert home.model.asked == []
        assert home.engine.budget("run/r1").open == ()

    inside(tmp_path, play, rest=f"{budget}\ncalls = 0")


def test_of_four_at_once_no_more_are_asked_than_the_budget_allows(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        rights = [await home.lease(f"r{n}", holder=f"w{n}") for n in range(4)]
        answers = await asyncio.gather(*(home.ask(right) for right in rights))
        over = [a for a in answers if not isinstance(a, StepAnswer)]
        assert [says(a) for a in over] == [("limit_reached", "budget")] * 2
        assert len(home.model.bill) == 2

    inside(tmp_path, play, told(think_s=0.02), rest="[budgets.agent.desk]\ncalls = 2")


def test_a_raised_limit_lets_the_same_step_through(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        assert says(await home.ask(right)) == ("limit_reached", "budget")
        info = await home.authority.raise_budget("run/r1", Limit(calls=1), "ops", "one more")
        assert (info.limit_calls, info.note) == (1, "ops: one more")
        assert isinstance(await home.ask(right), StepAnswer)
        assert [b.name for b in await home.authority.budgets("", 9)] == ["agent/desk", "run/r1"]

    inside(tmp_path, play, rest="[budgets.run]\ncalls = 0")


def test_an_answer_in_the_journal_needs_no_budget(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        first = await home.ask(right)
        assert raw_of(await home.ask(right)) == raw_of(first)
        assert says(await home.ask(right, "2")) == ("limit_reached", "budget")

    inside(tmp_path, play, rest="[budgets.run]\ncalls = 1")


def test_a_cut_stream_is_booked_at_its_estimate_and_the_next_gets_only_what_is_left(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        right = await home.lease()
        body = question(stream=True, max_tokens=100)
        assert (await home.ask(right, body=body)).code == "in_doubt"
        budget = home.engine.budget("run/r1")
        assert budget.estimated == budget.spent
        assert budget.spent.tokens >= 100
        assert says(await home.ask(right, "2", body)) == ("limit_reached", "budget")

    inside(tmp_path, play, lambda r, c: Said("a b c", cut_after=3), rest="[budgets.run]\ntokens = 250")


def test_money_is_counted_in_millionths_and_rounded_up(tmp_path: Path) -> None:
    async def play(home: House) -> None:
        answer = await home.ask(await home.lease(), body=question(max_tokens=10))
        assert says(answer) == ("limit_reached", "budget")
        assert answer.facts["limit"] == 0.00001
        assert home.spent().micros == 0
        assert micros("0.00001") == 10

    inside(tmp_path, play, rest=f"{PRICES}[budgets.run]\nmoney = 0.00001")


def test_the_stored_request_is_asked_again_for_a_successor_that_settles(tmp_path: Path) -> None:
    def script(request: Any, count: int) -> Said:
        return Said("x y", cut_after=0 if count == 0 else None)

    async def play(home: House) -> None:
        right = await home.lease()
        await home.ask(right, body=question("the first words"))
        new: Right = await home.lease(holder="w2")
        answer = await home.authority.apply(new, "plan", "", None, 5_000)
        assert text_of(answer) == "x y"
        assert home.model.raw[0] == home.model.raw[1]

    inside(tmp_path, play, script)
