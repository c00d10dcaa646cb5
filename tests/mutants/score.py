"""The mutation score of the rules: every small change of their source that the protocol's own tests must notice.

    python -m tests.mutants.score [--sample N] [--seed S] [--module NAME] [--least 0.9]

Each mutant is one change of one node in one module of `protocol/`: a comparison turned, a condition dropped, a constant
moved, an argument left out. A forked process loads that module with the change and runs `tests/protocol` to the first
failure. A mutant that every test passes has survived, and is printed with its line. The exit code is 0 only if the
score is at least the one asked for. A sample is drawn by the seed from all of them; the report says of how many.
"""

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROTOCOL = ROOT / "src" / "tidefast" / "protocol"
TESTS = ROOT / "tests" / "protocol"
LIMIT_S = 120  # of CPU; whoever takes longer runs in a circle, which is noticed
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SUMS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add}


class Site(NamedTuple):
    """One mutant: a module, and which of its possible changes."""

    module: str
    number: int
    line: int
    what: str


class Mutator(ast.NodeTransformer):
    """Walks a module; notes every change that could be made, and makes the one with the number wanted."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.found = wanted, 0
        self.sites: list[tuple[int, str]] = []

    def _try(self, node: ast.AST, what: str, change: Callable[[], ast.AST]) -> ast.AST | None:
        self.sites.append((getattr(node, "lineno", 0), what))
        self.found += 1
        return ast.copy_location(change(), node) if self.found - 1 == self.wanted else None

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        operator = node.ops[0]
        other = COMPARISONS[type(operator)]

        def turned() -> ast.AST:
            changed = copy.copy(node)
            changed.ops = [other(), *node.ops[1:]]
            return changed

        return self._try(node, f"{type(operator).__name__} is {other.__name__}", turned) or node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        for place in range(len(node.values)):
            rest = [value for number, value in enumerate(node.values) if number != place]
            without = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            changed = self._try(node, f"without its part {place + 1}", lambda without=without: without)  # type: ignore[misc]
            if changed is not None:
                return changed
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return self._try(node, "without its not", lambda: node.operand) or node
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = SUMS.get(type(node.op))
        if other is None:
            return node
        what = f"{type(node.op).__name__} is {other.__name__}"
        return self._try(node, what, lambda: ast.BinOp(node.left, other(), node.right)) or node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if isinstance(value, bool):
            return self._try(node, f"{value} is {not value}", lambda: ast.Constant(not value)) or node
        if isinstance(value, int):
            return self._try(node, f"{value} is {value + 1}", lambda: ast.Constant(value + 1)) or node
        if isinstance(value, str) and value.replace("_", "").isalpha() and value.islower():
            return self._try(node, f"{value!r} is another word", lambda: ast.Constant(f"{value}x")) or node
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return self._try(node, "its branches swapped", lambda: ast.IfExp(node.test, node.orelse, node.body)) or node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)

        def never() -> ast.AST:
            changed = copy.copy(node)
            changed.test = ast.copy_location(ast.Constant(False), node.test)
            return changed

        return self._try(node, "its condition never holds", never) or node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "_replace"):
            return node
        for place, keyword in enumerate(node.keywords):

            def without(place: int = place) -> ast.AST:
                changed = copy.copy(node)
                changed.keywords = [other for number, other in enumerate(node.keywords) if number != place]
                return changed

            changed = self._try(node, f"without {keyword.arg}=", without)
            if changed is not None:
                return changed
        return node

    # What is no rule: texts for people, types, names of what a module offers.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        is_type = isinstance(node.value, ast.Subscript) and getattr(node.value.value, "id", "") == "Literal"
        is_name = any(getattr(target, "id", "").startswith("__") for target in node.targets)
        return node if is_type or is_name else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [statement for body in node.body for statement in [self.visit(body)]]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        return node


def all_sites(only: str | None) -> list[Site]:
    """Every mutant of the rules."""
    found: list[Site] = []
    for file in sorted(PROTOCOL.glob("*.py")):
        if only not in (None, file.stem) or file.stem == "__init__":
            continue
        mutator = Mutator()
        mutator.visit(ast.parse(file.read_text(encoding="utf-8")))
        found += [Site(file.stem, number, line, what) for number, (line, what) in enumerate(mutator.sites)]
    return found


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with one change."""

    number = -1

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        tree = Mutator(self.number).visit(ast.parse(Path(self.path).read_text(encoding="utf-8")))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, site: Site) -> None:
        self.name, self.site = f"tidefast.protocol.{site.module}", site

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        file = PROTOCOL / f"{self.site.module}.py"
        loader = _Loader(fullname, str(file))
        loader.number = self.site.number
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


def _run_tests(site: Site | None) -> int:
    """In a process of its own: 0 if every test passes. Plain asserts: pytest's own would load the modules unchanged."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    if site is not None:
        sys.meta_path.insert(0, _Finder(site))
        try:
            loaded = importlib.import_module(f"tidefast.protocol.{site.module}")
        except Exception:
            return 1  # a change that can't even be loaded is noticed by whoever imports it
        if not isinstance(loaded.__loader__, _Loader):
            os.kill(os.getppid(), signal.SIGTERM)  # the change was not made: every figure would be a lie
    import pytest

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    words = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--assert=plain"]
    return int(pytest.main([*words, *map(str, sorted(TESTS.glob("test_*.py"), key=_cheap_first))]))


def _cheap_first(file: Path) -> tuple[bool, str]:
    return file.stem in ("test_walk", "test_laws", "test_canonical"), file.stem


def judged(sites: Sequence[Site | None], processes: int) -> Iterator[tuple[Site | None, bool]]:
    """(mutant, whether it was noticed), as they come; `processes` at once."""
    import msgspec  # noqa: F401 - loaded once for all children
    import pytest  # noqa: F401

    waiting, running = list(reversed(sites)), dict[int, Site | None]()
    while waiting or running:
        while waiting and len(running) < processes:
            site = waiting.pop()
            child = os.fork()
            if child == 0:
                code = 3
                try:
                    code = _run_tests(site)
                finally:
                    os._exit(1 if code else 0)
            running[child] = site
        child, status = os.wait()
        if child in running:
            yield running.pop(child), status != 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The mutation score of the rules.")
    parser.add_argument("--sample", type=int, default=0, help="how many mutants; 0 for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0, help="stop after so long, with what was judged by then")
    parser.add_argument("--module", default=None)
    parser.add_argument("--least", type=float, default=0.9)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(words)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sites = all_sites(asked.module)
    chosen = sites
    if asked.sample and asked.sample < len(sites):
        chosen = random.Random(asked.seed).sample(sites, asked.sample)
    began, killed, done = time.monotonic(), 0, 0
    if any(was_noticed for _, was_noticed in judged([None], 1)):
        print("the tests fail without a mutant: nothing can be judged")
        return 2
    for site, was_noticed in judged(chosen, asked.processes):
        assert site is not None
        killed, done = killed + was_noticed, done + 1
        if not was_noticed:
            print(f"survived: protocol/{site.module}.py:{site.line} {site.what}", flush=True)
        if asked.minutes and time.monotonic() - began > asked.minutes * 60:
            break
    score = killed / max(done, 1)
    print(f"{killed} of {done} mutants noticed by tests/protocol: {score:.1%}", end="; ")
    print(f"drawn from {len(sites)} by seed {asked.seed}; {time.monotonic() - began:.0f} s")
    return 0 if score >= asked.least else 1


if __name__ == "__main__":
    sys.exit(main())
