"""What each word of a script does."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.canonical import canonical
from tidefast.protocol.commands import MarkLost, OutcomeKind, ResolveVerdict, RunVerb, Settle
from tidefast.protocol.fields import duration_ms
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.laws import Ack
from tidefast.sdk.lease import LeaseTable
from tidefast.sdk.line import Backoff
from tidefast.sdk.passes import Pass
from tidefast.sim.scenarios.agents import app
from tidefast.sim.scenarios.expecting import expect
from tidefast.sim.scenarios.provider import ASK, FATES, Fate
from tidefast.sim.scenarios.stage import AUTHORITY, PERSON, PROVIDER, Stage
from tidefast.sim.scenarios.text import Move, ScriptError

LEASE_MS = 15_000
PATIENCE_MS = 600_000
NOT_ARGS = frozenset((*FATES, "wait", "at"))
Verb = Callable[[Stage, Move], Awaitable[None]]
VERBS: dict[str, Verb] = {}


def verb(name: str) -> Callable[[Verb], Verb]:
    """Make a function the meaning of a word."""

    def declare(function: Verb) -> Verb:
        VERBS[name] = function
        return function

    return declare


async def make(stage: Stage, move: Move) -> None:
    """Make one move, and return when nothing more happens by itself. Raises `ScriptError`."""
    known = VERBS.get(move.verb)
    if known is None:
        raise ScriptError(f"no move is called {move.verb!r}; there are {', '.join(sorted(VERBS))}")
    acting = move.words[1].partition("@")[0] if len(move.words) > 1 else ""
    if acting in stage.frozen and move.verb not in ("wake", "expect", "drive"):
        raise ScriptError(f"{acting} is frozen")
    await known(stage, move)
    await stage.quiet()


def word(move: Move, place: int, what: str) -> str:
    if place >= len(move.words):
        raise ScriptError(f"{move.verb} needs {what}")
    return move.words[place]


def length_ms(text: str) -> int:
    found = duration_ms(text)
    if found is None:
        raise ScriptError(f"expected a duration like 16s, found {text!r}")
    return found


def value(text: str) -> Any:
    """An option's value: JSON where it reads as such, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def says(stage: Stage, who: str, text: str) -> None:
    """The caller's question, for the drawing alone."""
    stage.note("", "", who, AUTHORITY, text)


@verb("start")
async def _start(stage: Stage, move: Move) -> None:
    stage.run = RunId(word(move, 1, "a run"))
    agent, given = move.options.get("agent", "shop"), value(move.options.get("input", "null"))
    says(stage, PERSON, f"start run {stage.run}")
    await stage.ask(PERSON, str(stage.run), stage.authority.create_run(stage.run, agent, "1", canonical(given)))


@verb("grant")
async def _grant(stage: Stage, move: Move) -> None:
    who, lease = word(move, 1, "a worker"), length_ms(move.options.get("lease", "15s"))
    says(stage, who, "lease, please")

    async def asked() -> object:
        answer = await stage.authority.grant(stage.run, who, lease, move.options.get("request", ""))
        if isinstance(answer, LeaseGrant):
            stage.granted.setdefault((answer.run_id, who), []).append(answer)
        return answer

    await stage.ask(who, "", asked())


@verb("race")
async def _race(stage: Stage, move: Move) -> None:
    """Several workers ask for the lease in the same moment."""
    for who in move.words[1:]:
        says(stage, who, "lease, please")

    async def asked(who: str) -> object:
        answer = await stage.authority.grant(stage.run, who, LEASE_MS, "")
        if isinstance(answer, LeaseGrant):
            stage.granted.setdefault((answer.run_id, who), []).append(answer)
        return answer

    for who in move.words[1:]:
        stage.put(who, "", asked(who))


@verb("renew")
async def _renew(stage: Stage, move: Move) -> None:
    who = word(move, 1, "a worker")

    async def asked() -> object:
        return (await stage.authority.renew([stage.right(who)]))[0]

    says(stage, _name(who), "heartbeat")
    await stage.ask(_name(who), "heartbeat", asked())


