"""A directory with an app in it, short enough for a unix socket's address."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.processes import APP


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf") as name:
        path = Path(name)
        (path / "shop.py").write_text(APP)
        yield path
