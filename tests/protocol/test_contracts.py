"""Contracts: what a table may say, every problem at once, and the bytes that follow from it."""

import json
import urllib.parse
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.driver import KEYED, READ

from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import (
    Contract,
    Credential,
    Limits,
    Probe,
    Request,
    Require,
    Undo,
    contract_digest,
    render_probe,
    render_request,
    render_undo,
)
from tidefast.protocol.fields import Problem, duration_ms
from tidefast.protocol.patterns import Pattern, RenderError

GOOD: dict[str, Any] = {
    "kind": "http",
    "effect": "external",
    "url": "http://127.0.0.1:9100/charges/{args.order}",
    "method": "POST",
    "args": {"type": "object"},
    "key": "header:Idempotency-Key",
    "key_form": "uuid",
    "key_ttl": "24h",
    "margin": "5m",
    "key_scope": "acct",
    "timeout": "30s",
    "refusals": [402, {"status": 400, "error.code": "declined"}],
    "retries": 2,
    "stored_failures": True,
    "undo": {"tool": "refund", "args": {"charge": "{receipt.body.id}"}},
    "credential": {"header": "Authorization", "env": "CHARGE_TOKEN"},
}
KEY = "0123456789abcdef0123456789abcdef"
PROBE: dict[str, Any] = {
    "url": "http://127.0.0.1:9100/charges?key={key}&order={args.order}",
    "found": {"data.0.id": "string"},
    "absent": {"data": "empty"},
    "many": {"status": 200, "data.1.id": "any"},
    "lag": "10s",
    "receipt": "data.0",
}
RICH: dict[str, Any] = {
    "body": "form",
    "ttl_from": "completed",
    "payload_bound": True,
    "expect": {"status": "paid", "id": "string"},
    "probe": PROBE,
    "probe_tries": 3,
    "undo": {"tool": "refund", "args": {"order": "{args.order}"}, "nothing": {"error.code": "no_such_charge"}},
    "undo_safe_if_absent": True,
    "independent": True,
    "require": {"tool": "balance", "args": {"account": "{args.order}"}, "match": {"open": True}},
    "limits": {"per_minute": 60, "per_run": 5, "by": "args.to", "spend": "args.cents", "spend_per_day": 900},
    "secret": ["card.number"],
}


def parsed(**changes: Any) -> Contract:
    contract, problems = parse_contract("charge", {**GOOD, **changes})
    assert contract is not None and not problems, problems
    return contract


def test_a_full_table_becomes_a_contract() -> None:
    contract = parsed()
    assert contract.dedups and contract.key_ttl_ms == 86_400_000 and contract.margin_ms == 300_000
    assert contract.refusals == (Pattern(402), Pattern(400, (("error.code", "declined"),)))
    assert contract.undo == Undo("refund", {"charge": "{receipt.body.id}"})
    assert contract.credential == Credential("Authorization", "CHARGE_TOKEN")
    assert (contract.origin, contract.scope) == ("http://127.0.0.1:9100", "http://127.0.0.1:9100 acct")


def test_a_table_with_everything_becomes_a_contract_with_everything() -> None:
    contract = parsed(**RICH)
    assert contract.probe == Probe(
        found=Pattern(0, (("data.0.id", "string"),)),
        absent=Pattern(0, (("data", "empty"),)),
        many=Pattern(200, (("data.1.id", "any"),)),
        lag_ms=10_000,
        url=PROBE["url"],
        receipt="data.0",
    )
    assert contract.expect == Pattern(0, (("id", "string"), ("status", "paid")))
    assert contract.undo is not None and contract.undo.nothing == Pattern(0, (("error.code", "no_such_charge"),))
    assert contract.require == Require("balance", Pattern(0, (("open", True),)), {"account": "{args.order}"})
    assert contract.limits == Limits(60, 0, 5, "args.to", "args.cents", 900, 0)
    assert contract.payload_bound == (Pattern(422),) and contract.secret == ("card.number",)
    assert (contract.body, contract.ttl_from, contract.probe_tries) == ("form", "completed", 3)
    assert parsed(payload_bound=[{"status": 400, "type": "idempotency_error"}]).payload_bound == (
        Pattern(400, (("type", "idempotency_error"),)),
    )
    by_tool = parsed(probe={**PROBE, "url": None, "tool": "find", "args": {"key": "{key}", "all": "{args}"}}).probe
    assert by_tool is not None and by_tool.tool == "find"
    assert parsed(probe={**PROBE, "method": "POST", "args": {"query": "{key}"}}).probe is not None


