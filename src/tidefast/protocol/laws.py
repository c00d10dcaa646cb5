"""The eighteen laws, each a predicate over a folded log.

Audit, simulator, checker and tests share them. None of them asks the rules: what a law needs to know comes from the log
(`trace.py`), from the stored contracts, from the provider's own count of effects and from what callers were told. Each
predicate yields a violation per breach; a log that breaks no law yields nothing, whether its run has ended or is in
flight. What a log alone can't show is said at each law.
"""

from collections.abc import Callable, Iterator, Mapping

from tidefast.protocol.events import CHAIN_START, chain
from tidefast.protocol.ids import StepId, asked_by, step_key
from tidefast.protocol.laws_of_runs import orphan, stuck, superseded_as_failed, unfenced_verb
from tidefast.protocol.trace import (
    ACKNOWLEDGED,
    CHANGES_THE_WORLD,
    DOUBTFUL,
    HARMLESS,
    INTENTS,
    OPEN,
    OUTCOMES,
    RECEIPTS,
    SETTLED,
    TOLD_ITS_EPOCH,
    Ack,
    Facts,
    History,
    Moment,
    Sending,
    Trace,
    Violation,
    asked_early,
    at,
    carries,
    digest_of_call,
    fold,
    froze,
    is_gone,
    is_listed,
    is_risky_undo,
    number,
    overtaken,
    remembered,
    text,
    unsettled,
    who_was_live,
)

__all__ = ["ACKNOWLEDGED", "LAWS", "Ack", "History", "Law", "Violation", "fold", "judge"]


Law = Callable[[Trace], Iterator[Violation]]


def judge(history: History, laws: Mapping[str, Law] | None = None) -> tuple[Violation, ...]:
    """Every breach of every law (or of those given), in the order of the laws."""
    trace = fold(history)
    return tuple(violation for law in (laws or LAWS).values() for violation in law(trace))


def double_apply(trace: Trace) -> Iterator[Violation]:
    """Law 1: a step's effect happens at most once net, and the books say truly whether it did.

    Judged from the provider's own count where there is one; from the log: a sending that could do it twice (the step is
    settled, held or being undone, or an older attempt may have applied and the provider doesn't surely know the key),
    an undo begun twice, an undo booked that none committed. Without a count the log can't show what really happened.
    """
    for moment in trace.of("step_fenced"):
        why = "" if moment.step is None or not moment.step.is_mutating else _unsafe_sending(trace, moment, moment.step)
        if why:
            yield at(trace, "double_apply", moment, why)
    for moment in trace.of("undo_begun"):
        if moment.step is not None and moment.step.closed_by is not None:
            yield at(trace, "double_apply", moment, f"its undo {moment.step.closed_by} had already begun")
        elif moment.step is not None and is_risky_undo(trace, moment.step):
            yield at(trace, "double_apply", moment, "its undo began though it may not have happened at all")
    for moment in trace.of("step_compensated"):
        before = trace.moments[moment.place - 1] if moment.place else None
        undo = text(moment.data, "undo")
        if before is None or (before.event.kind, before.event.step_id) != ("step_committed", undo):
            yield at(trace, "double_apply", moment, f"it is booked as undone, but {undo} was not committed with it")
    if trace.history.applied is not None:
        for step in trace.steps.values():
            yield from _counted(trace, trace.history.applied, step)


def _unsafe_sending(trace: Trace, moment: Moment, step: Facts) -> str:
    """Why one more attempt of a known step could have a second effect; empty if it can't."""
    if step.closed_by is not None:
        return f"it was sent again after its undo {step.closed_by} had begun"
    if step.state in SETTLED or step.state == "held":
        return f"it was sent again though it is {step.state}"
    doubts = list(step.open_attempts())
    if not doubts or step.state in ("pending", "applied"):
        return ""
    first = f"attempt {doubts[0].number} may have had its effect"
    contract = trace.history.contracts.get(step.contract)
    if not (step.dedups if contract is None else contract.dedups):
        return f"it was sent again though {first} and the provider knows no keys"
    wall_ms = number(moment.data, "wall_ms")
    if contract is not None and not remembered(step, contract, moment.event.at_ms, wall_ms):
        return f"it was sent again though {first} and the provider may have forgotten the key"
    return ""


