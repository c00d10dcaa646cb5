"""Addresses whose bodies aren't JSON messages: contents of workspaces, and the replica's socket.

They pass the same door and the same keys as every other. What a replica asks for is bound to its token: a live epoch of
the workspace that the address names. A content is streamed in both directions and never held whole.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute

from tidefast.protocol.ids import is_id
from tidefast.protocol.verdicts import Refused
from tidefast.protocol.workspace import is_digest, is_path
from tidefast.server.access import Guard, admit
from tidefast.server.door import CallerGone, answer, read_body, refusal
from tidefast.server.replica_socket import ReplicaSocket
from tidefast.server.report import report
from tidefast.server.routes import Server
from tidefast.server.verbs import Call
from tidefast.stores.base import StoreError
from tidefast.stores.blobs import BlobRefused
from tidefast.wire import messages as m
from tidefast.wire.problem import Problem, from_refused, invalid, problem
from tidefast.wire.replica import FETCH_BYTES_MAX, packed

if TYPE_CHECKING:
    from tidefast.services.workspaces import Workspaces

BYTES = "application/octet-stream"
Answer = Callable[[Request, "Workspaces", str], Awaitable[Response | Problem]]


class Stream:
    """One address: who may call it, and what it answers."""

    def __init__(self, server: Server, guard: Guard, ask: Answer) -> None:
        self._server = server
        self._guard = guard
        self._ask = ask

    async def __call__(self, request: Request) -> Response:
        """The answer, whatever happens; nothing of the inside of an error is told."""
        server = self._server
        call = Call(server.authority, server.credentials.signer, server.meters, server.stopping)
        try:
            told = await self._judge(request)
        except (ClientDisconnect, CallerGone):
            told = problem("unsupported", "request_late")
        except StoreError as error:
            report(error, call, request.scope)
            told = problem("store_unavailable", "store")
        except Exception as error:
            report(error, call, request.scope)
            told = problem("internal", "error")
        return refusal(told) if isinstance(told, Problem) else told

    async def _judge(self, request: Request) -> Response | Problem:
        credentials, name = self._server.credentials, str(request.path_params["ws"])
        caller = admit(credentials.book, self._guard, request.headers.get("authorization", ""))
        if isinstance(caller, Problem):
            return caller
        if not is_id(name):
            bad = m.bad_id("workspace")
            return invalid(bad.reason, bad.detail, bad.facts)
        if caller.workspace not in ("", name):
            return problem("forbidden", "workspace", {"workspace": caller.workspace})
        if self._guard == "replica":
            told = self._stale(request, name)
            if told is not None:
                return told
        elif not caller.bodies:
            return problem("forbidden", "bodies")
        return await self._ask(request, self._server.authority.workspaces, name)

    def _stale(self, request: Request, name: str) -> Problem | None:
        """Why this replica may not ask; None if its epoch is live."""
        token = request.headers.get("tidefast-lease", "")
        if not token:
            return problem("lease_required", "token_missing")
        proved = self._server.credentials.signer.verify_replica(token)
        if proved is None or proved[0].workspace_id != name:
            return problem("bad_token", "bad_token")
        refused = self._server.authority.workspaces.replicas.fence(proved[0])
        return None if refused is None else from_refused(refused)


def _index(request: Request) -> int | Problem | None:
    asked = m.decode_query(m.IndexQuery, list(request.query_params.multi_items()))
    return asked if isinstance(asked, Problem) else asked.index


async def read_file(request: Request, workspaces: "Workspaces", name: str) -> Response | Problem:
    """A file's committed content."""
    index, path = _index(request), str(request.path_params["path"])
    if isinstance(index, Problem):
        return index
    found = Refused("not_found", "path_unknown", {"workspace": name, "path": path[:500]})
    stood = workspaces.reads.file(name, path, index) if is_path(path) else found
    if isinstance(stood, Refused):
        return from_refused(stood)
    entry = stood.entry
    if entry.kind != "file":
        return from_refused(found)
    headers = {
        "Content-Length": str(entry.size),
        "ETag": f'"{entry.digest}"',
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",  # somebody else's file must never be run as a page of this origin
        "Content-Disposition": "attachment",
    }
    return StreamingResponse(workspaces.contents.read(entry.digest), 200, headers, BYTES)


