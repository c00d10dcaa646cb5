"""The examples of docs/testing.md are run as they stand there."""

import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_page_hold() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, "docs/testing.md", "exec", dont_inherit=True), names)
    tests = [name for name in names if name.startswith("test_")]
    assert tests == ["test_the_refund_survives_everything", "test_the_late_answer_is_joined"]
    for name in tests:
        names[name]()


def test_the_page_prints_what_every_point_says() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(BLOCKS[0], "docs/testing.md", "exec", dont_inherit=True), names)
    report = names["every_point"](names["app"], "refund", {"order": "o-7"}, provider=names["bank"])
    assert f"```text\n{report}\n```" in PAGE
    assert f"Here that is {len(report.results)} runs" in PAGE
    lines = [line for line in BLOCKS[0][BLOCKS[0].index("@app.tool") :].splitlines() if line]
    assert len(lines) == 10
