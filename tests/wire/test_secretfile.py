"""Secret files: made whole and private, and refused when they aren't."""

import stat
from pathlib import Path

import pytest

from tidefast.wire.secretfile import SecretRefused, read, read_or_make


def test_a_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "store.db.secret"
    secret = read_or_make(path)
    assert len(secret) == 32 and read_or_make(path) == secret == read(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_two_secrets_differ(tmp_path: Path) -> None:
    assert read_or_make(tmp_path / "a") != read_or_make(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "32 are needed"),
        ("ab" * 8, "8 bytes"),
        ("changeme", "hex"),
        ("00" * 32, "guess"),
        ("0123" * 16, "guess"),
        (bytes(range(32)).hex(), "guess"),
        ("ab" * 33, "33 bytes"),
    ],
)
def test_a_weak_secret_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SecretRefused, match=word) as caught:
        read_or_make(path)
    assert "openssl rand" in str(caught.value) and str(path) in str(caught.value)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o604])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    read_or_make(path)
    path.chmod(mode)
    with pytest.raises(SecretRefused, match=f"mode {mode:04o}.*chmod 600"):
        read(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretRefused, match="plain file"):
        read(tmp_path)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SecretRefused):
        read_or_make(tmp_path / "file" / "secret")
