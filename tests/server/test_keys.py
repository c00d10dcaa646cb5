"""Keys: the operator's file beside the store, and the file of callers' keys."""

import stat
from pathlib import Path

import pytest

from tidefast.server import keys
from tidefast.server.access import Caller, KeyBook, key_digest
from tidefast.server.credentials import Files
from tidefast.server.keyfile import KeysRefused, add_key, read_keys, revoke_key

SHA = "ab" * 32


def test_the_key_is_made_once_and_read_by_the_cli(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    assert keys.read_operator_key(store) is None
    key = keys.make_operator_key(store)
    assert key.startswith("tfo1.") and keys.make_operator_key(store) == key == keys.read_operator_key(store)
    file = tmp_path / "store.db.operator-key"
    assert keys.operator_key_path(store) == file and stat.S_IMODE(file.stat().st_mode) == 0o600
    book = KeyBook(key_digest(key))
    for scheme in ("Bearer", "bearer"):
        caller = book.caller(f"{scheme} {key}")
        assert caller is not None and (caller.name, caller.role) == ("operator", "operator")
    assert keys.secret_path(store) == tmp_path / "store.db.secret"


@pytest.mark.parametrize(
    "sent",
    ["", "Bearer", "Bearer ", "tfo1.abc", "Basic tfo1.abc", "Bearer tfo1.abd", "Bearer  tfo1.abc", "Bearer é"],
)
def test_other_keys_are_not_the_key(sent: str) -> None:
    assert KeyBook(key_digest("tfo1.abc")).caller(sent) is None


def test_a_key_is_told_once_and_known_by_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    made = {
        add_key(file, caller): caller
        for caller in (
            Caller("shop", "worker", "shop-"),
            Caller("eyes", "reader", bodies=True),
            Caller("blind", "reader", bodies=False),
            Caller("box.1", "replica", workspace="case-1"),
        )
    }
    text = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and not [key for key in made if key in text or key[5:] in text]
    assert read_keys(file) == {key_digest(key): caller for key, caller in made.items()}
    assert all(key.startswith("tfk1.") and len(key) == 69 for key in made) and len(made) == 4


def test_a_revoked_key_is_gone_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    for name in ("one", "two", "three.x"):
        add_key(file, Caller(name, "worker"))
    file.write_text(file.read_text() + "\n# kept by hand\n")
    revoke_key(file, "two")
    assert sorted(caller.name for caller in read_keys(file).values()) == ["one", "three.x"]
    revoke_key(file, "three.x")
    assert [caller.name for caller in read_keys(file).values()] == ["one"]
    with pytest.raises(KeysRefused, match="there is no such key; there are: one"):
        revoke_key(file, "two")
    with pytest.raises(KeysRefused, match="there is one already"):
        add_key(file, Caller("one", "reader"))
    inline = f'keys = {{ one = {{ role = "worker", sha256 = "{SHA}" }} }}\n'
    file.write_text(inline)
    with pytest.raises(KeysRefused, match="remove it by hand"):
        revoke_key(file, "one")
    assert file.read_text() == inline and not list(tmp_path.glob("*.new"))


BAD = [
    ("[keys", "not TOML"),
    ("keys = 1", "expected tables"),
    ("other = 1", "unknown; a file of keys"),
    ("[keys]\none = 1", "expected a table"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nrunz = "x*"', "runz: unknown"),
    (f'[keys.one]\nrole = "boss"\nsha256 = "{SHA}"', "role: expected one of"),
    (f'[keys.one]\nsha256 = "{SHA}"', "role: expected one of"),
    ('[keys.one]\nrole = "worker"', "sha256: expected"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA.upper()}"', "sha256: expected"),
    ('[keys.one]\nrole = "worker"\nsha256 = "tfk1.0000"', "sha256: expected"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nruns = "shop-"', "with a star behind it"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nruns = "-x*"', "with a star behind it"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nruns = "a%*"', "with a star behind it"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nruns = 7', "with a star behind it"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nruns = "{"a" * 101}*"', "with a star behind it"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nworkspace = "w"', "only a replica's key"),
    (f'[keys.one]\nrole = "replica"\nsha256 = "{SHA}"', "names the workspace"),
    (f'[keys.one]\nrole = "replica"\nsha256 = "{SHA}"\nworkspace = "w"\nruns = "x*"', "bound to its workspace"),
    (f'[keys.one]\nrole = "reader"\nsha256 = "{SHA}"\nbodies = 1', "true or false"),
    (f'[keys.one]\nrole = "worker"\nsha256 = "{SHA}"\nbodies = true', "only a reader's key"),
    (f'[keys.operator]\nrole = "operator"\nsha256 = "{SHA}"', "other than `operator`"),
    (f'[keys."a b"]\nrole = "worker"\nsha256 = "{SHA}"', "expected a name"),
    (
        f'[keys.a]\nrole = "worker"\nsha256 = "{SHA}"\n[keys.b]\nrole = "reader"\nsha256 = "{SHA}"',
        "each has one of its own",
    ),
    ("\xff", "not UTF-8"),
    ("#" * 1_100_000, "larger than 1 MiB"),
]


@pytest.mark.parametrize(("text", "problem"), BAD)
def test_a_file_of_keys_that_is_not_plain_is_refused_with_its_reason(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeysRefused) as refused:
        read_keys(file)
    assert problem in str(refused.value) and str(file) in str(refused.value)


def test_every_problem_of_the_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'x = 1\n[keys.a]\nrole = "boss"\nsha256 = "{SHA}"\n[keys.b]\nrole = "worker"\nsha256 = "0"\n')
    with pytest.raises(KeysRefused) as refused:
        read_keys(file)
    assert len(str(refused.value).splitlines()) == 3


def test_a_file_that_others_can_write_or_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    with pytest.raises(KeysRefused, match="can't be read"):
        read_keys(file)
    add_key(file, Caller("one", "worker"))
    file.chmod(0o620)
    with pytest.raises(KeysRefused, match="chmod go-w"):
        read_keys(file)
    with pytest.raises(KeysRefused, match="not a plain file"):
        read_keys(tmp_path)
    with pytest.raises(KeysRefused, match="No such file"):
        add_key(tmp_path / "nowhere" / "keys.toml", Caller("one", "worker"))


def test_all_credentials_are_read_from_their_files(tmp_path: Path) -> None:
    files = Files(tmp_path / "s", tmp_path / "o", tmp_path / "k")
    key = add_key(tmp_path / "k", Caller("one", "worker"))
    first = files.load(b"n" * 16)
    assert first.book.caller(f"Bearer {key}") == Caller("one", "worker") and len(first.signer.secrets) == 1
    (tmp_path / "s").write_text((tmp_path / "s").read_text() + "0123456789abcdef" * 4 + "\n")
    again = files.load(b"n" * 16)
    assert again.signer.secrets == (*first.signer.secrets, bytes.fromhex("0123456789abcdef" * 4))
    assert again.book.operator_digest == first.book.operator_digest
    assert Files(tmp_path / "s", tmp_path / "o").load(b"n" * 16).book.keys is None
