"""What both providers share: options, the ready line, the ledger file, strict input and error answers.

A provider answers only after its ledger is on the disk, and it finishes a request whose client has hung up.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import apsw
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

BODY_LIMIT_BYTES = 64 * 1024
# An oversized body is read to its end up to here, so that its sender hears the answer and not a reset.
DRAIN_LIMIT_BYTES = 1024 * 1024
BODY_DEADLINE_SECONDS = 10.0
# Longer than any client pool keeps an idle connection: a server that closes first makes a request that was
# just sent vanish without an answer, and the caller can't tell that from a lost mail.
KEEP_ALIVE_SECONDS = 120
GRACE_SECONDS = 5
LOOK_SECONDS = 0.02

_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]
JsonObject = dict[str, object]


@dataclass(frozen=True)
class Answer:
    """What a provider answers: a status code and the exact bytes of a JSON body."""

    status: int
    body: bytes

    def response(self, headers: dict[str, str] | None = None) -> Response:
        """Return the HTTP response that carries these bytes unchanged."""
        return Response(self.body, self.status, headers, media_type="application/json")


class Problem(Exception):
    """A request that is turned away before anything was looked up or written."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.answer = error_answer(status, code, message)
        self.headers = headers


def json_answer(status: int, payload: JsonObject) -> Answer:
    """Write the payload as compact UTF-8 JSON."""
    return Answer(status, json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode())


def error_answer(status: int, code: str, message: str, kind: str = "invalid_request_error") -> Answer:
    """Write an error in the one shape that both providers use."""
    return json_answer(status, {"error": {"type": kind, "code": code, "message": message}})


def now_ms() -> int:
    """Return the wall clock in milliseconds: the clock by which a provider's memory ends."""
    return time.time_ns() // 1_000_000


# --- Command line ---------------------------------------------------------------------------------------


def parse_duration_ms(text: str) -> int:
    """Read a duration such as 24h, 30s or 200ms."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a duration such as 24h, 30s or 200ms, not {text!r}")
    return int(match[1]) * _UNIT_MS[match[2]]


def parse_port(text: str) -> int:
    """Read a TCP port; 0 lets the system choose one."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, not {text!r}")
    return int(text)


def option_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that both providers have."""
    parser = argparse.ArgumentParser(program, description=description, allow_abbrev=False)
    parser.add_argument("--db", type=Path, required=True, metavar="FILE", help="the SQLite ledger")
    parser.add_argument("--port", type=parse_port, default=0, help="port on 127.0.0.1; 0 chooses a free one")
    parser.add_argument(
        "--latency",
        type=parse_duration_ms,
        default=0,
        metavar="TIME",
        help="how long a request is worked on before the ledger is touched (default 0s)",
    )
    return parser


def required_token(variable: str) -> str:
    """Return the token that callers must present, or end the process if the environment has none."""
    token = os.environ.get(variable, "")
    if not token or not token.isascii() or not token.isprintable():
        stop(f"set {variable} to the token that callers present as 'Authorization: Bearer <token>'")
    return token


def stop(message: str) -> NoReturn:
    """End the process because it was started wrongly."""
    sys.stderr.write(f"{message}\n")
    raise SystemExit(2)


# --- Ledger ---------------------------------------------------------------------------------------------


class Ledger:
    """A SQLite file that one writer thread owns, so that the event loop never waits for the disk."""

    def __init__(self, path: Path, tables: str) -> None:
        try:
            self._connection = apsw.Connection(str(path))
            self._connection.set_busy_timeout(5_000)
            self._connection.execute("PRAGMA journal_mode = WAL").fetchall()
            self._connection.execute("PRAGMA synchronous = FULL").fetchall()
            with self.transaction() as connection:
                connection.execute(tables).fetchall()
        except apsw.Error as error:
            stop(f"can't open the ledger {path}: {error}")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    @contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """Run the block as one transaction: on the disk when the block has ended, or not there at all."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    async def run(self, work: Callable[[apsw.Connection], Result]) -> Result:
        """Do the work as one transaction on the writer thread, and return once it is durable."""

        def in_transaction() -> Result:
            with self.transaction() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._writer, in_transaction)

    def close(self) -> None:
        """Finish the work that was handed in and close the file."""
        self._writer.shutdown(wait=True)
        self._connection.close()


# --- Input ----------------------------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """Read a body of at most 64 KiB, and don't wait for ever for a client that froze half-way."""
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(BODY_DEADLINE_SECONDS):
            async for chunk in request.stream():
                size_bytes += len(chunk)
                if size_bytes <= BODY_LIMIT_BYTES:
                    chunks.append(chunk)
                elif size_bytes > DRAIN_LIMIT_BYTES:
                    break
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_DEADLINE_SECONDS:.0f} s"
        raise Problem(408, "request_timeout", message, {"Connection": "close"}) from error
    if size_bytes > BODY_LIMIT_BYTES:
        message = f"the body is larger than {BODY_LIMIT_BYTES} bytes"
        raise Problem(413, "too_large", message, {"Connection": "close"})
    return b"".join(chunks)


