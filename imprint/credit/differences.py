"""Names what differs between what an entry says and what follows from the rest, for whoever looks for the cause."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from imprint.credit.canonical import encode
from imprint.credit.leaves import Leaf
from imprint.credit.money import PARTS, format_amount

REST = "the unattributed rest"
_NAMED = 4  # differences that are listed; of more, how many there are
_Part = tuple[Any, Any]
"""A share and an amount, as an entry has them."""
Closed = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""The header of a closed period, and its lines."""


def name_help(values: Iterable[tuple[str, Any, float]]) -> str:
    """Name the sources that helped by something else than their scores say: each after what it has and should have."""
    return _list(f"{name} by {one!r}, it would be {other!r}" for name, one, other in values if one != other)


def name_parts(names: Iterable[str], found: Iterable[_Part], expected: Iterable[_Part], currency: str) -> str:
    """Name the sources that have another amount of a query than they would have, or with the same one another share."""
    return _list(_compare_parts(zip(names, found, expected, strict=True), currency))


def _compare_parts(parts: Iterable[tuple[str, _Part, _Part]], currency: str) -> Iterator[str]:
    for name, (share, amount), (own_share, own_amount) in parts:
        if _differ(amount, own_amount):
            yield f"{name} has {_format_amount(amount, currency)}, it would be {_format_amount(own_amount, currency)}"
        elif _differ(share, own_share):
            yield f"{name} has a share of {_format_share(share)}, it would be {_format_share(own_share)}"


def name_closed(found: Closed, expected: Closed, skipped: Iterable[str]) -> str:
    """Name the amounts of a closed period that its entries do not give; where there are none, the other figures."""
    parts, again = _by_source(found), _by_source(expected)
    currency, empty = expected[0]["currency"], dict[str, Any]()
    pairs = [(name, parts.get(name, empty), again.get(name, empty)) for name in dict.fromkeys([*parts, *again])]
    amounts = [
        f"{name} has {_format_amount(one.get('amount'), currency)}, its entries give "
        f"{_format_amount(other.get('amount'), currency)}"
        for name, one, other in pairs
        if _differ(one.get("amount"), other.get("amount"))
    ]
    figures = (
        f"{name and f'{name}: '}{key} is {one.get(key)!r}, its entries give {other.get(key)!r}"
        for name, one, other in (("", found[0], expected[0]), *pairs)
        for key in dict.fromkeys([*one, *other])
        if key not in skipped and _differ(one.get(key), other.get(key))
    )
    return _list(amounts or figures)


def find_exchanged(entries: Iterable[Leaf], found: Closed, expected: Closed) -> Iterator[int]:
    """Go through the entries that alone explain a period, if two sources exchanged their figures there."""
    amounts, again = ({row["source"]: row["amount"] for row in rows} for _, rows in (found, expected))
    moved = [(name, again[name] - amount) for name, amount in amounts.items() if again.get(name, amount) != amount]
    if amounts.keys() != again.keys() or len(moved) != 2 or moved[0][1] != -moved[1][1]:
        return
    (one, more), (other, _) = moved
    for entry in entries:
        own = {row["source"]: row["amount"] for row in entry.rows}
        if own.get(one) is not None and own.get(other) is not None and own[one] - own[other] == more:
            yield entry.sequence


def _by_source(closed: Closed) -> dict[str, Mapping[str, Any]]:
    about, rows = closed
    return {**{row["source"]: row for row in rows}, REST: about["unattributed"]}


def _differ(one: Any, other: Any) -> bool:
    return encode([one]) != encode([other])  # 2.0 is not 2 here


def _list(differences: Iterable[str]) -> str:
    """List the first differences, and count the others."""
    found = list(differences)
    more = [f"and {len(found) - _NAMED} more"] * (len(found) > _NAMED)
    return "; ".join([*found[:_NAMED], *more])


def _format_amount(value: Any, currency: str) -> str:
    """Return an amount with its currency; what is no amount, as it is."""
    if value is None:
        return "no amount"
    return f"{format_amount(value)} {currency}" if type(value) is int else repr(value)


def _format_share(value: Any) -> str:
    """Return a share with all of its digits, because two may differ in the last one alone."""
    return f"{100 * value / PARTS:.7f}".rstrip("0").rstrip(".") + "%" if type(value) is int else repr(value)
