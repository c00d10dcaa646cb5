"""What a set of scenarios came to, and the page that lists them."""

from collections.abc import Mapping, Sequence

from tidefast.protocol.laws import LAWS
from tidefast.sim.scenarios.play import Summary, complaints
from tidefast.sim.scenarios.shelf import CLASSES
from tidefast.sim.scenarios.text import Scenario

# Orders that people argue about, and the part of Tidefast that each of them waits for.
MISSING: Mapping[str, Sequence[tuple[str, str]]] = {
    "workspaces": (
        ("revived_leftover_disk", "a sandbox comes back under epoch 8 with the files of epoch 7"),
        ("torn_write", "a patch is half applied when its worker is preempted"),
        ("late_200_in_a_sandbox", "a file's write was acknowledged by a disk that is gone"),
        ("class G", "a workspace lost, half restored or out of step with the log"),
        ("class M", "a schema migration run by several replicas, or killed half way"),
    ),
    "the model hop": (
        ("heartbeat_missed_while_streaming", "the lease is lost while an answer streams, then the stream completes"),
        ("budgets", "money is checked, then spent; a cut stream is taken for an answer"),
    ),
    "PostgreSQL and several instances": (
        ("freeze_holding_store_lock", "a worker is frozen inside its transaction and holds a row lock"),
        ("two_instances", "a gateway is frozen, not dead, while another instance goes on"),
    ),
    "probes": (
        ("absent_asked_too_early", "a provider is asked at once and says no, then the request lands"),
        ("adopt_what_is_found", "a provider that can be asked has the effect: it is adopted, not sent again"),
    ),
    "the conformance kit": (("read_only_misdeclared", "a tool that was declared to read only changes the world"),),
    "approvals, cancelling and MCP": (
        ("one_approval_many_executions", "a call that was approved once runs on every later message"),
        ("cancelled_run_still_acts", "a run is cancelled while its call is out"),
    ),
}

_INTRO = """# Scenarios

<!-- Generated from the files below src/tidefast/sim/scenarios/files; `pytest tests/scenarios --rewrite` writes it. -->

Each scenario is an order of events that people argue about, with the answer that Tidefast gives and why. It is a text
file: a header, then moves, each with the trace that it must leave. The engine, the gateway, the authority and the store
that play it are the real ones, and so is the SDK in scenarios that need it; made up are the clock, the network to the
providers, and the providers, which keep their own count. Afterwards an auditor, which doesn't share the rules, judges
every log by that count.

```
tidefast scenarios                      # this list
tidefast scenarios show stale_worker    # one as a drawing, party by party
tidefast scenarios run                  # play them all; the exit code is 0 only if all hold
tidefast scenarios run --folder DIR     # your own files; with --rewrite their traces are written anew
```

A line that isn't indented is a move; below it stands what must follow: `+` an event that became durable, `~` what a
provider saw or said, `=` what a caller was told, `!` what happened to a process. `expect` lines are written by hand,
and a rewrite leaves them alone. The words of a move: `grant W`, `apply W STEP TOOL name=value`, `checkpoint W N`,
`complete W`, `fail W WHY`, `compensate W STEP`, `release W`, `renew W`, `result W STEP VALUE`, `race W W`, `drive W`
(a pass of an agent through the SDK), `freeze W`, `wake W`, `kill W`, `kill authority`, `freeze gateway at=POINT`, `wake
gateway`, `preempt`, `pause`, `resume`, `halt` (freeze the run), `thaw`, `cancel`, `resolve STEP VERDICT looked=AGO`,
`advance 16s`, `sweep`, `probe` (the sweep asks about doubts), `giveup STEP`, `wall back 1h`, `store fails before`,
`backup`, `restore`, `deploy TOOL gone`, `provider forgets`, `provider STEP shows 2` (what a probe is told). What
becomes of a call is said with it: `withhold=request` or `answer` (then `land STEP`, `late ack STEP` or `lose answer
STEP`), `lose=connection`, `request` or `answer`, `answer=402`, `commit=500` (done, then answered 500). Tools:
`charge` and `refund` know a key again for a day, `mail` knows nothing, `lookup` only reads; `wire` knows no keys and
can be asked, `card` both; `account` knows a key once its call has ended; `news` is independent; `seat` may be undone
in doubt; `gift` is allowed one time a run; `think` asks a model, twice at most.
`W` carries its newest lease; `w1@2` presents epoch 2 under w1's name.
""".replace("stale_worker", "zombie_before_call")


def counts(total: Summary) -> dict[str, object]:
    """The summary as one JSON object; `violations` names every law."""
    return {
        "scenarios": total.scenarios,
        "held": total.held,
        "moves": total.moves,
        "distinct_orders": len(total.orders),
        "events": total.events,
        "mutating_steps": total.mutating_steps,
        "preemptions": total.preemptions,
        "requests": total.requests,
        "effects": total.effects,
        "violations": {law: total.violations.get(law, 0) for law in LAWS},
        "convicted": dict(sorted(total.convicted.items())),
        "failed": [{"name": each.scenario.name, "why": list(complaints(each))} for each in total.failed],
        "ok": total.is_ok,
    }


def rows(total: Summary) -> list[str]:
    """The summary for people."""
    figures = [
        ("scenarios", total.scenarios),
        ("moves", total.moves),
        ("distinct orders of events", len(total.orders)),
        ("events judged", total.events),
        ("mutating steps", total.mutating_steps),
        ("epochs ended by others", total.preemptions),
        ("requests that reached a provider", total.requests),
        ("effects by the providers' own count, net", total.effects),
        *((f"violations of {law}", total.violations.get(law, 0)) for law in LAWS),
        *((f"naive designs caught at {law}", count) for law, count in sorted(total.convicted.items())),
        ("scenarios that held", total.held),
    ]
    lines = [f"{name:<44} {count:>10,}" for name, count in figures]
    for played in total.failed:
        lines += [f"NOT HELD: {played.scenario.name}", *(f"  {line}" for line in complaints(played))]
    broken = [law for law, count in total.violations.items() if count]
    if total.is_ok:
        return [*lines, f"ok: all {total.scenarios:,} scenarios hold, no law was broken"]
    laws = f"; broken were {', '.join(sorted(broken))}" if broken else ""
    return [*lines, f"NOT OK: {total.held:,} of {total.scenarios:,} scenarios hold{laws}"]


def page(scenarios: Sequence[Scenario]) -> str:
    """The page of the docs that lists them all."""
    lines = [_INTRO]
    for word, title in CLASSES.items():
        members = [each for each in scenarios if each.header["class"] == word]
        lines.append(f"## {title}\n")
        for each in members:
            link = f"../src/tidefast/sim/scenarios/files/{each.name}.txt"
            header = each.header
            lines.append(f"- **[{each.name}]({link})** {header['question']} *{header['answer']}* {header['why']}")
        lines.append("")
    lines.append("## With those parts\n")
    lines.append("Not here yet, because the part that they are about isn't:\n")
    for part, orders in MISSING.items():
        lines.append(f"- {part}: " + "; ".join(f"`{name}` ({what})" for name, what in orders))
    return "\n".join(lines) + "\n"
