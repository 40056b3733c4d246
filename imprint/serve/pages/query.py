"""The page *Query*: somebody asks, and sees the answer with what each source did to it."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from imprint.attribution.uncertainty import describe_error, has_errors
from imprint.credit.ledger import Receipt
from imprint.credit.policy import Policy
from imprint.errors import ConfigurationError, CreditUnavailable, DataError, ImprintError, UndefinedScore
from imprint.serve.access.guard import require_page
from imprint.serve.access.roles import Identity
from imprint.serve.api.attributions import note_credited
from imprint.serve.batching import Closing, DeadlinePassed, Overloaded
from imprint.serve.errors import NO_NUMBER, ApiError, describe_cause
from imprint.serve.pages.answering import describe_answer, describe_documents, shade_words
from imprint.serve.pages.asking import Asking, Mistyped, describe_typed, encode, is_index
from imprint.serve.pages.forms import read_form
from imprint.serve.pages.rendering import render
from imprint.serve.pages.wording import (
    describe_effect,
    describe_sign,
    describe_standing,
    describe_tests,
    list_once,
    speak_of_documents,
)
from imprint.serve.requests import QueryEffects, read_json
from imprint.serve.service import Answered, Credited, CreditUnanswered, Service

if TYPE_CHECKING:
    from imprint.language import TokenAttribution
    from imprint.serve.pages.answering import Row

logger = logging.getLogger("imprint.serve")
router = APIRouter(prefix="/query", include_in_schema=False)
Asker = Annotated[Identity, Depends(require_page("attribute"))]


@router.get("")
def show_form(request: Request, identity: Asker, example: str = "") -> Response:
    """Show the form, filled with an example if one is named."""
    asking = _make_form(request, {})
    if is_index(example, len(asking.examples)):
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
        query = await asyncio.to_thread(asking.read)
        request.state.queries = 1
        credited = await _recall(service, identity, asking, query) if wanted else None
        answered = (
            await service.attribute([query], caller=f"key:{identity.name}") if credited is None else credited.answered
        )
    except Mistyped as error:
        return _show(request, identity, _make_form(request, fields, error.name, error.message), 422)
    except UndefinedScore:
        return _show(request, identity, _make_form(request, fields, asking.main, NO_NUMBER), 422)
    except DataError as error:
        return _show(request, identity, _make_form(request, fields, asking.main, str(error)), 422)
    read = time.monotonic()
    words, unread = await _read_words(service, asking, query)  # before anything is credited that a person waits for
    worded = time.monotonic()
    if wanted and credited is None:
        credited = await _credit(service, identity, asking, query, answered)
    if credited is not None:
        answered = credited.answered
        note_credited(request, credited.receipt)
    now = time.monotonic()
    spent = {
        "waiting": answered.queued,
        "reading": answered.read,
        "crediting": now - worded if wanted else None,
        "reading word by word": worded - read if words else None,
        "in all": now - began,
    }
    receipt = None if credited is None else credited.receipt

    def show() -> Response:
        found, rows = describe_answer(answered, receipt)
        return _show_answer(
            request,
            identity,
            asking,
            query,
            answered,
            policy=service.policy if credited is None else credited.policy,
            receipt=receipt,
            found=found,
            rows=rows,
            shaded=[] if words is None else shade_words(words, rows),
            unread=unread,
            spent=_format_times(spent),
        )

    return await asyncio.to_thread(show)  # a page may be long, and nobody else should wait for it


async def _recall(service: Service, identity: Identity, asking: Asking, query: Any) -> Credited | None:
    """Return what was credited before from the same form; None if nothing was."""
    with _explained():
        return await service.recall([query], caller=f"key:{identity.name}", key=asking.name_request(query))


async def _credit(service: Service, identity: Identity, asking: Asking, query: Any, answered: Answered) -> Credited:
    with _explained():
        return await service.credit(answered, caller=f"key:{identity.name}", key=asking.name_request(query))


@contextmanager
def _explained() -> Iterator[None]:
    """Say to a person what to do if the ledger does not answer: a form that is sent again credits nothing twice."""
    try:
        yield
    except (CreditUnanswered, CreditUnavailable) as error:
        logger.error("the ledger cannot be used: %s", describe_cause(error))
        message = (
            "it is unknown whether this was credited: reload this page, which sends the same form again, and credits "
            "nothing twice."
        )
        raise ApiError(503, "credit_unknown", message, {"Retry-After": "5"}) from error


@router.post("/documents")
async def show_documents(request: Request, identity: Asker) -> Response:
    """Show the documents inside a source that move a query most."""
    service: Service = request.app.state.service
    fields = await read_form(request)
    source = fields.get("source", "")
    names = dict(zip(service.store.source_ids, service.store.source_names, strict=True))
    if source not in names or service.find_documents(source) is None:
        raise ApiError(404, "not_found", "the documents inside this source were not prepared.")
    query = await asyncio.to_thread(read_json, fields.get("query", "").encode(errors="replace"))
    answered = await service.attribute([query], caller=f"key:{identity.name}")
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
        warnings=list_once(speak_of_documents(result.warnings)),
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
    found, rows, policy, receipt = shown["found"], shown["rows"], shown["policy"], shown["receipt"]
    result, labels = answered.result, answered.result.labels
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
        errors=list_once(describe_error(labels, has_errors(result.noise_changes, result.replicates))),
        standing=describe_standing(labels.validation),
        tested=None if labels.validation is None else describe_tests(labels.validation),
        warnings=list_once((*service.list_warnings([query]), *result.warnings)),
        rule="" if policy is None or found.rule is None else policy.explain(found.rule),
        needed=_find_needed(policy, answered, receipt, found),
        may_see_row=identity.may("see_credit"),
        may_see_trust=identity.may("see_trust"),
        **shown,
    )


def _format_times(spent: dict[str, float | None]) -> dict[str, str]:
    return {name: f"{1000 * seconds:.1f} ms" for name, seconds in spent.items() if seconds is not None}


async def _read_words(service: Service, asking: Asking, query: Any) -> "tuple[TokenAttribution | None, bool]":
    """Return what sources contribute to the words of a completion, and whether that should be there and is not."""
    if asking.kind != "completion":
        return None, False
    try:
        return await service.words(query), False
    except ConfigurationError:  # a form of completions in front of something else than a language model
        return None, False
    except (DeadlinePassed, Overloaded, Closing, ImprintError) as error:  # the answer itself is there
        logger.warning("a completion could not be read word by word: %s", type(error).__name__)
        return None, True


def _find_needed(
    policy: Policy | None, answered: Answered, receipt: Receipt | None, found: QueryEffects
) -> float | None:
    """Return how many standard errors an effect must exceed to be credited; None where the rule has no threshold."""
    if policy is None or found.rule not in ("above_noise", "fixed_plus"):
        return None
    about = answered.drafts[0].about if receipt is None else receipt.entries[0].about
    return policy.find_quantile(about["freedom"])


def _add_up_others(found: QueryEffects, rows: "list[Row]") -> float | None:
    """Return the share of the sources that are not listed; None without a policy."""
    if found.unattributed is None:
        return None
    return max(0.0, 1.0 - found.unattributed - sum(row.share or 0.0 for row in rows))  # shares are rounded fractions
