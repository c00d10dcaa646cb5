"""The stores that the conformance suite holds to one seam."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.driver import Driver

from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a file system: no test here asks the disk itself, and real flushes take time."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, folder: Path) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore.open(folder / "s.db", create=True)
    yield made
    made.close()


@pytest.fixture
def driver(store: Store) -> Driver:
    return Driver(store)
