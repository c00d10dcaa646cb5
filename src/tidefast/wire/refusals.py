"""What each refusal means, in the words that people read: one row per code, finer words per (code, reason).

A row says the HTTP status, a title, what is kept, and what to do next; a reason may say more exactly what was refused.
Braces are filled from the refusal's facts. The codes of `protocol.verdicts` and those that only the wire knows are all
here, and a test holds that.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One code. `retry_ms` is when to ask again, 0 for a refusal that asking again doesn't change."""

    status: int
    title: str
    detail: str
    kept: str
    next: str
    retry_ms: int = 0


class Words(NamedTuple):
    """What a reason says better than its code; an empty part leaves the code's own."""

    detail: str = ""
    next: str = ""
    status: int = 0


_NOTHING = "Nothing was written and nothing was sent."
_FACTS_KEPT = "Everything recorded so far is kept; nothing is booked as failed."
_STOP = "Stop working on this run. Whoever holds its lease goes on from the log."
_OPERATOR = "A person decides: `tidefast held` lists it, `tidefast resolve` settles it."

ROWS: dict[str, Row] = {
    "stale_epoch": Row(
        409,
        "The lease is no longer yours",
        "The call carries epoch {epoch}; the live one is {live_epoch}, held by {holder}.",
        _FACTS_KEPT,
        _STOP,
    ),
    "lease_lapsed": Row(
        409,
        "The lease has run out",
        "The lease of epoch {epoch} ended at {expires_at_ms} and is never revived.",
        _FACTS_KEPT,
        "Stop this pass; claim the run again to go on under a new epoch.",
    ),
    "lease_held": Row(
        409, "The run can't be claimed yet", "Another holder has the run.", _NOTHING, "Ask again later.", 1_000
    ),
    "step_conflict": Row(
        422,
        "The step is stored with another call",
        "Step {step} is stored as a call of {stored_tool} with other content.",
        "The stored call stands; nothing was sent.",
        "Ask for the stored call with `stored: true`, or give the new call a step id of its own.",
    ),
    "step_in_flight": Row(
        409,
        "The step's request is still out",
        "An attempt of step {step} may still be on the wire.",
        "The attempt goes on; its answer will be recorded.",
        "Ask again; the same call answers with the receipt once it is there.",
        500,
    ),
    "step_pending": Row(
        409, "The step has to wait", "Another step comes first: {step}.", _NOTHING, "Ask again later.", 500
    ),
    "in_doubt": Row(
        409,
        "Nobody knows yet whether it happened",
        "The effect of step {step} may have happened, and nothing proves it yet.",
        "The doubt is recorded; the step is not taken for failed.",
        "Ask again; the step is replayed or looked up where its contract allows that.",
        1_000,
    ),
    "step_held": Row(
        409,
        "A step waits for a person",
        "Nothing may be done automatically about {steps}.",
        "The stored call and all its attempts are kept.",
        _OPERATOR,
    ),
    "step_rejected": Row(
        422,
        "The provider refused the step",
        "Step {step} was refused for good and had no effect.",
        "The refusal is recorded as the step's answer.",
        "Go on without it, or use a new step id for a different call.",
    ),
    "already_decided": Row(
        409,
        "There is nothing to decide",
        "The state of step {step} doesn't allow this.",
        "What was decided stands.",
        "Look at the step with `tidefast show`.",
    ),
    "checkpoint_stale": Row(
        409,
        "A newer checkpoint is stored",
        "Checkpoint {number} is not above the stored number {stored}.",
        "The stored checkpoint stands.",
        "Number checkpoints from the stored one on.",
    ),
    "run_conflict": Row(
        409,
        "The run id is taken",
        "Run {run} exists with another agent or input.",
        "The existing run is untouched.",
        "Choose another run id, or send the same agent and input.",
    ),
    "run_ended": Row(
        409, "The run has ended", "The run is {state}.", "Its log and its result are kept.", "Read the run to see how."
    ),
    "run_frozen": Row(
        409,
        "The run is frozen",
        "The run is frozen: {reason}.",
        _FACTS_KEPT,
        "An operator looks at it with `tidefast show` and lets it go on with `tidefast thaw`.",
    ),
    "run_paused": Row(
        409,
        "The run is paused",
        "An operator has paused the run; nothing new begins.",
        _FACTS_KEPT,
        "Give the lease back; an operator lets the run go on with `tidefast resume`.",
    ),
    "run_ending": Row(
        409,
        "The run is ending",
        "The run fails or is cancelled; nothing new begins.",
        _FACTS_KEPT,
        "Settle what is open by its stored calls, undo what is to be undone, then end the run.",
    ),
    "unsettled_effects": Row(
        409,
        "Effects are not settled",
        "These steps are not settled: {steps}.",
        _NOTHING,
        "Ask for each of them until it answers, then repeat this call.",
    ),
    "moved": Row(
        409,
        "It has changed since you looked",
        "What you expected is no longer so.",
        _NOTHING,
        "Look again and decide anew.",
    ),
    "no_replica": Row(
        503,
        "The workspace has no replica",
        "No replica of workspace {workspace} is ready for writes ({reason}).",
        _NOTHING,
        "Start a replica of it in a sandbox; then ask again.",
        1_000,
    ),
    "not_found": Row(404, "Not found", "There is no such thing here.", _NOTHING, "Check the name."),
    "invalid": Row(422, "The request can't be taken", "The request is not valid.", _NOTHING, "Correct it and send it."),
    "lease_required": Row(
        428,
        "A lease token is needed",
        "The header Tidefast-Lease is missing.",
        _NOTHING,
        "Send the token that came with the lease.",
    ),
    "bad_token": Row(
        401,
        "The lease token is not valid here",
        "The token was not made by this authority for this run.",
        _NOTHING,
        "Send the token exactly as the grant gave it.",
    ),
    "unauthenticated": Row(
        401,
        "A key is needed",
        "This call needs a key.",
        _NOTHING,
        "Send `Authorization: Bearer KEY`; the operator's stands beside the store, `tidefast keys add` makes others.",
    ),
    "forbidden": Row(403, "Not allowed", "This caller may not do that.", _NOTHING, "Use a client, not a web page."),
    "unsupported": Row(415, "Not supported", "The request can't be served in this form.", _NOTHING, "Change its form."),
    "full": Row(
        507,
        "No room is left",
        "The contents of all workspaces are at their limit.",
        _NOTHING,
        "An operator makes room.",
    ),
    "too_large": Row(413, "Too large", "The body is too large.", _NOTHING, "Send at most 1 MiB."),
    "limit_reached": Row(
        429,
        "A limit is reached",
        "The limit of {budget} is {limit} {member}; {committed} are spent or reserved, and this call may take {asked}.",
        _NOTHING,
        "An operator raises it: `{command}`.",
    ),
    "overloaded": Row(503, "Overloaded", "Too much is asked at once.", _NOTHING, "Ask again later.", 1_000),
    "store_unavailable": Row(
        503,
        "The store can't be reached",
        "Whether the call took effect is unknown.",
        "What was acknowledged is kept.",
        "Send the same call again; it is safe to repeat.",
        1_000,
    ),
    "internal": Row(
        500,
        "The authority failed",
        "An error of the authority; whether the call took effect is unknown.",
        "What was acknowledged is kept.",
        "Send the same call again; it is safe to repeat. If that fails too, look at the authority's log.",
        1_000,
    ),
}

