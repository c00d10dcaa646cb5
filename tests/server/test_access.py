"""Who may do what: each address of the table, with every role, no key, a wrong key, and every kind of token.

The expectations come from `EXPECTED`, which is written out here on purpose: a change of the server's own table must be
made twice. A new address is called by itself; a new guard fails until it has its row.
"""

import asyncio
import json
from typing import Any, get_args

import pytest
from tests.server.support import (
    NAMESPACE,
    OPERATOR_KEY,
    RIGHT,
    SECRET,
    STALE,
    TOKEN,
    Desk,
    Reply,
    Spy,
    app_of,
    ask,
    credentials,
    real_authority,
    run,
)

from tidefast.protocol.ids import Epoch, RunId
from tidefast.server.access import ANYONE, MAY, ROLES, Caller, Guard, KeyBook, Role, admit, key_digest
from tidefast.server.app import build_app
from tidefast.server.credentials import Signer
from tidefast.server.table import VERBS, Verb
from tidefast.wire import tokens

# guard → the roles that open it, and whether it is open on a server without a key file
EXPECTED: dict[Guard, tuple[set[Role], bool]] = {
    "public": ({"worker", "operator", "reader", "orchestrator", "replica"}, True),
    "read": ({"worker", "operator", "reader", "orchestrator"}, True),
    "watch": ({"operator", "reader"}, True),
    "start": ({"worker", "operator", "orchestrator"}, True),
    "work": ({"worker", "orchestrator"}, True),
    "lease": ({"worker"}, True),
    "operator": ({"operator"}, False),
    "replica": ({"replica"}, True),
}
KEYS: dict[Role, str] = {role: f"tfk1.{role}" for role in ROLES}
NARROW = "tfk1.narrow"  # a worker's key for runs of another name
BOOK = {
    **{key_digest(key): Caller(f"the-{role}", role) for role, key in KEYS.items()},
    key_digest(NARROW): Caller("narrow", "worker", "shop-"),
}
CALLS = [(method, path, verb) for path, table in VERBS.items() for method, verb in table.items()]
NAMES = [f"{method} {path}" for method, path, _ in CALLS]
NO_KEY = (401, "unauthenticated", "key_missing")
WRONG_KEY = (401, "unauthenticated", "key_unknown")

TOKENS: dict[str, tuple[str | None, tuple[int, str, str] | None]] = {
    "its own": (TOKEN, None),
    "none": (None, (428, "lease_required", "token_missing")),
    "another run's": (
        tokens.mint(SECRET, NAMESPACE, RIGHT._replace(run_id=RunId("r2"))),
        (401, "bad_token", "other_run"),
    ),
    "of another secret": (tokens.mint(bytes(32), NAMESPACE, RIGHT), (401, "bad_token", "bad_token")),
    "of another authority": (tokens.mint(SECRET, b"x" * 16, RIGHT), (401, "bad_token", "bad_token")),
    "of another kind": ("tfr1." + TOKEN.removeprefix("tfl1."), (401, "bad_token", "bad_token")),
    "a key": (KEYS["worker"], (401, "bad_token", "bad_token")),
    "the operator's key": (OPERATOR_KEY, (401, "bad_token", "bad_token")),
    "a JWT without a signature": ("eyJhbGciOiJub25lIn0.e30.", (401, "bad_token", "bad_token")),
}


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def call(authority: Any, method: str, path: str, key: str | None, token: str | None, *, keyed: bool = True) -> Reply:
    """One request to an address; its body is left out, which the checks of who calls must not notice."""
    app = build_app(authority, credentials(BOOK if keyed else None))
    return run(ask(app, method, path.format(run="r1", step="s1", ws="w1"), None, bearer(key), token=token))


def passed(reply: Reply, verb: Verb) -> bool:
    """Whether the checks let the request through: to the verb, or to the refusal of a body that was left out."""
    if reply.status < 300 or reply.says[1:] in {("invalid", "body_missing"), ("invalid", "field_missing")}:
        return True
    return verb.guard != "lease" and reply.says in {
        (404, "not_found", "run_unknown"),
        (404, "not_found", "step_unknown"),
        (404, "not_found", "workspace_unknown"),
    }


def test_every_guard_has_its_expectation_and_every_address_a_guard() -> None:
    assert set(EXPECTED) == set(MAY) == set(get_args(Guard))
    assert {guard: (set(access.roles), access.is_open) for guard, access in MAY.items()} == EXPECTED
    assert {guard for guard, access in MAY.items() if access.lease} == {"lease"}
    assert {guard for guard, access in MAY.items() if access.whole} == {"watch"}
    assert all(verb.guard in MAY for _, _, verb in CALLS)


