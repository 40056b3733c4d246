"""`/healthz` and `/readyz`: whether the process lives, and whether it can answer. Neither needs a key."""

import asyncio
import time
from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from imprint.errors import ImprintError
from imprint.serve.access import Access
from imprint.serve.batching import Overloaded
from imprint.serve.service import Service
from imprint.serve.workers import Unanswered, Workers

router = APIRouter(tags=["health"])
_PATIENCE = 2.0  # seconds that a database has to answer
_REMEMBERED = 1.0  # seconds, so that many who ask cost no more than one


class Readiness:
    """Finds out what keeps a service from answering: at most once at a time, and once a second.

    Each database has a thread of its own: one that hangs is reported, and the other is still asked.
    """

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._probes = {"ledger": service.probe_ledger, "access": access.probe}
        self._workers = {name: Workers(f"health-{name}", threads=1, waiting=0) for name in ("store", *self._probes)}
        self._looking: asyncio.Task[list[str]] | None = None
        self._known, self._until = list[str](), 0.0

    async def find_problems(self) -> list[str]:
        """Return what is wrong, in general terms; nothing if queries can be answered."""
        if time.monotonic() < self._until:
            return self._known
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(self._looking)

    async def _look(self) -> list[str]:
        found = await asyncio.gather(
            self._ask("store", self._service.find_problems, ["the store cannot be read"]),
            *(
                self._ask(name, probe, [f"the {name} database cannot be reached"])
                for name, probe in self._probes.items()
            ),
        )
        self._known = [problem for problems in found for problem in problems]
        self._until = time.monotonic() + _REMEMBERED
        return self._known

    async def _ask(self, name: str, probe: Callable[[], list[str] | None], failed: list[str]) -> list[str]:
        workers = self._workers[name]
        try:
            workers.require_room()
            return await workers.run(probe, timeout=_PATIENCE) or []
        except (ImprintError, Overloaded, Unanswered):
            return failed

    def close(self) -> None:
        """Wait for what is being asked."""
        for workers in self._workers.values():
            workers.close()


@router.get("/healthz")
async def live() -> dict[str, str]:
    """Answer, which shows that the process lives."""
    return {"status": "alive"}


@router.get("/readyz")
async def ready(request: Request) -> JSONResponse:
    """Return 200 if queries can be answered, else 503 with what is wrong in general terms; the log has the details."""
    readiness: Readiness = request.app.state.readiness
    problems = ["the service is shutting down"] if request.app.state.stopping else []
    problems += await readiness.find_problems()
    if problems:
        return JSONResponse({"status": "not ready", "problems": problems}, 503)
    return JSONResponse({"status": "ready"})
