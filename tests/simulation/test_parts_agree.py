"""Parts that would not fit side by side are refused: those that draw other dropout, or read other data."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Part, Plan, Sources, Store, StoreError, Task, merge, simulate, simulate_part
from imprint.store.path_ends import compare_ends, summarise_end
from tests.simulation.killing import Killed, N, data, dies_after

PLAN = Plan(steps=4, lr=0.2)
DROPPING = replace(PLAN, dropout=True)
SOURCES = Sources.by_label([i % 6 for i in range(N)])


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)))


def part(out: Path, text: str, plan: Plan = PLAN, **given: Any) -> Part:
    return simulate_part(text, task(), given.pop("data", data()), SOURCES, plan, out=out, progress=False, **given)


def imprints(store: Store) -> Tensor:
    found = store.imprints(0, 0, len(store), torch.device("cpu"))
    return torch.cat([rows.flatten(1) for rows in found.values()], dim=1)


def test_parts_with_dropout_take_over_the_batches_that_it_is_drawn_by(tmp_path: Path) -> None:
    part(tmp_path / "store", "2/2", DROPPING, batch_size=5)
    with pytest.raises(StoreError, match=r"drawn otherwise: batch_size was 5, is 8: give batch_size=5\."):
        part(tmp_path / "store", "1/2", DROPPING, batch_size=8)
    part(tmp_path / "store", "1/2", DROPPING)
    store = merge(tmp_path / "store", progress=False)
    whole = simulate(task(), data(), SOURCES, DROPPING, batch_size=5, progress=False)
    torch.testing.assert_close(imprints(store), imprints(whole), rtol=1e-4, atol=1e-5)
    assert not store.warnings


def test_a_simulation_with_dropout_goes_on_with_the_batches_that_it_was_drawn_by(tmp_path: Path) -> None:
    def attempt(batch_size: int, **options: Any) -> Store:
        given = {"out": tmp_path / "store", "memory": "1B", "batch_size": batch_size, **options}  # one source at a time
        return simulate(task(), data(), SOURCES, DROPPING, **given)

    with pytest.raises(Killed):
        attempt(5, progress=dies_after(10))
    with pytest.raises(
        StoreError, match=r"drawn otherwise: batch_size was 5, is 8: give batch_size=5\. Otherwise give"
    ):
        attempt(8, progress=False)
    store = attempt(5, progress=False)
    whole = simulate(task(), data(), SOURCES, DROPPING, batch_size=5, progress=False)
    torch.testing.assert_close(imprints(store), imprints(whole), rtol=1e-4, atol=1e-5)


def test_batches_that_hold_all_examples_draw_the_same(tmp_path: Path) -> None:
    part(tmp_path / "store", "1/2", DROPPING)
    part(tmp_path / "store", "2/2", DROPPING, batch_size=N)


def test_parts_whose_paths_end_apart_are_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of machines that draw other random numbers, or of a folder that forgot what was agreed on."""
    monkeypatch.setattr("imprint.store.draws.Draws.describe_difference", lambda *_: None)
    part(tmp_path / "store", "1/2", DROPPING)
    part(tmp_path / "store", "2/2", DROPPING, batch_size=5)
    words = r"1-of-2 and .*2-of-2 are not of the same simulation: at checkpoint 0 the path ends elsewhere"
    with pytest.raises(StoreError, match=words):
        merge(tmp_path / "store", progress=False)
    shutil.rmtree(tmp_path / "store" / "parts" / "2-of-2")
    part(tmp_path / "store", "2/2", DROPPING)
    assert len(merge(tmp_path / "store", progress=False)) == len(SOURCES)


@pytest.mark.parametrize("unhashed", ["1/2", "2/2"])
def test_a_part_of_other_data_that_nobody_hashed_is_not_merged(unhashed: str, tmp_path: Path) -> None:
    other = (data()[0].flip(0), data()[1])
    part(tmp_path / "store", "1/2", hash_data="none" if unhashed == "1/2" else "all")
    part(tmp_path / "store", "2/2", hash_data="none" if unhashed == "2/2" else "all", data=other)
    with pytest.raises(StoreError, match="They read other data"):
        merge(tmp_path / "store", progress=False)


def test_rounding_does_not_keep_parts_apart(tmp_path: Path) -> None:
    part(tmp_path / "store", "1/2")
    part(tmp_path / "store", "2/2", batch_size=5)
    with pytest.warns(match="different circumstances"):
        merge(tmp_path / "store", progress=False)


def test_the_distance_of_two_ends_is_that_of_what_is_kept_of_them() -> None:
    torch.manual_seed(0)
    start = {"a": torch.randn(300, 40), "b": torch.randn(7)}
    ends = [{name: tensor + torch.randn_like(tensor) / 10 for name, tensor in start.items()} for _ in range(2)]
    apart = compare_ends(*(summarise_end(start, end) for end in ends))
    assert apart == pytest.approx(2**0.5, rel=0.3)  # of two random directions
    rounded = {name: tensor * (1 + 1e-6 * torch.randn_like(tensor)) for name, tensor in ends[0].items()}
    assert compare_ends(summarise_end(start, ends[0]), summarise_end(start, rounded)) is None
    assert compare_ends(summarise_end(start, start), summarise_end(start, start)) is None
