"""Planted secrets are found nowhere: answers, logs, events, metrics, errors, the store, a child's environment.

The secrets are providers' credentials, callers' keys, the operator's key, lease tokens, and the key that signs them;
the provider says back everything that it hears. A server that logs its requests is found out by the same hunt.
"""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.cli.processes import COMMAND
from tests.secrets.hunt import MIB, Hunt, canary, forms
from tests.services.test_http_sender import Provider, answer, call, saying

from tidefast.protocol.contracts import Credential
from tidefast.services.http_sender import masked

OUTPUT_LEAST = 50 * MIB
SERVE = ("serve", "--app", "app:app", "--tools", "tools.toml", "--keys", "keys.toml", "--port", "0")
# A server that logs what it is asked, as somebody would while looking for a fault.
LOGGING = """
import sys
from tidefast.server import door
honest = door.Door.__call__
async def logging(self, scope, receive, send):
    print(scope.get("path"), scope.get("headers"), file=sys.stderr, flush=True)
    await honest(self, scope, receive, send)
door.Door.__call__ = logging
from tidefast.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
# One that leaves credentials in the receipts that echo them, and hands them to the tools' process.
TRUSTING = """
import sys
from tidefast.services import http_sender
http_sender.masked = lambda body, credential: body
from tidefast.cli import wiring
wiring.credential_variables = lambda file: frozenset()
from tidefast.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def play(hunt: Hunt, volume: int) -> None:
    """Runs of every fate, every kind of error with secrets where they don't belong, and everything read back."""
    with hunt.running():
        for run, agent in (("r-1", "desk"), ("r-shout", "desk"), ("r-breaks", "breaks")):
            order = "shout" if run == "r-shout" else "o"
            hunt.ask("POST", "/v1/runs", {"run_id": run, "agent": agent, "input": {"order": order}})
        token = hunt.lease("r-mine")
        mine = {"tool": "post", "args": {"order": "mine"}}
        hunt.ask("POST", "/v1/runs/r-mine/steps/post", mine, token=token)
        hunt.ask("POST", "/v1/runs/r-mine/steps/post", {**mine, "args": {"order": "other"}}, token=token)
        letter = {"tool": "letter", "args": {"to": "a@b.example", "subject": "x", "text": "x"}, "wait_ms": 0}
        hunt.ask("POST", "/v1/runs/r-mine/steps/letter", letter, token=token)
        hunt.ask("POST", "/v1/runs/r-mine/steps/none", {"tool": "none", "args": {}}, token=token)
        misplace(hunt, token)
        hunt.ask("POST", "/v1/runs/r-mine/lease/release", {}, token=token)
        hunt.ask("POST", "/v1/runs/r-mine/checkpoints", {"seq": 9, "state": 1}, token=token)
        for run in ("r-1", "r-shout"):
            hunt.wait(run)
        look(hunt)
        fill(hunt, volume)


def misplace(hunt: Hunt, token: str) -> None:
    """Secrets as callers misplace them: in addresses, queries, other headers, cut and altered."""
    keys = [hunt.secrets[name] for name in ("worker_key", "operator_key", "reader_key")]
    for secret in (token, *keys, "tfo1." + hunt.secrets["operator-key"]):
        hunt.ask("GET", f"/v1/runs?key={secret}")
        hunt.ask("GET", f"/v1/runs/{secret}")
        hunt.ask("GET", f"/{secret}")
        hunt.ask("POST", "/v1/runs/r-mine/checkpoints", {"seq": 1, "state": 1}, token=secret[:-2])
        hunt.ask("POST", "/v1/runs/r-mine/checkpoints", {"seq": 1, "state": 1}, token=secret + "x")
        hunt.ask("POST", "/v1/runs/r-mine/thaw", {}, key=secret + "x")
        hunt.ask("POST", "/v1/leases/renew", {"tokens": [secret[:-1]]})
        hunt.ask("POST", "/v1/runs/r-mine/preempt", {secret: 1}, key="operator_key")
    hunt.ask("POST", "/v1/runs/r-mine/preempt", {"expect": {"epoch": 7}}, key="operator_key")


def look(hunt: Hunt) -> None:
    """Everything that tells of runs, over HTTP and at the terminal."""
    for run in ("r-1", "r-shout", "r-breaks", "r-mine"):
        for page in ("", "/events?limit=1000", "/steps?limit=1000", "/steps/post", "/steps/shout"):
            hunt.ask("GET", f"/v1/runs/{run}{page}", key="operator_key")
            hunt.ask("GET", f"/v1/runs/{run}{page}", key="reader_key")
        hunt.types("show", run)
        hunt.types("log", run)
    for page in ("/metrics", "/openapi.json", "/healthz", "/readyz", "/v1/runs", "/v1/held"):
        hunt.ask("GET", page, key="operator_key")
    for words in (("held",), ("runs", "--json"), ("audit",), ("doctor", "--keys", "keys.toml"), ("keys", "list")):
        hunt.types(*words, *(("--keys", "keys.toml") if words == ("keys", "list") else ()))


