"""What the server counts, and `/metrics`.

Counting is adding to plain numbers on the event loop; `prometheus-client` is loaded when somebody first asks. What
happened to steps and leases is counted from the events that became durable, so a counter never says more than the log.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from tidefast.server.load import Load
from tidefast.stores.base import Batch
from tidefast.wire.problem import Problem

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from tidefast.services.reads import Troubles


class Told(Protocol):
    """Anything that was answered."""

    @property
    def status(self) -> int: ...


MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDED_BY_FORCE = frozenset(("lease_lapsed", "lease_preempted"))
RUNS_KEPT = 100_000  # runs without a holder whose recovery is timed
COUNTED = {
    "step_fenced": ("tidefast_admitted", "Attempts whose intent became durable."),
    "step_committed": ("tidefast_committed", "Steps committed under a live epoch."),
    "step_applied": ("tidefast_applied", "Receipts recorded after their epoch had ended."),
    "step_doubted": ("tidefast_doubted", "Attempts whose outcome nobody knows."),
    "step_held": ("tidefast_held", "Steps that began to wait for a person."),
    "step_compensated": ("tidefast_compensated", "Steps undone."),
    "lease_granted": ("tidefast_grants", "Leases granted."),
}
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
MINUTES = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each bound with how many were not above it."""
        told, total = list[tuple[str, float]](), 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            told.append((bound, total))
        return told


class Meters:
    """The counts of one server."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.events: Counter[str] = Counter()
        self.answered: Counter[tuple[str, str, str]] = Counter()  # by method, route, status
        self.rejected: Counter[str] = Counter()  # by code
        self.replayed = 0
        self.takeovers = 0
        self.requests = Histogram(SECONDS)
        self.recovery = Histogram(MINUTES)
        self.batches = Histogram(SIZES)
        self.commits = Histogram(SECONDS)
        self._without_holder: dict[int, int] = {}  # run key → when its lease ended by force

    def committed(self, batch: Batch, seconds: float) -> None:
        """A batch became durable."""
        self.batches.observe(len(batch.events))
        self.commits.observe(seconds)
        for run_key, event, _ in batch.events:
            self.events[event.kind] += 1
            if event.kind == "lease_granted":
                ended_ms = self._without_holder.pop(run_key, None)
                if ended_ms is not None:
                    self.takeovers += 1
                    self.recovery.observe((event.at_ms - ended_ms) / 1_000)
            elif event.kind in ENDED_BY_FORCE and len(self._without_holder) < RUNS_KEPT:
                self._without_holder[run_key] = event.at_ms

    def told(self, method: str, route: str, outcome: Told) -> None:
        """A request was answered."""
        self.answered[method, route, str(outcome.status)] += 1
        if isinstance(outcome, Problem):
            self.rejected[outcome.code] += 1

    def text(self, troubles: "Troubles") -> bytes:
        """Everything, in the text format of Prometheus."""
        from prometheus_client.exposition import generate_latest

        return generate_latest(_Collected(self, troubles))


class _Collected:
    """A registry of one scrape."""

    def __init__(self, meters: Meters, troubles: "Troubles") -> None:
        self._meters, self._troubles = meters, troubles

    def collect(self) -> Iterator["Metric"]:
        yield from self._counters()
        yield from self._gauges()
        yield from self._histograms()

    def _counters(self) -> Iterator["Metric"]:
        from prometheus_client.metrics_core import CounterMetricFamily

        meters = self._meters
        for kind, (name, text) in COUNTED.items():
            yield CounterMetricFamily(name, text, meters.events[kind])
        yield CounterMetricFamily("tidefast_replayed", "Calls answered from the log.", meters.replayed)
        yield CounterMetricFamily("tidefast_takeovers", "Grants after a lapsed or preempted lease.", meters.takeovers)
        rejected = CounterMetricFamily("tidefast_rejected", "Calls refused, by code.", labels=["code"])
        for code, count in sorted(meters.rejected.items()):
            rejected.add_metric([code], count)
        yield rejected
        shed = CounterMetricFamily("tidefast_shed", "Calls refused as overload, by what was full.", labels=["full"])
        for what, count in sorted(meters.load.shed.items()):
            shed.add_metric([what], count)
        yield shed
        answered = CounterMetricFamily("tidefast_requests", "Requests answered.", labels=["method", "route", "status"])
        for labels, count in sorted(meters.answered.items()):
            answered.add_metric(labels, count)
        yield answered

    def _gauges(self) -> Iterator["Metric"]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        meters, troubles = self._meters, self._troubles
        yield GaugeMetricFamily("tidefast_held_steps", "Steps that wait for a person now.", troubles.held)
        yield GaugeMetricFamily("tidefast_in_doubt_steps", "Steps in doubt now.", troubles.in_doubt)
        yield GaugeMetricFamily(
            "tidefast_in_doubt_age_seconds", "Age of the oldest doubt, held ones included.", troubles.oldest_ms / 1_000
        )
        yield GaugeMetricFamily("tidefast_waiting", "Long polls and event streams.", meters.load.waiting)
        yield GaugeMetricFamily("tidefast_connections", "Open connections.", meters.load.connections)

    def _histograms(self) -> Iterator["Metric"]:
        from prometheus_client.metrics_core import HistogramMetricFamily

        meters = self._meters
        for name, text, histogram in (
            ("tidefast_request_seconds", "Time to answer a request, waits left out.", meters.requests),
            ("tidefast_recovery_seconds", "From a lease's end by force to the next grant.", meters.recovery),
            ("tidefast_commit_batch_events", "Events of one commit.", meters.batches),
            ("tidefast_commit_seconds", "Time of one commit, its flush included.", meters.commits),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum)
