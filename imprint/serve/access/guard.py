"""Checks, for each route, who asks and whether they may."""

from collections.abc import Awaitable, Callable

from fastapi import Request

from imprint.serve.access.roles import Identity, Permission
from imprint.serve.errors import ApiError


def require(permission: Permission) -> Callable[[Request], Awaitable[Identity]]:
    """Return the dependency of a route of the API that needs a permission."""

    async def check(request: Request) -> Identity:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        found = request.app.state.access.identify(secret) if scheme.lower() == "bearer" else None
        if found is None:
            raise ApiError(
                401, "no_key", "this needs a key: Authorization: Bearer imprint_…", {"WWW-Authenticate": "Bearer"}
            )
        if not found.may(permission):
            raise ApiError(403, "forbidden", f"a key with the role {found.role} may not do this.")
        return found  # type: ignore[no-any-return]

    return check


def require_page(permission: Permission) -> Callable[[Request], Awaitable[Identity]]:
    """Return the dependency of a page that needs a permission."""
    return require(permission)
