"""`every_point`: one agent, once for each fault at each point of each of its steps.

    def test_the_refund_survives_everything() -> None:
        every_point(app, "refund", {"order": 7}, provider=bank).assert_ok()

A first run without faults shows where the agent comes by. Then each place is struck by each kind of fault in turn, in a
run of its own, and the auditor judges each one against the provider's count. A run may end as the first one did, or be
held for a person; anything else is a finding, and so is a breach of a law.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidefast.protocol.canonical import JSON
from tidefast.protocol.lease import LEASE_DEFAULT_MS
from tidefast.sdk.app import App
from tidefast.testing.bench import Bench, StoreKind, Tools
from tidefast.testing.faults import BY_PROVIDER, KINDS, POINTS, WORDS, Fault, FaultKind
from tidefast.testing.provider import Provider
from tidefast.testing.result import Result, Unlawful

LATE = ("gateway.after_intent", "gateway.after_send")  # where a call stands whose outcome nobody has booked yet
STORIES_MAX = 3  # findings that a message tells in full


@dataclass(frozen=True)
class SweepReport:
    """What was tried, which is the denominator, and what was found."""

    first: Result  # the run without faults
    results: Sequence[Result]  # one for each fault

    @property
    def findings(self) -> Sequence[tuple[Result, str]]:
        """The runs that should not have gone as they did, each with the reason."""
        return [(result, why) for result in (self.first, *self.results) if (why := self._finding(result))]

    def _finding(self, result: Result) -> str:
        if not result.is_lawful:
            return f"breaks {', '.join(sorted({violation.law for violation in result.violations}))}"
        if result is self.first:
            return "" if result.state in ("completed", "failed") else f"is {result.state} without any fault"
        if len(result.struck) != len(result.faults):
            return "never came to the place where it was to be struck, unlike the run without faults"
        if result.state not in (self.first.state, "held"):
            return f"is {result.state}, but {self.first.state} without the fault"
        return ""

    @property
    def is_ok(self) -> bool:
        """Whether anything was struck at all and nothing was found."""
        return bool(self.results) and not self.findings

    @property
    def held(self) -> int:
        """Runs in which a step waits for a person, because its contract promises too little to go on alone."""
        return sum(result.state == "held" for result in self.results)

    def assert_ok(self) -> "SweepReport":
        """Raise `Unlawful` with the figures and the story of each finding, unless every run went as it should."""
        __tracebackhide__ = True
        if not self.is_ok:
            raise Unlawful(str(self))
        return self

    def __str__(self) -> str:
        struck = Counter(fault.kind for result in self.results for fault in result.struck)
        steps = {fault.step for result in self.results for fault in result.faults}
        places = {(fault.step, fault.point) for result in self.results for fault in result.faults}
        where = f"{len(steps)} steps and checkpoints, {len(places)} places, {len(struck)} kinds of fault"
        lines = [
            f"{len(self.results)} runs struck, {len(self.findings)} findings, {self.held} held for a person: {where}",
            *(f"{count:>5}  {WORDS[kind]}" for kind, count in sorted(struck.items())),
        ]
        for result, why in self.findings[:STORIES_MAX]:
            lines += ["", result.story(why)]
        if len(self.findings) > STORIES_MAX:
            lines += ["", f"and {len(self.findings) - STORIES_MAX} more findings:"]
            lines += [f"  {_told(result)}: {why}" for result, why in self.findings[STORIES_MAX:]]
        return "\n".join(lines)


def _told(result: Result) -> str:
    return "; ".join(map(str, result.faults)) or "without any fault"


def every_point(
    app: App,
    agent: str,
    input: JSON = None,
    *,
    provider: Provider | None = None,
    tools: Tools | None = None,
    kinds: Sequence[FaultKind] = KINDS,
    store: StoreKind = "memory",
    lease_ms: int = LEASE_DEFAULT_MS,
) -> SweepReport:
    """Run the agent once without faults and once per fault, step and point. Nothing is raised for what is found.

    Without a provider of its own the tools' effects can't be counted: the logs alone are judged then.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"no fault is called {unknown[0]!r}; expected some of {', '.join(KINDS)}")
    provider = provider or Provider()

    def run(faults: Fault | None) -> Result:
        provider.reset()
        bench = Bench(app, provider=provider, tools=tools, store=store, lease_ms=lease_ms)
        return bench.run(agent, input, faults=faults)

    first = run(None)
    if first.state not in ("completed", "failed") or not first.is_lawful:
        return SweepReport(first, ())
    return SweepReport(first, [run(fault) for fault in _plan(first, kinds)])


def _plan(first: Result, kinds: Sequence[FaultKind]) -> Iterator[Fault]:
    """Every fault that could strike a run which came by these places."""
    for point, step in dict.fromkeys(first.places):
        for kind in kinds:
            if kind in BY_PROVIDER or (kind == "late_answer" and point not in LATE):
                continue
            yield Fault(kind, step, POINTS[POINTS.index(point)])
    for step in dict.fromkeys(effect.step for effect in first.calls if effect.step):
        yield from (Fault(kind, step) for kind in kinds if kind in BY_PROVIDER)
