"""Subsets hold what they say, the same every time, and bad ones are refused before anything is trained."""

import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from imprint import DataError, Sources, SourcesError
from imprint.evaluation.subsets import Subsets, derive_seed

OVERLAPPING = Sources.groups({"a": [0, 1, 2], "b": [2, 3], "c": [5]})  # example 4 is in no source


@pytest.mark.parametrize(("sources", "half"), [(10, 5), (11, 5)])
def test_halves_are_halves(sources: int, half: int) -> None:
    subsets = Subsets.halves(sources, 20)
    assert len(subsets) == 20
    assert subsets.membership().sum(1).tolist() == [half] * 20
    assert [len(subsets.examples(i)) for i in range(20)] == [half] * 20


def test_halves_are_distinct_and_every_source_is_in_about_half_of_them() -> None:
    kept = Subsets.halves(40, 200).membership()
    assert len({tuple(row) for row in kept.tolist()}) == 200
    share = kept.double().mean(0)
    assert float((share - 0.5).abs().max()) < 4 * 0.5 / 200**0.5


def test_more_subsets_begin_with_the_same() -> None:
    for few, many in (
        (Subsets.halves(20, 3), Subsets.halves(20, 10)),
        (Subsets.without_some(20, 3), Subsets.without_some(20, 10)),
        (Subsets.halves(4, 3), Subsets.halves(4, 6)),
    ):
        assert few.removed == many.removed[: len(few)]


@pytest.mark.parametrize("make", [Subsets.halves, Subsets.without_some])
def test_neighbouring_seeds_share_no_subset(make: Callable[..., Subsets]) -> None:
    drawn = [each for seed in range(5) for each in make(40, 50, seed=seed).removed if each]
    assert len(set(drawn)) == 250


