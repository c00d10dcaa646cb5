"""Ledgers are read strictly: what is no ledger is refused with its place, never half of it taken."""

import pytest

from tidefast.sim.history import Ledger, LedgerError, plain_key, read_ledger

KEY = "00112233445566778899aabbccddeeff"


def test_rows_of_one_effect_are_added_up() -> None:
    ledger = read_ledger(
        f'[{{"key":"{KEY}","count":2}},{{"key":"{KEY}","count":-1}},'
        '{"run":"r","step":"mail","count":1},{"run":"r","step":"mail","count":1}]'
    )
    assert ledger == Ledger({KEY: 1}, {("r", "mail"): 2}, None)  # type: ignore[dict-item]


def test_keys_may_be_spelled_as_uuids() -> None:
    assert plain_key("00112233-4455-6677-8899-AABBCCDDEEFF") == KEY
    assert plain_key("a-b") == "a-b"
    assert read_ledger('[{"key":"00112233-4455-6677-8899-aabbccddeeff","count":1}]').keys == {KEY: 1}


def test_a_ledger_may_name_the_tools_it_speaks_for() -> None:
    assert read_ledger('{"tools":["charge"],"effects":[]}').tools == {"charge"}
    assert read_ledger("[]").tools is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("7", "list of effects"),
        ('{"effects":[]}', "exactly"),
        ('{"tools":"charge","effects":[]}', "tools"),
        ('{"tools":[1],"effects":[]}', "tools"),
        ('{"tools":[],"effects":{}}', "list of effects"),
        ("[7]", "effect 1"),
        ('[{"key":"a","count":1},{"key":"a"}]', "effect 2"),
        ('[{"key":"a","count":1,"run":"r"}]', "effect 1"),
        ('[{"key":"a","count":true}]', "integer"),
        ('[{"key":"a","count":1.0}]', "integer"),
        ('[{"key":1,"count":1}]', "texts"),
        ('[{"run":"r","step":null,"count":1}]', "texts"),
    ],
)
def test_what_is_no_ledger_is_refused(text: str, word: str) -> None:
    with pytest.raises(LedgerError, match=word):
        read_ledger(text)
