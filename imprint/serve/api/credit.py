"""`/v1/credit`: entries, totals, verification, heads, periods, statements and exports.

Publishers see the lines of their own sources alone. The log itself is append-only: nothing here changes it.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import FileResponse, StreamingResponse

from imprint.serve.access.guard import require
from imprint.serve.access.roles import Identity
from imprint.serve.credit import answers, summaries
from imprint.serve.credit.describing import Describer
from imprint.serve.credit.desk import CreditDesk
from imprint.serve.credit.exporting import export_entries
from imprint.serve.credit.parameters import (
    LAST,
    LIMIT,
    MOST,
    CreditRoute,
    find_desk,
    make_filters,
    read_day,
    unknown_source,
)
from imprint.serve.credit.reading import Found
from imprint.serve.credit.scope import Scope
from imprint.serve.credit.statements import SUFFIXES
from imprint.serve.errors import ApiError
from imprint.serve.requests import describe_refusals

_REFUSALS = describe_refusals(
    {
        401: "The key is missing, unknown, expired or revoked.",
        403: "The role of the key may not do this.",
        404: "There is no such thing, or the key may not see it.",
        409: "The ledger cannot answer this: no head was signed, or some of the log was changed.",
        422: "A parameter is wrong.",
        429: "The key sends too many requests: try again after Retry-After seconds.",
        503: "The answer is being prepared, or the ledger cannot be reached: try again after Retry-After seconds.",
    }
)
_HIDDEN = {"dispute": ("others",), "erasure": ("erased", "reason")}
"""What publishers do not see of entries that are no queries: a dispute may name other sources, and an erasure names who
asked for it, and queries of others."""
router = APIRouter(prefix="/v1/credit", route_class=CreditRoute, tags=["credit"], responses=_REFUSALS)

Reader = Annotated[Identity, Depends(require("see_own_credit"))]
Desk = Annotated[CreditDesk, Depends(find_desk)]
Source = Annotated[str | None, Query(max_length=1000, description="Only entries with a line of this source.")]
Since = Annotated[
    str | None, Query(alias="from", max_length=40, description="From this day or time on; days are in UTC.")
]
Until = Annotated[str | None, Query(max_length=40, description="Before this day or time; days are in UTC.")]
Period = Annotated[
    str | None, Query(max_length=50, description="A closed period; without it, the one that is not closed yet.")
]
Sequence = Annotated[int, Path(ge=0, le=LAST, description="The place of the entry in the log.")]


def make_describer(desk: CreditDesk, scope: Scope) -> Describer:
    """Return what describes entries for somebody."""
    return Describer(scope, desk.policies(), desk.names, desk.currency, desk.verifier.last.problems)


@router.get("/entries")
def list_entries(
    identity: Reader,
    desk: Desk,
    source: Source = None,
    since: Since = None,
    until: Until = None,
    rule: Annotated[str | None, Query(max_length=40, description="The rule that divided the query.")] = None,
    query: Annotated[str | None, Query(max_length=100, description="The name of the query in the log.")] = None,
    before: Annotated[int | None, Query(ge=0, le=LAST, description="Only entries before this place.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST)] = LIMIT,
) -> answers.Entries:
    """Return credited queries, the newest first. A page may have fewer than `limit` although there are more.

    Ask for the next page with `before`, until it is null. Entries that are added meanwhile change no later page.
    """
    scope = Scope.of(identity)
    page = desk.read_page(make_filters(scope, source, since, until, rule, query), before, limit)
    describer = make_describer(desk, scope)
    return answers.Entries(entries=[describer.describe(found) for found in page.entries], before=page.before)


@router.get("/entries/{sequence}")
def show_entry(identity: Reader, desk: Desk, sequence: Sequence) -> answers.EntryAnswer:
    """Return one entry, why each share is what it is, and the proof that it is in the log that was signed last."""
    return describe_one(desk, Scope.of(identity), desk.read_entry(sequence))


def describe_one(desk: CreditDesk, scope: Scope, found: Found) -> answers.EntryAnswer:
    """Return what the log says at one place; refuse a query that was divided among other sources alone."""
    describer, leaf = make_describer(desk, scope), found.leaf
    if leaf is not None and leaf.kind == "credit" and not scope.choose(leaf.rows):
        raise ApiError(404, "not_found", f"entry {found.sequence} is about no source that this key may see.")
    if leaf is None:
        return answers.EntryAnswer(
            sequence=found.sequence,
            kind=None,
            time=None,
            about=None,
            credit=None,
            problems=describer.find_problems(found),
            proof=None,
        )
    credit = describer.describe(found) if leaf.kind == "credit" else None
    proof, is_hidden = desk.prove(leaf), bool(list_hidden(leaf.kind, scope))
    lines = [] if proof.path is None else [leaf.prove_line(at) for at in _find_lines(leaf.rows, scope)]
    return answers.EntryAnswer(
        sequence=found.sequence,
        kind=leaf.kind,
        time=leaf.about["time"],
        about=None if leaf.kind == "credit" else describe_other(leaf.about, leaf.kind, scope),
        credit=credit if isinstance(credit, answers.Entry) else None,
        problems=describer.find_problems(found) if credit is None else credit.problems,
        proof=answers.ProofAnswer(
            holds=proof.holds,
            span=proof.span,
            head=None if proof.head is None else summaries.describe_head(desk, proof.head),
            leaf=None if is_hidden else proof.path,
            lines=lines,
        ),
    )


def _find_lines(rows: list[dict[str, Any]], scope: Scope) -> list[int]:
    return [place for place, row in enumerate(rows) if scope.sees(row["source"])]


def describe_other(about: dict[str, Any], kind: str, scope: Scope) -> dict[str, Any]:
    """Return what an entry says that is no query."""
    hidden = list_hidden(kind, scope)
    return {name: value for name, value in about.items() if name not in hidden}


def list_hidden(kind: str, scope: Scope) -> tuple[str, ...]:
    """Return what somebody does not see of entries of a kind; they cannot see the proof either, which has all of it."""
    return () if scope.is_all else _HIDDEN.get(kind, ())


@router.get("/totals")
def show_totals(
    identity: Reader, desk: Desk, period: Period = None, since: Since = None, until: Until = None
) -> answers.Totals:
    """Return what queries paid, and to whom: of the running period, of a closed one, or of some days (`from`, `until`).

    Days are in UTC, and `until` is the day after the last one. A pot of a period belongs to no day.
    """
    scope = Scope.of(identity)
    if since or until:
        if period:
            raise ApiError(422, "invalid", "give either a period or days.")
        return summaries.sum_days(desk, scope, read_day(since, "from"), read_day(until, "until"))
    return summaries.sum_closed(desk, scope, desk.period(period)) if period else summaries.sum_running(desk, scope)


@router.get("/comparison")
def compare_policies(
    identity: Annotated[Identity, Depends(require("see_credit"))],
    desk: Desk,
    policy: Annotated[
        str,
        Query(
            max_length=120,
            description='A policy of the log by its name and version, "house rules@1", or a rule as it comes, '
            '"rule:positive_part".',
        ),
    ],
    period: Period = None,
) -> answers.ComparisonAnswer:
    """Return what sources got in a period, and what they would have got under another policy.

    Not for publishers: of a period with one query, it would say more of what others helped than their statement does.
    """
    return summaries.compare(desk, Scope.of(identity), policy, desk.period(period) if period else None)


@router.get("/sources/{source:path}")
def show_history(identity: Reader, desk: Desk, source: str) -> answers.History:
    """Return what a source got over time, per training example, and how many of its effects stand out from chance."""
    scope = Scope.of(identity)
    if source not in summaries.list_sources(desk, scope):
        raise unknown_source()
    return summaries.describe_history(desk, source)


@router.get("/verification")
def show_verification(identity: Reader, desk: Desk) -> answers.VerificationAnswer:
    """Return what the last verification of the log found, and whether one runs."""
    return summaries.describe_verification(desk, Scope.of(identity))


@router.post("/verification", status_code=202)
def begin_verification(
    identity: Annotated[Identity, Depends(require("verify"))], desk: Desk
) -> answers.VerificationAnswer:
    """Begin to verify the log, unless that is being done already; return the state."""
    desk.verifier.start()
    return summaries.describe_verification(desk, Scope.of(identity))


@router.get("/heads")
def list_heads(identity: Reader, desk: Desk) -> list[answers.HeadAnswer]:
    """Return the signed heads that the database keeps, the newest first."""
    return [summaries.describe_head(desk, head) for head in reversed(desk.heads())]


@router.get("/periods")
def list_periods(identity: Reader, desk: Desk) -> list[answers.PeriodAnswer | answers.ChangedEntry]:
    """Return the closed periods, the newest first, with what sources are paid; of changed ones, that they are."""
    every: list[answers.PeriodAnswer | answers.ChangedEntry] = [
        *summaries.describe_periods(desk, Scope.of(identity)),
        *summaries.describe_changed_periods(desk),
    ]
    return sorted(every, key=lambda period: -period.sequence)


@router.get("/statements/{period}/{name:path}", response_class=FileResponse)
def send_statement(
    identity: Reader,
    desk: Desk,
    period: str,
    name: Annotated[str, Path(description="The id of the source, and .html, .csv, .parquet or .jsonl (the proofs).")],
) -> FileResponse:
    """Return a file of the statement of a source for a closed period, as a download."""
    source, _, suffix = name.rpartition(".")
    closing = desk.period(period)
    if not Scope.of(identity).sees(source) or closing.find_line(source) is None:
        raise unknown_source()
    if suffix not in SUFFIXES:
        raise ApiError(404, "not_found", f"statements are {', '.join(SUFFIXES)} files.")
    head = desk.last_head()
    if head is None or head.size <= closing.sequence:
        raise ApiError(
            409, "not_signed", "no head of the log was signed since this period was closed: the payer has to sign one."
        )
    file = desk.statements.find(closing, source, suffix)
    return FileResponse(file, filename=file.name, content_disposition_type="attachment")


@router.get("/export", response_class=StreamingResponse)
def export(
    identity: Reader, desk: Desk, source: Source = None, since: Since = None, until: Until = None
) -> StreamingResponse:
    """Return credited queries as a CSV table, with one row for each source of each query, the oldest first."""
    scope = Scope.of(identity)
    filters = make_filters(scope, source, since, until)
    headers = {"Content-Disposition": 'attachment; filename="credit.csv"'}
    return StreamingResponse(export_entries(desk, scope, filters), media_type="text/csv", headers=headers)
