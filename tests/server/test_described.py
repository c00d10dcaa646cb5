"""What the server says about itself: /openapi.json, /metrics, spans, and paging through what is held."""

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from tests.server.support import OPERATOR, TOKEN, Desk, Spy, app_of, ask, real_authority, run

from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.records import Right
from tidefast.server.access import MAY
from tidefast.server.load import Load
from tidefast.server.meters import Meters
from tidefast.server.openapi import document
from tidefast.server.table import VERBS
from tidefast.stores.base import Batch, StoredEvent
from tidefast.wire import messages as m

# --- openapi ------------------------------------------------------------------------------------------------


def resolved(schema: Any, of: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "components": of["components"]}


def test_the_description_has_every_address_and_no_other() -> None:
    told = run(ask(app_of(Spy()), "GET", "/openapi.json")).json
    assert told == json.loads(json.dumps(document()))
    described = {(method.upper(), path) for path, methods in told["paths"].items() for method in methods}
    assert described == {(method, path) for path, table in VERBS.items() for method in table}
    for path, table in VERBS.items():
        for method, verb in table.items():
            operation = told["paths"][path][method.lower()]
            named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path))
            members = verb.message.__struct_fields__
            if method == "GET":
                assert {p["name"] for p in operation.get("parameters", []) if p["in"] == "query"} == set(members)
            elif members and verb.message is not m.Chat:  # what is passed on has members of its own
                schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert set(told["components"]["schemas"][schema]["properties"]) == set(members)
            security = operation.get("security", [])
            assert (security == [{"key": []}]) == (verb.guard == "operator")
            assert any("lease" in way for way in security) == MAY[verb.guard].lease
            assert "default" in operation["responses"] and operation["summary"]
    ids = [op["operationId"] for methods in told["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))


def test_every_schema_of_the_description_is_one() -> None:
    described = document()
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(resolved(schema, described))


def test_what_is_told_is_what_the_description_says() -> None:
    described = document()
    seen: set[tuple[str, str]] = set()

    async def tell(app: Any, method: str, path: str, route: str, body: Any = None, **more: Any) -> Any:
        reply = await ask(app, method, path, body, **more)
        content = described["paths"][route][method.lower()]["responses"][str(reply.status)]["content"]
        jsonschema.validate(reply.json, resolved(content["application/json"]["schema"], described))
        seen.add((method, route))
        return reply.json

    async def main() -> None:
        async with real_authority(Desk()) as (authority, _):
            app = app_of(authority)
            run_, step = "/v1/runs/{run}", "/v1/runs/{run}/steps/{step}"
            await tell(app, "POST", "/v1/runs", "/v1/runs", {"agent": "a", "input": {"x": None}, "run_id": "r1"})
            await tell(app, "POST", "/v1/runs", "/v1/runs", {"agent": "a", "input": {"x": None}, "run_id": "r1"})
            claim = {"agents": {"a": ["1"]}, "holder": "w1", "max": 2}
            (lease,) = (await tell(app, "POST", "/v1/claims", "/v1/claims", claim))["leases"]
            token = {"token": lease["token"]}
            pay = {"tool": "charge", "args": {"order": "o"}}
            await tell(app, "POST", "/v1/runs/r1/steps/pay", step, pay, **token)
            await tell(app, "POST", "/v1/runs/r1/steps/n/result", step + "/result", {"value": [1]}, **token)
            await tell(app, "POST", "/v1/runs/r1/steps/pay/compensate", step + "/compensate", {}, **token)
            await tell(
                app, "POST", "/v1/runs/r1/checkpoints", run_ + "/checkpoints", {"seq": 1, "state": None}, **token
            )
            await tell(app, "POST", "/v1/runs/r1/lease/renew", run_ + "/lease/renew", **token)
            await tell(app, "POST", "/v1/leases/renew", "/v1/leases/renew", {"tokens": [lease["token"], "x"]})
            await tell(app, "GET", "/v1/runs/r1/journal", run_ + "/journal", **token)
            for tail in ("", "/events", "/steps"):
                await tell(app, "GET", f"/v1/runs/r1{tail}", run_ + tail)
            await tell(app, "GET", "/v1/runs/r1/steps/pay", step)
            for path in ("/v1/runs", "/v1/held", "/healthz", "/readyz", "/openapi.json"):
                await tell(app, "GET", path, path)
            await tell(app, "POST", "/v1/runs/r1/preempt", run_ + "/preempt", {"note": "n"}, headers=OPERATOR)
            grant = await tell(app, "POST", "/v1/runs/r1/lease", run_ + "/lease", {"holder": "w2"})
            ended = {"asked": ["pay", "pay~undo", "n"]}
            token = {"token": grant["token"]}
            await tell(app, "POST", "/v1/runs/r1/complete", run_ + "/complete", ended, **token)

    asyncio.run(main())
    assert len(seen) >= 20


# --- metrics ------------------------------------------------------------------------------------------------


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f",{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_happened_is_counted() -> None:
    async def main() -> dict[str, float]:
        async with real_authority(Desk()) as (authority, engine):
            app = app_of(authority)
            engine.on_commit = app.state.meters.committed
            await authority.create_run("r1", "a", "1", "null")
            old = await authority.grant("r1", "w1", 15_000, "q")
            right = Right(RunId("r1"), Epoch(old.epoch), "w1")  # type: ignore[union-attr]
            await authority.apply(right, "pay", "charge", '{"order":"o"}', 5_000)
            await ask(app, "POST", "/v1/runs/r1/thaw", {}, OPERATOR)
            await ask(app, "GET", "/v1/runs", headers={"Host": "evil.example"})
            await authority.preempt("r1", "operator", "", None)
            engine.clock.advance(2_500)  # type: ignore[attr-defined]
            new = await ask(app, "POST", "/v1/runs/r1/lease", {"holder": "w2"})
            pay = {"tool": "charge", "args": {"order": "o"}}
            assert (await ask(app, "POST", "/v1/runs/r1/steps/pay", pay, token=new.json["token"])).json["replayed"]
            assert (await ask(app, "POST", "/v1/runs/r1/steps/pay", pay, token=TOKEN)).status == 409
            reply = await ask(app, "GET", "/metrics")
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            return samples(reply.raw.decode())

    told = run(main())
    expected = {
        "tidefast_admitted_total": 1,
        "tidefast_committed_total": 1,
        "tidefast_replayed_total": 1,
        "tidefast_grants_total": 2,
        "tidefast_takeovers_total": 1,
        "tidefast_rejected_total,stale_epoch": 1,
        "tidefast_rejected_total,unsupported": 1,
        "tidefast_recovery_seconds_count": 1,
        "tidefast_recovery_seconds_sum": 2.5,
        "tidefast_recovery_seconds_bucket,2.5": 1,
        "tidefast_recovery_seconds_bucket,1.0": 0,
        "tidefast_held_steps": 0,
        "tidefast_in_doubt_steps": 0,
        "tidefast_requests_total,POST,/v1/runs/{run}/lease,200": 1,
    }
    assert {name: told.get(name) for name in expected} == expected
    assert told["tidefast_commit_seconds_count"] == told["tidefast_commit_batch_events_count"] > 3


def test_steps_in_doubt_and_held_are_told_with_their_age() -> None:
    class Lost(Desk):
        async def charge(self, order: str, key: str) -> dict[str, str]:
            raise RuntimeError("who knows")

    async def main() -> dict[str, float]:
        async with real_authority(Lost()) as (authority, engine):
            await authority.create_run("r1", "a", "1", "null")
            granted = await authority.grant("r1", "w1", 15_000, "q")
            right = Right(RunId("r1"), Epoch(granted.epoch), "w1")  # type: ignore[union-attr]
            await authority.apply(right, "pay", "charge", '{"order":"o"}', 0)
            engine.clock.advance(90_000)  # type: ignore[attr-defined]
            return samples((await ask(app_of(authority), "GET", "/metrics")).raw.decode())

    told = run(main())
    assert told["tidefast_in_doubt_steps"] + told["tidefast_held_steps"] == 1
    assert told["tidefast_in_doubt_age_seconds"] == 90


def test_runs_whose_recovery_is_timed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidefast.server.meters.RUNS_KEPT", 2)
    meters = Meters(Load())
    for key in range(5):
        event = Event(1, 0, "lease_lapsed", Epoch(1), None, "{}")
        meters.committed(Batch(events=[StoredEvent(key, event, "")]), 0.001)
    granted = [StoredEvent(key, Event(2, 5, "lease_granted", Epoch(2), None, "{}"), "") for key in range(5)]
    meters.committed(Batch(events=granted), 0.001)
    assert meters.takeovers == 2 and meters.events["lease_lapsed"] == 5


# --- traces -------------------------------------------------------------------------------------------------


def test_spans_carry_run_step_and_epoch_and_the_callers_trace() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)

    async def main() -> Right:
        async with real_authority(Desk()) as (authority, _):
            await authority.create_run("r1", "a", "1", "null")
            app = app_of(authority)
            lease = (await ask(app, "POST", "/v1/runs/r1/lease", {"holder": "w1"})).json
            pay = {"tool": "charge", "args": {"order": "topsecret"}}
            parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            await ask(app, "POST", "/v1/runs/r1/steps/pay", pay, parent, token=lease["token"])
            await ask(app, "POST", "/v1/runs/r1/steps/pay", {"tool": "other", "args": {}}, token=lease["token"])
            return Right(RunId("r1"), Epoch(lease["epoch"]), lease["token"])

    try:
        right = run(main())
    finally:
        provider.shutdown()
    found = {span.name: span for span in spans.get_finished_spans() if "tidefast.code" not in (span.attributes or {})}
    sent, asked = found["gateway.send"], found["POST /v1/runs/{run}/steps/{step}"]
    facts = {"tidefast.run": "r1", "tidefast.step": "pay", "tidefast.epoch": right.epoch}
    assert dict(asked.attributes or {}) == facts
    assert dict(sent.attributes or {}) == {
        **facts, "tidefast.attempt": 1, "tidefast.tool": "charge", "tidefast.outcome": "applied",
    }  # fmt: skip
    assert asked.context is not None and f"{asked.context.trace_id:032x}" == "ab" * 16
    (refused,) = [span for span in spans.get_finished_spans() if "tidefast.code" in (span.attributes or {})]
    assert (refused.attributes or {})["tidefast.code"] == "step_conflict"
    whole = "".join(span.to_json() for span in spans.get_finished_spans())
    assert right.holder not in whole and "topsecret" not in whole


# --- pages --------------------------------------------------------------------------------------------------


def test_what_is_held_is_told_page_by_page() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _):
            app = app_of(authority)
            held = []
            for name in ("r3", "r1", "r2"):
                await authority.create_run(name, "a", "1", "null")
                granted = await authority.grant(name, "w1", 15_000, "q")
                right = Right(RunId(name), Epoch(granted.epoch), "w1")  # type: ignore[union-attr]
                for _ in range(2):  # the first call is lost, the second finds that nothing is safe to do
                    await authority.apply(right, "look", "forget", "{}", 0)
                held.append(f"{name}/look")
            whole = (await ask(app, "GET", "/v1/held")).json["steps"]
            assert [f"{step['run_id']}/{step['step_id']}" for step in whole] == held
            after, pages = "", []
            while page := (await ask(app, "GET", f"/v1/held?limit=2{after}")).json["steps"]:
                pages.append(len(page))
                after = f"&after={page[-1]['run_id']}/{page[-1]['step_id']}"
            assert pages == [2, 1]
            for bad in ("r1", "r1/", "/look", "r1/look/x", "r1/-"):
                reply = await ask(app, "GET", f"/v1/held?after={bad}")
                assert reply.says == (400, "invalid", "id_invalid")

    asyncio.run(main())


def test_a_page_of_events_ends_where_it_has_become_large() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _):
            await authority.create_run("r1", "a", "1", "null")
            granted = await authority.grant("r1", "w1", 15_000, "q")
            right = Right(RunId("r1"), Epoch(granted.epoch), "w1")  # type: ignore[union-attr]
            for number in range(9):
                await authority.save_result(right, f"s{number}", json.dumps("x" * 1_000_000))
            app, after, pages = app_of(authority), 0, []
            while page := (await ask(app, "GET", f"/v1/runs/r1/events?after={after}&limit=1000")).json["events"]:
                pages.append([event["seq"] for event in page])
                after = pages[-1][-1]
            assert [seq for page in pages for seq in page] == list(range(1, 12))
            assert [len(page) for page in pages] == [7, 4]
            assert len((await ask(app, "GET", "/v1/runs/r1/events?limit=3")).json["events"]) == 3

    asyncio.run(main())


def test_readiness_ends_when_the_server_begins_to() -> None:
    app = app_of(Spy())
    app.state.stopping.set()
    assert run(ask(app, "GET", "/readyz")).says == (503, "store_unavailable", "stopping")
    assert run(ask(app, "GET", "/healthz")).status == 200
