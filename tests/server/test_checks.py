"""Each address and the order of its checks; what is refused never reaches the authority."""

import json
from typing import Any

import pytest
from tests.server.support import (
    NAMESPACE,
    OPERATOR,
    RIGHT,
    SECRET,
    STALE,
    TOKEN,
    Reply,
    Spy,
    app_of,
    ask,
    run,
)

from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.verdicts import Refused
from tidefast.server.door import is_loopback
from tidefast.server.table import VERBS
from tidefast.stores.base import StoreUnavailable
from tidefast.wire import tokens

R = "/v1/runs/r1"
S = R + "/steps/s1"
OTHER = tokens.mint(SECRET, NAMESPACE, RIGHT._replace(run_id=RunId("r2")))
FORGED = tokens.mint(bytes(32), NAMESPACE, RIGHT)

# method, address, a good body, what the authority is asked, status
LEASED: list[tuple[str, str, Any, str]] = [
    ("POST", S, {"tool": "t", "args": {}}, "apply"),
    ("POST", S + "/result", {"value": 1}, "save_result"),
    ("POST", S + "/compensate", None, "compensate"),
    ("POST", R + "/lease/renew", None, "renew"),
    ("POST", R + "/lease/release", {"reason": "done"}, "release"),
    ("POST", R + "/checkpoints", {"seq": 1, "state": {}}, "checkpoint"),
    ("POST", R + "/complete", {"result": 1}, "complete"),
    ("POST", R + "/fail", {"error": "e"}, "fail"),
    ("GET", R + "/journal?after=0", None, "journal"),
]
OPEN: list[tuple[str, str, Any, str, int]] = [
    ("POST", "/v1/runs", {"agent": "a", "input": 1}, "create_run", 201),
    ("GET", "/v1/runs?limit=2", None, "runs", 200),
    ("GET", R, None, "run", 404),
    ("GET", R + "/events?after=3", None, "events", 200),
    ("GET", R + "/steps", None, "steps", 200),
    ("GET", S, None, "step", 404),
    ("POST", "/v1/claims", {"agents": {"a": ["1"]}, "holder": "w"}, "claim", 200),
    ("POST", R + "/lease", {"holder": "w"}, "grant", 200),
    ("POST", "/v1/leases/renew", {"tokens": [TOKEN]}, "renew", 200),
    ("GET", "/v1/held", None, "held", 200),
    ("GET", "/v1/workspaces", None, "list_workspaces", 200),
    ("GET", "/v1/workspaces/w1", None, "workspace", 404),
    ("GET", "/v1/workspaces/w1/log?after=2", None, "workspace_log", 200),
    ("GET", "/v1/workspaces/w1/files?index=2", None, "workspace_entries", 200),
    ("GET", "/v1/workspaces/w1/diff?since=1", None, "workspace_diff", 200),
    ("POST", "/v1/workspaces/w1/read", {"verb": "stat", "args": {}}, "read_workspace", 200),
    ("GET", "/v1/budgets?limit=2", None, "budgets", 200),
    ("GET", "/readyz", None, "runs", 200),
    ("GET", "/metrics", None, "troubles", 200),
]
OPERATORS: list[tuple[str, str, Any, str]] = [
    ("POST", R + "/preempt", {"note": "n", "expect": {"epoch": 5}}, "oversee"),
    ("POST", R + "/thaw", None, "oversee"),
    ("POST", R + "/pause", {"note": "n"}, "oversee"),
    ("POST", R + "/resume", None, "oversee"),
    ("POST", R + "/freeze", None, "oversee"),
    ("POST", R + "/cancel", {"expect": {"epoch": 0}}, "oversee"),
    ("POST", S + "/resolve", {"verdict": "applied", "note": "n"}, "resolve"),
    ("POST", "/v1/budgets", {"name": "run/r1", "calls": 5}, "raise_budget"),
]
MAY_REPEAT = {"release", "complete", "fail"}


def test_the_tables_name_every_address() -> None:
    count = sum(len(table) for table in VERBS.values())
    assert count == len(LEASED) + len(OPEN) + len(OPERATORS) + 3  # and healthz, openapi.json and the models'


