"""The authority over HTTP: the seam of `authority.py`, spoken to a `tidefast serve`.

A refusal comes back as `Refused`. `AuthorityUnavailable` is raised when nobody knows whether the call arrived: no
connection, no answer in time, an answer that can't be read, or one that says so. Every call here is safe to repeat:
what creates something carries an id that is drawn before the first sending.

aiohttp silently sends a GET again when a reused connection turns out to be closed; reads change nothing, so that does
no harm. It never does so with a POST. Proxies, netrc files and redirects are ignored.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from tidefast.protocol.answers import (
    BudgetInfo,
    EventInfo,
    JournalPage,
    LeaseGrant,
    RunCreated,
    RunInfo,
    StepAnswer,
    StepInfo,
)
from tidefast.protocol.budget import Limit
from tidefast.protocol.canonical import BODY_BYTES_MAX
from tidefast.protocol.chat import Fold
from tidefast.protocol.commands import ResolveVerdict, RunVerb
from tidefast.protocol.ids import StepId, is_derived_id, is_id
from tidefast.protocol.verdicts import Done, Refused, Renewed, Settled
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.wire import messages as m
from tidefast.wire.answers import read, read_all
from tidefast.wire.chat import REPLAYED_HEADER, STEP_HEADER, WAIT_HEADER
from tidefast.wire.problem import UNREADABLE, from_event, from_json, from_record, to_refused
from tidefast.wire.tokens import peek

CONNECT_S = 5.0
ANSWER_S = 15.0  # beyond the wait that was asked for
NOT_NOW_STATUS = frozenset((408, 429, 503))  # the way there failed or was full; the call itself may be a good one
ANSWERED = frozenset(("limit_reached",))
WAITED_FOR = frozenset(("limit_reached", "overloaded"))  # of a model's upstream, with the time to wait
KEEP_ALIVE_S = 30.0  # shorter than the server's, so that it is this side that closes
CONNECTIONS_MAX = 256
T = TypeVar("T")


class RequestRefused(Exception):
    """The authority doesn't take a request whose answer has no place for a refusal; sending it again won't help."""

    def __init__(self, refused: Refused) -> None:
        detail = refused.facts.get("detail", refused.facts)
        super().__init__(f"the authority refused the request: {refused.code}, {refused.reason}: {detail}")
        self.refused = refused


class HttpAuthority:
    """One authority by its URL. Safe for many concurrent calls of one event loop; `close` it in the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._base = URL(url.rstrip("/"))
        if self._base.scheme not in ("http", "https") or not self._base.host:
            raise ValueError(f"{url}: expected http://HOST:PORT")
        self.api_key = api_key
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return str(self._base)

    async def close(self) -> None:
        """Close all connections. The next call would open new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # --- the seam ------------------------------------------------------------------------------------------

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused:
        name = run_id or f"r-{secrets.token_hex(8)}"
        message = m.CreateRun(agent=agent, input=input_json, run_id=name, version=agent_version)
        return await self._ask("POST", "/v1/runs", RunCreated, message)

    async def claim(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        wait_ms: int,
        request_id: str,
    ) -> Sequence[LeaseGrant]:
        """Raises `RequestRefused` if the authority does not take the request, such as a bad name."""
        message = m.Claim(
            agents={agent: list(versions) for agent, versions in agents.items()},
            holder=holder,
            lease_ms=lease_ms,
            wait_ms=wait_ms,
            max=max_runs,
            request_id=request_id or None,
        )
        body = await self._call("POST", "/v1/claims", message, wait_ms=wait_ms)
        return _must(_read_all(body, "leases", LeaseGrant))

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused:
        message = m.Grant(holder=holder, lease_ms=lease_ms, request_id=request_id or secrets.token_hex(16))
        return await self._ask("POST", _path(run_id, "lease"), LeaseGrant, message)

    async def journal(self, token: str, after: int) -> JournalPage | Refused:
        return await self._ask("GET", _held(token, f"journal?after={after}"), JournalPage, token=token)

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]:
        answers: list[Renewed | Refused] = []
        for start in range(0, len(tokens), m.TOKENS_MAX):
            part = list(tokens[start : start + m.TOKENS_MAX])
            body = await self._call("POST", "/v1/leases/renew", m.RenewMany(tokens=part))
            answers += [body] * len(part) if isinstance(body, Refused) else _renewals(body, len(part))
        return answers

    async def release(self, token: str, reason: str, detail: str) -> Done | Refused:
        message = m.Release(reason=reason, detail=detail[: m.NOTE_LENGTH_MAX])  # type: ignore[arg-type]
        return await self._ask("POST", _held(token, "lease/release"), Done, message, token=token)

    async def apply(
        self, token: str, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        stored = args_json is None
        message = m.Apply(tool=tool or None, args=args_json, stored=stored, wait_ms=wait_ms)
        return await self._ask("POST", _held(token, "steps", step_id), StepAnswer, message, token, wait_ms)

    async def chat(self, token: str, step_id: str, body: str, wait_ms: int) -> StepAnswer | Refused:
        right = peek(token)
        if right is None:
            return Refused("stale_epoch", "bad_token")
        data = body.encode()
        headers = {"Tidefast-Lease": token, STEP_HEADER: step_id, WAIT_HEADER: str(wait_ms)}
        found = await self._send("POST", "/v1/chat/completions", data, headers, wait_ms, WAITED_FOR)
        if isinstance(found, Refused):
            return found
        answer, told = found
        if told.get("Content-Type", "").startswith("text/event-stream"):
            folded = self._folded(answer)
            if isinstance(folded, Refused):
                return folded
            answer = folded
        try:
            receipt = msgspec.json.encode({"body": msgspec.Raw(answer)}).decode()
        except msgspec.MsgspecError as error:
            raise AuthorityUnavailable(f"{self._base}: an answer that can't be read") from error
        replayed = told.get(REPLAYED_HEADER) == "true"
        return StepAnswer(right.run_id, StepId(step_id), "committed", right.epoch, "", replayed, receipt)

    def _folded(self, answer: bytes) -> bytes | Refused:
        """The whole answer that a stream spells, or the problem with which it ended."""
        fold = Fold()
        events = fold.feed(answer)
        if not fold.unfinished():
            return msgspec.json.encode(fold.body())
        told = from_event(events[-1].raw) if events else None
        if told is None:
            raise AuthorityUnavailable(f"{self._base}: a stream that ends without its end")
        return to_refused(told)

    async def save_result(self, token: str, step_id: str, value_json: str) -> StepAnswer | Refused:
        message = m.SaveResult(value=value_json)
        return await self._ask("POST", _held(token, "steps", step_id, "result"), StepAnswer, message, token)

    async def compensate(
        self, token: str, step_id: str, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        tool, args = (None, None) if given is None else given
        message = m.Compensate(tool=tool, args=args, wait_ms=wait_ms)
        path = _held(token, "steps", step_id, "compensate")
        return await self._ask("POST", path, StepAnswer, message, token, wait_ms)

    async def checkpoint(self, token: str, number: int, state_json: str) -> Done | Refused:
        message = m.SaveCheckpoint(seq=number, state=state_json)
        return await self._ask("POST", _held(token, "checkpoints"), Done, message, token)

    async def complete(
        self, token: str, result_json: str, asked: Sequence[str], dropped: Sequence[str]
    ) -> Done | Refused:
        message = m.Complete(result=result_json, asked=sorted(asked), dropped=sorted(dropped))
        return await self._ask("POST", _held(token, "complete"), Done, message, token)

    async def fail(self, token: str, error: str) -> Done | Refused:
        return await self._ask("POST", _held(token, "fail"), Done, m.Fail(error=error), token)

    # --- for people: reads, and the operator's verbs, which need the operator's key ------------------------

    async def oversee(self, verb: RunVerb, run_id: str, note: str, expect_epoch: int | None) -> Done | Refused:
        message = m.Oversee(note=note, expect=None if expect_epoch is None else m.ExpectRun(epoch=expect_epoch))
        return await self._ask("POST", _path(run_id, verb), Done, message)

    async def resolve(
        self,
        run_id: str,
        step_id: str,
        verdict: ResolveVerdict,
        note: str,
        receipt_json: str,
        looked_at_ms: int | None,
        expect_attempts: int | None,
        expect_epoch: int | None = None,
    ) -> Settled | Refused:
        message = m.Resolve(
            verdict=verdict,
            note=note,
            receipt=receipt_json,
            looked_at_ms=looked_at_ms,
            expect=m.Expect(epoch=expect_epoch, attempts=expect_attempts),
        )
        return await self._ask("POST", _path(run_id, "steps", step_id, "resolve"), Settled, message)

    async def run(self, run_id: str) -> RunInfo | Refused:
        return await self._ask("GET", _path(run_id), RunInfo)

    async def runs(self, after: str | None, limit: int, state: str | None) -> Sequence[RunInfo]:
        """Raises `RequestRefused` for a page that can't be asked for."""
        query = f"?limit={limit}" + (f"&after={after}" if after else "") + (f"&state={state}" if state else "")
        return _must(_read_all(await self._call("GET", f"/v1/runs{query}"), "runs", RunInfo))

    async def events(self, run_id: str, after: int, limit: int) -> Sequence[EventInfo] | Refused:
        path = _path(run_id, f"events?after={after}&limit={limit}")
        return _read_all(await self._call("GET", path), "events", EventInfo)

    async def steps(self, run_id: str, after: str | None, limit: int) -> Sequence[StepInfo] | Refused:
        path = _path(run_id, f"steps?limit={limit}" + (f"&after={after}" if after else ""))
        return _read_all(await self._call("GET", path), "steps", StepInfo)

    async def step(self, run_id: str, step_id: str) -> StepInfo | Refused:
        return await self._ask("GET", _path(run_id, "steps", step_id), StepInfo)

    async def held(self) -> Sequence[StepInfo]:
        """All held steps, page by page."""
        found: list[StepInfo] = []
        while True:
            after = f"&after={found[-1].run_id}/{found[-1].step_id}" if found else ""
            body = await self._call("GET", f"/v1/held?limit={m.PAGE_MAX}{after}")
            page = _must(_read_all(body, "steps", StepInfo))
            found += page
            if len(page) < m.PAGE_MAX:
                return found

    async def budgets(self, after: str, limit: int) -> Sequence[BudgetInfo]:
        """Raises `RequestRefused` for a page that can't be asked for."""
        query = f"?limit={limit}" + (f"&after={after}" if after else "")
        return _must(_read_all(await self._call("GET", f"/v1/budgets{query}"), "budgets", BudgetInfo))

    async def raise_budget(self, name: str, limit: Limit, note: str) -> BudgetInfo | Refused:
        message = m.RaiseBudget(name=name, calls=limit.calls, tokens=limit.tokens, micros=limit.micros, note=note)
        return await self._ask("POST", "/v1/budgets", BudgetInfo, message)

    # --- one call ------------------------------------------------------------------------------------------

    async def _ask(
        self,
        method: str,
        path: str | Refused,
        kind: type[T],
        message: m.Message | None = None,
        token: str | None = None,
        wait_ms: int = 0,
    ) -> T | Refused:
        body = await self._call(method, path, message, token, wait_ms)
        if isinstance(body, Refused):
            return body
        try:
            return read(body, kind)
        except msgspec.MsgspecError as error:
            raise AuthorityUnavailable(f"{self._base}: an answer that can't be read") from error

    async def _call(
        self,
        method: str,
        path: str | Refused,
        message: m.Message | None = None,
        token: str | None = None,
        wait_ms: int = 0,
    ) -> bytes | Refused:
        if isinstance(path, Refused):
            return path
        headers = {} if token is None else {"Tidefast-Lease": token}
        found = await self._send(
            method, path, None if message is None else m.encode(message), headers, wait_ms, ANSWERED
        )
        return found if isinstance(found, Refused) else found[0]

    async def _send(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        wait_ms: int,
        answered: frozenset[str],
    ) -> tuple[bytes, Mapping[str, str]] | Refused:
        """The answer's body and headers. `answered` are the codes that count as an answer whatever their status."""
        if data is not None:
            if len(data) > BODY_BYTES_MAX:
                return Refused("invalid", "body_too_large", {"limit": BODY_BYTES_MAX, "length": len(data)})
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=ANSWER_S + wait_ms / 1000, sock_connect=CONNECT_S)
        try:
            async with self._open().request(
                method, self._url(path), data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status, body, told_headers = response.status, await response.read(), response.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AuthorityUnavailable(f"{self._base}: no answer: {type(error).__name__}") from error
        if 200 <= status < 300:
            return body, told_headers
        told = from_json(status, body)
        is_no_answer = told is None or told.code in UNREADABLE or status in NOT_NOW_STATUS
        if told is None or (is_no_answer and told.code not in answered):
            raise AuthorityUnavailable(f"{self._base}: status {status}: {told.detail if told else 'no answer of ours'}")
        return to_refused(told)

    def _url(self, path: str) -> URL:
        return URL(f"{self._base}{path}", encoded=True)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _path(run_id: str, *parts: str) -> str | Refused:
    """An address below a run. A name that is no id is refused here: it could lead to another address."""
    if not is_id(run_id) and not is_derived_id(run_id):
        return Refused("invalid", "id_invalid", {"field": "run"})
    if len(parts) > 1 and not is_id(parts[1]) and not is_derived_id(parts[1]):
        return Refused("invalid", "id_invalid", {"field": "step"})
    return "/".join(("/v1/runs", run_id, *parts))


def _held(token: str, *parts: str) -> str | Refused:
    """An address below the run that a token names."""
    right = peek(token)
    return Refused("stale_epoch", "bad_token") if right is None else _path(right.run_id, *parts)


def _read_all(body: bytes | Refused, name: str, kind: type[T]) -> list[T] | Refused:
    if isinstance(body, Refused):
        return body
    try:
        return read_all(body, name, kind)
    except msgspec.MsgspecError as error:
        raise AuthorityUnavailable("an answer that can't be read") from error


def _must(answer: list[T] | Refused) -> list[T]:
    if isinstance(answer, Refused):
        raise RequestRefused(answer)
    return answer


def _renewals(body: bytes, count: int) -> list[Renewed | Refused]:
    try:
        leases = msgspec.json.decode(body, type=dict[str, list[dict[str, Any]]])["leases"]
    except (msgspec.MsgspecError, KeyError) as error:
        raise AuthorityUnavailable("an answer that can't be read") from error
    if len(leases) != count:
        raise AuthorityUnavailable(f"{len(leases)} answers to {count} renewals")
    return [_renewal(lease) for lease in leases]


def _renewal(lease: Mapping[str, Any]) -> Renewed | Refused:
    expires_at_ms = lease.get("expires_at_ms")
    if type(expires_at_ms) is int:
        return Renewed(expires_at_ms)
    told = from_record(409, lease.get("problem"))
    if told is None or told.code in UNREADABLE:
        raise AuthorityUnavailable("an answer that can't be read")
    return to_refused(told)
