"""The HTTP application: door, addresses, and what is said where there is no address."""

import asyncio
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from tidefast.server.credentials import Credentials
from tidefast.server.door import LOOPBACK, Door, Hosts, refusal
from tidefast.server.load import Load
from tidefast.server.meters import Meters
from tidefast.server.routes import Server, routes
from tidefast.server.streams import streams
from tidefast.wire.problem import problem

if TYPE_CHECKING:
    from tidefast.services.authority import Authority


def build_app(authority: "Authority", credentials: Credentials, hosts: Hosts = LOOPBACK) -> Starlette:
    """The application in front of one authority.

    `credentials` are what callers are judged by, and may be replaced meanwhile. `hosts` are the names, besides those of
    this machine, under which the server may be addressed (see `Door`). `app.state.stopping` tells long polls to end;
    `app.state.meters` is where whoever built the engine reports its commits.
    """
    stopping = asyncio.Event()
    meters = Meters(Load())
    server = Server(authority, credentials, stopping, meters)
    door = Middleware(Door, hosts=hosts, meters=meters)
    app = Starlette(routes=[*routes(server), *streams(server)], middleware=[door], exception_handlers={404: _no_route})
    app.router.redirect_slashes = False
    app.state.stopping = stopping
    app.state.meters = meters
    app.state.has_keys = credentials.book.keys is not None
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    told = problem("not_found", "route_unknown", {"versions": ["v1"]})
    request.app.state.meters.told("other", "", told)
    return refusal(told)
