"""The page *Query*: somebody asks, and sees the answer with what each source did to it."""

import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from imprint.attribution.uncertainty import describe_error
from imprint.credit.ledger import Receipt
from imprint.errors import ConfigurationError, DataError, UndefinedScore
from imprint.serve.access.guard import require_page
from imprint.serve.access.roles import Identity
from imprint.serve.errors import NO_NUMBER, ApiError
from imprint.serve.pages.answering import Shaded, describe_answer, describe_documents, shade_words
from imprint.serve.pages.asking import Asking, Mistyped, describe_typed, encode
from imprint.serve.pages.forms import read_form
from imprint.serve.pages.rendering import render
from imprint.serve.pages.wording import describe_effect, describe_sign, describe_standing, describe_tests, list_once
from imprint.serve.requests import QueryEffects, read_json
from imprint.serve.service import Answered, Service

if TYPE_CHECKING:
    from imprint.serve.pages.answering import Row

router = APIRouter(prefix="/query", include_in_schema=False)
Asker = Annotated[Identity, Depends(require_page("attribute"))]


@router.get("")
def show_form(request: Request, identity: Asker, example: str = "") -> Response:
    """Show the form, filled with an example if one is named."""
    asking = _make_form(request, {})
    if example.isascii() and example.isdigit() and int(example) < len(asking.examples):
        query = asking.examples[int(example)][0]
        asking = _make_form(request, describe_typed(asking.form, query))
    return _show(request, identity, asking)


@router.post("")
async def answer(request: Request, identity: Asker) -> Response:
    """Answer what was asked; credit it if that was asked for too."""
    began = time.monotonic()
    service: Service = request.app.state.service
    fields = await read_form(request)
    asking = _make_form(request, fields)
    wanted = fields.get("credit") == "yes"
    if wanted and not _may_credit(request, identity):
        raise ApiError(403, "forbidden", "queries cannot be credited with this key, or nowhere in this service.")
    try:
        query = asking.read()
        request.state.queries = 1
        answered = await service.attribute([query])
    except Mistyped as error:
        return _show(request, identity, _make_form(request, fields, error.name, error.message), 422)
    except UndefinedScore:
        return _show(request, identity, _make_form(request, fields, asking.main, NO_NUMBER), 422)
    except DataError as error:
        return _show(request, identity, _make_form(request, fields, asking.main, str(error)), 422)
    receipt: Receipt | None = None
    read = time.monotonic()
    if wanted:
        receipt = await service.credit(answered, caller=f"key:{identity.name}", key=asking.name_request(query))
        request.app.state.metrics.count_credited(receipt)
        request.state.credited = 0 if receipt.repeated else len(receipt.entries)
    credited = time.monotonic()
    found, rows = describe_answer(answered, receipt)
    shaded = await _find_words(service, asking, query, rows)
    now = time.monotonic()
    spent = {
        "waiting": answered.queued,
        "reading": answered.read,
        "crediting": credited - read if wanted else None,
        "reading word by word": now - credited if shaded else None,
        "in all": now - began,
    }
    shown = {"found": found, "rows": rows, "shaded": shaded, "spent": _format_times(spent), "receipt": receipt}
    return _show_answer(request, identity, asking, query, answered, **shown)


@router.post("/documents")
async def show_documents(request: Request, identity: Asker) -> Response:
    """Show the documents inside a source that move a query most."""
    service: Service = request.app.state.service
    fields = await read_form(request)
    source = fields.get("source", "")
    names = dict(zip(service.store.source_ids, service.store.source_names, strict=True))
    if source not in names or service.find_documents(source) is None:
        raise ApiError(404, "not_found", "the documents inside this source were not prepared.")
    query = read_json(fields.get("query", "").encode(errors="replace"))
    answered = await service.attribute([query])
    result = await service.documents(source, answered.batches[0])
    asking = _make_form(request, describe_typed(service.form, query))
    return render(
        request,
        "documents.html.j2",
        identity,
        asking=asking,
        query=query,
        answer=answered.answers[0],
        name=names[source],
        source=source,
        rows=describe_documents(result),
        count=len(result.labels.source_ids),
        labels=result.labels,
        meaning=describe_effect(result.labels, "document"),
        sign=describe_sign(result.labels, "document"),
        standing=describe_standing(result.labels.validation),
        warnings=list_once(result.warnings),
    )


def _make_form(request: Request, fields: dict[str, str], wrong: str = "", message: str = "") -> Asking:
    state = request.app.state
    asking = Asking(state.service.form, state.examples, fields, wrong=wrong, message=message)
    return asking.with_token(fields.get("token", ""))


def _may_credit(request: Request, identity: Identity) -> bool:
    return identity.may("credit") and request.app.state.service.ledger is not None


def _show(request: Request, identity: Identity, asking: Asking, status: int = 200) -> Response:
    service: Service = request.app.state.service
    return render(
        request,
        "query.html.j2",
        identity,
        status,
        asking=asking,
        count=len(service.store),
        may_credit=_may_credit(request, identity),
    )


def _show_answer(
    request: Request, identity: Identity, asking: Asking, query: Any, answered: Answered, **shown: Any
) -> Response:
    service: Service = request.app.state.service
    found, rows = shown["found"], shown["rows"]
    labels = answered.result.labels
    policy = service.policy
    return render(
        request,
        "answer.html.j2",
        identity,
        asking=asking,
        query=query,
        encoded=encode(query),
        others=_add_up_others(found, rows),
        again=Asking(asking.form, asking.examples, {**asking.fields, "credit": ""}),
        may_credit=_may_credit(request, identity),
        inside={row.source for row in rows if service.find_documents(row.source) is not None},
        labels=labels,
        count=len(labels.source_ids),
        meaning=describe_effect(labels),
        sign=describe_sign(labels),
        errors=list_once(describe_error(labels)),
        standing=describe_standing(labels.validation),
        tested=None if labels.validation is None else describe_tests(labels.validation),
        warnings=list_once(answered.result.warnings),
        rule="" if policy is None or found.rule is None else policy.explain(found.rule),
        policy=policy,
        needed=_find_needed(service, answered, found),
        may_see_row=identity.may("see_credit"),
        may_see_trust=identity.may("see_trust"),
        **shown,
    )


def _format_times(spent: dict[str, float | None]) -> dict[str, str]:
    return {name: f"{1000 * seconds:.1f} ms" for name, seconds in spent.items() if seconds is not None}


async def _find_words(service: Service, asking: Asking, query: Any, rows: "list[Row]") -> list[Shaded]:
    """Return the words of a completion with what the first sources contribute; none for other queries."""
    if asking.kind != "completion":
        return []
    try:
        return shade_words(await service.words(query), rows)
    except ConfigurationError:  # a form of completions in front of something else than a language model
        return []


def _find_needed(service: Service, answered: Answered, found: QueryEffects) -> float | None:
    """Return how many standard errors an effect must exceed to be credited; None where the rule has no threshold."""
    if service.policy is None or not answered.drafts or found.rule not in ("above_noise", "fixed_plus"):
        return None
    return service.policy.find_quantile(answered.drafts[0].about["freedom"])


def _add_up_others(found: QueryEffects, rows: "list[Row]") -> float | None:
    """Return the share of the sources that are not listed; None without a policy."""
    if found.unattributed is None:
        return None
    return max(0.0, 1.0 - found.unattributed - sum(row.share or 0.0 for row in rows))  # shares are rounded fractions
