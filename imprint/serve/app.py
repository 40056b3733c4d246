"""Puts the service together: routes, pages, middleware, and what starts and stops with them."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import imprint
from imprint.errors import (
    AccessError,
    ConflictError,
    CreditUnavailable,
    DataError,
    ImprintError,
    TooLarge,
    UndefinedScore,
)
from imprint.serve.access import Access
from imprint.serve.api import attributions, credit, health, sources
from imprint.serve.batching import Closing, DeadlinePassed, Overloaded
from imprint.serve.credit import CreditDesk
from imprint.serve.errors import NO_NUMBER, TOO_LONG, ApiError, describe_cause, is_for_programs
from imprint.serve.logs import LogRequests
from imprint.serve.metrics import CountRequests, Exporter, Metrics
from imprint.serve.middleware import protect
from imprint.serve.pages import render_error
from imprint.serve.pages import router as pages
from imprint.serve.requests import REFUSALS
from imprint.serve.service import CreditUnanswered, Service
from imprint.serve.settings import Settings

logger = logging.getLogger("imprint.serve")
_INTERNAL = ApiError(500, "internal", "something went wrong in the service; its log says what.")
_UNFINISHED = ApiError(
    503,
    "closing",
    "the service is shutting down, and did not finish this in time. If it was to credit something, send it again with "
    "the same Idempotency-Key.",
    {"Retry-After": "5"},
)
_CODES = {404: "not_found", 405: "method_not_allowed", 400: "bad_request"}
Handler = Callable[[Request, Any], Awaitable[Response]]


def create_app(
    settings: Settings,
    service: Service,
    access: Access,
    *,
    metrics: Metrics | None = None,
    examples: list[tuple[Any, str]] | None = None,
) -> FastAPI:
    """Return the ASGI application of a service.

    metrics: those that the service already tells of its batches.
    examples: queries that the page offers, each with a caption.
    """
    metrics = metrics or Metrics()
    desk = None if service.ledger is None else CreditDesk(service.ledger, service, settings, metrics)
    metrics.watch(lambda: service.depth)
    readiness = health.Readiness(service, access)

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, readiness.close)
            stack.push_async_callback(asyncio.to_thread, service.close)
            if settings.metrics:
                app.state.exporter = Exporter(metrics, settings.metrics)
                stack.callback(app.state.exporter.close)
            if desk is not None:
                stack.push_async_callback(asyncio.to_thread, desk.close)
                desk.start_verification()
            yield

    app = FastAPI(
        title="Imprint",
        version=imprint.__version__,
        description="How much each data source moves a model's answers, read with forward passes only.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=run,
    )
    app.state.settings, app.state.service, app.state.access = settings, service, access
    app.state.readiness, app.state.stopping = readiness, False
    app.state.credit, app.state.metrics, app.state.examples = desk, metrics, examples or []
    app.include_router(health.router)
    for router in (attributions.router, sources.router, *([] if desk is None else [credit.router])):
        app.include_router(router, responses=REFUSALS)
    app.include_router(pages)
    _describe_queries(app, service)
    _handle_errors(app)
    app.add_middleware(CatchErrors)
    protect(app, settings, access)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(LogRequests)
    return app


def _describe_queries(app: FastAPI, service: Service) -> None:
    """Put the form of the task into the description of the API."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        found = describe()
        fields = found["components"]["schemas"]["AttributionRequest"]["properties"]
        query = {**service.form.schema, "description": "One query.", "examples": [service.form.example]}
        fields["query"] = query
        fields["queries"] = {"type": "array", "items": query, "minItems": 1, "maxItems": service.settings.batch}
        return found

    app.openapi = openapi  # type: ignore[method-assign]


