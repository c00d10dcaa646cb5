"""Anchors and exports: what they prove, whose word they are, and that a server may own the store meanwhile."""

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from tests.cli.processes import running, tidefast
from tests.sim.books import Books
from tests.sim.stories import STORIES, compensated, happy, held, lost_answer

from tidefast.protocol.events import CHAIN_START, Event, chain
from tidefast.protocol.ids import RunId
from tidefast.sim.anchor import (
    Anchor,
    EvidenceRefused,
    fingerprint,
    make_key,
    public_path,
    read_key,
    read_pin,
    seal,
    write_anchor,
)
from tidefast.sim.audit import audit
from tidefast.sim.export import export_run, verify
from tidefast.stores.base import StoredEvent
from tidefast.stores.memory import MemoryStore

HAPPY = RunId("happy")
APP = """
import tidefast as tf

app = tf.App()


@app.tool(key_ttl="1h")
def charge(order: str, key: str) -> dict:
    return {"order": order}


@app.agent
async def desk(run: tf.Run, input: dict) -> dict:
    return await run.tool("pay", "charge", order=input["order"])
"""


def books_of(name: str, story: Callable[[Books], None]) -> Books:
    books = Books(RunId(name)).create()
    books.grant()
    story(books)
    return books


def full_store() -> MemoryStore:
    store = MemoryStore(bytes(range(16)))
    for name, story in STORIES.items():
        books_of(name, story).store(store)
    return store


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_for_its_owner_alone_and_never_replaced(key: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and stat.S_IMODE(public_path(key).stat().st_mode) == 0o644
    assert read_pin(str(public_path(key))) == fingerprint(read_key(key).public_key())
    with pytest.raises(EvidenceRefused, match="is there already"):
        make_key(key)
    public_path(key).unlink()
    with pytest.raises(EvidenceRefused, match="is there already"):
        make_key(key)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read_is_refused(key: Path, mode: int) -> None:
    key.chmod(mode)
    with pytest.raises(EvidenceRefused, match="chmod 600"):
        read_key(key)


def test_what_is_no_key_is_refused(tmp_path: Path, key: Path) -> None:
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    for path, word in (
        (tmp_path / "text", "not an Ed25519"),
        (tmp_path, "not a plain file"),
        (tmp_path / "no", "keygen"),
    ):
        with pytest.raises(EvidenceRefused, match=word):
            read_key(path)
    for pin, word in ((str(tmp_path / "text"), "not an Ed25519"), ("SHA256:xyz", "fingerprint"), ("gone", "be read")):
        with pytest.raises(EvidenceRefused, match=word):
            read_pin(pin)


# --- anchors ----------------------------------------------------------------------------------------------------------


def test_an_anchored_store_is_cleared_and_may_grow(tmp_path: Path, key: Path) -> None:
    store = full_store()
    assert write_anchor(store, tmp_path / "a", read_key(key)) == (len(STORIES), read_pin(f"{key}.pub"))
    books_of("newer", happy).store(store)
    anchor = Anchor(tmp_path / "a", read_pin(f"{key}.pub"))
    assert audit(store, anchors=[anchor]).is_ok
    assert anchor.runs == len(STORIES) and anchor.seal is not None and anchor.seal.is_pinned


def test_every_byte_of_an_anchor_counts(tmp_path: Path, key: Path) -> None:
    store = MemoryStore(bytes(range(16)))
    books_of("happy", happy).store(store)
    write_anchor(store, tmp_path / "a", read_key(key))
    data = (tmp_path / "a").read_bytes()
    for place in range(len(data)):
        (tmp_path / "b").write_bytes(data[:place] + bytes((data[place] ^ 1,)) + data[place + 1 :])
        with pytest.raises(EvidenceRefused):
            audit(store, anchors=[Anchor(tmp_path / "b")])
        (tmp_path / "b").write_bytes(data[:place])
        with pytest.raises(EvidenceRefused):
            audit(store, anchors=[Anchor(tmp_path / "b")])


def test_an_anchor_of_somebody_else_is_refused_only_if_a_key_was_named(tmp_path: Path, key: Path) -> None:
    store = full_store()
    make_key(tmp_path / "thief")
    write_anchor(store, tmp_path / "a", read_key(tmp_path / "thief"))
    assert audit(store, anchors=[Anchor(tmp_path / "a")]).is_ok
    with pytest.raises(EvidenceRefused, match="not by the key that you named"):
        audit(store, anchors=[Anchor(tmp_path / "a", read_pin(f"{key}.pub"))])


def test_a_signature_of_another_purpose_is_none(tmp_path: Path, key: Path) -> None:
    store = full_store()
    export_run(store, HAPPY, tmp_path / "e", read_key(key))
    with pytest.raises(EvidenceRefused, match="no anchor"):
        audit(store, anchors=[Anchor(tmp_path / "e")])
    lines = ['{"at_ms":1,"format":"tidefast-anchor/1","namespace":"00"}']
    seal(tmp_path / "x", "tidefast-export/1", lines, read_key(key))
    with pytest.raises(EvidenceRefused, match="signature doesn't fit"):
        audit(store, anchors=[Anchor(tmp_path / "x")])
    seal(tmp_path / "y", "tidefast-anchor/1", lines, None)
    with pytest.raises(EvidenceRefused, match="not signed"):
        audit(store, anchors=[Anchor(tmp_path / "y")])


def test_a_run_that_is_gone_and_another_store_are_named(tmp_path: Path, key: Path) -> None:
    write_anchor(full_store(), tmp_path / "a", read_key(key))
    other = MemoryStore(bytes(16))
    found = audit(other, anchors=[Anchor(tmp_path / "a")]).violations
    assert sum("the run is gone" in violation.why for violation in found) == len(STORIES)
    assert sum("not the store" in violation.why for violation in found) == 1


def test_several_anchors_narrow_down_where_a_log_was_rewritten(tmp_path: Path, key: Path) -> None:
    books = books_of("happy", happy)
    anchors = []
    for length in (4, 8, 11, len(books.events)):
        store = books.store(MemoryStore(bytes(range(16))))
        store._events[1] = store._events[1][:length]
        head = store._heads[1]
        store._heads[1] = head._replace(seq=length, digest=books.digests[length - 1])
        write_anchor(store, tmp_path / f"a{length}", read_key(key))
        anchors.append(Anchor(tmp_path / f"a{length}"))
    events, digest, log = list(books.events), CHAIN_START, []
    events[8] = Event(*events[8]._replace(at_ms=events[8].at_ms + 1)[:6])
    for event in events:
        digest = chain(digest, event)
        log.append(StoredEvent(1, event, digest))
    store = books.store(MemoryStore(bytes(range(16))))
    store._events[1], store._heads[1] = log, store._heads[1]._replace(digest=digest)
    report = audit(store, anchors=anchors)
    assert report.first_bad == {"happy": 9}
    assert any("one of the events 9 to 11 was rewritten" in violation.why for violation in report.violations)


def test_what_is_wrong_already_is_not_signed(tmp_path: Path, key: Path) -> None:
    store = full_store()
    store._heads[1] = store._heads[1]._replace(digest="0" * 64)
    with pytest.raises(EvidenceRefused, match="audit the store"):
        write_anchor(store, tmp_path / "a", read_key(key))
    assert sorted(os.listdir(tmp_path)) == ["key", "key.pub"]
    write_anchor(full_store(), tmp_path / "a", read_key(key))
    with pytest.raises(EvidenceRefused, match="never overwritten"):
        write_anchor(full_store(), tmp_path / "a", read_key(key))


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORIES)
def test_every_kind_of_run_verifies_without_its_store(tmp_path: Path, key: Path, name: str) -> None:
    store = full_store()
    events = export_run(store, RunId(name), tmp_path / "e", read_key(key))
    found = verify(tmp_path / "e", read_pin(f"{key}.pub"))
    assert found.is_ok, found.report.violations
    assert (found.run_id, found.report.events) == (name, events)
    assert stat.S_IMODE((tmp_path / "e").stat().st_mode) == 0o600