def fill(hunt: Hunt, volume: int) -> None:
    """The same again, with bodies as large as they may be, until there is as much output as was wanted."""
    number = 0
    while hunt.size < volume:
        run, token = f"r-big-{number}", ""
        hunt.ask("POST", "/v1/runs", {"run_id": run, "agent": "other", "input": {"order": "x" * 900_000}})
        token = hunt.lease(run + "-leased")
        hunt.ask(
            "POST", f"/v1/runs/{run}-leased/steps/post", {"tool": "post", "args": {"order": "y" * 90_000}}, token=token
        )
        misplace(hunt, token)
        for page in (run, f"{run}/events", f"{run}-leased/events", f"{run}-leased/steps/post"):
            for _ in range(3):
                hunt.ask("GET", f"/v1/runs/{page}", key="operator_key")
        number += 1


def hunted(tmp_path: Path, volume: int, code: str = "") -> Hunt:
    serve = (sys.executable, "-c", code) if code else COMMAND
    hunt = Hunt(tmp_path, (*serve, *SERVE), COMMAND)
    play(hunt, volume)
    return hunt


@pytest.mark.rig
def test_no_secret_is_in_fifty_mebibytes_of_output(tmp_path: Path) -> None:
    hunt = hunted(tmp_path, OUTPUT_LEAST)
    assert not hunt.hits()
    assert hunt.size >= OUTPUT_LEAST and len(hunt.secrets) > 10
    assert hunt.children, "the tools' process was looked at"
    assert any(hunt.secrets["post"] in heard.values() for heard in hunt.heard), "the provider itself got its credential"
    assert not [heard for heard in hunt.heard if "Tidefast-Lease" in heard]
    print(f"\n{hunt.size / MIB:.1f} MiB in {len(hunt.output)} outputs, {len(hunt.secrets)} secrets")


@pytest.mark.rig
def test_a_server_that_logs_its_requests_is_found_out(tmp_path: Path) -> None:
    hits = hunted(tmp_path, MIB, LOGGING).hits()
    assert any("token" in hit and "serve.log" in hit for hit in hits)
    assert any("key" in hit and "serve.log" in hit for hit in hits)


@pytest.mark.rig
def test_a_gateway_that_trusts_providers_and_children_is_found_out(tmp_path: Path) -> None:
    hits = hunted(tmp_path, MIB, TRUSTING).hits()
    assert any(hit.startswith("post in GET") for hit in hits)
    assert any(hit.startswith("post in store.db") for hit in hits)
    assert "post in the environment of a child" in hits


@pytest.mark.parametrize("around", ["", "x", "xy", "xyz"])
def test_a_secret_is_found_in_every_spelling(around: str) -> None:
    import base64
    import urllib.parse

    secret = canary("s")
    said = around + secret + around
    for spelled in (
        said.encode(),
        base64.b64encode(said.encode()),
        base64.urlsafe_b64encode(said.encode()),
        urllib.parse.quote(said, safe="").encode(),
        json.dumps({"a": said}).encode(),
        json.dumps(json.dumps({"a": said})).encode(),
        said.encode().hex().encode(),
    ):
        assert any(form in spelled for form in forms(secret)), spelled
    assert not any(form in canary("s").encode() for form in forms(secret))


@pytest.mark.parametrize("said", ["{}", "wrong key {}", '{{"key": {}}}'])
def test_a_credential_that_a_provider_says_back_is_not_kept(said: str) -> None:
    for secret in ("Bearer " + canary("s"), canary("s")):
        for spelled in (secret, json.dumps(secret)):
            kept = masked(said.format(spelled).encode(), secret)
            assert not any(form in kept for form in forms(secret) | forms(secret.rpartition(" ")[2]))
    assert masked(b'{"a":"Basic x"}', "Basic x") == b'{"a":"Basic x"}', "what is no secret is left"


def test_what_a_caller_sends_for_itself_never_reaches_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes out is made of contract, arguments and key: there is no place for a caller's headers in it."""
    monkeypatch.setenv("CHARGE_TOKEN", "Bearer ours")

    async def run() -> bytes:
        async with Provider(saying(answer(201))) as provider:
            await call(provider.contract(credential=Credential("Authorization", "CHARGE_TOKEN")))
            return provider.heard[0]

    names = {line.partition(b":")[0].lower() for line in asyncio.run(run()).split(b"\r\n")[1:] if line}
    known = {b"host", b"accept", b"accept-encoding", b"user-agent", b"content-type", b"content-length"}
    assert names <= known | {b"authorization", b"idempotency-key", b"tidefast-epoch", b"tidefast-step"}
