"""The commands `workspaces` and `workspace`: what is committed, who wrote it, what differs, and all of it in a tar.

They change nothing. With `--url` a server is asked; otherwise the store's file and its contents are read beside whoever
owns them.
"""

import asyncio
import json
import sys
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.desk import must, server_key, server_url
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, StoreName, Url, checked_id
from tidefast.cli.place import store_path, system_clock
from tidefast.protocol.verdicts import Refused

PAGE = 1_000
What = Literal["show", "log", "files", "diff", "tar"]
Since = Annotated[int, Parameter(help="Of `log` and `diff`: only what came after this log index.")]
Index = Annotated[int | None, Parameter(help="The log index whose content is meant; by default the newest.")]
Output = Annotated[Path | None, Parameter(help="Of `tar`: the file to write, by default the standard output.")]


class Shelf(Protocol):
    """What can be read at either place."""

    async def get(self, path: str, **query: Any) -> Any: ...

    def tar(self, name: str, index: int | None) -> AsyncIterator[bytes]: ...


def workspaces(*, url: Url = None, store: StoreName = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """List workspaces, with their replicas."""
    found = asyncio.run(_all(url, store))
    if as_json:
        out.document({"workspaces": found})
        return 0
    rows = [(each["workspace_id"], str(each["log_index"]), out.epoch(each["epoch"]), _replica(each)) for each in found]
    out.table(("WORKSPACE", "INDEX", "EPOCH", "REPLICA"), rows)
    return 0


def workspace(
    what: What,
    name: str,
    /,
    *,
    since: Since = 0,
    index: Index = None,
    output: Output = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """One workspace: show it, its log, the files that stand there, what changed since an index, or all in a tar."""
    checked_id(name, "NAME")
    if what == "tar":
        return asyncio.run(_tar(url, store, name, index, output))
    told = asyncio.run(_told(url, store, what, name, since, index))
    if as_json:
        out.document(told)
        return 0
    _TELL[what](told)
    return 0


def _replica(told: Any) -> str:
    if not told["is_live"]:
        return told["ended_by"] or "never"
    return "ready" if told["is_ready"] else "restoring" if told["is_connected"] else "away"


def _show(told: Any) -> None:
    out.line((told["workspace_id"], "bold"), f"  index {told['log_index']}, replica epoch {out.epoch(told['epoch'])}")
    out.line(f"replica: {_replica(told)}")
    if told["open"] is not None:
        out.line(f"open write: step {told['open']['step_id']} of run {told['open']['run_id']}")
    for path, reason in told["unrestorable"]:
        out.line(f"not kept: {path} ({reason})")


def _log(told: Any) -> None:
    rows = [(str(w["log_index"]), w["run_id"], w["step_id"], str(w["paths"]), w["chain"][:12]) for w in told["writes"]]
    out.table(("INDEX", "RUN", "STEP", "PATHS", "CHAIN"), rows)


def _files(told: Any) -> None:
    rows = [(f"{e['mode']:04o}", e["kind"], str(e["size"]), e["digest"][:12], e["path"]) for e in told["entries"]]
    out.table(("MODE", "KIND", "BYTES", "DIGEST", "PATH"), rows)


def _diff(told: Any) -> None:
    out.table(("HOW", "PATH"), [(change["how"], change["path"]) for change in told["changes"]])


_TELL = {"show": _show, "log": _log, "files": _files, "diff": _diff}


async def _all(url: str | None, store: str) -> list[Any]:
    found: list[Any] = []
    async with _reading(url, store) as shelf:
        while page := (await shelf.get("", after=found[-1]["workspace_id"] if found else None, limit=PAGE))[
            "workspaces"
        ]:
            found += page
    return found


async def _told(url: str | None, store: str, what: What, name: str, since: int, index: int | None) -> Any:
    async with _reading(url, store) as shelf:
        if what == "show":
            return await shelf.get(f"/{name}")
        if what == "diff":
            return await shelf.get(f"/{name}/diff", since=since, until=index)
        member, key = ("writes", "log_index") if what == "log" else ("entries", "path")
        told: dict[str, Any] = {member: []}
        after: Any = since if what == "log" else None
        query = {} if what == "log" else {"index": index}
        while (page := await shelf.get(f"/{name}/{what}", after=after, limit=PAGE, **query))[member]:
            told = {**page, member: told[member] + page[member]}
            after = page[member][-1][key]
        return told


async def _tar(url: str | None, store: str, name: str, index: int | None, output: Path | None) -> int:
    async with _reading(url, store) as shelf:
        try:
            with _opened(output) as file:
                async for piece in shelf.tar(name, index):
                    file.write(piece)
        except OSError as error:
            raise CliError("config", f"--output {output}: {error}", "name a writable file", ExitCode.CONFIG) from error
    return 0


def _opened(output: Path | None) -> BinaryIO:
    return sys.stdout.buffer if output is None else output.open("wb")


@asynccontextmanager
async def _reading(url: str | None, store: str) -> AsyncIterator[Shelf]:
    address = server_url(url)
    if address is not None:
        import aiohttp

        key = server_key(address, store)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            yield _Server(session, address.rstrip("/"))
        return
    with _File(store_path(store)) as shelf:
        yield shelf


class _Server:
    """A shelf at a server."""

    def __init__(self, session: Any, url: str) -> None:
        self._session, self._url = session, url

    async def get(self, path: str, **query: Any) -> Any:
        async with await self._ask(path, query) as answer:
            return json.loads(await answer.read())

    async def tar(self, name: str, index: int | None) -> AsyncIterator[bytes]:
        async with await self._ask(f"/{name}/tar", {"index": index}) as answer:
            async for piece in answer.content.iter_chunked(1 << 16):
                yield piece

    async def _ask(self, path: str, query: dict[str, Any]) -> Any:
        import aiohttp

        from tidefast.wire.problem import from_json, to_refused

        asked = urllib.parse.urlencode({name: value for name, value in query.items() if value is not None})
        address = f"{self._url}/v1/workspaces{path}" + (f"?{asked}" if asked else "")
        try:
            answer = await self._session.get(address)
        except (aiohttp.ClientError, OSError) as error:
            todo = "start it, or look at --url"
            raise CliError("unavailable", f"{self._url} doesn't answer: {type(error).__name__}", todo) from error
        if answer.status >= 400:
            told = from_json(answer.status, await answer.read())
            must(Refused("invalid", "http_invalid") if told is None else to_refused(told))
        return answer


class _File:
    """A shelf in a store's file, beside whoever owns it."""

    def __init__(self, path: Path) -> None:
        from tidefast.engine.engine import Engine
        from tidefast.services.contents import Contents
        from tidefast.services.replicas import Replicas
        from tidefast.services.workspace_reads import WorkspaceReads
        from tidefast.stores.sqlite import SqliteStore
        from tidefast.stores.sqlite_blobs import SqliteBlobs, contents_beside

        self._store = SqliteStore.open_read_only(path)
        clock = system_clock(self._store)
        engine = Engine(self._store, clock, inline=True)  # never started, so it can only read
        beside = contents_beside(path)
        self._contents = Contents(engine, lambda: SqliteBlobs(beside, clock_ms=lambda: 0, is_reader=True))
        self._reads = WorkspaceReads(engine, self._contents, Replicas(engine, self._contents))

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: object) -> None:
        self._contents.close()
        self._store.close()

    async def get(self, path: str, **query: Any) -> Any:
        after, limit = query.get("after"), query.get("limit", PAGE)
        parts = path.split("/")
        if len(parts) == 1:
            return {"workspaces": list(self._reads.list(after or "", limit))}
        name, what = parts[1], parts[2] if len(parts) > 2 else "show"
        match what:
            case "show":
                return must(self._reads.one(name))
            case "log":
                found: Sequence[Any] = must(self._reads.log(name, after or 0, limit))
                return {"writes": list(found)}
            case "files":
                return must(self._reads.entries(name, query["index"], after or "", limit))
            case _:
                return must(self._reads.diff(name, query["since"], query["until"]))

    async def tar(self, name: str, index: int | None) -> AsyncIterator[bytes]:
        _, entries = must(self._reads.manifest(name, index))
        async for piece in self._reads.tar(entries):
            yield piece
