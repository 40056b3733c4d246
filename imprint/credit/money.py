"""Divides whole amounts so that nothing is lost: by largest remainder, in exact integers.

Amounts of money are whole micro-units, millionths of a currency's unit; shares are whole billionths. Weights are
floats, each of which is a whole number times a power of two, so they are divided without any rounding but the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from imprint.errors import CreditError

PARTS = 1_000_000_000
"""What the shares of one query add up to: they are whole billionths."""
MICRO = 1_000_000
"""Micro-units in one unit of a currency."""
_LARGEST = 2**63 - 1  # what databases keep in a whole number


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide a whole total in proportion to whole weights, none negative; the parts add up to the total exactly.

    Each gets its exact part rounded down. What is left goes, one by one, to those whose parts lost most by rounding,
    and
    among equals to those that come first: give them in the order of their ids.

    >>> apportion(100, [1, 1, 1])
    [34, 33, 33]
    >>> apportion(5, [0, 3, 3])
    [0, 3, 2]
    """
    whole = sum(weights)
    if total < 0 or whole <= 0 or min(weights) < 0:
        raise ValueError("the total and the weights must not be negative, and some weight must be positive")
    parts, lost = map(list, zip(*(divmod(total * weight, whole) for weight in weights), strict=True))
    most = sorted(range(len(weights)), key=lambda place: (-lost[place], place))
    for place in most[: total - sum(parts)]:
        parts[place] += 1
    return parts


def round_amounts(amounts: Sequence[int], smallest: int) -> list[int]:
    """Round amounts to whole units of so many micro-units; they add up to the rounded-down sum of all amounts.

    Each gets what it has, rounded down. Units that are left go to the largest remainders, among equals to the first.

    >>> round_amounts([15_000, 15_000, 4_000], 10_000)
    [2, 1, 0]
    """
    units, lost = map(list, zip(*(divmod(amount, smallest) for amount in amounts), strict=True))
    most = sorted(range(len(amounts)), key=lambda place: (-lost[place], place))
    for place in most[: sum(amounts) // smallest - sum(units)]:
        units[place] += 1
    return units


def make_whole(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the exact proportions of some finite floats.

    >>> make_whole([0.5, 0.25, 3.0])
    [2, 1, 12]
    """
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    common = max((below for _, below in ratios), default=1)  # powers of two, so the largest is a multiple of each
    return [above * (common // below) for above, below in ratios]


@dataclass(frozen=True)
class Tariff:
    """What a query pays, in which currency, and the smallest unit that is ever paid out.

    per_query: in micro-units; None if there is a pot for a whole period instead.
    smallest: micro-units in the smallest unit that can be paid: 10,000 for a cent.

    >>> Tariff("EUR", per_query=2_000).describe()
    '0.002 EUR per query'
    """

    currency: str
    per_query: int | None = None
    smallest: int = 10_000

    def __post_init__(self) -> None:
        known = isinstance(self.currency, str)
        if not (known and self.currency.isascii() and self.currency.isalpha() and 1 <= len(self.currency) <= 8):
            raise CreditError(f"a currency is named by up to eight letters, such as EUR; got {self.currency!r}.")
        if self.per_query is not None:
            require_amount(self.per_query, "the price of a query")
        if require_amount(self.smallest, "the smallest unit") < 1:
            raise CreditError("the smallest unit must be at least one micro-unit; a cent has 10,000.")

    def describe(self) -> str:
        """Say what a query pays."""
        if self.per_query is None:
            return f"a pot for each period, in {self.currency}"
        return f"{format_amount(self.per_query)} {self.currency} per query"

    def describe_pot(self, pot: int | None) -> str:
        """Name the pot of a query.

        >>> Tariff("EUR").describe_pot(2_000), Tariff("EUR").describe_pot(None)
        ('0.002 EUR', 'that of the period')
        """
        return "that of the period" if pot is None else f"{format_amount(pot)} {self.currency}"


def require_amount(value: object, what: str) -> int:
    """Return a whole number of micro-units; refuse anything else, such as a float that looks like one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise CreditError(
            f"{what} must be a whole number of micro-units, from 0 to {_LARGEST}; got {value!r}. One unit of a "
            "currency has 1,000,000 of them."
        )
    return value


def format_amount(micro: int) -> str:
    """Format micro-units as units of the currency, without losing a digit.

    >>> format_amount(1_250_000), format_amount(3), format_amount(-10_000), format_amount(0)
    ('1.25', '0.000003', '-0.01', '0')
    """
    units, rest = divmod(abs(micro), MICRO)
    digits = f"{rest:06}".rstrip("0")
    return f"{'-' if micro < 0 else ''}{units}{f'.{digits}' if digits else ''}"


def format_units(units: int, smallest: int) -> str:
    """Format whole units of so many micro-units as units of the currency, all with the same number of decimals.

    >>> format_units(125, 10_000), format_units(2, 1_000_000), format_units(37_897_284_218_371_848, 1)
    ('1.25', '2', '37897284218.371848')
    """
    decimals = len(format_amount(smallest).partition(".")[2])
    whole, rest = divmod(abs(units * smallest), MICRO)
    digits = f".{f'{rest:06}'[:decimals]}" if decimals else ""
    return f"{'-' if units < 0 else ''}{whole}{digits}"


def format_share(parts: float) -> str:
    """Format a share in billionths as a percentage.

    >>> format_share(123_456_789), format_share(0), format_share(PARTS)
    ('12.3%', '0.0%', '100.0%')
    """
    return f"{100 * parts / PARTS:.1f}%"
