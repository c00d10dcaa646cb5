"""The HTTP application: door, addresses, and what is said where there is no address."""

import asyncio
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from tidefast.server.door import Door, refusal
from tidefast.server.routes import Server, routes
from tidefast.server.verbs import Signer
from tidefast.wire.problem import problem

if TYPE_CHECKING:
    from tidefast.services.authority import Authority


def build_app(authority: "Authority", *, secret: bytes, namespace: bytes, operator_digest: bytes) -> Starlette:
    """The application in front of one authority.

    `secret` signs lease tokens and `namespace` (of the store) binds them to this authority; `operator_digest` is the
    SHA-256 of the operator's key (see `server.keys`). `app.state.stopping` tells long polls to end.
    """
    stopping = asyncio.Event()
    server = Server(authority, Signer(secret, namespace), operator_digest, stopping)
    app = Starlette(routes=routes(server), middleware=[Middleware(Door)], exception_handlers={404: _no_route})
    app.router.redirect_slashes = False
    app.state.stopping = stopping
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    return refusal(problem("not_found", "route_unknown", {"versions": ["v1"]}))
