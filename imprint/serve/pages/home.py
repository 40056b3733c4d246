"""The address without a path: leads to the first page that somebody may see."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse

from imprint.serve.access.guard import require_login
from imprint.serve.access.roles import Identity
from imprint.serve.pages.rendering import list_links

router = APIRouter(include_in_schema=False)


@router.get("/")
def redirect_home(request: Request, identity: Annotated[Identity, Depends(require_login)]) -> RedirectResponse:
    """Lead to the first page of the navigation."""
    return RedirectResponse(list_links(request, identity)[0].path, 303)
