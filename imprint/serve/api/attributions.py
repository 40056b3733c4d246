"""`POST /v1/attributions`: how much each source moves some queries, credited if asked for."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response

from imprint.attribution.top import Top, describe_validation
from imprint.credit.ledger import Receipt
from imprint.credit.money import PARTS
from imprint.credit.requests import PLAIN_NAME
from imprint.serve.access.guard import require
from imprint.serve.access.roles import Identity
from imprint.serve.errors import ApiError
from imprint.serve.requests import (
    AttributionAnswer,
    AttributionRequest,
    Milliseconds,
    QueryEffects,
    SourceEffect,
    StrictRoute,
    describe_refusals,
)
from imprint.serve.service import Answered, Credited, Service

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["attributions"])
_MOST_LINES = 100_000  # of sources in an answer, over all of its queries: about 15 MB
_REFUSALS = describe_refusals(
    {
        400: "The body is no JSON, or credit was asked for without an Idempotency-Key.",
        409: "The Idempotency-Key was used for other queries, or for queries that were erased since.",
        413: "The body is too large or has too many queries, the answer would list too many sources, or a query is too "
        "long for the memory of the service.",
        422: "The body is no query.",
        429: "Too many queries wait, or the key sends too many requests: try again after Retry-After seconds.",
        503: "The service is shutting down, or the ledger does not answer in time. With the code credit_unknown, it is "
        "unknown whether the queries were credited: send the same request with the same Idempotency-Key again.",
        504: "The queries were not read in time, and given up. This request credited nothing.",
    }
)


@router.post("/attributions", response_model=AttributionAnswer, responses=_REFUSALS)
async def attribute(
    request: Request,
    body: AttributionRequest,
    identity: Annotated[Identity, Depends(require("attribute"))],
    idempotency_key: Annotated[
        str | None,
        Header(max_length=200, description="Names a crediting request: sent again, it credits nothing twice."),
    ] = None,
) -> Response:
    """Return the effect of removing each source on one query or several, with their errors and shares.

    With `credit`, the queries are credited in the ledger before the answer is sent, once for each Idempotency-Key. The
    same queries with the same key are answered from the ledger, even after a restart with another store or policy:
    nothing is read again, `repeated` is true, and a warning says that the first answer's warnings are not kept. Other
    queries with the key are refused.
    """
    began = time.monotonic()
    service: Service = request.app.state.service
    queries = [body.query] if body.queries is None else body.queries
    if len(queries) > service.settings.batch:
        raise ApiError(413, "too_many", f"a request has at most {service.settings.batch} queries, got {len(queries)}.")
    top = body.top if "top" in body.model_fields_set else service.settings.top
    _check_lines(len(queries), len(service.store), top)
    request.state.queries = len(queries)
    receipt, crediting, caller = None, 0.0, f"key:{identity.name}"
    if body.credit:
        key = _check_credit(service, identity, idempotency_key)
        (answered, receipt, _), crediting = await _credit_once(service, queries, caller, key)
        note_credited(request, receipt)
    else:
        answered = await service.attribute(queries, caller=caller)
    spent = Milliseconds(
        queued=1000 * answered.queued,
        read=1000 * answered.read,
        credited=1000 * crediting,
        total=1000 * (time.monotonic() - began),
    )

    def encode() -> Response:
        own = [] if receipt is not None and receipt.repeated else service.list_warnings(queries)
        warnings = [*own, *answered.result.warnings]
        answer = _describe(answered, receipt, top, spent, warnings)
        return Response(answer.model_dump_json(), media_type="application/json")

    return await asyncio.to_thread(encode)  # an answer may be large, and nobody else should wait for it


async def _credit_once(service: Service, queries: list[Any], caller: str, key: str) -> tuple[Credited, float]:
    """Return what is credited, now or by an earlier request, and how many seconds the ledger took."""
    began = time.monotonic()
    credited, found = await service.recall(queries, caller=caller, key=key), time.monotonic()
    if credited is not None:
        return credited, found - began
    answered, read = await service.attribute(queries, caller=caller, divide=False), time.monotonic()
    credited = await service.credit(answered, caller=caller, key=key)
    return credited, found - began + time.monotonic() - read


def note_credited(request: Request, receipt: Receipt) -> None:
    """Count what was credited, for the metrics and the log."""
    request.app.state.metrics.count_credited(receipt)
    request.state.credited = 0 if receipt.repeated else len(receipt.entries)


def _check_credit(service: Service, identity: Identity, key: str | None) -> str:
    """Return the idempotency key; refuse who may not credit, and requests without one."""
    if not identity.may("credit"):
        raise ApiError(403, "forbidden", f"a key with the role {identity.role} may not credit queries.")
    if service.ledger is None or service.policy is None:
        raise ApiError(409, "no_ledger", "this service has no ledger, so nothing can be credited.")
    if key is None or not PLAIN_NAME.fullmatch(key):
        raise ApiError(
            400,
            "no_idempotency_key",
            "crediting needs the header Idempotency-Key: 1 to 200 printable ASCII characters without spaces, another "
            "one for each request, and the same one when you try again.",
        )
    return key


def _check_lines(queries: int, sources: int, top: int | None) -> None:
    """Refuse an answer that would be too large. top: how many sources it lists for each query; None for all."""
    listed = sources if top is None else min(top, sources)
    if queries * listed > _MOST_LINES:
        raise ApiError(
            413,
            "too_many_lines",
            f"an answer lists at most {_MOST_LINES:,} sources over all of its queries, and this one would list "
            f"{queries} times {listed:,}: send fewer queries at a time, or ask for fewer sources with `top`.",
        )


def _describe(
    answered: Answered, receipt: Receipt | None, top: int | None, spent: Milliseconds, warnings: list[str]
) -> AttributionAnswer:
    """Return what a request is answered with. Of a request that was credited before, with what was credited then."""
    labels = answered.result.labels
    return AttributionAnswer(
        question=labels.question,
        meaning=labels.meaning,
        unit=labels.unit,
        measure=labels.measure,
        better=labels.better,
        n=labels.n,
        store=labels.fingerprints["store"],
        model=labels.fingerprints["model"],
        validation=describe_validation(labels)["validation"],
        warnings=list(dict.fromkeys(warnings)),
        repeated=receipt is not None and receipt.repeated,
        queries=describe_queries(answered, receipt, top),
        milliseconds=spent,
    )


def describe_queries(answered: Answered, receipt: Receipt | None, top: int | None) -> list[QueryEffects]:
    """Return the effects on each query, the largest first, with what was credited where it was."""
    result = answered.result
    first: Top = result.top(result.scores.shape[1] if top is None else top)
    described = []
    for place, credits in enumerate(first):
        about, rows = _find_division(answered, receipt, place)
        entry = None if receipt is None else receipt.entries[place]
        sources = [
            SourceEffect(
                source=credit.source,
                name=credit.name,
                removal_effect=credit.removal_effect if entry is None else -rows[credit.source]["score"] / about["n"],
                standard_error=credit.standard_error if entry is None else rows[credit.source]["error"],
                distinguishable=credit.distinguishable,
                share=rows[credit.source]["share"] / PARTS if rows else None,
            )
            for credit in credits
        ]
        described.append(
            QueryEffects(
                answer=answered.answers[place],
                sources=sources,
                unattributed=about["unattributed"]["share"] / PARTS if about else None,
                rule=about.get("rule"),
                reason=about.get("reason", ""),
                entry=None if entry is None else entry.sequence,
                id=None if entry is None else about["query"],
            )
        )
    return described


def _find_division(
    answered: Answered, receipt: Receipt | None, place: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what the policy says of a query, and the line of each source; empty without a policy."""
    if receipt is not None:
        entry = receipt.entries[place]
        return entry.about, {row["source"]: row for row in entry.rows}
    if not answered.drafts:
        return {}, {}
    draft = answered.drafts[place]
    return draft.about, {row["source"]: row for row in draft.rows}
