"""`every_point` clears good apps, convicts bad ones by name, and states its denominator."""

import pytest
from tests.testing import shop

from tidefast.testing import Provider, SweepReport, Unlawful, every_point

TICKET = {"order": "o-7"}
HTTP = {"kind": "http", "key": "header:Idempotency-Key", "key_ttl": "24h", "refusals": [402]}


def laws(report: SweepReport) -> set[str]:
    return {violation.law for result, _ in report.findings for violation in result.violations}


@pytest.mark.parametrize("agent", ["buy", "regret"])
def test_a_good_tool_and_agent_are_cleared_at_every_point(agent: str) -> None:
    bank = Provider()
    report = every_point(shop.good(bank), agent, TICKET, provider=bank).assert_ok()
    assert report.held == 0 and not report.findings
    assert all(result.state == "completed" for result in report.results)
    assert all(result.effects == {"pay": 1 if agent == "buy" else 0} for result in report.results)


def test_the_denominator_is_steps_times_points_times_kinds() -> None:
    bank = Provider()
    report = every_point(shop.good(bank), "buy", TICKET, provider=bank)
    places = set(report.first.places)
    assert len(places) == 8 and len(report.results) == 4 * 8 + 2 + 2
    assert all(len(result.struck) == 1 for result in report.results)
    assert {fault for result in report.results for fault in result.struck} == {
        fault for result in report.results for fault in result.faults
    }


def test_a_tool_with_a_new_key_for_each_try_is_convicted() -> None:
    bank = Provider()
    report = every_point(shop.new_key_each_time(bank), "buy", TICKET, provider=bank)
    assert laws(report) == {"double_apply"}
    with pytest.raises(Unlawful, match=r"step pay.*count should be 1, but it is 2"):
        report.assert_ok()


def test_a_mail_outside_run_tool_is_convicted_without_any_fault() -> None:
    bank = Provider()
    report = every_point(shop.mails_outside(bank), "chatty", TICKET, provider=bank)
    assert laws(report) == {"unlogged_effect"} and not report.results
    with pytest.raises(Unlawful, match=r"mail for no step: it was called outside run\.tool"):
        report.assert_ok()


def test_a_tool_that_calls_a_doubt_a_refusal_is_convicted() -> None:
    bank = Provider()
    report = every_point(shop.calls_a_failure_a_refusal(bank), "buy", TICKET, provider=bank)
    assert "double_apply" in laws(report), str(report)


def test_a_contract_that_promises_more_than_the_provider_keeps_is_convicted() -> None:
    bank = Provider(knows_keys=False)
    report = every_point(shop.good(bank), "buy", TICKET, provider=bank)
    assert laws(report) == {"double_apply"}


def test_an_agent_whose_arguments_depend_on_chance_is_convicted() -> None:
    bank = Provider()
    report = every_point(shop.depends_on_chance(bank), "dice", TICKET, provider=bank)
    assert {result.state for result, _ in report.findings} == {"frozen"}
    assert "frozen (drift)" in str(report)


def test_a_tool_that_promises_nothing_is_held_and_never_doubled() -> None:
    bank = Provider()
    report = every_point(shop.good(bank), "tell", "anna", provider=bank).assert_ok()
    assert report.held == 4
    assert all(result.held == {} or list(result.held) == ["tell"] for result in report.results)
    assert all(result.effects.get("tell", 0) <= 1 for result in report.results)


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_an_http_contract_is_driven_over_a_real_socket(store: str) -> None:
    bank = Provider()
    tools = {"charge": {**HTTP, "url": bank.url("charge")}}
    app = shop.good(bank)
    app.tools.clear()
    kinds = ("kill_worker", "late_answer", "kill_authority", "commit_and_hang", "commit_and_fail")
    report = every_point(app, "buy", TICKET, provider=bank, tools=tools, kinds=kinds, store=store)  # type: ignore[arg-type]
    report.assert_ok()
    assert len(report.results) == 2 * 8 + 2 + 2 and bank.tools == {"charge"}


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault is called 'meteor'"):
        every_point(shop.good(Provider()), "buy", TICKET, kinds=["meteor"])  # type: ignore[list-item]
