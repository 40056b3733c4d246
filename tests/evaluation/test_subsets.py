"""Subsets hold what they say, the same every time, and bad ones are refused before anything is trained."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from imprint import Sources, SourcesError
from imprint.evaluation.subsets import Subsets

OVERLAPPING = Sources.groups({"a": [0, 1, 2], "b": [2, 3], "c": [5]})  # example 4 is in no source


@pytest.mark.parametrize(("sources", "half"), [(10, 5), (11, 5), (2, 1)])
def test_halves_are_halves(sources: int, half: int) -> None:
    subsets = Subsets.halves(sources, 20)
    assert len(subsets) == 20
    assert subsets.kept().sum(1).tolist() == [half] * 20
    assert [len(subsets.examples(i)) for i in range(20)] == [half] * 20


def test_halves_are_distinct_and_every_source_is_in_about_half_of_them() -> None:
    kept = Subsets.halves(40, 200).kept()
    assert len({tuple(row) for row in kept.tolist()}) == 200
    share = kept.double().mean(0)
    assert float((share - 0.5).abs().max()) < 4 * 0.5 / 200**0.5


def test_half_number_i_depends_on_seed_plus_i_only() -> None:
    many, few, later = Subsets.halves(20, 10), Subsets.halves(20, 3), Subsets.halves(20, 3, seed=4)
    assert few.removed == many.removed[:3]
    assert later.removed == many.removed[4:7]
    assert Subsets.halves(20, 10).removed == many.removed


def test_halves_of_single_examples_are_those_of_the_benchmarks() -> None:
    subsets = Subsets.halves(50, 4, seed=7)
    for index in range(4):
        chosen = np.random.default_rng(7 + index).choice(50, 25, replace=False)
        assert subsets.examples(index).tolist() == sorted(chosen.tolist())


def test_a_removal_takes_all_members_whatever_other_sources_have_them() -> None:
    subsets = Subsets.without_each(OVERLAPPING, n=6)
    assert [subsets.examples(i).tolist() for i in range(4)] == [
        [0, 1, 2, 3, 4, 5],
        [3, 4, 5],
        [0, 1, 4, 5],
        [0, 1, 2, 3, 4],
    ]
    assert subsets.kept().tolist() == [[True] * 3, [False, True, True], [True, False, True], [True, True, False]]


def test_removals_can_be_of_some_sources_after_several_baselines() -> None:
    assert Subsets.without_each(5, only=[3, 1], baselines=2).removed == ((), (), (3,), (1,))
    assert Subsets.without(5, [[], [0, 4], [2]]).removed == ((), (0, 4), (2,))
    assert Subsets.without_each(3, baselines=0).removed == ((0,), (1,), (2,))


@pytest.mark.parametrize("chosen", [np.array([3, 1]), torch.tensor([3, 1]), (i for i in (3, 1))])
def test_positions_may_come_as_any_whole_numbers(chosen: Any) -> None:
    subsets = Subsets.without_each(5, only=chosen)
    assert subsets.removed == ((), (3,), (1,))
    json.dumps(subsets.removed)


def test_a_share_of_the_sources_is_removed_at_random() -> None:
    subsets = Subsets.without_some(20, 30, share=0.25, baselines=2)
    assert subsets.removed[:2] == ((), ())
    assert [len(set(each)) for each in subsets.removed[2:]] == [5] * 30
    assert len(set(subsets.removed)) > 25
    assert Subsets.without_some(20, 3, share=0.25, seed=4).removed[1:] == subsets.removed[6:9]
    assert Subsets.without_some(20, 1, share=0.001).removed[1:] != ((),)  # at least one


def test_every_half_has_its_own_seed_in_every_run() -> None:
    subsets = Subsets.halves(10, 4)
    seeds = [subsets.seeds(run, 3, 100) for run in range(3)]
    assert sorted(seed for run in seeds for seed in run) == list(range(100, 112))
    assert seeds[1] == [101, 104, 107, 110]


def test_models_of_a_removal_share_the_seed_of_their_run() -> None:
    subsets = Subsets.without_each(4)
    assert subsets.seeds(0, 2, 7) == [7] * 5
    assert subsets.seeds(1, 2, 7) == [8] * 5


REFUSED: dict[str, tuple[Callable[[], Subsets], str]] = {
    "another length": (lambda: Subsets.halves(10, n=12), "divide 10 examples, the training data has 12"),
    "members outside": (lambda: Subsets.halves(OVERLAPPING, n=5), "'c' has member 5, .* examples 0 to 4"),
    "no length": (lambda: Subsets.without_each(OVERLAPPING), "do not say how many .* give n="),
    "one source": (lambda: Subsets.halves(Sources.groups({"a": [0]}), n=4), "at least two sources"),
    "no source": (lambda: Subsets.halves(0), "there are no sources"),
    "no half": (lambda: Subsets.halves(10, 0), "no subset that lacks a source"),
    "nothing removed": (lambda: Subsets.without_each(4, only=[]), "no subset that lacks a source"),
    "unknown source": (lambda: Subsets.without_each(4, only=[4]), r"subset 1 lacks sources \(4,\): .* from 0 to 3"),
    "from the end": (lambda: Subsets.without(4, [[], [-1]]), r"subset 1 lacks sources \(-1,\)"),
    "twice": (lambda: Subsets.without(4, [[], [1, 1]]), "give each once"),
    "everything": (lambda: Subsets.without(4, [[], [0, 1, 2, 3]]), "subset 1 has no training example left"),
    "too large a share": (lambda: Subsets.without_some(4, 2, share=1.5), "share must lie between 0 and 1, got 1.5"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_subsets_that_cannot_be_meant_are_refused(make: Callable[[], Subsets], message: str) -> None:
    with pytest.raises(SourcesError, match=message):
        make()
