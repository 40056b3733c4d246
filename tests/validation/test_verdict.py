"""The statistic behind a validation: what it passes, what it does not, and how often it errs."""

import itertools
from typing import Any

import numpy as np
import pytest

from imprint.evaluation.witnessing import draw_sets
from imprint.statistics import Array
from imprint.validation.verdict import Figures, Verdict, compare, decide, judge

QUERIES, REMOVALS = 100, 8
SIZES = np.array([20.0, 35, 50, 60, 80, 110, 150, 200])
SINGLES = [(source,) for source in range(REMOVALS)]


def draw_effects(seed: int, queries: int = QUERIES, removals: int = REMOVALS) -> Array:
    """Actual effects that differ by source, by size and by query."""
    draw = np.random.default_rng(seed)
    common = draw.normal(size=removals) + (SIZES[:removals] - 90) / 100
    return np.asarray(common + draw.normal(size=(queries, removals)))


def draw_predictions(kind: str, actual: Array, seed: int) -> Array:
    """Predictions of a kind, for these effects."""
    draw = np.random.default_rng((seed, 1))
    good = actual + 0.5 * draw.normal(size=actual.shape)
    kinds: dict[str, Any] = {
        "exact": lambda: actual,
        "good": lambda: good,
        "random": lambda: draw.normal(size=actual.shape[1]) + draw.normal(size=actual.shape),
        "sign-flipped": lambda: -good,
        "permuted by source": lambda: good[:, draw.permutation(actual.shape[1])],
        "ten times too large": lambda: 10 * good,
        "size only": lambda: np.broadcast_to(SIZES / SIZES.std(), actual.shape),
    }
    return np.asarray(kinds[kind]())


def outcomes(kind: str, repetitions: int = 100) -> list[str]:
    found: list[str] = []
    for seed in range(repetitions):
        actual = draw_effects(seed)
        found.append(judge(draw_predictions(kind, actual, seed), SINGLES, actual[None], SIZES, "this_run").outcome)
    return found


@pytest.mark.parametrize("kind", ["exact", "good"])
def test_good_predictions_have_their_sizes_validated(kind: str) -> None:
    assert outcomes(kind, 40) == ["sizes validated"] * 40


@pytest.mark.parametrize("kind", ["random", "permuted by source"])
def test_one_in_forty_of_meaningless_predictions_passes(kind: str) -> None:
    """The test is exact: its level is the share that passes. More than 8 of 100 would be a broken test."""
    assert 100 - outcomes(kind).count("failed") <= 8


def test_predictions_of_the_wrong_sign_never_pass() -> None:
    assert set(outcomes("sign-flipped")) == {"failed"}


@pytest.mark.parametrize("kind", ["ten times too large", "size only"])
def test_sizes_that_are_wrong_or_no_better_than_a_guess_are_never_validated(kind: str) -> None:
    assert "sizes validated" not in outcomes(kind)


def test_the_p_value_counts_all_assignments_of_predictions_to_removals() -> None:
    actual = np.tile(np.arange(4.0), (20, 1))
    for order, better in (([0, 1, 2, 3], 1), ([1, 0, 2, 3], 4), ([3, 2, 1, 0], 24)):
        figures = compare(actual[:, order], SINGLES[:4], actual[None], np.ones(4))
        assert figures.p == pytest.approx(better / 24)


def test_more_removals_are_permuted_at_random() -> None:
    actual = np.random.default_rng(0).normal(size=(30, 12))
    figures = compare(actual, [(source,) for source in range(12)], actual[None], np.arange(12.0))
    assert figures.p == pytest.approx(1 / 20_001)