def _counted(trace: Trace, applied: Mapping[str, int], step: Facts) -> Iterator[Violation]:
    """The provider's count of one step against what the books say of it."""
    counted = trace.history.counted
    if not step.is_mutating or step.effect == "workspace" or (counted is not None and step.tool not in counted):
        return  # of a workspace's files its own log says what stands, and `workspace_laws.py` judges that
    count = applied.get(step.key, 0) + applied.get(step.step_id, 0)
    least, most = 0, 1
    if step.state in ("committed", "applied") and step.closed_by is None and step.undo_of is None:
        least = 1
    if step.state in ("compensated", "rejected", "pending"):
        most = 0
    if not least <= count <= most:
        wanted = str(most) if least == most else "0 or 1"
        why = f"the books say {step.state}, so the provider's count should be {wanted}, but it is {count}"
        yield Violation("double_apply", trace.history.run_id, step.step_id, step.since_seq, why)


def dead_commit(trace: Trace) -> Iterator[Violation]:
    """Law 2: no mutating step is committed unless the asking epoch is live in the same transaction.

    Judged from each commit's epoch, and the epoch of the attempt whose receipt it carries, against the grants and ends
    before it. A lease that had run out on the clock, but that no event had ended, still counts as live.
    """
    for moment in trace.of("step_committed"):
        if moment.step is None or not moment.step.is_mutating:
            continue
        if trace.standing(moment) == "dead":
            why = f"it was committed under epoch {moment.event.epoch}, {who_was_live(moment)}"
            yield at(trace, "dead_commit", moment, why)
        sent = moment.step.attempt(number(moment.data, "attempt"))
        if sent is not None and sent.epoch != moment.event.epoch and trace.standing(moment) == "live":
            why = f"the receipt of attempt {sent.number}, sent under epoch {sent.epoch}, was committed by itself"
            yield at(
                trace, "dead_commit", moment, f"{why} under epoch {moment.event.epoch}, which had not asked for it"
            )


def stale_checkpoint(trace: Trace) -> Iterator[Violation]:
    """Law 3: a checkpoint is accepted only under the live epoch, with a larger number, over no unsettled mutating step.

    Judged from each saved checkpoint and the state just before it. Checkpoints that were refused leave no event.
    """
    for moment in trace.of("checkpoint_saved"):
        name = number(moment.data, "number")
        if trace.standing(moment) == "dead":
            why = f"checkpoint {name} was accepted under epoch {moment.event.epoch}, {who_was_live(moment)}"
            yield at(trace, "stale_checkpoint", moment, why)
        if name <= moment.run.checkpoint:
            why = f"checkpoint {name} was accepted after checkpoint {moment.run.checkpoint}"
            yield at(trace, "stale_checkpoint", moment, why)
        for step in unsettled(moment):
            why = f"checkpoint {name} was accepted while {step.step_id} was {step.state}"
            yield at(trace, "stale_checkpoint", moment, why, step.step_id)


def unstable_key(trace: Trace) -> Iterator[Violation]:
    """Law 4: the key is a function of namespace, run and step, and the stored request carries that key.

    Judged from each intent; the request's key only where the stored contract is known. What went over the wire is not
    in a log: that is the provider's to say.
    """
    for moment in trace.of(*sorted(INTENTS)):
        if "tool" not in moment.data or moment.event.step_id is None:
            continue
        key, right = (
            text(moment.data, "key"),
            step_key(trace.history.namespace, trace.history.run_id, moment.event.step_id),
        )
        if key != right:
            yield at(trace, "unstable_key", moment, f"its intent holds the key {key}, but the step's key is {right}")
        request = moment.data.get("request")
        contract = trace.history.contracts.get(text(moment.data, "contract"))
        if contract is not None and isinstance(request, Mapping) and not carries(request, contract, key):
            yield at(trace, "unstable_key", moment, f"the stored request does not carry the key {key}")


def changed_bytes(trace: Trace) -> Iterator[Violation]:
    """Law 5: a replay sends the stored request, and only a step that was never sent may be restated, by a newer epoch.

    Judged from the intents: the digest of each call against its own tool and arguments, and each later intent against
    the stored one. A step whose attempts all had no effect may be sent anew under another contract, the call unchanged.
    """
    for moment in trace.of(*sorted(INTENTS)):
        if "tool" in moment.data and text(moment.data, "call_digest") != digest_of_call(moment.data):
            yield at(trace, "changed_bytes", moment, "the digest of its intent is not that of its tool and arguments")
        if moment.event.kind == "step_fenced" and moment.step is not None and moment.step.attempts:
            why = _restated(moment, moment.step)
            if why:
                yield at(trace, "changed_bytes", moment, why)