@pytest.mark.parametrize(("method", "path", "body", "verb"), LEASED)
def test_an_address_with_a_lease_asks_its_verb(method: str, path: str, body: Any, verb: str) -> None:
    spy = Spy()
    reply = run(ask(app_of(spy), method, path, body, token=TOKEN))
    assert (reply.status, spy.asked) == (200, ["fence", verb])
    assert spy.calls[0] == ("fence", RIGHT)
    assert reply.headers["content-type"] == "application/json" and reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(("method", "path", "body", "verb", "status"), OPEN)
def test_an_open_address_asks_its_verb(method: str, path: str, body: Any, verb: str, status: int) -> None:
    spy = Spy()
    assert run(ask(app_of(spy), method, path, body)).status == status
    assert spy.asked == [verb]


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (None, (428, "lease_required", "token_missing")),
        ("", (428, "lease_required", "token_missing")),
        ("tfl1.AAAA", (401, "bad_token", "bad_token")),
        ("eyJhbGciOiJub25lIn0.e30.", (401, "bad_token", "bad_token")),
        (FORGED, (401, "bad_token", "bad_token")),
        (TOKEN[:-1] + ("A" if TOKEN[-1] != "A" else "B"), (401, "bad_token", "bad_token")),
        (OTHER, (401, "bad_token", "other_run")),
    ],
)
@pytest.mark.parametrize(("method", "path", "body", "verb"), LEASED)
def test_without_a_good_token_nothing_is_asked(
    method: str, path: str, body: Any, verb: str, token: str | None, says: tuple[int, str, str]
) -> None:
    for sent in (body, b"\xff"):
        spy = Spy(fence=STALE)
        reply = run(ask(app_of(spy), method, path, sent, token=token))
        assert reply.says == says and spy.asked == []
        assert token in (None, "") or token not in reply.raw.decode()


def test_a_flipped_bit_and_another_secret_sound_the_same() -> None:
    flipped = run(ask(app_of(Spy()), "POST", S, token=TOKEN[:-2] + "zz"))
    forged = run(ask(app_of(Spy()), "POST", S, token=FORGED))
    assert flipped.raw == forged.raw


@pytest.mark.parametrize("body", [None, b"", b"\xff\xfe{}", b"[" * 100_000, b'{"epcoh":1}', b"x" * 2_000])
@pytest.mark.parametrize(("method", "path", "good", "verb"), LEASED)
def test_a_stale_caller_with_a_broken_body_hears_that_it_is_stale(
    method: str, path: str, good: Any, verb: str, body: bytes | None
) -> None:
    spy = Spy(fence=STALE)
    sent = None if method == "GET" else body
    reply = run(ask(app_of(spy), method, path.replace("after=0", "after=x"), sent, token=TOKEN))
    whole = verb in MAY_REPEAT and not body and verb != "fail"  # an empty body is a whole release or complete
    assert reply.status == 200 if whole else reply.says == (409, "stale_epoch", "superseded")
    assert spy.asked == (["fence", verb] if whole else ["fence"])


def test_a_stale_caller_is_refused_before_its_body_is_read() -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was looked at")

    for method, path, _, verb in LEASED:
        if verb not in MAY_REPEAT:
            reply = run(ask(app_of(Spy(fence=STALE)), method, path, b"{", token=TOKEN, receive=receive))
            assert reply.says == (409, "stale_epoch", "superseded")
            assert reply.json["facts"] == {"epoch": 1, "live_epoch": 2, "holder": "w2", "ended_at_ms": 9}


@pytest.mark.parametrize(("method", "path", "body", "verb"), [row for row in LEASED if row[3] in MAY_REPEAT])
def test_a_verb_that_ended_its_epoch_is_judged_by_the_rules(method: str, path: str, body: Any, verb: str) -> None:
    spy = Spy(fence=STALE)
    assert run(ask(app_of(spy), method, path, body, token=TOKEN)).status == 200
    assert spy.asked == ["fence", verb]