def test_an_almost_empty_table_becomes_the_most_dangerous_kind() -> None:
    contract, problems = parse_contract("t", {"kind": "python"})
    assert not problems and contract is not None
    assert (contract.effect, contract.key, contract.dedups, contract.refusals) == ("external", "none", False, ())
    assert contract.origin == contract.scope == "python:t"


@pytest.mark.parametrize(
    "contract", [parsed(), parsed(**RICH), KEYED, READ, Contract("t", "python", key="field:key", key_ttl_ms=1)]
)
def test_a_contract_reads_back_from_its_stored_text(contract: Contract) -> None:
    assert Contract.from_json(json.loads(contract.to_json())) == contract
    assert contract_digest(contract) == contract_digest(Contract.from_json(json.loads(contract.to_json())))


BAD: list[tuple[dict[str, Any], set[str]]] = [
    ({"kind": None}, {"kind"}),
    ({"kind": "pigeon"}, {"kind"}),
    ({"effect": "some"}, {"effect"}),
    ({"method": "TRACE"}, {"method"}),
    ({"url": "ftp://host/x"}, {"url"}),
    ({"url": ""}, {"url"}),
    ({"url": 7}, {"url"}),
    ({"url": "http://h/\n"}, {"url"}),
    ({"url": "http://h/" + "x" * 2_048}, {"url"}),
    ({"url": "http://user:secret@host/x"}, {"url"}),
    ({"url": "http://{args.host}/x"}, {"url"}),
    ({"url": "http://host/{order}"}, {"url"}),
    ({"args": "no"}, {"args"}),
    ({"args": {"x": float("nan")}}, {"args"}),
    ({"key": "header:"}, {"key", "key_ttl"}),
    ({"key": "header:Host"}, {"key", "key_ttl"}),
    ({"key": "header:a b"}, {"key", "key_ttl"}),
    ({"key": "field:"}, {"key", "key_ttl"}),
    ({"key": "cookie:x"}, {"key", "key_ttl"}),
    ({"key": 1}, {"key", "key_ttl"}),
    ({"key": "none"}, {"key_ttl"}),
    ({"key_form": "base64"}, {"key_form"}),
    ({"key_ttl": "soon"}, {"key_ttl"}),
    ({"key_ttl": 5}, {"key_ttl"}),
    ({"key_ttl": "5m"}, {"key_ttl"}),
    ({"margin": "-1s"}, {"margin"}),
    ({"timeout": "0s"}, {"timeout"}),
    ({"timeout": "2h"}, {"timeout"}),
    ({"key_scope": ["a"]}, {"key_scope"}),
    ({"refusals": 402}, {"refusals"}),
    ({"refusals": [200]}, {"refusals"}),
    ({"refusals": [True]}, {"refusals"}),
    ({"refusals": ["402"]}, {"refusals"}),
    ({"refusals": [{"error": 1}]}, {"refusals"}),
    ({"refusals": [{"status": 400, "x": float("inf")}]}, {"refusals"}),
    ({"retries": -1}, {"retries"}),
    ({"retries": 101}, {"retries"}),
    ({"retries": True}, {"retries"}),
    ({"retries": "2"}, {"retries"}),
    ({"stored_failures": 1}, {"stored_failures"}),
    ({"undo": "refund"}, {"undo"}),
    ({"undo": {"args": {}}}, {"undo"}),
    ({"undo": {"tool": "x", "more": 1}}, {"undo"}),
    ({"undo": {"tool": "x", "args": 1}}, {"undo"}),
    ({"undo": {"tool": "x", "args": {"a": float("nan")}}}, {"undo"}),
    ({"undo": {"tool": "x", "args": {"a": [1, {"b": "{nope}"}]}}}, {"undo"}),
    ({"credential": "token"}, {"credential"}),
    ({"credential": {"header": "A"}}, {"credential"}),
    ({"credential": {"header": "a b", "env": "X"}}, {"credential"}),
    ({"credential": {"header": "A", "env": ""}}, {"credential"}),
    ({"method": "DELETE", "key": "field:key"}, {"key"}),
    ({"kind": "python"}, {"kind"}),
    ({"kind": "python", "url": "", "credential": None, "key": "header:X"}, {"kind"}),
    ({"colour": 1}, {"colour"}),
    ({"key": "meta:idempotencyKey"}, {"key", "key_ttl"}),
    ({"undo": {"tool": "x", "nothing": {}}}, {"undo"}),
    ({"undo": {"tool": "x", "nothing": {"status": 99}}}, {"undo"}),
    ({"undo": {"tool": "x", "nothing": {"a": float("nan")}}}, {"undo"}),
    ({"body": "xml"}, {"body"}),
    ({"body": "form", "method": "DELETE"}, {"body"}),
    ({"ttl_from": "never"}, {"ttl_from"}),
    ({"payload_bound": "yes"}, {"payload_bound"}),
    ({"payload_bound": [200]}, {"payload_bound"}),
    ({"payload_bound": True, "key_ttl": None}, {"payload_bound"}),
    ({"expect": []}, {"expect"}),
    ({"probe": "http://h/"}, {"probe"}),
    ({"probe": {**PROBE, "colour": 1}}, {"probe"}),
    ({"probe": {**PROBE, "lag": None}}, {"probe"}),
    ({"probe": {**PROBE, "found": None}}, {"probe"}),
    ({"probe": {**PROBE, "url": None}}, {"probe"}),
    ({"probe": {**PROBE, "url": "http://["}}, {"probe"}),
    ({"probe": {**PROBE, "tool": "look"}}, {"probe"}),
    ({"probe": {**PROBE, "args": {"a": 1}}}, {"probe"}),
    ({"probe": {**PROBE, "method": "PUT"}}, {"probe"}),
    ({"probe": {**PROBE, "url": "http://other/charges"}}, {"probe"}),
    ({"probe": PROBE, "kind": "python", "url": None, "credential": None, "key": "field:key"}, {"probe"}),
    ({"probe": {**PROBE, "url": "http://127.0.0.1:9100/{key.x}"}}, {"probe"}),
    ({"probe": {**PROBE, "url": "http://127.0.0.1:9100/{nope}"}}, {"probe"}),
    ({"probe": {**PROBE, "many": {"a": "{receipt.x}"}}}, {"probe"}),
    ({"probe": PROBE, "key": "none", "key_ttl": None}, {"probe"}),
    ({"probe": PROBE, "effect": "none", "undo": None}, {"probe"}),
    ({"probe_tries": True}, {"probe_tries"}),
    ({"undo_safe_if_absent": True, "undo": None}, {"undo_safe_if_absent"}),
    ({"undo_safe_if_absent": True}, {"undo"}),
    ({"require": {"match": {"a": 1}}}, {"require"}),
    ({"require": {"tool": "t"}}, {"require"}),
    ({"require": {"tool": "t", "match": {"a": "{key}"}}}, {"require"}),
    ({"limits": {}}, {"limits"}),
    ({"limits": {"per_minute": 0}}, {"limits"}),
    ({"limits": {"per_run": 1, "by": "to"}}, {"limits"}),
    ({"limits": {"per_run": 1, "spend": "args.cents"}}, {"limits"}),
    ({"limits": {"spend_per_day": 1}}, {"limits"}),
    ({"secret": "card"}, {"secret"}),
    ({"secret": [""]}, {"secret"}),
]


