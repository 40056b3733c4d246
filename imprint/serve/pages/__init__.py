"""The pages that people read: rendered on the server, and complete without JavaScript."""

from fastapi import APIRouter

from imprint.serve.pages import credit, keys, login, source
from imprint.serve.pages.errors import render_error
from imprint.serve.pages.static import router as static

__all__ = ["render_error", "router"]
router = APIRouter(include_in_schema=False)
for part in (static, credit.router, source.router, login.router, keys.router):
    router.include_router(part)
