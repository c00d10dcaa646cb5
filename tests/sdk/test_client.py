"""The clients: one run from start to result, what is repeated, and what each refusal is raised as. Real sockets."""

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from tests.server.support import OPERATOR_KEY, Desk, real_authority
from tests.server.test_serve import server

import tidefast as tf
from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.verdicts import Refused
from tidefast.sdk import blocking, client, errors
from tidefast.sdk.client import AsyncClient, refusal
from tidefast.sdk.http import HttpAuthority
from tidefast.sdk.line import Backoff

SOON = Backoff(0.001, 0.01)


async def drive(url: str, run_id: str, result: Any = None, error: str | None = None, *, pay: bool = True) -> None:
    """What a worker does with a run: one charge, a checkpoint, the end."""
    authority = HttpAuthority(url)
    grant = await authority.grant(run_id, "w1", 15_000, "q1")
    assert isinstance(grant, LeaseGrant), grant
    if pay:
        await authority.apply(grant.token, "pay", "charge", '{"order":"o1"}', 5_000)
    if error is None:
        await authority.complete(grant.token, json.dumps(result), ["pay"], [])
    else:
        await authority.fail(grant.token, error)
    await authority.close()


def told(story: Callable[[str], Any]) -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _), server(authority) as url, asyncio.timeout(15):
            await story(url)

    asyncio.run(main())


