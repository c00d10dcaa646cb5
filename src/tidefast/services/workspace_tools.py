"""The tools `workspace.VERB` that every gateway has: contracts made from a call, since a workspace is named by it.

A mutating verb is a step of effect `workspace`; a reading one has the effect `none`. Their arguments are checked by
whoever knows the verbs' schema (`Check`), before an intent is made.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from tidefast.protocol.canonical import JSON
from tidefast.protocol.contract_table import TIMEOUT_MAX_MS
from tidefast.protocol.contracts import Contract, contract_digest
from tidefast.protocol.ids import WorkspaceId, is_id
from tidefast.protocol.workspace import VerbFacts
from tidefast.protocol.write import SCOPE
from tidefast.services.tools import Tool

PREFIX = "workspace."
SLACK_MS = 60_000  # beside a command's own time: for its beginning, its delta and its contents


Check = Callable[[str, Mapping[str, JSON]], VerbFacts | None]  # None: no verb has this name


def no_verbs(verb: str, args: Mapping[str, JSON]) -> VerbFacts | None:
    """The `Check` of a program that has no workspaces."""
    return None


class WorkspaceCall(NamedTuple):
    """A call of a workspace's tool, as today's contract has it."""

    tool: Tool
    workspace_id: WorkspaceId
    problem: str


def is_workspace_tool(tool: str) -> bool:
    return tool.startswith(PREFIX)


def workspace_call(tool: str, args_json: str, check: Check) -> WorkspaceCall | None:
    """The contract of a call; None if no verb has this name."""
    args: Mapping[str, JSON] = msgspec.json.decode(args_json)
    name = args.get("workspace")
    rest = {member: value for member, value in args.items() if member != "workspace"}
    facts = check(tool.removeprefix(PREFIX), rest)
    if facts is None:
        return None
    problem = facts.problem
    if not isinstance(name, str) or not is_id(name):
        name, problem = "unnamed", "/workspace: expected the id of a workspace"
    contract = Contract(
        tool=tool,
        kind="workspace",
        effect="workspace" if facts.is_write else "none",
        url=f"{SCOPE}{name}",
        timeout_ms=min(facts.timeout_ms + SLACK_MS, TIMEOUT_MAX_MS),
        escapes=facts.escapes,
    )
    return WorkspaceCall(Tool(contract, contract_digest(contract), None), WorkspaceId(name), problem)


def verb_and_args(tool: str, args_json: str) -> tuple[str, dict[str, JSON]]:
    """What a replica is asked to do by a stored call."""
    args: dict[str, JSON] = msgspec.json.decode(args_json)
    args.pop("workspace", None)
    return tool.removeprefix(PREFIX), args


def workspace_named(contract: Contract) -> WorkspaceId:
    """The workspace that a stored contract is for."""
    return WorkspaceId(contract.url.removeprefix(SCOPE))
