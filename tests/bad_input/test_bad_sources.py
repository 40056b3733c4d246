"""What is wrong with sources is refused with an error that names it."""

from typing import Any

import numpy as np
import pytest

from imprint import Sources, SourcesError
from tests.bad_input.inputs import N, simulated


def test_there_must_be_sources() -> None:
    with pytest.raises(SourcesError, match="no sources"):
        Sources.groups({})


def test_a_source_without_members_is_named() -> None:
    with pytest.raises(SourcesError, match="'bob' has no members"):
        Sources.groups({"ann": [0], "bob": []})


def test_a_mask_of_nothing_has_no_members() -> None:
    with pytest.raises(SourcesError, match="'bob' has no members"):
        Sources.groups({"bob": np.zeros(4, dtype=bool)})


@pytest.mark.parametrize("member", [N, -1])
def test_a_member_outside_the_data_is_named_with_its_source(member: int) -> None:
    with pytest.raises(SourcesError, match=f"'bob' has member {member}, but the training data has examples 0 to 11"):
        simulated(sources=Sources.groups({"ann": [0, 1], "bob": [2, member]}))


def test_ids_that_are_equal_as_text_are_duplicates() -> None:
    with pytest.raises(SourcesError, match="'1' appears more than once"):
        Sources.groups({1: [0], "1": [1]})


def test_a_member_listed_twice_is_refused() -> None:
    with pytest.raises(SourcesError, match="'bob' lists an example more than once"):
        Sources.groups({"bob": [3, 1, 3]})


@pytest.mark.parametrize("members", [[0.5, 1.5], ["first"], [[0, 1], [2, 3]]])
def test_members_must_be_indices(members: list[Any]) -> None:
    with pytest.raises(SourcesError, match="members of source 'bob' must be"):
        Sources.groups({"bob": members})


def test_names_of_sources_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SourcesError, match="do not exist: zoe"):
        Sources.groups({"ann": [0]}, names={"zoe": "Zoe"})


def test_ids_names_and_members_must_be_equally_many() -> None:
    with pytest.raises(SourcesError, match="got 1 ids, 2 names, 1 member lists"):
        Sources(("a",), ("a", "b"), (np.array([0]),))