@verb("release")
async def _release(stage: Stage, move: Move) -> None:
    who, reason = word(move, 1, "a worker"), move.options.get("reason", "shutdown")
    says(stage, _name(who), f"lease given back ({reason})")
    await stage.ask(
        _name(who), "release", stage.authority.release(stage.right(who), reason, ""), _ack(stage, who, "release")
    )


@verb("apply")
async def _apply(stage: Stage, move: Move) -> None:
    who, step = word(move, 1, "a worker"), word(move, 2, "a step")
    wait = length_ms(move.options["wait"]) if "wait" in move.options else PATIENCE_MS
    tool = word(move, 3, "a tool, or stored")
    _set_fate(stage, move, tool)
    args = None if tool == "stored" else canonical({k: value(v) for k, v in move.options.items() if k not in NOT_ARGS})
    what = "the stored call" if args is None else f"{tool} {_plain(move)}".strip()
    says(stage, _name(who), f"{step}: {what}")
    named = "" if args is None else tool
    await stage.ask(_name(who), step, stage.authority.apply(stage.right(who), step, named, args, wait))


@verb("compensate")
async def _compensate(stage: Stage, move: Move) -> None:
    who, step = word(move, 1, "a worker"), word(move, 2, "a step")
    _set_fate(stage, move, "refund")
    says(stage, _name(who), f"undo {step}")
    await stage.ask(_name(who), f"{step}~undo", stage.authority.compensate(stage.right(who), step, PATIENCE_MS))


@verb("result")
async def _result(stage: Stage, move: Move) -> None:
    who, step, given = word(move, 1, "a worker"), word(move, 2, "a step"), value(word(move, 3, "a value"))
    says(stage, _name(who), f"step {step}: local result")
    await stage.ask(_name(who), step, stage.authority.save_result(stage.right(who), step, canonical(given)))


@verb("checkpoint")
async def _checkpoint(stage: Stage, move: Move) -> None:
    who, number = word(move, 1, "a worker"), int(word(move, 2, "a number"))
    state = canonical(value(move.options.get("state", f'"by {who}"')))
    says(stage, _name(who), f"checkpoint {number}")
    ack = _ack(stage, who, "checkpoint")._replace(number=number)
    asked = stage.authority.checkpoint(stage.right(who), number, state)
    await stage.ask(_name(who), f"checkpoint {number}", asked, ack)


@verb("complete")
async def _complete(stage: Stage, move: Move) -> None:
    who = word(move, 1, "a worker")
    asked, dropped = _names(move.options, "asked"), _names(move.options, "dropped")
    says(stage, _name(who), "run is done")
    verbing = stage.authority.complete(stage.right(who), '"done"', asked, dropped)
    await stage.ask(_name(who), "complete", verbing, _ack(stage, who, "complete"))


@verb("fail")
async def _fail(stage: Stage, move: Move) -> None:
    who, why = word(move, 1, "a worker"), word(move, 2, "a reason")
    says(stage, _name(who), f"the run fails: {why}")
    await stage.ask(_name(who), "fail", stage.authority.fail(stage.right(who), why), _ack(stage, who, "fail"))


async def _oversee(stage: Stage, move: Move, verb_: RunVerb, told: str) -> None:
    expect_epoch = int(move.options["expect"]) if "expect" in move.options else None
    says(stage, PERSON, told)
    await stage.ask(PERSON, verb_, stage.authority.oversee(verb_, stage.run, "ann", "", expect_epoch))


@verb("preempt")
async def _preempt(stage: Stage, move: Move) -> None:
    await _oversee(stage, move, "preempt", "end the lease")


@verb("pause")
async def _pause(stage: Stage, move: Move) -> None:
    await _oversee(stage, move, "pause", "nothing new, please")


@verb("resume")
async def _resume(stage: Stage, move: Move) -> None:
    await _oversee(stage, move, "resume", "go on after the pause")


@verb("halt")
async def _halt(stage: Stage, move: Move) -> None:
    await _oversee(stage, move, "freeze", "stop, I must look at it")


@verb("thaw")
async def _thaw(stage: Stage, move: Move) -> None:
    await _oversee(stage, move, "thaw", "go on")


@verb("cancel")
async def _cancel(stage: Stage, move: Move) -> None:
    await _oversee(stage, move, "cancel", "end this run, and undo it")


