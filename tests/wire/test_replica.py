"""Messages between a replica and its authority, and the arguments of a workspace's verbs."""

import json
from typing import Any, get_args

import msgspec
import pytest

from tidefast.protocol.workspace import CHAIN_START, Entry
from tidefast.wire import replica as r
from tidefast.wire.workspace import READS, VERBS, WRITES, read_args

SHA = "a" * 64
HELLO: dict[str, Any] = {"kind": "hello", "boot_id": "b1", "epoch": 0, "index": 0, "chain": CHAIN_START}


def test_a_receipt_comes_back_as_it_was_said() -> None:
    delta = {"d": Entry("dir", 0o755, "", 0), "d/f": Entry("file", 0o644, SHA, 3), "gone": None}
    said = r.Receipt("q1", "run", "step", 7, 4, delta, SHA, {"exit_code": 0}, {SHA: "YQ=="})
    assert r.read_from_replica(r.encode(said)) == said


def test_each_message_has_a_kind_of_its_own() -> None:
    for side in (r.FromReplica, r.FromAuthority):
        kinds = [kind.__struct_config__.tag for kind in get_args(side)]
        assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "grant"},
        {"kind": "nothing"},
        {"more": 1},
        {"epoch": True},
        {"epoch": -1},
        {"epoch": 2**63},
        {"index": 1.0},
        {"chain": "A" * 64},
        {"chain": SHA + "\n"},
        {"boot_id": ""},
    ],
)
def test_a_malformed_message_is_refused(change: dict[str, Any]) -> None:
    assert isinstance(r.read_from_replica(json.dumps(HELLO)), r.Hello)
    with pytest.raises(msgspec.DecodeError):
        r.read_from_replica(json.dumps({**HELLO, **change}))


def test_a_message_without_a_member_it_needs_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        r.read_from_authority('{"kind":"do","request_id":"q"}')


def test_every_verb_reads_or_writes() -> None:
    assert set(READS) | set(WRITES) == set(VERBS)
    assert not set(READS) & set(WRITES)


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("write_file", {"path": "a", "contents": "x"}),
        ("write_file", {"path": "a"}),
        ("write_file", {"path": "", "content": "x"}),
        ("edit_file", {"path": "a", "edits": []}),
        ("run_command", {"argv": []}),
        ("run_command", {"argv": ["true"], "timeout_ms": 0}),
        ("make_dir", {"path": "a", "mode": 0o1777}),
    ],
)
def test_arguments_that_do_not_fit_a_verb_are_named(verb: str, args: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        read_args(verb, args)


def test_arguments_that_fit_are_read_with_their_defaults() -> None:
    args = read_args("run_command", {"shell": "make"})
    assert (args.shell, args.cwd, args.escapes) == ("make", ".", False)  # type: ignore[attr-defined]
