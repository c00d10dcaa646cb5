"""Contracts: what a table may say, every problem at once, and the bytes that follow from it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.driver import KEYED, READ

from tidefast.protocol.contracts import (
    Contract,
    Credential,
    Problem,
    Refusal,
    RenderError,
    Request,
    Undo,
    contract_digest,
    duration_ms,
    parse_contract,
    render_request,
    render_undo,
)

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


def parsed(**changes: Any) -> Contract:
    contract, problems = parse_contract("charge", {**GOOD, **changes})
    assert contract is not None and not problems, problems
    return contract


def test_a_full_table_becomes_a_contract() -> None:
    contract = parsed()
    assert contract.dedups and contract.key_ttl_ms == 86_400_000 and contract.margin_ms == 300_000
    assert contract.refusals == (Refusal(402), Refusal(400, (("error.code", "declined"),)))
    assert contract.undo == Undo("refund", {"charge": "{receipt.body.id}"})
    assert contract.credential == Credential("Authorization", "CHARGE_TOKEN")
    assert (contract.origin, contract.scope) == ("http://127.0.0.1:9100", "http://127.0.0.1:9100 acct")


def test_an_almost_empty_table_becomes_the_most_dangerous_kind() -> None:
    contract, problems = parse_contract("t", {"kind": "python"})
    assert not problems and contract is not None
    assert (contract.effect, contract.key, contract.dedups, contract.refusals) == ("external", "none", False, ())
    assert contract.origin == contract.scope == "python:t"


@pytest.mark.parametrize("contract", [parsed(), KEYED, READ, Contract("t", "python", key="field:key", key_ttl_ms=1)])
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
]


@pytest.mark.parametrize("changes,members", BAD, ids=[repr(changes)[:60] for changes, _ in BAD])
def test_a_bad_table_names_the_member_that_is_wrong(changes: dict[str, Any], members: set[str]) -> None:
    contract, problems = parse_contract("charge", {**GOOD, **changes})
    assert contract is None and {problem.member for problem in problems} == members
    assert all(str(problem).startswith(f"{problem.member}: ") for problem in problems)


def test_every_problem_is_reported_at_once() -> None:
    table = {
        "kind": "x", "effect": "x", "url": 1, "method": "x", "args": 1, "key": 1, "key_form": 1, "key_ttl": 1,
        "margin": 1, "key_scope": 1, "timeout": 1, "refusals": 1, "retries": -1, "stored_failures": 1, "undo": 1,
        "credential": 1, "one": 1, "two": 2,
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
    line = Refusal(400, (("errors.0.code", "declined"),))
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
