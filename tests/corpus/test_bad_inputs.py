"""Every bad input gets its exact error within a second, changes nothing, tells no secret, and the server stays up."""

import ast
import base64
import json
import os
import re
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import ENVIRONMENT, running

from tidefast.cli.main import main
from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.records import Right
from tidefast.wire import tokens

ROOT = Path(__file__).resolve().parents[2]
CORPUS = tomllib.loads((Path(__file__).parent / "bad_inputs.toml").read_text(encoding="utf-8"))
ROWS = 98
TRIES = 3  # a busy machine may be slow to answer once; a server that is slow is so each time
APP = """
import asyncio

import tidefast as tf

app = tf.App()


def count(line: str) -> None:
    with open("done", "a") as file:
        file.write(line + "\\n")


@app.tool(key_ttl="1h", undo={"tool": "refund", "args": {"order": "{args.order}"}})
def charge(order: str, key: str) -> str:
    count("charge " + order)
    return order


@app.tool(key_ttl="1h")
def refund(order: str, key: str) -> str:
    count("refund " + order)
    return order


@app.tool(timeout="10m")
async def mail(to: str) -> str:
    raise RuntimeError("who knows")


@app.tool(timeout="10m")
async def hang() -> None:
    await asyncio.sleep(600)
"""
TOOLS = """
[tools.post]
kind = "http"
url = "http://127.0.0.1:9/orders"
args = { type = "object", additionalProperties = false, properties = { order = { type = "string" } } }
credential = { header = "Authorization", env = "POST_AUTH" }

[tools.letter]
kind = "smtp"
url = "smtp://127.0.0.1:9"
from = "desk@shop.example"
tls = "none"
"""
CANARY = "canary-of-a-provider-key"