@verb("resolve")
async def _resolve(stage: Stage, move: Move) -> None:
    step, verdict = word(move, 1, "a step"), word(move, 2, "a verdict")
    looked = move.options.get("looked")
    looked_ms = None if looked is None else stage.clock.ms - length_ms(looked)
    attempts = int(move.options["attempts"]) if "attempts" in move.options else None
    receipt = canonical(value(move.options.get("receipt", "null")))
    says(stage, PERSON, f"{step}: {verdict}, I looked {looked or 'not'}{' ago' if looked else ''}")
    asked = stage.authority.resolve(
        stage.run, step, cast(ResolveVerdict, verdict), "ann", "looked", receipt, looked_ms, attempts
    )
    await stage.ask(PERSON, step, asked)


@verb("advance")
async def _advance(stage: Stage, move: Move) -> None:
    stage.note("", "", "", told=f"{word(move, 1, 'a duration')} pass")
    stage.clock.advance(length_ms(word(move, 1, "a duration")))


@verb("wall")
async def _wall(stage: Stage, move: Move) -> None:
    """The wall clock is stepped; the authority's own clock isn't."""
    where, far = word(move, 1, "back or ahead"), length_ms(word(move, 2, "a duration"))
    stage.note("", "", "", told=f"the wall clock is set {where} by {word(move, 2, '')}")
    stage.clock.wall_ms += far if where == "ahead" else -far


@verb("sweep")
async def _sweep(stage: Stage, move: Move) -> None:
    await stage.keeper.sweep()


@verb("probe")
async def _probe(stage: Stage, move: Move) -> None:
    """The sweep asks providers about every doubt that is due."""
    _set_fate(stage, move, ASK)
    if not stage.authority.gateway.prober.sweep():
        stage.note("!", "nobody is asked", AUTHORITY, told="nobody is asked")


@verb("freeze")
async def _freeze(stage: Stage, move: Move) -> None:
    who = word(move, 1, "a worker or gateway")
    if who == "gateway":
        stage.halt_at = move.options.get("at", "after_intent")
        return
    stage.frozen[who] = asyncio.Event()
    stage.note("", "", who, told="frozen")


@verb("wake")
async def _wake(stage: Stage, move: Move) -> None:
    who = word(move, 1, "a worker or gateway")
    stage.note("", "", AUTHORITY if who == "gateway" else who, told="goes on")
    if who == "gateway":
        stage.go_on()
    elif who in stage.frozen:
        stage.frozen.pop(who).set()
    else:
        raise ScriptError(f"{who} isn't frozen")


@verb("kill")
async def _kill(stage: Stage, move: Move) -> None:
    who = word(move, 1, "a worker or authority")
    if who != AUTHORITY:
        stage.frozen[who] = asyncio.Event()  # it never speaks again
        stage.note("", "", who, told="dies")
        return
    stage.note("!", "the authority is killed and started again", AUTHORITY, told="KILLED; started again")
    await stage.restart()


@verb("backup")
async def _backup(stage: Stage, move: Move) -> None:
    stage.note("!", "a backup is made", AUTHORITY, told="a backup is made")
    stage.back_up()


@verb("restore")
async def _restore(stage: Stage, move: Move) -> None:
    stage.note("!", "the store is lost, and the backup put into service", AUTHORITY, told="LOST; backup restored")
    await stage.restore()


@verb("store")
async def _store(stage: Stage, move: Move) -> None:
    if move.words[1:2] != ["fails"] or word(move, 2, "before or after") not in ("before", "after"):
        raise ScriptError("expected: store fails before|after")
    stage.fail_store(move.words[2])
    stage.note("", "", AUTHORITY, told=f"next commit fails {move.words[2]} writing")


@verb("deploy")
async def _deploy(stage: Stage, move: Move) -> None:
    """The authority is restarted with another configuration of a tool."""
    tool = word(move, 1, "a tool")
    contract = stage.tools.pop(tool)
    if move.words[2:3] != ["gone"]:
        stage.tools[tool] = contract._replace(key_scope=move.options.get("scope", contract.key_scope))
    stage.note(
        "!", f"the authority is restarted, {' '.join(move.text.split()[1:])}", AUTHORITY, told="restarted: deploy"
    )
    await stage.restart()


