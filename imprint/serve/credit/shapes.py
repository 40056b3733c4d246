"""Checks that an entry has the fields that are read of its kind, with values of their types.

Whoever may write to the database can write an entry by hand, with the hash that fits it. `reading.check_row` treats one
of another shape like one that was changed, so that whatever reads entries can rely on what is checked here.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from imprint.credit.leaves import Leaf
from imprint.credit.log import format_time
from imprint.errors import CreditError


def _check_time(text: str) -> str:
    if format_time(datetime.fromisoformat(text)) != text:
        raise ValueError("a time is in UTC, to the microsecond")
    return text


_Whole = Annotated[int, Field(ge=0, lt=2**100)]
_Count = Annotated[int, Field(ge=1, lt=2**100)]
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Time = Annotated[str, AfterValidator(_check_time)]
_Counts = dict[str, _Whole]


class _Entry(TypedDict):
    time: _Time


class _Part(TypedDict):
    """What stayed unattributed of a query."""

    share: _Whole
    amount: _Whole | None


class _Outcome(TypedDict):
    outcome: str


class _Credit(_Entry):
    query: str
    question: str
    measure: str
    policy: str
    rule: str
    reason: str
    better: Literal["lower", "higher"]
    n: _Count
    pot: _Whole | None
    freedom: _Count | None
    unattributed: _Part
    validation: _Outcome | None


class _Line(_Part):
    source: str
    size: _Whole
    score: _Real
    helps: _Real
    error: _Real | None


class _Rest(TypedDict):
    amount: _Whole


class _Period(_Entry):
    period: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,50}$")]
    first: _Whole
    stop: _Whole
    pot: _Whole | None
    entries: _Whole
    without_pot: _Whole
    total: _Whole
    remainder: _Whole
    smallest: _Whole
    unattributed: _Rest
    rules: _Counts
    questions: _Counts
    validations: _Counts


class _PeriodLine(TypedDict):
    source: str
    entries: _Whole
    amount: _Whole
    units: _Whole
    by_size: _Whole
    share: _Real | None
    low: _Real | None
    high: _Real | None


class _Policy(_Entry):
    policy: dict[str, Any]


class _Tariff(_Entry):
    tariff: dict[str, Any]


class _Erasure(_Entry):
    erased: list[_Whole]
    reason: str


class _Dispute(_Entry):
    disputed: _Whole
    agrees: bool
    difference: _Real
    others: list[str]


_HEADERS: Mapping[str, Any] = {
    "log": _Entry,
    "tariff": _Tariff,
    "policy": _Policy,
    "credit": _Credit,
    "period": _Period,
    "erasure": _Erasure,
    "dispute": _Dispute,
}
_LINES: Mapping[str, Any] = {"credit": list[_Line], "period": list[_PeriodLine]}


def has_shape(leaf: Leaf) -> bool:
    """Tell whether an entry has what is read of its kind."""
    try:
        _make_check(_HEADERS[leaf.kind])(leaf.about)
        if leaf.kind in _LINES:
            _make_check(_LINES[leaf.kind])(leaf.rows)
    except (ValidationError, CreditError):
        return False
    about = leaf.about
    return leaf.kind != "period" or about["first"] <= about["stop"] <= leaf.sequence


@cache
def _make_check(shape: Any) -> Callable[[Any], Any]:
    return partial(TypeAdapter(shape).validate_python, strict=True)