def _handle_errors(app: FastAPI) -> None:
    """Turn every error into an answer that says what to do, and nothing about the inside of the service."""
    found: dict[Any, Callable[[Request, Any], ApiError]] = {
        ApiError: lambda request, error: error,
        HTTPException: lambda request, error: ApiError(
            error.status_code, _CODES.get(error.status_code, "refused"), str(error.detail), error.headers
        ),
        RequestValidationError: lambda request, error: ApiError(422, "invalid", _describe_invalid(error)),
        DataError: lambda request, error: ApiError(422, "invalid", str(error)),
        TooLarge: lambda request, error: ApiError(413, "too_long", TOO_LONG),
        UndefinedScore: lambda request, error: ApiError(422, "no_number", NO_NUMBER),
        ConflictError: lambda request, error: ApiError(409, "conflict", str(error)),
        CreditUnavailable: _explain_unavailable,
        CreditUnanswered: lambda request, error: ApiError(
            503,
            "credit_unknown",
            "it is unknown whether this was credited: send the same request with the same Idempotency-Key again, which "
            "credits nothing twice.",
            {"Retry-After": "5"},
        ),
        Overloaded: _refuse_load,
        DeadlinePassed: lambda request, error: ApiError(
            504,
            "too_late",
            "the queries were not read in time, and given up. This request credited nothing: try again.",
        ),
        Closing: lambda request, error: ApiError(
            503, "closing", "the service is shutting down: try again.", {"Retry-After": "5"}
        ),
        AccessError: _explain_access_error,
        ImprintError: _hide_error,
    }
    for kind, explain in found.items():
        app.add_exception_handler(kind, _make_handler(explain))


def _make_handler(explain: Callable[[Request, Any], ApiError]) -> Handler:
    async def handle(request: Request, error: Any) -> Response:
        refusal = explain(request, error)
        if refusal.status in (429, 504):
            request.app.state.metrics.refused.labels(refusal.code).inc()
        return _refuse(request, refusal)

    return handle


def _refuse(request: Request, refusal: ApiError) -> Response:
    """Return a refusal as JSON for programs, as a page for people."""
    if is_for_programs(request.url.path):
        return JSONResponse(refusal.content, refusal.status, refusal.headers)
    return render_error(request, refusal)


def _describe_invalid(error: RequestValidationError) -> str:
    """Say which field is wrong and why, without repeating what was sent."""
    texts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
    return "; ".join(texts)


def _refuse_load(request: Request, error: Overloaded) -> ApiError:
    return ApiError(429, "overloaded", str(error), {"Retry-After": str(error.retry_after)})


def _explain_unavailable(request: Request, error: CreditUnavailable) -> ApiError:
    logger.error("the ledger cannot be used: %s", describe_cause(error))
    return ApiError(
        503,
        "no_database",
        "the ledger cannot be reached. Nothing was credited, or its confirmation was lost: try again with the "
        "same Idempotency-Key.",
        {"Retry-After": "5"},
    )


def _explain_access_error(request: Request, error: AccessError) -> ApiError:
    logger.error("%s", error)
    return ApiError(503, "no_database", "keys cannot be read or written: try again.", {"Retry-After": "5"})


def _hide_error(request: Request, error: Exception) -> ApiError:
    _log_error(error, request.scope)
    return _INTERNAL


def _log_error(error: Exception, scope: Scope) -> None:
    """Log where an error came from, without its message or the address, which may quote what was asked, or a token."""
    doing = f"answering {getattr(scope.get('route'), 'path', 'an unknown route')}"
    if scope["type"] == "lifespan":
        doing = "starting or stopping"
    frames = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-8:]))
    logger.error("%s while %s:\n%s", type(error).__name__, doing, frames)


class CatchErrors:
    """Answers what nobody foresaw, in place of the server, whose log would quote the error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] in ("http.response.start", "lifespan.startup.complete")
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if scope["type"] != "http" or begun or not scope["app"].state.stopping:
                raise
            await _refuse(Request(scope), _UNFINISHED)(scope, receive, send)
        except Exception as error:
            if scope["type"] == "lifespan" and isinstance(error, ImprintError) and not begun:
                return  # it could not start, and whoever starts it is told why
            _log_error(error, scope)
            if scope["type"] != "http" or begun:
                return  # an answer that was begun cannot be taken back; it ends here
            await _refuse(Request(scope), _INTERNAL)(scope, receive, send)
