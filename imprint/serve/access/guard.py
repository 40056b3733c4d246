"""Checks, for each route, who asks and whether they may.

`imprint.serve.middleware` finds out who asks, once for each request, and leaves that in its state. A route without one
of these dependencies is open to everybody; a test lists those.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from imprint.serve.access.roles import Identity, Permission
from imprint.serve.access.secret import is_same
from imprint.serve.errors import ApiError

logger = logging.getLogger("imprint.serve")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SCHEME = HTTPBearer(auto_error=False, description="A key: `imprint access create` makes one.")
_Documented = Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]  # for the description of the API


class LoginNeeded(Exception):
    """Somebody who is not logged in asks for a page."""


@dataclass(frozen=True)
class Guard:
    """The dependency of a route of the API: see `require`."""

    permission: Permission

    async def __call__(self, request: Request, _: _Documented) -> Identity:
        identity = _find_identity(request)
        if identity is None:
            raise refuse_stranger()
        if identity.csrf is not None and request.method not in SAFE_METHODS:
            _check_csrf(identity.csrf, request.headers.get("x-csrf-token", ""))
        _check_permission(identity, self.permission)
        return identity


def require(permission: Permission) -> Guard:
    """Return the dependency of a route of the API: a key, or the session of a page, that has a permission.

    Requests of a session that change something need its CSRF token in the header X-CSRF-Token.
    """
    return Guard(permission)


def require_page(permission: Permission) -> Callable[..., Awaitable[Identity]]:
    """Return the dependency of a page that needs a permission: whoever is not logged in is sent to the login.

    Forms need the CSRF token of the session in the field `csrf`.
    """

    async def check(request: Request) -> Identity:
        identity = await require_login(request)
        _check_permission(identity, permission)
        return identity

    return check


async def require_login(request: Request) -> Identity:
    """Return who is logged in, whatever their role; the dependency of pages for everybody."""
    from imprint.serve.pages.forms import read_form  # imported late: pages import this module

    identity = _find_identity(request)
    if identity is None or identity.csrf is None:
        raise LoginNeeded
    if request.method not in SAFE_METHODS:
        _check_csrf(identity.csrf, (await read_form(request)).get("csrf", ""))
    return identity


def refuse_stranger(expired: datetime | None = None) -> ApiError:
    """Return the refusal of a request without a valid key. expired: when its key expired, if it did."""
    reason = "this needs a valid key: send the header Authorization: Bearer imprint_…"
    if expired is not None:
        reason = f"this key {describe_expiry(expired)}"
    return ApiError(
        401,
        "no_key",
        reason,
        {"WWW-Authenticate": 'Bearer realm="imprint"'},
    )


def describe_expiry(when: datetime) -> str:
    """Say that a key expired, and what to do."""
    return f"expired on {when:%Y-%m-%d} at {when:%H:%M} UTC: ask whoever operates this service for another one."


def _find_identity(request: Request) -> Identity | None:
    found = getattr(request.state, "identity", None)
    return found if isinstance(found, Identity) else None


def _check_permission(identity: Identity, permission: Permission) -> None:
    if not identity.may(permission):
        raise ApiError(403, "forbidden", f"a key with the role {identity.role} may not do this.")


def _check_csrf(expected: str, given: str) -> None:
    if not is_same(given, expected):
        logger.warning("a request was refused because its CSRF token is missing or belongs to another session")
        raise ApiError(
            403,
            "bad_csrf",
            "this form was not sent from a page of this session. Go back, reload the page and try again.",
        )


async def send_to_login(request: Request, _: Exception) -> Response:
    """Answer somebody who is not logged in: after the login, they come back to the page they asked for."""
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    asked = request.method in SAFE_METHODS and wanted != "/"
    return RedirectResponse(f"/login?next={quote(wanted, safe='')}" if asked else "/login", 303)