def test_a_live_caller_with_a_broken_body_hears_about_the_body() -> None:
    spy = Spy()
    reply = run(ask(app_of(spy), "POST", S, b'{"tool":"t","args":{},"epcoh":1}', token=TOKEN))
    assert reply.says == (400, "invalid", "field_unknown") and spy.asked == ["fence"]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, (401, "unauthenticated", "key_missing")),
        ({"Authorization": "Bearer "}, (401, "unauthenticated", "key_unknown")),
        ({"Authorization": "Bearer tfo1." + "00" * 32}, (401, "unauthenticated", "key_unknown")),
        ({"Authorization": OPERATOR["Authorization"] + "x"}, (401, "unauthenticated", "key_unknown")),
        (
            {"Authorization": OPERATOR["Authorization"].replace("Bearer", "Basic")},
            (401, "unauthenticated", "key_unknown"),
        ),
        ({"Authorization": "Bearer " + "x" * 5000}, (401, "unauthenticated", "key_unknown")),
        ({"Tidefast-Lease": TOKEN}, (401, "unauthenticated", "key_missing")),
    ],
)
@pytest.mark.parametrize(("method", "path", "body", "verb"), OPERATORS)
def test_operator_verbs_need_the_operators_key(
    method: str, path: str, body: Any, verb: str, headers: dict[str, str], says: tuple[int, str, str]
) -> None:
    for sent in (body, b"\xff"):
        spy = Spy()
        reply = run(ask(app_of(spy), method, path, sent, headers))
        assert reply.says == says and spy.asked == [] and reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path", "body", "verb"), OPERATORS)
def test_with_the_key_the_operators_verb_is_asked(method: str, path: str, body: Any, verb: str) -> None:
    spy = Spy()
    assert run(ask(app_of(spy), method, path, body, OPERATOR)).status == 200
    assert spy.asked == [verb] and "operator" in spy.calls[0]


def test_expectations_of_an_operator_are_handed_on() -> None:
    spy = Spy()
    run(ask(app_of(spy), "POST", R + "/preempt", {"expect": {"epoch": 5}, "note": "why"}, OPERATOR))
    body = {
        "verdict": "refused",
        "note": "n",
        "receipt": {"b": 1, "a": 2},
        "looked_at_ms": 3,
        "expect": {"attempts": 4, "epoch": 2},
    }
    run(ask(app_of(spy), "POST", S + "~undo/resolve", body, OPERATOR))
    assert spy.calls == [
        ("oversee", "preempt", "r1", "operator", "why", 5),
        ("resolve", "r1", "s1~undo", "refused", "operator", "n", '{"a":2,"b":1}', 3, 4, 2),
    ]


FOREIGN = [
    ({"Host": "evil.example"}, (421, "unsupported", "host_not_allowed")),
    ({"Host": "127.0.0.1.evil.example"}, (421, "unsupported", "host_not_allowed")),
    ({"Host": ""}, (421, "unsupported", "host_not_allowed")),
    ({"Host": "[::1"}, (421, "unsupported", "host_not_allowed")),
    ({"Host": "10.0.0.1:7411"}, (421, "unsupported", "host_not_allowed")),
    ({"Origin": "https://evil.example"}, (403, "forbidden", "cross_origin")),
    ({"Origin": "http://localhost:3000"}, (403, "forbidden", "cross_origin")),
    ({"Origin": "null"}, (403, "forbidden", "cross_origin")),
    ({"Sec-Fetch-Site": "cross-site"}, (403, "forbidden", "cross_origin")),
    ({"Sec-Fetch-Site": "same-site"}, (403, "forbidden", "cross_origin")),
]


