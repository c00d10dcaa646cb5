"""The store that a command works on: its name, its owner, its clock. Light to import, for commands that only look."""

import shlex
from pathlib import Path

from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE
from tidefast.engine.clock import SystemClock, wall_ms
from tidefast.stores.base import Store
from tidefast.stores.sqlite import SqliteStore

SQLITE_PREFIX = "sqlite:///"
EXPECTED = "expected FILE or sqlite:///FILE"


def store_path(store: str) -> Path:
    """The file that `--store` names. Raises `CliError`."""
    file = store.removeprefix(SQLITE_PREFIX)
    if "://" in file:
        scheme = file.partition("://")[0]
        raise CliError("config", f"--store: no store is called {scheme}", EXPECTED, ExitCode.CONFIG)
    if not file:
        raise CliError("config", "--store: the name is empty", EXPECTED, ExitCode.CONFIG)
    return Path(file)


def own(store: str, *, create: bool, adopt: bool = False) -> SqliteStore:
    """The store's file, for this process alone. Raises `CliError` naming who has it, and `StoreError`."""
    path = store_path(store)
    owner = SqliteStore.owner(path) if path.parent.is_dir() else None
    if owner is not None:
        todo = f"ask its server: --url {owner.url}" if owner.url else "wait for its end, or end it"
        raise CliError("store_owned", f"{path} is owned by {owner}; nothing was changed", todo, ExitCode.UNREACHABLE)
    return SqliteStore.open(path, create=create, adopt=adopt, wall_ms=wall_ms())


def system_clock(store: Store) -> SystemClock:
    """The clock of this process over a store."""
    return SystemClock(store.identity().mark_ms)


def owners_url(store: str) -> str | None:
    """Where the process that owns a store's file can be asked; None if nobody owns it or it says nothing."""
    owner = SqliteStore.owner(store_path(store))
    return owner.url or None if owner is not None else None


def command(*words: str, url: str | None, store: str) -> str:
    """A command line that can be pasted."""
    if not url:
        url = owners_url(store)
    if url:
        words = (*words, "--url", url)
    if store != DEFAULT_STORE:
        words = (*words, "--store", store)  # beside a server's url: where its operator's key stands
    return shlex.join(("tidefast", *words))