def parse_object(body: bytes, allowed: frozenset[str]) -> JsonObject:
    """Decode one strict JSON object with no other fields than the allowed ones."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique_names, parse_constant=_no_constant)
        canonical(value)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "invalid_json", f"the body is not strict JSON: {error}") from error
    if not isinstance(value, dict):
        raise Problem(400, "invalid_json", "the body must be a JSON object")
    unknown = sorted(value.keys() - allowed)
    if unknown:
        known = ", ".join(sorted(allowed))
        raise Problem(400, "unknown_field", f"unknown field {unknown[0]!r}; allowed: {known}")
    return value


def canonical(value: object) -> bytes:
    """Return equal bytes for equal JSON values, whatever the order of names or the spaces were."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return text.encode()


def text_field(fields: JsonObject, name: str, longest: int) -> str:
    """Return a required, non-empty text field."""
    value = fields.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise Problem(400, "invalid_field", f"{name} must be a text of 1 to {longest} characters")
    return value


def _unique_names(pairs: list[tuple[str, object]]) -> JsonObject:
    """Build an object, refusing a name that stands twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return fields


def _no_constant(name: str) -> NoReturn:
    """Refuse NaN and the infinities, which are not JSON."""
    raise ValueError(f"{name} is not JSON")


# --- HTTP -----------------------------------------------------------------------------------------------


class Desk:
    """The HTTP side of a provider: who may call, how many calls came, and how errors are answered."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self.counts: Counter[str] = Counter()
        self.in_progress = 0

    def read(self, path: str, endpoint: Endpoint) -> Route:
        """Return a route for a call that only reads."""
        return Route(path, self._checked(endpoint), methods=["GET"])

    def change(self, path: str, method: str, endpoint: Endpoint) -> Route:
        """Return a route for a call that changes the world; it is counted, and shown while it runs."""

        async def counted(request: Request) -> Response:
            self.counts["received"] += 1
            self.in_progress += 1
            try:
                return await endpoint(request)
            finally:
                self.in_progress -= 1

        return Route(path, self._checked(counted), methods=[method])

    def application(self, routes: Sequence[BaseRoute]) -> Starlette:
        """Return the ASGI application over these routes and the health page."""
        application = Starlette(
            routes=[Route("/health", self._health, methods=["GET"]), *routes],
            exception_handlers={HTTPException: _routing_error, Exception: _internal_error},
        )
        application.router.redirect_slashes = False
        return application

    async def _health(self, _request: Request) -> Response:
        return json_answer(200, {"ok": True, "in_progress": self.in_progress}).response()

    def _checked(self, endpoint: Endpoint) -> Endpoint:
        """Let only callers with the token in, and turn problems into answers."""

        async def checked(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                answer = error_answer(401, "unauthenticated", "a valid bearer token is required")
                return answer.response({"WWW-Authenticate": "Bearer"})
            try:
                return await endpoint(request)
            except Problem as problem:
                self.counts["malformed"] += 1
                return problem.answer.response(problem.headers)
            except ClientDisconnect:
                # The request never arrived whole, so there is nothing to do and nobody to tell.
                self.counts["broken_off"] += 1
                return Response(status_code=400)

        return checked


async def _routing_error(_request: Request, error: Exception) -> Response:
    """Answer an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
    answer = error_answer(error.status_code, code, error.detail)
    return answer.response(dict(error.headers) if error.headers else None)


async def _internal_error(_request: Request, _error: Exception) -> Response:
    """Answer a fault of the provider itself; the log on stderr says what it was."""
    answer = error_answer(500, "internal", "the provider failed; the outcome is unknown", "api_error")
    return answer.response()


Listen = Callable[[], Awaitable[asyncio.Server]]


class _Server(uvicorn.Server):
    """A server that says when it and what listens beside it do, each with its port."""

    def __init__(self, config: uvicorn.Config, desk: Desk | None, beside: Mapping[str, Listen]) -> None:
        super().__init__(config)
        self._desk = desk
        self._beside = beside
        self._others: list[asyncio.Server] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            ports = {"port": sockets[0].getsockname()[1]}
            for name, listen in self._beside.items():
                self._others.append(await listen())
                ports[name] = self._others[-1].sockets[0].getsockname()[1]
            sys.stdout.write(json.dumps({"ready": True, **ports}) + "\n")
            sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for other in self._others:
            other.close()
        until = time.monotonic() + GRACE_SECONDS
        while self._desk is not None and self._desk.in_progress and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        await super().shutdown(sockets)


def serve(
    application: Starlette,
    port: int,
    ledger: Ledger,
    desk: Desk | None = None,
    beside: Mapping[str, Listen] | None = None,
) -> None:
    """Serve on the loopback until SIGTERM or SIGINT; answer what is in progress, then close the ledger."""
    # Without the protocol number asyncio leaves Nagle's algorithm on, and each answer takes 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        stop(f"can't listen on 127.0.0.1:{port}: {error.strerror}")
    config = uvicorn.Config(
        application,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    # The server raises the signal once more after its orderly end; here that is not a second death.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    try:
        _Server(config, desk, beside or {}).run(sockets=[listener])
    finally:
        ledger.close()
