"""The order in which each request is judged.

After the door (`door.py`): the method; the caller's key (`access.py`); the lease token (none: 428, not ours or for
another run: 401); the live-epoch fence; only then the body. A stale caller with a broken body hears that it is stale,
because the first answer decides what it does next. Release, complete and fail may be repeated after they ended the
epoch, so a refusal of the fence is kept back there until the body is known to be whole, and the rules answer.

A caller that hangs up changes nothing of what it asked for, with one exception: a claim that waits stops waiting, so
that no run is granted to a caller that is gone. No other call of the authority is ever cancelled from here.
"""

import asyncio
import time
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
from tidefast.server.chat import ChatStream
from tidefast.server.credentials import Credentials
from tidefast.server.door import CallerGone, answer, header, hung_up, read_body, refusal
from tidefast.server.load import RETRY_AFTER_MS, Load
from tidefast.server.meters import Meters
from tidefast.server.report import report
from tidefast.server.stream import MEDIA_TYPE, EventStream
from tidefast.server.table import VERBS, Verb
from tidefast.server.verbs import Call, Outcome, Told
from tidefast.services.tracing import mark, span
from tidefast.stores.base import StoreError
from tidefast.wire import chat as wire
from tidefast.wire import messages as m
from tidefast.wire.answers import encode
from tidefast.wire.problem import Problem, from_refused, invalid, problem

if TYPE_CHECKING:
    from tidefast.services.authority import Authority


Answered = Outcome | EventStream | ChatStream
STEP_HEADER, WAIT_HEADER = wire.STEP_HEADER.lower().encode(), wire.WAIT_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class Server:
    """What every address needs. `stopping` is set when the server begins to end."""

    authority: "Authority"
    credentials: Credentials
    stopping: asyncio.Event
    meters: Meters


