"""The page *Keys*: an administrator makes and revokes keys."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from imprint.errors import ConfigurationError
from imprint.serve.access import Access, NewKey
from imprint.serve.access.guard import require_page
from imprint.serve.access.roles import ROLES, Identity, Role
from imprint.serve.errors import ApiError
from imprint.serve.pages.forms import read_form
from imprint.serve.pages.rendering import render

router = APIRouter(include_in_schema=False)
Admin = Annotated[Identity, Depends(require_page("manage_keys"))]
_MOST_DAYS = 3650


@router.get("/keys")
async def show_keys(request: Request, identity: Admin) -> Response:
    """Show all keys, and a form for a new one."""
    return await _render(request, identity, {})


@router.post("/keys")
async def create_key(request: Request, identity: Admin) -> Response:
    """Make a key, and show its secret this once."""
    form = await read_form(request)
    access: Access = request.app.state.access
    try:
        name, role = form.get("name", "").strip(), _read_role(form.get("role", ""))
        sources = [line.strip() for line in form.get("sources", "").splitlines() if line.strip()]
        expires, known = _read_expiry(form.get("days", "").strip()), _list_sources(request)
        made = await access.run(access.create, name, role, sources=sources, expires=expires, known=known)
    except ConfigurationError as error:
        return await _render(request, identity, form, problem=str(error), status=422)
    return await _render(request, identity, {}, made=made)


@router.post("/keys/{name}/revoke")
async def revoke_key(request: Request, identity: Admin, name: str) -> Response:
    """Revoke a key, which ends its sessions."""
    access: Access = request.app.state.access
    if name == identity.name:
        raise ApiError(409, "own_key", "you are logged in with this key. Log in with another one to revoke it.")
    try:
        await access.run(access.revoke, name)
    except ConfigurationError as error:
        raise ApiError(404, "not_found", "there is no key of that name.") from error
    return RedirectResponse("/keys", 303)


async def _render(
    request: Request,
    identity: Identity,
    form: dict[str, str],
    *,
    made: NewKey | None = None,
    problem: str = "",
    status: int = 200,
) -> Response:
    access: Access = request.app.state.access
    now, found = datetime.now(UTC), await access.run(access.list)
    states = {key.name: key.describe_state(now.timestamp()) for key in found}
    values = {"keys": found, "states": states, "roles": ROLES, "form": form, "made": made, "problem": problem}
    return render(request, "keys.html.j2", identity, status, sources=sorted(_list_sources(request)), **values)


def _list_sources(request: Request) -> frozenset[str]:
    return frozenset(request.app.state.service.store.source_ids)


def _read_role(text: str) -> Role:
    for role in ROLES:
        if role == text:
            return role
    raise ConfigurationError("choose a role for the key.")


def _read_expiry(days: str) -> datetime | None:
    """Return when a key expires that is valid for some days; without a number, never."""
    if not days:
        return None
    if not (days.isascii() and days.isdigit() and 1 <= len(days) <= 4 and 0 < int(days) <= _MOST_DAYS):
        raise ConfigurationError(
            f"a key is valid for 1 to {_MOST_DAYS} days; leave this empty for one that never expires."
        )
    return datetime.now(UTC) + timedelta(days=int(days))
