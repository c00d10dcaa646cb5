"""The main job, for real: processes, kills, books, exit code. And a provider that lies is found out."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidefast.demo import desk
from tidefast.demo.agent import Ticket, decide, letter, note, refusal
from tidefast.demo.house import CLI, HouseError
from tidefast.sim.injector import PLACES, WORDS

SOURCE = Path(desk.__file__).resolve().parents[2]
LIMIT_S = 80
TICKETS = 8
# A card provider that enters every refund twice, as one that forgets keys would.
DOUBLING_CARD = """
from tidefast.demo.providers import card
once = card.refund
def twice(connection, wanted):
    first = once(connection, wanted)
    connection.execute("INSERT INTO effects (refund_id, key, order_id, cents, currency, at_ms)"
        " SELECT refund_id || 'b', key, order_id, cents, currency, at_ms FROM effects WHERE key = ?", (wanted.key,))
    return first
card.refund = twice
card.main()
"""
# A mail service that says yes and loses every mail.
LOSING_MAIL = """
from tidefast.demo.providers import mail
mail.add_mail = lambda connection, wanted: "ml_lost"
mail.main()
"""
RUN = "import sys; from tidefast.demo import desk; sys.exit(desk.main(sys.argv[1:], {providers}))"


def command(directory: Path, *options: str, card: str = "", mail: str = "") -> list[str]:
    providers = {
        name: (sys.executable, "-c", text) if text else desk.PROVIDERS[name]
        for name, text in (("card", card), ("mail", mail))
    }
    code = RUN.replace("{providers}", repr(providers))
    return [sys.executable, "-c", code, "--dir", str(directory / "desk"), "--json", *options]


def run(directory: Path, *options: str, card: str = "", mail: str = "") -> tuple[int, dict[str, Any]]:
    ended = subprocess.run(
        command(directory, *options, card=card, mail=mail),
        env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))}


@pytest.mark.rig
def test_under_fire_every_ticket_ends_and_the_books_balance(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--seed", "5", "--tickets", str(TICKETS))
    assert (code, report["problems"], report["ok"]) == (0, [], True)
    assert not any(report["violations"].values())
    assert len(report["tickets"]) == report["runs"] == TICKETS
    assert report["tickets"]["t-008"] in ("refused: this order was refunded before", "held: mail")
    assert report["mutating_steps"] == 2 * TICKETS
    assert report["preempted_steps"] * 3 >= report["mutating_steps"]
    assert report["preemptions"] > 0 and report["interleavings"] > 0 and report["faults"]
    assert set(report["faults"]) <= {f"{word}, {place}" for word in WORDS.values() for place in PLACES.values()}
    held = sum(outcome == "held: mail" for outcome in report["tickets"].values())
    card, mail = report["books"]["card"], report["books"]["mail"]
    assert (card["applied"], card["rejected"], card["open"]) == (TICKETS - 1, 1, 0)
    assert card["applied"] == card["committed"]
    assert mail["committed"] + mail["open"] == TICKETS and mail["open"] == held == report["held"]
    assert mail["committed"] <= mail["applied"] <= TICKETS
    assert len(report["settle"]) == held
    for settle in report["settle"]:
        tidefast, *arguments = shlex.split(settle)
        assert tidefast == "tidefast"
        subprocess.run([*CLI, *arguments], env=environment(), check=True, timeout=LIMIT_S)


def test_a_doubled_refund_and_a_lost_mail_are_found_out(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--no-faults", "--tickets", "3", card=DOUBLING_CARD, mail=LOSING_MAIL)
    assert code == 1 and not report["ok"]
    assert report["books"]["card"]["doubles"] == 3
    assert report["books"]["mail"]["missing"] == 3
    assert report["violations"]["double_apply"] == 6
    assert "the ledger of the card provider doesn't fit the log" in report["problems"]


def test_an_interrupt_stops_every_process(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        command(tmp_path, "--tickets", "3"),
        env={**environment(), "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    store = tmp_path / "desk" / "store.db.lock"
    while not store.exists():
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (desk.INTERRUPTED, "")
    assert err == "interrupted; every process of the desk has been stopped\n"
    assert mentioning(str(tmp_path)) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_watchdog_fails_loudly_and_leaves_nothing_behind(tmp_path: Path) -> None:
    options = desk.Options(seed=1, tickets=3, is_json=True, limit_s=0.7, directory=tmp_path / "desk")
    with pytest.raises(desk.Stuck, match=r"not done after 0\.7 s\. Processes: .*\. Runs not at rest: "):
        asyncio.run(desk.run_desk(options))
    assert mentioning(str(tmp_path)) == []


def mentioning(text: str) -> list[str]:
    """The command lines of running processes in which a text stands."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            found += [line] if text in line else []
    return found


# --- without processes ----------------------------------------------------------------------------------------------

TICKET = Ticket("t-1", "ord-1", "Jürgen", "j@example.org", "broken", 1250, "EUR")


def test_deciding_is_a_function_of_the_ticket() -> None:
    assert decide(TICKET) == {"order": "ord-1", "currency": "EUR", "cents": 1250}
    assert "cents" not in decide(Ticket("t-1", "ord-1", "J", "j@example.org", "broken", None, "EUR"))


def test_the_customer_hears_the_amount_or_the_reason() -> None:
    refunded = letter(TICKET, {"cents": 1250, "currency": "EUR"}, "")
    assert "12.50 EUR" in refunded["text"] and refunded["to"] == "j@example.org"
    reason = refusal({"body": {"error": {"code": "card_declined"}}})
    assert reason in letter(TICKET, None, reason)["text"]
    assert reason == "the bank refuses refunds to this card"
    assert refusal(None) == "unknown" and refusal({"body": {"error": {"code": "new"}}}) == "new"
    assert "refunded" in note(TICKET, "refunded", "the lamp was broken")


def test_a_seed_plans_the_same_again() -> None:
    options = desk.Options(seed=4)
    assert desk.plan_for(options, 40) == desk.plan_for(options, 40)
    assert desk.plan_for(options, 40) != desk.plan_for(desk.Options(seed=5), 40)
    assert not desk.plan_for(desk.Options(seed=4, has_faults=False), 40).menus


def test_a_directory_of_somebody_else_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me")
    with pytest.raises(HouseError, match="not empty"):
        desk.fresh(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "keep me"


def test_a_former_desk_makes_room(tmp_path: Path) -> None:
    desk.fresh(tmp_path / "desk")
    (tmp_path / "desk" / "store.db").write_text("old")
    desk.fresh(tmp_path / "desk")
    assert [file.name for file in (tmp_path / "desk").iterdir()] == [desk.MARK]


def test_a_bad_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        desk.main(["--tickets", "0"])
    assert "--tickets: expected 1 or more" in capsys.readouterr().err
