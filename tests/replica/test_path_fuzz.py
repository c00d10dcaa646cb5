"""Paths made of what ever got out of a root somewhere: none leads out, and none raises what isn't declared."""

import os
import random
from pathlib import Path

import pytest
from msgspec import ValidationError
from tests.replica.place import Place, place

from tidefast.sdk.replica.refusals import NotDone

PIECES = [
    "..", ".", "/", "//", "d", "f", "link", "up", "\0", "\n", "%2e%2e", "..\\", "....", "\u2024\u2024", "~",
    "é", "e\u0301", "x" * 250, "\ud800", "\x7f", " ", "..;", "proc", "self", ":", "C:\\", "file://", "-rf", ".git",
    "\u202e", "...",
]  # fmt: skip
CODES = {"invalid", "conflict", "forbidden", "not_found", "too_large"}


def made(chance: random.Random) -> str:
    return chance.choice(("", "/")).join(chance.choice(PIECES) for _ in range(chance.randint(1, 9)))


def fuzz_paths(top: Path, tries: int, seed: int, monkeypatch: pytest.MonkeyPatch, *, use_openat2: bool | None) -> int:
    """How many calls went through. Escapes and undeclared exceptions fail at once."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    chance = random.Random(seed)
    outside = top / "outside"
    outside.mkdir()
    (outside / "f").write_text("outside")
    done, codes = 0, set[str]()
    with place(top / "ws", use_openat2=use_openat2) as here:
        here.scans = False
        _plant(here, outside)
        for _ in range(tries):
            path, other = made(chance), made(chance)
            verb = chance.choice(("read_file", "stat", "list_files", "write_file", "make_dir", "delete", "move"))
            args: dict[str, object] = {"source": path, "destination": other} if verb == "move" else {"path": path}
            if verb == "write_file":
                args["content"] = "x"
            try:
                result = here.do(verb, **args)
            except NotDone as told:
                codes.add(told.code)
            except ValidationError:  # what the wire's own check refuses doesn't reach a replica
                continue
            else:
                done += 1
                assert "outside" not in str(result.get("content", ""))
            if done % 200 == 199:
                for name in here.path.iterdir():
                    if name.name != ".tidefast":
                        here.why("delete", path=name.name, is_recursive=True)
                _plant(here, outside)
        assert codes <= CODES
        assert sorted(os.listdir(top)) == ["outside", "ws"]
        assert os.listdir(outside) == ["f"]
        assert (outside / "f").read_text() == "outside"
    return done


def _plant(here: Place, outside: Path) -> None:
    for name, target in (("link", str(outside)), ("up", ".."), ("proc", "/proc")):
        if not os.path.lexists(here.path / name):
            (here.path / name).symlink_to(target)
    if not os.path.lexists(here.path / "d"):
        (here.path / "d").mkdir()


@pytest.mark.parametrize("use_openat2", [None, False], ids=["as here", "step by step"])
def test_no_path_leads_out(use_openat2: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz_paths(tmp_path, 1_500, 1, monkeypatch, use_openat2=use_openat2) > 50


@pytest.mark.rig
@pytest.mark.parametrize("use_openat2", [None, False], ids=["as here", "step by step"])
def test_no_path_leads_out_at_the_gate(
    use_openat2: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fuzz_paths(tmp_path, 300_000, 2, monkeypatch, use_openat2=use_openat2) > 5_000
