"""Looks for planted secrets in everything that a real server, its workers and its files put out.

Each secret is sought as it is and as base64, URL-escaped, JSON-escaped (also twice) and hex, wherever it may begin.
"""

import base64
import contextlib
import http.server
import json
import re
import secrets
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cli.processes import ENVIRONMENT

MIB = 2**20
APP = """
import tidefast as tf

app = tf.App()


@app.tool(key_ttl="1h", undo={"tool": "charge", "args": {"order": "undo"}})
def charge(order: str, key: str) -> str:
    return order


@app.tool
def shout(text: str) -> str:
    raise RuntimeError(text)


@app.agent
async def desk(run: tf.Run, input: dict) -> str:
    await run.tool("pay", charge, order=input["order"])
    await run.tool("post", "post", order=input["order"])
    await run.checkpoint({"stage": "posted"})
    try:
        await run.tool("reject", "reject", order="x")
    except tf.Rejected:
        pass
    if input["order"] == "shout":
        await run.tool("shout", shout, text="who knows")
    return input["order"]


@app.agent
async def breaks(run: tf.Run, input: object) -> None:
    raise RuntimeError("the agent breaks")
"""
TOOLS = """
[tools.post]
kind = "http"
url = "http://127.0.0.1:PORT/echo"
credential = { header = "Authorization", env = "POST_AUTH" }

[tools.reject]
kind = "http"
url = "http://127.0.0.1:PORT/reject"
refusals = [402]
credential = { header = "X-Api-Key", env = "REJECT_KEY" }

[tools.letter]
kind = "smtp"
url = "smtp://127.0.0.1:9"
from = "desk@shop.example"
tls = "none"
credential = { user = "desk", env = "MAIL_PASSWORD" }
"""


