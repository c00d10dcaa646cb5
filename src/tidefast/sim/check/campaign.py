"""All configurations, on two cores, as one report."""

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidefast.protocol.laws import Violation
from tidefast.sim.check.configs import Config
from tidefast.sim.check.search import Result, search
from tidefast.sim.check.sometimes import WANTED
from tidefast.sim.check.world import RUN
from tidefast.sim.report import Report, to_json, to_text

PROCESSES = 2
STATES_GATE = 1_000_000
TRANSITIONS_GATE = 5_000_000


@dataclass(frozen=True, slots=True)
class Campaign:
    """What the searches of several configurations came to. With `has_gate` it must also have been large enough."""

    results: tuple[Result, ...]
    seconds: float
    has_gate: bool = False

    @property
    def states(self) -> int:
        return sum(result.states for result in self.results)

    @property
    def transitions(self) -> int:
        return sum(result.transitions for result in self.results)

    @property
    def cpu_seconds(self) -> float:
        return sum(result.cpu_seconds for result in self.results)

    @property
    def seen(self) -> Counter[str]:
        return sum((result.seen for result in self.results), Counter())

    @property
    def missed(self) -> tuple[str, ...]:
        """The named things that should have happened at least once and didn't."""
        seen = self.seen
        return tuple(name for name in WANTED if not seen[name])

    @property
    def is_large_enough(self) -> bool:
        return self.states >= STATES_GATE and self.transitions >= TRANSITIONS_GATE

    @property
    def is_ok(self) -> bool:
        holds = all(result.is_ok for result in self.results) and not self.missed
        return holds and (self.is_large_enough or not self.has_gate)

    def report(self) -> Report:
        """The fields that every proof reports; a wedged state is a rejected call that is never answered."""
        moves: Counter[str] = sum((result.moves for result in self.results), Counter())
        faults: Counter[str] = sum((result.faults for result in self.results), Counter())
        findings = [finding for result in self.results for finding in result.findings]
        return Report(
            interleavings=sum(result.changes for result in self.results),
            preemptions=moves["preempt"] + moves["lapse"],
            mutating_steps=moves["apply"] + moves["compensate"],
            violations=Counter(finding.law for finding in findings),
            rejected=sum(result.stale for result in self.results),
            rejected_unanswered=sum(result.wedged for result in self.results),
            held=sum(result.held for result in self.results),
            faults=faults,
            named=tuple(Violation(finding.law, RUN, None, 0, finding.why) for finding in findings),
        )


def run(
    configs: Sequence[Config],
    *,
    processes: int = PROCESSES,
    has_gate: bool = False,
    on_done: Callable[[Result], None] | None = None,
) -> Campaign:
    """Search each configuration to its end, the first ones first, several at a time."""
    began = time.perf_counter()
    results: list[Result] = []
    if processes == 1:
        for config in configs:
            results.append(search(config))
            if on_done is not None:
                on_done(results[-1])
    else:
        with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
            for result in pool.imap_unordered(search, configs):
                results.append(result)
                if on_done is not None:
                    on_done(result)
    results.sort(key=lambda result: configs.index(result.config))
    return Campaign(tuple(results), time.perf_counter() - began, has_gate)


def campaign_json(campaign: Campaign) -> str:
    """The report as one line of JSON: the fields of every proof, then those of a search."""
    common = json.loads(to_json(campaign.report()))
    more = {
        "ok": campaign.is_ok,
        "states": campaign.states,
        "transitions": campaign.transitions,
        "closed": all(result.is_closed for result in campaign.results),
        "wedged": sum(result.wedged for result in campaign.results),
        "sometimes": {name: campaign.seen[name] for name in WANTED},
        "missed": list(campaign.missed),
        "seconds": round(campaign.seconds, 1),
        "cpu_seconds": round(campaign.cpu_seconds, 1),
        "configurations": [
            {
                "name": result.config.name,
                "states": result.states,
                "transitions": result.transitions,
                "depth": result.depth,
                "closed": result.is_closed,
                "wedged": result.wedged,
                "ended": result.ended,
                "violations": [{"law": finding.law, "why": finding.why} for finding in result.findings],
                "seconds": round(result.seconds, 1),
                "cpu_seconds": round(result.cpu_seconds, 1),
            }
            for result in campaign.results
        ],
    }
    return json.dumps({**common, **more})


def campaign_text(campaign: Campaign) -> str:
    """The report for people."""
    header = f"{'configuration':<44} {'states':>10} {'transitions':>12} {'depth':>5} {'cpu s':>7}  frontier"
    lines = [header, *(row(result) for result in campaign.results)]
    total = f"{'in all':<44} {campaign.states:>10,} {campaign.transitions:>12,} {'':>5} {campaign.cpu_seconds:>7.1f}"
    lines += [f"{total}  in {campaign.seconds:.1f} s", ""]
    seen = campaign.seen
    lines += [f"{'sometimes: ' + name.replace('_', ' '):<58} {seen[name]:>12,}" for name in WANTED]
    lines += ["", to_text(campaign.report()).rstrip("\n")]
    lines += [f"NOT OK: never happened: {name.replace('_', ' ')}" for name in campaign.missed]
    if campaign.has_gate and not campaign.is_large_enough:
        lines.append(f"NOT OK: too small; expected {STATES_GATE:,} states and {TRANSITIONS_GATE:,} transitions")
    return "\n".join(lines) + "\n"


def row(result: Result) -> str:
    """One configuration in a line."""
    end = "closed" if result.is_closed else "OPEN"
    if result.wedged:
        end += f", {result.wedged:,} wedged"
    numbers = f"{result.states:>10,} {result.transitions:>12,} {result.depth:>5} {result.cpu_seconds:>7.1f}"
    return f"{result.config.name:<44} {numbers}  {end}"
