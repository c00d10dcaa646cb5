"""A copied store is not the store: it is refused until somebody says that it is to be one of its own."""

import os
import shutil
from pathlib import Path

import pytest
from tests.stores.driver import Driver

from tidefast.protocol.ids import RunId, incarnation_of
from tidefast.stores.base import StoreRefused
from tidefast.stores.sqlite import SqliteStore


def made(path: Path) -> None:
    store = SqliteStore.open(path, create=True)
    driver = Driver(store)
    driver.create("r")
    driver.grant("r")
    store.close()


def test_a_copy_is_refused_and_nothing_in_it_changes(tmp_path: Path) -> None:
    made(tmp_path / "s.db")
    shutil.copy(tmp_path / "s.db", tmp_path / "copy.db")
    before = (tmp_path / "copy.db").read_bytes()
    with pytest.raises(StoreRefused, match=r"is a copy.*tidefast adopt"):
        SqliteStore.open(tmp_path / "copy.db", create=False)
    assert (tmp_path / "copy.db").read_bytes() == before
    SqliteStore.open(tmp_path / "s.db", create=False).close()


def test_an_adopted_copy_issues_epochs_above_all_of_the_original_and_needs_no_second_word(tmp_path: Path) -> None:
    made(tmp_path / "s.db")
    shutil.copy(tmp_path / "s.db", tmp_path / "copy.db")
    SqliteStore.open(tmp_path / "copy.db", create=False, adopt=True).close()
    store = SqliteStore.open(tmp_path / "copy.db", create=False)
    raised = store.identity().incarnation
    assert raised > 0
    driver = Driver(store)
    driver.create("new")
    driver.grant("new")
    found = store.load_head(RunId("new"))
    assert found is not None
    assert incarnation_of(found[1].epoch) == raised
    store.close()


def test_a_moved_file_is_still_the_store_and_a_hard_link_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "s.db")
    (tmp_path / "s.db").rename(tmp_path / "moved.db")
    SqliteStore.open(tmp_path / "moved.db", create=False).close()
    os.link(tmp_path / "moved.db", tmp_path / "other.db")
    with pytest.raises(StoreRefused, match="hard links"):
        SqliteStore.open(tmp_path / "moved.db", create=False)
