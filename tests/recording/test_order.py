"""The order of the data: drawn from the seed, known to the recorder, and continued where a run stopped."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from imprint import PlanError, RunRecorder
from tests.recording.runs import N, X, Y, make_model

IDS = torch.arange(N)


def make_recorder(folder: Path, **options: Any) -> RunRecorder:
    model = make_model()
    return RunRecorder(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def record(run: RunRecorder, indices: Any) -> None:
    """Make a step of these examples, whatever it does to the model."""
    with run.step(indices) as step:
        run.optimiser.zero_grad()
        step.backward(run.model(X[torch.as_tensor(indices)]).square().mean())
        run.optimiser.step()


def take(run: RunRecorder, batches: Iterator[Any], count: int | None = None) -> list[Any]:
    """Record steps of some batches, or of all, and return them."""
    taken = []
    for batch in batches:
        record(run, batch[0] if isinstance(batch, tuple) else batch)
        taken.append(batch)
        if len(taken) == count:
            break
    return taken


def as_lists(batches: list[Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_every_epoch_has_every_example_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    batches = list(make_recorder(tmp_path / "run").batches(N, 10, epochs=3))
    assert [len(batch) for batch in batches] == [10, 10, 4] * 3
    epochs = [torch.cat(batches[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = make_recorder(tmp_path / "again").batches(N, 10, epochs=3)
    assert as_lists(list(again)) == as_lists(batches)
    other = make_recorder(tmp_path / "other", seed=1).batches(N, 10, epochs=3)
    assert as_lists(list(other)) != as_lists(batches)
    plain = make_recorder(tmp_path / "plain").batches(N, 10, shuffle=False, drop_last=True)
    assert torch.cat(list(plain)).tolist() == list(range(20))


def test_a_loop_over_epochs_may_ask_for_each_of_them(tmp_path: Path) -> None:
    together = list(make_recorder(tmp_path / "run").batches(N, 10, epochs=3))
    run = make_recorder(tmp_path / "again")
    one_by_one = [batch for _ in range(3) for batch in run.batches(N, 10)]
    assert as_lists(one_by_one) == as_lists(together)


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_an_order_is_continued_within_an_epoch(done: int, tmp_path: Path) -> None:
    expected = as_lists(list(make_recorder(tmp_path / "whole").batches(N, 10, epochs=2)))
    run = make_recorder(tmp_path / "run")
    taken = take(run, run.batches(N, 10, epochs=2), done)
    run.close()
    run = make_recorder(tmp_path / "run", step=done)
    rest = take(run, run.batches(N, 10, epochs=2))
    assert as_lists(taken + rest) == expected


def read_one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Prefetch, as loops do that copy the next batch to a device meanwhile."""
    waiting = next(batches)
    for batch in batches:
        yield waiting
        waiting = batch
    yield waiting


READERS: dict[str, Callable[[Iterator[Any]], Iterator[Any]]] = {
    "all at once": lambda batches: iter(list(batches)),
    "one ahead": read_one_ahead,
    "sorted": lambda batches: (batch.sort().values for batch in list(batches)),
    "some passed over": lambda batches: (batch for batch in list(batches) if 7 not in batch),
}


@pytest.mark.parametrize("how", READERS)
def test_batches_that_are_read_ahead_count_as_used_when_their_step_is_recorded(how: str, tmp_path: Path) -> None:
    read, done = READERS[how], 5
    expected = as_lists(list(read(make_recorder(tmp_path / "whole").batches(N, 6, epochs=3))))
    run = make_recorder(tmp_path / "run")
    taken = take(run, read(run.batches(N, 6, epochs=3)), done)
    run.close()
    run = make_recorder(tmp_path / "run", step=done)
    rest = take(run, read(run.batches(N, 6, epochs=3)))
    assert as_lists(taken + rest) == expected


