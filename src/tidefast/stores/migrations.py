"""Schema generations: numbered .sql files beside this one, applied in order, each once.

A file that was released is never edited; a change is the next number. All missing generations are applied in one
transaction together with the numbers that say so, so that a crash leaves the old generation whole.
"""

from collections.abc import Mapping
from pathlib import Path

import apsw

from tidefast.stores.base import StoreCorrupt, StoreRefused
from tidefast.stores.sqlite_rows import SHAPE

APPLICATION_ID = 0x54696465  # "Tide"; SQLite keeps it in the file's header


def shipped() -> dict[int, str]:
    """The generations that this program knows: number to SQL."""
    files = Path(__file__).parent.glob("schema_*.sql")
    return {int(file.stem.removeprefix("schema_")): file.read_text(encoding="utf-8") for file in sorted(files)}


def check(connection: apsw.Connection, path: str, newest: int) -> int:
    """The file's generation. Raises `StoreRefused` for a foreign or newer file, `StoreCorrupt` if it disagrees."""
    application, generation = connection.pragma("application_id"), connection.pragma("user_version")
    if application != APPLICATION_ID:
        raise StoreRefused(
            f"{path} is an SQLite database, but not one of this program's (application id {application}); "
            "nothing was changed. Name another file."
        )
    if generation > newest:
        raise StoreRefused(
            f"{path} has schema generation {generation}, this program knows {newest}: a newer program wrote it; "
            "nothing was changed. Start the newer program, or restore a backup made before the upgrade."
        )
    noted = connection.execute("SELECT value FROM meta WHERE name = 'generation'").get
    if generation < 1 or noted != generation:
        raise StoreCorrupt(
            f"{path} says generation {generation} in its header and {noted} in its table; restore a backup."
        )
    if generation == newest and connection.execute("SELECT value FROM meta WHERE name = 'shape'").get != SHAPE:
        raise StoreRefused(
            f"{path} has this generation, but its records have other fields: another build of this program wrote it; "
            "nothing was changed. Start that build."
        )
    return int(generation)


def migrate(connection: apsw.Connection, generation: int, known: Mapping[int, str]) -> None:
    """Bring a file from `generation` (0: empty) to the newest. All of it is durable on return, or nothing is."""
    missing = [number for number in sorted(known) if number > generation]
    if not missing:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number in missing:
            connection.execute(known[number])
        connection.executemany(
            "INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)",
            [("generation", missing[-1]), ("shape", SHAPE)],
        )
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", missing[-1])
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