@contextmanager
def a_server() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """A server on a thread of its own: (its URL, what runs a coroutine over there)."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[str] = []

    async def main() -> None:
        async with real_authority(Desk()) as (authority, _), server(authority) as url:
            found.append(url)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(15)
    try:
        yield found[0], lambda verb: asyncio.run_coroutine_threadsafe(verb, loop).result(15)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_run_from_start_to_result() -> None:
    async def story(url: str) -> None:
        async with tf.AsyncClient(url, backoff=SOON) as desk:
            created = await desk.start("refund", {"order": "ö"}, run_id="r1")
            again = await desk.start("refund", {"order": "ö"}, run_id="r1")
            assert (created.was_new, again.was_new) == (True, False)
            waiting = asyncio.create_task(desk.result("r1"))
            await drive(url, "r1", {"paid": 7})
            assert await waiting == {"paid": 7}
            assert (await desk.run("r1")).state == "completed"
            assert [step.step_id async for step in desk.steps("r1")] == ["pay"]
            assert (await desk.step("r1", "pay")).tool == "charge"
            kinds = [event.kind async for event in desk.events("r1")]
            assert kinds[0] == "run_created" and kinds[-1] == "run_completed"
            assert [event.seq async for event in desk.events("r1", after=2)] == list(range(3, len(kinds) + 1))
            assert await desk.held() == []

    told(story)


def test_pages_are_asked_for_until_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 2)

    async def story(url: str) -> None:
        async with tf.AsyncClient(url) as desk:
            names = [(await desk.start("refund", number, run_id=f"r{number}")).run_id for number in range(5)]
            assert [info.run_id async for info in desk.runs()] == names
            assert [info.run_id async for info in desk.runs(state="completed")] == []

    told(story)


def test_a_run_that_ends_without_a_result_says_how() -> None:
    async def story(url: str) -> None:
        async with tf.AsyncClient(url) as desk:
            await desk.start("refund", run_id="r1")
            await drive(url, "r1", error="no money", pay=False)
            with pytest.raises(tf.RunFailed, match="r1 is failed") as raised:
                await desk.result("r1")
            assert (raised.value.state, raised.value.error) == ("failed", "no money")

    told(story)


def test_a_result_that_is_not_there_in_time_is_a_timeout_and_the_run_goes_on() -> None:
    async def story(url: str) -> None:
        async with tf.AsyncClient(url) as desk:
            await desk.start("refund", run_id="r1")
            with pytest.raises(TimeoutError) as raised:
                await desk.result("r1", timeout_s=0.0)
            assert isinstance(raised.value, tf.NotYet) and raised.value.state == "claimable"

    told(story)


def test_each_refusal_is_raised_as_what_can_be_done_about_it() -> None:
    async def story(url: str) -> None:
        async with tf.AsyncClient(url) as desk, tf.AsyncClient(url, key=OPERATOR_KEY) as operator:
            await desk.start("refund", 1, run_id="r1")
            with pytest.raises(tf.Conflict) as raised:
                await desk.start("refund", 2, run_id="r1")
            assert (raised.value.code, raised.value.reason) == ("run_conflict", "other_input")
            with pytest.raises(tf.NotFound, match="run_unknown"):
                await desk.run("r2")
            with pytest.raises(tf.NotAllowed, match="key_missing"):
                await desk.thaw("r1")
            with pytest.raises(tf.Misuse, match="id_invalid"):
                await desk.run("../r1")
            with pytest.raises(tf.Misuse, match="isn't JSON"):
                await desk.start("refund", object())
            with pytest.raises(tf.Misuse, match="too large"):
                await desk.start("refund", "x" * 1_100_000)
            with pytest.raises(tf.Misuse, match="state"):
                [info async for info in desk.runs(state="nope")]  # type: ignore[arg-type]
            with pytest.raises(tf.Conflict, match="epoch"):
                await operator.preempt("r1", expect_epoch=9)

    told(story)


def test_an_operator_decides_on_what_is_there_now() -> None:
    async def story(url: str) -> None:
        authority = HttpAuthority(url)
        async with tf.AsyncClient(url, key=OPERATOR_KEY) as desk:
            await desk.start("refund", run_id="r1")
            grant = await authority.grant("r1", "w1", 15_000, "q1")
            assert isinstance(grant, LeaseGrant)
            await desk.preempt("r1", note="its machine is going away")
            assert not (await desk.run("r1")).is_live
            grant = await authority.grant("r1", "w2", 15_000, "q2")
            assert isinstance(grant, LeaseGrant)
            await authority.apply(grant.token, "pay", "charge", '{"order":"o1"}', 5_000)
            with pytest.raises(tf.Conflict, match="already_decided"):
                await desk.resolve("r1", "pay", "not_applied", note="seen", looked_ago_s=0)
        await authority.close()

    told(story)


def test_a_record_is_an_input_too() -> None:
    class Ticket(msgspec.Struct):
        order: str

    async def story(url: str) -> None:
        async with tf.AsyncClient(url) as desk:
            await desk.start("refund", Ticket("o-1"), run_id="r1")
            assert (await desk.run("r1")).input_json == '{"order":"o-1"}'

    told(story)


# --- silence ---------------------------------------------------------------------------------------------


class Deaf:
    """A server that takes each request and hangs up without a word; counts what arrived."""

    async def __aenter__(self) -> "Deaf":
        self.heard: list[bytes] = []
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard.append(await reader.readline())
        writer.close()


VERBS: list[tuple[str, tuple[Any, ...], dict[str, Any], bool]] = [
    ("start", ("refund",), {}, True),
    ("run", ("r1",), {}, True),
    ("result", ("r1",), {}, True),
    ("step", ("r1", "pay"), {}, True),
    ("held", (), {}, True),
    ("thaw", ("r1",), {"expect_epoch": 1}, False),
    ("cancel", ("r1",), {"expect_epoch": 1}, False),
    ("preempt", ("r1",), {"expect_epoch": 1}, False),
]


@pytest.mark.parametrize(("verb", "args", "more", "is_repeated"), VERBS)
def test_only_what_is_safe_to_repeat_is_sent_again(
    verb: str, args: tuple[Any, ...], more: dict[str, Any], is_repeated: bool
) -> None:
    async def main() -> None:
        async with Deaf() as deaf, tf.AsyncClient(deaf.url, patience_s=0.2, backoff=SOON) as desk:
            with pytest.raises(tf.Unavailable) as raised:
                await getattr(desk, verb)(*args, **more)
            assert isinstance(raised.value, tf.OutcomeUnknown) is not is_repeated
            posted = [line for line in deaf.heard if line.startswith(b"POST")]
            assert (len(deaf.heard) > 2) if is_repeated else len(posted) == 1

    asyncio.run(main())


def test_the_same_run_is_started_however_often_it_is_sent() -> None:
    async def main() -> None:
        names: set[str] = set()

        class Watched(HttpAuthority):
            async def create_run(self, run_id: str | None, *args: Any) -> Any:
                names.add(str(run_id))
                return await super().create_run(run_id, *args)

        async with Deaf() as deaf:
            desk = tf.AsyncClient(deaf.url, patience_s=0.1, backoff=SOON)
            desk._authority = Watched(deaf.url)
            with pytest.raises(tf.Unavailable):
                await desk.start("refund")
            await desk.close()
            assert len(names) == 1 and len(deaf.heard) > 2

    asyncio.run(main())


def test_an_operators_verb_is_sent_again_while_nobody_listens() -> None:
    async def main() -> None:
        async with Deaf() as deaf:
            url = deaf.url
        async with tf.AsyncClient(url, patience_s=0.1, backoff=SOON) as desk:
            with pytest.raises(tf.Unavailable) as raised:
                await desk.thaw("r1")
            assert type(raised.value) is tf.Unavailable, "nothing can have arrived"

    asyncio.run(main())


# --- the client without an event loop ----------------------------------------------------------------------


def test_the_blocking_client_does_the_same_from_any_thread() -> None:
    with a_server() as (url, over_there), tf.Client(url, key=OPERATOR_KEY) as desk:
        assert desk.start("refund", {"order": 1}, run_id="r1").was_new
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(desk.result("r1")))
        waiting.start()
        over_there(drive(url, "r1", {"paid": 7}))
        waiting.join(15)
        assert found == [{"paid": 7}]
        assert [step.step_id for step in desk.steps("r1")] == ["pay"]
        assert next(iter(desk.events("r1"))).kind == "run_created"
        assert [info.run_id for info in desk.runs()] == ["r1"]
        with pytest.raises(tf.NotFound):
            desk.run("r2")


def test_closing_ends_the_thread_and_a_call_that_waits() -> None:
    with a_server() as (url, _):
        desk = tf.Client(url)
        desk.start("refund", run_id="r1")
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                desk.result("r1")
            except BaseException as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        desk.close()
        waiting.join(15)
        assert len(raised) == 1, "cancelled, or told that the client is closed"
        with pytest.raises(tf.Misuse, match="closed"):
            desk.run("r1")
        assert not [thread for thread in threading.enumerate() if thread.name == "tidefast client"]
        desk.close()  # once more is harmless


def test_a_client_that_nobody_closes_leaves_without_a_word() -> None:
    """As in a script of two lines, whose end is the end of the process."""
    with a_server() as (url, _):
        code = f"import tidefast as tf; tf.Client({url!r}).start('refund'); print(len(list(tf.Client({url!r}).runs())))"
        done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_client_of_another_process_says_so() -> None:
    desk = tf.Client("http://127.0.0.1:1")
    desk._thread._process = os.getpid() + 1
    with pytest.raises(tf.Misuse, match="fork"):
        desk.run("r1")


def test_no_verb_of_one_client_is_missing_in_the_other() -> None:
    def verbs(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert verbs(AsyncClient) == verbs(blocking.Client)
    for name in verbs(AsyncClient) - {"close"}:
        is_each = inspect.isasyncgenfunction(getattr(AsyncClient, name))
        assert type(vars(blocking.Client)[name]) is (blocking.BlockingEach if is_each else blocking.Blocking)
        assert getattr(blocking.Client, name).__doc__ == getattr(AsyncClient, name).__doc__


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8700", "http://"])
def test_a_url_that_is_none_is_told_at_once(url: str) -> None:
    with pytest.raises(tf.Misuse, match="url"):
        tf.Client(url)


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEFAST_URL", "http://127.0.0.1:4242")
    assert "4242" in str(tf.AsyncClient()._authority._base)


# --- the tree of errors ------------------------------------------------------------------------------------


def drawn_tree() -> dict[str, str]:
    """(name -> parent) as the docstring draws it."""
    parents: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        hit = re.match(r"^    ([│├└─ ]*)([A-Z]\w+)", line)
        if hit is None:
            continue
        depth, name = len(hit.group(1)), hit.group(2)
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if stack:
            parents[name] = stack[-1][1]
        stack.append((depth, name))
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_code() -> None:
    real = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
    }
    assert drawn_tree() == real


@pytest.mark.parametrize(
    ("code", "kind"),
    [("not_found", tf.NotFound), ("moved", tf.Conflict), ("run_ended", tf.Conflict), ("invalid", tf.Misuse)],
)
def test_a_refusal_has_one_kind(code: Any, kind: type[tf.Error]) -> None:
    assert type(refusal(Refused(code, "because"))) is kind


@pytest.mark.parametrize("code", ["unauthenticated", "forbidden", "bad_token"])
def test_what_only_the_wire_knows_is_told_by_its_own_code(code: str) -> None:
    raised = refusal(Refused("invalid", "because", {"code": code, "detail": "A key is needed."}))
    assert type(raised) is tf.NotAllowed and raised.code == code and raised.why == "A key is needed."
