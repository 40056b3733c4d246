"""The page *Source*: what one source was credited over time, and how it can be checked; and the list of sources."""

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request, Response

from imprint.credit.money import format_amount
from imprint.serve.access.guard import require_page
from imprint.serve.access.roles import Identity
from imprint.serve.credit import answers, summaries
from imprint.serve.credit.desk import CreditDesk
from imprint.serve.credit.parameters import CreditRoute, unknown_source
from imprint.serve.credit.scope import Scope
from imprint.serve.credit.tally import Counting
from imprint.serve.pages.credit_charts import Span, draw_history, draw_share, group_days
from imprint.serve.pages.rendering import render
from imprint.serve.service import Service

router = APIRouter(route_class=CreditRoute, include_in_schema=False)
Viewer = Annotated[Identity, Depends(require_page("see_sources"))]


@router.get("/sources")
def list_sources(request: Request, identity: Viewer) -> Response:
    """Show the sources that somebody may see, with what they were credited."""
    service: Service = request.app.state.service
    desk, totals, trouble = _find_desk(request, identity), None, ""
    rows = {each["id"]: each for each in service.sources if identity.sees(each["id"])}
    if desk is not None:
        try:
            totals = summaries.sum_days(desk, Scope.of(identity), None, None)
        except Counting as error:
            trouble = error.message[:1].upper() + error.message[1:]
    credited = {} if totals is None else {each.source: each for each in totals.sources}
    for name, each in credited.items():
        rows.setdefault(name, {"id": name, "name": each.name, "size": None})
    return render(
        request,
        "sources.html.j2",
        identity,
        rows=list(rows.values()),
        owned=any(row.get("owner") or row.get("licence") for row in rows.values()),
        n=service.store.n,
        credited=credited,
        totals=totals,
        trouble=trouble,
        reach=max((each.share or 0.0 for each in credited.values()), default=0.0),
        draw=draw_share,
        scope=Scope.of(identity),
    )


@router.get("/sources/{source:path}")
def show_source(request: Request, identity: Viewer, source: str) -> Response:
    """Show what is known of a source, what it was credited, how sure that is, and its statements."""
    service: Service = request.app.state.service
    desk, scope = _find_desk(request, identity), Scope.of(identity)
    about = next((each for each in service.sources if each["id"] == source), None)
    known = about is not None or (desk is not None and source in summaries.list_sources(desk, scope))
    if not known or not identity.sees(source):
        raise unknown_source()
    history = None if desk is None else summaries.describe_history(desk, source)
    return render(
        request,
        "source.html.j2",
        identity,
        source=source,
        about=about,
        link=find_link((about or {}).get("url", "")),
        n=service.store.n,
        credit=None if desk is None or history is None else _describe_credit(desk, scope, history),
    )


def _find_desk(request: Request, identity: Identity) -> CreditDesk | None:
    """Return the credit desk; None without a ledger, or for somebody who may not see credit."""
    desk: CreditDesk | None = request.app.state.credit
    return desk if identity.may("see_own_credit") else None


def find_link(url: str) -> str | None:
    """Return an address that may be a link on a page: of the web, and nothing that runs."""
    try:
        parts = urlsplit(url.strip())
        return url.strip() if parts.scheme in ("http", "https") and parts.hostname else None
    except ValueError:
        return None


def _describe_credit(desk: CreditDesk, scope: Scope, history: answers.History) -> Mapping[str, Any]:
    spans, source = group_days(history.days), history.source
    periods = summaries.describe_periods(desk, scope)
    own = [(each, line) for each in periods for line in each.sources if line.source == source]
    title = f"What {history.name} was credited, in {desk.currency}"
    return {
        "history": history,
        "currency": desk.currency,
        "spans": spans[::-1],
        "chart": draw_history(title, spans, desk.currency) if spans and _has_amounts(spans) else None,
        "per_example": _format_rate(history.per_example),
        "by_size": _format_rate(history.per_example_by_size),
        "ratio": history.amount.micro / history.by_size.micro if history.by_size.micro else None,
        "periods": [{"period": each, "line": line} for each, line in own],
        "changed_periods": desk.changed_periods(),
        "pots": any(each.pot for each, _ in own),
        "amount": format_amount,
        "head": desk.last_head(),
        "left_out": desk.tally.left_out,
    }


def _has_amounts(spans: list[Span]) -> bool:
    return any(each.amount or each.by_size for each in spans)


def _format_rate(micro: float | None) -> str | None:
    """Format millionths per training example as units of the currency."""
    return None if micro is None else f"{micro / 1e6:.4g}"
