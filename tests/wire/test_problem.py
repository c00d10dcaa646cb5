"""Problem details: every code has a row, every reason of the rules reads well, the client gets back what was said."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tidefast.protocol import step as anchor
from tidefast.protocol.verdicts import Code, Refused
from tidefast.server import keyfile, keys
from tidefast.wire import tokens
from tidefast.wire.problem import CODES, Problem, from_json, from_refused, problem, to_refused
from tidefast.wire.refusals import REASONS, ROWS

STATUS = {
    "stale_epoch": 409, "lease_lapsed": 409, "lease_held": 409, "step_conflict": 422, "step_in_flight": 409,
    "step_pending": 409, "in_doubt": 409, "step_held": 409, "step_rejected": 422, "already_decided": 409,
    "checkpoint_stale": 409, "run_conflict": 409, "run_ended": 409, "run_frozen": 409, "run_ending": 409,
    "run_paused": 409,
    "unsettled_effects": 409, "moved": 409, "not_found": 404, "invalid": 422, "lease_required": 428,
    "bad_token": 401, "unauthenticated": 401, "forbidden": 403, "unsupported": 415, "too_large": 413,
    "limit_reached": 429, "no_replica": 503, "full": 507,
    "overloaded": 503, "store_unavailable": 503, "internal": 500,
}  # fmt: skip
FACTS = {"epoch": 4, "live_epoch": 5, "holder": "w2", "ended_at_ms": 7, "steps": ["a", "b~undo"]}


def test_every_code_has_a_row_and_its_status() -> None:
    assert set(get_args(Code)) <= set(ROWS)
    assert {code: row.status for code, row in ROWS.items()} == STATUS
    assert {code for code, _ in REASONS} <= set(ROWS)


def refusals_of_the_rules() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(code, reason, names of facts) of each refusal that is written out in the protocol."""
    for file in Path(anchor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("refuse", "Refused", "Wait"):
                words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if len(words) > 1 and words[0] in CODES and isinstance(words[1], str):
                    yield words[0], words[1], tuple(keyword.arg or "" for keyword in node.keywords)


RULES = sorted(set(refusals_of_the_rules()))


def test_the_rules_were_found() -> None:
    assert len(RULES) > 25


@pytest.mark.parametrize(("code", "reason", "names"), RULES)
def test_every_refusal_of_the_rules_reads_well(code: str, reason: str, names: tuple[str, ...]) -> None:
    told = problem(code, reason, {"problem": "<problem>", **{name: f"<{name}>" for name in names}})
    for text in (told.title, told.detail, told.kept, told.next):
        assert text and "{" not in text
    if names and code not in ("step_in_flight", "step_pending", "run_frozen"):
        assert "unknown" not in told.detail, told.detail


@pytest.mark.parametrize("code", sorted(get_args(Code)))
def test_a_refusal_survives_the_wire(code: Code) -> None:
    refused = Refused(code, "some_reason", FACTS)
    told = from_refused(refused)
    again = from_json(told.status, told.to_json())
    assert again == told
    assert to_refused(again) == refused


def test_a_stale_caller_is_told_both_epochs_and_the_holder() -> None:
    record = json.loads(from_refused(Refused("stale_epoch", "superseded", FACTS)).to_json())
    assert record["facts"] == FACTS and record["status"] == 409
    assert record["detail"] == "The call carries epoch 4; the live one is 5, held by w2."
    assert record["kept"] and record["next"] and "retry_after_ms" not in record


def test_what_can_be_asked_again_says_when() -> None:
    assert problem("step_in_flight", "in_flight").retry_after_ms == 500
    assert problem("in_doubt", "x", {"retry_after_ms": 200}).retry_after_ms == 200
    assert problem("in_doubt", "x", {"retry_after_ms": True}).retry_after_ms == 1_000


def test_facts_can_not_shape_the_sentence() -> None:
    told = problem("stale_epoch", "superseded", {"holder": "{epoch.__class__}\ud800", "epoch": 1})
    assert "{epoch.__class__}" in told.detail
    told.to_json()


@pytest.mark.parametrize("code", sorted(set(ROWS) - CODES - {"bad_token"}))
def test_codes_of_the_wire_alone_become_an_invalid_request(code: str) -> None:
    refused = to_refused(problem(code, "r"))
    assert (refused.code, refused.reason, refused.facts["code"]) == ("invalid", "r", code)


def test_a_token_that_is_not_taken_gives_no_right() -> None:
    assert to_refused(problem("bad_token", "other_run")).code == "stale_epoch"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"status":409}', b'{"code":1}', b"\xff"])
def test_what_is_no_problem_is_not_read_as_one(body: bytes) -> None:
    assert from_json(502, body) is None


def test_odd_members_of_a_problem_do_no_harm() -> None:
    told = from_json(409, b'{"code":"stale_epoch","facts":[1],"retry_after_ms":"x"}')
    assert isinstance(told, Problem) and told.facts == {} and told.retry_after_ms == 0


@pytest.mark.parametrize("prefix", [tokens.PREFIX, keyfile.PREFIX, keys.PREFIX])
def test_a_secret_where_a_name_belongs_is_not_told_back(prefix: str) -> None:
    told = problem("not_found", "run_unknown", {"run": f"{prefix}0123456789abcdef"})
    assert "0123456789" not in told.to_json().decode() and "(a secret)" in told.detail
