"""Who may do what: the one table, and the callers that keys name.

`MAY` says for each guard which roles open it, and whether it is open where the server has no key file. Each address
names its guard (`table.py`), and `admit` is the only place that reads the table, so an address can't be opened by
forgetting something. A generated test walks all of it.

A caller with a prefix of runs hears about any other run what it hears about a run that doesn't exist, and for the same
reason: the name alone decides, nothing is looked up.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from tidefast.wire.problem import Problem, problem

Role = Literal["worker", "operator", "reader", "orchestrator", "replica"]
ROLES: tuple[Role, ...] = get_args(Role)
Guard = Literal["public", "read", "watch", "start", "work", "lease", "operator", "replica"]
_KEY_LENGTH_MAX = 256


class Access(NamedTuple):
    """One guard. `is_open`: without a key file nobody is asked for a key. `lease`: the call carries a lease token.
    `whole`: what is told can't be told of some runs only, so the key must be one for all runs.
    """

    roles: frozenset[Role]
    is_open: bool
    lease: bool = False
    whole: bool = False


MAY: Mapping[Guard, Access] = {
    "public": Access(frozenset(ROLES), True),  # says nothing about any run; no key is looked at
    "read": Access(frozenset(("worker", "operator", "reader", "orchestrator")), True),
    "watch": Access(frozenset(("operator", "reader")), True, whole=True),
    "start": Access(frozenset(("worker", "operator", "orchestrator")), True),  # brings a run into being, or tells it
    "work": Access(frozenset(("worker", "orchestrator")), True),  # asks for leases
    "lease": Access(frozenset(("worker",)), True, lease=True),  # acts under a lease
    "operator": Access(frozenset(("operator",)), False),  # overrules a lease, settles a doubt
    "replica": Access(frozenset(("replica",)), True),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key names. The ids of its runs begin with `runs`; a replica's serves `workspace` and no other."""

    name: str
    role: Role | None = None
    runs: str = ""
    workspace: str = ""
    bodies: bool = True  # whether inputs, requests, receipts, results are shown, or only their digests

    def sees(self, run_id: str) -> bool:
        return run_id.startswith(self.runs)


ANYONE = Caller("")
OPERATOR_NAME = "operator"  # whom the log names for a verb that came with the key beside the store


def key_digest(key: str) -> bytes:
    """What a server keeps of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class KeyBook:
    """The keys that a server knows, by their digest. `keys` None: it has no key file, and asks operators only."""

    operator_digest: bytes = field(repr=False)
    keys: Mapping[bytes, Caller] | None = field(default=None, repr=False)

    def caller(self, authorization: str) -> Caller | None:
        """Whom an Authorization header names, None for nobody. Time tells nothing: what is looked up is a digest."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(key) <= _KEY_LENGTH_MAX:
            return None
        digest = key_digest(key)
        if digest == self.operator_digest:
            return Caller(OPERATOR_NAME, "operator")
        return (self.keys or {}).get(digest)


def admit(book: KeyBook, guard: Guard, authorization: str, run_id: str = "") -> Caller | Problem:
    """Who calls, or why this caller may not. `run_id` is the run that the address names, if it names one."""
    access = MAY[guard]
    if guard == "public" or (book.keys is None and access.is_open):
        return ANYONE
    if not authorization:
        return problem("unauthenticated", "key_missing")
    caller = book.caller(authorization)
    if caller is None:
        return problem("unauthenticated", "key_unknown")
    if caller.role not in access.roles:
        return problem("forbidden", "role", {"role": caller.role, "roles": sorted(access.roles)})
    if access.whole and caller.runs:
        return problem("forbidden", "all_runs")
    if run_id and not caller.sees(run_id):
        return problem("not_found", "run_unknown", {"run": run_id})
    return caller
