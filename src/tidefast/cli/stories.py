"""The command `scenarios`: named orders of events, their answers, their drawings, and whether they hold."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import AsJson

if TYPE_CHECKING:
    from tidefast.sim.scenarios.play import MakeStore
    from tidefast.sim.scenarios.text import Scenario

TOLD = ("question", "answer", "why")


def scenarios(
    what: Annotated[Literal["list", "show", "run"], Parameter(help="List them, draw some, or play them.")] = "list",
    /,
    *names: Annotated[str, Parameter(help="Which ones, by name; all if none is named.")],
    folder: Annotated[Path | None, Parameter(help="A directory with your own scenarios, *.txt.")] = None,
    store: Annotated[Literal["memory", "sqlite"], Parameter(help="What they are played over.")] = "memory",
    rewrite: Annotated[bool, Parameter(negative="", help="Write the traces of --folder anew; read the diff.")] = False,
    as_json: AsJson = False,
) -> int:
    """Orders of events that people argue about: each with its question, the right answer and why.

    `show NAME` draws one; `run` plays them and lets the auditor judge. The exit code is 0 only if all hold.
    """
    from tidefast.sim.scenarios import shelf

    where = shelf.FOLDER if folder is None else folder
    chosen = _chosen(where, names)
    if what == "show" and not names:
        raise CliError("usage", "nothing to show was named", "tidefast scenarios show NAME", ExitCode.USAGE)
    if rewrite and (folder is None or what != "run"):
        todo = "tidefast scenarios run --folder DIR --rewrite"
        raise CliError("usage", "--rewrite needs a folder of yours", todo, ExitCode.USAGE)
    if what == "list":
        return _list(chosen, as_json)
    with _stores(store) as make_store:
        return _show(chosen, as_json) if what == "show" else _run(chosen, make_store, where, rewrite, as_json)


def _chosen(folder: Path, names: Sequence[str]) -> "list[Scenario]":
    """The scenarios named, or all. Raises `CliError`."""
    from tidefast.sim.scenarios.shelf import load
    from tidefast.sim.scenarios.text import ScriptError

    try:
        found = load(folder)
    except (ScriptError, OSError, UnicodeDecodeError) as error:
        raise CliError("config", str(error), "correct the file", ExitCode.CONFIG) from error
    known = {each.name for each in found}
    strangers = [name for name in names if name not in known]
    if strangers:
        todo = "tidefast scenarios lists them"
        raise CliError("not_found", f"no scenario is called {', '.join(strangers)}", todo, ExitCode.USAGE)
    if not found:
        raise CliError("not_found", f"{folder} has no scenarios", "expected files named *.txt", ExitCode.USAGE)
    return [each for each in found if not names or each.name in names]


def _list(chosen: "Sequence[Scenario]", as_json: bool) -> int:
    if as_json:
        out.document({"scenarios": [dict(each.header) for each in chosen]})
    elif out.is_for_people():
        _table(chosen)
    else:
        for each in chosen:
            out.line((each.name, "bold"))
            for part in TOLD:
                out.line(f"  {part:<9} {each.header[part]}")
    return ExitCode.OK


def _table(chosen: "Sequence[Scenario]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    table.add_column("scenario", style="bold", overflow="fold")
    for part in TOLD:
        table.add_column(part)
    for each in chosen:
        table.add_row(Text(out.safe(each.name)), *(Text(out.safe(each.header[part])) for part in TOLD))
    Console(highlight=False).print(table)


def _show(chosen: "Sequence[Scenario]", as_json: bool) -> int:
    from tidefast.sim.scenarios.draw import draw
    from tidefast.sim.scenarios.play import play

    all_played = [play(each) for each in chosen]
    if as_json:
        told = [{**each.scenario.header, "trace": each.traces, "holds": each.holds} for each in all_played]
        out.document({"scenarios": told})
    for place, played in enumerate(() if as_json else all_played):
        if place:
            out.line("")
        for row in draw(played):
            out.line(row)
    return ExitCode.OK if all(played.holds for played in all_played) else ExitCode.OTHER


def _run(chosen: "Sequence[Scenario]", make_store: "MakeStore", folder: Path, rewrite: bool, as_json: bool) -> int:
    from tidefast.sim.scenarios import shelf, tell
    from tidefast.sim.scenarios.play import play, summary
    from tidefast.sim.scenarios.text import spell

    all_played, is_watched = [], sys.stderr.isatty()
    for place, each in enumerate(chosen, 1):
        played = play(each, make_store)
        if rewrite and len(played.notes) == len(each.moves):
            shelf.path_of(each, folder).write_text(spell(each, played.traces), encoding="utf-8")
            for move, trace in zip(each.moves, played.traces, strict=True):
                move.trace = list(trace)
        all_played.append(played)
        if is_watched:
            end = "\n" if place == len(chosen) else ""
            print(f"\r{place:,} of {len(chosen):,} scenarios", end=end, file=sys.stderr, flush=True)
    total = summary(all_played)
    if as_json:
        out.document(tell.counts(total))
    else:
        for row in tell.rows(total):
            out.line(row)
    return ExitCode.OK if total.is_ok else ExitCode.OTHER


@contextmanager
def _stores(kind: str) -> "Iterator[MakeStore]":
    """What makes an empty store for each scenario; files go into a directory that is removed afterwards."""
    from tidefast.stores.base import Store
    from tidefast.stores.memory import MemoryStore
    from tidefast.stores.sqlite import SqliteStore

    if kind == "memory":
        yield MemoryStore
        return
    with tempfile.TemporaryDirectory(prefix="tidefast") as name:
        count = 0

        def make() -> Store:
            nonlocal count
            count += 1
            return SqliteStore.open(Path(name) / f"{count}.db", create=True)

        yield make
