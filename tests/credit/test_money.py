"""Amounts are divided without losing or inventing anything."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imprint.credit.money import (
    MICRO,
    Tariff,
    apportion,
    format_amount,
    format_units,
    make_whole,
    require_amount,
    round_amounts,
)
from imprint.errors import CreditError

weights = st.lists(st.integers(0, 10**12), min_size=1, max_size=30).filter(any)
floats = st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=1, max_size=20)


@given(st.integers(0, 2**63 - 1), weights)
def test_parts_add_up_and_are_within_one_of_the_exact_ones(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - Fraction(total * weight, sum(weights))) < 1


@given(st.integers(0, 10**9), weights)
def test_the_largest_remainders_are_rounded_up(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    lost = [Fraction(total * weight, sum(weights)) - part for part, weight in zip(parts, weights, strict=True)]
    raised = [1 + each for each in lost if each < 0]  # what they had lost before they were rounded up
    assert max((each for each in lost if each >= 0), default=0) <= min(raised, default=1)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_ties_go_to_those_that_come_first(total: int, count: int) -> None:
    parts = apportion(total, [7] * count)
    assert parts == sorted(parts, reverse=True) and parts[0] - parts[-1] <= 1


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=20), st.integers(1, 10**6))
def test_rounded_amounts_add_up_and_lose_less_than_a_unit(amounts: list[int], smallest: int) -> None:
    units = round_amounts(amounts, smallest)
    assert sum(units) == sum(amounts) // smallest
    assert all(abs(unit * smallest - amount) < smallest for unit, amount in zip(units, amounts, strict=True))


@given(floats)
def test_floats_become_whole_numbers_in_their_exact_proportions(values: list[float]) -> None:
    whole = make_whole(values)
    exact = [Fraction(value) for value in values]
    scale = next((Fraction(number) / value for number, value in zip(whole, exact, strict=True) if value), None)
    assert scale is None or all(number == value * scale for number, value in zip(whole, exact, strict=True))


@pytest.mark.parametrize(("total", "weights"), [(-1, [1]), (1, [0, 0]), (1, [2, -1])])
def test_what_cannot_be_divided_is_refused(total: int, weights: list[int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        apportion(total, weights)


@given(st.integers(-(10**15), 10**15))
def test_an_amount_is_written_to_the_last_digit(micro: int) -> None:
    assert Fraction(format_amount(micro)) == Fraction(micro, MICRO)


@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None, 2**63])
def test_an_amount_is_a_whole_number(value: Any) -> None:
    with pytest.raises(CreditError, match="must be a whole number of micro-units"):
        require_amount(value, "the pot")


@pytest.mark.parametrize(
    "given", [{"currency": "€"}, {"currency": ""}, {"per_query": -1}, {"per_query": 0.5}, {"smallest": 0}]
)
def test_a_tariff_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(CreditError):
        Tariff(**{"currency": "EUR", **given})


def test_units_are_formatted_to_the_last_digit() -> None:
    assert format_units(37_897_284_218_371_848, 1) == "37897284218.371848"
    assert format_units(2**63 - 1, 10_000) == "92233720368547758.07"
    assert (format_units(-125, 10_000), format_units(3, 1_000_000), format_units(0, 10)) == ("-1.25", "3", "0.00000")
