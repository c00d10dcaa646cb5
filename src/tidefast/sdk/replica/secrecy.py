"""Keeping the replica's key from what runs beside it: no command is given it, and none can read it from this process.

Taking a variable out of `os.environ` leaves its text where the kernel shows it to everyone of the same user
(`/proc/PID/environ`), so the text itself is overwritten too.
"""

import ctypes
import os

PR_SET_DUMPABLE = 4


def take_variable(name: str) -> str | None:
    """The value of an environment variable, which this process has no longer afterwards; None if it is unset."""
    value = os.environ.get(name)
    if value is not None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        place = libc.getenv(name.encode())
        if place:
            ctypes.memset(place, 0, len(os.fsencode(value)))
        del os.environ[name]
    return value or None


def close_memory() -> None:
    """Let no other process of this user look into this one's memory, and leave no core file."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
