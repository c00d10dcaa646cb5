"""Who waits for a run to become claimable, and whom one wakes.

A run that becomes claimable wakes one waiter that may take it, not all of them: a thousand idle workers must not each
ask the store whenever anything is committed. A wake that is lost, because its waiter hung up, is made good by the next
look that each waiter takes by itself.
"""

import asyncio
from collections.abc import Mapping, Sequence

from tidefast.protocol.lease import not_claimable
from tidefast.protocol.records import Now, RunHead

Wanted = tuple[Mapping[str, Sequence[str]], str]  # agents with their versions (none: any), and the prefix of run ids


class Claimers:
    """The waiters of one engine, in order of their coming. For the event loop's thread only."""

    def __init__(self) -> None:
        self._of_agent: dict[str, dict[asyncio.Future[None], Wanted]] = {}

    async def wait(self, agents: Mapping[str, Sequence[str]], prefix: str, timeout_ms: int) -> None:
        """Return when a run that may be taken became claimable, or after the time given."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for agent in agents:
            self._of_agent.setdefault(agent, {})[waiter] = agents, prefix
        try:
            async with asyncio.timeout(max(timeout_ms, 0) / 1_000):
                await waiter
        except TimeoutError:
            return
        finally:
            for agent in agents:
                waiting = self._of_agent[agent]
                del waiting[waiter]
                if not waiting:
                    del self._of_agent[agent]

    def wake(self, head: RunHead, now: Now) -> None:
        """Tell the first who may take this run, if it can be taken."""
        waiting = self._of_agent.get(head.agent)
        if not waiting or not_claimable(head, now) is not None:
            return
        for waiter, (agents, prefix) in waiting.items():
            versions = agents[head.agent]
            if (
                not waiter.done()
                and head.run_id.startswith(prefix)
                and (not versions or head.agent_version in versions)
            ):
                waiter.set_result(None)
                return
