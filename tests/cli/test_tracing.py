"""`serve` sends its spans where OpenTelemetry's variables say, with the last ones at its end."""

import asyncio
import threading
from pathlib import Path

import pytest
from aiohttp import web
from tests.cli.processes import running, tidefast

from tidefast.cli.tracing import start_tracing
from tidefast.services.tools import ConfigError


class Collector(threading.Thread):
    """Takes what is sent to /v1/traces."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bodies: list[bytes] = []
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self.ready = threading.Event()

    def run(self) -> None:
        self.loop.run_until_complete(self.start_server())
        self.loop.run_forever()
        self.loop.run_until_complete(self.runner.cleanup())
        self.loop.close()

    async def start_server(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", self.take)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]
        self.ready.set()

    async def take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.Response(content_type="application/x-protobuf")


def test_spans_of_a_server_reach_the_collector(home: Path) -> None:
    collector = Collector()
    collector.start()
    collector.ready.wait()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}"}
    with running("serve", "--store", "s.db", "--port", "0", cwd=home, more=environment) as server:
        at = ("--url", server.said["url"])
        assert tidefast("start", "desk", '"topsecret"', *at, "--run-id", "r-7", cwd=home).returncode == 0
        assert tidefast("show", "r-7", *at, cwd=home).returncode == 0
        assert server.end() == 0
    collector.loop.call_soon_threadsafe(collector.loop.stop)
    collector.join()
    told = b"".join(collector.bodies)
    assert b"POST /v1/runs" in told and b"GET /v1/runs/{run}" in told and b"tidefast.run" in told and b"r-7" in told
    assert b"topsecret" not in told


def test_traces_that_cannot_be_sent_are_a_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_tracing() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"tidefast\[otel\]"):
        start_tracing()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_tracing() is None
