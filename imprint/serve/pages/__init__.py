"""The pages that people read: rendered on the server, and complete without JavaScript."""

from fastapi import APIRouter

from imprint.serve.pages import credit, home, keys, login, query, source, trust
from imprint.serve.pages.errors import render_error
from imprint.serve.pages.static import router as static

__all__ = ["render_error", "router"]
router = APIRouter(include_in_schema=False)
router.include_router(static)
for page in (home, query, credit, source, trust, login, keys):
    router.include_router(page.router)