class Server:
    """A running server with runs in every state that the corpus needs, and the tokens and keys to them."""

    def __init__(self, url: str, home: Path) -> None:
        self.port, self.home = int(url.rsplit(":", 1)[1]), home
        self.key = "tfo1." + (home / ".tidefast/store.db.operator-key").read_text().strip()
        self.keys = {"operator": self.key, "wrong": "tfo1." + "ab" * 32}
        self.tokens: dict[str, str] = {}
        self.secrets = [self.key, CANARY, (home / ".tidefast/store.db.secret").read_text().strip(), str(home)]
        self._prepare()

    def _prepare(self) -> None:
        for run in ("live", "taken", "released", "done", "undone", "held", "slow", "lapsed"):
            self.does("/v1/runs", {"run_id": f"r-{run}", "agent": "desk", "input": 1})
            lease_ms = 1_000 if run == "lapsed" else 600_000
            self.tokens[run] = self.does(f"/v1/runs/r-{run}/lease", {"holder": "w1", "lease_ms": lease_ms})["token"]
        pay = {"tool": "charge", "args": {"order": "o-1"}, "wait_ms": 30_000}
        for run in ("live", "undone"):
            self.does(f"/v1/runs/r-{run}/steps/pay", pay, run)
        self.does("/v1/runs/r-live/checkpoints", {"seq": 3, "state": 1}, "live")
        self.does("/v1/runs/r-undone/steps/pay/compensate", {"wait_ms": 30_000}, "undone")
        self.does("/v1/runs/r-released/lease/release", {}, "released")
        self.does("/v1/runs/r-done/complete", {"result": 1}, "done")
        self.tokens["stale"] = self.tokens["taken"]
        self.does("/v1/runs/r-taken/preempt", {"note": "x"}, key=self.key)
        self.tokens["taken"] = self.does("/v1/runs/r-taken/lease", {"holder": "w2", "lease_ms": 600_000})["token"]
        lost = {"tool": "mail", "args": {"to": "lost"}, "wait_ms": 30_000}
        while self.ask("/v1/runs/r-held/steps/mail", lost, "held")[1]["code"] != "step_held":
            pass
        self.ask("/v1/runs/r-slow/steps/wait", {"tool": "hang", "args": {}, "wait_ms": 0}, "slow")
        while self.state()["r-lapsed"][0] == "leased":
            pass
        live = self.tokens["live"]
        right = Right(RunId("r-live"), Epoch(2**40), "w1")
        unsigned = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
        self.tokens |= {
            "flipped": live[:-1] + ("A" if live[-1] != "A" else "B"),
            "forged": tokens.mint(bytes(range(64, 96)), bytes(16), right),
            "jwt": f"{unsigned}.{unsigned}.",
            "endless": live + "x" * 65_536,
        }
        self.keys["token"] = live
        self.secrets += [token for token in self.tokens.values() if len(token) < 4_096]

    def does(self, path: str, body: Mapping[str, Any], token: str = "", key: str = "") -> Any:
        status, said = self.ask(path, body, token, key)
        assert status < 300, said
        return said

    def ask(self, path: str, body: Mapping[str, Any], token: str = "", key: str = "") -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        headers |= {"Tidefast-Lease": self.tokens[token]} if token else {}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        answer = self.exchange(request("POST", path, headers, json.dumps(body).encode()), 60)[0]
        return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])

    def state(self) -> dict[str, tuple[Any, ...]]:
        """Every run with its state and the end of its chain: it differs if anything was written."""
        answer = self.exchange(request("GET", "/v1/runs?limit=1000", {}, b""), 60)[0]
        runs = json.loads(answer.partition(b"\r\n\r\n")[2])["runs"]
        return {run["run_id"]: (run["state"], run["seq"], run["digest"]) for run in runs}

    def done(self) -> str:
        return (self.home / "done").read_text()

    def exchange(self, sent: bytes, limit_s: float, *, to_end: bool = False) -> tuple[bytes, bool]:
        """(the answer to these bytes, whether the server has closed the connection after it)."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=limit_s) as line:
            try:
                line.sendall(sent)
            except (ConnectionError, TimeoutError):
                pass  # the server has said enough and stopped listening
            answer = b""
            try:
                while to_end or not is_whole(answer):
                    piece = line.recv(65_536)
                    if not piece:
                        return answer, True
                    answer += piece
            except ConnectionError:
                return answer, True
            return answer, False


def is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(found) and (length is None or len(body) >= int(length.group(1)))


def request(method: str, path: str, headers: Mapping[str, str], body: bytes, twice: str = "") -> bytes:
    named = {"Host": "localhost", **headers, **({"Content-Length": str(len(body))} if body or method == "POST" else {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    lines += [f"{twice}: {named[twice]}"] if twice else []
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("server")
    (home / "app.py").write_text(APP)
    (home / "tools.toml").write_text(TOOLS)
    ENVIRONMENT["POST_AUTH"] = CANARY
    try:
        with running("serve", "--app", "app:app", "--tools", "tools.toml", "--port", "0", cwd=home) as started:
            yield Server(started.said["url"], home)
            assert started.process.poll() is None
    finally:
        del ENVIRONMENT["POST_AUTH"]


def bytes_of(case: Mapping[str, Any], server: Server) -> bytes:
    """The request of a case."""
    if "raw" in case:
        return str(case["raw"]).encode()
    method, path = case.get("method", "POST"), case["path"]
    headers = {"Content-Type": "application/json"} if method == "POST" else {}
    headers |= case.get("headers", {})
    headers |= {"Tidefast-Lease": server.tokens[case["token"]]} if "token" in case else {}
    headers |= {"Authorization": f"Bearer {server.keys[case['key']]}"} if "key" in case else {}
    headers |= {f"X-{number}": "y" for number in range(case.get("many_headers", 0))}
    headers |= {"X-Long": "y" * case["long_header"]} if "long_header" in case else {}
    if "raw_chunks" in case:
        head = request(method, path, {**headers, "Transfer-Encoding": "chunked"}, b"").replace(
            b"Content-Length: 0\r\n", b""
        )
        return head + b"".join(b"8000\r\n" + b"x" * 0x8000 + b"\r\n" for _ in range(case["raw_chunks"]))
    if "fill" in case:
        start, piece, times, end = case["fill"]
        return request(method, path, headers, (start + piece * times + end).encode())
    body = bytes.fromhex(case["hex"]) if "hex" in case else str(case.get("body", "")).encode()
    return request(method, path, headers, body, case.get("twice", ""))


def named(case: Mapping[str, Any]) -> str:
    return f"{case['n']} {case['what']}"[:60]


QUICK = [case for case in CORPUS["http"] if case.get("within_s", 1) <= 1]
SLOW = [case for case in CORPUS["http"] if case.get("within_s", 1) > 1]


@pytest.mark.parametrize("case", QUICK, ids=named)
def test_a_bad_request_gets_its_error_and_changes_nothing(case: Mapping[str, Any], server: Server) -> None:
    judge(case, server)


@pytest.mark.rig
@pytest.mark.parametrize("case", SLOW, ids=named)
def test_a_request_that_comes_too_slowly_gets_its_error_and_changes_nothing(
    case: Mapping[str, Any], server: Server
) -> None:
    judge(case, server)


def judge(case: Mapping[str, Any], server: Server) -> None:
    before, done = server.state(), server.done()
    limit_s, sent = case.get("within_s", 1.0), bytes_of(case, server)
    for tries in range(TRIES):
        begun = time.monotonic()
        answer, _ = server.exchange(sent, 60)
        if time.monotonic() - begun <= limit_s:
            break
        assert tries < TRIES - 1, f"more than {limit_s} s, {TRIES} times"
    check_answer(case, answer)
    assert not [secret for secret in server.secrets if secret.encode() in answer]
    if case.get("close"):
        assert server.exchange(sent, 60, to_end=True)[1]
    assert (server.state(), server.done()) == (before, done)


def check_answer(case: Mapping[str, Any], answer: bytes) -> None:
    """Status, code and reason are those that the case names, in a problem with what to do next."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *rest = case["says"].split()
    assert head.split()[1].decode() == status, answer[:600]
    if not rest:
        return
    assert b"content-type: application/problem+json" in head.lower()
    told = json.loads(body[: body.rindex(b"}") + 1] if not case.get("close") else json_of(head, body))
    assert [told["code"], told["reason"]] == rest, told
    assert str(told["status"]) == status and told["detail"] and told["next"]
    assert case.get("tells", "") in body.decode()
    assert f"{case.get('header', 'content-type')}:".lower() in head.decode().lower()
    assert b"Traceback" not in body and b"/src/" not in body


