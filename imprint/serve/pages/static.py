"""Serves the style sheet, the scripts and the icon, under addresses that change with their content."""

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Response

from imprint.serve.errors import ApiError

router = APIRouter(prefix="/static", include_in_schema=False)
_KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_LASTING = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}


@cache
def _load() -> dict[str, tuple[bytes, str]]:
    """Read all files: the content of each by its name, with a hash."""
    found = {}
    for each in files("imprint.serve.pages").joinpath("static").iterdir():
        if each.name.rpartition(".")[2] in _KINDS:
            content = each.read_bytes()
            found[each.name] = content, hashlib.sha256(content).hexdigest()[:12]
    return found


def address_of(name: str) -> str:
    """Return the address of a file, which has a hash of its content."""
    return f"/static/{_load()[name][1]}/{name}"


@router.get("/{digest}/{name}")
def serve_file(digest: str, name: str) -> Response:
    """Return a file; one of another version is not there."""
    content, known = _load().get(name, (b"", ""))
    if not known or digest != known:
        raise ApiError(404, "not_found", "there is no such file.")
    return Response(content, media_type=_KINDS[name.rpartition(".")[2]], headers=_LASTING)
