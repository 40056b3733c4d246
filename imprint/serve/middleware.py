"""Stands between the network and the routes."""

from fastapi import FastAPI

from imprint.serve.access import Access
from imprint.serve.settings import Settings


def protect(app: FastAPI, settings: Settings, access: Access) -> None:
    """Put the checks that every request passes in front of an application."""