def _restated(moment: Moment, step: Facts) -> str:
    """Why a later intent changed the call; empty if it didn't, or might."""
    if "tool" not in moment.data:
        asked, stored = number(moment.data, "intent_seq"), step.intent_seq
        return "" if asked == stored else f"it replayed the intent {asked}, but the stored one is {stored}"
    if text(moment.data, "call_digest") == step.call_digest:
        sent = next((sent for sent in step.attempts if sent.state not in HARMLESS), None)
        return "" if sent is None else f"its request was made anew though attempt {sent.number} may have had its effect"
    sent = next((sent for sent in step.attempts if sent.state != "unsent"), None)
    if sent is not None:
        return f"its call was changed though attempt {sent.number} had been sent"
    return "" if moment.event.epoch > step.epoch else f"its call was changed within epoch {step.epoch}"


def unlogged_effect(trace: Trace) -> Iterator[Violation]:
    """Law 6: no effect is sent before its intent is durable, none is admitted under a dead epoch or in a stopped run.

    Judged from each intent, from outcomes that name no intent, and from effects that the provider counts and the log
    doesn't know. Whether the gateway sent before the commit a log can't show; a crash between the two would.
    """
    for moment in trace.of("step_fenced"):
        if trace.standing(moment) == "dead":
            why = f"it was admitted under epoch {moment.event.epoch}, {who_was_live(moment)}"
            yield at(trace, "unlogged_effect", moment, why)
        if moment.run.frozen:
            why = f"it was admitted while the run was frozen ({moment.run.frozen})"
            yield at(trace, "unlogged_effect", moment, why)
        if moment.run.paused:
            yield at(trace, "unlogged_effect", moment, "it was admitted while the run was paused")
        if moment.step is None and "tool" not in moment.data:
            yield at(trace, "unlogged_effect", moment, "its first intent holds no call that could be sent again")
        asking = asked_by(moment.event.step_id or StepId(""))
        if moment.step is None and asking is not None and not _is_committed(trace, asking, moment):
            yield at(trace, "unlogged_effect", moment, f"it was let out before the answer of {asking} was committed")
        due = 1 if moment.step is None else len(moment.step.attempts) + 1
        if number(moment.data, "attempt") != due:
            why = f"attempt {number(moment.data, 'attempt')} was admitted where attempt {due} was next"
            yield at(trace, "unlogged_effect", moment, why)
    for moment in trace.of(*sorted(OUTCOMES | {"late_receipt", "step_held"})):
        place = number(moment.data, "attempt")
        named = "attempt" in moment.data
        is_unwritten = moment.event.kind == "step_held" and text(moment.data, "undo_of") in trace.steps
        if (moment.step is None and not is_unwritten) or (
            named and moment.step is not None and moment.step.attempt(place) is None
        ):
            why = f"{moment.event.kind} names attempt {place}, which no intent admitted"
            yield at(trace, "unlogged_effect", moment, why)
    known = {name for step in trace.steps.values() for name in (step.key, step.step_id)}
    for name, count in (trace.history.applied or {}).items():
        if count and name not in known:
            why = f"the provider counts {count} for {name}, which no intent of the run names"
            yield Violation("unlogged_effect", trace.history.run_id, None, 0, why)


def _is_committed(trace: Trace, step_id: StepId, moment: Moment) -> bool:
    """Whether this step had been committed before a moment."""
    before = (each.event for each in trace.moments[: moment.place])
    return any((event.kind, event.step_id) == ("step_committed", step_id) for event in before)


