"""The error contract: one line, a code, what to do, and the exit code. In this process, because it is quick."""

import os
import socket
import threading
from pathlib import Path

import pytest

from tidefast.cli.errors import ExitCode, refusal
from tidefast.cli.main import COMMANDS, main
from tidefast.cli.show import safe
from tidefast.protocol.verdicts import Refused
from tidefast.server import keys
from tidefast.stores.sqlite import SqliteStore

UNREACHABLE = ("--url", "http://127.0.0.1:9")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TIDEFAST_")]:
        monkeypatch.delenv(name)


CASES: list[tuple[tuple[str, ...], int, str]] = [
    (("rusn",), 2, 'error[usage]: Unknown command "rusn". Did you mean "run"? — tidefast --help'),
    (("runs", "--limti", "5"), 2, "error[usage]: Unknown option: --limti. Did you mean --limit?"),
    (("runs", "--limit"), 2, 'error[usage]: Command "runs" parameter --limit requires an argument — tidefast runs'),
    (("runs", "--state", "gone"), 2, "error[usage]: Invalid value"),
    (("show",), 2, 'error[usage]: Command "show" parameter RUN requires an argument'),
    (("show", "../x"), 2, "error[usage]: RUN '../x' is no id — ids are 1 to 128"),
    (("show", "a\x1b[2J"), 2, "error[usage]: RUN 'a\\x1b[2J' is no id"),
    (
        ("worker", "a:b", "--lease", "soon"),
        2,
        'error[usage]: Invalid value for --lease: expected a duration like "30s"',
    ),
    (("worker", "a:b", "--lease", "100ms"), 2, "error[usage]: --lease 100ms — expected 1s to 10m"),
    (("worker", "a:b", "--max-runs", "0"), 2, "error[usage]: --max-runs 0 — expected 1 or more"),
    (("start", "a", "{", *UNREACHABLE), 2, "error[usage]: INPUT is not JSON"),
    (("start", "a", "@nowhere", *UNREACHABLE), 2, "error[usage]: INPUT @nowhere"),
    (("runs", "--url", "ftp://x"), 2, "error[usage]: --url ftp://x — expected http://HOST:PORT"),
    (("sim", "--hours", "0"), 2, "error[usage]: --hours 0 — expected more than 0"),
    (("runs",), 3, "error[store_refused]: "),
    (("audit", "--store", "nowhere.db"), 3, "error[store_refused]: "),
    (("thaw", "r-1"), 3, "error[store_refused]: "),
    (("runs", "--store", "postgresql://x"), 3, "error[config]: --store: no store is called postgresql — expected FILE"),
    (("audit", "--ledger", "nowhere.json"), 3, "error[config]: --ledger nowhere.json"),
    (("preempt", "r-1", *UNREACHABLE, "--operator-key", "no"), 3, "error[config]: --operator-key no: no such file"),
    (("runs", *UNREACHABLE), 4, "error[unreachable]: http://127.0.0.1:9: no answer"),
    (("start", "a", "1", *UNREACHABLE), 4, "error[unreachable]: http://127.0.0.1:9: no answer"),
]


@pytest.mark.parametrize(("words", "code", "told"), CASES, ids=[" ".join(words)[:40] for words, _, _ in CASES])
def test_a_bad_command_ends_with_one_line_and_its_exit_code(
    words: tuple[str, ...], code: int, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(told)
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


class Listener:
    """A server of somebody else, which writes down what it is sent."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            caller, _ = self._socket.accept()
            self.heads.append(caller.recv(65_536))
            caller.sendall(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            caller.close()


@pytest.mark.parametrize("announced", ["", "http://127.0.0.1:1", "theirs"])
def test_the_key_beside_the_store_goes_only_to_the_server_of_the_store(
    announced: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, listener = tmp_path / ".tidefast" / "store.db", Listener()
    store = SqliteStore.open(path, create=True)
    if announced:
        store.announce(listener.url if announced == "theirs" else announced)
    else:
        store.close()
    key = keys.make_operator_key(path)
    main(["start", "agent", "{}", "--url", listener.url])
    assert len(listener.heads) == 1 and b"uthorization" not in listener.heads[0]
    capsys.readouterr()
    code = main(["thaw", "r-1", "--url", listener.url])
    told = capsys.readouterr().err
    if announced == "theirs":
        assert key.encode() in listener.heads[1]
    else:
        assert (code, len(listener.heads)) == (3, 1)
        assert told.startswith("error[config]: the key beside the store is not sent to ")
        assert f"--operator-key {path.relative_to(tmp_path)}.operator-key" in told and announced in told
    main(["thaw", "r-1", "--url", listener.url, "--operator-key", f"{path}.operator-key"])
    assert key.encode() in listener.heads[-1]
    store.close()


def test_help_names_every_command_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert all(f"\n{int(code)}  " in text for code in ExitCode)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert f"tidefast {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("stale_epoch", 5),
        ("lease_lapsed", 5),
        ("lease_held", 5),
        ("moved", 5),
        ("in_doubt", 6),
        ("step_in_flight", 6),
        ("not_found", 1),
        ("run_frozen", 1),
        ("step_held", 1),
    ],
)
def test_each_refusal_has_its_exit_code(code: str, expected: int) -> None:
    error = refusal(Refused(code, "x", {}))  # type: ignore[arg-type]
    assert error.exit_code == expected
    assert error.line().startswith(f"error[{code}]: ")
    assert " — " in error.line()


def test_what_is_not_printable_is_spelled_out() -> None:
    assert safe("Grüße, 世界 🌊") == "Grüße, 世界 🌊"
    assert safe("a\x1b[31m\r\n\x00\x7f\x9b") == "a\\x1b[31m\\r\\n\\x00\\x7f\\x9b"
    assert safe("\u202e\u2028\ud800") == "\\u202e\\u2028\\ud800"