@pytest.mark.parametrize(
    ("make", "all_of_them"), [(lambda count: Subsets.halves(4, count), 6), (lambda c: Subsets.without_some(5, c), 5)]
)
def test_where_more_are_asked_for_than_there_are_each_is_there_once(
    make: Callable[[int], Subsets], all_of_them: int, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = [each for each in make(all_of_them).removed if each]
    assert len(drawn) == len(set(drawn)) == all_of_them
    assert not caplog.text
    assert make(100).removed == make(all_of_them).removed
    assert f"100 subsets were requested, but only {all_of_them} different ones exist" in caplog.text


def test_a_removal_takes_all_members_whatever_other_sources_have_them() -> None:
    subsets = Subsets.without_each(OVERLAPPING, n=6)
    assert [subsets.examples(i).tolist() for i in range(4)] == [
        [0, 1, 2, 3, 4, 5],
        [3, 4, 5],
        [0, 1, 4, 5],
        [0, 1, 2, 3, 4],
    ]
    assert subsets.membership().tolist() == [[True] * 3, [False, True, True], [True, False, True], [True, True, False]]


def test_removals_can_be_of_some_sources_and_come_after_a_baseline() -> None:
    assert Subsets.without_each(5, only=[3, 1]).removed == ((), (3,), (1,))
    assert Subsets.without(5, [[], [0, 4], [2]]).removed == ((), (0, 4), (2,))


@pytest.mark.parametrize("chosen", [np.array([3, 1]), torch.tensor([3, 1]), (i for i in (3, 1))])
def test_positions_may_come_as_any_whole_numbers(chosen: Any) -> None:
    subsets = Subsets.without_each(5, only=chosen)
    assert subsets.removed == ((), (3,), (1,))
    json.dumps(subsets.removed)


def test_a_share_of_the_sources_is_removed_at_random() -> None:
    subsets = Subsets.without_some(20, 30, share=0.25)
    assert subsets.removed[0] == ()
    assert [len(set(each)) for each in subsets.removed[1:]] == [5] * 30
    assert Subsets.without_some(20, 1, share=0.001).removed[1:] != ((),)  # at least one


HALVES, REMOVALS = Subsets.halves(10, 40), Subsets.without_each(4)
every_kind = pytest.mark.parametrize("subsets", [HALVES, REMOVALS], ids=["halves", "removals"])


def trainings(subsets: Subsets, seed: int, runs: int = 20) -> list[int]:
    return [each for run in range(runs) for each in subsets.seeds(run, seed)]


def test_every_half_has_its_own_seed_in_every_run() -> None:
    assert len(set(trainings(HALVES, 100))) == 20 * 40


def test_models_of_a_removal_share_the_seed_of_their_run() -> None:
    first, second = (REMOVALS.seeds(run, 7) for run in range(2))
    assert first == first[:1] * 5 and second == second[:1] * 5
    assert first != second


@every_kind
def test_neighbouring_seeds_share_no_training(subsets: Subsets) -> None:
    mine, *others = (set(trainings(subsets, seed)) for seed in (0, 1, 2, 100))
    assert not any(mine & other for other in others)
    assert not mine & set(range(1000))  # nor do they begin like a model that a person would train
    assert not set(trainings(HALVES, 0)) & set(trainings(REMOVALS, 0))


def test_more_halves_are_trained_with_the_same_seeds() -> None:
    assert Subsets.halves(10, 30).seeds(3, 5) == HALVES.seeds(3, 5)[:30]


def test_a_derived_seed_suits_every_library_and_depends_on_each_word() -> None:
    seeds = [derive_seed(seed, *words) for seed in (0, 1, 2**40) for words in ((), (0,), (0, 0), (1,), (0, 1), (1, 0))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    with pytest.raises(DataError, match="seed must be a whole number of at least 0, got -1"):
        derive_seed(-1, 0)


REFUSED: dict[str, tuple[Callable[[], Subsets], str]] = {
    "another length": (lambda: Subsets.halves(10, n=12), "10 training examples, the data has 12"),
    "members outside": (lambda: Subsets.halves(OVERLAPPING, n=5), "'c' has member 5, .* examples 0 to 4"),
    "no length": (lambda: Subsets.without_each(OVERLAPPING), "do not record the number .* give n="),
    "one source": (lambda: Subsets.halves(Sources.groups({"a": [0]}), n=4), "at least two sources"),
    "no source": (lambda: Subsets.halves(0), "there are no sources"),
    "nothing removed": (lambda: Subsets.without_each(4, only=[]), "no subset lacks a source"),
    "unknown source": (lambda: Subsets.without_each(4, only=[4]), r"subset 1 lacks sources \(4,\): .* from 0 to 3"),
    "from the end": (lambda: Subsets.without(4, [[], [-1]]), r"subset 1 lacks sources \(-1,\)"),
    "twice": (lambda: Subsets.without(4, [[], [1, 1]]), "give each position once"),
    "everything": (lambda: Subsets.without(4, [[], [0, 1, 2, 3]]), "subset 1 has no training example left"),
    "one twice": (lambda: Subsets.without_each(4, only=[1, 2, 1]), "contains a source more than once: 1, 2, 1"),
    "no baseline": (lambda: Subsets.without(4, [[0], [1, 2]]), "a model trained on everything: add an empty list"),
    "no lists": (
        lambda: Subsets.without(4, cast(Any, [0, 1])),
        "positions .* each subset lacks: 'int' object is not iterable",
    ),
    "no position": (
        lambda: Subsets.without_each(4, only=[cast(Any, 1.5)]),
        "'float' object cannot be interpreted as an integer",
    ),
    "labels": (lambda: Subsets.halves(cast(Any, [0, 1, 0])), r"got a list: Sources\.by_label\(labels\) makes sources"),
    "a float": (lambda: Subsets.without_each(cast(Any, 4.0)), "expected Sources, or the number .* got a float"),
    "true": (lambda: Subsets.without_each(True), "got a bool"),
    "no share": (
        lambda: Subsets.without_some(4, 2, share=cast(Any, "some")),
        "share must be between 0 and 1, got some",
    ),
    "too large a share": (lambda: Subsets.without_some(4, 2, share=1.5), "share must be between 0 and 1, got 1.5"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_subsets_that_cannot_be_meant_are_refused(make: Callable[[], Subsets], message: str) -> None:
    with pytest.raises(SourcesError, match=message):
        make()


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "3", None, True])
def test_a_count_is_a_whole_number(wrong: Any) -> None:
    for make in (Subsets.halves, Subsets.without_some):
        with pytest.raises(DataError, match=f"count must be a whole number of at least 1, got {wrong!r}"):
            make(10, wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, "a", None, False])
def test_a_seed_is_a_whole_number(wrong: Any) -> None:
    with pytest.raises(DataError, match=f"seed must be a whole number of at least 0, got {wrong!r}"):
        Subsets.halves(10, 3, seed=wrong)


def test_whole_numbers_may_be_of_any_library() -> None:
    plain = Subsets.halves(10, 3, n=10, seed=5)
    assert Subsets.halves(np.int64(10), np.int32(3), n=np.int64(10), seed=torch.tensor(5)) == plain  # type: ignore[arg-type]


def test_subsets_say_what_they_are() -> None:
    assert repr(HALVES) == "Subsets(halves: 40 subsets of 10 sources, 10 examples)"
    some = Subsets.without(OVERLAPPING, [[], [0], [2, 1]], n=6)
    assert [some.describe(index) for index in range(3)] == ["everything", "all but 'a'", "all but 'c', 'b'"]
    assert Subsets.halves(10, 1).describe(0).endswith(" and 2 more")


def test_unions_have_as_many_sources_as_asked_for() -> None:
    pairs = Subsets.without_some(8, 6, drop=2)
    assert [len(removed) for removed in pairs.removed] == [0, 2, 2, 2, 2, 2, 2]
    assert pairs.removed == Subsets.without_some(8, 6, share=0.25).removed
    with pytest.raises(SourcesError, match="a union of 8 sources leaves none of 8: drop fewer"):
        Subsets.without_some(8, 6, drop=8)
    with pytest.raises(DataError, match="drop must be a whole number of at least 1, got 0"):
        Subsets.without_some(8, 6, drop=0)
