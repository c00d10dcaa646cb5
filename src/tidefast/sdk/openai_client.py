"""The stock `openai` client over this authority, for agents that are written for it.

Only headers and the base URL are ours. A refusal that ends the pass (a stale epoch, a held run) is raised as what it
is, before the client could take it for an error that one may try again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidefast.sdk.authority import Authority
from tidefast.sdk.errors import Misuse
from tidefast.sdk.http import HttpAuthority
from tidefast.sdk.line import Line
from tidefast.wire.chat import STEP_HEADER
from tidefast.wire.problem import from_json, to_refused

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def client_of(
    authority: Authority, token: str, line: Line, step_id: str | None, options: dict[str, Any]
) -> "AsyncOpenAI":
    """See `Run.openai`. Raises `Misuse` where there is no server or no such package."""
    if not isinstance(authority, HttpAuthority):
        raise Misuse("run.openai() needs a server", "this run is driven without one", "use run.model, or a worker")
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError as error:
        raise Misuse("run.openai() needs the package openai", str(error), "pip install 'tidefast[openai]'") from error

    async def heard(response: Any) -> None:
        if response.status_code >= 400:
            told = from_json(response.status_code, await response.aread())
            if told is not None:
                line.judge(to_refused(told))

    async def asked(request: Any) -> None:
        line.check()
        if not request.headers.get(STEP_HEADER):
            hint = f'pass extra_headers={{"{STEP_HEADER}": "plan"}}, or run.openai("plan")'
            raise Misuse("a call of a model is a step and needs an id", "none was given", hint)

    headers = {"Tidefast-Lease": token, **({STEP_HEADER: step_id} if step_id else {})}
    hooks: dict[str, list[Callable[..., Any]]] = {"request": [asked], "response": [heard]}
    return AsyncOpenAI(
        base_url=f"{authority.url}/v1",
        api_key=authority.api_key or "none",
        default_headers=headers,
        http_client=DefaultAsyncHttpxClient(event_hooks=hooks, trust_env=False),
        **options,
    )
