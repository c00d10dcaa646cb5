"""Notices: one per event that a person must hear of, with an id that its place in the log gives."""

import json

from tests.protocol.driver import KEYLESS, MAIL, NAMESPACE, RUN, Book

from tidefast.protocol.notices import Notice, notice_id, notice_of


def told(book: Book) -> list[Notice]:
    return [notice for event in book.log if (notice := notice_of(NAMESPACE, book.head, event)) is not None]


def test_held_frozen_and_failed_are_told_and_nothing_else_is() -> None:
    book = Book()
    book.granted()
    book.admit(MAIL, KEYLESS)
    book.settle("unlisted", MAIL)
    book.freeze()
    book.thaw()
    book.resolve("refused", MAIL, looked_at_ms=book.ms)
    book.ms += 60_000
    book.resolve("refused", MAIL)
    book.granted()
    book.fail(error="no stock")
    bodies = [json.loads(notice.body) for notice in told(book)]
    assert [(body["type"], body["data"]["step"], body["data"]["reason"]) for body in bodies] == [
        ("step.held", MAIL, "unlisted_answer"),
        ("run.frozen", None, "operator"),
        ("run.failed", None, "no stock"),
    ]
    assert bodies[0]["data"]["run"] == RUN and bodies[0]["timestamp"].endswith("+00:00")


def test_the_id_is_a_function_of_store_run_and_place_and_of_nothing_else() -> None:
    assert notice_id(NAMESPACE, RUN, 3) == notice_id(NAMESPACE, RUN, 3)
    others = {notice_id(NAMESPACE, RUN, 4), notice_id(b"another store!!!", RUN, 3), notice_id(NAMESPACE, RUN, 3)}
    assert len(others) == 3 and all(name.startswith("n_") and len(name) == 34 for name in others)
