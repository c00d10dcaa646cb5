"""House rules that no linter knows, each one a small function with a test that plants a violation.

A rule takes source text and the path that the text has (or would have) below the checkout, and yields one
line per violation. The tests at the top run the rules over every file; those below show that each can fail.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/tidefast/"
LONGEST_FUNCTION = 60
LONGEST_FILE = 600

BELOW_SERVER = {"protocol", "stores", "engine", "services", "wire"}
MAY_SEE = {
    "protocol": set(),
    "stores": {"protocol"},
    "engine": {"protocol", "stores"},
    "services": {"protocol", "stores", "engine"},
    "wire": {"protocol"},
    "server": BELOW_SERVER,
    "sdk": {"protocol", "wire"},
    "sim": BELOW_SERVER | {"sdk"},
    "cli": BELOW_SERVER | {"server", "sdk", "sim", "demo"},
    "demo": BELOW_SERVER | {"server", "sdk", "sim"},
    "testing": BELOW_SERVER | {"sdk", "sim"},
}
IMPURE = {
    *(
        "asyncio",
        "concurrent",
        "http",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
    ),
    *("select", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile"),
    *("threading", "time", "urllib.request", "urllib.error"),
}

Rule = Callable[[str, str], Iterator[str]]


# --- reading source -------------------------------------------------------------------------------------


def imports(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Every imported name in full, relative ones resolved: `from ..stores import x` -> tidefast.stores.x."""
    package = path.removeprefix("src/").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def calls(tree: ast.AST, path: str) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the full name of what is called, as far as imports tell it."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, (_, full) in zip(node.names, imports(node, path), strict=True):
                short = alias.asname or alias.name
                known[short] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = ast.unparse(node.func).partition(".")
            yield node, known.get(head, head) + dot + rest


def room_of(path: str) -> str:
    parts = path.removeprefix(PACKAGE).split("/")
    return parts[0] if path.startswith(PACKAGE) and len(parts) > 1 else ""


# --- rules for src --------------------------------------------------------------------------------------