REASONS: dict[tuple[str, str], Words] = {
    ("stale_epoch", "lease_ended"): Words(
        "The lease of epoch {epoch} has ended ({ended_by} at {ended_at_ms}); no one holds the run under it now."
    ),
    ("lease_held", "live"): Words("The run is held by {holder} under epoch {live_epoch} until {until_ms}."),
    ("lease_held", "pause"): Words("The run rests until {until_ms} after grants without progress or by request."),
    ("step_conflict", "other_kind"): Words("Step {step} is stored as another kind of step."),
    ("step_in_flight", "on_the_wire"): Words(
        "A request of step {step} may still land until {until_ms}.", "Look at the provider after that, then decide."
    ),
    ("step_in_flight", "owner_silent"): Words(
        "The instance that sent step {step} still lives and has not said what became of it.",
        "Wait for it, or stop it; then decide.",
    ),
    ("step_pending", "older_attempt"): Words("A request of an older epoch may still land: {step}."),
    ("step_held", "run_held"): Words("The run waits for a person because of {steps}."),
    ("step_rejected", "unanswered"): Words(
        "The model was asked {attempts} times for step {step} and no whole answer came; each time counts as billed."
    ),
    ("step_pending", "replica"): Words("Workspace {workspace} is busy with step {step} of run {run}."),
    ("step_held", "escaped"): Words(
        "The replica of {steps} was lost, and effects outside its workspace may have happened."
    ),
    ("invalid", "receipt_invalid"): Words("The receipt of step {step} can't be joined: {problem}."),
    ("forbidden", "workspace"): Words("The key is for workspace {workspace}."),
    ("forbidden", "bodies"): Words("The key may see digests only."),
    ("invalid", "digest_mismatch"): Words("The content sent has another digest than its address."),
    ("not_found", "index_unknown"): Words(
        "Workspace {workspace} keeps log indexes {oldest} to {newest}, not {index}.", "Ask for one of those."
    ),
    ("not_found", "path_unknown"): Words("There is no file {path} in workspace {workspace}."),
    ("not_found", "content_unknown"): Words("There is no content of this digest."),
    ("not_found", "workspace_unknown"): Words("There is no workspace {workspace}.", "Its first replica makes it."),
    ("already_decided", "nothing_to_compensate"): Words(
        "Step {step} has no effect that could be undone; it is {state}.", "Compensate applied or committed steps only."
    ),
    ("already_decided", "is_an_undo"): Words("Step {step} is itself an undo; it can't be called compensated."),
    ("run_frozen", "diverged"): Words(
        "What the provider says contradicts the books.",
        "An operator compares the provider's record with the log, then resolves.",
    ),
    ("run_frozen", "no_progress"): Words("Grant after grant of this run brought no progress."),
    ("run_frozen", "operator"): Words("An operator has frozen the run."),
    ("unsettled_effects", "to_undo"): Words(
        "The run is ending, and these steps are still to be undone, in this order: {steps}.",
        "Ask for the undo of the first one, then repeat this call.",
    ),
    ("run_frozen", "drift"): Words("The agent asked for another call than the stored one."),
    ("unsettled_effects", "not_asked"): Words(
        "This pass did not ask for these settled steps: {steps}.",
        "Ask for them, or name them in `dropped` if they are meant to be left out.",
    ),
    ("moved", "epoch"): Words("You expected epoch {expected_epoch}; the newest is {live_epoch}."),
    ("moved", "attempts"): Words("You expected {expected} attempts of step {step}; there are {attempts}."),
    ("moved", "looked_too_early"): Words(
        "A request of step {step} could land after you looked.", "Look at the provider after {look_after_ms}."
    ),
    ("not_found", "run_unknown"): Words("There is no run {run}.", "`tidefast runs` lists the runs."),
    ("not_found", "step_unknown"): Words("The run has no step {step}.", "`tidefast show` lists the run's steps."),
    ("not_found", "attempt_unknown"): Words("Step {step} has no attempt {attempt}."),
    ("not_found", "tool_unknown"): Words(
        "There is no tool {tool} here.", "Declare it in the file that `tidefast serve --tools` reads."
    ),
    ("not_found", "model_unknown"): Words(
        "No upstream here serves the model {model}.", "Declare it in the file that `tidefast serve --models` reads."
    ),
    ("not_found", "budget_unknown"): Words(
        "There is no budget {budget}.", "Name one as run/RUN, agent/AGENT or key/KEY; `tidefast budgets` lists them."
    ),
    ("overloaded", "queue_full"): Words("{running} calls run at {upstream} and {queued} wait: no more are taken."),
    ("overloaded", "queue_wait"): Words("No place became free at {upstream} in time."),
    ("overloaded", "circuit_open"): Words("{upstream} failed several times in a row and is left alone for now."),
    ("overloaded", "upstream_busy"): Words("{upstream} asked to be left alone for now."),
    ("overloaded", "upstream_away"): Words("The model could not be asked ({why}); nothing was billed."),
    ("not_found", "route_unknown"): Words("There is no such address.", "Supported versions: v1."),
    ("invalid", "args"): Words("The arguments don't fit tool {tool}: {problem}."),
    ("invalid", "answer_not_committed"): Words(
        "Step {step} stands in the answer of {asked_by}, which is {state}: nothing in it may be acted on yet.",
        "Ask for {asked_by} first; once it is committed its calls may be made.",
    ),
    ("invalid", "no_undo"): Words("Tool {tool} of step {step} declares no undo.", _OPERATOR),
    ("invalid", "undo_args"): Words("The undo of step {step} can't be written: {problem}.", _OPERATOR),
    ("invalid", "framing_ambiguous"): Words("Where the request ends is ambiguous.", "Send one Content-Length.", 400),
    ("invalid", "http_invalid"): Words("This is not an HTTP/1.1 request.", "Use an HTTP client.", 400),
    ("unsupported", "method_not_allowed"): Words("The address doesn't take {method}.", "Use {allow}.", 405),
    ("unsupported", "request_late"): Words("The request came too slowly.", "Send it in one go.", 408),
    ("unsupported", "media_type"): Words("The body is not application/json.", "Send `Content-Type: application/json`."),
    ("unsupported", "content_encoding"): Words("Compressed bodies are not taken.", "Send the body as it is."),
    ("unsupported", "host_not_allowed"): Words(
        "The header Host names another machine.", "Address this server by its loopback name.", 421
    ),
    ("unsupported", "headers_too_large"): Words(
        "The headers are too large.", "At most 64 headers of 8 KiB each, 32 KiB in all.", 431
    ),
    ("unsupported", "request_line_too_long"): Words("The request line is too long.", "At most 8 KiB.", 431),
    ("forbidden", "cross_origin"): Words("A web page of another origin may not call this server."),
    ("forbidden", "role"): Words("A key of role {role} may not do that; it takes {roles}.", "Use a key of that role."),
    ("forbidden", "all_runs"): Words("The key is for some runs only; this tells of all.", "Use a key for all runs."),
    ("forbidden", "run_name"): Words(
        "The ids of this key's runs begin with {prefix}.", "Name the run so, or leave its name out."
    ),
    ("overloaded", "waits"): Words("This caller waits in too many places already."),
    ("overloaded", "bodies"): Words("Too many bodies are being read at once."),
    ("overloaded", "loop"): Words("The authority is behind with what it has taken on."),
    ("overloaded", "connections"): Words("Too many connections are open."),
    ("unauthenticated", "key_unknown"): Words("This server doesn't know the key."),
    ("bad_token", "other_run"): Words("The token is for another run than the address names."),
    ("store_unavailable", "stopping"): Words(
        "The authority is stopping.", "Send the same call again once it is back; it is safe to repeat."
    ),
    ("store_unavailable", "not_ready"): Words("The authority can't read its store."),
}
