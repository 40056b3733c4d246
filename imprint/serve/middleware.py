"""Stands between the network and the routes: refuses what no route should see, and finds out who asks.

In this order: the host, the shape of the request, the key or the session, the rate, the body. A body is read here, up
to a size and within a time, so that routes see whole bodies alone. Every answer gets security headers.
"""

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Iterable, MutableMapping
from datetime import datetime
from ipaddress import ip_address
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from imprint.errors import AccessError
from imprint.serve.access import Access
from imprint.serve.access.cookies import read_cookie
from imprint.serve.access.guard import LoginNeeded, refuse_stranger, send_to_login
from imprint.serve.access.rates import Buckets, name_network
from imprint.serve.access.roles import Identity
from imprint.serve.errors import ApiError, is_for_programs
from imprint.serve.settings import Settings

logger = logging.getLogger("imprint.serve")
Headers = list[tuple[bytes, bytes]]
_OPEN = ("/v1/openapi.json",)  # of the API, without a key
_UNLIMITED = ("/healthz", "/readyz")  # asked by whoever watches the service, and cheap however often
_STATIC = "/static/"  # asked several times by each page
_ONCE = (b"host", b"authorization", b"content-length", b"content-type", b"idempotency-key", b"transfer-encoding")
_VISIBLE, _CONTROLS = re.compile(rb"[!-~]*"), re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LONGEST_URL, _LONGEST_HEADERS = 8 << 10, 32 << 10  # bytes
_BODY_SECONDS = 30.0
_STRANGERS_BODY = 8 << 10  # bytes: a login
_DRAINED = 8 << 20  # bytes that are still read of a body that is too large
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_HSTS = "max-age=31536000"


def protect(app: FastAPI, settings: Settings, access: Access) -> None:
    """Put the checks that every request passes in front of an application."""
    app.add_exception_handler(LoginNeeded, send_to_login)
    app.add_middleware(Protect, settings=settings, access=access)
    if settings.proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.proxies))


def list_hosts(settings: Settings) -> frozenset[str]:
    """Return the names by which a service may be called: a page elsewhere must not reach it by a name of its own."""
    own = settings.host.strip("[]").lower()
    names = {"127.0.0.1", "localhost", "[::1]", *(name.lower() for name in settings.hosts)}
    try:
        address = ip_address(own)
    except ValueError:
        return frozenset({*names, own})
    if address.is_unspecified:  # every address of the machine: say by which names it is called, in `hosts`
        return frozenset(names)
    return frozenset({*names, f"[{own}]" if address.version == 6 else own})


