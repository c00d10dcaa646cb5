"""Which answers of a model are whole, and what a stream spells."""

import json
from typing import Any

import pytest

from tidefast.protocol.chat import (
    EVENT_BYTES_MAX,
    ChatCall,
    Fold,
    ToolCall,
    Usage,
    read_call,
    tool_calls,
    unfinished,
    usage_of,
)

HELLO = [{"role": "user", "content": "hello"}]


def event(**chunk: Any) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def piece(finish: str | None = None, index: int = 0, **delta: Any) -> bytes:
    return event(id="c-1", object="chat.completion.chunk", model="m", choices=[
        {"index": index, "delta": delta, "finish_reason": finish}
    ])  # fmt: skip


USAGE = event(id="c-1", choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"
CALL = [
    piece(role="assistant", content=None, tool_calls=[
        {"index": 0, "id": "call_x", "type": "function", "function": {"name": "refund", "arguments": ""}}
    ]),
    piece(tool_calls=[{"index": 0, "function": {"arguments": '{"cents"'}}]),
    piece(tool_calls=[{"index": 1, "id": "call_y", "function": {"name": "mail", "arguments": "{}"}}]),
    piece(tool_calls=[{"index": 0, "function": {"arguments": ": 5}"}}]),
    piece("tool_calls"),
    USAGE,
    DONE,
]  # fmt: skip


def folded(events: list[bytes], size: int = 10**6) -> Fold:
    fold, data = Fold(), b"".join(events)
    for start in range(0, len(data), size):
        fold.feed(data[start : start + size])
    return fold


@pytest.mark.parametrize(
    "body,found",
    [
        ({"model": "m", "messages": HELLO}, ChatCall("m", False, False, None)),
        ({"model": "m", "messages": HELLO, "stream": True, "max_tokens": 9}, ChatCall("m", True, False, 9)),
        ({"model": "m", "messages": HELLO, "max_completion_tokens": 9, "n": 2}, ChatCall("m", False, False, 18)),
        (
            {"model": "m", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}},
            ChatCall("m", True, True, None),
        ),
    ],
)
def test_of_a_request_only_what_is_needed_is_read(body: Any, found: ChatCall) -> None:
    assert read_call(body) == found


@pytest.mark.parametrize(
    "body,names",
    [
        ([], "JSON object"),
        ({"messages": HELLO}, "`model`"),
        ({"model": "", "messages": HELLO}, "`model`"),
        ({"model": "a\nb", "messages": HELLO}, "`model`"),
        ({"model": "m"}, "`messages`"),
        ({"model": "m", "messages": []}, "`messages`"),
        ({"model": "m", "messages": HELLO, "stream": 1}, "`stream`"),
        ({"model": "m", "messages": HELLO, "max_tokens": 0}, "`max_tokens`"),
        ({"model": "m", "messages": HELLO, "max_tokens": True}, "`max_tokens`"),
        ({"model": "m", "messages": HELLO, "n": "2"}, "`n`"),
    ],
)
def test_a_request_that_is_none_is_named(body: Any, names: str) -> None:
    told = read_call(body)
    assert isinstance(told, str)
    assert names in told


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_a_stream_spells_the_same_answer_however_it_is_cut_into_pieces(size: int) -> None:
    fold = folded(CALL, size)
    assert fold.unfinished() == ""
    assert fold.usage == Usage(3, 4)
    assert tool_calls(fold.body()) == (
        ToolCall(0, "call_x", "refund", '{"cents": 5}'),
        ToolCall(1, "call_y", "mail", "{}"),
    )
    assert fold.body()["object"] == "chat.completion"


def test_the_bytes_of_each_event_come_back_unchanged_and_the_end_is_marked() -> None:
    fold = Fold()
    events = fold.feed(b"".join(CALL))
    assert [e.raw for e in events] == CALL
    assert [e.is_end for e in events] == [False, False, False, False, True, True, True]
    assert [e.is_usage for e in events] == [False, False, False, False, False, True, False]