@pytest.mark.parametrize("changes,members", BAD, ids=[repr(changes)[:60] for changes, _ in BAD])
def test_a_bad_table_names_the_member_that_is_wrong(changes: dict[str, Any], members: set[str]) -> None:
    contract, problems = parse_contract("charge", {**GOOD, **changes})
    assert contract is None and {problem.member.split(".")[0] for problem in problems} == members
    assert all(str(problem).startswith(f"{problem.member}: ") for problem in problems)


def test_every_problem_is_reported_at_once() -> None:
    table = {
        "kind": "x", "effect": "x", "url": 1, "method": "x", "args": 1, "key": 1, "key_form": 1, "key_ttl": 1,
        "margin": 1, "key_scope": 1, "timeout": 1, "refusals": 1, "retries": -1, "stored_failures": 1, "undo": 1,
        "credential": 1, "body": 1, "ttl_from": 1, "payload_bound": 1, "expect": 1, "probe": 1, "probe_tries": 0,
        "undo_safe_if_absent": 1, "independent": 1, "require": 1, "limits": 1, "secret": 1, "one": 1, "two": 2,
    }  # fmt: skip
    contract, problems = parse_contract("charge", table)
    assert contract is None and {problem.member for problem in problems} == set(table)
    assert Problem("one", next(problem.expected for problem in problems if problem.member == "one")) in problems


