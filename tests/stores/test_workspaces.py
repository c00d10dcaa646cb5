"""What every store owes workspaces, and what every store of blobs owes the store."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import apsw
import pytest

from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId
from tidefast.protocol.records import OpenWrite, WorkspaceHead
from tidefast.protocol.workspace import Delta, Entry, fold
from tidefast.stores.base import Batch, Store, StoreCorrupt, StoreRefused, StoreUnavailable
from tidefast.stores.blobs import PIECE_BYTES, BlobRefused, BlobStore
from tidefast.stores.memory_blobs import MemoryBlobs
from tidefast.stores.sqlite import SqliteStore
from tidefast.stores.sqlite_blobs import SqliteBlobs, contents_beside, copy_contents
from tidefast.stores.workspaces import LoggedWrite, StoredWrite

CASE = WorkspaceId("case")
KEY = 7


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry(content: str) -> Entry:
    return Entry("file", 0o644, sha(content.encode()), len(content))


DELTAS: list[Delta] = [
    {"a": entry("1"), "b": entry("1"), "d": Entry("dir", 0o755, "", 0)},
    {"a": entry("2"), "d/é": entry("3")},
    {"b": None, "c": entry("1")},
    {"a": None},
    {"a": entry("4")},
]


def batch(head: WorkspaceHead, *writes: tuple[int, Delta], pruned: Mapping[int, int] | None = None) -> Batch:
    found = [
        StoredWrite(KEY, LoggedWrite(n, RunId("r"), StepId(f"s{n}"), 5, f"{n:064d}", n, len(delta)), delta)
        for n, delta in writes
    ]
    return Batch(workspaces={KEY: head}, writes=found, pruned=dict(pruned or {}))


def filled(store: Store) -> None:
    for n, delta in enumerate(DELTAS, 1):
        head = WorkspaceHead(CASE, version=n, log_index=n, epoch=Epoch(3))
        store.commit(batch(head, (n, delta)))


def test_a_store_without_workspaces_says_so(store: Store) -> None:
    assert store.load_workspace(CASE) is None
    assert list(store.busy_workspaces()) == list(store.workspaces("", 9)) == list(store.load_writes(1, 0, 9)) == []
    assert store.load_write(1, 1) is None and store.load_entry(1, 1, "a") is None and store.oldest_index(1) == 0
    assert list(store.manifest(1, 1, "", 9)) == [] and store.unreferenced([sha(b"1")]) == {sha(b"1")}


def test_the_content_at_each_index_is_the_fold_of_the_deltas_up_to_it(store: Store) -> None:
    filled(store)
    content: dict[str, Entry] = {}
    for n, delta in enumerate(DELTAS, 1):
        content = fold(content, delta)
        assert dict(store.manifest(KEY, n, "", 99)) == content
        assert {path: store.load_entry(KEY, n, path) for path in "abc"} == {path: content.get(path) for path in "abc"}
    assert dict(store.manifest(KEY, 0, "", 99)) == {}
    pages, after = [], ""
    while page := store.manifest(KEY, len(DELTAS), after, 1):
        pages.append(page[0])
        after = page[0][0]
    assert dict(pages) == content and [path for path, _ in pages] == sorted(content)


def test_heads_and_writes_are_read_back_in_order(store: Store) -> None:
    filled(store)
    found = store.load_workspace(CASE)
    assert found == (KEY, WorkspaceHead(CASE, version=5, log_index=5, epoch=Epoch(3)))
    assert [write.log_index for write in store.load_writes(KEY, 2, 2)] == [3, 4]
    assert store.load_write(KEY, 2) == LoggedWrite(2, RunId("r"), StepId("s2"), 5, f"{2:064d}", 2, 2)
    assert store.load_write(KEY, 9) is None
    assert store.run_key_max() == KEY, "a workspace's key is taken from the same numbers as a run's"
    other = WorkspaceHead(WorkspaceId("other"))
    store.commit(Batch(workspaces={KEY + 1: other}))
    assert [head.workspace_id for head in store.workspaces("", 9)] == ["case", "other"]
    assert [head.workspace_id for head in store.workspaces("case", 9)] == ["other"]


def test_only_a_live_workspace_or_one_with_an_open_write_is_read_at_the_start(store: Store) -> None:
    open_write = OpenWrite(RunId("r"), StepId("s"), 1, Epoch(1))
    for key, head in enumerate(
        (
            WorkspaceHead(WorkspaceId("idle")),
            WorkspaceHead(WorkspaceId("live"), is_live=True),
            WorkspaceHead(WorkspaceId("open"), open=open_write),
        ),
        1,
    ):
        store.commit(Batch(workspaces={key: head}))
    assert [head.workspace_id for _, head in store.busy_workspaces()] == ["live", "open"]


@pytest.mark.parametrize("change", [{"epoch": Epoch(2)}, {"version": 4}])
def test_neither_epoch_nor_version_of_a_workspace_can_fall(store: Store, change: dict[str, int]) -> None:
    filled(store)
    head = WorkspaceHead(CASE, version=6, log_index=5, epoch=Epoch(3))._replace(**change)
    with pytest.raises((StoreCorrupt, StoreUnavailable)):
        store.commit(batch(head))


def test_a_log_index_is_given_once(store: Store) -> None:
    filled(store)
    with pytest.raises((StoreCorrupt, StoreUnavailable)):
        store.commit(batch(WorkspaceHead(CASE, version=9, epoch=Epoch(3)), (5, {"z": entry("z")})))


def test_retention_forgets_old_contents_and_keeps_what_stands(store: Store) -> None:
    filled(store)
    everything = {sha(text.encode()) for text in "1234"}
    assert store.unreferenced(everything) == set()
    store.commit(batch(WorkspaceHead(CASE, version=9, log_index=5, epoch=Epoch(3)), pruned={KEY: 4}))
    assert store.oldest_index(KEY) == 4
    assert store.unreferenced(everything) == {sha(b"2")}, "a's old content; what stands at index 4 or later is named"
    assert set(dict(store.manifest(KEY, 4, "", 9))) == {"c", "d", "d/é"}
    assert set(dict(store.manifest(KEY, 5, "", 9))) == {"a", "c", "d", "d/é"}


def test_workspaces_outlive_their_process(folder: Path) -> None:
    first = SqliteStore.open(folder / "s.db", create=True)
    filled(first)
    first.close()
    again = SqliteStore.open(folder / "s.db", create=False)
    assert set(dict(again.manifest(KEY, 5, "", 9))) == {"a", "c", "d", "d/é"}
    again.close()


# --- blobs ----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
def blobs(request: pytest.FixtureRequest, folder: Path, clock: Clock) -> Iterator[BlobStore]:
    made: BlobStore = (
        MemoryBlobs(bytes_max=2_500_000, clock_ms=clock)
        if request.param == "memory"
        else SqliteBlobs(folder / "c", bytes_max=2_500_000, clock_ms=clock)
    )
    yield made
    made.close()


def put(blobs: BlobStore, content: bytes, piece: int = 100_000) -> str:
    upload = blobs.begin()
    for n in range(0, len(content), piece):
        upload.append(content[n : n + piece])
    assert upload.finish(sha(content)) == len(content)
    return sha(content)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])
def test_a_content_comes_back_as_it_went_in_whichever_way_it_came(blobs: BlobStore, size: int) -> None:
    one, two = (bytes(i * k % 251 for i in range(size)) for k in (1, 3))
    blobs.write({sha(one): one})
    for content in (one, two, one):
        digest = put(blobs, content)
        assert b"".join(blobs.read(digest)) == content and blobs.size(digest) == size
    assert blobs.missing([sha(one), sha(two), "0" * 64]) == {"0" * 64}


def test_a_content_under_another_digest_is_not_taken(blobs: BlobStore) -> None:
    with pytest.raises(BlobRefused, match="another digest"):
        blobs.write({sha(b"a"): b"b"})
    upload = blobs.begin()
    upload.append(b"b")
    with pytest.raises(BlobRefused, match="another digest"):
        upload.finish(sha(b"a"))
    upload.discard()
    assert blobs.missing([sha(b"a"), sha(b"b")]) == {sha(b"a"), sha(b"b")}
    assert blobs.size(sha(b"b")) is None
    with pytest.raises(KeyError):
        blobs.read(sha(b"b"))


def test_what_would_not_fit_is_refused_and_what_is_there_stays(blobs: BlobStore) -> None:
    digest = put(blobs, b"x" * 1_500_000)
    with pytest.raises(BlobRefused, match="more than"):
        put(blobs, b"y" * 1_500_000)
    with pytest.raises(BlobRefused, match="more than"):
        blobs.write({sha(b"z" * 1_100_000): b"z" * 1_100_000})
    assert blobs.size(digest) == 1_500_000
    blobs.delete([digest])
    put(blobs, b"y" * 1_500_000)


def test_only_what_nobody_touched_for_a_while_is_a_candidate(blobs: BlobStore, clock: Clock) -> None:
    blobs.write({sha(text): text for text in (b"old", b"asked", b"new")})
    clock.ms += 3_600_000
    assert blobs.missing([sha(b"asked")]) == set()
    found = blobs.untouched_since(clock.ms, "", 9)
    assert set(found) == {sha(b"old"), sha(b"new")} and list(found) == sorted(found)
    assert blobs.untouched_since(clock.ms, found[0], 9) == found[1:]
    blobs.delete([sha(b"old")])
    assert blobs.missing([sha(b"old")]) == {sha(b"old")}


def test_what_a_crash_left_half_uploaded_is_gone_at_the_next_start(folder: Path, clock: Clock) -> None:
    blobs = SqliteBlobs(folder / "c", clock_ms=clock)
    blobs.begin().append(b"x" * PIECE_BYTES * 2)
    put(blobs, b"whole")
    blobs.close()
    again = SqliteBlobs(folder / "c", clock_ms=clock)
    again.close()
    rows = apsw.Connection(str(folder / "c"))
    assert rows.execute("SELECT count(*) FROM blobs").get == rows.execute("SELECT count(*) FROM pieces").get == 1
    rows.close()


def test_a_file_of_another_kind_is_refused_and_left_alone(folder: Path, clock: Clock) -> None:
    SqliteStore.open(folder / "s.db", create=True).close()
    (folder / "text").write_bytes(b"no database at all, but long enough to be looked at as one" * 9)
    for name in ("s.db", "text"):
        before = (folder / name).read_bytes()
        with pytest.raises(StoreRefused):
            SqliteBlobs(folder / name, clock_ms=clock)
        assert (folder / name).read_bytes() == before


def test_a_backup_of_contents_holds_them_and_overwrites_nothing(folder: Path, clock: Clock) -> None:
    assert copy_contents(folder / "s", folder / "t") == 0
    blobs = SqliteBlobs(contents_beside(folder / "s"), clock_ms=clock)
    digest = put(blobs, b"x" * PIECE_BYTES * 2)
    assert copy_contents(folder / "s", folder / "t") > PIECE_BYTES * 2, "while it is open and written to"
    blobs.close()
    copied = SqliteBlobs(contents_beside(folder / "t"), clock_ms=clock)
    assert b"".join(copied.read(digest)) == b"x" * PIECE_BYTES * 2
    copied.close()
    with pytest.raises(StoreRefused, match="there already"):
        copy_contents(folder / "s", folder / "t")
