"""The page *Credit*: what the log credited to whom, and whether it verifies; and the page of one of its entries."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse

from imprint.serve.access.guard import require_page
from imprint.serve.access.roles import Identity
from imprint.serve.api.credit import Desk, Sequence, describe_one, make_describer
from imprint.serve.credit import answers, summaries
from imprint.serve.credit.desk import MOST_DISPUTES, CreditDesk
from imprint.serve.credit.parameters import LAST, CreditRoute, make_filters, read_day
from imprint.serve.credit.reading import Filters, Found
from imprint.serve.credit.scope import Scope
from imprint.serve.credit.tally import Counting
from imprint.serve.errors import ApiError
from imprint.serve.pages.credit_charts import draw_share
from imprint.serve.pages.rendering import render

router = APIRouter(route_class=CreditRoute, include_in_schema=False)
RULES = ("above_noise", "positive_part", "fixed_plus", "by_size", "equal", "nothing")
_ROWS, _LISTED = 25, 50
Viewer = Annotated[Identity, Depends(require_page("see_own_credit"))]


class Asked(NamedTuple):
    """What the forms of the page ask for, as texts."""

    period: str = ""
    policy: str = ""
    source: str = ""
    since: str = ""
    until: str = ""
    rule: str = ""
    query: str = ""

    def link(self, anchor: str = "", **changes: Any) -> str:
        """Return the address of the page with this, and some of it changed."""
        given = {("from" if name == "since" else name): value for name, value in self._asdict().items()}
        pairs = {name: value for name, value in {**given, **changes}.items() if value not in ("", None)}
        return f"/credit{'?' if pairs else ''}{urlencode(pairs)}{anchor}"


def _read_asked(
    period: Annotated[str, Query(max_length=50)] = "",
    policy: Annotated[str, Query(max_length=120)] = "",
    source: Annotated[str, Query(max_length=1000)] = "",
    since: Annotated[str, Query(alias="from", max_length=40)] = "",
    until: Annotated[str, Query(max_length=40)] = "",
    rule: Annotated[str, Query(max_length=40)] = "",
    query: Annotated[str, Query(max_length=100)] = "",
) -> Asked:
    return Asked(period, policy, source, since, until, rule, query)


@router.get("/credit")
def show_credit(
    request: Request,
    identity: Viewer,
    desk: Desk,
    asked: Annotated[Asked, Depends(_read_asked)],
    before: Annotated[int | None, Query(ge=0, le=LAST)] = None,
) -> Response:
    """Show what was credited, whether the log holds, and the periods that were closed."""
    scope = Scope.of(identity)
    filters, trouble = _make_filters(scope, asked)
    page = desk.read_page(filters, before, _ROWS)
    describer, head = make_describer(desk, scope), desk.last_head()
    entries = [describer.describe(found) for found in page.entries]
    periods = summaries.describe_periods(desk, scope)
    newer = asked.link("#entries") if before is not None else None
    names, unknown = _list_names(desk, scope)
    verification = summaries.describe_verification(desk, scope)
    problems = _group_problems(verification)
    vouched, spans = desk.find_vouched(), [each.span for each in desk.verifier.last.problems if each.span is not None]
    return render(
        request,
        "credit.html.j2",
        identity,
        asked=asked,
        trouble=trouble,
        scope=scope,
        size=desk.size(),
        entries=entries,
        changed=[entry.sequence for entry in entries if entry.problems],
        before=None if page.before is None else asked.link("#entries", before=page.before),
        newest=newer,
        head=None if head is None else summaries.describe_head(desk, head),
        vouched=vouched,
        signed={entry.sequence: vouched.judge(entry.sequence, spans) for entry in entries},
        clock=desk.describe_clock() if scope.is_all else None,
        verification=verification,
        problems=dict(list(problems.items())[:_LISTED]),
        more=len(problems) > _LISTED,
        periods=periods,
        changed_periods=desk.changed_periods(),
        currency=desk.currency,
        choices=desk.choices() if scope.is_all else {},
        rules=RULES,
        names=names,
        unknown=unknown,
        export=_link_export(asked) if not trouble else None,
        period_of=_describe_period(desk, scope, asked),
        disputes=_describe_disputes(desk, scope),
        draw=draw_share,
    )


def _group_problems(verification: answers.VerificationAnswer) -> dict[int, list[answers.ProblemAnswer]]:
    """Return what is wrong with each entry that has problems."""
    found: dict[int, list[answers.ProblemAnswer]] = {}
    for problem in verification.problems:
        if problem.sequence is not None:
            found.setdefault(problem.sequence, []).append(problem)
    return found


def _make_filters(scope: Scope, asked: Asked) -> tuple[Filters, str]:
    """Return the filters of the form, and what is wrong with them; the last day counts as a whole."""
    try:
        until = read_day(asked.until, "the last day", later=1)
        return make_filters(scope, asked.source, asked.since, until, asked.rule, asked.query), ""
    except ApiError as error:
        return Filters(scope.sources), error.message[:1].upper() + error.message[1:]


def _link_export(asked: Asked) -> str:
    pairs = {"source": asked.source, "from": asked.since, "until": read_day(asked.until, "until", later=1) or ""}
    return f"/v1/credit/export?{urlencode({name: text for name, text in pairs.items() if text})}".rstrip("?")


def _list_names(desk: CreditDesk, scope: Scope) -> tuple[dict[str, str], list[str]]:
    """Return the sources to choose from, with their names and by these; and those of a key that do not exist."""
    try:
        known = summaries.list_sources(desk, scope)
        unknown = sorted((scope.sources or frozenset()) - set(known))
    except Counting:  # the log may have more
        known, unknown = list(filter(scope.sees, desk.service.store.source_ids)), []
    names = {name: desk.names.get(name, name) for name in known}
    return dict(sorted(names.items(), key=lambda pair: (pair[1].casefold(), pair[0]))), unknown


def _describe_period(desk: CreditDesk, scope: Scope, asked: Asked) -> Mapping[str, Any]:
    """Return the totals of the period that was asked for, or of the running one, and how it compares; or why not."""
    try:
        closing = desk.period(asked.period) if asked.period else None
        found = summaries.sum_running(desk, scope) if closing is None else summaries.sum_closed(desk, scope, closing)
        wanted = asked.policy and scope.is_all  # a publisher would learn more of others than statements say
        compared = summaries.compare(desk, scope, asked.policy, closing) if wanted else None
    except ApiError as error:
        return {"trouble": error.message[:1].upper() + error.message[1:], "totals": None, "compared": None}
    changes = {} if compared is None else {change.source: change for change in compared.sources}
    waiting = any(source.waiting for source in found.sources)
    reach = max(
        (max(_share_of(source, waiting), source.by_size.micro / (found.total.micro or 1)) for source in found.sources),
        default=0.0,
    )
    return {"trouble": "", "totals": found, "compared": compared, "changes": changes, "reach": reach}


def _share_of(source: answers.SourceTotal, waiting: bool) -> float:
    return (source.waiting if waiting else source.share) or 0.0


def _describe_disputes(desk: CreditDesk, scope: Scope) -> Mapping[str, Any]:
    """Return what disputes found, the newest first; an entry that differed the last time is open."""
    try:
        noted = desk.disputes()
    except Counting as error:
        return {"trouble": error.message, "rows": [], "more": False}
    rows, last = [], set[int]()
    for found in noted:
        if found.leaf is None:
            continue
        about = found.leaf.about
        is_last = about["disputed"] not in last
        last.add(about["disputed"])
        rows.append(
            {
                "sequence": found.sequence,
                "disputed": about["disputed"],
                "time": about["time"],
                "agrees": about["agrees"],
                "difference": about["difference"],
                "open": is_last and not about["agrees"],
                "others": about["others"] if scope.is_all else [],
            }
        )
    return {"trouble": "", "rows": rows, "more": len(noted) == MOST_DISPUTES}


@router.post("/credit/verify")
def verify(identity: Annotated[Identity, Depends(require_page("verify"))], desk: Desk) -> Response:
    """Begin to verify the log, and show the page that says how far it is."""
    desk.verifier.start()
    return RedirectResponse("/credit", 303)


@router.get("/credit/entries/{sequence}")
def show_entry(request: Request, identity: Viewer, desk: Desk, sequence: Sequence) -> Response:
    """Show one entry: who got what, why, and whether it is in the log that was signed."""
    scope, found = Scope.of(identity), desk.read_entry(sequence)
    answer = describe_one(desk, scope, found)
    size = desk.size()
    return render(
        request,
        "credit_entry.html.j2",
        identity,
        entry=answer,
        previous=sequence - 1 if sequence else None,
        next=sequence + 1 if sequence + 1 < size else None,
        disputes=_find_disputes(desk, found),
        reach=max((line.share for line in answer.credit.lines), default=0.0) if answer.credit else 0.0,
        draw=draw_share,
        scope=scope,
        currency=desk.currency,
    )


def _find_disputes(desk: CreditDesk, found: Found) -> list[dict[str, Any]]:
    """Return what disputes of an entry found, the newest first."""
    try:
        noted = [other.leaf.about for other in desk.disputes() if other.leaf is not None]
    except Counting:
        return []
    return [about for about in noted if about["disputed"] == found.sequence]
