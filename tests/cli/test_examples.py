"""Every example of every `--help` is run, as it is printed, and does what it says."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.cli.processes import COMMAND, ENVIRONMENT

from tidefast.cli.examples import EXAMPLES
from tidefast.cli.main import COMMANDS, main
from tidefast.protocol.ids import RunId, StepId, WorkspaceId
from tidefast.protocol.records import WorkspaceHead
from tidefast.protocol.workspace import Entry
from tidefast.stores.base import Batch
from tidefast.stores.sqlite import SqliteStore
from tidefast.stores.sqlite_blobs import SqliteBlobs
from tidefast.stores.workspaces import LoggedWrite, StoredWrite

APP = """
import asyncio
from pathlib import Path

import tidefast as tf

app = tf.App()


@app.tool(key_ttl="1h", timeout="5s")
def charge(order: str, key: str) -> dict:
    with open("charged", "a") as file:
        file.write(key + "\\n")
    return {"order": order}


@app.tool(timeout="1s")
async def mail(to: str) -> dict:
    raise RuntimeError("who knows")


@app.agent
async def refund(run: tf.Run, ticket: dict) -> dict:
    while ticket["order"] == "o-2" and Path("wait").exists():
        await asyncio.sleep(0.01)
    paid = await run.tool("pay", "charge", order=ticket["order"])
    await run.checkpoint({"stage": "paid"})
    if "to" in ticket:
        await run.tool("mail", "mail", to=ticket["to"])
    return paid


@app.agent
async def drifts(run: tf.Run, input: object) -> None:
    await run.tool("pay", "charge", order=os.urandom(8).hex())
    raise RuntimeError("the next pass asks for another order")
