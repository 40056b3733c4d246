"""Metrics for Prometheus, on an address of their own, which no user reaches."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from imprint.credit.ledger import Receipt
from imprint.errors import ConfigurationError

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """What the service counts. Labels are routes, statuses and roles, never names of users or sources."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        new: Any = {"registry": self.registry}
        self.requests = Counter("imprint_requests", "Requests", ["route", "status"], **new)
        self.seconds = Histogram("imprint_request_seconds", "Time to answer", ["route"], buckets=_SECONDS, **new)
        self.batch = Histogram(
            "imprint_batch_queries", "Queries read together", buckets=(1, 2, 4, 8, 16, 32, 64), **new
        )
        self.reading = Histogram("imprint_read_seconds", "Time to read a batch", buckets=_SECONDS, **new)
        self.credited = Counter("imprint_credited_queries", "Queries credited", **new)
        self.repeated = Counter("imprint_repeated_requests", "Crediting requests that were sent again", **new)
        self.refused = Counter("imprint_refused_requests", "Requests refused for load", ["reason"], **new)
        self.waiting = Gauge("imprint_waiting_queries", "Queries that wait or are being read", **new)
        self.problems = Gauge("imprint_ledger_problems", "What the last verification of the ledger found", **new)
        self.verified = Gauge("imprint_ledger_verified_timestamp_seconds", "When the ledger was last verified", **new)

    def observe_batch(self, count: int, seconds: float) -> None:
        """Count a batch that was read."""
        self.batch.observe(count)
        self.reading.observe(seconds)

    def count_credited(self, receipt: Receipt) -> None:
        """Count the queries of a request that was credited."""
        if receipt.repeated:
            self.repeated.inc()
        else:
            self.credited.inc(len(receipt.entries))

    def watch(self, waiting: Callable[[], float]) -> None:
        """Read how many queries wait whenever the metrics are asked for."""
        self.waiting.set_function(waiting)


class Exporter:
    """Serves the metrics of a service over HTTP, until it is closed."""

    def __init__(self, metrics: Metrics, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry=metrics.registry)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"metrics cannot be served on {address}: {error}. Give another address, or none: --metrics none."
            ) from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class CountRequests:
    """Counts requests by route and status, and how long answers take; also those that reach no route.

    A status of 0: the client was gone before it was answered.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = status or 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.requests.labels(route, status).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - began)
