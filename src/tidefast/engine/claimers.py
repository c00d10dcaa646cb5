"""Who waits for a run to become claimable, and whom one wakes.

A run that becomes claimable wakes one waiter that may take it, not all of them: a thousand idle workers must not each
ask the store whenever anything is committed. A run that rests wakes one when its rest is over. A waiter that is
cancelled when it has just been woken passes the wake on; whatever else is lost is made good by the look that each
waiter takes by itself, now and then.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tidefast.protocol.lease import not_claimable
from tidefast.protocol.records import Now, RunHead

Wanted = tuple[Mapping[str, Sequence[str]], str]  # agents with their versions (none: any), and the prefix of run ids


class Claimers:
    """The waiters of one engine, in order of their coming. For the event loop's thread only."""

    def __init__(self, now: Callable[[], Now]) -> None:
        self._now = now
        self._of_agent: dict[str, dict[asyncio.Future[RunHead], Wanted]] = {}

    async def wait(self, agents: Mapping[str, Sequence[str]], prefix: str, timeout_ms: int) -> None:
        """Return when a run that may be taken became claimable, or after the time given."""
        waiter: asyncio.Future[RunHead] = asyncio.get_running_loop().create_future()
        for agent in agents:
            self._of_agent.setdefault(agent, {})[waiter] = agents, prefix
        try:
            await asyncio.wait((waiter,), timeout=max(timeout_ms, 0) / 1_000)
        except asyncio.CancelledError:
            if waiter.done():
                asyncio.get_running_loop().call_soon(self.changed, waiter.result())
            raise
        finally:
            for agent in agents:
                waiting = self._of_agent[agent]
                del waiting[waiter]
                if not waiting:
                    del self._of_agent[agent]

    def changed(self, head: RunHead) -> None:
        """A head became durable: tell the first who may take its run, if it can be taken, or when it can."""
        now = self._now()
        if now.ms < head.not_before_ms and not head.is_live:
            rest_s = (head.not_before_ms - now.ms) / 1_000
            asyncio.get_running_loop().call_later(rest_s, self._wake, head)  # who is woken looks whether it still is so
        elif head.agent in self._of_agent and not_claimable(head, now) is None:
            self._wake(head)

    def _wake(self, head: RunHead) -> None:
        for waiter, (agents, prefix) in self._of_agent.get(head.agent, {}).items():
            versions = agents[head.agent]
            is_wanted = head.run_id.startswith(prefix) and (not versions or head.agent_version in versions)
            if is_wanted and not waiter.done():
                waiter.set_result(head)
                return