def overlap(trace: Trace) -> Iterator[Violation]:
    """Law 7: no mutating step is admitted while an older epoch's request of another may land, or another is held.

    Judged from each admission and the deadlines of what was open just before it. That a deadline really was kept on the
    wire is the gateway's part; a log shows only what was promised.
    """
    for moment in trace.of("step_fenced"):
        step = moment.step
        effect = text(moment.data, "effect") or ("" if step is None else step.effect)
        undo_of = text(moment.data, "undo_of") if step is None else step.undo_of
        if effect not in CHANGES_THE_WORLD:
            continue
        for other in moment.open.values():
            if not other.is_mutating or other.step_id == moment.event.step_id:
                continue
            if other.state == "held" and other.step_id != undo_of and not other.is_independent:
                yield at(trace, "overlap", moment, f"it was admitted while {other.step_id} was held for a person")
            for sent in other.on_the_wire(moment.event.at_ms):
                if sent.epoch < moment.event.epoch:
                    why = f"it was admitted while attempt {sent.number} of {other.step_id} could land"
                    why += f" (epoch {sent.epoch})"
                    yield at(trace, "overlap", moment, why)


def lost_fact(trace: Trace) -> Iterator[Violation]:
    """Law 8: a receipt is kept and joined, moves nothing that is settled, and freezes a run whose books it contradicts.

    Judged from each outcome against the step's state before it. A receipt that never reached the log can't be missed
    here; the provider's count (law 1) and what the caller was told (law 17) can miss it.
    """
    kinds = OUTCOMES | {"late_receipt", "step_held", "step_resolved", "step_fenced", "probe_answered", "replica_lost"}
    for moment in trace.of(*sorted(kinds)):
        why = "" if moment.step is None else _moves_a_fact(trace, moment, moment.step)
        if why:
            yield at(trace, "lost_fact", moment, why)


def _moves_a_fact(trace: Trace, moment: Moment, step: Facts) -> str:
    kind, sent = moment.event.kind, step.attempt(number(moment.data, "attempt"))
    if kind == "step_fenced":
        return "it was called again though its receipt was there to be joined" if step.state == "applied" else ""
    if is_gone(moment):
        return "" if step.effect == "workspace" else "its effect was taken for gone, but it is no file of a workspace"
    if kind == "late_receipt":
        settled_otherwise = step.state in ("rejected", "compensated") or (sent is not None and sent.state in HARMLESS)
        went_on = step.is_mutating and settled_otherwise and not froze(trace, moment)
        return "its receipt contradicts the books, but the run went on" if went_on else ""
    if kind == "probe_answered":
        return overtaken(moment, step)
    if kind == "step_resolved":
        open_to_verdicts = step.state in ("in_doubt", "held") and step.closed_by is None
        if open_to_verdicts or moment.run.frozen == "diverged":
            return ""
        return f"a person's verdict moved it though it was {step.state}"
    if step.state in SETTLED or (step.state == "applied" and kind != "step_committed"):
        return f"{kind} moved it though it was {step.state}"
    if kind in RECEIPTS and sent is not None and sent.state in HARMLESS:
        return f"attempt {sent.number} is booked as {sent.state}, but its receipt was taken as if nothing were wrong"
    if kind == "step_committed" and "attempt" not in moment.data:
        seq = number(moment.data, "receipt_seq")
        return "" if seq in step.receipts else f"it was joined with the event {seq}, which is no receipt of it"
    return ""


def doubt_as_failure(trace: Trace) -> Iterator[Violation]:
    """Law 9: unknown is not failed; a step is given up only when none of its attempts may have applied.

    Judged from each refusal and each proof of not having been sent: what the other attempts had come to by then, and
    the refusal's status against the refusals that the stored contract lists. That an attempt was truly never sent a log
    can't show.
    """
    for moment in trace.of("step_rejected", "step_unsent", "step_refused", "step_withdrawn", "step_held"):
        step, kind = moment.step, moment.event.kind
        sent = None if step is None else step.attempt(number(moment.data, "attempt"))
        if step is None or (sent is None and kind != "step_withdrawn"):
            continue
        if sent is not None and kind != "step_unsent" and not is_listed(trace, moment, step):
            why = "its answer was booked as a refusal, but the contract lists none such"
            yield at(trace, "doubt_as_failure", moment, why)
        gives_up = kind in ("step_rejected", "step_withdrawn") or text(moment.data, "state") == "pending"
        is_harmless = step.state == "pending" or not step.is_mutating  # a reading doubles nothing
        doubts = () if is_harmless else step.open_attempts(number(moment.data, "attempt"))
        left = next((doubt for doubt in doubts if not _settles(trace, moment, step, sent, doubt)), None)
        if gives_up and left is not None:
            why = f"it was booked as without effect though attempt {left.number} may have had one"
            yield at(trace, "doubt_as_failure", moment, why)


