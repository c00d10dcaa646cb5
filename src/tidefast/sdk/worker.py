"""A worker: claims runs, drives many at once, and gives their leases back when it must go.

It long-polls for claimable runs up to its limit. `stop` (SIGTERM and SIGINT call it) ends the claiming; each pass lets
its intents in flight settle, then releases its lease, so that another worker goes on at once instead of after a lapse.
"""

import asyncio
import secrets
import signal
import traceback

import structlog

from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.lease import LEASE_DEFAULT_MS, LEASE_MAX_MS, LEASE_MIN_MS
from tidefast.protocol.points import Hook
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.app import App
from tidefast.sdk.authority import Authority, AuthorityUnavailable
from tidefast.sdk.errors import Error, Misuse, Unavailable
from tidefast.sdk.heartbeat import Heartbeat
from tidefast.sdk.lease import Clock, LeaseTable, boot_s
from tidefast.sdk.line import Backoff
from tidefast.sdk.passes import Outcome, Pass

RUNS_DEFAULT = 64
CLAIM_MAX = 100  # in one claim, so that several workers share what there is
WAIT_MAX_MS = 2_000  # of a poll, and so of a stop: a poll that is cut off could be granted leases nobody keeps
FINISH_TRIES_MAX = 20  # above the ten grants without progress that freeze a run
_log = structlog.get_logger()


