"""The address of the models: a chat completions request as a step, its answer in the upstream's own bytes.

Which step it is stands in a header, and everything else is as a stock client sends and hears it. Nothing is said before
the first piece of an answer has come, so that what goes wrong until then has a status of its own. After that a broken
answer ends with a problem in place of its finish: a client must not take it for one.
"""

import asyncio

import msgspec
from starlette.types import Receive, Scope, Send

from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.chat import read_call
from tidefast.protocol.verdicts import Refused
from tidefast.server.door import hung_up
from tidefast.server.verbs import Call, Outcome, Told
from tidefast.services.model_sender import raw_answer
from tidefast.services.relay import Relay
from tidefast.wire import messages as m
from tidefast.wire.chat import REPLAYED_HEADER, STEP_HEADER, WAIT_HEADER
from tidefast.wire.problem import Problem, from_refused, invalid, problem

MEDIA_TYPE = "text/event-stream"
SEND_S = 30.0  # how long a caller may take nothing
WAIT_MAX_MS = 3_600_000  # a model's own timeout is the bound that matters
_CUT = Refused("in_doubt", "stream_cut")


class ChatStream:
    """An answer on its way, as an ASGI application. Its first piece is there already."""

    def __init__(self, relay: Relay, first: bytes, asking: "asyncio.Task[StepAnswer | Refused]") -> None:
        self._relay, self._first, self._asking = relay, first, asking
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(hung_up(receive))
        telling = asyncio.ensure_future(self._tell(send))
        try:
            await asyncio.wait((gone, telling), return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
        except TimeoutError:
            return  # the server closes a connection whose answer was left unfinished
        finally:
            self._relay.close()
            gone.cancel()
            telling.cancel()

    async def _tell(self, send: Send) -> None:
        piece: bytes | None = self._first
        while piece is not None:
            await _say(send, piece)
            piece = await self._relay.next()
        if not self._relay.is_whole:
            await _say(send, _problem_event(from_refused(await self._why())))
        await _say(send, b"", more=False)

    async def _why(self) -> Refused:
        """Why the answer ended before its end. The answer itself may still be finished, for the next holder."""
        if self._relay.cut is not None:
            return self._relay.cut
        answer = await asyncio.shield(self._asking)
        return answer if isinstance(answer, Refused) else _CUT


async def chat(call: Call) -> Outcome | ChatStream:
    """Ask a model, or hear the journaled answer."""
    asked: m.Chat = call.message
    if not call.step:
        why = f"the header {STEP_HEADER} is missing: a call of a model is a step and needs an id"
        return invalid("field_missing", why, {"field": STEP_HEADER})
    wait_ms = _wait_ms(call.wait)
    if isinstance(wait_ms, Problem):
        return wait_ms
    call.has_waited = True
    right, key = call.holds, call.caller.name
    request = read_call(msgspec.json.decode(asked.request))
    if isinstance(request, str) or not request.is_stream:
        return _whole(await call.authority.chat(right, call.step, asked.request, wait_ms, key))
    relay = call.authority.models.listen(right)
    asking = asyncio.ensure_future(call.authority.chat(right, call.step, asked.request, wait_ms, key, relay))
    first = asyncio.ensure_future(relay.next())
    await asyncio.wait((asking, first), return_when=asyncio.FIRST_COMPLETED)
    if relay.has_begun:
        piece = await first
        return ChatStream(relay, piece or b"", asking)
    first.cancel()
    return _whole(await asking)


def _wait_ms(text: str) -> int | Problem:
    if not text:
        return WAIT_MAX_MS
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= WAIT_MAX_MS:
        return int(text)
    return invalid("field_range", f"{WAIT_HEADER} is not 0 to {WAIT_MAX_MS:,}", {"field": WAIT_HEADER})


def _whole(answer: StepAnswer | Refused) -> Outcome:
    """A whole answer, in the bytes in which it came."""
    if isinstance(answer, Refused):
        return from_refused(answer)
    receipt = msgspec.json.decode(answer.receipt_json)
    if not isinstance(receipt, dict) or "raw" not in receipt:
        return problem("step_conflict", "other_kind", {"step": answer.step_id, "stored_tool": "what is no model"})
    replayed = ((REPLAYED_HEADER, "true"),) if answer.replayed else ()
    return Told(raw_answer(receipt), receipt["status"], receipt["content_type"], replayed)


def _problem_event(told: Problem) -> bytes:
    """The end of a broken stream, in the form in which stock clients look for an error."""
    error = {"message": told.detail, "type": told.code, "code": told.code, "param": None, "problem": told.to_record()}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


async def _say(send: Send, text: bytes, *, more: bool = True) -> None:
    """Say something to a caller that takes it in time. Raises `TimeoutError` for one that doesn't."""
    async with asyncio.timeout(SEND_S):
        await send({"type": "http.response.body", "body": text, "more_body": more})
