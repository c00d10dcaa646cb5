"""The rigs that mutants are set before. Each one says what it found, or None."""

import asyncio

from tests.protocol.driver import NAMESPACE
from tests.protocol.walk import Broken, World
from tests.protocol.workspace_walk import WorkspaceWorld

from tidefast.protocol.laws import History, judge
from tidefast.sim.acceptance import run
from tidefast.sim.scenarios import shelf
from tidefast.sim.scenarios.play import complaints, play
from tidefast.stores.memory import MemoryStore

WALKS = 60
MOVES = 160
PLACES = 25
INTERLEAVINGS = 20
HANGS_S = 8.0


def walks(seed: int, count: int = WALKS) -> str | None:
    """Random walks over the rules from this seed on, judged by the provider's truth, then by the laws."""
    for each in range(seed, seed + count):
        try:
            world = World(each)
            world.walk(MOVES)
        except Broken as found:
            return str(found).splitlines()[0]
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
        violations = judge(_history(world))
        if violations:
            return f"{violations[0].law}: {violations[0].why}"
    return None


def _history(world: World) -> History:
    book = world.book
    return History(
        run_id=book.head.run_id,
        events=tuple(book.log),
        digests=tuple(book.digests),
        namespace=NAMESPACE,
        contracts=dict(book.contracts),
        now_ms=book.ms,
    )


def acceptance(seed: int, count: int = INTERLEAVINGS) -> str | None:
    """A campaign over the real engine, gateway and store, judged by the auditor."""
    try:
        found = asyncio.run(asyncio.wait_for(run(MemoryStore(), count, seed), HANGS_S))
    except TimeoutError:
        return "hangs: somebody waits for what never comes"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    broken = [f"{law} {count}" for law, count in found.report.violations.items() if count]
    if broken:
        return ", ".join(broken)
    return f"{found.report.rejected_unanswered} unanswered" if found.report.rejected_unanswered else None


def scenarios(seed: int) -> str | None:
    """The named scenarios, each with the trace that its file says."""
    for scenario in shelf.load():
        try:
            told = complaints(play(scenario))
        except Exception as error:
            return f"{scenario.name}: raised {type(error).__name__}: {error}"
        if told:
            return f"{scenario.name}: {str(told[0]).splitlines()[0]}"
    return None


def workspaces(seed: int, count: int = PLACES) -> str | None:
    """Random walks over a workspace, judged by its disks, then by the laws."""
    for each in range(seed, seed + count):
        try:
            WorkspaceWorld(each).walk(120)
        except Broken as found:
            return str(found)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
    return None


RIGS = {"walk": walks, "acceptance": acceptance, "scenarios": scenarios, "workspace": workspaces}