def short_functions(text: str, path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{path}:{node.lineno} {node.name} has {length} lines, {LONGEST_FUNCTION} are allowed"


def pure_protocol(text: str, path: str) -> Iterator[str]:
    if room_of(path) != "protocol":
        return
    tree = ast.parse(text)
    for line, name in imports(tree, path):
        top = name.split(".")[0]
        if any(f"{name}.".startswith(f"{impure}.") for impure in IMPURE):
            yield f"{path}:{line} the protocol has no clock, chance, I/O, thread or log: {name}"
        elif top != "tidefast" and top not in sys.stdlib_module_names:
            yield f"{path}:{line} the protocol needs the standard library only: {name}"
    for call, name in calls(tree, path):
        if name in {"open", "input", "uuid.uuid1", "uuid.uuid4"}:
            yield f"{path}:{call.lineno} the protocol calls nothing that reads the world: {name}()"


def rooms_look_down(text: str, path: str) -> Iterator[str]:
    room = room_of(path)
    if not room:
        return
    for line, name in imports(ast.parse(text), path):
        parts = [*name.split("."), ""]
        if parts[0] == "tidefast" and parts[1] in MAY_SEE and parts[1] not in MAY_SEE[room] | {room}:
            yield f"{path}:{line} {room} may not see {parts[1]}"


def no_bare_markers(text: str, path: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX)\b(?!\()", token.string):
            yield f"{path}:{token.start[0]} a marker without an issue number: {token.string}"


def no_swallowed_errors(text: str, path: str) -> Iterator[str]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield f"{path}:{node.lineno} bare except"
        elif re.search(r"\b(Base)?Exception\b", ast.unparse(node.type)) and all(map(does_nothing, node.body)):
            yield f"{path}:{node.lineno} an error is swallowed"
    for call, name in calls(tree, path):
        if name == "contextlib.suppress" and {"Exception", "BaseException"} & set(map(ast.unparse, call.args)):
            yield f"{path}:{call.lineno} an error is swallowed"


def does_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def no_print(text: str, path: str) -> Iterator[str]:
    if room_of(path) in {"cli", "demo"}:
        return
    for call, name in calls(ast.parse(text), path):
        if name == "print":
            yield f"{path}:{call.lineno} print() outside cli and demo"


def no_blocking_sleep(text: str, path: str) -> Iterator[str]:
    if room_of(path) in {"cli", "demo", "sim"}:
        return
    for call, name in calls(ast.parse(text), path):
        if name == "time.sleep":
            yield f"{path}:{call.lineno} time.sleep() outside sim, cli and demo"


def one_clock(text: str, path: str) -> Iterator[str]:
    if path == PACKAGE + "engine/clock.py" or room_of(path) in {"cli", "demo", "sim"}:
        return
    for call, name in calls(ast.parse(text), path):
        if re.fullmatch(r"time\.time(_ns)?|(datetime\.)*(datetime|date)\.(now|utcnow|today)", name):
            yield f"{path}:{call.lineno} {name}() outside engine/clock.py"


def no_star_imports(text: str, path: str) -> Iterator[str]:
    for line, name in imports(ast.parse(text), path):
        if name.endswith(".*"):
            yield f"{path}:{line} star import of {name[:-2]}"


SQL = re.compile(
    r"\bSELECT\b|\bWHERE\b|\bPRAGMA\b|\bVALUES\s*\("
    r"|(?i:\binsert\s+(or\s+\w+\s+)?into\b|\bupdate\s+\S+\s+set\b|\bdelete\s+from\b)"
    r"|(?i:\b(create|drop|alter)\s+(unique\s+)?(table|index|view|trigger)\b)"
)


def no_sql_in_fstrings(text: str, path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
            if any(isinstance(part, ast.FormattedValue) for part in node.values) and SQL.search("".join(parts)):
                yield f"{path}:{node.lineno} SQL in an f-string"


# --- rules for tests ------------------------------------------------------------------------------------


def no_sleep_in_tests(text: str, path: str) -> Iterator[str]:
    for call, name in calls(ast.parse(text), path):
        if name == "time.sleep":
            yield f"{path}:{call.lineno} a test sleeps"
        first = call.args[0] if call.args else None
        if name == "asyncio.sleep" and isinstance(first, ast.Constant) and first.value > 0:
            yield f"{path}:{call.lineno} a test sleeps; await what it waits for, or move a fake clock"


def skips_give_a_reason(text: str, path: str) -> Iterator[str]:
    marks = {"pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"}
    tree = ast.parse(text)
    called: set[int] = set()
    for call, name in calls(tree, path):
        called.add(id(call.func))
        keyword = any(kw.arg == "reason" for kw in call.keywords)
        if name in marks and not keyword:
            yield f"{path}:{call.lineno} {name} without reason="
        if name in {"pytest.skip", "pytest.xfail"} and not (keyword or call.args):
            yield f"{path}:{call.lineno} {name} without a reason"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called and ast.unparse(node) in marks:
            yield f"{path}:{node.lineno} {ast.unparse(node)} without reason="


# --- rules for every text file --------------------------------------------------------------------------


def short_files(text: str, path: str) -> Iterator[str]:
    length = len(text.splitlines())
    if length > LONGEST_FILE:
        yield f"{path} has {length} lines, {LONGEST_FILE} are allowed"


def no_machine_paths(text: str, path: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"(?<![\w.])/(work|root|(home|Users)/[A-Za-z]\w*)/", line):
            yield f"{path}:{number} a path of one machine: {line.strip()}"


def no_registry_addresses(text: str, path: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"pypi\.org|pythonhosted|npmjs", line) and "re.search" not in line:
            yield f"{path}:{number} the address of a package registry: {line.strip()}"


def no_promise_of_once(text: str, path: str) -> Iterator[str]:
    if not path.endswith(".md"):
        return
    for found in re.finditer(r"\bexactly[\s-]+once\b", text, re.IGNORECASE):
        line = text.count("\n", 0, found.start()) + 1
        yield f"{path}:{line} nobody can promise that; say what is refused, replayed, compensated or held"


# --- the files ------------------------------------------------------------------------------------------

TEXT = {
    ".md",
    ".py",
    ".toml",
    ".sql",
    ".txt",
    ".json",
    ".jsonl",
    ".yml",
    ".yaml",
    ".html",
    ".css",
    ".js",
    ".sh",
    "",
}


def text_files() -> list[str]:
    """What git tracks or would track; without git, all that stands in the folders of the product."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    if not names:
        names = [str(p.relative_to(ROOT)) for top in ("src", "tests", "docs") for p in (ROOT / top).rglob("*")]
    return sorted(
        name for name in set(names)
        if (ROOT / name).is_file() and Path(name).suffix in TEXT and "__pycache__" not in name
    )  # fmt: skip


FILES = text_files()
SRC = [name for name in FILES if name.startswith(PACKAGE) and name.endswith(".py")]
TESTS = [name for name in FILES if name.startswith("tests/") and name.endswith(".py")]

RULES: list[tuple[Rule, list[str]]] = [
    (short_functions, SRC),
    (pure_protocol, SRC),
    (rooms_look_down, SRC),
    (no_bare_markers, SRC),
    (no_swallowed_errors, SRC),
    (no_print, SRC),
    (no_blocking_sleep, SRC),
    (one_clock, SRC),
    (no_star_imports, SRC),
    (no_sql_in_fstrings, SRC),
    (no_sleep_in_tests, TESTS),
    (skips_give_a_reason, TESTS),
    (short_files, SRC + TESTS),
    (no_machine_paths, FILES),
    (no_registry_addresses, FILES),
    (no_promise_of_once, FILES),
]


@pytest.mark.parametrize(("rule", "names"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_every_file_keeps_the_rule(rule: Rule, names: list[str]) -> None:
    assert names, "the rule looks at no file"
    found = [line for name in names for line in rule((ROOT / name).read_text(encoding="utf-8"), name)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("room", sorted(MAY_SEE))
def test_every_room_says_what_it_is_for(room: str) -> None:
    file = ROOT / PACKAGE / room / "__init__.py"
    assert file.is_file(), f"{room} has no __init__.py"
    assert explains_itself(file.read_text(encoding="utf-8")), f"{room}: a docstring of three lines or more"


def explains_itself(text: str) -> bool:
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    return sum(1 for line in lines if line.strip()) >= 3


# --- each rule can fail ---------------------------------------------------------------------------------

LONG = "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION
HOLE = "try:\n    f()\nexcept {}:\n    {}\n"
AT = {room: f"{PACKAGE}{room}/a.py" for room in MAY_SEE}
T = "tests/test_a.py"

CAUGHT: list[tuple[Rule, str, str]] = [
    (short_functions, AT["engine"], LONG),
    (short_functions, AT["engine"], "class A:\n    async " + LONG.replace("\n", "\n    ").rstrip(" ")),
    *((pure_protocol, AT["protocol"], f"import {name}") for name in sorted(IMPURE)),
    (pure_protocol, AT["protocol"], "def f():\n    from os.path import join"),
    (pure_protocol, AT["protocol"], "import apsw"),
    (pure_protocol, AT["protocol"], "import msgspec.json as j"),
    (pure_protocol, AT["protocol"], "text = open('a').read()"),
    (pure_protocol, AT["protocol"], "from uuid import uuid4\nx = uuid4()"),
    (rooms_look_down, AT["protocol"], "from tidefast.stores import memory"),
    (rooms_look_down, AT["protocol"], "from ..wire import tokens"),
    (rooms_look_down, AT["stores"], "from tidefast import engine"),
    (rooms_look_down, AT["engine"], "import tidefast.services.gateway"),
    (rooms_look_down, AT["services"], "from tidefast.wire.tokens import Token"),
    (rooms_look_down, AT["wire"], "from .. import stores"),
    (rooms_look_down, AT["server"], "from tidefast.sdk import client"),
    (rooms_look_down, AT["sdk"], "from tidefast.engine import clock"),
    (rooms_look_down, AT["sim"], "from tidefast.server.app import make"),
    (rooms_look_down, AT["demo"], "from tidefast.cli import main"),
    (no_bare_markers, AT["cli"], "x = 1  # TO" + "DO later"),
    (no_bare_markers, AT["cli"], "# FIX" + "ME"),
    (no_bare_markers, AT["cli"], "# XX" + "X hm"),
    (no_swallowed_errors, AT["engine"], HOLE.format("", "raise")),
    (no_swallowed_errors, AT["engine"], HOLE.format("Exception", "pass")),
    (no_swallowed_errors, AT["engine"], HOLE.format("BaseException as e", "...")),
    (no_swallowed_errors, AT["engine"], HOLE.format("(ValueError, Exception)", "pass")),
    (
        no_swallowed_errors,
        AT["engine"],
        "from contextlib import suppress\nwith suppress(Exception):\n    f()",
    ),
    (no_print, AT["sim"], "print('x')"),
    (no_blocking_sleep, AT["engine"], "import time\ntime.sleep(1)"),
    (no_blocking_sleep, AT["server"], "from time import sleep as nap\nnap(1)"),
    (one_clock, AT["engine"], "import time\nt = time.time()"),
    (one_clock, AT["server"], "from time import time_ns\nt = time_ns()"),
    (one_clock, AT["wire"], "import datetime as dt\nt = dt.datetime.now(dt.UTC)"),
    (one_clock, AT["protocol"], "from datetime import datetime\nt = datetime.now()"),
    (no_star_imports, AT["cli"], "from json import *"),
    (no_sql_in_fstrings, AT["stores"], "q = f'SELECT * FROM {table}'"),
    (no_sql_in_fstrings, AT["stores"], "q = f'delete from {table}'"),
    (no_sql_in_fstrings, AT["stores"], "q = f'UPDATE {table} SET a = 1'"),
    (no_sql_in_fstrings, AT["stores"], "q = f'insert or ignore into {t} values (1)'"),
    (no_sql_in_fstrings, AT["stores"], "q = f'create table {t} (a)'"),
    (no_sleep_in_tests, T, "import time\ntime.sleep(0)"),
    (no_sleep_in_tests, T, "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)"),
    (skips_give_a_reason, T, "import pytest\npytest.skip()"),
    (skips_give_a_reason, T, "import pytest\n@pytest.mark.xfail\ndef test_a(): ..."),
    (skips_give_a_reason, T, "import pytest\n@pytest.mark.skipif(True)\ndef test_a(): ..."),
    (short_files, AT["cli"], "x = 1\n" * (LONGEST_FILE + 1)),
    (no_machine_paths, "README.md", "cd " + "/wo" + "rk/main"),
    (no_machine_paths, "Makefile", "DIR := " + "/ho" + "me/anna/tidefast"),
    (no_machine_paths, "docs/a.md", "sqlite:///" + "/ro" + "ot/a.db"),
    (no_registry_addresses, "Makefile", "pip install -i https://py" + "pi.org/simple x"),
    (no_registry_addresses, "docs/a.md", "https://registry.npm" + "js.org"),
    (no_promise_of_once, "README.md", "it is done exactly\nonce"),
    (no_promise_of_once, "docs/a.md", "Exactly-once"),
]

PASSED: list[tuple[Rule, str, str]] = [
    (short_functions, AT["engine"], LONG.removesuffix("    x = 1\n")),
    (
        pure_protocol,
        AT["protocol"],
        "import hashlib\nfrom urllib.parse import quote\nfrom .ids import RunId\nfrom datetime import timedelta",
    ),
    (pure_protocol, AT["engine"], "import asyncio\nimport apsw"),
    (
        rooms_look_down,
        AT["sdk"],
        "from tidefast.wire import tokens\nfrom ..protocol import ids\nfrom . import b",
    ),
    (rooms_look_down, AT["cli"], "import tidefast.demo.story\nfrom tidefast import __version__"),
    (rooms_look_down, "src/tidefast/__init__.py", "from .sdk import client"),
    (no_bare_markers, AT["cli"], "x = 'TODO'  # TODO(41) drop when 3.11 goes"),
    (no_swallowed_errors, AT["engine"], HOLE.format("Exception", "stop()")),
    (no_swallowed_errors, AT["engine"], HOLE.format("KeyError", "pass")),
    (no_print, AT["cli"], "print('x')"),
    (no_blocking_sleep, AT["sim"], "import time\ntime.sleep(1)"),
    (one_clock, f"{PACKAGE}engine/clock.py", "import time\nt = time.time()"),
    (one_clock, AT["engine"], "import time\nt = time.monotonic()\nn = self.clock.now()"),
    (no_star_imports, AT["cli"], "from json import dumps"),
    (no_sql_in_fstrings, AT["stores"], "q = 'SELECT 1'\nu = f'DELETE {path}: select {a} from the list'"),
    (no_sleep_in_tests, T, "import asyncio\nasync def f():\n    await asyncio.sleep(0)"),
    (
        skips_give_a_reason,
        T,
        "import pytest\n@pytest.mark.skipif(True, reason='no fsync here')\ndef test_a(): ...",
    ),
    (short_files, AT["cli"], "x = 1\n" * LONGEST_FILE),
    (no_machine_paths, "README.md", "see docs/work/ and /v1/work/x and https://example.org/home/a/"),
    (no_registry_addresses, "README.md", "pip install tidefast"),
    (no_promise_of_once, AT["cli"], "# exactly once"),
    (no_promise_of_once, "README.md", "at most once, and exactly one"),
]


def named(cases: list[tuple[Rule, str, str]]) -> list[str]:
    return [f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(cases)]


@pytest.mark.parametrize(("rule", "path", "text"), CAUGHT, ids=named(CAUGHT))
def test_a_planted_violation_is_caught(rule: Rule, path: str, text: str) -> None:
    assert list(rule(text, path))


@pytest.mark.parametrize(("rule", "path", "text"), PASSED, ids=named(PASSED))
def test_clean_text_passes(rule: Rule, path: str, text: str) -> None:
    assert list(rule(text, path)) == []


def test_every_rule_has_a_planted_violation_and_a_clean_text() -> None:
    rules = {rule for rule, _ in RULES}
    assert {rule for rule, _, _ in CAUGHT} == rules
    assert {rule for rule, _, _ in PASSED} == rules


def test_a_room_without_a_real_docstring_is_caught() -> None:
    assert not explains_itself("x = 1")
    assert not explains_itself('"""One line.\n\nAnd one."""')
    assert explains_itself('"""One line.\n\nAnd one.\nAnd another."""')
