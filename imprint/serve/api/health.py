"""`/healthz` and `/readyz`: whether the process lives, and whether it can answer. Neither needs a key."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from imprint.errors import ImprintError
from imprint.serve.access import Access
from imprint.serve.service import Service

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def live() -> dict[str, str]:
    """Answer, which shows that the process lives."""
    return {"status": "alive"}


@router.get("/readyz")
async def ready(request: Request) -> JSONResponse:
    """Return 200 if queries can be answered, else 503 with what is wrong in general terms; the log has the details."""
    service: Service = request.app.state.service
    access: Access = request.app.state.access
    problems = ["the service is shutting down"] if request.app.state.stopping else []
    problems += await asyncio.to_thread(service.find_problems)
    for name, probe in (("ledger", service.probe_ledger), ("access", access.probe)):
        try:
            await asyncio.to_thread(probe)
        except ImprintError:
            problems.append(f"the {name} database cannot be reached")
    if problems:
        return JSONResponse({"status": "not ready", "problems": problems}, 503)
    return JSONResponse({"status": "ready"})