class Address:
    """One address as an ASGI application."""

    def __init__(self, server: Server, path: str, table: dict[str, Verb]) -> None:
        self._server = server
        self._path = path
        self._table = table
        self._allow = ", ".join(sorted(table))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        meters, method = self._server.meters, scope["method"]
        verb = self._table.get(method)
        if verb is None:
            told = problem("unsupported", "method_not_allowed", {"method": method[:32], "allow": self._allow})
            await refusal(told, [("Allow", self._allow)])(scope, receive, send)
            meters.told("other", self._path, told)
            return
        began, parts = time.monotonic(), scope["path_params"]
        server, names = self._server, (parts.get("run", ""), parts.get("step", ""), parts.get("ws", ""))
        call = Call(server.authority, server.credentials.signer, meters, server.stopping, *names)
        if verb.named_by_headers:
            call.step, call.wait = header(scope, STEP_HEADER), header(scope, WAIT_HEADER)
        with span(f"{method} {self._path}", _trace(scope), run=call.run, step=call.step) as traced:
            outcome = await self._outcome(verb, call, scope, receive)
            mark(traced, epoch=call.right.epoch if call.right is not None else 0)
            if isinstance(outcome, Problem):
                mark(traced, code=outcome.code, reason=outcome.reason)
        if isinstance(outcome, EventStream | ChatStream):
            await self._tell(outcome, call, scope, receive, send)
            return
        if not call.has_waited:
            meters.requests.observe(time.monotonic() - began)
        meters.told(method, self._path, outcome)
        if isinstance(outcome, Told) and isinstance(outcome.body, dict) and outcome.body.get("replayed") is True:
            meters.replayed += 1
        await _response(outcome, scope)(scope, receive, send)

    async def _tell(
        self, stream: EventStream | ChatStream, call: Call, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """A stream, if this caller may have one more."""
        meters = self._server.meters
        with meters.load.wait(call.caller.name) as has_place:
            if not has_place:
                meters.told(scope["method"], self._path, _no_place())
                await refusal(_no_place())(scope, receive, send)
                return
            meters.told(scope["method"], self._path, stream)
            await stream(scope, receive, send)

    async def _outcome(self, verb: Verb, call: Call, scope: Scope, receive: Receive) -> Answered:
        """What to answer, whatever happens: an error is logged without token or body, and told without its inside."""
        try:
            return await self._judge(verb, call, scope, receive)
        except CallerGone:
            return problem("unsupported", "request_late")
        except StoreError as error:
            report(error, call, scope)
            return problem("store_unavailable", "not_ready" if verb.ask is verbs.readyz else "store")
        except Exception as error:
            report(error, call, scope)
            return problem("internal", "error")

    async def _judge(self, verb: Verb, call: Call, scope: Scope, receive: Receive) -> Answered:
        """The checks in their order, then the question itself."""
        caller = admit(self._server.credentials.book, verb.guard, header(scope, b"authorization"), call.run)
        if isinstance(caller, Problem):
            return caller
        call.caller = caller
        stale: Problem | None = None
        if MAY[verb.guard].lease:
            right = self._right(verb, call, scope)
            if isinstance(right, Problem):
                return right
            call.right = right
            refused = await call.authority.fence(right)
            stale = None if refused is None else from_refused(refused)
            if stale is not None and not verb.may_repeat:
                return stale
        message = _bad_name(call) or await _message(verb, scope, receive, self._server.meters.load)
        if isinstance(message, Problem):
            return stale or message
        call.message = message
        if verb.is_stream and MEDIA_TYPE in header(scope, b"accept"):
            return await self._stream(verb, call, scope)
        if verb.may_wait and message.wait_ms:  # type: ignore[attr-defined]
            return await self._wait(verb, call, receive)
        return await verb.ask(call)

    async def _stream(self, verb: Verb, call: Call, scope: Scope) -> Answered:
        """A stream from where the caller was; what could be said of the first page is said in place of it."""
        last = header(scope, b"last-event-id")
        if last:
            resumed = m.decode_query(m.AfterSeqQuery, [("after", last)])
            if isinstance(resumed, Problem):
                return invalid("query_invalid", "`Last-Event-ID` must be the id of an event of this run")
            call.message = resumed
        first = await verb.ask(call)
        if isinstance(first, Problem):
            return first
        book, sent = self._server.credentials, header(scope, b"authorization")

        def is_welcome() -> bool:
            return admit(book.book, verb.guard, sent, call.run) == call.caller

        return EventStream(call, call.message.after, self._server.stopping, is_welcome)

    def _right(self, verb: Verb, call: Call, scope: Scope) -> Right | Problem:
        token = header(scope, b"tidefast-lease")
        if not token:
            return problem("lease_required", "token_missing")
        right = call.signer.verify(token)
        if right is None:
            return problem("bad_token", "bad_token")
        if verb.named_by_headers:
            if not call.caller.sees(right.run_id):
                return problem("not_found", "run_unknown", {"run": right.run_id})
            call.run = right.run_id
        return right if right.run_id == call.run else problem("bad_token", "other_run")

    async def _wait(self, verb: Verb, call: Call, receive: Receive) -> Answered:
        """A long poll, ended early when the server stops. A grant that was made all the same is told to a repeat.

        Raises `CallerGone` when the caller hangs up while it waits.
        """
        call.has_waited = True
        with self._server.meters.load.wait(call.caller.name) as has_place:
            if not has_place:
                return _no_place()
            asked = asyncio.ensure_future(verb.ask(call))
            stopped = asyncio.ensure_future(self._server.stopping.wait())
            gone = asyncio.ensure_future(hung_up(receive))
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


def _no_place() -> Problem:
    return problem("overloaded", "waits", {"retry_after_ms": RETRY_AFTER_MS})


def _trace(scope: Scope) -> dict[str, str]:
    """The caller's trace, if it sent one."""
    parent = header(scope, b"traceparent")
    return {"traceparent": parent} if parent else {}


def _response(outcome: Outcome, scope: Scope) -> Response:
    if isinstance(outcome, Problem):
        closing = [("Connection", "close")] if outcome.status == 413 and header(scope, b"expect") else []
        return refusal(outcome, closing)
    body = outcome.body if isinstance(outcome.body, bytes) else encode(outcome.body)
    return answer(outcome.status, body, outcome.media_type, outcome.headers)


def _bad_name(call: Call) -> Problem | None:
    for where, name in (("run", call.run), ("step", call.step), ("workspace", call.workspace)):
        if name and not is_id(name) and not is_derived_id(name):
            bad = m.bad_id(where)
            return invalid(bad.reason, bad.detail, bad.facts)
    return None


async def _message(verb: Verb, scope: Scope, receive: Receive, load: Load) -> m.Message | Problem:
    if scope["method"] == "GET":
        try:
            pairs = parse_qsl(scope["query_string"].decode("ascii"), keep_blank_values=True, max_num_fields=16)
        except ValueError:
            return invalid("query_invalid", "the query is not ASCII or has more than 16 fields")
        return m.decode_query(verb.message, pairs)
    if scope["query_string"]:
        return invalid("query_invalid", "this address takes no query")
    body = await read_body(scope, receive, load)
    return body if isinstance(body, Problem) else m.decode(verb.message, body)


def routes(server: Server) -> list[Route]:
    """Every address that the server knows."""
    return [Route(path, Address(server, path, table)) for path, table in VERBS.items()]
