"""Finds lines that match a regular expression, in a process of its own that can be killed: some patterns never end.

Run as a script: `searching.py SPEC_FD`, and asked by `search`. Uses the standard library only. Directories are entered
by descriptor and no link is followed.
"""

import asyncio
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

LIMIT_S = 20.0
FILE_BYTES_MAX = 8 * 2**20
TEXT_MAX = 500
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


async def search(fd: int, spec: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of the process for what an open directory or file holds; None if it didn't end in time."""
    spec_fd = os.memfd_create("tidefast", os.MFD_CLOEXEC)
    os.write(spec_fd, json.dumps({**spec, "fd": fd}).encode())
    os.lseek(spec_fd, 0, os.SEEK_SET)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", __file__, str(spec_fd), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={}, pass_fds=(spec_fd, fd),
        )  # fmt: skip
    finally:
        os.close(spec_fd)
    try:
        async with asyncio.timeout(LIMIT_S):
            said = (await process.communicate())[0]
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    answer: dict[str, Any] = json.loads(said) if said else {"bad": "the search ended by itself"}
    return answer


def main(spec_fd: int) -> int:
    with open(spec_fd, "rb") as file:
        spec = json.load(file)
    try:
        pattern = re.compile(spec["pattern"])
    except (re.error, OverflowError, RecursionError) as error:
        answer: dict[str, Any] = {"bad": str(error)}
    else:
        answer = _matches(pattern, spec)
    sys.stdout.write(json.dumps(answer))
    return 0


def _matches(pattern: re.Pattern[str], spec: dict[str, Any]) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for path, fd in _files(spec["fd"], spec["prefix"], spec["own"]):
        try:
            if not (fnmatchcase(path, spec["glob"]) or fnmatchcase(path.rpartition("/")[2], spec["glob"])):
                continue
            for number, line in enumerate(_lines(fd), 1):
                if pattern.search(line):
                    if len(found) == spec["limit"]:
                        return {"matches": found, "is_truncated": True}
                    shown = path.encode(errors="backslashreplace").decode()
                    found.append({"path": shown, "line": number, "text": line[:TEXT_MAX]})
        finally:
            if fd != spec["fd"]:
                os.close(fd)
    return {"matches": found, "is_truncated": False}


def _files(fd: int, prefix: str, own: str) -> Iterator[tuple[str, int]]:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        yield prefix.rstrip("/"), fd
        return
    with os.scandir(fd) as entries:
        names = sorted((item.name, item.is_dir(follow_symlinks=False)) for item in entries)
    for name, is_dir in names:
        path = prefix + name
        if path == own or path == ".git" or path.endswith("/.git"):
            continue
        try:
            below = os.open(name, _DIRECTORY if is_dir else _FILE, dir_fd=fd)
        except OSError:  # a link, a socket, or gone by now
            continue
        if not is_dir:
            yield path, below
            continue
        try:
            yield from _files(below, path + "/", own)
        finally:
            os.close(below)


def _lines(fd: int) -> list[str]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_BYTES_MAX:
        return []
    with open(fd, "rb", closefd=False) as file:
        raw = file.read()
    return [] if b"\0" in raw[:8192] else raw.decode(errors="replace").splitlines()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