def forms(secret: str) -> set[bytes]:
    """Every spelling in which a secret is one all the same."""
    raw = secret.encode()
    once = json.dumps(secret)[1:-1]
    found = {raw, once.encode(), json.dumps(once)[1:-1].encode(), raw.hex().encode(), raw.hex().upper().encode()}
    found |= {urllib.parse.quote(secret, safe="").encode(), urllib.parse.quote_plus(secret).encode()}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):  # wherever in a longer text it began: the digits that depend on it alone
            whole = encode(b"\0" * shift + raw).rstrip(b"=")
            found.add(whole[(shift * 4 + 2) // 3 : -1])
    return found


def canary(name: str) -> str:
    """A secret that each escaping spells otherwise, and that no other text contains."""
    return f'{name}-"q\\b/+&%={secrets.token_hex(12)}'


class Echo(http.server.BaseHTTPRequestHandler):
    """A provider that says back everything that it hears, as some do in errors."""

    heard: list[Mapping[str, str]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.heard.append(dict(self.headers))
        body = json.dumps({"you_sent": dict(self.headers)}).encode()
        self.send_response(402 if self.path == "/reject" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing: its own log is no output of ours."""


@contextlib.contextmanager
def provider() -> Iterator[tuple[int, list[Mapping[str, str]]]]:
    handler = type("Heard", (Echo,), {"heard": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], handler.heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Hunt:
    """A server with its worker and its secrets, and everything that was ever put out."""

    def __init__(self, home: Path, serve: Sequence[str], command: Sequence[str]) -> None:
        self.home, self._serve, self._command = home, serve, command
        self.secrets: dict[str, str] = {}
        self.output: list[tuple[str, bytes]] = []
        self.heard: list[Mapping[str, str]] = []
        self.children: list[bytes] = []
        self._token = ""

    def plant(self, name: str) -> str:
        self.secrets[name] = canary(name)
        return self.secrets[name]

    def keep(self, place: str, said: bytes) -> bytes:
        self.output.append((place, said))
        return said

    @property
    def size(self) -> int:
        return sum(len(said) for _, said in self.output)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A provider, a server that knows all callers by keys, and a worker."""
        (self.home / "app.py").write_text(APP)
        with provider() as (port, self.heard):
            (self.home / "tools.toml").write_text(TOOLS.replace("PORT", str(port)))
            for role in ("worker", "operator", "reader"):
                words = ("keys", "add", f"a-{role}", "--role", role, "--keys", "keys.toml", "--json")
                self.secrets[f"{role}_key"] = json.loads(self.types(*words, is_kept=False))["key"]
            env = {
                "POST_AUTH": self.plant("post"),
                "REJECT_KEY": self.plant("reject"),
                "MAIL_PASSWORD": self.plant("mail"),
            }
            server, said = self.start(self._serve, env, "serve")
            self.port = int(said["url"].rsplit(":", 1)[1])
            self._read_secrets()
            line = {"TIDEFAST_URL": said["url"], "TIDEFAST_KEY": self.secrets["worker_key"]}
            worker, _ = self.start([*self._command, "worker", "app:app"], line, "worker")
            self.env = line
            try:
                yield
                self.children = [
                    (child / "environ").read_bytes() for child in Path("/proc").iterdir() if is_child(child, server.pid)
                ]
            finally:
                for process in (worker, server):
                    process.terminate()
                    process.wait(60)
                    assert process.stdout is not None
                    self.keep("stdout", process.stdout.read())
                    process.stdout.close()
        for log in self.home.glob("*.log"):
            self.keep(log.name, log.read_bytes())
        for file in (self.home / ".tidefast").iterdir():
            if not file.name.endswith((".secret", ".operator-key")):
                self.keep(file.name, file.read_bytes())

    def start(self, words: Sequence[str], env: Mapping[str, str], name: str) -> tuple[Any, Any]:
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*words, "--json"], cwd=self.home, env={**ENVIRONMENT, **env}, stdout=subprocess.PIPE, stderr=log
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (self.home / f"{name}.log").read_text()
        return process, json.loads(line)

    def types(self, *words: str, is_kept: bool = True) -> bytes:
        done = subprocess.run(
            [*self._command, *words],
            cwd=self.home,
            env={**ENVIRONMENT, **getattr(self, "env", {})},
            capture_output=True,
        )
        if is_kept:
            self.keep(" ".join(words), done.stdout + done.stderr)
        assert done.returncode in (0, 1), done.stderr.decode()
        return done.stdout

    def _read_secrets(self) -> None:
        for name in ("secret", "operator-key"):
            self.secrets[name] = (self.home / f".tidefast/store.db.{name}").read_text().strip()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str = "worker_key",
        token: str = "",
        is_kept: bool = True,
    ) -> tuple[int, bytes]:
        """One call over a connection of its own; the answer is kept, head and all."""
        raw = b"" if body is None else json.dumps(body).encode()
        headers = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(raw))}
        headers |= {"Content-Type": "application/json"} if raw else {}
        headers |= {"Authorization": f"Bearer {self.secrets.get(key, key)}"} if key else {}
        headers |= {"Tidefast-Lease": token} if token else {}
        head = "\r\n".join(
            [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        )
        answer = b""
        with socket.create_connection(("127.0.0.1", self.port), 30) as line, contextlib.suppress(ConnectionError):
            line.sendall(head.encode("latin-1", "replace") + raw)
            while piece := line.recv(MIB):
                answer += piece
        if is_kept:
            self.keep(f"{method} {path}"[:200], answer)
        return int((answer or b"x 0").split()[1]), answer.partition(b"\r\n\r\n")[2]

    def lease(self, run: str) -> str:
        """A token, from an answer that is not kept: there it belongs."""
        self.ask("POST", "/v1/runs", {"run_id": run, "agent": "other", "input": {"order": run}})
        _, said = self.ask("POST", f"/v1/runs/{run}/lease", {"holder": "hunter", "lease_ms": 600_000}, is_kept=False)
        token = str(json.loads(said)["token"])
        self.secrets[f"token of {run}"] = token
        return token

    def wait(self, run: str) -> None:
        until = time.monotonic() + 60
        while json.loads(self.ask("GET", f"/v1/runs/{run}")[1])["state"] not in (
            "completed",
            "held",
            "failed",
            "frozen",
        ):
            assert time.monotonic() < until, f"run {run} doesn't end"

    def hits(self) -> list[str]:
        """Where a secret was found, and which."""
        found: list[str] = []
        for name, secret in self.secrets.items():
            patterns = re.compile(b"|".join(re.escape(form) for form in sorted(forms(secret), key=len, reverse=True)))
            found += [f"{name} in {place}" for place, said in self.output if patterns.search(said)]
            found += [f"{name} in the environment of a child" for said in self.children if patterns.search(said)]
        home = str(self.home).encode()
        over_http = [(place, said) for place, said in self.output if place.startswith(("GET ", "POST "))]
        return found + [f"the store's place in {place}" for place, said in over_http if home in said]


def is_child(place: Path, parent: int) -> bool:
    try:
        return place.name.isdigit() and f"PPid:\t{parent}\n" in (place / "status").read_text()
    except OSError:
        return False
