"""The scenarios that come with the product, by name."""

from importlib.resources import files
from pathlib import Path

from tidefast.sim.scenarios.text import Scenario, ScriptError, parse

FOLDER = Path(str(files(__package__) / "files"))
CLASSES = {
    "interleaving": "Named interleavings",
    "A": "A: the lease moved, the old owner is still at work",
    "B": "B: there is a fence, and it leaks",
    "C": "C: the effect happened, its record is missing or in doubt",
    "D": "D: the wrong identity of an effect",
    "E": "E: the wrong identity of a step, the wrong replay",
    "F": "F: checkpoints: order and loss",
    "H": "H: a run is stuck, or recovery overwrites the truth",
    "I": "I: crash loops",
    "J": "J: undoing",
    "K": "K: starts and resumes",
    "L": "L: clocks and freezing",
    "N": "N: the road to the tool",
    "O": "O: messages and an operator's hand",
    "trace": "Orders that once broke a draft of these rules",
    "naive": "Common designs, shown failing",
}


def load(folder: Path = FOLDER) -> list[Scenario]:
    """Every scenario of a folder, in the order of the classes, then of names. Raises `ScriptError`."""
    scenarios = []
    for path in sorted(folder.glob("*.txt")):
        scenario = parse(path.read_text(encoding="utf-8"), path.name)
        if scenario.name != path.stem:
            raise ScriptError(f"{path.name}: its name is {scenario.name}")
        if scenario.header["class"] not in CLASSES:
            raise ScriptError(f"{path.name}: no class is called {scenario.header['class']}")
        scenarios.append(scenario)
    order = list(CLASSES)
    return sorted(scenarios, key=lambda each: (order.index(each.header["class"]), each.name))


def path_of(scenario: Scenario, folder: Path = FOLDER) -> Path:
    return folder / f"{scenario.name}.txt"
