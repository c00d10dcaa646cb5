"""Bodies and queries: what is taken, and the exact refusal of everything else."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidefast.protocol.canonical import canonical
from tidefast.wire import messages as m
from tidefast.wire.problem import Problem

GOOD = b'{"tool":"charge","args":{"order":"o1"},"wait_ms":10}'


def apply_with(wait_ms: str) -> bytes:
    return b'{"tool":"t","args":{},"wait_ms":' + wait_ms.encode() + b"}"


BAD: list[tuple[str, type[m.Message], bytes, str]] = [
    ("empty", m.CreateRun, b"", "body_missing"),
    ("blank", m.CreateRun, b" \n", "body_missing"),
    ("cut", m.Apply, b'{"tool":1', "json_invalid"),
    ("two values", m.Apply, b"{}{}", "json_invalid"),
    ("trailing comma", m.Apply, b'{"tool":"t",}', "json_invalid"),
    ("comment", m.Apply, b"{} // x", "json_invalid"),
    ("array", m.Apply, b"[]", "json_not_object"),
    ("string", m.Apply, b'"x"', "json_not_object"),
    ("null", m.Apply, b"null", "json_not_object"),
    ("unknown", m.Grant, b'{"holder":"w","leese_ms":5000}', "field_unknown"),
    ("unknown inside", m.Oversee, b'{"expect":{"epcoh":1}}', "field_unknown"),
    ("missing", m.Grant, b"{}", "field_missing"),
    ("integer as string", m.Apply, apply_with('"7"'), "field_type"),
    ("boolean", m.Apply, apply_with("true"), "field_type"),
    ("fraction", m.Apply, apply_with("7.0"), "field_type"),
    ("exponent", m.Apply, apply_with("7e0"), "field_type"),
    ("null member", m.Apply, apply_with("null"), "field_type"),
    ("list", m.Apply, apply_with("[7]"), "field_type"),
    ("integer as boolean", m.Apply, b'{"stored":1}', "field_type"),
    ("args not an object", m.Apply, b'{"tool":"t","args":[1]}', "field_type"),
    ("negative", m.Apply, apply_with("-1"), "field_range"),
    ("above", m.Apply, apply_with("60001"), "field_range"),
    ("epoch below zero", m.Oversee, b'{"expect":{"epoch":-1}}', "field_range"),
    ("lease 0", m.Grant, b'{"holder":"w","lease_ms":0}', "field_range"),
    ("lease long", m.Grant, b'{"holder":"w","lease_ms":1000000000}', "field_range"),
    ("lease words", m.Grant, b'{"holder":"w","lease_ms":"30s"}', "field_type"),
    ("word", m.Release, b'{"reason":"because"}', "field_range"),
    ("NaN", m.Apply, apply_with("NaN"), "json_invalid"),
    ("NaN in args", m.Apply, b'{"tool":"t","args":{"x":NaN}}', "json_invalid"),
    ("infinity", m.Apply, b'{"tool":"t","args":{"x":-Infinity}}', "json_invalid"),
    ("too large a double", m.Apply, b'{"tool":"t","args":{"x":1e400}}', "field_range"),
    ("too large an integer", m.Apply, b'{"tool":"t","args":{"x":9007199254740992}}', "field_range"),
    ("4,000 digits", m.Apply, apply_with("1" * 4000), "field_range"),
    ("5,000 digits", m.Apply, apply_with("1" * 5000), "json_invalid"),
    ("other digits", m.Apply, apply_with("١"), "json_invalid"),
    ("leading zero", m.Apply, apply_with("07"), "json_invalid"),
    ("deep", m.Apply, b"[" * 200_000, "json_too_deep"),
    ("deep objects", m.Apply, b'{"args":' * 33, "json_too_deep"),
    ("level 33", m.SaveResult, b'{"value":' + b"[" * 32 + b"]" * 32 + b"}", "json_too_deep"),
    ("lone surrogate", m.SaveResult, b'{"value":"\\ud800"}', "text_invalid"),
    ("lone surrogate as a name", m.SaveResult, b'{"value":{"\\udc00":1}}', "text_invalid"),
    ("lone surrogate in a note", m.Oversee, b'{"note":"\\ud800"}', "text_invalid"),
    ("lone surrogate as a member", m.Oversee, b'{"\\ud800":1}', "field_unknown"),
    ("not UTF-8", m.Apply, b"\xff\xfe{}", "encoding_invalid"),
    ("UTF-16", m.Apply, '{"tool":"t"}'.encode("utf-16"), "encoding_invalid"),
    ("overlong", m.SaveResult, b'{"value":"\xc0\xaf"}', "encoding_invalid"),
    ("byte order mark", m.SaveResult, b"\xef\xbb\xbf" + b'{"value":1}', "json_invalid"),
    ("control character", m.SaveResult, b'{"value":"\x01"}', "json_invalid"),
    ("twice", m.Apply, b'{"tool":"a","tool":"a"}', "json_duplicate"),
    ("twice inside", m.SaveResult, b'{"value":[{"a":1,"a":2}]}', "json_duplicate"),
    ("twice by escape", m.SaveResult, b'{"value":{"a":1,"\\u0061":2}}', "json_duplicate"),
    ("run id", m.CreateRun, b'{"agent":"a","input":1,"run_id":"a/b"}', "id_invalid"),
    ("run id derived", m.CreateRun, b'{"agent":"a","input":1,"run_id":"a~undo"}', "id_invalid"),
    ("run id long", m.CreateRun, b'{"agent":"a","input":1,"run_id":"' + b"x" * 129 + b'"}', "id_invalid"),
    ("run id empty", m.CreateRun, b'{"agent":"a","input":1,"run_id":""}', "id_invalid"),
    ("agent dot", m.CreateRun, b'{"agent":".a","input":1}', "id_invalid"),
    ("agent digit of another script", m.CreateRun, '{"agent":"a٣","input":1}'.encode(), "id_invalid"),
    ("agent in a map", m.Claim, b'{"holder":"w","agents":{"a b":["1"]}}', "id_invalid"),
    ("holder", m.Grant, b'{"holder":"a b"}', "text_invalid"),
    ("holder newline", m.Grant, b'{"holder":"a\\n"}', "text_invalid"),
    ("no tokens", m.RenewMany, b'{"tokens":[]}', "field_range"),
    ("future member", m.CreateRun, b'{"agent":"a","input":1,"deadline_ms":5}', "field_unknown"),
    ("many members", m.SaveResult, json.dumps({"value": {str(n): n for n in range(10_000)}}).encode(), "json_too_wide"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "reason"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_bodies_are_refused_with_their_reason(kind: type[m.Message], body: bytes, reason: str) -> None:
    began = time.perf_counter()
    told = m.decode(kind, body)
    assert time.perf_counter() - began < 1
    assert isinstance(told, Problem), told
    assert (told.status, told.code, told.reason) == (400, "invalid", reason)
    assert told.detail and told.kept and told.next
    json.loads(told.to_json())


def test_json_errors_name_the_byte() -> None:
    told = m.decode(m.SaveResult, '{"value":"ä" x}'.encode())
    assert isinstance(told, Problem) and told.facts == {"offset": 14}
    told = m.decode(m.SaveResult, b'{"value":"\xff"}')
    assert isinstance(told, Problem) and told.facts == {"offset": 10}


def test_an_unknown_member_is_named_with_the_nearest() -> None:
    told = m.decode(m.Oversee, b'{"expect":{"epcoh":1}}')
    assert isinstance(told, Problem)
    assert told.facts == {"field": "expect.epcoh", "nearest": "epoch"} and "`epoch`" in told.detail


def test_a_hostile_member_name_is_told_back_in_ascii_and_short() -> None:
    told = m.decode(m.Oversee, json.dumps({"\x1b[2J\u202e" + "x" * 1000: 1}).encode())
    assert isinstance(told, Problem) and len(str(told.facts["field"])) < 200
    assert b"\x1b" not in told.to_json() and "\u202e".encode() not in told.to_json()


def test_strings_with_brackets_and_open_ends_cost_one_pass() -> None:
    hostile = b'{"value":"' + rb"\"[" * 300_000
    began = time.perf_counter()
    told = m.decode(m.SaveResult, hostile)
    assert isinstance(told, Problem) and told.reason == "json_invalid"
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(("size", "is_taken"), [(-1, True), (0, True), (1, False)])
def test_the_body_limit(size: int, is_taken: bool) -> None:
    frame = b'{"value":""}'
    body = b'{"value":"' + b"x" * (1024 * 1024 + size - len(frame)) + b'"}'
    told = m.decode(m.SaveResult, body)
    assert isinstance(told, m.SaveResult) is is_taken
    if isinstance(told, Problem):
        assert (told.status, told.code, told.reason) == (413, "too_large", "body_too_large")


@pytest.mark.parametrize(("depth", "is_taken"), [(30, True), (31, True), (32, False)])
def test_the_depth_limit(depth: int, is_taken: bool) -> None:
    body = b'{"value":' + b"[" * depth + b"]" * depth + b"}"  # the body itself is one level more
    assert isinstance(m.decode(m.SaveResult, body), m.SaveResult) is is_taken


@pytest.mark.parametrize(("members", "is_taken"), [(9_998, True), (9_999, True), (10_000, False)])
def test_the_member_limit(members: int, is_taken: bool) -> None:
    body = json.dumps({"value": {str(n): 0 for n in range(members)}}).encode()
    assert isinstance(m.decode(m.SaveResult, body), m.SaveResult) is is_taken


@pytest.mark.parametrize(("length", "is_taken"), [(127, True), (128, True), (129, False)])
def test_the_id_limit(length: int, is_taken: bool) -> None:
    body = json.dumps({"agent": "a" * length, "input": None}).encode()
    assert isinstance(m.decode(m.CreateRun, body), m.CreateRun) is is_taken


@pytest.mark.parametrize(
    ("wait", "is_taken"), [("0", True), ("59999", True), ("60000", True), ("60001", False), ("-0", True)]
)
def test_the_wait_limit(wait: str, is_taken: bool) -> None:
    assert isinstance(m.decode(m.Apply, apply_with(wait)), m.Apply) is is_taken


def test_bodies_inside_become_canonical_text() -> None:
    told = m.decode(m.Apply, b'{ "args" : {"b": 1.50, "a": "\\u00e9", "c": [1e2]} , "tool":"t"}')
    assert isinstance(told, m.Apply)
    assert told.args == '{"a":"é","b":1.5,"c":[100]}' and told.wait_ms == 30_000


def test_a_body_whose_members_all_have_defaults_may_be_empty() -> None:
    assert m.decode(m.Release, b"") == m.Release()
    assert m.decode(m.Empty, b"") == m.Empty()
    assert isinstance(m.decode(m.Fail, b""), Problem)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(json_values)
def test_what_the_client_encodes_the_server_reads(value: Any) -> None:
    try:
        text = canonical(value)
        text.encode()
    except ValueError:
        return
    message = m.SaveCheckpoint(seq=3, state=text)
    assert m.decode(m.SaveCheckpoint, m.encode(message)) == message


def test_nested_messages_survive_the_wire() -> None:
    for message in (
        m.Resolve(verdict="applied", note="n", receipt='{"a":1}', expect=m.Expect(epoch=3, attempts=2)),
        m.Apply(stored=True),
        m.Claim(agents={"a": ["1", "2"]}, holder="w", max=3, request_id="q"),
    ):
        assert m.decode(type(message), m.encode(message)) == message


@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(body: bytes) -> None:
    assert isinstance(m.decode(m.CreateRun, body), Problem | m.CreateRun)


QUERIES = [
    ([("limit", "0")], "field_range"),
    ([("limit", "1001")], "field_range"),
    ([("limit", "1_0")], "field_type"),
    ([("limit", "+5")], "field_type"),
    ([("limit", "٥")], "field_type"),
    ([("limit", "")], "field_type"),
    ([("limit", "9" * 5000)], "field_type"),
    ([("limit", "1"), ("limit", "2")], "field_repeated"),
    ([("limt", "1")], "field_unknown"),
    ([("state", "dead")], "field_range"),
    ([("after", "a b")], "id_invalid"),
]


@pytest.mark.parametrize(("pairs", "reason"), QUERIES)
def test_bad_queries_are_refused(pairs: list[tuple[str, str]], reason: str) -> None:
    told = m.decode_query(m.RunsQuery, pairs)
    assert isinstance(told, Problem) and (told.status, told.reason) == (400, reason)


def test_a_good_query_is_taken() -> None:
    query = m.decode_query(m.RunsQuery, [("limit", "1000"), ("after", "pay~undo"), ("state", "held")])
    assert query == m.RunsQuery(limit=1000, after="pay~undo", state="held")
