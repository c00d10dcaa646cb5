"""Sockets, the limits of a connection, and an orderly end.

The listening socket is our own, made with IPPROTO_TCP: without it asyncio leaves Nagle's algorithm on, and small
answers take 40 ms. Without keys for callers only loopback addresses are bound. On SIGTERM or SIGINT no new connection
is accepted, long polls end, requests in flight are answered, and `serve` returns; what is still open after the grace is
cut off, which its caller hears as an unknown outcome and repeats.
"""

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette

from tidefast.server.door import is_loopback
from tidefast.server.limits import limited
from tidefast.wire.replica import MESSAGE_BYTES_MAX

GRACE_S = 10
KEEP_ALIVE_S = 75  # longer than any client of ours keeps an idle connection, so that the client is the one to close
BACKLOG = 1024
# libuv takes one connection of a listening socket in each round of its loop. In a busy server, whose rounds are long,
# new callers would wait for their turn outside; so the one socket is listened to by several handles.
ACCEPTS_PER_ROUND = 16
T = TypeVar("T")


class ServeRefused(Exception):
    """The server can't be started. The message says what, why and what to do."""


def listen(host: str, port: int, *, has_keys: bool = False) -> socket.socket:
    """A bound socket; port 0 takes a free one. Without keys for callers only on loopback. Raises `ServeRefused`."""
    name = "127.0.0.1" if host == "localhost" else host.strip("[]")
    if not is_loopback(name) and not has_keys:
        raise ServeRefused(
            f"--host {host}: only loopback addresses are served without --keys; use 127.0.0.1 or ::1, or give --keys"
        )
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(name).version == 6 else socket.AF_INET
    except ValueError as error:
        raise ServeRefused(f"--host {host}: expected an address of this machine by number, or localhost") from error
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((name, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "ports go from 0 to 65535"
        raise ServeRefused(f"--host {host} --port {port}: {reason}; choose another port or address") from error
    return listener


async def serve(
    app: Starlette,
    host: str,
    port: int,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    on_hangup: Callable[[], None] | None = None,
) -> None:
    """Serve until a signal comes or `stop` is set, then end in order.

    `on_ready` is told the URL, `on_hangup` is called at each SIGHUP.

    Raises `ServeRefused` if the address can't be bound.
    """
    listener = listen(host, port, has_keys=app.state.has_keys)
    listeners = [listener, *(listener.dup() for _ in range(ACCEPTS_PER_ROUND - 1))]
    config = uvicorn.Config(
        app,
        http=limited(app.state.meters.load),
        ws="none",  # loaded with the first socket: see `limits.py`
        ws_max_size=MESSAGE_BYTES_MAX,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    try:
        server = _Server(config, app.state.stopping, stop or asyncio.Event(), on_ready)
        server.on_hangup = on_hangup
        app.state.meters.load.start()
        await server.serve(listeners)
    finally:
        app.state.meters.load.stop()
        for one in listeners:
            one.close()


class _Server(uvicorn.Server):
    """uvicorn's server, with a stop event and with signals that end it instead of being raised again."""

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: asyncio.Event,
        stop: asyncio.Event,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._stop = stop
        self._on_ready = on_ready
        self.on_hangup: Callable[[], None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def main_loop(self) -> None:
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal ends the server in order, the second one without waiting for requests in flight."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        if self.on_hangup is not None:
            loop.add_signal_handler(signal.SIGHUP, self.on_hangup)
            signals = (*signals, signal.SIGHUP)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.force_exit = self._stop.is_set()
        self._stop.set()