def test_sources_are_permuted_and_not_the_sets_that_they_are_removed_in() -> None:
    """A larger set has a larger effect, whichever sources it holds: scores that know nothing else must not pass."""
    passed, draw = 0, np.random.default_rng(0)
    for _ in range(100):
        common = 1 + draw.normal(size=12)
        effects = common + 0.3 * draw.normal(size=(50, 12))
        sets = [tuple(draw.choice(12, size, replace=False).tolist()) for size in (2, 3, 4, 2, 3, 4, 2, 3)]
        actual = np.stack([effects[:, list(each)].sum(1) for each in sets], axis=1)
        assert judge(effects, sets, actual[None], np.ones(12), "this_run").outcome == "sizes validated"
        permuted = effects[:, draw.permutation(12)]
        passed += judge(permuted, sets, actual[None], np.ones(12), "this_run").outcome != "failed"
    assert passed <= 8


def test_the_permuted_correlations_are_those_of_permuted_predictions() -> None:
    draw = np.random.default_rng(1)
    effects, sets = draw.normal(size=(20, 5)), [(0, 1), (1, 2, 3), (0, 4), (2, 4), (3, 4)]
    actual = draw.normal(size=(20, 5))

    def correlate(given: Array) -> float:
        return compare(given, sets, actual[None], np.ones(5)).correlation or 0.0

    found = [correlate(effects[:, order]) for order in itertools.permutations(range(5))]
    expected = np.mean([value >= found[0] - 1e-12 for value in found])
    assert compare(effects, sets, actual[None], np.ones(5)).p == pytest.approx(expected)


def test_queries_that_share_their_imprints_are_no_independent_evidence() -> None:
    """Predictions that are random per source, and equal for a thousand queries, pass no more often."""
    passed = 0
    for seed in range(100):
        draw = np.random.default_rng(seed)
        actual = np.tile(draw.normal(size=REMOVALS), (1000, 1)) + 0.01 * draw.normal(size=(1000, REMOVALS))
        predicted = np.tile(draw.normal(size=REMOVALS), (1000, 1))
        passed += judge(predicted, SINGLES, actual[None], SIZES, "this_run").outcome != "failed"
    assert passed <= 8


def test_the_slope_and_its_interval_scale_with_the_predictions() -> None:
    actual = draw_effects(0)
    verdict = judge(draw_predictions("good", actual, 0), SINGLES, actual[None], SIZES, "this_run")
    tenth = judge(draw_predictions("ten times too large", actual, 0), SINGLES, actual[None], SIZES, "this_run")
    assert tenth.figures.slope == pytest.approx((verdict.figures.slope or 0) / 10)
    assert verdict.rescaled(10).figures.slope_low == pytest.approx(tenth.figures.slope_low)
    assert tenth.outcome == "ranks validated" and f"{tenth.figures.slope:.2g} times" in tenth.reason
    scaled = tenth.rescaled(tenth.figures.slope or 0)
    assert scaled.outcome == "ranks validated" and "set by these very removals" in scaled.reason


@pytest.mark.parametrize("scale", [0.4, 1.0, 1.8])
def test_the_interval_of_the_slope_contains_the_true_one(scale: float) -> None:
    """Predictions that are the truth, scaled, with errors shared by all queries of a source."""
    within = 0
    for seed in range(200):
        draw = np.random.default_rng((seed, 2))
        predicted = draw_effects(seed)
        actual = scale * predicted + 0.4 * draw.normal(size=REMOVALS) + 0.4 * draw.normal(size=predicted.shape)
        found = compare(predicted, SINGLES, actual[None], SIZES)
        assert found.slope_low is not None and found.slope_high is not None
        within += found.slope_low <= scale <= found.slope_high
    assert 180 <= within <= 198


@pytest.mark.parametrize("sources", [8, 12, 30])
def test_the_interval_of_the_slope_allows_for_sources_that_sets_share(sources: int) -> None:
    """Each source errs in a way of its own, and so do all sets that it is part of."""
    within, found_ones = 0, 0
    for seed in range(200):
        draw = np.random.default_rng((seed, sources))
        effects = draw.normal(size=sources) + draw.normal(size=(40, sources))
        sets = draw_sets(sources, 8, draw)
        true = 0.9 * effects + 0.4 * draw.normal(size=sources)
        actual = np.stack([true[:, list(each)].sum(1) for each in sets], axis=1)
        found = compare(effects, sets, actual[None], np.ones(sources))
        if found.slope_low is not None and found.slope_high is not None:  # a source may be part of nearly all sets
            found_ones += 1
            within += found.slope_low <= 0.9 <= found.slope_high
    assert found_ones > 100 and within >= 0.9 * found_ones, (within, found_ones)


