"""The model hop at its gate figures: five hundred cuts, and twice the load. Each rig convicts a mutant."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.models.house import House, house, question, text_of

from tidefast.demo.providers.scripted import Said
from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.chat import Fold
from tidefast.services.model_hop import ModelHop

CUTS = 500
ASKS_MAX = 1_000  # of one step, refusals for a while included
EVENTS = 12  # of one answer: role, eight pieces, finish, usage, end
BILLED = frozenset(("applied", "doubted", "lost"))
WORDS = "eight words in pieces that can be cut"


class Case(NamedTuple):
    """What befalls one step: the askings before the last fail so, and the lease moves at this one (0: never)."""

    fails: tuple[Said, ...]
    is_stream: bool
    moves_at: int


def cases(seed: int) -> list[Case]:
    chance = random.Random(seed)
    found = []
    for number in range(CUTS):
        cut = Said(WORDS, cut_after=number % EVENTS, is_polite=number // EVENTS % 2 == 0)
        other = chance.choice(
            [
                Said("", status=500),
                Said("", status=429, headers={"retry-after-ms": "1"}),
                Said("", status=503),
                Said(WORDS, cut_after=chance.randrange(EVENTS)),
            ]
        )
        fails = (cut,) if chance.random() < 0.6 else (cut, other)
        found.append(Case(fails, chance.random() < 0.8, chance.choice((0, 0, 1))))
    return found


class Told(NamedTuple):
    """What the rig found: askings billed, those beyond the first of their step, and what doesn't fit."""

    billed: int
    extra: int
    faults: list[str]


async def ask_to_the_end(home: House, run: str, body: str, case: Case) -> Any:
    """What a worker's loop does: asks until an answer or a final refusal, under a new lease where it lost its own."""
    right, moved = await home.lease(run), 0
    for _ in range(ASKS_MAX):
        relay = home.hop.listen(right) if case.is_stream else None
        asking = asyncio.ensure_future(home.ask(right, body=body, relay=relay))
        if case.moves_at and not moved:
            moved = 1
            await asyncio.sleep(0)
            right = await home.lease(run, holder="w2")
        answer = await asking
        if isinstance(answer, StepAnswer) or answer.code == "step_rejected":
            return answer
        await home.engine.wait_for_change(right.run_id, int(answer.facts.get("retry_after_ms", 1)))
    raise AssertionError(f"{run} got nowhere: {answer}")


async def cut_them_all(tmp_path: Path, seed: int) -> Told:
    """Five hundred steps, each of which meets at least one cut; then the provider's bill against the books."""
    plan = cases(seed)
    asked: Counter[int] = Counter()

    def script(request: Any, count: int) -> Said:
        number = int(request["messages"][-1]["content"])
        place = asked[number]
        asked[number] += 1
        fails = plan[number].fails
        return fails[place] if place < len(fails) else Said(f"{WORDS} {number}")

    faults: list[str] = []
    limits = "failures = 1000\nconcurrency = 16\nqueue = 1000"
    async with house(tmp_path, script, upstream=limits) as home:
        bodies = [question(str(number), stream=case.is_stream, max_tokens=50) for number, case in enumerate(plan)]
        work = (ask_to_the_end(home, f"r{n}", bodies[n], case) for n, case in enumerate(plan))
        answers = await asyncio.gather(*work)
        billed = Counter(int(one.question) for one in home.model.bill)
        for number, answer in enumerate(answers):
            attempts = [a.state for a in home.step(run=f"r{number}").attempts]
            counted = sum(state in BILLED for state in attempts)
            if billed[number] > counted:
                faults.append(f"{number}: billed {billed[number]} times, the log has {attempts}")
            if home.spent(f"run/r{number}").calls < billed[number]:
                faults.append(f"{number}: billed {billed[number]} times, booked {home.spent(f'run/r{number}').calls}")
            if isinstance(answer, StepAnswer) and text_of(answer) != f"{WORDS} {number}":
                faults.append(f"{number}: answered {text_of(answer)!r}")
        extra = sum(max(0, count - 1) for count in billed.values())
        return Told(billed.total(), extra, faults)


