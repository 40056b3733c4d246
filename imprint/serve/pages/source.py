"""The page *Source*: what one source was credited over time, and how it can be checked."""

from fastapi import APIRouter

router = APIRouter()