def json_of(head: bytes, body: bytes) -> bytes:
    """The first answer's body; more may follow on a connection that ends."""
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return body[: int(length.group(1))] if length else body


def test_an_altered_and_a_forged_token_are_told_the_same(server: Server) -> None:
    cases = {case["token"]: case for case in CORPUS["http"] if case.get("token") in ("flipped", "forged")}
    altered, forged = (server.exchange(bytes_of(case, server), 60)[0] for case in cases.values())
    assert altered.partition(b"\r\n\r\n")[2] == forged.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("case", CORPUS["cli"], ids=named)
def test_a_bad_command_is_told_in_one_line_and_changes_nothing(
    case: Mapping[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in case.get("files", {}).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(case.get("mode", 0o644))
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TIDEFAST_")]:
        monkeypatch.delenv(name)
    code = main(case["words"])
    said = capsys.readouterr()
    assert (code, said.out) == (case["exit"], ""), said.err
    lines = said.err.splitlines()
    assert lines and all(re.fullmatch(r"error\[[a-z_]+\]: .+", line) for line in lines), said.err
    assert case["tells"] in said.err and case.get("tells_too", "") in said.err
    assert said.err.replace("\n", "").isprintable()
    assert not [text for text in case.get("files", {}).values() if case["n"] == 98 and text in said.err]
    left = {path.name for path in tmp_path.iterdir()} - {path.name for path in before}
    assert left <= {".tidefast"}, "a store may be made before its secret is found bad, and nothing else"


def test_every_row_of_the_list_is_sent_tested_elsewhere_or_left_out_for_a_reason() -> None:
    rows = [case["n"] for case in (*CORPUS["http"], *CORPUS["cli"]) if case["n"]]
    listed = {number for kind in ("elsewhere", "left_out") for case in CORPUS[kind] for number in case["n"]}
    assert not listed & set(rows)
    assert listed | set(rows) == set(range(1, ROWS + 1))
    assert all(case["why"] for case in CORPUS["left_out"])
    for case in CORPUS["elsewhere"]:
        file, _, name = case["test"].partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, (
            case["test"]
        )


def test_the_corpus_sees_a_server_that_answers_otherwise() -> None:
    """The judge itself: another status, another reason or a bare text is no match."""
    case = {"says": "400 invalid json_invalid"}
    good = {"status": 400, "code": "invalid", "reason": "json_invalid", "detail": "x", "next": "y"}

    def answer(told: Mapping[str, Any], status: int = 400, kind: str = "application/problem+json") -> bytes:
        body = json.dumps(told).encode()
        return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    check_answer(case, answer(good))
    for bad in (answer(good, 500), answer({**good, "reason": "other"}), answer(good, kind="text/plain")):
        with pytest.raises(AssertionError):
            check_answer(case, bad)