def test_batches_that_are_accumulated_are_used_together_and_parts_of_one_as_one(tmp_path: Path) -> None:
    run = make_recorder(tmp_path / "run")
    first, second, third, *_ = list(run.batches(N, 6))
    record(run, torch.cat([first, second]))
    record(run, third[:3])
    run.close()
    rest = {step: next(make_recorder(tmp_path / "run", step=step).batches(N, 6)).tolist() for step in (2, 1)}
    order = as_lists(list(make_recorder(tmp_path / "whole").batches(N, 6)))
    assert rest == {1: order[2], 2: order[3]}


def test_loaders_may_be_read_ahead_too(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(X, IDS), 5, shuffle=True)
    whole = [indices for indices, _ in make_recorder(tmp_path / "whole").loader(loader, epochs=2)]
    run = make_recorder(tmp_path / "run")
    taken = take(run, iter(list(run.loader(loader, epochs=2))), 3)
    run.close()
    run = make_recorder(tmp_path / "run", step=3)
    taken += take(run, run.loader(loader, epochs=2))
    assert [indices for indices, _ in taken] == whole


class Reads(Dataset[tuple[Tensor, Tensor]]):
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return X[index], IDS[index]


class Halves(Sampler[list[int]]):
    """Draws batches of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(N).tolist()
        yield from (order[:11], order[11:])

    def __len__(self) -> int:
        return 2


def loaders() -> dict[str, DataLoader[Any]]:
    data = TensorDataset(X, IDS)
    generator = torch.Generator().manual_seed(4)
    weighted = WeightedRandomSampler(torch.ones(N).tolist(), 15)
    return {
        "shuffled": DataLoader(data, 5, shuffle=True),
        "in order": DataLoader(data, 5, drop_last=True),
        "own generator": DataLoader(data, 5, shuffle=True, generator=generator),
        "weighted": DataLoader(data, 4, sampler=weighted),
        "own batches": DataLoader(data, batch_sampler=Halves()),
        "dict": DataLoader(data, 7, shuffle=True, collate_fn=lambda rows: {"ids": [int(row[1]) for row in rows]}),
        "ready batches": DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 6, False)),
    }


def ids_of(batch: Any) -> list[int]:
    return batch["ids"] if isinstance(batch, dict) else batch[1].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", loaders())
def test_a_loader_knows_the_indices_of_its_batches_and_resumes(name: str, tmp_path: Path) -> None:
    run = make_recorder(tmp_path / "whole")
    whole = list(run.loader(loaders()[name], epochs=3))
    assert all(indices == ids_of(batch) for indices, batch in whole)
    assert len(whole) == 3 * len(loaders()[name])
    run = make_recorder(tmp_path / "run")
    done = len(whole) // 3 + 1
    taken = take(run, run.loader(loaders()[name], epochs=3), done)
    run.close()
    run = make_recorder(tmp_path / "run", step=done)
    taken += take(run, run.loader(loaders()[name], epochs=3))
    assert [indices for indices, _ in taken] == [indices for indices, _ in whole]


def test_a_resumed_loader_does_not_read_what_is_done(tmp_path: Path) -> None:
    run = make_recorder(tmp_path / "run")
    take(run, run.loader(DataLoader(Reads(), 6, shuffle=True)), 3)
    run.close()
    run, data = make_recorder(tmp_path / "run", step=3), Reads()
    (last,) = take(run, run.loader(DataLoader(data, 6, shuffle=True)))
    assert data.read == last[0]


@pytest.mark.wide
def test_a_loader_with_workers_knows_its_indices(tmp_path: Path) -> None:
    run = make_recorder(tmp_path / "run")
    loader = DataLoader(TensorDataset(X, IDS), 5, shuffle=True, num_workers=2, persistent_workers=True)
    assert all(indices == ids_of(batch) for indices, batch in run.loader(loader, epochs=2))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from X


def test_data_without_indices_are_refused(tmp_path: Path) -> None:
    run = make_recorder(tmp_path / "run")
    for wrong in (DataLoader(Stream()), [X, Y]):
        with pytest.raises(PlanError, match=r"DataLoader of a map-style dataset.*give the indices yourself"):
            run.loader(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="must be at least 1, got 24, 0 and 1"):
        run.batches(N, 0)
