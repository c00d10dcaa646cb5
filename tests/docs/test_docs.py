"""What the docs say about files, tests and dependencies is true. Each check has a planted failure too."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pages() -> list[Path]:
    return [p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if p.is_file()] + sorted(
        (ROOT / "docs").rglob("*.md")
    )


def without_code(text: str) -> str:
    """The page without fenced blocks and `code`, whose brackets are no links."""
    text = re.sub(r"^(\s*)(```|~~~).*?^\s*\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)


def targets(text: str) -> Iterator[str]:
    text = without_code(text)
    for found in re.finditer(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\s*\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE):
        target = found[1] or found[2]
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


def anchors(text: str) -> set[str]:
    """Names that headings get when a forge renders the page; a repeated one gets -1, -2 …"""
    seen: dict[str, int] = {}
    names = set(re.findall(r"""<a (?:id|name)=["']([^"']+)""", text))
    unfenced = re.sub(r"^(\s*)(```|~~~).*?^\s*\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", unfenced, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        names.add(slug if count == 0 else f"{slug}-{count}")
    return names


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in targets(text):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve()
        if not name:
            if anchor not in anchors(text):
                yield f"{page.name}: {target} names no heading"
        elif not file.exists():
            yield f"{page.name}: {target} leads nowhere"
        elif not file.is_relative_to(ROOT):
            yield f"{page.name}: {target} leads out of the checkout"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{page.name}: {target} names no heading"


def missing_tests(text: str) -> Iterator[str]:
    for found in re.finditer(r"(?<![\w/])(tests/[\w./-]*\w/?)((?:::\w+)*)", text):
        file = ROOT / found[1]
        if not file.exists():
            yield f"{found[0]}: no such file"
            continue
        names = [name for name in found[2].split("::") if name]
        scope: ast.AST = ast.parse(file.read_text(encoding="utf-8")) if names else ast.Module([], [])
        for name in names:
            inner = [
                node
                for node in ast.iter_child_nodes(scope)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
            ]
            if not inner:
                yield f"{found[0]}: no {name} in {found[1]}"
                break
            scope = inner[0]


def declared() -> dict[str, str]:
    """Name and bound of every dependency that pyproject.toml names."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    lines = list(project["project"]["dependencies"])
    lines += [line for extra in project["project"]["optional-dependencies"].values() for line in extra]
    lines += project["build-system"]["requires"]
    split = (re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)", line) for line in lines)
    return {found[1].lower(): found[2].strip() for found in split if found}


def reasons(text: str) -> dict[str, tuple[str, str]]:
    """Rows of the tables in docs/dependencies.md: name -> (bound, reason)."""
    rows = re.findall(r"^\|\s*`([^`]+)`\s*\|\s*`([^`]*)`\s*\|\s*(.*?)\s*\|\s*$", text, re.MULTILINE)
    return {name: (bound, reason) for name, bound, reason in rows}


def unexplained(wanted: dict[str, str], text: str) -> Iterator[str]:
    rows = reasons(text)
    for name, bound in wanted.items():
        row_bound, reason = rows.get(name, ("", ""))
        if name not in rows:
            yield f"{name} has no line in docs/dependencies.md"
        elif row_bound != bound:
            yield f"{name} is {bound} in pyproject.toml and {row_bound} in docs/dependencies.md"
        elif len(reason) < 20:
            yield f"{name} has no reason"
        if ">=" not in bound or "<" not in bound:
            yield f"{name} needs a lower and an upper bound, not {bound!r}"
    yield from (f"{name} is explained but not declared" for name in rows.keys() - wanted.keys())


def test_every_internal_link_leads_somewhere() -> None:
    found = [line for page in pages() for line in broken_links(page, page.read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_every_test_that_a_claim_cites_is_there() -> None:
    claims = ROOT / "docs" / "claims.md"
    found = list(missing_tests(claims.read_text(encoding="utf-8"))) if claims.is_file() else []
    assert not found, "\n" + "\n".join(found)


def test_every_dependency_has_its_bounds_and_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    found = list(unexplained(declared(), text))
    assert not found, "\n" + "\n".join(found)


def test_a_broken_link_is_caught() -> None:
    page = ROOT / "docs" / "page.md"
    text = "# Two words\n[a](gone.md) [b](#two-words) [c](#three) [d](https://a.b/c) `[e](f)`\n"
    text += "[h](dependencies.md#at-run-time) [i](dependencies.md#never)\n\n[g]: nowhere.md\n"
    assert list(broken_links(page, text)) == [
        "page.md: gone.md leads nowhere",
        "page.md: #three names no heading",
        "page.md: dependencies.md#never names no heading",
        "page.md: nowhere.md leads nowhere",
    ]


def test_links_in_code_blocks_are_no_links() -> None:
    assert list(targets("```\n[a](b)\n```\n[c](d.md)")) == ["d.md"]


def test_headings_with_punctuation_and_repeats_get_their_anchors() -> None:
    assert anchors("# What `make` does\n## A, b\n## A, b\n```\n# no\n```\n") == {
        "what-make-does",
        "a-b",
        "a-b-1",
    }


def test_a_claim_on_a_missing_test_is_caught() -> None:
    here = "tests/docs/test_docs.py"
    text = f"{here} {here}::test_links_in_code_blocks_are_no_links. {here}::test_gone tests/gone.py::test_a"
    assert list(missing_tests(text)) == [
        f"{here}::test_gone: no test_gone in {here}",
        "tests/gone.py::test_a: no such file",
    ]


def test_a_dependency_without_reason_or_bound_is_caught() -> None:
    text = "| `a` | `>=1,<2` | does the thing we can't do here |\n| `b` | `>=1` | |\n| `d` | `>=1,<2` | gone |\n"
    assert list(unexplained({"a": ">=1,<2", "b": ">=1", "c": ">=1,<2"}, text)) == [
        "b has no reason",
        "b needs a lower and an upper bound, not '>=1'",
        "c has no line in docs/dependencies.md",
        "d is explained but not declared",
    ]