@pytest.mark.parametrize(("method", "path", "verb"), CALLS, ids=NAMES)
def test_with_keys_each_role_gets_exactly_where_it_may(method: str, path: str, verb: Verb) -> None:
    roles, _ = EXPECTED[verb.guard]
    for role, key in KEYS.items():
        spy = Spy()
        reply = call(spy, method, path, key, TOKEN)
        if role in roles:
            assert passed(reply, verb), (role, reply.raw)
        else:
            assert reply.says == (403, "forbidden", "role") and spy.asked == [], role
            assert reply.json["facts"] == {"role": role, "roles": sorted(roles)}
    for key, says in ((None, NO_KEY), ("tfk1.nobody", WRONG_KEY), ("x" * 300, WRONG_KEY), (TOKEN, WRONG_KEY)):
        spy = Spy()
        reply = call(spy, method, path, key, TOKEN)
        if verb.guard == "public":
            assert passed(reply, verb)
        else:
            assert reply.says == says and spy.asked == [], key
    assert passed(call(Spy(), method, path, OPERATOR_KEY, TOKEN), verb) == ("operator" in roles)


@pytest.mark.parametrize(("method", "path", "verb"), CALLS, ids=NAMES)
def test_without_keys_only_an_operators_verbs_ask_for_one(method: str, path: str, verb: Verb) -> None:
    _, is_open = EXPECTED[verb.guard]
    for key, says in ((None, NO_KEY), ("tfk1.nobody", WRONG_KEY), (KEYS["operator"], WRONG_KEY)):
        spy = Spy()
        reply = call(spy, method, path, key, TOKEN, keyed=False)
        if is_open:
            assert passed(reply, verb), key
        else:
            assert reply.says == says and spy.asked == []
    if not is_open:
        assert passed(call(Spy(), method, path, OPERATOR_KEY, TOKEN, keyed=False), verb)


@pytest.mark.parametrize(("method", "path", "verb"), CALLS, ids=NAMES)
def test_each_kind_of_token_opens_what_it_may_and_nothing_else(method: str, path: str, verb: Verb) -> None:
    (role, *_) = sorted(EXPECTED[verb.guard][0])
    for token, says in TOKENS.values():
        for keyed in (True, False):
            spy = Spy()
            key = OPERATOR_KEY if verb.guard == "operator" else KEYS[role]
            reply = call(spy, method, path, key, token, keyed=keyed)
            names_its_run = verb.named_by_headers and says is not None and says[2] == "other_run"
            if says is None or names_its_run or not MAY[verb.guard].lease:
                assert passed(reply, verb)
            else:
                assert reply.says == says and spy.asked == []
                assert token is None or token not in reply.raw.decode()


@pytest.mark.parametrize(("method", "path", "verb"), CALLS, ids=NAMES)
def test_an_old_token_hears_that_it_is_stale_and_moves_nothing(method: str, path: str, verb: Verb) -> None:
    if not MAY[verb.guard].lease:
        return
    spy = Spy(fence=STALE)
    old = tokens.mint(SECRET, NAMESPACE, RIGHT._replace(epoch=Epoch(1)))
    reply = call(spy, method, path, KEYS["worker"], old)
    if verb.may_repeat and reply.status == 200:
        assert spy.asked[-1] != "fence"  # the rules answer it, and they know the epoch
    else:
        assert reply.says == (409, "stale_epoch", "superseded") and spy.asked == ["fence"]


# --- some runs only -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "verb"), CALLS, ids=NAMES)
def test_a_run_of_others_is_answered_like_one_that_is_not_there(method: str, path: str, verb: Verb) -> None:
    if "{run}" not in path:
        return
    spy = Spy()
    reply = call(spy, method, path, NARROW, TOKEN)
    if "worker" not in EXPECTED[verb.guard][0]:
        assert reply.says == (403, "forbidden", "role") and spy.asked == []
        return
    assert reply.says == (404, "not_found", "run_unknown") and spy.asked == []


def test_absent_and_not_yours_are_the_same_bytes() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _):
            app = build_app(authority, credentials(BOOK))
            await authority.create_run("other-1", "a", "1", "null")
            for path in ("", "/events", "/steps"):
                foreign = await ask(app, "GET", f"/v1/runs/other-1{path}", headers=bearer(NARROW))
                absent = await ask(app, "GET", f"/v1/runs/shop-99{path}", headers=bearer(NARROW))
                assert foreign.status == absent.status == 404
                assert foreign.raw == absent.raw.replace(b"shop-99", b"other-1")
            for after in ("other-1", "other-2"):
                assert (await ask(app, "GET", f"/v1/runs?after={after}", headers=bearer(NARROW))).json == {"runs": []}

    asyncio.run(main())


def test_a_key_for_some_runs_lists_claims_and_makes_those_only() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _):
            app = build_app(authority, credentials(BOOK))
            for name in ("other-1", "shop-1", "other-2", "shop-2"):
                await authority.create_run(name, "a", "1", "null")
            listed = await ask(app, "GET", "/v1/runs", headers=bearer(NARROW))
            assert [found["run_id"] for found in listed.json["runs"]] == ["shop-1", "shop-2"]
            body = {"agents": {"a": []}, "holder": "w", "max": 10, "request_id": "q"}
            for _ in range(2):  # a repeated claim hears the same leases
                claimed = await ask(app, "POST", "/v1/claims", body, bearer(NARROW))
                assert [lease["run_id"] for lease in claimed.json["leases"]] == ["shop-1", "shop-2"]
            refused = await ask(app, "POST", "/v1/runs", {"agent": "a", "input": 1, "run_id": "x"}, bearer(NARROW))
            assert refused.says == (403, "forbidden", "run_name")
            made = await ask(app, "POST", "/v1/runs", {"agent": "a", "input": 1}, bearer(NARROW))
            assert made.status == 201 and made.json["run_id"].startswith("shop-")
            foreign = await authority.grant("other-1", "w9", 15_000, "q")
            token = tokens.mint(SECRET, NAMESPACE, RIGHT._replace(run_id=RunId("other-1"), epoch=foreign.epoch))  # type: ignore[union-attr]
            renewed = await ask(app, "POST", "/v1/leases/renew", {"tokens": [token]}, bearer(NARROW))
            assert renewed.json["leases"][0]["problem"]["code"] == "bad_token"

    asyncio.run(main())