@pytest.mark.parametrize(("headers", "says"), FOREIGN)
def test_foreign_hosts_and_origins_get_nowhere(headers: dict[str, str], says: tuple[int, str, str]) -> None:
    everything = [row[:3] for row in (*LEASED, *OPEN, *OPERATORS)] + [
        ("GET", "/healthz", None),
        ("GET", "/nowhere", None),
    ]
    for method, path, body in everything:
        spy = Spy()
        reply = run(ask(app_of(spy), method, path, body, {**OPERATOR, **headers}, token=TOKEN))
        assert reply.says == says and spy.asked == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost"},
        {"Host": "LOCALHOST:7411"},
        {"Host": "127.8.8.8:1"},
        {"Host": "[::1]:7411"},
        {"Origin": "http://127.0.0.1:7411", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_this_machines_names_are_let_in(headers: dict[str, str]) -> None:
    assert run(ask(app_of(Spy()), "GET", "/healthz", headers=headers)).json == {"status": "ok"}


@pytest.mark.parametrize("host", ["::ffff:10.0.0.1", "0.0.0.0", "::", "localhost.evil", "2130706433", ""])
def test_what_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


ODD: list[tuple[str, str, bytes, dict[str, str], tuple[int, str, str]]] = [
    ("POST", "/v1/runs", b"{}", {"Content-Type": "text/plain"}, (415, "unsupported", "media_type")),
    ("POST", "/v1/runs", b"{}", {"Content-Type": ""}, (415, "unsupported", "media_type")),
    ("POST", "/v1/runs", b"{}", {"Content-Type": "application/json;charset=x"}, (415, "unsupported", "media_type")),
    ("POST", "/v1/runs", b"{}", {"Content-Encoding": "gzip"}, (415, "unsupported", "content_encoding")),
    ("POST", "/v1/runs", b"{}", {"Content-Length": "-1"}, (400, "invalid", "framing_ambiguous")),
    ("POST", "/v1/runs", b"{}", {"Content-Length": "9" * 5000}, (413, "too_large", "body_too_large")),
    ("POST", "/v1/runs", b"{}", {"Transfer-Encoding": "gzip, chunked"}, (400, "invalid", "framing_ambiguous")),
    ("POST", "/v1/runs", b"", {}, (400, "invalid", "body_missing")),
    ("POST", "/v1/runs?x=1", b"{}", {}, (400, "invalid", "query_invalid")),
    ("GET", "/v1/runs?limit=0", b"", {}, (400, "invalid", "field_range")),
    ("GET", "/v1/runs?a=1&a=2&" + "b=1&" * 20, b"", {}, (400, "invalid", "query_invalid")),
    ("GET", R + "?x=1", b"", {}, (400, "invalid", "field_unknown")),
    ("GET", "/v1/runs/.hidden", b"", {}, (400, "invalid", "id_invalid")),
    ("GET", "/v1/runs/a b", b"", {}, (400, "invalid", "id_invalid")),
    ("GET", "/v1/runs/" + "x" * 129, b"", {}, (400, "invalid", "id_invalid")),
    ("POST", "/v1/runs/-x/lease", b'{"holder":"w"}', {}, (400, "invalid", "id_invalid")),
    ("GET", "/v1/runs/..", b"", {}, (400, "invalid", "id_invalid")),
    ("GET", "/", b"", {}, (404, "not_found", "route_unknown")),
    ("GET", "/v2/runs", b"", {}, (404, "not_found", "route_unknown")),
    ("GET", "/v1/runs/", b"", {}, (404, "not_found", "route_unknown")),
    ("GET", "//authority/v1/../admin", b"", {}, (404, "not_found", "route_unknown")),
    ("GET", "/v1/runs/%2e%2e/held", b"", {}, (404, "not_found", "route_unknown")),
    ("GET", "/v1//runs", b"", {}, (404, "not_found", "route_unknown")),
    ("GET", "/v1/nothing", b"", {}, (404, "not_found", "route_unknown")),
    ("POST", R + "/retire", b"{}", {}, (404, "not_found", "route_unknown")),
    *(
        (method, "/v1/runs", b"", {}, (405, "unsupported", "method_not_allowed"))
        for method in ("PUT", "DELETE", "PATCH", "TRACE", "HEAD", "OPTIONS")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "headers", "says"), ODD)
def test_odd_requests_are_refused_and_nothing_is_asked(
    method: str, path: str, body: bytes, headers: dict[str, str], says: tuple[int, str, str]
) -> None:
    spy = Spy()
    reply = run(ask(app_of(spy), method, path, body, headers))
    assert reply.says == says and spy.asked == []
    assert reply.headers["content-type"] == "application/problem+json"
    if reply.status == 405:
        assert reply.headers["allow"] == "GET, POST"
    if says[2] == "route_unknown":
        assert "v1" in reply.json["next"]


def test_a_header_that_overrides_the_method_is_ignored() -> None:
    spy = Spy()
    run(ask(app_of(spy), "GET", "/v1/held", headers={"X-HTTP-Method-Override": "DELETE"}))
    assert spy.asked == ["held"]


APPLY: list[tuple[dict[str, Any], str]] = [
    ({}, "field_missing"),
    ({"tool": "t"}, "field_missing"),
    ({"args": {}}, "field_missing"),
    ({"tool": "t", "args": {}, "stored": True}, "field_missing"),
    ({"stored": False}, "field_missing"),
]


@pytest.mark.parametrize(("body", "reason"), APPLY)
def test_an_apply_is_either_a_call_or_the_stored_one(body: dict[str, Any], reason: str) -> None:
    spy = Spy()
    reply = run(ask(app_of(spy), "POST", S, body, token=TOKEN))
    assert reply.says == (400, "invalid", reason) and spy.asked == ["fence"]


def test_a_caller_can_name_a_derived_step_but_not_mint_one() -> None:
    spy = Spy()
    app = app_of(spy)
    minted = run(ask(app, "POST", S + "~undo", {"tool": "t", "args": {}}, token=TOKEN))
    saved = run(ask(app, "POST", S + "~undo/result", {"value": 1}, token=TOKEN))
    assert minted.says == saved.says == (400, "invalid", "id_invalid")
    run(ask(app, "POST", S + "~undo", {"stored": True}, token=TOKEN))
    assert spy.calls[-1] == ("apply", RIGHT, "s1~undo", "", None, 30_000)


def framed(size: int) -> bytes:
    return b'{"value":"' + b"x" * (size - 12) + b'"}'


@pytest.mark.parametrize(("size", "status"), [(1024 * 1024 - 1, 200), (1024 * 1024, 200), (1024 * 1024 + 1, 413)])
def test_the_size_limit_with_a_length_and_in_chunks(size: int, status: int) -> None:
    body = framed(size)
    pieces = [body[start : start + 65_536] for start in range(0, size, 65_536)]
    for reply in (
        run(ask(app_of(Spy()), "POST", S + "/result", body, token=TOKEN)),
        run(ask(app_of(Spy()), "POST", S + "/result", token=TOKEN, chunks=pieces)),
    ):
        assert reply.status == status
        if status == 413:
            assert reply.says == (413, "too_large", "body_too_large")


def test_a_length_over_the_limit_is_refused_before_anything_is_read_or_asked() -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    spy = Spy()
    headers = {"Content-Length": str(1024 * 1024 + 1), "Expect": "100-continue"}
    reply = run(ask(app_of(spy), "POST", S, b"{", headers, token=TOKEN, receive=receive))
    assert reply.says == (413, "too_large", "body_too_large") and spy.asked == []
    assert reply.headers["connection"] == "close"


def test_a_body_without_end_is_read_to_the_limit_only() -> None:
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 65_536
        return {"type": "http.request", "body": b" " * 65_536, "more_body": True}

    reply = run(ask(app_of(Spy()), "POST", S, token=TOKEN, chunks=[], receive=receive))
    assert reply.says == (413, "too_large", "body_too_large") and read <= 1024 * 1024 + 65_536


def test_a_caller_that_hangs_up_within_its_body_asks_nothing() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    spy = Spy()
    run(ask(app_of(spy), "POST", S, b"{}", token=TOKEN, receive=receive))
    assert spy.asked == ["fence"]


@pytest.mark.parametrize("name", ["Authorization", "Tidefast-Lease", "Host", "Content-Type"])
def test_a_header_that_stands_twice_is_refused(name: str) -> None:
    spy = Spy()
    twice = {name.lower(): "localhost", name.upper(): "localhost", "Host": "localhost"}
    reply = run(ask(app_of(spy), "POST", S, {}, twice))
    assert reply.says == (400, "invalid", "header_repeated") and spy.asked == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (StoreUnavailable("disk at /secret/place"), (503, "store_unavailable", "store")),
        (RuntimeError("token tfl1.x and body"), (500, "internal", "error")),
    ],
)
def test_an_error_is_told_without_its_inside_and_logged_without_it(
    error: Exception, says: tuple[int, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    reply = run(ask(app_of(Spy(error=error)), "POST", S, {"tool": "t", "args": {"pan": "4242"}}, token=TOKEN))
    assert reply.says == says and reply.json["retry_after_ms"] == 1_000 and reply.headers["retry-after"] == "1"
    logged = capsys.readouterr().out
    assert "r1" in logged and "s1" in logged and str(RIGHT.epoch) in logged and type(error).__name__ in logged
    for secret in (str(error), TOKEN, "4242", "secret/place", "Traceback"):
        assert secret not in reply.raw.decode() and secret not in logged


def test_readiness_is_the_stores() -> None:
    reply = run(ask(app_of(Spy(error=StoreUnavailable("gone"))), "GET", "/readyz"))
    assert reply.says == (503, "store_unavailable", "not_ready")
    assert run(ask(app_of(Spy(error=StoreUnavailable("gone"))), "GET", "/healthz")).status == 200


def test_grants_come_with_a_token_that_works() -> None:
    spy = Spy()
    granted: Reply = run(ask(app_of(spy), "POST", R + "/lease", {"holder": "w1", "request_id": "q"}))
    assert granted.json["token"] == TOKEN and granted.json["input"] == {"x": 1} and granted.json["epoch"] == RIGHT.epoch
    assert spy.calls == [("grant", "r1", "w1", 15_000, "q")]
    claimed = run(ask(app_of(spy), "POST", "/v1/claims", {"agents": {"a": ["1"]}, "holder": "w1"}))
    assert [lease["token"] for lease in claimed.json["leases"]] == [TOKEN]


def test_an_apply_answers_with_the_names_of_the_protocol() -> None:
    reply = run(ask(app_of(Spy()), "POST", S, {"tool": "t", "args": {}}, token=TOKEN))
    assert reply.json == {
        "run_id": "r1", "step_id": "s1", "state": "committed", "epoch": RIGHT.epoch, "key": "0" * 32,
        "replayed": False, "receipt": {"body": 1}, "undo": None,
    }  # fmt: skip


def test_many_renewals_answer_one_by_one() -> None:
    spy = Spy()
    reply = run(ask(app_of(spy), "POST", "/v1/leases/renew", {"tokens": [FORGED, TOKEN]}))
    bad, good = reply.json["leases"]
    assert (bad["problem"]["status"], bad["problem"]["code"]) == (401, "bad_token") and good == {"expires_at_ms": 99}
    assert spy.calls == [("renew", [RIGHT])]


def test_a_refusal_of_the_rules_is_a_problem() -> None:
    class Refusing(Spy):
        async def checkpoint(self, *args: Any) -> Refused:
            return Refused("checkpoint_stale", "number", {"number": 1, "stored": 4})

    reply = run(ask(app_of(Refusing()), "POST", R + "/checkpoints", {"seq": 1, "state": 1}, token=TOKEN))
    assert reply.says == (409, "checkpoint_stale", "number") and reply.json["facts"]["stored"] == 4
    assert json.loads(reply.raw)["type"] == "urn:tidefast:problem:checkpoint_stale"


def test_the_epoch_is_the_tokens_and_no_other() -> None:
    spy = Spy()
    older = tokens.mint(SECRET, NAMESPACE, RIGHT._replace(epoch=Epoch(1)))
    run(ask(app_of(spy), "POST", R + "/lease/renew", headers={"Tidefast-Epoch": "99"}, token=older))
    assert spy.calls[0] == ("fence", RIGHT._replace(epoch=Epoch(1)))