def test_an_export_that_was_altered_is_refused_and_its_first_bad_event_named(tmp_path: Path, key: Path) -> None:
    store = MemoryStore(bytes(range(16)))
    for name, story in (("a", happy), ("b", compensated), ("c", held("applied")), ("d", lost_answer)):
        books_of(name, story).store(store)
        export_run(store, RunId(name), tmp_path / f"e{name}", read_key(key))
        lines = (tmp_path / f"e{name}").read_text().splitlines(keepends=True)
        first = next(place for place, line in enumerate(lines) if '"event":' in line)
        for seq, place in enumerate(range(first, len(lines) - 1), 1):
            edited = lines[place].replace('"at_ms":', '"at_ms":1', 1)
            for changed in ([edited], [], [lines[place], lines[place]]):
                (tmp_path / "x").write_text("".join([*lines[:place], *changed, *lines[place + 1 :]]))
                found = verify(tmp_path / "x")
                assert not found.is_ok and found.seal is None and "was altered" in found.refused
                wanted = seq + 1 if len(changed) == 2 else seq
                assert found.report.first_bad.get(RunId(name)) == wanted


def test_an_unsigned_export_is_whole_but_nobodys_word(tmp_path: Path, key: Path) -> None:
    export_run(full_store(), HAPPY, tmp_path / "e")
    found = verify(tmp_path / "e")
    assert found.is_ok and found.seal is not None and found.seal.key == ""
    refused = verify(tmp_path / "e", read_pin(f"{key}.pub"))
    assert not refused.is_ok and "not signed" in refused.refused


