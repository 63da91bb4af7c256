"""The server's process: its socket, the limits that uvicorn does not have, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import HalfbyteError
from .refusals import Refused
from .service import Service
from .settings import Settings

BACKLOG = 2048
DESCRIPTORS = 256  # beside those of connections
STEP_SECONDS = 5.0  # that a last step may take
SWITCH_SECONDS = (
    0.5e-3  # that the engine waits for Python while replies are written; of 5 ms, the usual, a GPU stands still
)
LEAVE_SECONDS = 2.0  # after the time to drain is over, for the last words to be sent


class CannotListen(HalfbyteError):
    exit_code = 2


class Connection(H11Protocol):
    """uvicorn's, with a clock: headers must come in time, and a reader who takes nothing is dropped.

    And with our refusals: who is one too many, or does not speak HTTP, is told so as routes would.
    """

    header_seconds = slow_reader_seconds = 0.0
    max_connections = 0
    waiting: asyncio.TimerHandle | None = None  # for headers
    blocked: asyncio.TimerHandle | None = None  # by a reader

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting = self.loop.call_later(self.header_seconds, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("waiting", "blocked")
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        self.app = crowded if len(self.connections) > self.max_connections else self.config.loaded_app
        super().handle_events()
        if self.cycle is not before:
            self._stop("waiting")

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not HTTP, unless another one is out already."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # a route that is at work has nobody to answer any more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = getattr(sys.exception(), "error_status_hint", 400)  # 431: headers that do not end
            refused = Refused(status, "This is not HTTP/1.1, or its headers are too large.", code="invalid_http")
            answer = refused.response("")
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            sent = (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(one) or b"" for one in sent))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.waiting is None and self.cycle.response_complete:
            # The keep-alive timer ends when the first byte comes; this one does not.
            self.waiting = self.loop.call_later(self.timeout_keep_alive + self.header_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.blocked = self.blocked or self.loop.call_later(self.slow_reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("blocked")

    def _stop(self, *names: str) -> None:
        for name in names:
            if (timer := getattr(self, name)) is not None:
                timer.cancel()
            setattr(self, name, None)


async def crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection that is one too many."""
    answer = Refused(503, "Too many connections are open. Try again soon.", code="too_many_connections")
    response = answer.response(scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


class Process(uvicorn.Server):
    """The first signal drains: no new work, and replies under way may end. The second ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service, self.status = service, 0

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, but a signal that was heeded is not raised again: the exit is a clean one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
        before = {name: signal.signal(getattr(signal, name), self.handle_exit) for name in names}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit or sig == getattr(signal, "SIGHUP", None):
            self.force_exit = True
        self.should_exit = self.service.draining = True

    def fail(self) -> None:
        """The engine is lost, and so is the process."""
        self.status, self.should_exit = 1, True
        self.service.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop, settings = asyncio.get_running_loop(), self.service.settings
        last = loop.call_later(settings.drain_seconds, self.service.desk.fail_all, "the server is shutting down")
        await super().shutdown(sockets)
        last.cancel()
        if self.force_exit:
            await self._leave()

    async def _leave(self) -> None:
        """At once, and still in order: clients see a closed connection, and nothing is left behind."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LEAVE_SECONDS)
        await self.lifespan.shutdown()


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and ours, before anything is loaded."""
    try:
        if not 0 <= port < 1 << 16:
            raise OverflowError("there is no such port")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.set_inheritable(False)
        return sock
    except (OSError, OverflowError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CannotListen(f"cannot listen on {host}, port {port}: {why}. Choose another --port or --host.") from None


def raise_descriptor_limit(connections: int) -> None:
    """As many open files as connections may need, where the system lets us."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = connections + DESCRIPTORS
        if soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def settle() -> None:
    """What is there when serving begins stays to the end: no collection need go through it, while every reply waits."""
    gc.collect()
    gc.freeze()


def serve(app: ASGIApp, service: Service, sock: socket.socket, hold: list[Process]) -> int:
    """Serve until a signal; the exit status. The process is put in `hold`, for the engine's watcher to end."""
    settings: Settings = service.settings
    limits: dict[str, Any] = {
        "header_seconds": settings.header_seconds, "slow_reader_seconds": settings.slow_reader_seconds,
        "max_connections": settings.max_connections,
    }  # fmt: skip
    config = uvicorn.Config(
        app, http=type("Connection", (Connection,), limits), ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, proxy_headers=False, backlog=BACKLOG,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=settings.max_header_kb * 1024,
        timeout_graceful_shutdown=int(settings.drain_seconds + LEAVE_SECONDS),
    )  # fmt: skip
    raise_descriptor_limit(settings.max_connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    settle()
    process = Process(config, service)
    hold.append(process)
    process.run(sockets=[sock])
    end_with(service.scheduler.thread, process.status)
    return process.status


def end_with(engine: threading.Thread, status: int) -> None:
    """Wait for the engine's last step: an interpreter that ends around a thread inside a kernel aborts.

    One that hangs is not waited for, and then neither is the interpreter.
    """
    if engine.ident is not None:
        engine.join(STEP_SECONDS)
    if engine.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
