"""`tidefast scenarios`: lists, draws and plays, and its exit code is 0 only if all hold."""

import json
from pathlib import Path

import pytest

from tidefast.cli.main import main
from tidefast.sim.scenarios import shelf

OWN = (
    "name: own\nquestion: q?\nanswer: a.\nwhy: w.\nclass: A\n\nstart r1\ngrant w1\ncomplete w1\nexpect run completed\n"
)


def test_the_list_has_each_name_with_question_answer_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenarios"]) == 0
    told = capsys.readouterr().out
    for each in shelf.load():
        assert each.name in told
        assert all(each.header[part] in told for part in ("question", "answer", "why"))
    assert main(["scenarios", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["scenarios"]) == len(shelf.load())


def test_one_is_drawn_in_lanes_with_its_question_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenarios", "show", "zombie_before_call"]) == 0
    told = capsys.readouterr().out
    assert all(lane in told for lane in ("w1", "w2", "authority", "provider"))
    assert "NO: the lease is no longer" in told
    assert "[pay: COMMITTED, epoch 2]" in told
    assert max(map(len, told.splitlines())) <= 100
    assert main(["scenarios", "show", "zombie_before_call", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenarios"][0]["holds"]


def test_playing_some_names_the_denominators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenarios", "run", "commit_no_ack", "naive_blind_retry", "--store", "sqlite", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["scenarios"], told["held"], told["distinct_orders"], told["ok"]) == (2, 2, 2, True)
    assert told["violations"]["double_apply"] == 0
    assert told["convicted"]["double_apply"] > 0
    assert main(["scenarios", "run", "commit_no_ack"]) == 0
    assert "ok: all 1 scenarios hold, no law was broken" in capsys.readouterr().out


def test_a_folder_of_ones_own_is_written_anew_then_holds_and_fails_when_it_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.txt"
    file.write_text(OWN)
    own = ["scenarios", "run", "--folder", str(tmp_path)]
    assert main(own) == 1
    assert "NOT HELD: own" in capsys.readouterr().out
    assert main([*own, "--rewrite"]) == 0
    assert main(own) == 0
    assert "  + run_completed: epoch 1" in file.read_text()
    file.write_text(file.read_text().replace("expect run completed", "expect run failed"))
    capsys.readouterr()
    assert main([*own, "--rewrite"]) == 1
    assert "expect run failed: found completed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["scenarios", "show"], 2, "nothing to show was named"),
        (["scenarios", "run", "hope"], 2, "no scenario is called hope"),
        (["scenarios", "run", "--rewrite"], 2, "--rewrite needs a folder of yours"),
        (["scenarios", "dance"], 2, "dance"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(
    arguments: list[str], exit_code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == exit_code
    assert says in capsys.readouterr().err


def test_a_folder_without_usable_files_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenarios", "--folder", str(tmp_path)]) == 2
    (tmp_path / "own.txt").write_text("name: other\n")
    assert main(["scenarios", "--folder", str(tmp_path)]) == 3
    assert "own.txt" in capsys.readouterr().err
