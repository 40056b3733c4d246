"""Which data the retrained models see: random halves, all but one source, all but some."""

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

from imprint.errors import DataError, SourcesError
from imprint.sources import Sources

logger = logging.getLogger(__name__)
Kind = Literal["halves", "removal"]
CHOICE, HALF, REMOVAL, ORDER, DROPOUT, CHANCE = range(6)  # what a derived seed is for


def derived(seed: int, *words: int) -> int:
    """A seed for one purpose: whatever differs in seed or words gives another, below 2³¹ as every library takes it."""
    entropy = whole("seed", seed, 0)
    return int(np.random.SeedSequence(entropy, spawn_key=words).generate_state(1)[0]) >> 1


def whole(name: str, value: Any, least: int) -> int:
    """A whole number of any library's kind; what is none, or too small, is refused by its name."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or number < least:
        raise DataError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    return number


@dataclass(frozen=True)
class Subsets:
    """Subsets of the training data, each said by the sources that it lacks.

    kind: "halves" compares models trained on different halves; "removal" compares models that lack a few sources with
        one that lacks none, the baseline, which stands among the subsets with nothing removed.
    n: how many training examples there are.
    removed: positions in `sources` of what each subset lacks. An example in a removed source is removed, whatever other
        sources have it; an example in no source stays.
    """

    kind: Kind
    n: int
    sources: Sources
    removed: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "removed", _positions(self.removed))
        if not any(self.removed):
            raise SourcesError("there is no subset that lacks a source: ask for at least one.")
        for index, positions in enumerate(self.removed):
            if len(set(positions)) < len(positions) or not all(0 <= p < len(self.sources) for p in positions):
                raise SourcesError(
                    f"subset {index} lacks sources {positions[:5]}: give each once, from 0 to {len(self.sources) - 1}."
                )
            if sum(len(self.sources.members[p]) for p in positions) >= self.n and len(self.examples(index)) == 0:
                raise SourcesError(f"subset {index} has no training example left.")

    def __len__(self) -> int:
        return len(self.removed)

    def __repr__(self) -> str:
        return f"Subsets({self.kind}: {len(self)} subsets of {len(self.sources)} sources, {self.n} examples)"

    @classmethod
    def halves(cls, sources: Sources | int, count: int = 100, *, n: int | None = None, seed: int = 0) -> "Subsets":
        """Different random halves of the sources, or of so many single examples; a larger count adds to the same."""
        sources, n = _units(sources, n)
        if len(sources) < 2:
            raise SourcesError("halves need at least two sources.")
        return cls("halves", n, sources, _choices(len(sources), len(sources) - len(sources) // 2, count, seed))

    @classmethod
    def without_each(
        cls, sources: Sources | int, *, n: int | None = None, only: Iterable[int] | None = None
    ) -> "Subsets":
        """The baseline, and all but one source, for each of them or for `only` some."""
        sources, n = _units(sources, n)
        chosen = _positions((index,) for index in (range(len(sources)) if only is None else only))
        if len(set(chosen)) < len(chosen):
            raise SourcesError(f"only= names a source more than once: {', '.join(str(p) for (p,) in chosen[:5])}.")
        return cls("removal", n, sources, ((), *chosen))

    @classmethod
    def without_some(
        cls, sources: Sources | int, count: int, share: float = 0.2, *, n: int | None = None, seed: int = 0
    ) -> "Subsets":
        """The baseline, and all but a random union of sources, `share` of them; a larger count adds to the same.

        share: rounded to whole sources, and at least one: of few sources a fifth is a single one.
        """
        sources, n = _units(sources, n)
        if not (isinstance(share, Real) and 0 < share < 1):
            raise SourcesError(f"share must lie between 0 and 1, got {share}.")
        size = max(1, round(share * len(sources)))
        return cls("removal", n, sources, ((), *_choices(len(sources), size, count, seed)))

    @classmethod
    def without(cls, sources: Sources | int, removed: Sequence[Sequence[int]], *, n: int | None = None) -> "Subsets":
        """All but the given sources, one subset for each list of them; one must be empty, the baseline."""
        sources, n = _units(sources, n)
        lists = _positions(removed)
        if all(lists):
            raise SourcesError(
                "removals are compared with a model that lacks nothing: add an empty list, the baseline."
            )
        return cls("removal", n, sources, lists)

    def examples(self, index: int) -> Tensor:
        """The training examples of a subset, in their order."""
        kept = np.ones(self.n, dtype=bool)
        for position in self.removed[index]:
            kept[self.sources.members[position]] = False
        return torch.from_numpy(np.flatnonzero(kept))

    def kept(self) -> Tensor:
        """Which sources are in which subset, shape (subsets, sources)."""
        table = torch.ones(len(self), len(self.sources), dtype=torch.bool)
        for index, positions in enumerate(self.removed):
            table[index, list(positions)] = False
        return table

    def shown(self, index: int) -> str:
        """What a subset has, in words."""
        lacking = [repr(self.sources.ids[position]) for position in self.removed[index]]
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        return f"all but {', '.join(lacking[:3])}{more}" if lacking else "everything"

    def seeds(self, run: int, seed: int) -> list[int]:
        """The seed of each model of a run: one for each half; one for all of a removal, so that they differ by it."""
        if self.kind == "halves":
            return [derived(seed, HALF, run, index) for index in range(len(self))]
        return [derived(seed, REMOVAL, run)] * len(self)


def _choices(sources: int, size: int, count: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """So many different sets of sources, or all there are."""
    count, possible = whole("count", count, 1), math.comb(sources, size)
    if count > possible:
        logger.warning("%d subsets were asked for, there are %d different ones: all of them are taken", count, possible)
    draw = np.random.default_rng(derived(seed, CHOICE))
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < min(count, possible):
        chosen[tuple(sorted(draw.choice(sources, size, replace=False).tolist()))] = None
    return tuple(chosen)


def _positions(removed: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Positions of sources as plain whole numbers, a tuple of them for each subset."""
    try:
        return tuple(tuple(operator.index(position) for position in each) for each in removed)
    except TypeError as error:
        raise SourcesError(f"give the positions of the sources that each subset lacks: {error}.") from error


def _units(sources: Sources | int, n: int | None) -> tuple[Sources, int]:
    if not isinstance(sources, Sources):
        if isinstance(sources, bool) or not hasattr(sources, "__index__"):
            raise SourcesError(
                f"expected Sources, or how many single examples there are, got a {type(sources).__name__}: "
                "Sources.by_label(labels) makes sources."
            )
        sources = Sources.per_example(operator.index(sources))
    length = whole("n", n, 1) if n is not None else sources.length
    if length is None:
        raise SourcesError("these sources do not say how many training examples there are: give n=.")
    sources.check(length)
    return sources, length
