"""The page *Credit*: what the log credited to whom, and whether it verifies."""

from fastapi import APIRouter

router = APIRouter()
