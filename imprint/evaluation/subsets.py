"""Which data the retrained models see: random halves, all but one source, all but some."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from imprint.errors import SourcesError
from imprint.sources import Sources

Kind = Literal["halves", "removal"]


@dataclass(frozen=True)
class Subsets:
    """Subsets of the training data, each said by the sources that it lacks.

    kind: "halves" compares models trained on different halves; "removal" compares models that lack a few sources with
        models that lack none, which stand among the subsets with nothing removed.
    n: how many training examples there are.
    removed: positions in `sources` of what each subset lacks. An example in a removed source is removed, whatever other
        sources have it; an example in no source stays.
    """

    kind: Kind
    n: int
    sources: Sources
    removed: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "removed", tuple(tuple(int(p) for p in each) for each in self.removed))
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

    @classmethod
    def halves(cls, sources: Sources | int, count: int = 100, *, n: int | None = None, seed: int = 0) -> "Subsets":
        """Random halves of the sources, or of so many single examples: number i is drawn with seed + i."""
        sources, n = _units(sources, n)
        if len(sources) < 2:
            raise SourcesError("halves need at least two sources.")
        everyone = np.arange(len(sources))
        kept = [
            np.random.default_rng(seed + i).choice(len(sources), len(sources) // 2, replace=False) for i in range(count)
        ]
        removed = tuple(tuple(np.setdiff1d(everyone, chosen).tolist()) for chosen in kept)
        return cls("halves", n, sources, removed)

    @classmethod
    def without_each(
        cls, sources: Sources | int, *, n: int | None = None, only: Iterable[int] | None = None, baselines: int = 1
    ) -> "Subsets":
        """All but one source, for each of them (or for `only` some); `baselines` models are trained on everything."""
        sources, n = _units(sources, n)
        chosen = tuple((index,) for index in (range(len(sources)) if only is None else only))
        return cls("removal", n, sources, ((),) * baselines + chosen)

    @classmethod
    def without_some(
        cls,
        sources: Sources | int,
        count: int,
        share: float = 0.2,
        *,
        n: int | None = None,
        seed: int = 0,
        baselines: int = 1,
    ) -> "Subsets":
        """All but a random union of sources, `share` of them."""
        sources, n = _units(sources, n)
        if not 0 < share < 1:
            raise SourcesError(f"share must lie between 0 and 1, got {share}.")
        size = max(1, round(share * len(sources)))
        draws = [np.random.default_rng(seed + i).choice(len(sources), size, replace=False) for i in range(count)]
        return cls("removal", n, sources, ((),) * baselines + tuple(tuple(sorted(draw.tolist())) for draw in draws))

    @classmethod
    def without(cls, sources: Sources | int, removed: Sequence[Sequence[int]], *, n: int | None = None) -> "Subsets":
        """All but the given sources, one subset for each list of them; the empty list is a baseline."""
        sources, n = _units(sources, n)
        return cls("removal", n, sources, tuple(tuple(each) for each in removed))

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

    def seeds(self, run: int, runs: int, seed: int) -> list[int]:
        """The seed of each model of a run: one for each half; one for all of a removal, so that they differ by it.

        Of several models that lack nothing only the first has that seed: the others average the noise of training out.
        """
        if self.kind == "halves":
            return [seed + index * runs + run for index in range(len(self))]
        wholes = [index for index, removed in enumerate(self.removed) if not removed]
        more = {index: seed + run + runs * number for number, index in enumerate(wholes)}
        return [more.get(index, seed + run) for index in range(len(self))]


def _units(sources: Sources | int, n: int | None) -> tuple[Sources, int]:
    if isinstance(sources, int):
        sources = Sources.per_example(sources)
    length = n if n is not None else sources.length
    if length is None:
        raise SourcesError("these sources do not say how many training examples there are: give n=.")
    sources.check(length)
    return sources, length
