"""`GET /v1/sources` and `/v1/store`: what is attributed to, and from what."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

import imprint
from imprint.attribution.labels import MEANINGS
from imprint.serve.access.guard import require
from imprint.serve.access.roles import Identity
from imprint.serve.answering import AnswersFrom
from imprint.serve.service import Service
from imprint.validation.record import find_verdict

router = APIRouter(prefix="/v1", tags=["store"])


class SourceAnswer(BaseModel):
    """A source: its id, name and size in training examples, and what is known of it."""

    id: str
    name: str
    size: int
    owner: str = ""
    licence: str = ""
    url: str = ""


class StoreAnswer(BaseModel):
    """What is served, by its fingerprints.

    answers_from: who answers where a query leaves that open: the model that the recorded run ended with, or the task's
        own weights; "query" where every query has its answer.
    """

    question: str
    meaning: str
    measure: str
    better: str | None
    n: int
    sources: int
    store: str
    model: str
    recording: str | None
    answers_from: AnswersFrom
    signer: str | None
    validation: dict[str, Any]
    warnings: list[str]
    versions: dict[str, str]
    query: dict[str, Any]
    example: Any


@router.get("/sources", response_model=list[SourceAnswer])
def list_sources(
    request: Request, identity: Annotated[Identity, Depends(require("see_sources"))]
) -> list[dict[str, Any]]:
    """Return the sources of the store; a publisher gets its own."""
    service: Service = request.app.state.service
    return [source for source in service.sources if identity.sees(source["id"])]


@router.get("/store", response_model=StoreAnswer)
def describe_store(request: Request, identity: Annotated[Identity, Depends(require("see_store"))]) -> dict[str, Any]:
    """Return which store, model and question answers are about, and what a query is."""
    service: Service = request.app.state.service
    store, task = service.store, service.task
    verdict = find_verdict(store, task.measure_name)
    return {
        "question": store.question,
        "meaning": MEANINGS[store.question],
        "measure": task.measure_name,
        "better": task.better,
        "n": store.n,
        "sources": len(store),
        "store": store.sha256,
        "model": store.model_sha256,
        "recording": store.manifest.request.recording,
        "answers_from": service.answering.answers_from,
        "signer": None if store.signed is None else store.signed.key,
        "validation": {"outcome": "not validated"} if verdict is None else verdict.to_json(),
        "warnings": list(store.warnings),
        "versions": {"imprint": imprint.__version__},
        "query": service.form.schema,
        "example": service.form.example,
    }
