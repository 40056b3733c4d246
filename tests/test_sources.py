"""Sources: from labels, groups and masks, with overlaps, to example weights."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from imprint import Sources

GROUPS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=5
)


@pytest.mark.parametrize(
    "labels",
    [
        ["post", "times", "post", "mail"],
        ("post", "times", "post", "mail"),
        np.array(["post", "times", "post", "mail"]),
    ],
    ids=["list", "tuple", "array"],
)
def test_labels_make_one_source_each_in_sorted_order(labels: Any) -> None:
    sources = Sources.by_label(labels)
    assert sources.ids == ("mail", "post", "times")
    assert [members.tolist() for members in sources.members] == [[3], [0, 2], [1]]
    assert sources.sizes == (1, 2, 1)


@pytest.mark.parametrize("labels", [[10, 2, 10], torch.tensor([10, 2, 10]), np.array([10, 2, 10])])
def test_numbers_are_sorted_as_numbers(labels: Any) -> None:
    assert Sources.by_label(labels).ids == ("2", "10")


def test_labels_of_different_kinds_are_sorted_as_text() -> None:
    assert Sources.by_label(["b", 3, None, "b"]).ids == ("3", "None", "b")


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20))
def test_every_example_is_in_the_source_of_its_label_and_no_other(labels: list[int]) -> None:
    sources = Sources.by_label(labels)
    for identity, members in zip(sources.ids, sources.members, strict=True):
        assert members.tolist() == [i for i, label in enumerate(labels) if str(label) == identity]
    assert sum(sources.sizes) == len(labels)


def test_names_are_shown_in_place_of_ids() -> None:
    sources = Sources.by_label([1, 0, 1], names={0: "The Times"})
    assert sources.ids == ("0", "1")
    assert sources.names == ("The Times", "1")


@pytest.mark.parametrize(
    "members",
    [
        [4, 1, 2],
        (4, 1, 2),
        {4, 1, 2},
        np.array([4, 1, 2]),
        np.array([4, 1, 2], dtype=np.int16),
        torch.tensor([4, 1, 2]),
        iter([4, 1, 2]),
        [False, True, True, False, True, False],
        np.array([False, True, True, False, True, False]),
        torch.tensor([False, True, True, False, True, False]),
    ],
)
def test_members_are_indices_or_masks_in_any_form(members: Any) -> None:
    sources = Sources.groups({"a": members})
    assert sources.members[0].dtype == np.int64
    assert sorted(sources.members[0].tolist()) == [1, 2, 4]
    sources.check(6)


def test_groups_keep_their_order_and_may_overlap() -> None:
    sources = Sources.groups({"z": range(3), "a": [2, 1]})
    assert sources.ids == ("z", "a")
    assert sources.sizes == (3, 2)


def test_per_example_has_every_example_once() -> None:
    sources = Sources.per_example(3)
    assert sources.ids == ("0", "1", "2")
    assert [members.tolist() for members in sources.members] == [[0], [1], [2]]


def test_rows_are_the_same_sources() -> None:
    sources = Sources.by_label(["a", "b", "c", "b"])
    part = sources.rows(1, 3)
    assert part.ids == ("b", "c")
    assert part.members[0].tolist() == [1, 3]


@given(GROUPS, st.lists(st.integers(0, 9), unique=True, max_size=10))
def test_the_indicator_is_one_where_an_example_is_a_member(groups: dict[str, set[int]], examples: list[int]) -> None:
    indicator = Sources.groups(groups).indicator(torch.tensor(examples, dtype=torch.int64), torch.float64)
    expected = [[float(example in members) for example in examples] for members in groups.values()]
    assert indicator.dtype == torch.float64
    assert indicator.shape == (len(groups), len(examples))
    assert indicator.tolist() == expected


@given(GROUPS, st.permutations(range(10)), st.integers(1, 9))
def test_indicators_of_batches_are_the_columns_of_the_whole(
    groups: dict[str, set[int]], order: list[int], cut: int
) -> None:
    sources, examples = Sources.groups(groups), torch.tensor(order)
    whole = sources.indicator(examples, torch.float32)
    parts = [sources.indicator(part, torch.float32) for part in (examples[:cut], examples[cut:])]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert whole.sum(1).tolist() == list(sources.sizes)


def test_the_text_of_many_sources_is_short() -> None:
    shown = repr(Sources.per_example(1000))
    assert shown.startswith("Sources(1000: '0' (1)") and shown.endswith("…)")
    assert len(shown) < 100


def test_many_sources_are_described_by_name_in_no_time() -> None:
    count = 30_000
    each = [[number] for number in range(count)]
    sources = Sources.groups(dict(enumerate(each)), {number: f"name {number}" for number in range(count)})
    started = time.perf_counter()
    described = sources.describe({f"name {number}": {"owner": str(number)} for number in range(count)})
    assert time.perf_counter() - started < 5  # it was 16 seconds, and four times as long for twice as many
    assert described.about[count - 1].owner == str(count - 1)