@verb("provider")
async def _provider(stage: Stage, move: Move) -> None:
    tool = word(move, 1, "a tool, or forgets")
    stage.note("", "", PROVIDER, told=" ".join(move.text.split()[1:]))
    if tool == "forgets":
        stage.provider.forget()
    elif move.words[2:] == ["ignores", "keys"]:
        stage.provider.ignores_keys.add(tool)
    elif move.words[2:3] == ["shows"]:
        stage.provider.shows[tool] = int(word(move, 3, "a number"))
    else:
        _set_fate(stage, move, tool)


@verb("late")
async def _late(stage: Stage, move: Move) -> None:
    if word(move, 1, "ack") != "ack":
        raise ScriptError("expected: late ack STEP")
    stage.provider.release(word(move, 2, "a step"), "answer", arrives=True)


@verb("land")
async def _land(stage: Stage, move: Move) -> None:
    """A request that was held up reaches its provider."""
    stage.provider.release(word(move, 1, "a step"), "request", arrives=True)


@verb("lose")
async def _lose(stage: Stage, move: Move) -> None:
    what = word(move, 1, "request or answer")
    stage.provider.release(word(move, 2, "a step"), what, arrives=False)


@verb("word")
async def _word(stage: Stage, move: Move) -> None:
    """A gateway that was given up for dead brings word of an attempt."""
    step, outcome = word(move, 1, "a step"), word(move, 2, "an outcome")
    receipt = canonical({"body": {"id": "charge_1"}, "status": 200}) if outcome == "applied" else "null"
    attempt = int(move.options.get("attempt", "1"))
    command = Settle(stage.run, StepId(step), attempt, cast(OutcomeKind, outcome), receipt, "late_word")
    stage.note("", "", AUTHORITY, told=f"an old gateway: {step} {outcome}")
    await stage.ask("gateway", step, stage.engine.submit(command))


@verb("giveup")
async def _giveup(stage: Stage, move: Move) -> None:
    """The sweep books an attempt whose deadline has passed as lost."""
    command = MarkLost(stage.run, StepId(word(move, 1, "a step")))
    await stage.ask("gateway", move.words[1], stage.engine.submit(command))


@verb("drive")
async def _drive(stage: Stage, move: Move) -> None:
    """A pass of an agent through the real SDK, under the worker's newest grant."""
    who = word(move, 1, "a worker")
    grant, seam = stage.grant_of(who), stage.seam(who)
    given = grant.with_token(seam.token(stage.right(who)))

    stopped_s = stage.clock.ms / 1_000 if move.options.get("clock") == "stopped" else None

    def now_s() -> float:
        return stage.clock.ms / 1_000 if stopped_s is None else stopped_s

    asked_s = (grant.expires_at_ms - grant.lease_ms) / 1_000
    driven = Pass(seam, app, given, asked_s, LeaseTable(), backoff=Backoff(0.0, 0.0), clock=now_s)

    async def drive() -> None:
        stage.outcomes[who] = await driven.drive()
        stage.note("=", f"{who}: pass under epoch {grant.epoch} ends: {stage.outcomes[who]}", who)

    stage.note("", "", who, told=f"drives agent {grant.agent}")
    stage.spawn(drive())


@verb("expect")
async def _expect(stage: Stage, move: Move) -> None:
    expect(stage, move)


def _name(address: str) -> str:
    return address.partition("@")[0]


def _names(options: Mapping[str, str], name: str) -> list[str]:
    return [part for part in options.get(name, "").split(",") if part]


def _plain(move: Move) -> str:
    return " ".join(f"{name} {text}" for name, text in move.options.items() if name not in NOT_ARGS)


def _ack(stage: Stage, who: str, verbing: str) -> Ack:
    return Ack(verbing, Epoch(stage.right(who).epoch), 0)


def _set_fate(stage: Stage, move: Move, tool: str) -> None:
    fate = Fate.of(move.options)
    if "always" in move.words:
        stage.provider.always[tool] = fate or Fate()
    elif fate is not None:
        stage.provider.next[stage.step(move.words[2]).tool if tool == "stored" else tool] = fate  # type: ignore[union-attr]