@pytest.mark.parametrize("kept", range(len(CALL)))
def test_a_stream_cut_after_any_event_is_no_answer(kept: int) -> None:
    assert folded(CALL[:kept]).unfinished() == "stream_cut"


def test_a_stream_that_ends_politely_without_a_finish_is_no_answer() -> None:
    assert folded([piece(content="half"), DONE]).unfinished() == "answer_incomplete"
    assert folded([DONE]).unfinished() == "answer_incomplete"


def test_texts_are_continued_and_several_choices_kept_apart() -> None:
    fold = folded([
        piece(role="assistant", content="a", reasoning={"text": "x"}),
        piece(index=1, role="assistant", content="b"),
        piece(content="c", reasoning={"text": "y"}, extra=1, parts=["p"]),
        piece(extra=2, parts=["q"]),
        piece("stop"),
        piece("length", index=1),
        DONE,
    ])  # fmt: skip
    first, second = fold.body()["choices"]
    assert first["message"] == {
        "role": "assistant", "content": "ac", "reasoning": {"text": "xy"}, "extra": 2, "parts": ["p", "q"]
    }  # fmt: skip
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
    assert fold.unfinished() == ""


@pytest.mark.parametrize(
    "bad,why",
    [
        (event(error={"message": "busy"}), "stream_error"),
        (event(hello=1), "stream_unreadable"),
        (b"data: {cut\n\n", "stream_unreadable"),
        (b"data: [1]\n\n", "stream_unreadable"),
        (event(choices=["x"]), "stream_unreadable"),
        (event(choices=[{"index": "x"}]), "stream_unreadable"),
        (b"data: " + b"x" * (2 * EVENT_BYTES_MAX), "event_too_large"),
    ],
)
def test_a_stream_with_a_fault_is_no_answer_whatever_follows(bad: bytes, why: str) -> None:
    assert folded([CALL[0], bad, *CALL[1:]], 65_536).unfinished() == why


def test_what_comes_after_the_end_and_comments_between_change_nothing() -> None:
    fold = folded([b": hold on\n\n", *CALL, piece(content="late")])
    assert fold.unfinished() == ""
    assert "late" not in json.dumps(fold.body())
    assert folded([event(choices=[{"index": 0, "finish_reason": "stop"}]), DONE]).unfinished() == ""


@pytest.mark.parametrize(
    "body,why",
    [
        (None, "answer_unreadable"),
        ({}, "answer_incomplete"),
        ({"choices": []}, "answer_incomplete"),
        ({"choices": [1]}, "answer_incomplete"),
        ({"choices": [{"finish_reason": "stop"}]}, "answer_incomplete"),
        ({"choices": [{"message": {}, "finish_reason": None}]}, "answer_incomplete"),
        ({"choices": [{"message": {}, "finish_reason": "stop"}]}, ""),
    ],
)
def test_an_answer_in_one_piece_is_whole_with_a_finish_in_each_choice(body: Any, why: str) -> None:
    assert unfinished(body) == why


def test_a_usage_that_can_not_be_read_is_none() -> None:
    assert usage_of({"usage": {"prompt_tokens": 2}}) == Usage(2, 0)
    for body in (None, {}, {"usage": 1}, {"usage": {"prompt_tokens": True}}, {"usage": {"prompt_tokens": -1}}):
        assert usage_of(body) is None


def test_a_malformed_call_has_no_name_and_keeps_its_place() -> None:
    calls = [1, {"id": 3, "function": {"name": 4, "arguments": 5}}, {"id": "c", "function": {"name": "f"}}]
    body = {"choices": [{"message": {"tool_calls": calls}}]}
    assert tool_calls(body) == (ToolCall(0, "", "", ""), ToolCall(1, "", "", ""), ToolCall(2, "c", "f", ""))
    for none in (None, {}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": {"tool_calls": None}}]}):
        assert tool_calls(none) == ()