def test_a_contract_left_out_of_an_export_is_missed(tmp_path: Path, key: Path) -> None:
    export_run(full_store(), HAPPY, tmp_path / "e")
    lines = [line for line in (tmp_path / "e").read_text().splitlines() if not line.startswith('{"contract"')]
    seal(tmp_path / "x", "tidefast-export/1", lines[:-1], read_key(key))
    found = verify(tmp_path / "x")
    assert found.seal is not None and not found.is_ok
    assert all("is gone" in violation.why for violation in found.report.violations)


@pytest.mark.parametrize("text", ["", "\n", "{}", "[1]\n", '{"format":"tidefast-export/1","run":7}\n', "\xff" * 9])
def test_what_is_no_export_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text, encoding="latin-1")
    with pytest.raises(EvidenceRefused, match="no export"):
        verify(tmp_path / "x")


# --- the commands, and a store that a server owns ---------------------------------------------------------------------


def test_anchor_audit_export_and_verify_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    for run in ("one", "two"):
        assert tidefast("run", "shop:app", "desk", '{"order":"o"}', "--run-id", run, cwd=tmp_path).returncode == 0
    assert tidefast("anchor", "keygen", "--key", "key", cwd=tmp_path).returncode == 0
    assert tidefast("anchor", "--key", "key", "--out", "a", cwd=tmp_path).returncode == 0
    done = tidefast("audit", "--anchor", "a", "--anchor-key", "key.pub", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["anchors"][0]["pinned"] is True and told["anchors"][0]["runs"] == 2
    unpinned = tidefast("audit", "--anchor", "a", cwd=tmp_path).stdout
    assert "whose word it is" in unpinned and "not checked: whose word the anchor is" in unpinned
    assert "not checked: whether whole logs were rewritten" in tidefast("audit", cwd=tmp_path).stdout
    asked = tidefast("audit", "--anchor", "a", "--anchor-key", "key.pub", "--json", cwd=tmp_path)
    assert json.loads(asked.stdout)["not_checked"] == ["ledger"]
    assert tidefast("export", "one", "--out", "e", "--key", "key", cwd=tmp_path).returncode == 0
    assert tidefast("verify", "e", "--pub", "key.pub", cwd=tmp_path).returncode == 0

    with apsw.Connection(str(tmp_path / ".tidefast" / "store.db")) as file:
        # The file refuses edits by itself; whoever can write it can also drop that.
        for (name,) in file.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            file.execute(f"DROP TRIGGER {name}")
        file.execute("UPDATE events SET data = replace(data, '\"o\"', '\"x\"') WHERE kind = 'step_fenced'")
    done = tidefast("audit", "--anchor", "a", "--anchor-key", "key.pub", cwd=tmp_path)
    assert done.returncode == 1 and "run one, step pay, event 3: the event numbered 3 is not" in done.stdout
    for words, code, word in (
        (("audit", "--anchor-key", "key.pub"), 2, "is for --anchor"),
        (("audit", "--anchor", "e"), 3, "anchor_refused"),
        (("verify", "a"), 3, "export_refused"),
        (("anchor", "--key", "key"), 2, "--out is missing"),
        (("anchor", "--key", "key", "--out", "a"), 3, "never overwritten"),
        (("export", "three", "--out", "x"), 3, "no run three"),
    ):
        done = tidefast(*words, cwd=tmp_path)
        assert done.returncode == code and word in done.stderr, (words, done)


def test_a_store_that_a_server_owns_is_read_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    assert tidefast("run", "shop:app", "desk", '{"order":"o"}', "--run-id", "one", cwd=tmp_path).returncode == 0
    make_key(tmp_path / "key")
    with running("serve", "--port", "0", "--app", "shop:app", cwd=tmp_path) as server:
        url = server.said["url"]
        assert tidefast("start", "desk", '{"order":"o"}', "--run-id", "two", "--url", url, cwd=tmp_path).returncode == 0
        files = {
            path: path.read_bytes() for path in (tmp_path / ".tidefast").glob("store.db*") if path.suffix != ".db-shm"
        }
        assert tidefast("anchor", "--key", "key", "--out", "a", cwd=tmp_path).returncode == 0
        assert tidefast("audit", "--anchor", "a", "--anchor-key", "key.pub", cwd=tmp_path).returncode == 0
        assert tidefast("export", "two", "--out", "e", "--key", "key", cwd=tmp_path).returncode == 0
        assert tidefast("verify", "e", "--pub", "key.pub", cwd=tmp_path).returncode == 0
        assert {path: path.read_bytes() for path in files} == files
        assert tidefast("start", "desk", "1", "--run-id", "three", "--url", url, cwd=tmp_path).returncode == 0
        assert tidefast("audit", "--anchor", "a", "--anchor-key", "key.pub", cwd=tmp_path).returncode == 0
        assert server.end() == 0


def test_the_chain_and_the_seal_can_be_followed_with_sha256_alone(tmp_path: Path, key: Path) -> None:
    """As docs/audit.md tells it to whoever has no Tidefast."""
    export_run(full_store(), HAPPY, tmp_path / "e", read_key(key))
    *lines, last = (tmp_path / "e").read_bytes().splitlines(keepends=True)
    digest = "0" * 64
    for line in (
        line.decode().rstrip("\n") for line in lines if line.startswith(b'{"digest":') and b'"event":' in line
    ):
        text = line.split('"event":', 1)[1].removesuffix("}")
        digest = hashlib.sha256((digest + text).encode()).hexdigest()
        assert json.loads(line)["digest"] == digest
    assert json.loads(lines[0])["digest"] == digest
    sealed = hashlib.sha256(b"".join(lines))
    told = json.loads(last)
    assert told["sha256"] == sealed.hexdigest()
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(told["key"]))
    signed = b"tidefast\0" + json.loads(lines[0])["format"].encode() + b"\0" + sealed.digest()
    public.verify(bytes.fromhex(told["signature"]), signed)
