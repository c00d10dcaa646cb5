"""What a hostile server, provider or colleague says can't rewrite a terminal, and printed commands can be pasted."""

import http.server
import json
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import running, tidefast

from tidefast.cli import looking, show
from tidefast.cli.main import INTERRUPTED, main

# A title, a colour, a clear screen, a C1 control, a right-to-left override, an isolate, a line separator, a tab, a NUL.
NASTY = "a\x1b]0;owned\x07b\x1b[2Jc\x9bd\u202ee\u2066f\u2028g\th\x00[red]i[/red]\r\nj"
ATTEMPT = {"number": 1, "state": "doubted", "epoch": 1, "owner": NASTY, "deadline_ms": 1, "admitted_ms": 1}
RUN = {
    "run_id": "r-1", "agent": NASTY, "agent_version": NASTY, "state": NASTY, "epoch": 1, "is_live": True,
    "holder": NASTY, "expires_at_ms": 1, "checkpoint": 1, "seq": 1, "digest": NASTY, "created_ms": 1, "frozen": NASTY,
    "held": [NASTY], "unsettled": [NASTY], "input": NASTY, "result": NASTY,
}  # fmt: skip
EVENT = {"seq": 1, "at_ms": 1, "kind": NASTY, "epoch": 1, "step_id": NASTY, "data": {"note": NASTY}, "digest": NASTY}
PROBLEM = {"status": 404, "code": "not_found", "reason": NASTY, "title": NASTY, "detail": NASTY, "kept": NASTY,
           "next": NASTY, "facts": {"run": NASTY, "holder": NASTY}}  # fmt: skip


@contextmanager
def hostile(answer: Any, status: int = 200) -> Iterator[str]:
    """A server that says this to everything."""

    class Says(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Says)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEFAST_URL", raising=False)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("words", [("runs",), ("runs", "--json"), ("log", "r-1"), ("show", "r-1"), ("held",)])
@pytest.mark.parametrize(
    ("answer", "status"), [({"runs": [RUN], "events": [EVENT], "steps": [], **RUN}, 200), (PROBLEM, 404), (NASTY, 500)]
)
def test_nothing_that_a_server_says_reaches_the_terminal_as_a_command(
    words: tuple[str, ...],
    answer: Any,
    status: int,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(show, "is_for_people", lambda: is_terminal)
    with hostile(answer, status) as url:
        main([*words, "--url", url])
    printed = capsys.readouterr()
    ours = re.sub(r"\x1b\[[0-9;]*m", "", printed.out)  # colours that this program chose itself
    assert all(mark.isprintable() or mark == "\n" for mark in ours + printed.err), ours + printed.err
    assert "\x1b[2J" not in printed.out and "\x1b]" not in printed.out
    assert "Traceback" not in printed.err


def test_commands_printed_beside_a_live_server_name_it_and_can_be_pasted(home: Path) -> None:
    """The file is owned: `held`, which reads beside the owner, prints commands that ask the owner."""
    held = tidefast("run", "shop:app", "desk", '{"order":"o-1","to":"lost"}', "--run-id", "r-1", cwd=home)
    assert held.returncode == 7 and "--url" not in held.stdout
    with running("serve", "--app", "shop:app", "--port", "0", cwd=home) as server:
        shown = tidefast("held", cwd=home)
        lines = [line.partition("#")[0] for line in shown.stdout.splitlines() if "tidefast resolve" in line]
        assert len(lines) == 4 and all(f"--url {server.said['url']}" in line for line in lines)
        applied = next(line for line in lines if " applied " in line)
        pasted = tidefast(*shlex.split(applied)[1:], cwd=home)
        assert pasted.returncode == 0, pasted.stderr
        assert tidefast("held", cwd=home).stdout == "no step is held\n"


def test_an_interrupted_command_says_so_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(looking, "held", interrupted)
    assert main(["held"]) == INTERRUPTED == 130


def test_a_verb_whose_answer_is_lost_ends_with_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with hostile(PROBLEM | {"code": "store_unavailable"}, 503) as url:
        assert main(["thaw", "r-1", "--url", url]) == 6
    assert capsys.readouterr().err.startswith("error[unknown]: whether it was done is unknown")
