"""The tables of the docs are the code's: steps, doubts, events, laws, codes, reasons, addresses, members, settings."""

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.walk import World

from tidefast.cli.errors import HELP
from tidefast.cli.main import COMMANDS, main
from tidefast.demo import desk
from tidefast.protocol import doubt, evolve
from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.events import Kind
from tidefast.protocol.laws import LAWS
from tidefast.protocol.records import AttemptState, RunState, StepState
from tidefast.protocol.verdicts import Code
from tidefast.sdk.app import App
from tidefast.server.access import MAY
from tidefast.server.table import VERBS
from tidefast.wire.refusals import REASONS, ROWS

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL, ERRORS, SETTINGS, CONTRACTS, HTTP = (
    (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    for name in ("protocol", "errors", "settings", "contracts", "http")
)
WALKS = 120


def rows(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose head is this line."""
    lines = text.splitlines()
    start = lines.index(head) + 2
    found: list[list[str]] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def said(text: str, word: str) -> bool:
    """Whether a page names a word as code."""
    return re.search(rf"`[^`\n]*(?<![\w-]){re.escape(word)}(?![\w-])[^`\n]*`", text) is not None


def documented_moves() -> set[tuple[str, str, str]]:
    """(before, event, after) of the step table; where both columns list the same states, a step keeps its own."""
    moves: set[tuple[str, str, str]] = set()
    for before, event, after, _ in rows(PROTOCOL, "| before | event | after | when |"):
        stays = words(before) == words(after) and len(words(before)) > 1
        for state in words(before):
            moves |= {(state, words(event)[0], next_) for next_ in ([state] if stays else words(after))}
    return moves


def observed_moves(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str, str]]:
    """What steps really did in random walks through the rules."""
    moves: set[tuple[str, str, str]] = set()
    honest = evolve._step_event

    def watched(step_id: Any, step: Any, event: Any, data: Any) -> Any:
        after = honest(step_id, step, event, data)
        moves.add(("-" if step is None else step.state, event.kind, after.state))
        return after

    monkeypatch.setattr(evolve, "_step_event", watched)
    for seed in range(WALKS):
        World(seed).walk(160)
    return moves


def test_no_step_makes_a_move_that_the_table_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = observed_moves(monkeypatch)
    assert len(observed) > 25, "the walks saw too little"
    assert not observed - documented_moves()


def test_the_step_table_names_states_and_events_of_the_code_only_and_every_step_event() -> None:
    moves = documented_moves()
    assert {state for before, _, after in moves for state in (before, after)} == {*typing.get_args(StepState), "-"}
    assert {event for _, event, _ in moves} == {
        kind for kind in typing.get_args(Kind) if not kind.startswith(("run_", "lease_", "checkpoint_", "write_"))
    }


def table_of(function: Any) -> list[list[str]]:
    """The table in a function's docstring, without its head and rule."""
    lines = [line.strip() for line in inspect.getdoc(function).splitlines() if line.strip().startswith("|")]  # type: ignore[union-attr]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not set(line) <= set("|- ")]


@pytest.mark.parametrize("function", [doubt.judge, doubt.outcome_of])
def test_the_doubt_tables_are_those_of_the_code(function: Any) -> None:
    head, *body = table_of(function)
    shown = rows(PROTOCOL, f"| {' | '.join(head)} |")
    assert [[cell.replace("`", "") for cell in row] for row in shown] == [
        [cell.replace("`", "") for cell in row] for row in body
    ]


def test_every_event_state_and_law_is_in_the_protocol() -> None:
    everything = [*typing.get_args(Kind), *typing.get_args(StepState), *typing.get_args(RunState)]
    everything += [*typing.get_args(AttemptState)]
    assert not [word for word in everything if not said(PROTOCOL, word)]
    assert [words(row[1])[0] for row in rows(PROTOCOL, "| # | name | law |")] == list(LAWS)


def test_every_code_is_documented_with_its_status() -> None:
    of_rules = {words(row[0])[0]: row for row in rows(ERRORS, "| code | status | in the SDK | what to do |")}
    of_wire = {words(row[0])[0]: row for row in rows(ERRORS, "| code | status | what to do |")}
    assert set(of_rules) == set(typing.get_args(Code))
    assert set(of_rules) | set(of_wire) == set(ROWS)
    for code, row in {**of_rules, **of_wire}.items():
        assert str(ROWS[code].status) in row[1], code
    for (code, reason), told in REASONS.items():
        assert not told.status or str(told.status) in ERRORS, (code, reason)


def reasons_of_the_source() -> Iterator[tuple[str, str]]:
    """(code, reason) wherever a refusal is made with both written out."""
    alone = {"BadInput", "invalid"}
    for file in sorted((ROOT / "src/tidefast").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if name in {"refuse", "Refused", "problem", "Wait"} and len(texts) >= 2 and texts[0] in ROWS:
                yield texts[0], texts[1]
            elif name in alone and texts and re.fullmatch(r"[a-z_]+", texts[0]):
                yield "invalid", texts[0]


def documented_reasons() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for code, reason, _ in rows(ERRORS, "| code | reason | means |"):
        found.setdefault(words(code)[0], set()).update(words(reason))
    return found


def test_every_reason_is_documented_under_its_code() -> None:
    known, wanted = documented_reasons(), {*reasons_of_the_source(), *REASONS}
    assert len(wanted) > 50
    missing = sorted((code, reason) for code, reason in wanted if reason not in known.get(code, set()))
    assert not missing


def test_every_address_is_documented() -> None:
    calls = {(method, path) for path, table in VERBS.items() for method in table}
    shown = {(m, p) for row in rows(HTTP, "| call | needs | body or query |") for m, p in map(str.split, words(row[0]))}
    assert shown == calls


def test_what_each_address_asks_for_is_documented() -> None:
    for row in rows(HTTP, "| call | needs | body or query |"):
        method, path = words(row[0])[0].split()
        members = VERBS[path][method].message.__struct_fields__
        assert not [member for member in members if not said(row[2], member)], row[0]
        assert VERBS[path][method].guard == row[1].partition(";")[0], row[0]


def test_the_page_tells_who_may_what() -> None:
    for guard, roles, without_keys in rows(HTTP, "| guard | roles | without `serve --keys` |"):
        access = MAY[words(guard)[0]]  # type: ignore[index]
        assert set(words(roles)) == access.roles or guard == "`public`"
        assert without_keys.startswith("open") == access.is_open
        assert ("token" in roles, "all runs" in roles) == (access.lease, access.whole)
    assert len(rows(HTTP, "| guard | roles | without `serve --keys` |")) == len(MAY)


def test_every_member_of_a_contract_is_documented() -> None:
    _, problems = parse_contract("x", {"nothing": 1})
    known = str(next(p for p in problems if p.member == "nothing")).partition("known ones are ")[2].split(", ")
    shown = {words(row[0])[0] for row in rows(CONTRACTS, "| member | default | means |")}
    assert shown == set(known)
    decorated = set(inspect.signature(App.tool).parameters) - {"self", "function"}
    assert not [member for member in decorated if not said(CONTRACTS, member)]
    assert not [m for m in set(inspect.signature(App.agent).parameters) - {"self", "function"} if not said(SETTINGS, m)]


def test_every_command_is_documented() -> None:
    shown = {words(row[0])[0].split()[1] for row in rows(SETTINGS, "| command | does |")}
    assert shown == set(COMMANDS)


def flags_of_the_program(capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    for command in COMMANDS:
        if command != "demo":
            assert main([command, "--help"]) == 0
    with pytest.raises(SystemExit):
        desk.parse(["--help"], {})
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}


def test_every_flag_is_documented_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {flag for row in rows(SETTINGS, "| flag | where | default | means |") for flag in words(row[0])}
    assert shown == flags_of_the_program(capsys)


def test_every_variable_is_documented_and_no_other() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile", ROOT / ".ci/run"]
    used = {name for file in files for name in re.findall(r"\bTIDEFAST_[A-Z]+\b", file.read_text(encoding="utf-8"))}
    assert set(re.findall(r"^\| `(TIDEFAST_[A-Z]+)` ", SETTINGS, re.MULTILINE)) == used


def test_every_exit_code_is_documented() -> None:
    known = re.findall(r"^(\d+)  ", HELP, re.MULTILINE)
    assert len(known) > 5
    assert {row[0] for row in rows(ERRORS, "| exit code | means |")} == {*known, "130"}


def named_commands() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for code in re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL):
            for name in re.findall(r"(?<![\w./-])(?<!import )tidefast ([a-z]+)", code):
                yield page.name, name


def test_no_page_names_a_command_that_is_not_there() -> None:
    found = list(named_commands())
    assert len(found) > 40
    assert not [(page, name) for page, name in found if name not in COMMANDS]


def test_a_move_that_the_table_lacks_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = evolve._step_event

    def wrong(step_id: Any, step: Any, event: Any, data: Any) -> Any:
        after = honest(step_id, step, event, data)
        return after._replace(state="committed") if event.kind == "step_doubted" else after

    step = World(0).book
    step.granted()
    step.admit()
    before = step.step()
    after = wrong(before.step_id, before, step.log[-1]._replace(kind="step_doubted"), {"attempt": 1})
    assert (before.state, "step_doubted", after.state) not in documented_moves()
