"""The order in which a run takes its training data: reproducible from a seed, and resumable within an epoch."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from imprint.errors import PlanError
from imprint.recording.journal import Position
from imprint.recording.seeding import derive_seed, seed_everything

Item = TypeVar("Item")
Order = Callable[[int, int], Iterator[tuple[int, Item]]]
"""Yields the batches of an epoch after so many, each with its number: `order(epoch, done)`."""


class Walk:
    """Goes through the epochs of a run, from where a resumed one has stopped.

    A batch is taken when a step of its examples is recorded, however far ahead of the steps batches are read.

    position: where the last batch that was taken lies in the order; None before the first one.
    """

    def __init__(self) -> None:
        self.position: Position | None = None
        self._given: deque[tuple[Position, list[int]]] = deque()  # batches that no step has taken yet
        self._epochs = 0  # that were asked for

    def take(self, examples: Iterable[int]) -> None:
        """Take the batches that a step is made of: its examples are theirs, in any order.

        A step of a part of a batch takes that batch. Other examples than those of the batches that were given do not
        say which of them are taken: then it is all.
        """
        if not self._given:
            return
        wanted = Counter(examples)
        last = self._find_whole(wanted)
        if last is None:
            last = next((k for k, (_, each) in enumerate(self._given) if wanted <= Counter(each)), len(self._given) - 1)
            taken = last  # the rest of it may follow
        else:
            taken = last + 1
        self.position = self._given[last][0]
        for _ in range(taken):
            self._given.popleft()

    def _find_whole(self, wanted: "Counter[int]") -> int | None:
        """Return the last of the first batches in a row that have these examples together, if there are such."""
        for first in range(len(self._given)):
            found: Counter[int] = Counter()
            for last in range(first, len(self._given)):
                found.update(self._given[last][1])
                if found == wanted:
                    return last
                if found.total() >= wanted.total():
                    break
        return None

    def follow(self, order: Order[Item], epochs: int) -> Iterator[Item]:
        """Return the items of the next epochs, less those that the run has behind it."""
        begin, self._epochs = self._epochs, self._epochs + epochs
        return self._take(order, range(begin, self._epochs))

    def _take(self, order: Order[Item], epochs: range) -> Iterator[Item]:
        for epoch in epochs:
            first, done = self.position or (0, 0)
            if epoch < first:
                continue
            for number, item in order(epoch, done if epoch == first else 0):
                given = item[0] if isinstance(item, tuple) else item
                self._given.append(((epoch, number), torch.as_tensor(given).tolist()))
                yield item


def shuffled_batches(n: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool) -> Order[Tensor]:
    """Return the order of a run that draws its batches without a DataLoader: indices, shuffled in each epoch."""

    def order(epoch: int, done: int) -> Iterator[tuple[int, Tensor]]:
        generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
        indices = torch.randperm(n, generator=generator) if shuffle else torch.arange(n)
        batches = torch.split(indices, batch_size)
        if drop_last and len(batches[-1]) < batch_size:
            batches = batches[:-1]
        yield from enumerate(batches[done:], done + 1)

    return order


def loaded_batches(loader: DataLoader[Any], *, seed: int) -> Order[tuple[list[int], Any]]:
    """Return the order of a DataLoader, as (indices, batch).

    Each epoch begins with seeds of its own, so that samplers draw the same order again. Batches that are done are
    passed over in the sampler: no example of them is read.
    """

    def order(epoch: int, done: int) -> Iterator[tuple[int, tuple[list[int], Any]]]:
        noting = _Noting(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, done)
        again = _rebuild(loader, noting)
        _seed_epoch(loader, derive_seed(seed, "epoch", epoch), epoch)
        for number, batch in enumerate(again, done + 1):
            yield number, (noting.given.popleft(), batch)

    return order


def count_examples(loader: DataLoader[Any]) -> int:
    """Return the number of examples of a DataLoader; refuse one whose examples have no indices."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise PlanError(
            "run.loader takes a torch DataLoader of a map-style dataset, whose examples have indices; for anything "
            "else give the indices yourself, run.step(indices)."
        )
    return len(loader.dataset)  # type: ignore[arg-type]


class _Noting:
    """Passes on the batches of a sampler, but for the first few, and notes them: a DataLoader keeps their order."""

    def __init__(self, sampler: Iterable[Any], skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped
        self.given: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for number, drawn in enumerate(self._sampler):
            if number >= self._skipped:
                self.given.append([int(index) for index in (drawn if isinstance(drawn, Iterable) else [drawn])])
                yield drawn


def _rebuild(loader: DataLoader[Any], sampler: _Noting) -> DataLoader[Any]:
    """Return a DataLoader that differs only in where it takes its batches from."""
    given: dict[str, Any] = {"batch_size": None, "sampler": sampler}
    if loader.batch_sampler is not None:
        given = {"batch_sampler": sampler}
    return DataLoader(
        loader.dataset,
        **given,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        pin_memory_device=loader.pin_memory_device,
    )


def _seed_epoch(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    """Have every generator that an order may be drawn from begin anew."""
    seed_everything(seed)
    batches = loader.batch_sampler
    owners: tuple[Any, ...] = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    for owner in owners:
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