class Worker:
    """Drives the runs of one app under one authority. `holder` is its identity on leases, random by default."""

    def __init__(
        self,
        authority: Authority,
        app: App,
        heartbeat: Heartbeat,
        *,
        holder: str | None = None,
        lease_ms: int = LEASE_DEFAULT_MS,
        max_runs: int = RUNS_DEFAULT,
        hook: Hook | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008 - immutable
        clock: Clock = boot_s,
        grace_s: float = 30.0,
    ) -> None:
        if not LEASE_MIN_MS <= lease_ms <= LEASE_MAX_MS:
            raise Misuse("lease_ms is out of range", f"expected {LEASE_MIN_MS} to {LEASE_MAX_MS}, found {lease_ms}")
        if max_runs < 1:
            raise Misuse("max_runs is out of range", f"expected 1 or more, found {max_runs}")
        self.holder = holder or f"w-{secrets.token_hex(8)}"
        self.leases = LeaseTable()
        self._authority, self._app, self._heartbeat = authority, app, heartbeat
        self._lease_ms, self._max_runs = lease_ms, max_runs
        self._hook, self._backoff, self._clock, self._grace_s = hook, backoff, clock, grace_s
        self._passes: dict[asyncio.Task[Outcome], Pass] = {}
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()

    def stop(self) -> None:
        """Claim nothing more, end every pass, release every lease. On the worker's loop only."""
        self._stopping.set()
        self._freed.set()
        for running in self._passes.values():
            running.stop()

    async def run(self, *, handle_signals: bool = False) -> None:
        """Claim and drive until stopped, then wait for every pass. `handle_signals`: SIGTERM and SIGINT stop it."""
        if not self._app.agents:
            raise Misuse("this app has no agents", "", "declare one with @app.agent")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if handle_signals else ():
            loop.add_signal_handler(number, self.stop)
        self._heartbeat.start(self.leases)
        _log.info("worker_started", holder=self.holder, agents=sorted(self._app.agents), max_runs=self._max_runs)
        try:
            await self._claim_on()
            await self._passes_over()
        finally:
            for task in self._passes:
                task.cancel()
            self._heartbeat.stop()
            for number in (signal.SIGTERM, signal.SIGINT) if handle_signals else ():
                loop.remove_signal_handler(number)
        _log.info("worker_stopped", holder=self.holder)

    async def finish(self, run_id: str, *, try_again: bool = True) -> Outcome:
        """Drive one run until it is completed, failed, held or frozen, or until stopped: for embedding programs.

        Without `try_again` a pass that an exception of the agent ended is the last one; the run can be driven again.
        Raises `Error` if the run can't be granted, `Unavailable` if nobody answers.
        """
        self._heartbeat.start(self.leases)
        try:
            for tries in range(FINISH_TRIES_MAX):
                grant, asked_s = await self._grant(run_id)
                outcome = await self._start(grant, asked_s)
                is_over = outcome not in ("preempted", "error", "done") or (outcome == "error" and not try_again)
                if self._stopping.is_set() or is_over:
                    return outcome
                await asyncio.sleep(self._backoff.delay_s(tries))
        finally:
            self._heartbeat.stop()
        raise Error(f"run {run_id} doesn't get to its end", f"{FINISH_TRIES_MAX} passes ended without it")

    async def _grant(self, run_id: str) -> tuple[LeaseGrant, float]:
        """A lease on one run, waiting while somebody else holds it or it rests."""
        request_id, silent = secrets.token_hex(16), 0
        tries = 0
        while not self._stopping.is_set():
            asked_s = self._clock()
            try:
                answer = await self._authority.grant(run_id, self.holder, self._lease_ms, request_id)
            except AuthorityUnavailable as error:
                silent += 1
                if silent > 10:
                    raise Unavailable(f"nobody grants run {run_id}", str(error), "start the authority") from error
            else:
                if isinstance(answer, LeaseGrant):
                    return answer, asked_s
                if answer.code not in ("lease_held", "store_unavailable", "overloaded"):
                    raise _ungranted(run_id, answer)
            await self._rest(self._backoff.delay_s(tries))
            tries += 1
        raise Error(f"run {run_id} was not driven", "the worker was stopped first")

    async def _claim_on(self) -> None:
        tries, request_id = 0, secrets.token_hex(16)
        while not self._stopping.is_set():
            if len(self._passes) >= self._max_runs:
                self._freed.clear()
                await self._freed.wait()
                continue
            try:
                await self._claim(request_id)
            except AuthorityUnavailable as error:
                _log.warning("authority_unavailable", holder=self.holder, error=str(error)[:200])
                await self._rest(self._backoff.delay_s(tries))
                tries += 1
                continue
            tries, request_id = 0, secrets.token_hex(16)

    async def _claim(self, request_id: str) -> None:
        """One long poll. A stop doesn't cut it short: what it is granted by then is given back at once."""
        free = min(self._max_runs - len(self._passes), CLAIM_MAX)
        wait_ms = min(self._lease_ms // 3, WAIT_MAX_MS)
        agents, asked_s = self._app.versions(), self._clock()
        grants = await self._authority.claim(agents, self.holder, self._lease_ms, free, wait_ms, request_id)
        held = {(running.lease.run_id, running.lease.epoch) for running in self._passes.values()}
        for grant in grants:
            if (grant.run_id, grant.epoch) not in held:
                self._start(grant, asked_s)

    def _start(self, grant: LeaseGrant, asked_s: float) -> "asyncio.Task[Outcome]":
        started = Pass(
            self._authority,
            self._app,
            grant,
            asked_s,
            self.leases,
            hook=self._hook,
            backoff=self._backoff,
            clock=self._clock,
            grace_s=self._grace_s,
        )
        if self._stopping.is_set():
            started.stop()
        task = asyncio.get_running_loop().create_task(started.drive(), name=f"tidefast run {grant.run_id}")
        self._passes[task] = started
        task.add_done_callback(self._over)
        return task

    def _over(self, task: "asyncio.Task[Outcome]") -> None:
        running = self._passes.pop(task)
        self._freed.set()
        broken = None if task.cancelled() else task.exception()
        if broken is not None:
            trace = "".join(
                traceback.format_exception(broken)
            )  # without the frames' values: they hold bodies and tokens
            _log.error("pass_broken", run=running.lease.run_id, epoch=running.lease.epoch, trace=trace)

    async def _passes_over(self) -> None:
        while self._passes:
            await asyncio.wait(list(self._passes))

    async def _rest(self, delay_s: float) -> None:
        """Wait, or until stopped."""
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return


def _ungranted(run_id: str, refused: Refused) -> Error:
    told = ", ".join(f"{name} {value}" for name, value in refused.facts.items())
    return Error(f"run {run_id} can't be driven now", f"{refused.code} ({refused.reason}) {told}".rstrip())
