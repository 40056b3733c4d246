"""Chooses the data that models are retrained on: random halves, all but one source, all but some."""

import logging
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from imprint.display import name_some
from imprint.errors import DataError, SourcesError
from imprint.sources import Sources

logger = logging.getLogger(__name__)
Design = Literal["halves", "removal"]
CHOICE, HALF, REMOVAL, ORDER, DROPOUT, CHANCE, VALIDATION = range(7)  # what a derived seed is for


def derive_seed(seed: int, *words: int) -> int:
    """Derive a seed for one purpose from a seed and words; it is below 2³¹, which all libraries accept."""
    entropy = require_whole("seed", seed, 0)
    return int(np.random.SeedSequence(entropy, spawn_key=words).generate_state(1)[0]) >> 1


def require_whole(name: str, value: Any, least: int) -> int:
    """Return a whole number of any library's type; refuse other values, and numbers that are too small."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or number < least:
        raise DataError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    return number


@dataclass(frozen=True)
class Subsets:
    """Subsets of the training data, each given by the sources that it lacks.

    kind: "halves" compares models trained on different halves; "removal" compares models that lack a few sources with
        a baseline that lacks none, which is one of the subsets.
    n: the number of training examples.
    removed: positions in `sources` that each subset lacks. An example in a removed source is removed, even if another
        source has it too; an example in no source stays.
    """

    kind: Design
    n: int
    sources: Sources
    removed: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "removed", _to_positions(self.removed))
        if not any(self.removed):
            raise SourcesError("no subset lacks a source: remove at least one source in at least one subset.")
        for index, positions in enumerate(self.removed):
            if len(set(positions)) < len(positions) or not all(0 <= p < len(self.sources) for p in positions):
                raise SourcesError(
                    f"subset {index} lacks sources {positions[:5]}: give each position once, from 0 to "
                    f"{len(self.sources) - 1}."
                )
            if sum(len(self.sources.members[p]) for p in positions) >= self.n and len(self.examples(index)) == 0:
                raise SourcesError(f"subset {index} has no training example left.")

    def __len__(self) -> int:
        return len(self.removed)

    def __repr__(self) -> str:
        return f"Subsets({self.kind}: {len(self)} subsets of {len(self.sources)} sources, {self.n} examples)"

    @classmethod
    def halves(cls, sources: Sources | int, count: int = 100, *, n: int | None = None, seed: int = 0) -> "Subsets":
        """Draw different random halves of the sources, or of this many examples; a larger count only adds halves."""
        sources, n = _resolve_sources(sources, n)
        if len(sources) < 2:
            raise SourcesError("halves need at least two sources.")
        return cls("halves", n, sources, _draw_sets(len(sources), len(sources) - len(sources) // 2, count, seed))

    @classmethod
    def without_each(
        cls, sources: Sources | int, *, n: int | None = None, only: Iterable[int] | None = None
    ) -> "Subsets":
        """Leave out each source in turn, or `only` some; the first subset is the baseline."""
        sources, n = _resolve_sources(sources, n)
        chosen = _to_positions((index,) for index in (range(len(sources)) if only is None else only))
        if len(set(chosen)) < len(chosen):
            raise SourcesError(f"only= contains a source more than once: {', '.join(str(p) for (p,) in chosen[:5])}.")
        return cls("removal", n, sources, ((), *chosen))

    @classmethod
    def without_some(
        cls,
        sources: Sources | int,
        count: int,
        share: float = 0.2,
        *,
        drop: int | None = None,
        n: int | None = None,
        seed: int = 0,
    ) -> "Subsets":
        """Leave out random unions of sources; the first subset is the baseline. A larger count adds to the same unions.

        share: of the sources, rounded to whole sources and at least one.
        drop: how many sources a union has, in place of a share.
        """
        sources, n = _resolve_sources(sources, n)
        if not (isinstance(share, Real) and 0 < share < 1):
            raise SourcesError(f"share must be between 0 and 1, got {share}.")
        size = max(1, round(share * len(sources))) if drop is None else require_whole("drop", drop, 1)
        if size >= len(sources):
            raise SourcesError(f"a union of {size} sources leaves none of {len(sources)}: drop fewer.")
        return cls("removal", n, sources, ((), *_draw_sets(len(sources), size, count, seed)))

    @classmethod
    def without(cls, sources: Sources | int, removed: Sequence[Sequence[int]], *, n: int | None = None) -> "Subsets":
        """Leave out the given sources, one subset for each list; one list must be empty, for the baseline."""
        sources, n = _resolve_sources(sources, n)
        lists = _to_positions(removed)
        if all(lists):
            raise SourcesError(
                "removals are compared with a model trained on everything: add an empty list, the baseline."
            )
        return cls("removal", n, sources, lists)

    def examples(self, index: int) -> Tensor:
        """Return the training examples of a subset, in order."""
        kept = np.ones(self.n, dtype=bool)
        for position in self.removed[index]:
            kept[self.sources.members[position]] = False
        return torch.from_numpy(np.flatnonzero(kept))

    def membership(self) -> Tensor:
        """Return which sources are in which subset, shape (subsets, sources)."""
        table = torch.ones(len(self), len(self.sources), dtype=torch.bool)
        for index, positions in enumerate(self.removed):
            table[index, list(positions)] = False
        return table

    def describe(self, index: int) -> str:
        """Describe a subset for messages."""
        lacking = [repr(self.sources.ids[position]) for position in self.removed[index]]
        return f"all but {name_some(lacking, 3)}" if lacking else "everything"

    def seeds(self, run: int, seed: int) -> list[int]:
        """Return the seeds of a run: one for each half, but one for all removals, so that only the removal differs."""
        if self.kind == "halves":
            return [derive_seed(seed, HALF, run, index) for index in range(len(self))]
        return [derive_seed(seed, REMOVAL, run)] * len(self)


def _draw_sets(sources: int, size: int, count: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Draw `count` different sets of sources, or all there are."""
    count, possible = require_whole("count", count, 1), math.comb(sources, size)
    if count > possible:
        logger.warning(
            "%d subsets were requested, but only %d different ones exist: using all of them", count, possible
        )
    draw = np.random.default_rng(derive_seed(seed, CHOICE))
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < min(count, possible):
        chosen[tuple(sorted(draw.choice(sources, size, replace=False).tolist()))] = None
    return tuple(chosen)


def _to_positions(removed: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Convert positions of sources to plain integers, a tuple for each subset."""
    try:
        return tuple(tuple(operator.index(position) for position in each) for each in removed)
    except TypeError as error:
        raise SourcesError(f"expected lists of positions of the sources that each subset lacks: {error}.") from error


def _resolve_sources(sources: Sources | int, n: int | None) -> tuple[Sources, int]:
    if not isinstance(sources, Sources):
        if isinstance(sources, bool) or not hasattr(sources, "__index__"):
            raise SourcesError(
                f"expected Sources, or the number of training examples, got a {type(sources).__name__}: "
                "Sources.by_label(labels) makes sources."
            )
        sources = Sources.per_example(operator.index(sources))
    length = require_whole("n", n, 1) if n is not None else sources.length
    if length is None:
        raise SourcesError("these sources do not record the number of training examples: give n=.")
    sources.check(length)
    return sources, length
