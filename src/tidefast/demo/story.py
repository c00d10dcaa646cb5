"""The timeline of one run, for somebody who hasn't read the docs: the log and the faults, told in order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tidefast.protocol.ids import EPOCHS_PER_INCARNATION
from tidefast.protocol.trace import Moment, Trace
from tidefast.sim.injector import Happening, Injector

Row = tuple[int, str, str, str]  # at_ms, epoch, who, what


def choose(traces: Mapping[str, Trace], injector: Injector) -> str | None:
    """The run that shows most: frozen, taken over, thawed, its late call refused; else any frozen, else any struck."""
    happenings = injector.happenings
    frozen = {h.run for h in happenings if h.what == "frozen"} & {h.run for h in happenings if h.what == "thawed"}
    refused = {run for (run, _, _), point in injector.late.items() if point == "gateway.before_intent"}
    struck = {h.run for h in happenings if h.what in ("killed", "struck")}
    completed = {run for run, trace in traces.items() if trace.run.end == "completed"}
    for candidates in (frozen & refused & completed, frozen & completed, frozen, struck, set(traces)):
        if candidates:
            return min(sorted(candidates & traces.keys()), key=lambda run: len(traces[run].moments), default=None)
    return None


def timeline(trace: Trace, happenings: Sequence[Happening], names: Mapping[str, str]) -> Iterator[str]:
    """One line per moment. `names` gives workers by their holder names."""
    rows = [*_logged(trace, names), *_injected(trace, happenings)]
    rows.sort(key=lambda row: row[0])
    start_ms = rows[0][0] if rows else 0
    widest = max((len(row[2]) for row in rows), default=0)
    yield f"   time     epoch  {'who'.ljust(widest)}  what"
    for at_ms, epoch, who, what in rows:
        yield f"{(at_ms - start_ms) / 1_000:7.3f} s  {epoch:>5}  {who.ljust(widest)}  {what}"


def short_epoch(epoch: int) -> str:
    """An epoch without the incarnation of a store that never had but one."""
    return str(epoch % EPOCHS_PER_INCARNATION) if epoch else ""


def _injected(trace: Trace, happenings: Sequence[Happening]) -> Iterator[Row]:
    for happening in happenings:
        is_mine = happening.run == trace.history.run_id
        epoch = _live_at(trace, happening.at_ms)
        if happening.what.endswith("beside") and happening.epoch != epoch:
            continue  # that lease had run out already
        if happening.what == "struck" and not is_mine and epoch:
            yield happening.at_ms, "", "authority", "is KILLED in a call of another run, and started again"
        if not is_mine:
            continue
        text = {
            "killed": f"is KILLED {happening.where}",
            "frozen": f"is FROZEN {happening.where}; its lease runs out while it sleeps",
            "thawed": "is THAWED; it doesn't know that it was replaced",
            "killed beside": "is KILLED at a point of another run",
            "frozen beside": "is FROZEN at a point of another run",
            "struck": f"is KILLED {happening.where}, and started again",
            "late": _late(trace, happening),
        }.get(happening.what)
        if text is not None:
            yield happening.at_ms, short_epoch(happening.epoch), happening.who, text


def _live_at(trace: Trace, at_ms: int) -> int:
    """The epoch that was live at this time; 0 for none."""
    after = [moment for moment in trace.moments if moment.event.at_ms > at_ms]
    return after[0].run.live if after else trace.run.live


def _late(trace: Trace, happening: Happening) -> str:
    if happening.where == "gateway.before_intent":
        return f"its call for {happening.step!r} arrives only now: REFUSED, its epoch is dead; nothing is sent"
    return f"the answer to its {happening.step!r} arrives only now: kept as a fact, but it has no right to commit"


def _logged(trace: Trace, names: Mapping[str, str]) -> Iterator[Row]:
    holders: dict[int, str] = {}
    for moment in trace.moments:
        event = moment.event
        if event.kind == "lease_granted":
            holders[event.epoch] = str(moment.data.get("holder", ""))
        holder = holders.get(event.epoch, "")
        who = names.get(holder, holder[:10]) if event.epoch else "authority"
        text = _tell(moment)
        if text:
            yield event.at_ms, short_epoch(event.epoch), who, text


def _tell(moment: Moment) -> str:
    told = TOLD.get(moment.event.kind)
    return told(moment.data, moment) if told is not None else moment.event.kind.replace("_", " ")


def _granted(data: Mapping[str, Any], moment: Moment) -> str:
    first = not moment.run.newest
    return "gets the lease" if first else "gets the lease: a higher epoch, so whatever held it before is stale"


def _fenced(data: Mapping[str, Any], moment: Moment) -> str:
    step = moment.event.step_id
    if moment.step is None or not moment.step.attempts:
        return f"{step}: the intent is on the disk, then the request goes out under key {str(data.get('key', ''))[:8]}…"
    return f"{step}: sent again, the very same request under the very same key"


def _committed(data: Mapping[str, Any], moment: Moment) -> str:
    was_applied = moment.step is not None and moment.step.state == "applied"
    how = (
        "the receipt that was already there is joined, nothing is sent" if was_applied else "the receipt is on the disk"
    )
    return f"{moment.event.step_id}: committed; {how}"


def _checkpoint(data: Mapping[str, Any], moment: Moment) -> str:
    return f"checkpoint {data.get('number')} accepted"


def _released(data: Mapping[str, Any], moment: Moment) -> str:
    return f"gives the lease back ({data.get('reason')})"


def _doubted(data: Mapping[str, Any], moment: Moment) -> str:
    return f"{moment.event.step_id}: in doubt ({data.get('reason')}): it may have happened, nobody assumes either"


def _step(words: str) -> Callable[[Mapping[str, Any], Moment], str]:
    return lambda data, moment: f"{moment.event.step_id}: {words}"


def _plain(words: str) -> Callable[[Mapping[str, Any], Moment], str]:
    return lambda data, moment: words


TOLD: Mapping[str, Callable[[Mapping[str, Any], Moment], str]] = {
    "run_created": _plain("the ticket comes in"),
    "lease_granted": _granted,
    "lease_lapsed": _plain("the lease has run out: this epoch is dead"),
    "lease_released": _released,
    "step_fenced": _fenced,
    "step_committed": _committed,
    "step_applied": _step("a receipt came whose sender is no longer in charge: recorded, not committed"),
    "step_doubted": _doubted,
    "step_unsent": _step("never left: its deadline had passed"),
    "step_rejected": _step("refused by the provider for good"),
    "step_held": _step("held: nothing is safe to do without a person"),
    "step_result": _step("done here, journaled"),
    "late_receipt": _step("one more receipt of what is settled already: recorded, changes nothing"),
    "checkpoint_saved": _checkpoint,
    "run_completed": _plain("the run is complete"),
    "run_failed": _plain("the run has failed"),
}