@pytest.mark.parametrize(
    "text,length",
    [("30s", 30_000), ("24h", 86_400_000), ("500ms", 500), ("5m", 300_000), ("7d", 604_800_000), ("0s", 0)],
)
def test_durations_are_whole_numbers_with_a_unit(text: str, length: int) -> None:
    assert duration_ms(text) == length


@pytest.mark.parametrize("text", ["", "30", "s", "1.5s", "-1s", " 1s", "1s ", "1w", "١s", "1S", "9999999999s"])
def test_anything_else_is_no_duration(text: str) -> None:
    assert duration_ms(text) is None


# --- refusals


@pytest.mark.parametrize(
    "status,body,is_refusal",
    [
        (402, None, True),
        (400, {"error": {"code": "declined"}}, True),
        (400, {"error": {"code": "other"}}, False),
        (400, {"error": "declined"}, False),
        (400, None, False),
        (500, {"error": {"code": "declined"}}, False),
        (200, None, False),
    ],
)
def test_only_a_listed_answer_is_a_refusal(status: int, body: Any, is_refusal: bool) -> None:
    assert any(line.matches(status, body) for line in parsed().refusals) is is_refusal


def test_a_refusals_path_reaches_into_lists() -> None:
    line = Pattern(400, (("errors.0.code", "declined"),))
    assert line.matches(400, {"errors": [{"code": "declined"}]})
    for body in ({"errors": []}, {"errors": {"1": 1}}, {"errors": [{"code": None}]}, {"errors": "x"}):
        assert not line.matches(400, body)


# --- requests


def test_the_request_is_a_function_of_contract_arguments_and_key() -> None:
    request = render_request(parsed(), {"order": "a/b ü", "cents": 50}, KEY)
    assert request.url == "http://127.0.0.1:9100/charges/a%2Fb%20%C3%BC"
    assert request.headers["Idempotency-Key"] == "01234567-89ab-cdef-0123-456789abcdef"
    assert request.headers["Content-Type"] == "application/json"
    assert request.body == '{"cents":50,"order":"a/b ü"}'
    assert request == Request(**json.loads(request.to_json()))


def test_the_key_goes_into_the_body_where_the_contract_puts_it() -> None:
    plain = {"url": "http://h/", "key_form": "hex"}
    assert json.loads(render_request(parsed(key="field:key", **plain), {"a": 1}, KEY).body) == {"a": 1, "key": KEY}
    nested = parsed(key="field:meta.key", **plain)
    args = {"meta": {"b": 1}}
    assert json.loads(render_request(nested, args, KEY).body) == {"meta": {"b": 1, "key": KEY}}
    assert args == {"meta": {"b": 1}}, "the caller's arguments stay as they are"
    assert json.loads(render_request(nested, {}, KEY).body) == {"meta": {"key": KEY}}


@pytest.mark.parametrize("args", [{"meta": {"key": "mine"}}, {"meta": "text"}])
def test_a_caller_can_not_bring_the_key(args: dict[str, Any]) -> None:
    with pytest.raises(RenderError):
        render_request(parsed(key="field:meta.key", url="http://h/"), args, KEY)


@pytest.mark.parametrize("order", [None, True, 1.5, [], {}, "", ".", ".."])
def test_what_goes_into_the_url_is_text_or_an_integer_that_names_something(order: Any) -> None:
    with pytest.raises(RenderError, match=r"args\.order"):
        render_request(parsed(), {"order": order}, KEY)


def test_a_missing_argument_of_the_url_is_named() -> None:
    with pytest.raises(RenderError, match=r"args\.order"):
        render_request(parsed(), {}, KEY)


def test_a_method_without_a_body_needs_a_place_for_every_argument() -> None:
    contract = parsed(method="DELETE")
    assert render_request(contract, {"order": 7}, KEY).body == ""
    with pytest.raises(RenderError, match="no place for cents"):
        render_request(contract, {"order": 7, "cents": 1}, KEY)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text not in (".", "..")))
def test_no_argument_leaves_its_place_in_the_url(order: str) -> None:
    url = render_request(parsed(), {"order": order}, KEY).url
    assert url.startswith("http://127.0.0.1:9100/charges/")
    assert not set(url.removeprefix("http://127.0.0.1:9100/charges/")) & set("/?#@ \r\n")


# --- undo