def _settles(trace: Trace, moment: Moment, step: Facts, sent: Sending | None, doubt: Sending) -> bool:
    """Whether a refused replay proves that an older attempt did not apply."""
    contract = trace.history.contracts.get(step.contract)
    if sent is None or moment.event.kind == "step_unsent":
        return False
    if not (step.dedups if contract is None else contract.dedups):
        return False
    if contract is not None and not remembered(step, contract, moment.event.at_ms, 0):
        return False
    return doubt.number < sent.number and doubt.deadline_ms <= sent.at_ms


def time_allowed(trace: Trace) -> Iterator[Violation]:
    """Law 14: the clock only ever refuses, save in the places that the contracts' word covers.

    Judged from verdicts that an attempt did not happen while it could still land, from leases ended before their time,
    from intents that claim older requests were over, from providers that were asked too early, and from a clock that
    went back. That a key's window was judged by both clocks shows at law 1; a wall clock behind its mark does not show.
    """
    now_ms = trace.history.now_ms
    for moment in trace.moments:
        why = _allowed_by_time(moment)
        if moment.event.at_ms < moment.run.last_ms:
            why = f"it is dated {moment.event.at_ms}, before an earlier event ({moment.run.last_ms})"
        elif now_ms and moment.event.at_ms > now_ms:
            why = f"it is dated {moment.event.at_ms}, after the present moment ({now_ms})"
        if why:
            yield at(trace, "time_allowed", moment, why)


def _allowed_by_time(moment: Moment) -> str:
    kind, at_ms = moment.event.kind, moment.event.at_ms
    attempts = () if moment.step is None else moment.step.attempts
    landing = next((sent for sent in attempts if sent.state in OPEN and sent.deadline_ms > at_ms), None)
    if kind == "step_resolved" and text(moment.data, "verdict") != "applied" and landing is not None:
        return f"a person's verdict was taken while attempt {landing.number} could land until {landing.deadline_ms}"
    if kind == "probe_answered" and moment.step is not None:
        return asked_early(moment, moment.step)
    if kind == "undo_begun" and moment.step is not None and moment.step.state in DOUBTFUL:
        last = moment.step.clear_ms
        return f"a doubt was undone at {at_ms}, but something of it could land until {last}" if at_ms <= last else ""
    if kind == "step_fenced" and moment.data.get("older_over") is True and landing is not None:
        return f"it claims that older requests were over, but attempt {landing.number} could still land"
    if kind == "lease_lapsed":
        until_ms = max(moment.run.expires_at_ms, number(moment.data, "expires_at_ms"))
        return f"the lease was lapsed at {at_ms}, but ran until {until_ms}" if at_ms < until_ms else ""
    return ""


def forged_right(trace: Trace) -> Iterator[Violation]:
    """Law 15: only a granted epoch is a right, and a run that is frozen, paused or at its end grants none.

    Judged from the epochs that events name. Whether a token was genuine shows before the log is reached.
    """
    for moment in trace.moments:
        if moment.event.kind == "lease_granted":
            state = moment.run.end or ("frozen" if moment.run.frozen else "paused" if moment.run.paused else "")
            if state:
                yield at(
                    trace, "forged_right", moment, f"epoch {moment.event.epoch} was granted though the run was {state}"
                )
        elif trace.standing(moment) == "forged":
            why = f"{moment.event.kind} was taken from epoch {moment.event.epoch}, which was never granted"
            yield at(trace, "forged_right", moment, why)


