"""The operator's key: one file beside the store, compared by digest."""

import stat
from pathlib import Path

from tidefast.server import keys


def test_the_key_is_made_once_and_read_by_the_cli(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    assert keys.read_operator_key(store) is None
    key = keys.make_operator_key(store)
    assert key.startswith("tfo1.") and keys.make_operator_key(store) == key == keys.read_operator_key(store)
    file = tmp_path / "store.db.operator-key"
    assert keys.operator_key_path(store) == file and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert keys.is_key(f"Bearer {key}", keys.key_digest(key)) and keys.is_key(f"bearer {key}", keys.key_digest(key))
    assert keys.secret_path(store) == tmp_path / "store.db.secret"


def test_other_keys_are_not_the_key() -> None:
    digest = keys.key_digest("tfo1.abc")
    for sent in (
        "",
        "Bearer",
        "Bearer ",
        "tfo1.abc",
        "Basic tfo1.abc",
        "Bearer tfo1.abd",
        "Bearer  tfo1.abc",
        "Bearer é",
    ):
        assert not keys.is_key(sent, digest)