def test_the_arguments_of_an_undo_come_from_the_receipt_and_the_arguments_with_their_types() -> None:
    undo = Undo(
        "refund",
        {
            "charge": "{receipt.body.id}",
            "cents": "{args.cents}",
            "note": "undo of {receipt.body.id}, {args.cents}",
            "list": ["{args.cents}", {"deep": "{args.cents}"}],
            "plain": 7,
        },
    )
    assert render_undo(undo, {"cents": 50}, {"body": {"id": "ch_1"}}) == {
        "charge": "ch_1",
        "cents": 50,
        "note": "undo of ch_1, 50",
        "list": [50, {"deep": 50}],
        "plain": 7,
    }


def test_an_undo_that_needs_what_the_step_does_not_have_says_so() -> None:
    with pytest.raises(RenderError, match=r"receipt\.body\.id"):
        render_undo(Undo("refund", {"charge": "{receipt.body.id}"}), {}, None)


@pytest.mark.parametrize(
    "wanted,fits,misfits",
    [
        ("string", ["a"], ["", 1, None, True, []]),
        ("integer", [1, 2.0], [1.5, True, "1", None]),
        ("number", [1, 1.5], [True, "1"]),
        ("boolean", [True, False], [1, "true"]),
        ("object", [{}, {"a": 1}], [[], "a"]),
        ("list", [[], [1]], [{}, "a"]),
        ("null", [None], [0, "", False]),
        ("empty", [[], {}, ""], [[0], {"a": 1}, "a", None, 0, False]),
        ("any", [None, 0, "", []], []),
        ("paid", ["paid"], ["Paid", ["paid"], True]),
        ({"equals": "empty"}, ["empty"], ["", []]),
        (True, [True], [1, "true"]),
    ],
)
def test_a_pattern_tells_kinds_and_values_apart(wanted: Any, fits: list[Any], misfits: list[Any]) -> None:
    pattern = Pattern(0, (("a.0", wanted),))
    assert all(pattern.matches(200, {"a": [value]}) for value in fits)
    assert not any(pattern.matches(200, {"a": [value]}) for value in misfits)
    assert not pattern.matches(200, {"a": []}) and not pattern.matches(200, None)


def test_a_member_can_be_wanted_missing_and_a_status_is_part_of_the_answer() -> None:
    pattern = Pattern(404, (("id", "missing"),))
    assert pattern.matches(404, {"error": 1}) and pattern.matches(404, None)
    assert not pattern.matches(404, {"id": 1}) and not pattern.matches(410, {})


def test_the_values_of_a_pattern_are_filled_from_key_and_arguments() -> None:
    pattern = Pattern(0, (("data.0.reference", "{key}"), ("data.0.cents", "{args.cents}"), ("n", 1)))
    assert pattern.filled({"key": KEY, "args": {"cents": 5}}) == Pattern(
        0, (("data.0.reference", KEY), ("data.0.cents", 5), ("n", 1))
    )
    with pytest.raises(RenderError, match=r"args\.cents"):
        pattern.filled({"key": KEY, "args": {}})


def test_a_probe_asks_at_its_url_or_with_a_body() -> None:
    sources = {"key": "k 1", "args": {"order": 7}}
    probe = parsed(**RICH).probe
    assert probe is not None
    url = "http://127.0.0.1:9100/charges?key=k%201&order=7"
    assert render_probe(probe, sources) == Request("GET", url, {}, "")
    posted = render_probe(probe._replace(method="POST", args={"query": "ref:{key}", "n": "{args.order}"}), sources)
    assert (posted.headers["Content-Type"], posted.body) == ("application/json", '{"n":7,"query":"ref:k 1"}')


def test_a_form_body_holds_nested_members_in_brackets_and_the_key_where_the_contract_puts_it() -> None:
    contract = parsed(body="form", key="field:meta.key", url="http://h/")
    args = {"b": True, "n": 1.5, "list": ["x", {"y": "a&b ü"}], "meta": {"order": 7}}
    request = render_request(contract, args, KEY)
    assert request.headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert urllib.parse.parse_qsl(request.body) == [
        ("b", "true"),
        ("list[0]", "x"),
        ("list[1][y]", "a&b ü"),
        ("meta[key]", str(uuid.UUID(KEY))),
        ("meta[order]", "7"),
        ("n", "1.5"),
    ]
    with pytest.raises(RenderError, match="a is null"):
        render_request(contract, {"a": None}, KEY)
