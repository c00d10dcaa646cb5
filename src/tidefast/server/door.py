"""What every request passes before anything of the authority is asked.

In this order: Host and Origin (a web page that was led to a loopback name must get nowhere), the address's spelling,
then framing and size. The body is read by `read_body` alone, which stops at the limit whatever the headers said.
"""

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tidefast.protocol.canonical import BODY_BYTES_MAX
from tidefast.server.load import RETRY_AFTER_MS, Load
from tidefast.server.meters import Meters
from tidefast.wire.problem import MEDIA_TYPE, Problem, invalid, problem, too_large

JSON_TYPE = "application/json"
ALONE = (
    b"host",
    b"authorization",
    b"tidefast-lease",
    b"tidefast-step",
    b"tidefast-wait-ms",
    b"content-type",
    b"origin",
)


class CallerGone(Exception):
    """The caller hung up before its request was whole; nobody hears an answer, and nothing was asked."""


def is_loopback(host: str) -> bool:
    """Whether a host, as written in a URL without its port, is this machine by name or number."""
    if host.strip("[]").lower() == "localhost":
        return True
    address = _number(host)
    return address is not None and address.is_loopback


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def header(scope: Scope, name: bytes) -> str:
    """The value of a header, empty if it wasn't sent."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1")).strip()
    return ""


def answer(status: int, body: bytes, media_type: str = JSON_TYPE, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """An answer that nobody keeps."""
    return Response(body, status, {"Content-Type": media_type, "Cache-Control": "no-store", **dict(headers)})


async def hung_up(receive: Receive) -> None:
    """Returns when the caller has closed its connection. Only to be asked once the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(told: Problem, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """A problem as an answer."""
    extra = {"Cache-Control": "no-store", **dict(headers)}
    if told.retry_after_ms:
        extra["Retry-After"] = str(math.ceil(told.retry_after_ms / 1000))
    if told.status == 401:
        extra["WWW-Authenticate"] = "Bearer"
    return Response(told.to_json(), told.status, extra, MEDIA_TYPE)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Under which names the server may be addressed, besides those of this machine.

    A page that rebinds a name of its own to this server's address sends that name. So a name must have been given; an
    address by number can't be rebound, and is taken where the server listens on it, or on all (`any_number`).
    """

    names: frozenset[str] = frozenset()
    any_number: bool = False

    def take(self, name: str) -> bool:
        if is_loopback(name) or name.lower() in self.names:
            return True
        return self.any_number and _number(name) is not None


LOOPBACK = Hosts()


class Door:
    """The outermost part of the application, for requests and sockets alike."""

    def __init__(self, app: ASGIApp, hosts: Hosts, meters: Meters) -> None:
        self.app = app
        self._hosts = hosts
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = _foreign(scope, self._hosts) or _repeated(scope) or _misspelled(scope) or _framing(scope)
        if told is None:
            await self.app(scope, receive, send)
            return
        self._meters.told("other", "", told)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": told.reason})
        else:
            closing = [("Connection", "close")] if header(scope, b"expect") else []
            await refusal(told, closing)(scope, receive, send)


def _foreign(scope: Scope, hosts: Hosts) -> Problem | None:
    """Only names that are this server's, and no page of another origin."""
    host = header(scope, b"host")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not hosts.take(name):
        return problem("unsupported", "host_not_allowed")
    origin, site = header(scope, b"origin").lower(), header(scope, b"sec-fetch-site")
    if origin and origin not in (f"http://{host.lower()}", f"https://{host.lower()}"):  # https: TLS ends at a proxy
        return problem("forbidden", "cross_origin")
    if site and site not in ("same-origin", "none"):
        return problem("forbidden", "cross_origin")
    return None


def _repeated(scope: Scope) -> Problem | None:
    names = [name for name, _ in scope["headers"]]
    for name in ALONE:
        if names.count(name) > 1:
            return invalid("header_repeated", f"the header {name.decode().title()} stands twice")
    return None


def _misspelled(scope: Scope) -> Problem | None:
    """No id needs an escape, so an escaped or doubled slash can only be meant to reach another address."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    if path.startswith(b"/v1/workspaces/") and b"/files/" in path:
        return None  # a file's name may need an escape; it is looked up as it is, and never opened
    return problem("not_found", "route_unknown") if b"%" in path or b"//" in path else None


def _framing(scope: Scope) -> Problem | None:
    length = header(scope, b"content-length")
    if length and not (length.isascii() and length.isdigit()):
        return problem("invalid", "framing_ambiguous")
    if length and int(length[:19]) > BODY_BYTES_MAX and not is_upload(scope):
        return too_large()
    encodings = header(scope, b"transfer-encoding").lower()
    if encodings and encodings != "chunked":
        return problem("invalid", "framing_ambiguous")
    if header(scope, b"content-encoding").lower() not in ("", "identity"):
        return problem("unsupported", "content_encoding")
    return None


def is_upload(scope: Scope) -> bool:
    """Whether a request brings a content of a workspace, which is streamed and bounded where it is kept."""
    return bool(scope.get("method") == "PUT" and "/blobs/" in scope["path"])


async def read_body(scope: Scope, receive: Receive, load: Load) -> bytes | Problem:
    """The body, at most 1 MiB of it. Raises `CallerGone` if the caller hangs up before its end."""
    chunks: list[bytes] = []
    length, more = 0, True
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise CallerGone
            chunk: bytes = message.get("body", b"")
            if length + len(chunk) > BODY_BYTES_MAX:
                return too_large()
            if not load.take_body(len(chunk)):
                return problem("overloaded", "bodies", {"retry_after_ms": RETRY_AFTER_MS})
            length += len(chunk)
            chunks.append(chunk)
            more = message.get("more_body", False)
    finally:
        load.give_back(length)
    media = header(scope, b"content-type").lower().replace(" ", "")
    if length and media not in (JSON_TYPE, f"{JSON_TYPE};charset=utf-8", f'{JSON_TYPE};charset="utf-8"'):
        return problem("unsupported", "media_type")
    return b"".join(chunks)