class Protect:
    """Checks requests before they reach the application, and adds security headers to what is answered."""

    def __init__(self, app: ASGIApp, settings: Settings, access: Access) -> None:
        self._app, self._settings, self._access = app, settings, access
        self._hosts = list_hosts(settings)
        self._buckets = Buckets(settings.rate, 2 * settings.rate), Buckets(settings.rate, 2 * settings.rate)
        self._listing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, _add_headers(scope, send, self._settings.https))
        else:  # there are no WebSockets here
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_host(scope["headers"])
            _check_shape(scope)
            await self._check_caller(scope)
            body = await self._read_body(scope, receive)
        except ApiError as refusal:
            await _refuse(scope, receive, send, refusal)
        except _Gone:
            return
        else:
            await self._app(scope, _replay(body, receive), send)

    def _check_host(self, headers: Headers) -> None:
        given = [value for name, value in headers if name == b"host"]
        if len(given) != 1 or name_host(given[0]) not in self._hosts:
            raise ApiError(
                400,
                "bad_host",
                "this service does not answer by that name. Its operator can add names: setting `hosts`.",
            )

    async def _check_caller(self, scope: Scope) -> None:
        """Find out who asks, and whether they ask too often."""
        path, state = scope["path"], scope.setdefault("state", {})
        if _is_unlimited(path):
            return
        try:
            identity = await self._identify(scope)
        except AccessError as error:
            logger.error("%s", error)
            raise ApiError(
                503, "no_database", "keys cannot be checked at the moment: try again.", {"Retry-After": "5"}
            ) from error
        state["identity"] = identity
        known, unknown = self._buckets
        wait = unknown.take(name_network(_address_of(scope))) if identity is None else known.take(identity.name)
        if wait:
            raise refuse_rate(wait)
        if identity is None and path.startswith("/v1/") and path not in _OPEN:
            raise refuse_stranger(await self._find_expiry(scope))

    async def _identify(self, scope: Scope) -> Identity | None:
        """Return whose key or session a request has."""
        secret, is_session = _find_secret(scope, self._settings.https)
        if not secret:
            return None
        recalled = self._access.recall(secret)
        if recalled is not None and (recalled.csrf is not None) == is_session:
            return recalled
        await self._refuse_guess(secret, name_network(_address_of(scope)))
        find = self._access.identify_session if is_session else self._access.identify_key
        return await self._access.run(find, secret)

    async def _find_expiry(self, scope: Scope) -> datetime | None:
        """Return when the key of a request expired, if that is why it is refused; whoever has it may know."""
        secret, is_session = _find_secret(scope, self._settings.https)
        try:
            return await self._access.run(self._access.find_expiry, secret) if secret and not is_session else None
        except AccessError:
            return None

    async def _refuse_guess(self, secret: str, address: str) -> None:
        """Refuse a secret that nobody has, from an address that sent too many, without looking it up.

        Who floods an address that others share, such as that of a proxy, must not keep them out: a secret that somebody
        has is looked up, however many others come from there. One that was made in the last second, by another process,
        is told to come again in a moment.
        """
        _, unknown = self._buckets
        if not (wait := unknown.wait(address)):
            return
        if self._access.lists(secret) is None:
            if self._listing is None or self._listing.done():
                self._listing = asyncio.create_task(self._access.run(self._access.list_secrets))
            await asyncio.shield(self._listing)
        if not self._access.lists(secret):
            raise refuse_rate(wait)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body. One that is too large is read a little longer, so that its sender sees the answer."""
        most, body, size = self._limit_body(scope), bytearray(), 0
        too_large = ApiError(413, "too_large", f"a body has at most {most:,} bytes.")
        if int(_find_header(scope["headers"], b"content-length") or 0) > most + _DRAINED:
            raise too_large
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for piece in _receive_pieces(receive):
                    size += len(piece)
                    if size > most + _DRAINED:
                        break
                    if size <= most:
                        body += piece
        except TimeoutError as error:
            raise ApiError(408, "too_slow", f"the body did not arrive within {_BODY_SECONDS:g} s.") from error
        if size > most:
            raise too_large
        return bytes(body)

    def _limit_body(self, scope: Scope) -> int:
        """Return the bytes that a body may have: few from strangers, who could fill the memory with unfinished ones."""
        if _is_unlimited(scope["path"]):
            return 0
        most = self._settings.body_bytes
        return min(most, _STRANGERS_BODY) if scope["state"]["identity"] is None else most


def _is_unlimited(path: str) -> bool:
    """Tell whether a path may be asked for without a key, and as often as one likes."""
    return path in _UNLIMITED or path.startswith(_STATIC)


def _find_secret(scope: Scope, https: bool) -> tuple[str | None, bool]:
    """Return the key or the session of a request, and which it is.

    Pages know sessions alone. In the API a key counts, even if it is wrong, before a session.
    """
    given = _find_header(scope["headers"], b"authorization")
    if given is None or not scope["path"].startswith("/v1/"):
        return read_cookie(scope["headers"], https), True
    scheme, _, text = given.decode("latin-1").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else None, False


class _Gone(Exception):
    """Whoever asked has left before the body was complete."""


async def _receive_pieces(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        more = message.get("more_body", False)
        yield message.get("body", b"")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a channel that has the whole body, and then what the server says, such as that nobody waits any more."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def name_host(value: bytes) -> str:
    """Return the name in the header Host, without the port; an empty string if it is none."""
    text = value.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, port = text, "0"
    return name if port.isascii() and port.isdigit() else ""


def _check_shape(scope: Scope) -> None:
    """Refuse odd URLs and headers, compressed bodies, and requests whose length is said twice."""
    headers: Headers = scope["headers"]
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    if len(raw) + len(scope.get("query_string", b"")) > _LONGEST_URL:
        raise ApiError(414, "long_url", "the URL is too long.")
    if sum(len(name) + len(value) for name, value in headers) > _LONGEST_HEADERS:
        raise ApiError(431, "long_headers", "the headers are too long.")
    if not _is_plain(raw, scope) or any(_CONTROLS.search(part) for header in headers for part in header):
        raise ApiError(400, "bad_request", "the URL or a header has characters that do not belong there.")
    names = [name for name, _ in headers]
    twice = [name for name in _ONCE if names.count(name) > 1]
    if twice or (b"content-length" in names and b"transfer-encoding" in names):
        raise ApiError(400, "bad_request", "a header is given twice, or contradicts another.")
    declared = _find_header(headers, b"content-length")
    if declared is not None and not (declared.isdigit() and len(declared) < 19):
        raise ApiError(400, "bad_request", "Content-Length is no number of bytes.")
    if _find_header(headers, b"content-encoding") not in (None, b"identity"):
        raise ApiError(415, "compressed", "compressed bodies are refused: send the body as it is.")


def _is_plain(raw: bytes, scope: Scope) -> bool:
    """Tell whether a URL is one that browsers and programs send: encoded, from the root, without a NUL."""
    visible = _VISIBLE.fullmatch(raw + scope.get("query_string", b"")) is not None
    return visible and raw.startswith(b"/") and b"\\" not in raw and "\0" not in scope["path"]


def _find_header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def _address_of(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client else None


def refuse_rate(wait: float) -> ApiError:
    """Return the refusal of somebody who asks too often. wait: seconds until they may ask again."""
    seconds = max(1, math.ceil(wait))
    return ApiError(
        429, "too_many_requests", f"too many requests: try again in {seconds} s.", {"Retry-After": str(seconds)}
    )


async def _refuse(scope: Scope, receive: Receive, send: Send, refusal: ApiError) -> None:
    """Answer a request that reaches no route. The connection is closed: the rest of the body may still come."""
    from imprint.serve.pages import render_error  # imported late: pages import the service

    if refusal.status == 429 and (app := scope.get("app")) is not None:
        app.state.metrics.refused.labels(refusal.code).inc()
    headers = {**refusal.headers, "Connection": "close"}
    refusal = ApiError(refusal.status, refusal.code, refusal.message, headers)
    if is_for_programs(scope["path"]):
        await JSONResponse(refusal.content, refusal.status, headers)(scope, receive, send)
    else:
        shown = Request({**scope, "query_string": b""})  # which may be what was refused, and cannot be read
        await render_error(shown, refusal)(scope, receive, send)


def _add_headers(scope: Scope, send: Send, https: bool) -> Send:
    """Return a channel that adds security headers to the answer; nothing is stored but static files."""

    async def add(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            if scope["path"].startswith("/login"):  # whose form must say where it comes from, but not the link
                headers["Referrer-Policy"] = "strict-origin"
            if not scope["path"].startswith("/static/") or message["status"] != 200:
                headers["Cache-Control"] = "no-store"
            if https:
                headers["Strict-Transport-Security"] = _HSTS
        await send(message)

    return add
