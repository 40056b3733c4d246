"""One result minus another: what a source does to one model more than to the other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Attribution, DataError, ReadoutError, SourcesError
from imprint.attribution.labels import LAST_STEPS
from tests.attribution.results import NOISE, SCORES, make_replayed, make_result
from tests.evaluation.planted import REMOVALS, attribution, planted, scores_for


def test_removal_effects_are_subtracted_whatever_n_is() -> None:
    first, second = make_result(), make_result(2 * SCORES, n=40, source_sizes=(9, 9, 9))
    found = first - second
    torch.testing.assert_close(found.removal_effect, first.removal_effect - second.removal_effect)
    assert found.labels.n == 10 and found.labels.source_sizes == first.labels.source_sizes


def test_sources_are_paired_by_their_ids() -> None:
    turned = make_result(SCORES.flip(1), source_ids=("cid", "bob", "ann"))
    assert not bool((make_result() - turned).scores.any())


def test_a_difference_says_that_it_is_one(tmp_path: Path) -> None:
    found = make_result(warnings=("take care",)) - make_result(fingerprints={"store": "other", "queries": "q"})
    assert repr(found).startswith("Attribution: difference of two results, 2 queries × 3 sources, ")
    unit = "change of loss if the source were removed, first result minus second: + means the source helps the first"
    assert unit in repr(found) and unit in found._repr_html_() and unit in found.top(1).to_json()["unit"]
    assert found.details["first"]["store"] == "s" and found.details["second"]["store"] == "other"
    assert found.labels.fingerprints == {"queries": "q"}
    assert found.warnings == ("first: take care",)
    found.save(tmp_path / "found.safetensors")
    assert Attribution.load(tmp_path / "found.safetensors").labels == found.labels


def test_the_squares_of_both_noises_add_up() -> None:
    found = make_replayed(noise=3 * NOISE) - make_replayed(noise=4 * NOISE[:1])
    assert found.noise is not None and found.noise.tolist() == pytest.approx([0.5, 1.0])
    mean = found.mean().noise  # of each mean: 3 · 0.05 and 4 · 0.05
    assert mean is not None and mean.tolist() == pytest.approx([0.25])
    assert (make_replayed() - make_replayed(noise=None)).noise is None  # unknown, not 0


def test_differences_of_estimates_are_estimates() -> None:
    groups = {"x": ["ann", "cid"], "y": ["bob"]}
    found = make_replayed().group(groups) - make_replayed(2 * SCORES).group({"x": ["ann"], "y": ["bob"]})
    assert found.labels.summed == (2, 1) and "≈ estimate" in repr(found)


def test_a_difference_says_which_sources_its_groups_leave_out_or_share(tmp_path: Path) -> None:
    uneven = make_result().group({"x": ["ann", "bob"], "y": ["bob"]})
    found = uneven - make_result(2 * SCORES).group({"x": ["ann"], "y": ["bob"]})
    notes = ("1 source in no group, left out", "1 source in several groups, which therefore do not add up")
    assert all(note in repr(uneven) and note in repr(found) for note in notes)
    with pytest.raises(SourcesError, match="these groups share sources"):
        found.group({"all": ["x", "y"]})
    found.save(tmp_path / "found.safetensors")
    assert Attribution.load(tmp_path / "found.safetensors").labels == found.labels


def test_a_difference_of_the_last_steps_of_runs_says_so() -> None:
    late = make_replayed(details={LAST_STEPS: 10})
    assert (late - late).labels.meaning == late.labels.meaning
    assert late.labels.meaning.endswith("in its last 10 steps only")


OTHER: list[tuple[Attribution, str]] = [
    (make_result(question="this_run"), r"different questions, 'expected' \(expected: .*\) and 'this_run'"),
    (make_result(measure="margin"), r"measurements, 'loss' \(lower is better\) and 'margin'"),
    (make_result(better="higher"), "higher is better"),
    (
        make_result(source_ids=("ann", "bob", "dan")),
        "different sources: only the first one has 'cid'. Use",
    ),
    (make_result(SCORES[:, :2], source_ids=("ann", "bob")), "only the first one has 'cid'"),
    (
        make_result(torch.cat([SCORES, SCORES[:, :1]], 1), source_ids=("ann", "bob", "cid", "dan")),
        "only the second one has 'dan'",
    ),
    (make_result()[:1], "different queries: 2 in the first, 1"),
    (make_result()[[1, 0]], "row 0 is query 0 in the first and query 1 in the second"),
    (make_result(fingerprints={"queries": "p"}), "different queries, or of the same in another order"),
    (make_result() - make_result(), "a difference already"),
]


@pytest.mark.parametrize(("other", "words"), OTHER)
def test_results_that_cannot_be_compared_are_refused_with_the_difference(other: Attribution, words: str) -> None:
    with pytest.raises(ReadoutError, match=words):
        make_result() - other


@pytest.mark.parametrize("other", [1.0, SCORES, None])
def test_only_results_are_subtracted(other: Any) -> None:
    with pytest.raises(TypeError):
        make_result() - other


def test_a_difference_is_not_compared_with_ground_truth() -> None:
    scores = scores_for(REMOVALS)
    result = attribution(scores, REMOVALS)
    with pytest.raises(DataError, match="a difference of two results, which no model has"):
        planted(scores, REMOVALS).match(result - result)
