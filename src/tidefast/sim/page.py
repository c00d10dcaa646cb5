"""The report of a campaign as one HTML file: what was tried, what was broken, and pictures of a few runs.

It loads nothing, runs no script and works offline.
"""

from collections.abc import Iterable

from tidefast.sim.campaign import Campaign
from tidefast.sim.judging import SOMETIMES
from tidefast.sim.picture import Fault, draw, interesting, lines, text
from tidefast.sim.report import sentence
from tidefast.sim.simulate import Simulation

RUNS_SHOWN = 4
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem } table { border-collapse: collapse }
th { text-align: left; font-weight: 400; padding-right: 2rem }
td { text-align: right; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #e4e7eb; padding: .15rem .6rem }
.good { color: #1a7f37 } .bad { color: #cf222e }
.columns { display: flex; flex-wrap: wrap; gap: 2.5rem; align-items: start }
.picture { overflow-x: auto; border: 1px solid #e4e7eb; margin: 1rem 0 }
code { background: #f3f4f6; padding: .1rem .3rem }
"""
INTRODUCTION = """Tidefast runs agents on machines that may vanish. In this simulation the real program ran in virtual
time while its workers were killed, frozen and cut off, its authority died between any two lines, messages were lost,
delayed and doubled, and providers did things without saying so. Afterwards an auditor that doesn't share the program's
rules compared every log with what the providers say they did. Below: how much was tried, what was broken, and what
single runs went through."""


def page(campaign: Campaign, world: Simulation | None = None) -> str:
    """The whole page. `world` is one of the campaign's worlds, whose most eventful runs are drawn."""
    verdict = "held: nothing was broken" if campaign.is_ok else "did NOT hold"
    colour = "good" if campaign.is_ok else "bad"
    broken = "".join(f"<li>{text(sentence(each), 400)}</li>" for each in campaign.audit.violations[:50])
    laws = sorted(campaign.audit.counts.items(), key=lambda row: -row[1])
    seen = [(name, f"{campaign.sometimes[name]:,}") for name in SOMETIMES]
    never = "".join(f"<li>never happened: {text(name)}</li>" for name in campaign.never)
    pictures = "" if world is None else "".join(_pictures(world))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"/><title>Tidefast simulation, seed {campaign.seed}</title>
<style>{STYLE}</style></head><body>
<h1>Simulation from seed {campaign.seed}: <span class="{colour}">{verdict}</span></h1>
<p>{text(INTRODUCTION, 2_000)}</p>
<p>To see it again: <code>{text(campaign.command)}</code></p>
<h2>What was tried</h2><div class="columns">{_table(_tried(campaign))}{_table(_faults(campaign))}</div>
<h2>Violations of each law</h2>{_table(laws)}
<ul class="bad">{broken}</ul>
<h2>What must have happened at least once</h2>{_table(seen)}
<ul>{never}</ul>
<h2>Some runs</h2>
<p>Time runs to the right; long pauses are compressed. Each coloured band is one epoch: one worker's right to drive
the run. Point at a sign to read what it is.</p>{pictures}
</body></html>
"""


def _tried(campaign: Campaign) -> list[tuple[str, object]]:
    audit = campaign.audit
    return [
        ("simulated hours under fire", f"{campaign.hours:,.1f}"),
        ("worlds", f"{campaign.worlds:,}"),
        ("runs", f"{audit.runs:,}"),
        ("runs that met a fault", f"{campaign.interleavings:,}"),
        ("distinct orders of events and faults", f"{len(campaign.orders):,}"),
        ("tool calls", f"{campaign.calls:,}"),
        ("mutating steps", f"{audit.mutating_steps:,}"),
        ("of these with a fault of their own", f"{campaign.faulted_steps:,}"),
        ("epochs ended by others", f"{audit.preemptions:,}"),
        ("events judged", f"{audit.events:,}"),
        ("calls refused because their epoch was dead", f"{campaign.rejected:,}"),
        ("of these never answered otherwise", f"{campaign.rejected_unanswered:,}"),
        ("steps held for a person", f"{audit.held:,}"),
        ("of these needlessly", f"{len(campaign.needless):,}"),
    ]


def _faults(campaign: Campaign) -> list[tuple[str, object]]:
    return [(f"fault: {kind.replace('_', ' ')}", f"{count:,}") for kind, count in sorted(campaign.faults.items())]


def _table(rows: Iterable[tuple[str, object]]) -> str:
    return f"<table>{''.join(lines(rows))}</table>"


def _pictures(world: Simulation) -> list[str]:
    """The most eventful runs of a world, broken ones first."""
    broken = {violation.run_id for violation in world.violations}
    found = []
    for head in world.store.runs(None, 1_000, None):
        loaded = world.store.load_head(head.run_id)
        events = [each.event for each in world.store.load_events(loaded[0] if loaded else 0, 0, 1_000)]
        found.append((head.run_id in broken, interesting(events), head.run_id, events))
    found.sort(key=lambda each: (not each[0], -each[1], each[2]))
    shown = []
    for _, _, run_id, events in found[:RUNS_SHOWN]:
        first, last = events[0].at_ms, events[-1].at_ms
        faults = [
            Fault(mark.at_ms, mark.kind.replace("_", " "), mark.step_id)
            for mark in world.marks
            if mark.run_id in (run_id, "") and first <= mark.at_ms <= last
        ]
        shown.append(f'<div class="picture">{draw(run_id, events, faults)}</div>')
    return shown
