"""Unions of sources: sums of scores, what they leave out, and how sure they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from imprint import Attribution, Plan, Sources, SourcesError, Task, attribute, simulate
from imprint.errors import ReliabilityWarning
from tests.attribution.results import NOISE, SCORES, make_replayed, make_result
from tests.evaluation.planted import GROUPS, LOO, REMOVALS, attribution, planted, scores_for

EITHER: list[Any] = [
    {"x": ["ann", "cid"], "y": ["bob"]},
    {"x": ("ann", "cid"), "y": "bob"},
    {"x": {"ann", "cid"}, "y": 1},
    {"x": [0, 2], "y": [1]},
    {"x": torch.tensor([0, 2]), "y": np.array(["bob"])},
    {"x": np.array([True, False, True]), "y": torch.tensor([False, True, False])},
    ["x", "y", "x"],
    np.array(["x", "y", "x"]),
    pd.Series(["x", "y", "x"]),
]


@pytest.mark.parametrize("groups", EITHER)
def test_a_group_has_the_sum_of_its_sources(groups: Any) -> None:
    result = make_result().group(groups)
    torch.testing.assert_close(result.scores, torch.stack([SCORES[:, 0] + SCORES[:, 2], SCORES[:, 1]], 1))
    labels = result.labels
    assert (labels.source_ids, labels.source_names, labels.source_sizes) == (("x", "y"), ("x", "y"), (5, 5))
    assert labels.summed == (2, 1) and labels.fingerprints == {"store": "s", "queries": "q"}
    assert result.queries == (0, 1)


@pytest.mark.parametrize("groups", EITHER)
def test_sources_unite_by_the_same_groups(groups: Any) -> None:
    sources = Sources.groups({"ann": [0, 1], "bob": [1, 2], "cid": [1, 4]}).group(groups)
    assert sources.ids == ("x", "y")
    assert [members.tolist() for members in sources.members] == [[0, 1, 4], [1, 2]]


def test_united_sources_know_the_length_of_the_data() -> None:
    with pytest.raises(SourcesError, match="made for 3 training examples"):
        Sources.by_label("aab").group({"x": ["a"]}).check(4)


WRONG: list[tuple[Any, str]] = [
    ({"x": ["ann", "dan"]}, "group 'x' has sources that do not exist: 'dan'.*ids; did you mean ann"),
    ({"x": ["Ann"]}, "'Ann'"),
    ({"x": []}, "group 'x' has no sources: leave it out"),
    ({"x": np.array([False] * 3)}, "has no sources"),
    ({}, "there are no groups"),
    ({"x": [3]}, "group 'x' has source number 3, there are 0 to 2"),
    ({"x": [-1]}, "source number -1"),
    ({"x": [0, 0]}, "lists a source more than once"),
    ({"x": ["ann", "ann"]}, "lists a source more than once"),
    ({"x": [0.5]}, "members of group 'x' must be indices, got values of float64"),
    ({"x": None}, "group 'x'"),
    ({"x": np.array([True])}, "mask of group 'x' has 1 entries, there are 3 sources"),
    ({"x": [True]}, "mask of group 'x' has 1 entries"),
    ({"1": [0], 1: [1]}, "'1' appears more than once"),
    (["x", "y"], "one label for each of the 3 sources, got 2 labels"),
    ("x y x", "or as one label per source; got a str"),
    (3, "got a int"),
]


@pytest.mark.parametrize(("groups", "words"), WRONG)
def test_groups_that_cannot_be_are_refused(groups: Any, words: str) -> None:
    sources = Sources.groups({"ann": [0, 1], "bob": [2], "cid": [3]})
    for group in (make_result().group, sources.group):
        with pytest.raises(SourcesError, match=words):
            group(groups)


def test_sources_that_are_left_out_or_shared_are_counted() -> None:
    part = make_result().group({"x": ["ann"]})
    assert part.details["sources_in_no_group"] == 2
    shared = make_result().group({"x": ["ann", "bob"], "y": ["bob", "cid"]})
    assert shared.details["sources_in_several_groups"] == 1
    for result, words in (
        (part, "2 sources in no group, left out"),
        (shared, "1 source in several groups, which therefore do not add up"),
    ):
        assert words in repr(result) and words in result._repr_html_() and words in repr(result.top(1))
        assert words.split(",")[0] in result.plot().get_xlabel()
    assert make_result().group(["x", "y", "x"]).details == {}


def test_groups_can_be_grouped_again_unless_they_share_sources() -> None:
    twice = make_replayed().group(["x", "y", "x"]).group({"all": ["x", "y"]})
    torch.testing.assert_close(twice.scores[:, 0], SCORES.sum(1))
    assert twice.labels.summed == (3,)
    shared = make_result().group({"x": ["ann", "bob"], "y": ["bob", "cid"]})
    with pytest.raises(SourcesError, match="counted twice"):
        shared.group({"all": ["x", "y"]})


def test_sources_that_must_share_examples_are_not_summed() -> None:
    with pytest.raises(SourcesError, match="'x' share examples: they have 12 in all, the training data has 10"):
        make_result(source_sizes=(6, 6, 1)).group({"x": ["ann", "bob"]})


def test_groups_warn_where_some_sources_share_examples() -> None:
    overlapping = make_result(source_sizes=(4, 5, 4))
    with pytest.warns(ReliabilityWarning, match="share examples: they have 13 in all, the training data has 10"):
        found = overlapping.group({"x": ["ann", "bob"]})
    assert "count the shared examples twice" in found.warnings[0]
    assert overlapping.group({"x": ["ann"]}).warnings == ()


def test_a_sum_of_removals_is_called_an_estimate_everywhere() -> None:
    result = make_replayed().group({"x": ["ann", "cid"], "y": ["bob"]})
    labels = result.labels
    assert [labels.is_estimate(place) for place in (0, 1)] == [True, False]  # a single removal stays exact
    words = "≈ estimate: a sum of single removals, in measurements half to twice the effect of removing all of them"
    assert words in repr(result) and words in result._repr_html_() and words in repr(result.top(2))
    assert "query 0: y +0.6, x ≈-0.35" in repr(result) and "sources.group({...})" in repr(result)
    assert "≈ estimate" in result.plot().get_xlabel()
    assert result.top(2).to_pandas()["estimate"].tolist() == [False, True, True, False]
    assert [credit["estimate"] for credit in result.top(2).to_json()["queries"][0]] == [False, True]


def test_a_sum_of_derivatives_is_no_estimate() -> None:
    result = make_result().group(["x", "y", "x"])
    assert "≈" not in repr(result) and not result.labels.is_estimate(0)


def test_the_noise_of_a_group_grows_with_its_removals() -> None:
    """Effects of x are −0.35 and −0.7; twice the noise of two removals is 2·√3·0.1 = 0.346 and 0.69."""
    result = make_replayed().group({"x": ["ann", "cid"], "y": ["bob"]})
    assert result.noise is not None and result.noise.tolist() == pytest.approx([0.1, 0.2])
    assert result.distinguishable is not None
    assert result.distinguishable.tolist() == [[True, True], [True, False]]
    louder = make_replayed(noise=1.03 * NOISE).group({"x": ["ann", "cid"]}).distinguishable
    assert louder is not None and not bool(louder.any())
    top = result.top(2).distinguishable
    assert top is not None and top.tolist() == [[True, True], [True, False]]


def test_groups_are_saved(tmp_path: Path) -> None:
    result = make_replayed().group({"x": ["ann", "cid"]})
    result.save(tmp_path / "result.safetensors")
    loaded = Attribution.load(tmp_path / "result.safetensors")
    assert loaded.labels == result.labels and repr(loaded) == repr(result)


def test_per_example_scores_divide_by_any_sources_of_the_data() -> None:
    """Scores of a simulation of the groups themselves are the sums: responses are linear in the weights."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2
    task, plan = Task.classifier(nn.Linear(3, 2).double()), Plan(steps=5, lr=0.1)
    sources = Sources.by_label(["a", "b", "c", "a", "b", "c", "a", "c"], names={"a": "Ann"})

    def scores(of: Sources) -> Attribution:
        return attribute(task, simulate(task, (x, y), of, plan, progress=False), (x[:3], y[:3]), progress=False)

    whole, each = scores(sources), scores(Sources.per_example(8))
    united = each.group(sources)
    torch.testing.assert_close(united.scores, whole.scores)
    assert united.labels.source_names == ("Ann", "b", "c") and united.labels.source_sizes == whole.labels.source_sizes
    with pytest.raises(SourcesError, match="these scores are not of single examples"):
        whole.group(sources)
    with pytest.raises(SourcesError, match="made for 7 training examples"):
        each.group(Sources.by_label("aaabbbb"))


def test_grouped_scores_are_compared_with_ground_truth_of_the_groups() -> None:
    scores = scores_for(LOO)
    united = attribution(scores, LOO).group(GROUPS)
    truth = planted(united.scores, REMOVALS)
    assert truth.slope(united) == pytest.approx(1.0)