async def tar(request: Request, workspaces: "Workspaces", name: str) -> Response | Problem:
    """The committed content as a tar file."""
    index = _index(request)
    if isinstance(index, Problem):
        return index
    found = workspaces.reads.manifest(name, index)
    if isinstance(found, Refused):
        return from_refused(found)
    headers = {"Cache-Control": "no-store", "Content-Disposition": f'attachment; filename="{name}.tar"'}
    return StreamingResponse(workspaces.reads.tar(found[1]), 200, headers, "application/x-tar")


async def manifest(request: Request, workspaces: "Workspaces", name: str) -> Response | Problem:
    """What stands where, for a replica."""
    index = _index(request)
    if isinstance(index, Problem):
        return index
    found = workspaces.reads.manifest(name, index)
    if isinstance(found, Refused):
        return from_refused(found)
    index, entries = found
    return answer(200, json.dumps({"index": index, "entries": entries}, separators=(",", ":")).encode())


async def put_blob(request: Request, workspaces: "Workspaces", name: str) -> Response | Problem:
    """Keep a content; durable when answered."""
    digest = str(request.path_params["sha256"])
    if not is_digest(digest):
        return invalid("digest_invalid", "a content is named by its SHA-256 as 64 lower-case hex digits")
    try:
        size = await workspaces.contents.upload(digest, request.stream())
    except BlobRefused as refused:
        return _not_kept(refused)
    return answer(200, b'{"size":%d}' % size)


def _not_kept(refused: BlobRefused) -> Problem:
    if refused.reason == "mismatch":
        return problem("invalid", "digest_mismatch")
    return problem("full", "contents") if refused.reason == "full" else problem("too_large", "content")


async def get_blob(request: Request, workspaces: "Workspaces", name: str) -> Response | Problem:
    digest = str(request.path_params["sha256"])
    size = await workspaces.contents.size(digest) if is_digest(digest) else None
    if size is None:
        return problem("not_found", "content_unknown")
    headers = {"Content-Length": str(size), "Cache-Control": "no-store"}
    return StreamingResponse(workspaces.contents.read(digest), 200, headers, BYTES)


async def fetch_blobs(request: Request, workspaces: "Workspaces", name: str) -> Response | Problem:
    """Many small contents in one answer, in the order asked, each behind its digest and length (`packed`)."""
    body = await read_body(request.scope, request.receive, request.app.state.meters.load)
    asked = body if isinstance(body, Problem) else m.decode(m.Fetch, body)
    if isinstance(asked, Problem):
        return asked
    sizes = [await workspaces.contents.size(digest) for digest in asked.digests]
    if None in sizes:
        return problem("not_found", "content_unknown")
    if sum(size or 0 for size in sizes) > FETCH_BYTES_MAX:
        return problem("too_large", "fetch", {"limit": FETCH_BYTES_MAX})

    async def pieces() -> AsyncIterator[bytes]:
        for digest in asked.digests:
            yield packed(digest, await workspaces.contents.whole(digest))

    return StreamingResponse(pieces(), 200, {"Cache-Control": "no-store"}, BYTES)


WORKSPACE = "/v1/workspaces/{ws}"
STREAMS: tuple[tuple[str, str, Guard, Answer], ...] = (
    ("GET", WORKSPACE + "/files/{path:path}", "watch", read_file),
    ("GET", WORKSPACE + "/tar", "watch", tar),
    ("GET", WORKSPACE + "/manifest", "replica", manifest),
    ("POST", WORKSPACE + "/blobs", "replica", fetch_blobs),
    ("GET", WORKSPACE + "/blobs/{sha256}", "replica", get_blob),
    ("PUT", WORKSPACE + "/blobs/{sha256}", "replica", put_blob),
)


def streams(server: Server) -> list[BaseRoute]:
    """Every address of this module."""
    found: list[BaseRoute] = [
        Route(path, Stream(server, guard, ask).__call__, methods=[method]) for method, path, guard, ask in STREAMS
    ]
    socket = ReplicaSocket(server.authority, server.credentials)
    found.append(WebSocketRoute(WORKSPACE + "/replica", socket.serve))
    return found
