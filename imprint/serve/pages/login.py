"""The login: exchanges a key, or a one-time link, for a session."""

import re
from typing import Annotated
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from imprint.serve.access import Access
from imprint.serve.access.cookies import drop_cookie, read_cookie, set_cookie
from imprint.serve.access.guard import describe_expiry, require_login
from imprint.serve.access.rates import Buckets, name_network
from imprint.serve.access.roles import Identity
from imprint.serve.errors import ApiError
from imprint.serve.middleware import name_host, refuse_rate
from imprint.serve.pages.forms import read_form
from imprint.serve.pages.rendering import render
from imprint.serve.settings import Settings

router = APIRouter(include_in_schema=False)
_LOCAL = re.compile(r"/(?![/\\])[!-\[\]-~]{0,2000}")  # a path of this service, never the address of another host
_RATE, _BURST = 1 / 6, 10  # failed logins per second and address, and at once


def choose_destination(wanted: str) -> str:
    """Return where a login leads: the page that was asked for, if it is one of this service.

    >>> choose_destination("/credit?period=2026-11"), choose_destination("//evil.example"), choose_destination("")
    ('/credit?period=2026-11', '/', '/')
    """
    path = unquote(wanted.partition("?")[0])
    inside = _LOCAL.fullmatch(wanted) and not path.startswith(("//", "/\\", "/login", "/logout"))
    return wanted if inside else "/"


@router.get("/login")
async def show_login(request: Request, next: str = "/") -> Response:
    """Show the form; whoever is logged in goes on."""
    if getattr(request.state, "identity", None) is not None:
        return RedirectResponse(choose_destination(next), 303)
    return render(request, "login.html.j2", None, next=choose_destination(next), problem="")


@router.post("/login")
async def log_in(request: Request) -> Response:
    """Exchange a key for a session."""
    form = await read_form(request)
    access: Access = request.app.state.access
    settings: Settings = request.app.state.settings
    _check_attempt(request)
    key = form.get("key", "").strip()
    token = await access.run(access.open_session, key, 3600 * settings.session_hours)
    destination = choose_destination(form.get("next", "/"))
    if token is None:
        _find_failures(request).take(_address_of(request))
        expired = await access.run(access.find_expiry, key)
        problem = "This key does not open anything here. It may be mistyped or revoked."
        if expired is not None:
            problem = f"This key {describe_expiry(expired)}"
        return render(request, "login.html.j2", None, 401, next=destination, problem=problem)
    return await _begin_session(request, token, destination)


@router.get("/login/{token}")
async def show_link(request: Request, token: str) -> Response:
    """Show a button: programs that fetch links ahead of people must not use one up."""
    return render(request, "login_link.html.j2", None, token=token, problem="")


@router.post("/login/{token}")
async def follow_link(request: Request, token: str) -> Response:
    """Exchange a one-time link for a session."""
    access: Access = request.app.state.access
    settings: Settings = request.app.state.settings
    _check_attempt(request)
    session = await access.run(access.use_link, token, 3600 * settings.session_hours)
    if session is None:
        _find_failures(request).take(_address_of(request))
        problem = "This link does not work any more: it works once, within 15 minutes. Ask for another, or use a key."
        return render(request, "login_link.html.j2", None, 401, token=token, problem=problem)
    return await _begin_session(request, session, "/")


@router.post("/logout")
async def log_out(request: Request, identity: Annotated[Identity, Depends(require_login)]) -> Response:
    """End the session."""
    answer = RedirectResponse("/login", 303)
    await _end_session(request)
    drop_cookie(answer, request.app.state.settings)
    return answer


async def _begin_session(request: Request, token: str, destination: str) -> Response:
    """Give the browser a new session, and end the one that it had."""
    await _end_session(request)
    answer = RedirectResponse(destination, 303)
    set_cookie(answer, token, request.app.state.settings)
    return answer


async def _end_session(request: Request) -> None:
    access: Access = request.app.state.access
    if old := read_cookie(request.scope["headers"], request.app.state.settings.https):
        await access.run(access.end_session, old)


def _check_attempt(request: Request) -> None:
    """Refuse logins that another site sends, and those from an address where many failed."""
    if _is_from_another_site(request):
        raise ApiError(
            403, "cross_site", "this login was sent from another site. Open the login page here, and log in there."
        )
    if wait := _find_failures(request).wait(_address_of(request)):
        raise refuse_rate(wait)


def _is_from_another_site(request: Request) -> bool:
    """Tell whether a browser says that a form is not one of this service; programs say nothing of it.

    Over plain HTTP they send no Sec-Fetch-Site, but the origin. Ports are not compared: proxies may leave them out, and
    cookies do not tell them apart either.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None or origin is None:
        return site not in (None, "none", "same-origin")
    here, there = request.headers.get("host", ""), origin.partition("://")[2]
    return name_host(here.encode("latin-1")) != name_host(there.encode("latin-1"))


def _find_failures(request: Request) -> Buckets:
    """Return the failed logins of this application by address."""
    state = request.app.state
    if not hasattr(state, "failed_logins"):
        state.failed_logins = Buckets(_RATE, _BURST)
    found: Buckets = state.failed_logins
    return found


def _address_of(request: Request) -> str:
    return name_network(request.client.host if request.client else None)
