"""`tidefast contracts`: the shipped contracts hold, and what is foretold is what the rules decide."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tidefast.cli.main import main
from tidefast.protocol import step as step_rules
from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import Contract
from tidefast.protocol.doubt import judge
from tidefast.protocol.ids import Epoch, StepId
from tidefast.protocol.records import Attempt, Now, Step
from tidefast.services.foresight import foresee
from tidefast.services.providers import FOLDER, all_providers
from tidefast.services.tools import ToolBook, load_contracts

NAMES = (
    "adyen",
    "amazon_ses",
    "github",
    "paypal",
    "sendgrid",
    "slack",
    "smtp",
    "square",
    "stripe_v1",
    "stripe_v2",
    "twilio",
)
DOCS = Path(__file__).resolve().parents[2] / "docs/providers.md"
PROBE = {"found": {"data.0.id": "string"}, "absent": {"data": "empty"}, "lag": "10s"}
HTTP: dict[str, Any] = {"kind": "http", "url": "https://pay.example/charges"}
KEYED = {**HTTP, "key": "header:Idempotency-Key", "key_ttl": "1h"}
VARIANTS: dict[str, dict[str, Any]] = {
    "keyless": HTTP,
    "keyless_probed": {**HTTP, "probe": {**PROBE, "url": "https://pay.example/charges"}},
    "keyed": KEYED,
    "keyed_probed": {
        **KEYED,
        "probe": {**PROBE, "url": "https://pay.example/charges?key={key}", "many": {"data.1.id": "string"}},
    },
    "keyed_late": {**KEYED, "ttl_from": "completed"},
    "read": {**HTTP, "effect": "none", "method": "GET"},
    "mail": {"kind": "smtp", "url": "smtp://mail.example:587", "from": "desk@shop.example"},
    "python": {"kind": "python"},
}


def contract_of(table: dict[str, Any]) -> Contract:
    contract, problems = parse_contract("tool", table)
    assert contract is not None, problems
    return contract


ALL = {name: contract_of(table) for name, table in VARIANTS.items()} | {
    name: load_contracts(FOLDER / f"{name}.toml")[0] for name in NAMES
}


def verdicts(contract: Contract) -> dict[str, str]:
    return {row.moment: row.verdict for row in foresee(contract)}


def in_doubt(contract: Contract) -> Step:
    """A step whose one attempt was lost at 0; its deadline is over."""
    attempt = Attempt(1, Epoch(1), "gone", 0, 0, 1, True, "lost")
    lag_ms = -1 if contract.probe is None else contract.probe.lag_ms
    return Step(
        StepId("s"), "tool", "in_doubt", contract.tool, contract.effect, "", "", "", contract.scope, contract.dedups,
        (attempt,), 1, 0, Epoch(1), None, None, "", 0, lag_ms, contract.window_ms, False, 0, 0,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(ALL))
def test_what_is_foretold_of_a_doubt_is_what_judge_says(name: str) -> None:
    contract, told = ALL[name], verdicts(ALL[name])
    step = in_doubt(contract)
    early, late = Now(2, 2), Now(contract.key_ttl_ms + 2, contract.key_ttl_ms + 2)
    expected = judge(step, contract, contract, early)[0]
    for moment in (
        "gateway dies with the intent written, nothing sent",
        "gateway dies after sending, no answer yet",
        "gateway dies with an answer that it hasn't recorded",
        "no answer by the deadline",
    ):
        assert told[moment] == expected, moment
    if contract.dedups:
        assert told["in doubt, and the key's time is over"] == judge(step, contract, contract, late)[0] != "replay"
    assert told["in doubt, and the tool's contract is gone"] == judge(step, contract, None, early)[0] == "hold"
    other = contract._replace(key_scope="another")
    assert told["in doubt, and the account has changed"] == judge(step, contract, other, early)[0] == "hold"


def test_what_is_foretold_follows_the_rules_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rules, "judge", lambda *_: ("replay", "a rule that forgets to ask for a key"))
    assert verdicts(ALL["slack"])["gateway dies after sending, no answer yet"] == "replay"


@pytest.mark.parametrize("name", sorted(ALL))
def test_nothing_is_sent_twice_where_the_books_know_and_a_stale_worker_sends_nothing(name: str) -> None:
    told = verdicts(ALL[name])
    assert (
        told["worker dies before the intent is written"] == told["gateway dies before the intent is written"] == "send"
    )
    assert told["the provider can't be reached (no connection)"] == "send"
    assert told["worker dies while the gateway calls"] == "answer"
    assert told["either dies with the answer recorded, no checkpoint yet"] == "answer"
    assert told["either dies after the checkpoint"] == "answer"
    assert told["worker sleeps past its lease, wakes and asks"] == "stale_epoch"


def test_each_answer_of_a_probe_and_of_a_provider_is_foretold() -> None:
    told = verdicts(ALL["keyed_probed"])
    assert told["asked, it says: it happened"] == "answer"
    assert told["asked, it says: it did not happen"] == "send_again"
    assert told["asked, its answer is unclear 8 times"] == "hold"
    assert told["asked, it says: more than one time"] == "frozen"
    told = verdicts(ALL["stripe_v1"])
    assert told["a refusal that is listed (402)"] == "rejected"
    assert told["a refusal that isn't listed (such as 400)"] == "hold"
    assert told["a success that doesn't look as declared"] == "hold"
    assert told["the key is known there with another body"] == "frozen"
    assert verdicts(ALL["mail"])["the mail server refuses (5xx)"] == "rejected"
    assert verdicts(ALL["python"])["the function raises anything else"] == "hold"
    retried = ALL["stripe_v1"]._replace(stored_failures=False, retries=2)
    assert verdicts(retried)["a refusal that is listed (402), first of 3"] == "send_again"


def test_a_replay_that_must_wait_for_the_older_request_says_so() -> None:
    row = next(row for row in foresee(ALL["keyed_late"]) if row.moment == "gateway dies after sending, no answer yet")
    assert row.told.startswith("once no older request can land: ")


def test_every_shipped_contract_can_be_used_and_says_where_it_is_from_and_when_it_was_read() -> None:
    assert tuple(each.name for each in all_providers()) == NAMES
    for each in all_providers():
        ToolBook(load_contracts(FOLDER / f"{each.name}.toml"), each.name, needs_credentials=False)
        comments = re.findall(r"^# (\w+): ", each.text, re.MULTILINE)
        assert set(comments) <= set(each.said), each.name
        assert all(source.startswith("https://") for source in each.said["source"]) and each.said["source"]
        assert date.fromisoformat(each.said["read"][0]) and each.said["stated"] and each.said["states"]
        assert each.said["unknown"], f"{each.name}: nobody's docs say everything"


def test_the_page_of_providers_is_what_the_files_say() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert tuple(rows) == NAMES
    for each in all_providers():
        key, _, in_doubt_is, read = (cell.strip() for cell in rows[each.name].split(" | ")[:4])
        assert read == each.said["read"][0]
        assert (in_doubt_is == "replayed") == ALL[each.name].dedups, each.name
        assert ALL[each.name].key.partition(":")[2] in key or each.name == "sendgrid", each.name


@pytest.mark.parametrize("name", ["sendgrid", "twilio", "slack", "github", "smtp", "amazon_ses", "square"])
def test_a_provider_that_states_no_time_for_keys_has_its_doubts_held(name: str) -> None:
    assert verdicts(ALL[name])["gateway dies after sending, no answer yet"] == "hold"


def test_a_shown_contract_is_a_tools_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contracts"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES)
    assert main(["contracts", "list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["contracts"]] == list(NAMES)
    for name in NAMES:
        assert main(["contracts", "show", name]) == 0
        file = tmp_path / "tools.toml"
        file.write_text(capsys.readouterr().out, encoding="utf-8")
        assert load_contracts(file) == load_contracts(FOLDER / f"{name}.toml")
        assert main(["contracts", "explain", str(file), "--json"]) == 0
        [told] = json.loads(capsys.readouterr().out)["tools"]
        assert {row["moment"]: row["verdict"] for row in told["rows"]} == verdicts(ALL[name])
        assert main(["contracts", "explain", str(file)]) == 0
        assert all(row["told"] in capsys.readouterr().out for row in told["rows"][:1])


def test_a_bad_file_has_the_problems_told_that_serve_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tools.toml"
    file.write_text('[tools.pay]\nkind = "http"\nurl = "ftp://x"\nkye = "none"\n[other]\n', encoding="utf-8")
    assert main(["contracts", "explain", str(file)]) == 3
    told = capsys.readouterr()
    assert main(["serve", "--store", str(tmp_path / "s.db"), "--tools", str(file), "--port", "0"]) == 3
    assert told.out == "" and told.err == capsys.readouterr().err
    assert told.err.count("error[config]: ") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show",), "error[usage]: contracts show needs a NAME"),
        (("explain",), "error[usage]: contracts explain needs a FILE"),
        (("show", "strip"), "error[not_found]: no contract is called 'strip' — tidefast contracts lists them"),
        (("list", "slack"), "error[usage]: contracts list takes no 'slack' — tidefast contracts show slack"),
    ],
)
def test_a_wrong_call_says_the_right_one(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contracts", *words]) == 2
    assert capsys.readouterr().err.startswith(said)
