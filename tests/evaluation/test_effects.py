"""What each source does, from ground truth."""

from dataclasses import replace

import pytest
import torch

from imprint.evaluation.effects import list_effects
from imprint.evaluation.truth import Truth
from tests.evaluation.planted import GROUPS, HALVES, PAIRS, REMOVALS, UNIONS, draw, random_truth


def test_an_effect_is_the_mean_change_over_queries_and_runs_largest_first() -> None:
    truth = random_truth(REMOVALS)
    found = list_effects(truth)
    actual = (truth.values[:, 1:] - truth.values[:, :1]).mean((0, 2))  # the first subset is everything
    by_source = dict(zip(GROUPS.ids, actual.tolist(), strict=True))
    assert {each.source: each.effect for each in found} == pytest.approx(by_source)
    assert [abs(each.effect) for each in found] == sorted((abs(each.effect) for each in found), reverse=True)
    assert [each.size for each in found] == [4] * 5


def test_its_error_is_that_of_the_mean_over_runs() -> None:
    truth = random_truth(REMOVALS, runs=4)
    means = (truth.values[:, 1:] - truth.values[:, :1]).mean(2)
    errors = dict(zip(GROUPS.ids, (means.std(0) / 2).tolist(), strict=True))
    assert {each.source: each.error for each in list_effects(truth)} == pytest.approx(errors)


def test_an_interval_over_few_runs_is_wide() -> None:
    """Two runs with effects 1 and 1.2: the standard error is 0.1, Student's interval 12.7 of them."""
    values = torch.zeros(2, len(REMOVALS), 3, dtype=torch.float64)
    values[:, 1] = torch.tensor([1.0, 1.2])[:, None]
    values[:, 2] = torch.tensor([9.0, 9.2])[:, None]
    first, second, *others = list_effects(Truth(REMOVALS, values, "loss"))
    assert first.effect == pytest.approx(9.1) and second.effect == pytest.approx(1.1)
    assert first.error == pytest.approx(0.1) == second.error
    assert first.distinguishable and second.distinguishable is False
    assert str(second) == "+1.1~ ± 0.1" and not any(each.distinguishable for each in others)


def test_a_single_run_has_no_error() -> None:
    truth = random_truth(REMOVALS, runs=1)
    for given in (truth, replace(truth, question="this_run")):
        assert all(each.error is None and each.distinguishable is None for each in list_effects(given))


def test_only_sources_that_were_removed_by_themselves_have_an_effect() -> None:
    assert list_effects(random_truth(HALVES)) == list_effects(random_truth(UNIONS)) == []
    (alone,) = list_effects(Truth(PAIRS, draw(1, 3, 2), "loss"))
    assert alone.source == GROUPS.ids[4]
