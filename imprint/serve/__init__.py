"""The service: attributions over HTTP, credited in the ledger, and pages that people read.

from imprint.serve import Access, Service, Settings, create_app
from imprint.serve.client import Client  # needs no extra
"""

from typing import TYPE_CHECKING, Any

from imprint.errors import MissingExtra

if TYPE_CHECKING:
    from imprint.serve.access import Access as Access
    from imprint.serve.app import create_app as create_app
    from imprint.serve.service import Service as Service
    from imprint.serve.settings import Settings as Settings

__all__ = ["Access", "Service", "Settings", "create_app"]
_PLACES = {"Access": "access", "Service": "service", "Settings": "settings", "create_app": "app"}


def __getattr__(name: str) -> Any:
    """Import what is asked for, so that the client needs no server."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        import fastapi as _fastapi  # noqa: F401
        import prometheus_client as _prometheus_client  # noqa: F401
        import sqlalchemy as _sqlalchemy  # noqa: F401
        import uvicorn as _uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra("serving a store", "serve") from error
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
