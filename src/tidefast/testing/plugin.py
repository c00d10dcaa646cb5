"""The pytest plugin: three fixtures, and the story of each run in the report of a test that failed.

pytest loads this in every session where Tidefast is installed, so nothing of Tidefast is imported before a fixture is
asked for.
"""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidefast.testing import Bench, ManualClock, Provider

STORIES_MAX = 3
_results = pytest.StashKey[list[Any]]()


@pytest.fixture
def tidefast_clock() -> "ManualClock":
    """A clock that moves when told to; the bench of the same test runs in its time."""
    from tidefast.testing import ManualClock

    return ManualClock()


@pytest.fixture
def tidefast_provider() -> "Provider":
    """A provider that knows keys and counts what it did."""
    from tidefast.testing import Provider

    return Provider()


@pytest.fixture
def tidefast_bench(
    request: pytest.FixtureRequest, tidefast_clock: "ManualClock", tidefast_provider: "Provider"
) -> "Callable[..., Bench]":
    """Makes benches, `tidefast_bench(app, store="sqlite")`, over the clock and the provider of the test."""
    from tidefast.testing import Bench

    kept: list[Bench] = []
    request.node.stash[_results] = kept

    def make(app: Any, **options: Any) -> Bench:
        bench = Bench(app, **{"clock": tidefast_clock, "provider": tidefast_provider, **options})
        kept.append(bench)
        return bench

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Generator[None, Any, Any]:
    """Tell what the benches of a failed test ran last, unless its own message has told it."""
    report = yield
    if report.when == "call" and report.failed:
        results = [result for bench in item.stash.get(_results, []) for result in bench.results]
        told = "" if call.excinfo is None else str(call.excinfo.value)
        stories = [result.story() for result in results[-STORIES_MAX:]]
        stories = [story for story in stories if story.partition("\n")[2] not in told]
        if stories:
            report.sections.append(("tidefast", "\n\n".join(stories)))
    return report
