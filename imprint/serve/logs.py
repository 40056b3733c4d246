"""Logs what the service does: one JSON object per line, or plain lines where a person reads them at a terminal.

A request is logged with the template of its route, its status and its duration: never its address, its headers or its
body, in which keys, tokens and prompts would be.
"""

import json
import logging
import re
import secrets
import sys
import time
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from imprint.display import for_terminal

logger = logging.getLogger("imprint.serve.requests")
_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HEADER = b"x-request-id"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_FRAMES = 8
_request: ContextVar[str | None] = ContextVar("request", default=None)


def start_logging(stream: TextIO | None = None) -> None:
    """Send all logs of the process to a stream, by default standard error."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter() if stream.isatty() else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("imprint.serve").setLevel(logging.INFO)
    logging.captureWarnings(True)


def _list_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what a record says, without the message of an exception, which may quote what was asked."""
    fields: dict[str, Any] = {"event": record.getMessage()}
    if (request := _request.get()) is not None:
        fields["request"] = request
    fields |= getattr(record, "fields", {})
    if record.exc_info and record.exc_info[0] is not None:
        frames = traceback.extract_tb(record.exc_info[2])[-_FRAMES:]
        fields["error"] = record.exc_info[0].__name__
        fields["frames"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return fields


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"time": moment.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
        return json.dumps({**head, **_list_fields(record)}, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record for a person."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _list_fields(record)
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        head = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        event, frames = fields.pop("event"), fields.pop("frames", [])
        pairs = [f"{name}={value}" for name, value in fields.items()]
        lines = [*" ".join([f"{moment} {head}{event}", *pairs]).split("\n"), *(f"  {frame}" for frame in frames)]
        return "\n".join(map(for_terminal, lines))


class LogRequests:
    """Gives each request an id, which its answer and its log lines have, and logs it once it is answered.

    The routes put what only they know into the state of the request: `queries`, `credited`, and the `identity` of the
    caller.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        name = given.decode() if _GIVEN.fullmatch(given) else secrets.token_hex(8)

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (_HEADER, name.encode())]
            await send(message)

        token = _request.set(name)
        try:
            await self._app(scope, receive, note)
        finally:
            logger.info("request", extra={"fields": _describe(scope, status, time.monotonic() - began)})
            _request.reset(token)


def _describe(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """Return what is logged of a request. A status of 0: the client was gone before it was answered."""
    state = scope.get("state", {})
    identity = state.get("identity")
    known = {
        "key": None if identity is None else identity.name,
        "queries": state.get("queries"),
        "credited": state.get("credited"),
    }
    return {
        "method": scope["method"] if scope["method"] in _METHODS else "other",
        "route": getattr(scope.get("route"), "path", "unknown"),
        "status": status,
        "milliseconds": round(1000 * seconds, 1),
        **{name: value for name, value in known.items() if value is not None},
    }
