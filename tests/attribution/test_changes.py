"""Two versions of a model: ranks that stay, and sources that gained or lost beyond noise."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from imprint import About, Attribution, Changes, ReadoutError, compare
from imprint.attribution.labels import LAST_STEPS
from imprint.statistics import adjust_by_holm, find_p_values, student_quantile
from tests.attribution.results import NOISE, SCORES, make_labels, make_repeated, make_replayed, make_result

N, QUERIES, SOURCES = 10, 24, 6
LATER: dict[str, Any] = {"fingerprints": {"store": "t", "queries": "q"}}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TRUTH = draw(7, QUERIES, SOURCES)


def version(seed: int, names: str = "abcd", moved: float = 0.0, wander: float = 0.0) -> Attribution:
    """Effects of some runs: the truth, what queries happen to do in this version, and an error that queries share.

    moved: how much more the first source helps. wander: how far effects of single queries differ between versions.
    """
    effects = TRUTH + wander * draw(1000 + seed, QUERIES, SOURCES)
    effects[:, 0] += moved
    runs = (
        -N * effects + 3 * draw(2000 + seed, len(names), 1, SOURCES) + draw(3000 + seed, len(names), QUERIES, SOURCES)
    )
    return make_repeated(runs, names=names, fingerprints={"store": names, "queries": "q"})


def later(seed: int, **changes: Any) -> Attribution:
    return version(5000 + seed, "vwxyz", **changes)


def by_hand(one: Attribution, other: Attribution) -> tuple[float, float, float]:
    """The mean rank correlation, that of means, and the overlap of the first two sources."""
    effects = [-each.scores.numpy() / each.labels.n for each in (one, other)]
    rho = np.mean([stats.spearmanr(*pair).statistic for pair in zip(*effects, strict=True)])
    tops = [[set(np.abs(row).argsort()[-2:].tolist()) for row in each] for each in effects]
    return (
        float(rho),
        float(stats.spearmanr(effects[0].mean(0), effects[1].mean(0)).statistic),
        float(np.mean([len(a & b) / 2 for a, b in zip(*tops, strict=True)])),
    )


def test_correlations_and_overlap_are_those_that_are_counted_by_hand() -> None:
    one, other = version(0), later(0, wander=1.0)
    found, (rho, means, overlap) = compare(one, other, k=2), by_hand(one, other)
    assert found.spearman.value == pytest.approx(rho) and found.spearman.low < rho < found.spearman.high
    assert found.spearman_of_means.value == pytest.approx(means)
    assert found.overlap.value == pytest.approx(overlap) and found.chance == pytest.approx(2 / SOURCES)
    assert [each.query for each in found.queries] == list(range(QUERIES))
    assert np.mean([each.spearman for each in found.queries if each.spearman is not None]) == pytest.approx(rho)


def test_an_error_has_the_variances_of_queries_and_of_the_runs_of_both_versions() -> None:
    one, other = version(0), later(0, wander=1.0)
    found = {each.source: each for each in compare(one, other).sources}
    each_query = other.removal_effect - one.removal_effect
    for place, identity in enumerate(one.labels.source_ids):
        variance = float(each_query[:, place].var()) / QUERIES
        for result in (one, other):
            runs = -(result.scores.mean(0) + result.replicates[0].deviations.mean(1))[:, place] / N
            variance += float(runs.var()) / len(runs)
        row = found[identity]
        assert row.standard_error == pytest.approx(variance**0.5)
        assert row.difference == pytest.approx(float(each_query[:, place].mean()))
        assert row.difference == pytest.approx(row.second - row.first)
    for share in ("first_share", "second_share"):
        assert sum(getattr(row, share) for row in found.values()) == pytest.approx(1)


@pytest.mark.parametrize("wander", [0.0, 1.0])
def test_of_versions_that_differ_by_noise_alone_few_are_said_to_differ(wander: float) -> None:
    """Any false claim among all sources, in at most 5% of 120 repetitions."""
    claims = [bool(_claims(compare(version(seed, wander=wander), later(seed, wander=wander)))) for seed in range(120)]
    assert np.mean(claims) <= 0.05  # 0.2 to 2.5% of 600 repetitions: Cochran's quantile is cautious


def test_without_the_noise_of_runs_nearly_all_would_be_called_changed() -> None:
    """This is why nothing is claimed where it is not known: the spread over queries does not contain it."""
    wrong = 0
    for seed in range(50):
        one, other = (replace(each, replicates=()) for each in (version(seed), later(seed)))
        found = compare(one, other)
        assert not _claims(found) and all(row.p_value is None for row in found.sources)
        each_query = other.removal_effect - one.removal_effect
        p = stats.ttest_1samp(each_query.numpy(), 0.0).pvalue
        wrong += bool((adjust_by_holm(np.asarray(p)) <= 0.05).any())
    assert wrong > 40


def test_a_source_that_really_gained_is_found_and_is_the_only_one() -> None:
    found = [compare(version(seed), later(seed, moved=3.0)) for seed in range(30)]
    assert sum([row.source for row in each.gained] == ["s0"] and not each.lost for each in found) >= 27
    assert all(each.sources[0].source == "s0" for each in found)
    back = compare(later(0, moved=3.0), version(0))
    assert [row.source for row in back.lost] == ["s0"] and back.sources[0].verdict == "lost"


def test_the_clearest_difference_is_called_where_it_exceeds_the_threshold() -> None:
    called = []
    for seed in range(40):
        found = compare(version(seed, "abc"), later(seed, moved=0.5 * (seed % 8), wander=1.0))
        clearest = min(found.sources, key=lambda row: row.p_value or 0.0)
        assert clearest.standard_error is not None and found.threshold is not None
        assert clearest.beyond_noise == (abs(clearest.difference) > found.threshold * clearest.standard_error)
        called.append(clearest.beyond_noise)
    assert 5 < sum(called) < 35


def test_the_interval_of_the_overlap_has_the_variance_of_runs() -> None:
    one, other = version(0), later(0, wander=1.0)
    over_queries = compare(*(replace(each, replicates=()) for each in (one, other)), k=2).overlap
    found = compare(one, other, k=2).overlap
    assert found.value == over_queries.value
    assert found.low < over_queries.low and found.high > over_queries.high


def test_fewer_runs_and_more_sources_need_clearer_differences() -> None:
    few, many = compare(version(0, "ab"), later(0)), compare(version(0, "abcdef"), later(0))
    assert few.threshold is not None and many.threshold is not None and few.threshold > 2 * many.threshold
    assert f"must exceed {many.threshold:.1f} of its standard errors" in repr(many)
    clear = [row for row in many.sources if row.beyond_noise]
    assert all(abs(row.difference) > 2 * (row.standard_error or 0.0) for row in clear)
    assert compare(make_result(), make_result(**LATER)).threshold is None


def _claims(found: Changes) -> list[str]:
    return [each.source for each in found.sources if each.beyond_noise]


def test_the_ceiling_is_what_noise_alone_leaves() -> None:
    pairs = [compare(version(seed), later(seed)) for seed in range(20)]
    reached = np.mean([each.spearman.value for each in pairs])
    ceilings = [each.ceiling for each in pairs if each.ceiling is not None]
    assert len(ceilings) == 20 and reached == pytest.approx(float(np.mean(ceilings)), abs=0.05)
    assert compare(make_result(), make_result(**LATER)).ceiling is None


@pytest.mark.parametrize(("better", "words"), [("lower", "gained"), ("higher", "lost"), (None, "rose")])
def test_the_sign_says_who_gained(better: Any, words: str) -> None:
    one, other = (
        replace(each, labels=replace(each.labels, better=better)) for each in (version(1), later(1, moved=5.0))
    )
    found = compare(one, other)
    assert found.sources[0].verdict == words
    assert ("rose, " if better is None else "gained, ") in repr(found)


def test_effects_of_this_run_are_compared_with_the_noise_of_both_runs() -> None:
    many = SCORES.repeat(12, 1)
    one = make_replayed(many, NOISE.repeat(1, 12) / 100)
    other = make_replayed(many + torch.tensor([5.0, 0.0, 0.0]), NOISE.repeat(1, 12) / 100, **LATER)
    found = compare(one, other)
    assert _claims(found) == ["ann"] and found.sources[0].verdict == "lost"  # a larger score lowers the effect
    assert "what another seed would change is not in them" in found.noise
    assert _claims(compare(one, make_replayed(many + torch.tensor([5.0, 0, 0]), None, **LATER))) == []


def replay(seed: int, names: str) -> Attribution:
    """Removals from one run, whose outputs chance moves for all queries and for each, and two runs beside it."""
    chance = draw(seed, 3 + SOURCES, 1) + draw(9000 + seed, 3 + SOURCES, QUERIES)  # the run, two beside it, removals
    changes, effects = chance[1:3] - chance[0], TRUTH + (chance[3:] - chance[0]).T
    ids = tuple(f"s{place}" for place in range(SOURCES))
    about = {"source_ids": ids, "source_names": ids, "source_sizes": (1,) * SOURCES}
    return make_replayed(-N * effects, changes, **about, fingerprints={"store": names, "queries": "q"})


def test_of_replays_that_differ_by_chance_alone_few_are_said_to_differ() -> None:
    claims = [bool(_claims(compare(replay(seed, "a"), replay(5000 + seed, "b")))) for seed in range(120)]
    assert np.mean(claims) <= 0.05


def test_the_spread_over_checkpoints_is_a_lower_bound_and_claims_nothing() -> None:
    one, other = version(0), later(0, moved=9.0)
    other = replace(other, replicates=tuple(replace(each, over="checkpoints") for each in other.replicates))
    found = compare(one, other)
    assert found.sources[0].beyond_noise is None and "beyond noise: unknown. Runs with other seeds" in repr(found)
    assert found.sources[0].standard_error is None


def test_sources_are_matched_by_id_and_those_of_one_version_are_named() -> None:
    one = make_result(torch.cat([SCORES, SCORES[:, :1]], 1), source_ids=("ann", "bob", "cid", "dan"),
                      source_names=("A", "B", "C", "D"), source_sizes=(1, 2, 3, 4))  # fmt: skip
    other = make_result(SCORES.flip(1), source_ids=("eve", "bob", "ann"), source_sizes=(9, 8, 7), **LATER)
    found = compare(one, other)
    assert (found.only_first, found.only_second) == (("cid", "dan"), ("eve",))
    rows = {each.source: each for each in found.sources}
    assert rows.keys() == {"ann", "bob"} and rows["ann"].difference == rows["bob"].difference == 0
    assert (rows["ann"].first_size, rows["ann"].second_size) == (1, 7)
    assert "only in the first: 2 sources, cid, dan" in repr(found) and "only in the second: 1 source, eve" in repr(
        found
    )


def test_a_single_query_is_about_itself() -> None:
    found = compare(version(0).mean(), later(0, moved=9.0).mean())
    assert "for this query alone; standard errors of" in found.noise and _claims(found) == ["s0"]
    assert str(found.spearman).endswith("[no interval]")


def test_n_may_differ_since_effects_do_not_depend_on_it() -> None:
    found = compare(make_result(), make_result(4 * SCORES, n=40, source_sizes=(9, 9, 9), **LATER))
    assert all(each.difference == 0 for each in found.sources)


OTHER: list[tuple[Attribution, str]] = [
    (make_result(question="this_run"), "different questions, 'expected' .* and 'this_run'"),
    (make_replayed(details={LAST_STEPS: 5}), "different questions"),
    (make_result(measure="margin"), "different measurements, 'loss'"),
    (make_result(better="higher"), "higher is better"),
    (make_result()[:1], "different queries: 2 in the first, 1"),
    (make_result(fingerprints={"queries": "p"}), "different queries, or of the same in another order"),
    (make_result() - make_result(), "a difference already"),
    (make_result(details={"calibration": 2.0}), "only the second result is calibrated, .* different scales"),
    (make_result(source_ids=("x", "y", "cid")), "have 1 source in common, .* the first has 'ann', .* the second 'x'"),
]


@pytest.mark.parametrize(("other", "words"), OTHER)
def test_versions_that_cannot_be_compared_are_refused_with_the_difference(other: Attribution, words: str) -> None:
    with pytest.raises(ReadoutError, match=words):
        compare(make_result(), other)


def test_anything_but_two_results_is_refused() -> None:
    with pytest.raises(ReadoutError, match="needs two Attributions, got a Tensor"):
        compare(make_result(), SCORES)  # type: ignore[arg-type]
    for k in (0, True, 1.5):
        with pytest.raises(ReadoutError, match="k is a whole number of at least 1"):
            compare(make_result(), make_result(**LATER), k=k)  # type: ignore[arg-type]
    with pytest.raises(ReadoutError, match="level"):
        compare(make_result(), make_result(**LATER), level=95)


def test_what_weakens_a_comparison_is_said() -> None:
    few = " ".join(compare(make_result(warnings=("care",)), make_result(**LATER)).warnings)
    assert "2 queries say little about others: compare on at least 20" in few and "ranks of 3 sources" in few
    assert "first: care" in few and "same" not in few
    assert "both results are of the same store" in " ".join(compare(make_result(), make_result()).warnings)
    prints = [{"queries": "q", "parameters": {name: {"shape": [2], "dtype": "x"}}} for name in ("w", "v")]
    other = compare(*(make_result(fingerprints=each) for each in prints))
    assert "imprints of different parameters, such as v, w" in " ".join(other.warnings)
    plans = [{"queries": "q", "plan": {"steps": steps, "seed": steps}} for steps in (50, 100)]
    other = compare(*(make_result(fingerprints=each) for each in plans))
    assert "other plans, which differ in steps: " in " ".join(other.warnings)
    moved = [{**prints[0], "measures": [value]} for value in (1.0, 2.0)]
    assert "either the functions differ" in " ".join(compare(*(make_result(fingerprints=m) for m in moved)).warnings)


def test_it_says_whether_effects_were_validated() -> None:
    assert repr(compare(make_result(), make_result(**LATER))).count("not validated: ") == 1


def test_equal_effects_have_no_ranks_and_say_so() -> None:
    flat = make_result(torch.ones(2, 3), **LATER)
    found = compare(make_result(), flat)
    assert all(each.spearman is None for each in found.queries)
    values = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert values["spearman"] == {"value": None, "low": None, "high": None}


def test_ranks_that_never_change_have_no_interval() -> None:
    same = compare(make_result(SCORES.repeat(12, 1)), make_result(SCORES.repeat(12, 1), **LATER))
    assert str(same.spearman_of_means) == "1.00 [no interval]"
    assert same.spearman.low < 0.8 and same.spearman.value == pytest.approx(1)


def test_a_comparison_can_be_read_by_people_and_programs() -> None:
    hostile = "<i>\x1b[2J"
    labels = make_labels(source_names=(hostile, "B", "C"), source_about=(About("Ann"), About(), About()))
    found = compare(Attribution(labels, SCORES), make_result(SCORES * 2, **LATER))
    named = replace(found, sources=tuple(each._replace(name=hostile) for each in found.sources))
    assert "\x1b" not in repr(named) + named._repr_html_() and "<i>" not in named._repr_html_()
    frame = found.to_pandas().set_index("source")
    assert frame.loc["ann", "owner"] == "Ann" and frame.loc["bob", "owner"] == ""
    assert found.to_json()["sources"] == frame.reset_index().to_dict("records")
    assert frame.attrs["unit"] == found.unit and "owner" not in compare(make_result(), make_result(**LATER)).to_pandas()


def test_p_values_of_one_variance_are_students() -> None:
    differences = np.array([0.0, 0.1, -1.0, 3.0, 30.0])
    for freedom in (1, 2, 7):
        expected = 2 * stats.t.sf(np.abs(differences), freedom)
        found = find_p_values(differences, [(np.ones(5), freedom)])
        assert found == pytest.approx(np.maximum(expected, 1e-10), rel=1e-3)


def test_p_values_of_several_variances_are_where_cochrans_interval_reaches_zero() -> None:
    levels = [(np.array([1.0]), 1), (np.array([2.0]), 3), (np.array([0.5]), 23)]
    for difference in (1.0, 5.0, 40.0):
        p = float(find_p_values(np.array([difference]), levels)[0])
        half = sum(v[0] * student_quantile(freedom, 1 - p) for v, freedom in levels) / 3.5**0.5
        assert half == pytest.approx(difference, rel=1e-3)


def test_no_variance_at_all_leaves_no_doubt_about_a_difference() -> None:
    assert find_p_values(np.array([0.0, 1.0]), [(np.zeros(2), 1)]) == pytest.approx([1.0, 1e-10])


def test_holm_rejects_what_the_steps_by_hand_reject() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        p = generator.random(6) ** 3
        left, rejected = sorted(range(6), key=lambda i: p[i]), set()
        for step, place in enumerate(left):
            if p[place] > 0.05 / (6 - step):
                break
            rejected.add(place)
        assert {i for i, value in enumerate(adjust_by_holm(p)) if value <= 0.05} == rejected
