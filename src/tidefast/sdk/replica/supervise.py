"""The process between a replica and a command: it ends all that the command started, however the replica ends.

Run as a script, by `confine.py`: `supervise.py SPEC_FD`. It uses the standard library only and starts in milliseconds.
The replica holds the other end of a pipe, the lifeline. When the command has ended, or the lifeline closes because the
replica wants that or is dead, nothing that the command started is left alive when this process exits. How:

- `pid_namespace`: the command's parent is process 1 of a namespace. When that ends the kernel kills all others in it,
  and it counts as ended only when they are gone. A child that calls `setsid` is in it too.
- `cgroup`: the kernel kills every process of the command's control group at once.
- `subreaper`: orphans come back to this process, which kills its descendants until none is left. A command that kills
  this process on purpose gets away; that is why it is the last choice.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_PRIVATE_ALL = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
PR_SET_CHILD_SUBREAPER = 36
PAUSE_S = 0.002

_libc = ctypes.CDLL(None, use_errno=True)


def main(spec_fd: int) -> int:
    """Run the command of a spec. What became of it is written to the spec's `status` descriptor as one JSON object."""
    with open(spec_fd, "rb") as file:
        spec = json.load(file)
    for name in ("status", "lifeline", "cwd", "lock"):
        os.set_inheritable(spec[name], False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        os.fchdir(spec["cwd"])  # before the mount namespace, in which the descriptor would lead elsewhere
        if spec["kind"] == "pid_namespace":
            return _in_namespace(spec)
        if spec["kind"] == "subreaper":
            _call(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        _tell(spec, _until_end(spec, _start(spec)))
        _end_all(spec)
    except OSError as error:
        _tell(spec, {"failed": error.strerror or str(error), "errno": error.errno})
    return 0


def _in_namespace(spec: dict[str, Any]) -> int:
    uid, gid = os.geteuid(), os.getegid()
    _call(_libc.unshare(CLONE_NEWPID | CLONE_NEWNS | (CLONE_NEWUSER if uid else 0)))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    first = os.fork()
    if first:
        os.waitpid(first, 0)  # returns when every process of the namespace is gone
        return 0
    try:
        _own_proc()
        _tell(spec, _until_end(spec, _start(spec)))
    except OSError as error:
        _tell(spec, {"failed": error.strerror or str(error), "errno": error.errno})
    finally:
        os._exit(0)


def _own_proc() -> None:
    """A /proc that shows the namespace alone. Where that isn't allowed the old one stays."""
    if _libc.mount(b"none", b"/", None, MS_PRIVATE_ALL, None) == 0:
        _libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None)


def _start(spec: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if spec["cgroup"]:
            with open(f"{spec['cgroup']}/cgroup.procs", "w") as file:
                file.write("0")
        os.umask(0o022)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606
    except OSError as error:
        _tell(spec, {"not_started": error.strerror or str(error), "errno": error.errno})
    finally:
        os._exit(127)


def _until_end(spec: dict[str, Any], pid: int) -> dict[str, Any]:
    """Wait for the command or for the end of the lifeline, and bury orphans meanwhile."""
    ready = select.poll()
    ended = os.pidfd_open(pid)
    ready.register(ended, select.POLLIN)
    ready.register(spec["lifeline"], select.POLLIN | select.POLLHUP)
    while True:
        events = dict(ready.poll(1_000))
        if ended in events:
            status = os.waitpid(pid, 0)[1]
            if os.WIFSIGNALED(status):
                return {"signal": os.WTERMSIG(status)}
            return {"exit": os.WEXITSTATUS(status)}
        if spec["lifeline"] in events:
            return {"cut": True}
        _bury(pid)


def _bury(command: int) -> None:
    """Reap children that have ended, the command itself left for its own wait."""
    for pid in list(_children()):
        if pid != command:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _end_all(spec: dict[str, Any]) -> None:
    """Returns when nothing that the command started is alive."""
    while True:
        if spec["cgroup"]:
            _kill_cgroup(spec["cgroup"])
        family = _descendants()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none is born while we count
            for pid in family:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            if not _is_populated(spec["cgroup"]):
                return
        select.select((), (), (), PAUSE_S)


def _kill_cgroup(path: str) -> None:
    with open(f"{path}/cgroup.kill", "w") as file:
        file.write("1")


def _is_populated(path: str) -> bool:
    if not path:
        return False
    with open(f"{path}/cgroup.events") as file:
        return "populated 1" in file.read()


def _parents() -> Iterator[tuple[int, int]]:
    """(process, its parent) of all that /proc shows."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    yield int(name), int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue


def _children() -> Iterator[int]:
    me = os.getpid()
    return (pid for pid, parent in _parents() if parent == me)


def _descendants() -> list[int]:
    parents = dict(_parents())
    found: list[int] = []
    for pid in parents:
        above = parents.get(pid)
        while above is not None and above > 1 and above != os.getpid():
            above = parents.get(above)
        if above == os.getpid():
            found.append(pid)
    return found


def _tell(spec: dict[str, Any], said: dict[str, Any]) -> None:
    try:
        os.write(spec["status"], json.dumps(said).encode() + b"\n")
    except BrokenPipeError:  # the replica is dead; what remains is to end what it started
        return


def _call(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