@pytest.mark.rig
def test_of_five_hundred_cuts_none_is_taken_for_an_answer_and_every_extra_bill_is_counted(tmp_path: Path) -> None:
    told = asyncio.run(cut_them_all(tmp_path, 1))
    print(f"{CUTS} cuts: {told.billed} askings billed, {told.extra} of them extra, {len(told.faults)} uncounted")
    assert told.faults == []
    assert told.billed >= CUTS and told.extra > 0


@pytest.mark.rig
def test_a_cut_stream_taken_for_an_answer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def polite(fold: Fold) -> str:
        return ""

    monkeypatch.setattr(Fold, "unfinished", polite)
    assert asyncio.run(cut_them_all(tmp_path, 1)).faults


@pytest.mark.rig
def test_a_cut_that_is_booked_as_free_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ModelHop._amount

    def cheap(hop: ModelHop, asked: Any, heard: Any) -> Any:
        return (
            honest(hop, asked, heard) if heard.usage is not None else honest(hop, asked, heard._replace(kind="unsent"))
        )

    monkeypatch.setattr(ModelHop, "_amount", cheap)
    assert asyncio.run(cut_them_all(tmp_path, 1)).faults


# --- twice the load ---------------------------------------------------------------------------------------

PLACES = 8
THINK_S = 0.05
PATIENCE_S = 0.5  # of a caller: what comes later is of no use to it
PEAK_S, FLOOD_S = 2.0, 4.0


async def goodput(tmp_path: Path, upstream: str) -> tuple[float, float]:
    """(answers a second at the most that can be taken, answers in time a second at twice that)."""
    async with house(tmp_path, lambda r, c: Said("w", think_s=THINK_S), upstream=upstream) as home:
        right = await home.lease()
        loop = asyncio.get_running_loop()
        names = iter(range(10**9))

        async def once() -> bool:
            began = loop.time()
            answer = await home.ask(right, f"s{next(names)}", wait_ms=60_000)
            return isinstance(answer, StepAnswer) and loop.time() - began <= PATIENCE_S

        async def closed(until: float) -> int:
            good = 0
            while loop.time() < until:
                good += await once()
            return good

        until = loop.time() + PEAK_S
        peak = sum(await asyncio.gather(*(closed(until) for _ in range(PLACES)))) / PEAK_S
        began, flood = loop.time(), []
        while (elapsed := loop.time() - began) < FLOOD_S:
            due = int(elapsed * 2 * peak)
            flood += [asyncio.ensure_future(once()) for _ in range(due - len(flood))]
            await home.engine.wait_for_change(None, 5)
        good = sum(await asyncio.gather(*flood))
        return peak, good / FLOOD_S


@pytest.mark.rig
@pytest.mark.alone
def test_at_twice_the_load_at_least_eighty_percent_of_the_peak_is_answered_in_time(tmp_path: Path) -> None:
    peak, flooded = asyncio.run(goodput(tmp_path, f'concurrency = {PLACES}\nqueue = {PLACES}\nqueue_wait = "200ms"'))
    print(f"peak {peak:.0f}/s, in time at twice the load {flooded:.0f}/s: {flooded / peak:.0%}")
    assert flooded >= 0.8 * peak


@pytest.mark.rig
@pytest.mark.alone
def test_a_queue_without_bounds_answers_too_late(tmp_path: Path) -> None:
    peak, flooded = asyncio.run(goodput(tmp_path, f'concurrency = {PLACES}\nqueue = 100000\nqueue_wait = "1h"'))
    print(f"without bounds: peak {peak:.0f}/s, in time at twice the load {flooded:.0f}/s: {flooded / peak:.0%}")
    assert flooded < 0.8 * peak


def test_the_rigs_cases_meet_every_place_of_a_stream() -> None:
    assert {case.fails[0].cut_after for case in cases(1)} == set(range(EVENTS))
