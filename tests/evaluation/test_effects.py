"""The effects of removals are listed one by one, the largest first."""

import pytest

from imprint.evaluation.effects import list_effects
from tests.evaluation.planted import GROUPS, HALVES, PAIRS, REMOVALS, planted, random_truth, scores_for


def test_each_removal_has_its_mean_effect_and_the_interval_of_it_over_runs() -> None:
    truth = random_truth(REMOVALS, runs=3)
    effects = truth.effects.mean(1)
    for each in list_effects(truth):
        place = GROUPS.ids.index(each.sources[0])
        assert each.names == (GROUPS.names[place],)
        assert each.effect == pytest.approx(float(effects[:, place].mean()))
        assert each.error == pytest.approx(4.302653 * float(effects[:, place].std()) / 3**0.5)


def test_the_largest_effect_comes_first() -> None:
    sizes = [abs(each.effect) for each in list_effects(random_truth(REMOVALS))]
    assert sizes == sorted(sizes, reverse=True)


def test_sets_are_named_by_their_sources() -> None:
    found = {each.sources: each for each in list_effects(random_truth(PAIRS))}
    assert set(found) == {(GROUPS.ids[0], GROUPS.ids[1]), (GROUPS.ids[4],)}


def test_one_run_has_no_interval_and_halves_have_no_removals() -> None:
    assert all(each.error is None for each in list_effects(planted(scores_for(REMOVALS), REMOVALS)))
    assert list_effects(random_truth(HALVES)) == []
