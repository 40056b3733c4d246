"""Reads what is asked about credit: times, filters and places; and answers for a log that was damaged."""

import re
from collections.abc import Callable, Coroutine
from datetime import date, datetime, timedelta
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from imprint.credit.log import format_time
from imprint.errors import CreditError, DamagedLog
from imprint.serve.credit.desk import CreditDesk
from imprint.serve.credit.reading import Filters
from imprint.serve.credit.scope import Scope
from imprint.serve.errors import ApiError

LIMIT = 50
"""Entries of a page, unless another number is asked for."""
MOST = 200
LAST = 2**62 - 1
"""The last place that an entry could have."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


class CreditRoute(APIRoute):
    """A route that reads the ledger: what cannot be read of a log that was changed is refused, and said to be that."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_ledger(request: Request) -> Response:
            try:
                return await handle(request)
            except DamagedLog as error:
                raise ApiError(
                    409,
                    "damaged",
                    "the ledger cannot answer this, because some of it was changed since it was written: see its "
                    "verification.",
                ) from error

        return read_ledger


def find_desk(request: Request) -> CreditDesk:
    """Return the desk of the service; refuse where there is no ledger."""
    desk = request.app.state.credit
    if desk is None:
        raise ApiError(404, "no_ledger", "this service has no ledger.")
    return desk  # type: ignore[no-any-return]


def read_time(text: str | None, name: str) -> str | None:
    """Return a time as entries have it: of a day in UTC its beginning, or a time with its zone."""
    if not text:
        return None
    try:
        if _DAY.fullmatch(text):
            return f"{date.fromisoformat(text).isoformat()}T00:00:00.000000Z"
        found = datetime.fromisoformat(text)
        if found.tzinfo is None:
            raise ValueError
        return format_time(found)
    except (ValueError, CreditError) as error:
        raise ApiError(
            422,
            "invalid",
            f"{name} must be a day, such as 2026-11-30, or a time with its zone, such as 2026-11-30T12:00:00Z.",
        ) from error


def read_day(text: str | None, name: str, *, later: int = 0) -> str | None:
    """Return a day in UTC, or one that is some days later."""
    if not text:
        return None
    try:
        if _DAY.fullmatch(text):
            return (date.fromisoformat(text) + timedelta(days=later)).isoformat()
    except (ValueError, OverflowError):
        pass
    raise ApiError(422, "invalid", f"{name} must be a day, such as 2026-11-30.")


def make_filters(
    scope: Scope,
    source: str | None = None,
    since: str | None = None,
    until: str | None = None,
    rule: str | None = None,
    query: str | None = None,
) -> Filters:
    """Return filters of entries for somebody; a source whose lines they may not see is refused."""
    if source and not scope.sees(source):
        raise unknown_source()
    return Filters(
        sources=scope.narrow([source] if source else []),
        since=read_time(since, "from"),
        until=read_time(until, "until"),
        rule=rule or None,
        query=query or None,
    )


def unknown_source() -> ApiError:
    """Return the refusal for a source that does not exist, or that somebody may not see: they learn nothing more."""
    return ApiError(404, "not_found", "there is no such source among those that this key may see.")