"""
TOOLS = '[tools.look]\nkind = "http"\neffect = "none"\nurl = "http://127.0.0.1:9/x"\n'
# In this order each finds what the ones before left; serve and worker run beside those that need them.
ALONE = (
    *(
        "run",
        "runs",
        "show",
        "log",
        "held",
        "resolve",
        "thaw",
        "pause",
        "resume",
        "freeze",
        "cancel",
        "anchor",
        "export",
        "verify",
        "audit",
        "budgets",
    ),
    *(
        "backup",
        "restore",
        "recover",
        "adopt",
        "keys",
        "doctor",
        "contracts",
        "completion",
        "scenarios",
        "workspaces",
        "workspace",
    ),
)
SERVED = ("serve", "start", "worker", "preempt")
ELSEWHERE = {"sandbox"}  # needs a workspace's server beside it: docs/sandbox.md shows it, its own tests run it
LONG = ("demo", "check", "sim")


class Shell:
    """Somebody in a directory with an app, a ticket and a file of contracts."""

    def __init__(self, home: Path) -> None:
        self.home, self.env = home, {**ENVIRONMENT}
        self.services: list[subprocess.Popen[str]] = []
        (home / "app.py").write_text(APP)
        (home / "tools.toml").write_text(TOOLS)
        (home / "ticket.json").write_text('{"order":"o-7"}')
        (home / "new").mkdir(mode=0o700)

    def types(self, line: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line)
        assert words[0] == "tidefast"
        return subprocess.run(
            [*COMMAND, *words[1:]], cwd=self.home, env=self.env, capture_output=True, text=True, timeout=90, check=False
        )

    def succeeds(self, line: str) -> str:
        done = self.types(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def starts(self, line: str) -> str:
        """A service in the background; what it says when it is ready."""
        words = shlex.split(line)
        more = ["--port", "0"] if words[1] == "serve" and "--port" not in words else []
        with (self.home / f"{words[1]}.log").open("a") as log:
            service = subprocess.Popen(
                [*COMMAND, *words[1:], *more],
                cwd=self.home,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.services.append(service)
        assert service.stdout is not None
        said = service.stdout.readline()
        assert said.startswith(("ready", "working")), (self.home / f"{words[1]}.log").read_text()
        return said

    def stop(self) -> None:
        for service in reversed(self.services):
            service.terminate()
            assert service.wait(30) == 0
            assert service.stdout is not None
            service.stdout.close()
        self.services.clear()


def fill_workspace(path: Path) -> None:
    """Three writes of a workspace `case`, with their contents, in a store that nobody serves."""
    store = SqliteStore.open(path, create=False)
    contents = SqliteBlobs(path.with_name(path.name + ".contents"), clock_ms=lambda: 0)
    key = store.run_key_max() + 1
    for n in (1, 2, 3):
        text = b"%d" % n
        digest = hashlib.sha256(text).hexdigest()
        contents.write({digest: text})
        logged = LoggedWrite(n, RunId("r-1"), StepId(f"s{n}"), 5, "0" * 64, n, 1)
        entry = Entry("file", 0o644, digest, 1)
        head = WorkspaceHead(WorkspaceId("case"), version=n, log_index=n)
        store.commit(Batch(workspaces={key: head}, writes=[StoredWrite(key, logged, {f"f{n}": entry})]))
    contents.close()
    store.close()


def prepare(shell: Shell, command: str) -> None:
    """What the examples of a command take for granted."""
    match command:
        case "held":
            for run in ("r-3", "r-4"):
                assert shell.types(
                    f"""tidefast run app:app refund '{{"order":"o","to":"ann"}}' --run-id {run}"""
                ).returncode
        case "resolve":
            while "may still land" in shell.succeeds("tidefast held"):
                pass  # each look is a process of its own
        case "thaw":
            for _ in range(2):
                assert shell.types("tidefast run app:app drifts 1 --run-id r-5").returncode in (1, 7)
            assert "drift" in shell.succeeds("tidefast show r-5")
        case "pause":
            assert shell.types("tidefast run app:app drifts 1 --run-id r-6").returncode == 1
        case "audit":
            keys = (shell.home / "charged").read_text().split()
            counted = [{"key": key, "count": 1} for key in keys] + [{"run": "r-4", "step": "mail", "count": 1}]
            (shell.home / "ledger.json").write_text(json.dumps(counted))
        case "adopt":
            shell.succeeds("tidefast backup copy-of.db")
            shutil.copy(shell.home / "copy-of.db", shell.home / "copy.db")
        case "workspaces":
            fill_workspace(shell.home / ".tidefast/store.db")
        case "doctor":
            shutil.copytree(shell.home / "new", shell.home / "desk", dirs_exist_ok=True)


@pytest.mark.rig
def test_the_examples_of_commands_that_work_alone_do_what_they_say(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    for command in ALONE:
        prepare(shell, command)
        for line, _ in EXAMPLES[command]:
            shell.succeeds(line)
    assert (tmp_path / "r-1.svg").read_text().startswith("<svg")
    with tarfile.open(tmp_path / "case.tar") as archive:
        assert archive.getnames() == ["f1", "f2", "f3"]


@pytest.mark.rig
def test_the_examples_of_servers_and_workers_do_what_they_say(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    (tmp_path / "wait").touch()
    try:
        for place, (line, _) in enumerate(EXAMPLES["serve"]):
            url = shell.starts(line).split()[1]
            if not place:
                shell.env["TIDEFAST_URL"] = url
        for line, _ in EXAMPLES["worker"]:
            shell.starts(line)
        for line, _ in EXAMPLES["start"]:
            shell.succeeds(line)
        while "leased" not in shell.succeeds("tidefast show r-2 --url " + shell.env["TIDEFAST_URL"]):
            pass  # each look is a process of its own
        for line, _ in EXAMPLES["preempt"]:
            shell.succeeds(line)
        (tmp_path / "wait").unlink()
        assert "lease_preempted" in shell.succeeds("tidefast log r-2")
    finally:
        shell.stop()


@pytest.mark.rig
@pytest.mark.parametrize("command", LONG)
def test_the_examples_that_take_longer_do_what_they_say(command: str, tmp_path: Path) -> None:
    for line, _ in EXAMPLES[command]:
        Shell(tmp_path).succeeds(line)


def test_every_command_has_an_example_and_every_example_is_among_those_that_are_run() -> None:
    """A new command: write its example into `cli/examples.py`, and its name into ALONE, SERVED or LONG above."""
    assert {*ALONE, *SERVED, *LONG} == set(EXAMPLES)
    assert set(EXAMPLES) == set(COMMANDS) - ELSEWHERE


def test_help_shows_each_example_as_it_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    for command, examples in EXAMPLES.items():
        if command == "demo":
            continue  # its help is its own
        assert main([command, "--help"]) == 0
        shown = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert not [line for line, meaning in examples if f"$ {line} {meaning}" not in shown]


# --- completion -------------------------------------------------------------------------------------------


def complete(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    script = tmp_path / "completion.bash"
    done = subprocess.run([*COMMAND, "completion", "bash"], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    script.write_text(done.stdout)
    typed = " ".join(map(shlex.quote, ("tidefast", *words)))
    ask = f'. "{script}"; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _tidefast; printf "%s\\n" "${{COMPREPLY[@]}}"'
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run([bash, "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()


def test_a_shell_completes_commands_flags_and_choices(tmp_path: Path) -> None:
    assert set(complete(tmp_path, "re")) >= {"resolve", "restore", "recover"}
    assert "--run-id" in complete(tmp_path, "run", "--ru")
    assert complete(tmp_path, "runs", "--state", "fro") == ["frozen"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_completion_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)
    assert printed.startswith("#compdef tidefast") or shell != "zsh", "zsh reads the first line"
