"""The cookie of a session: HttpOnly, SameSite=Strict, and on HTTPS bound to this very host."""

from collections.abc import Iterable

from starlette.responses import Response

from imprint.serve.settings import Settings


def name_cookie(https: bool) -> str:
    """Return what the cookie is called; browsers take one that begins with __Host- from this host by HTTPS alone."""
    return "__Host-imprint" if https else "imprint"


def read_cookie(headers: Iterable[tuple[bytes, bytes]], https: bool) -> str | None:
    """Return the token of a session; None without the cookie, or with two that differ."""
    found = set[str]()
    for name, value in headers:
        if name == b"cookie":
            for part in value.decode("latin-1").split(";"):
                own, _, text = part.strip().partition("=")
                if own == name_cookie(https):
                    found.add(text)
    return found.pop() if len(found) == 1 else None


def set_cookie(response: Response, token: str, settings: Settings) -> None:
    """Give the browser a session."""
    response.set_cookie(
        name_cookie(settings.https),
        token,
        max_age=int(settings.session_hours * 3600),
        path="/",
        secure=settings.https,
        httponly=True,
        samesite="strict",
    )


def drop_cookie(response: Response, settings: Settings) -> None:
    """Take the session away from the browser."""
    response.delete_cookie(
        name_cookie(settings.https), path="/", secure=settings.https, httponly=True, samesite="strict"
    )
