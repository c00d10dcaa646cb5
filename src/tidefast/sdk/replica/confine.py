"""What this host allows to be done to a command's processes, found out by trying, and how a command is started.

See `supervise.py` for the three ways. `examine` tries them in that order; what it finds is said plainly by
`Confinement.sentence`, for `tidefast doctor` and for the replica's log.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["pid_namespace", "cgroup", "subreaper"]
MARK = "TIDEFAST_REPLICA_OF"  # in the environment of a command and its supervisor: which root they belong to
KINDS: tuple[Kind, ...] = ("pid_namespace", "cgroup", "subreaper")
_SUPERVISOR = Path(__file__).with_name("supervise.py")
_PROBE_S = 20.0
_SENTENCES = {
    "pid_namespace": "a command runs in a PID namespace: nothing that it started outlives it, `setsid` or not",
    "cgroup": "a command runs in a control group of its own: nothing that it started outlives it, `setsid` or not",
    "subreaper": "this host allows neither a PID namespace nor a control group: what a command started is found as a"
    " descendant and killed, but a command that kills its supervisor on purpose may leave one that goes on writing",
}


class Confinement(NamedTuple):
    """The way that works here; `why_not` says what the better ones failed with. `cgroup` is the group above ours."""

    kind: Kind
    why_not: dict[str, str]
    cgroup: str = ""

    @property
    def is_tight(self) -> bool:
        return self.kind != "subreaper"

    def sentence(self) -> str:
        failed = "; ".join(f"{kind}: {why}" for kind, why in self.why_not.items())
        return _SENTENCES[self.kind] + (f" ({failed})" if failed else "")


def examine(kinds: Sequence[Kind] = KINDS) -> Confinement:
    """The tightest of these ways that works on this host. Starts a few processes; takes a fraction of a second."""
    why_not: dict[str, str] = {}
    for kind in kinds:
        above = own_cgroup() if kind == "cgroup" else ""
        why = "no writable cgroup v2" if kind == "cgroup" and not above else _probe(kind, above)
        if not why:
            return Confinement(kind, why_not, above)
        why_not[kind] = why
    return Confinement("subreaper", why_not)


def own_cgroup() -> str:
    """The directory of this process's cgroup v2; empty if there is none."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        at = next(line.split()[4] for line in mounts if " - cgroup2 " in line)
        below = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration, IndexError):
        return ""
    path = at + below.rstrip("/")
    return path if os.access(f"{path}/cgroup.procs", os.W_OK) and os.access(path, os.W_OK) else ""


class Started:
    """A command under its supervisor. `cut` ends it with all that it started; `close` gives back what it held."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, status: int, cgroup: str) -> None:
        self.process = process
        self.cgroup = cgroup
        self._lifeline, self._status = lifeline, status

    def cut(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def told(self) -> dict[str, Any]:
        """What the supervisor said, once its process has ended: the first line counts. Empty if it said nothing."""
        lines = os.read(self._status, 65_536).splitlines()
        first: dict[str, Any] = json.loads(lines[0]) if lines else {}
        return first

    def close(self) -> None:
        self.cut()
        os.close(self._status)
        remove_cgroup(self.cgroup)


def make_cgroup(confinement: Confinement, mark: str) -> str:
    """A new control group for one command of a root; empty if the confinement has none. Raises `OSError`."""
    if confinement.kind != "cgroup":
        return ""
    path = f"{confinement.cgroup}/{_group(mark)}{secrets.token_hex(8)}"
    os.mkdir(path)
    return path


def end_groups(mark: str) -> None:
    """Kill what an earlier life of a root's replica has left in its control groups, and remove those."""
    above = own_cgroup()
    for name in os.listdir(above) if above else ():
        if name.startswith(_group(mark)):
            try:
                Path(f"{above}/{name}/cgroup.kill").write_text("1")
            except OSError:  # gone since, or made by a kernel that can't
                continue
            remove_cgroup(f"{above}/{name}")


def _group(mark: str) -> str:
    return f"tidefast-{mark.replace(':', '-')}-"


def remove_cgroup(path: str) -> None:
    """Remove an empty group. One that still has processes stays, and so does what a reboot has removed."""
    if path:
        try:
            os.rmdir(path)
        except OSError:
            return


async def start(
    confinement: Confinement,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: int,
    lock: int,
    stdin: int,
    mark: str,
) -> Started:
    """Start a command in an open directory. `lock` is held by the supervisor until all is over. Raises `OSError`."""
    cgroup = make_cgroup(confinement, mark)
    status_ours, status = os.pipe()
    lifeline, lifeline_ours = os.pipe()
    spec_fd = _spec(confinement.kind, argv, env, (cwd, status, lifeline, lock), cgroup)
    passed = (spec_fd, cwd, status, lifeline, lock)
    try:
        process = await asyncio.create_subprocess_exec(
            *_command(spec_fd), stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={MARK: mark}, pass_fds=passed, start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(status_ours)
        os.close(lifeline_ours)
        remove_cgroup(cgroup)
        raise
    finally:
        for fd in (spec_fd, status, lifeline):
            os.close(fd)
    return Started(process, lifeline_ours, status_ours, cgroup)


def memory_file(content: bytes) -> int:
    """A descriptor to read this content from."""
    fd = os.memfd_create("tidefast", os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _spec(kind: Kind, argv: Sequence[str], env: Mapping[str, str], fds: tuple[int, int, int, int], cgroup: str) -> int:
    """What the supervisor is to do, as a descriptor that it reads."""
    cwd, status, lifeline, lock = fds
    spec = {
        "kind": kind, "argv": list(argv), "env": dict(env), "cwd": cwd, "status": status, "lifeline": lifeline,
        "lock": lock, "cgroup": cgroup,
    }  # fmt: skip
    return memory_file(json.dumps(spec).encode())


def _command(spec_fd: int) -> list[str]:
    return [sys.executable, "-I", "-S", str(_SUPERVISOR), str(spec_fd)]


def _probe(kind: Kind, above: str) -> str:
    """Why this way doesn't work here; empty if it does."""
    confinement = Confinement(kind, {}, above)
    fds: list[int] = []
    group = ""
    try:
        group = make_cgroup(confinement, "probe")
        status_ours, status = os.pipe()
        fds += [status_ours, status]
        lifeline, lifeline_ours = os.pipe()
        fds += [lifeline, lifeline_ours]
        cwd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        fds.append(cwd)
        spec_fd = _spec(kind, ["/bin/sh", "-c", "exit 7"], {}, (cwd, status, lifeline, cwd), group)
        fds.append(spec_fd)
        subprocess.run(  # noqa: S603 - our own interpreter and script
            _command(spec_fd), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={}, pass_fds=(spec_fd, cwd, status, lifeline), start_new_session=True, timeout=_PROBE_S, check=False,
        )  # fmt: skip
        os.set_blocking(status_ours, False)
        told = json.loads(os.read(status_ours, 65_536).splitlines()[0])
        return "" if told == {"exit": 7} else str(told.get("failed") or told.get("not_started") or told)
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return str(error) or type(error).__name__
    finally:
        for fd in fds:
            os.close(fd)
        remove_cgroup(group)
