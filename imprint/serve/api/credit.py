"""`/v1/credit`: entries, totals, verification, heads, periods, statements and exports."""

from fastapi import APIRouter

router = APIRouter(prefix="/v1/credit", tags=["credit"])