def reissued_epoch(trace: Trace) -> Iterator[Violation]:
    """Law 16: epochs and intents outlive a restore: no epoch is issued twice, no sending is taken for the first.

    Judged from the grants, from grants that callers were told of and that the log has elsewhere, and in the window
    after a restore from each sending of a step whose older ones may be lost. Epochs that were issued, lost with the log
    and told to nobody can't be seen.
    """
    for moment in trace.of("lease_granted"):
        if moment.event.epoch <= moment.run.newest:
            why = f"epoch {moment.event.epoch} was granted after epoch {moment.run.newest}"
            yield at(trace, "reissued_epoch", moment, why)
    for ack in trace.history.acknowledged:
        seq = trace.granted.get(ack.epoch, ack.seq)
        if ack.verb == "grant" and seq != ack.seq:
            why = f"epoch {ack.epoch} was told to be granted at {ack.seq}, but the log grants it at {seq}"
            yield Violation("reissued_epoch", trace.history.run_id, None, seq, why)
    for moment in trace.of("step_fenced"):
        step = moment.step
        effect = text(moment.data, "effect") if step is None else step.effect
        is_known = step is not None and step.is_known_since(moment.event.epoch)
        if moment.run.is_recovered and effect in CHANGES_THE_WORLD and not is_known:
            why = "it was sent as if for the first time, though the commits that a restore lost may hold a sending"
            yield at(trace, "reissued_epoch", moment, why)


def lost_ack(trace: Trace) -> Iterator[Violation]:
    """Law 17: what a caller was told had been done is in the log.

    Judged from the acknowledgements that a driver kept. The log itself knows nothing of answers.
    """
    events = {moment.event.seq: moment for moment in trace.moments}
    for ack in trace.history.acknowledged:
        moment = events.get(ack.seq)
        if moment is None:
            why = f"{ack.verb} was answered as done at {ack.seq}, but the log has no such event"
        else:
            why = _told_otherwise(ack, moment)
        if why:
            yield Violation("lost_ack", trace.history.run_id, ack.step_id, ack.seq, why)


def _told_otherwise(ack: Ack, moment: Moment) -> str:
    """How an event differs from what a caller was told of it; empty if it doesn't."""
    event = moment.event
    if event.kind not in ACKNOWLEDGED.get(ack.verb, frozenset()) or event.step_id != ack.step_id:
        return f"{ack.verb} was answered as done at {ack.seq}, but the log has {event.kind} there"
    if ack.verb in TOLD_ITS_EPOCH and event.epoch != ack.epoch:
        return f"{ack.verb} was answered under epoch {ack.epoch}, but the log has epoch {event.epoch}"
    if ack.verb == "checkpoint" and number(moment.data, "number") != ack.number:
        return f"checkpoint {ack.number} was answered as saved, but the log has {number(moment.data, 'number')} there"
    return ""


def altered_log(trace: Trace) -> Iterator[Violation]:
    """Law 18: the log is what was written: dense, chained, readable, and as long as its head says.

    Judged from the digests kept beside the events, and from the head or an anchor. A log that was rewritten whole, its
    digests and its head with it, can only be told by an anchor kept elsewhere.
    """
    history, digest = trace.history, CHAIN_START
    for moment, stored in zip(trace.moments, (*history.digests, *("",) * len(trace.moments)), strict=False):
        digest = chain(digest, moment.event)
        due = moment.place + 1
        if moment.event.seq != due or digest != stored:
            why = f"the event numbered {moment.event.seq} is not the one that was written as {due}"
            yield Violation("altered_log", history.run_id, moment.event.step_id, due, why)
            return
        if not moment.is_readable:
            yield at(trace, "altered_log", moment, f"no version writes a {moment.event.kind} with such data")
        if (moment.event.kind == "run_created") != (due == 1):
            yield at(trace, "altered_log", moment, "a log begins with run_created, and only begins with it")
        if due == 1 and moment.event.kind == "run_created" and text(moment.data, "run") != history.run_id:
            yield at(trace, "altered_log", moment, f"this is the log of run {text(moment.data, 'run')}")
    length = len(trace.moments)
    if history.head_seq is not None and history.head_seq != length:
        where = min(history.head_seq, length) + 1
        why = f"the log has {length} events, but the head says {history.head_seq}"
        yield Violation("altered_log", history.run_id, None, where, why)
    elif history.head_digest is not None and history.head_digest != digest:
        why = "the log's last digest is not the one that the head holds"
        yield Violation("altered_log", history.run_id, None, length, why)


LAWS: Mapping[str, Law] = {
    law.__name__: law
    for law in (
        double_apply,
        dead_commit,
        stale_checkpoint,
        unstable_key,
        changed_bytes,
        unlogged_effect,
        overlap,
        lost_fact,
        doubt_as_failure,
        orphan,
        unfenced_verb,
        superseded_as_failed,
        stuck,
        time_allowed,
        forged_right,
        reissued_epoch,
        lost_ack,
        altered_log,
    )
}
