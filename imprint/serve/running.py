"""Runs the application under uvicorn until it is told to stop, and then finishes what was accepted."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from imprint.errors import ConfigurationError, ImprintError
from imprint.serve.connections import LimitedProtocol
from imprint.serve.settings import Settings

logger = logging.getLogger("imprint.serve")
_IDLE = 30  # seconds that a connection may be kept without a request
_HEAD = 32 * 1024  # bytes of a request line and its headers
_CONNECTIONS = 1000
_FINISHING = 30  # seconds beyond the deadline of queries, after which a request is no longer waited for at the end
_CLOSING = 5  # seconds more, in which a process has to end


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; port 0 stands for any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle's delays on
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}. Give another --host or --port."
        ) from error
    return bound


def run(
    app: FastAPI,
    settings: Settings,
    bound: socket.socket,
    announce: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT; then accept no more, finish what was accepted, and return.

    A second signal stops at once.

    announce: is called once requests are answered. stopping: is called once it is told to stop.
    """
    failures = _keep_failures(app)
    config = configure(app, settings)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    quiet = _Quiet()
    logging.getLogger("uvicorn.error").addFilter(quiet)
    server = _Server(config, app, settings.drain, announce, stopping)
    try:
        server.run(sockets=[bound])
    except SystemExit:  # by which uvicorn says that the application did not start
        if not failures:
            raise
        raise failures[0] from None
    finally:
        logging.getLogger("uvicorn.error").removeFilter(quiet)
        bound.close()
    logger.info("stopped")


def end_process_in_time(settings: Settings) -> None:
    """Let this process, which was told to stop, end in time, even if a database does not answer one of its threads."""
    seconds = settings.drain + settings.deadline + _FINISHING + _CLOSING
    timer = threading.Timer(seconds, _end_process, (seconds,))
    timer.daemon = True
    timer.start()


def _end_process(seconds: float) -> None:
    logger.error(
        "ending with something unfinished, %g s after it was told to stop: perhaps a database does not answer. What "
        "was to be credited may or may not be: whoever sends it again, with the same Idempotency-Key, credits it once.",
        seconds,
    )
    logging.shutdown()
    os._exit(1)


def configure(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return how uvicorn runs the application: one process, our own logs, and limits on connections."""
    return uvicorn.Config(
        app,
        http=type("Protocol", (LimitedProtocol,), {"proxies": settings.proxies}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE,
        timeout_graceful_shutdown=round(settings.deadline) + _FINISHING,
        h11_max_incomplete_event_size=_HEAD,
        limit_concurrency=_CONNECTIONS,
    )


def _keep_failures(app: FastAPI) -> list[ImprintError]:
    """Keep the error with which an application fails to start, which uvicorn would only log."""
    failures, lifespan = list[ImprintError](), app.router.lifespan_context

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with lifespan(app):
                yield
        except ImprintError as error:
            failures.append(error)
            raise

    app.router.lifespan_context = watched
    return failures


class _Quiet(logging.Filter):
    """Drops the tracebacks of an application that did not start: its error is raised instead."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Traceback", "Application startup failed"))


class _Server(uvicorn.Server):
    """A server that ends with exit status 0 when it was told to stop, and says so to `/readyz` before."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        drain: float,
        announce: Callable[[], None],
        stopping: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._app, self._drain, self._announce, self._stopping = app, drain, announce, stopping
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again at the end, as uvicorn does."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the next one ends the process, whatever it waits for
        self._app.state.stopping = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        logger.info("stopping: finishing what was accepted")
        self._stopping()
        assert self._loop is not None
        self._loop.call_later(self._drain, setattr, self, "should_exit", True)
