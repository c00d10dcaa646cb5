"""The example of a trip: booked whole, or given back newest first, whatever dies in between."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from tests.cli.processes import kill_at, tidefast

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trip" / "app.py"
FAILS = ("run", "app:app", "trip", '{"to":"Lisbon","car":false}', "--run-id", "t-2")


@pytest.fixture
def trip(home: Path) -> Path:
    shutil.copy(EXAMPLE, home / "app.py")
    return home


def left(home: Path, what: str) -> int:
    return len(list(home.glob(f"{what}-*.txt")))


def undone(home: Path) -> list[str]:
    log = json.loads(tidefast("log", "t-2", "--json", cwd=home).stdout)["events"]
    return [event["step_id"] for event in log if event["kind"] == "step_compensated"]


def test_a_trip_that_can_be_had_is_booked_and_stays(trip: Path) -> None:
    done = tidefast("run", "app:app", "trip", '{"to":"Lisbon","car":true}', cwd=trip)
    assert done.returncode == 0, done.stderr
    assert (left(trip, "booked"), left(trip, "given-back")) == (2, 0)


def test_a_trip_that_fails_is_given_back_newest_first(trip: Path) -> None:
    failed = tidefast(*FAILS, cwd=trip)
    assert failed.returncode == 1 and "no car is left" in failed.stdout
    assert (left(trip, "booked"), left(trip, "given-back")) == (0, 2)
    assert undone(trip) == ["hotel", "flight"]
    assert tidefast("audit", cwd=trip).returncode == 0


def test_killed_while_it_gives_back_it_goes_on_and_gives_back_each_booking_once(trip: Path) -> None:
    for point in ("gateway.after_intent", "gateway.after_send"):
        assert kill_at(point, trip / "p", *FAILS, cwd=trip) == -signal.SIGKILL
        (trip / "p").unlink(missing_ok=True)
    failed = tidefast(*FAILS, cwd=trip)
    assert failed.returncode == 1, failed.stderr
    assert (left(trip, "booked"), left(trip, "given-back")) == (0, 2)
    assert undone(trip) == ["hotel", "flight"]


def test_a_trip_that_is_cancelled_says_what_it_gives_back_and_does(trip: Path) -> None:
    assert kill_at("sdk.after_apply", trip / "p", *FAILS, cwd=trip) == -signal.SIGKILL
    cancelled = tidefast("cancel", "t-2", "--note", "the customer called", cwd=trip)
    assert cancelled.returncode == 0 and "to undo, in this order: flight" in cancelled.stdout, cancelled.stderr
    again = tidefast("cancel", "t-2", "--note", "twice", cwd=trip)
    assert again.stdout.startswith("nothing to do: run t-2 is cancelling")
    ended = tidefast(*FAILS, cwd=trip)
    assert ended.returncode == 1 and ended.stdout.startswith("run t-2: cancelled"), ended.stderr
    assert (left(trip, "booked"), left(trip, "given-back")) == (0, 1)


def test_a_run_of_another_version_is_not_driven(trip: Path) -> None:
    assert kill_at("sdk.after_apply", trip / "p", *FAILS, cwd=trip) == -signal.SIGKILL
    source = (trip / "app.py").read_text()
    (trip / "app.py").write_text(source.replace("@app.agent\n", '@app.agent(version="2")\n'))
    refused = tidefast(*FAILS, cwd=trip)
    assert refused.returncode == 1 and "belongs to version 1 of trip; this app drives 2" in refused.stderr
    (trip / "app.py").write_text(source.replace("@app.agent\n", '@app.agent(version="2", accepts=["1"])\n'))
    assert "no car is left" in tidefast(*FAILS, cwd=trip).stdout


def test_a_paused_run_says_how_it_goes_on_and_has_an_exit_code_of_its_own(trip: Path) -> None:
    assert kill_at("sdk.after_apply", trip / "p", *FAILS, cwd=trip) == -signal.SIGKILL
    assert tidefast("pause", "t-2", "--note", "wait", cwd=trip).returncode == 0
    waits = tidefast(*FAILS, cwd=trip)
    assert waits.returncode == 7 and "tidefast resume t-2" in waits.stdout
    assert tidefast("resume", "t-2", cwd=trip).returncode == 0
    assert tidefast("freeze", "t-2", "--note", "let me look", cwd=trip).returncode == 0
    shown = tidefast("show", "t-2", cwd=trip).stdout
    assert "frozen by an operator: operator, let me look" in shown and "tidefast thaw t-2" in shown
