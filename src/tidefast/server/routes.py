"""The order in which each request is judged.

After the door (`door.py`): the method; the caller's key (`access.py`); the lease token (none: 428, not ours or for
another run: 401); the live-epoch fence; only then the body. A stale caller with a broken body hears that it is stale,
because the first answer decides what it does next. Release, complete and fail may be repeated after they ended the
epoch, so a refusal of the fence is kept back there until the body is known to be whole, and the rules answer.

A caller that hangs up changes nothing of what it asked for, with one exception: a claim that waits stops waiting, so
that no run is granted to a caller that is gone. No other call of the authority is ever cancelled from here.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidefast.protocol.ids import is_derived_id, is_id
from tidefast.protocol.records import Right
from tidefast.server import verbs
from tidefast.server.access import MAY, admit
from tidefast.server.credentials import Credentials
from tidefast.server.door import CallerGone, answer, header, read_body, refusal
from tidefast.server.report import report
from tidefast.server.table import VERBS, Verb
from tidefast.server.verbs import Call, Outcome
from tidefast.stores.base import StoreError
from tidefast.wire import messages as m
from tidefast.wire.answers import encode
from tidefast.wire.problem import Problem, from_refused, invalid, problem

if TYPE_CHECKING:
    from tidefast.services.authority import Authority


@dataclass(frozen=True, slots=True)
class Server:
    """What every address needs. `stopping` is set when the server begins to end."""

    authority: "Authority"
    credentials: Credentials
    stopping: asyncio.Event


class Address:
    """One address as an ASGI application."""

    def __init__(self, server: Server, table: dict[str, Verb]) -> None:
        self._server = server
        self._table = table
        self._allow = ", ".join(sorted(table))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = self._table.get(scope["method"])
        if verb is None:
            told = problem("unsupported", "method_not_allowed", {"method": scope["method"][:32], "allow": self._allow})
            response = refusal(told, [("Allow", self._allow)])
        else:
            parts = scope["path_params"]
            signer = self._server.credentials.signer
            call = Call(
                self._server.authority, signer, parts.get("run", ""), parts.get("step", ""), parts.get("ws", "")
            )
            response = await self._answer(verb, call, scope, receive)
        await response(scope, receive, send)

    async def _answer(self, verb: Verb, call: Call, scope: Scope, receive: Receive) -> Response:
        """The answer, whatever happens: an error is logged without token or body, and told without its inside."""
        try:
            outcome = await self._judge(verb, call, scope, receive)
        except CallerGone:
            outcome = problem("unsupported", "request_late")
        except StoreError as error:
            report(error, call, scope)
            outcome = problem("store_unavailable", "not_ready" if verb.ask is verbs.readyz else "store")
        except Exception as error:
            report(error, call, scope)
            outcome = problem("internal", "error")
        if isinstance(outcome, Problem):
            closing = [("Connection", "close")] if outcome.status == 413 and header(scope, b"expect") else []
            return refusal(outcome, closing)
        return answer(outcome.status, encode(outcome.body))

    async def _judge(self, verb: Verb, call: Call, scope: Scope, receive: Receive) -> Outcome:
        """The checks in their order, then the question itself."""
        caller = admit(self._server.credentials.book, verb.guard, header(scope, b"authorization"), call.run)
        if isinstance(caller, Problem):
            return caller
        call.caller = caller
        stale: Problem | None = None
        if MAY[verb.guard].lease:
            right = self._right(call, scope)
            if isinstance(right, Problem):
                return right
            call.right = right
            refused = await call.authority.fence(right)
            stale = None if refused is None else from_refused(refused)
            if stale is not None and not verb.may_repeat:
                return stale
        message = _bad_name(call) or await _message(verb, scope, receive)
        if isinstance(message, Problem):
            return stale or message
        call.message = message
        return await self._wait(verb.ask(call), receive) if verb.may_wait else await verb.ask(call)

    def _right(self, call: Call, scope: Scope) -> Right | Problem:
        token = header(scope, b"tidefast-lease")
        if not token:
            return problem("lease_required", "token_missing")
        right = call.signer.verify(token)
        if right is None:
            return problem("bad_token", "bad_token")
        return right if right.run_id == call.run else problem("bad_token", "other_run")

    async def _wait(self, asking: Awaitable[Outcome], receive: Receive) -> Outcome:
        """A long poll, ended early when the server stops. A grant that was made all the same is told to a repeat.

        Raises `CallerGone` when the caller hangs up while it waits.
        """
        asked = asyncio.ensure_future(asking)
        stopped = asyncio.ensure_future(self._server.stopping.wait())
        gone = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait((asked, stopped, gone), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            if gone.done():
                gone.result()
                raise CallerGone
            return problem("store_unavailable", "stopping")
        finally:
            for waiting in (stopped, gone, asked):
                waiting.cancel()


async def _hung_up(receive: Receive) -> None:
    """Returns when the caller has closed its connection. Only to be asked once the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _bad_name(call: Call) -> Problem | None:
    for where, name in (("run", call.run), ("step", call.step), ("workspace", call.workspace)):
        if name and not is_id(name) and not is_derived_id(name):
            bad = m.bad_id(where)
            return invalid(bad.reason, bad.detail, bad.facts)
    return None


async def _message(verb: Verb, scope: Scope, receive: Receive) -> m.Message | Problem:
    if scope["method"] == "GET":
        try:
            pairs = parse_qsl(scope["query_string"].decode("ascii"), keep_blank_values=True, max_num_fields=16)
        except ValueError:
            return invalid("query_invalid", "the query is not ASCII or has more than 16 fields")
        return m.decode_query(verb.message, pairs)
    if scope["query_string"]:
        return invalid("query_invalid", "this address takes no query")
    body = await read_body(scope, receive)
    return body if isinstance(body, Problem) else m.decode(verb.message, body)


def routes(server: Server) -> list[Route]:
    """Every address that the server knows."""
    return [Route(path, Address(server, table)) for path, table in VERBS.items()]