def test_several_runs_bring_a_ceiling_and_their_agreement() -> None:
    truth, draw = draw_effects(3), np.random.default_rng(0)
    runs = truth + 0.5 * draw.normal(size=(3, *truth.shape))
    figures = compare(truth, SINGLES, runs, SIZES)
    assert figures.ceiling is not None and 0.9 < figures.ceiling < 1
    assert figures.agreement is not None and figures.agreement < 0.01
    assert compare(truth, SINGLES, runs[:1], SIZES).ceiling is None


def test_runs_that_contradict_each_other_decide_nothing() -> None:
    draw = np.random.default_rng(2)
    runs = draw.normal(size=(3, 1, REMOVALS)) + 0.1 * draw.normal(size=(3, QUERIES, REMOVALS))
    predicted = draw.normal(size=(QUERIES, REMOVALS))
    verdict = judge(predicted, SINGLES, runs, SIZES, "expected")
    assert verdict.outcome == "undecided" and "do not agree" in verdict.reason


GOOD = Figures(100, 8, 8, 3, correlation=0.9, p=0.001, slope=1.0, slope_low=0.8, slope_high=1.2, by_size=0.3)


@pytest.mark.parametrize(
    ("change", "outcome", "words"),
    [
        ({}, "sizes validated", "order and the size"),
        ({"queries": 19}, "undecided", "at least 20 queries, and had 19"),
        (
            {"sources": 4},
            "undecided",
            "at least 5 removals of as many sources, and had 8 removals of 4 sources",
        ),
        ({"runs": 2}, "undecided", "at least 3 runs, and there are 2"),
        ({"by_size": None}, "undecided", "changes nothing"),
        ({"p": None}, "failed", "do not differ between sources"),
        ({"p": 0.026}, "failed", "no better than chance"),
        ({"slope": 0.49}, "ranks validated", "0.49 times the predicted"),
        ({"slope": 2.1}, "ranks validated", "2.1 times the predicted"),
        ({"slope_low": 0.2}, "ranks validated", "too uncertain, [0.20, 1.20]"),
        ({"slope_high": None}, "ranks validated", "too uncertain"),
        ({"by_size": 0.9}, "ranks validated", "a guess by the size of a source does as well"),
    ],
)
def test_each_outcome_gives_its_reason(change: dict[str, Any], outcome: str, words: str) -> None:
    found, reason = decide("expected", Figures(**{**vars(GOOD), **change}))
    assert found == outcome and words in reason


@pytest.mark.parametrize(("chaos", "deviation", "words"), [(0.31, 0.0, "chaotic"), (0.1, 0.2, "misses the recorded")])
def test_a_chaotic_or_deviating_replay_has_no_validated_sizes(chaos: float, deviation: float, words: str) -> None:
    assert decide("this_run", GOOD, 0.1, 0.01)[0] == "sizes validated"
    outcome, reason = decide("this_run", GOOD, chaos, deviation)
    assert outcome == "ranks validated" and words in reason


def test_a_verdict_says_what_was_compared() -> None:
    text = str(Verdict("expected", GOOD, own=True))
    assert text == (
        "ranks and sizes validated (expected): predicted effects have the order and the size of actual ones; compared "
        "with 8 real removals in 3 runs on these 100 queries: correlation 0.90 (p = 0.001), actual / predicted 1.00 "
        "[0.80, 1.20]"
    )


@pytest.mark.parametrize(
    ("low", "high", "calibrates"), [(0.5, 1.5, True), (0.2, 1.5, False), (-0.1, 1.5, False), (None, None, False)]
)
def test_only_a_narrow_interval_sets_a_scale(low: float | None, high: float | None, calibrates: bool) -> None:
    figures = Figures(**{**vars(GOOD), "slope_low": low, "slope_high": high})
    assert Verdict("expected", figures).calibrates is calibrates