def test_what_tells_of_all_runs_needs_a_key_for_all() -> None:
    book = KeyBook(b"", {key_digest("k"): Caller("some", "reader", "shop-")})
    told = admit(book, "watch", "Bearer k")
    assert not isinstance(told, Caller) and (told.status, told.reason) == (403, "all_runs")


# --- bodies -------------------------------------------------------------------------------------------------

SECRETS = ("4242424242", "ch-o1", "topsecret", "why-so")


async def texts_of(authority: Any, caller: Caller) -> list[str]:
    app = build_app(authority, credentials({key_digest("tfk1.r"): caller}))
    paths = ("/v1/runs", "/v1/runs/r1", "/v1/runs/r1/events", "/v1/runs/r1/steps", "/v1/runs/r1/steps/pay")
    return [(await ask(app, "GET", path, headers=bearer("tfk1.r"))).raw.decode() for path in paths]


def test_a_reader_sees_digests_of_bodies_unless_its_key_says_bodies() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _):
            await authority.create_run("r1", "a", "1", json.dumps({"card": SECRETS[0]}))
            granted = await authority.grant("r1", "w1", 15_000, "q")
            right = RIGHT._replace(epoch=granted.epoch)  # type: ignore[union-attr]
            await authority.apply(right, "pay", "charge", '{"order":"o1"}', 5_000)
            await authority.save_result(right, "note", '"topsecret"')
            await authority.checkpoint(right, 1, '"topsecret"')
            await authority.preempt("r1", "operator", SECRETS[3], None)
            for bodies in (True, False):
                texts = await texts_of(authority, Caller("r", "reader", bodies=bodies))
                seen = "".join(texts)
                assert [secret in seen for secret in SECRETS] == [bodies] * len(SECRETS)
                if not bodies:
                    event = json.loads(texts[2])["events"][0]
                    assert event["data"]["agent"] == "a" and len(event["data"]["input"]["sha256"]) == 64
                    assert event["data"]["input"]["bytes"] == len('{"card":"4242424242"}')

    asyncio.run(main())


def test_what_the_log_names_is_the_name_of_the_key() -> None:
    spy = Spy()
    call(spy, "POST", "/v1/runs/{run}/thaw", KEYS["operator"], None)
    call(spy, "POST", "/v1/runs/{run}/thaw", OPERATOR_KEY, None)
    assert spy.calls == [
        ("oversee", "thaw", "r1", "the-operator", "", None),
        ("oversee", "thaw", "r1", "operator", "", None),
    ]


def test_no_key_and_no_digest_shows_in_the_text_of_what_holds_them() -> None:
    held = credentials(BOOK)
    for text in (repr(held), repr(held.book), repr(held.signer)):
        assert SECRET.hex() not in text and repr(SECRET) not in text and "narrow" not in text


# --- rotation -----------------------------------------------------------------------------------------------


def test_the_newest_secret_signs_and_all_verify() -> None:
    old, both, new = (Signer(s, NAMESPACE) for s in ((b"1" * 32,), (b"1" * 32, b"2" * 32), (b"2" * 32,)))
    before, after = old.mint(RIGHT), both.mint(RIGHT)
    assert both.verify(before) == both.verify(after) == new.verify(after) == RIGHT
    assert new.verify(before) is None and old.verify(after) is None


def test_fresh_credentials_are_in_force_from_the_next_request_on() -> None:
    held = credentials(BOOK)
    app = build_app(Spy(), held)
    renew = "/v1/runs/r1/lease/renew"
    assert run(ask(app, "POST", renew, headers=bearer(KEYS["worker"]), token=TOKEN)).status == 200
    fresh = credentials({key_digest("tfk1.new"): Caller("new", "worker")})
    fresh.signer = Signer((SECRET, b"2" * 32), NAMESPACE)
    held.replace(fresh)
    assert run(ask(app, "POST", renew, headers=bearer(KEYS["worker"]), token=TOKEN)).says == WRONG_KEY
    assert run(ask(app, "POST", renew, headers=bearer("tfk1.new"), token=TOKEN)).status == 200


def test_without_a_key_file_nobody_is_somebody() -> None:
    assert admit(KeyBook(b""), "read", "Bearer anything") is ANYONE
    assert run(ask(app_of(Spy()), "GET", "/v1/runs", headers=bearer("anything"))).status == 200
