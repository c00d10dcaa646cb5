"""Tidefast runs AI agents on compute that may vanish.

An authority grants each run a lease whose epoch is a fencing token, keeps an append-only intent log, and lets an
effect out only under the live epoch, under a key that never changes, with its intent already durable.

The names that agent code needs are here; everything else is reached through its room.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tidefast.sdk.app import App as App
    from tidefast.sdk.blocking import Client as Client
    from tidefast.sdk.client import AsyncClient as AsyncClient
    from tidefast.sdk.errors import CallRefused as CallRefused
    from tidefast.sdk.errors import Conflict as Conflict
    from tidefast.sdk.errors import Error as Error
    from tidefast.sdk.errors import Fail as Fail
    from tidefast.sdk.errors import Held as Held
    from tidefast.sdk.errors import LimitReached as LimitReached
    from tidefast.sdk.errors import Misuse as Misuse
    from tidefast.sdk.errors import NotAllowed as NotAllowed
    from tidefast.sdk.errors import NotFound as NotFound
    from tidefast.sdk.errors import NotSent as NotSent
    from tidefast.sdk.errors import NotYet as NotYet
    from tidefast.sdk.errors import OutcomeUnknown as OutcomeUnknown
    from tidefast.sdk.errors import Preempted as Preempted
    from tidefast.sdk.errors import Refused as Refused
    from tidefast.sdk.errors import Rejected as Rejected
    from tidefast.sdk.errors import RunFailed as RunFailed
    from tidefast.sdk.errors import Unavailable as Unavailable
    from tidefast.sdk.run import Run as Run
    from tidefast.sdk.worker import Worker as Worker

_ERRORS = (
    *(
        "CallRefused",
        "Conflict",
        "Error",
        "Fail",
        "Held",
        "LimitReached",
        "Misuse",
        "NotAllowed",
        "NotFound",
        "NotSent",
        "NotYet",
    ),
    *("OutcomeUnknown", "Preempted", "Refused", "Rejected", "RunFailed", "Unavailable"),
)
_NAMED = {"App": "app", "AsyncClient": "client", "Client": "blocking", "Run": "run", "Worker": "worker"}
_HOMES = {**_NAMED, **dict.fromkeys(_ERRORS, "errors")}
__all__ = ["App", "AsyncClient", "Client", "Run", "Worker", *_ERRORS]


def __getattr__(name: str) -> object:
    """A public name, imported when it is first used, so that importing one room doesn't load another."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidefast' has no attribute {name!r}")
    value: object = getattr(import_module(f"tidefast.sdk.{home}"), name)
    globals()[name] = value
    return value
