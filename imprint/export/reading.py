"""Scores from an export: the difference of two log-likelihoods over twice the gain, and which are only noise."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imprint.display import suggest_names
from imprint.errors import ReadoutError
from imprint.export.record import Export

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Scores of queries for the sources of an export, per unit of ε/N, as `imprint.attribute` gives them.

    measured: (queries, sources), whatever their size. refused: which of them lie under the noise floor of their source,
    and say no more than that they are smaller than it.
    """

    source_ids: list[str]
    measured: Tensor
    floors: Tensor
    n: int
    dtype: str

    @property
    def refused(self) -> Tensor:
        """Whether a score lies under the noise floor, shape (queries, sources)."""
        return self.measured.abs() < self.floors

    def score(self, query: int, source: str) -> float:
        """Return one score; raise an error where it lies under the noise floor."""
        self._refuse_query(query)
        column = self._column(source)
        value, floor = float(self.measured[query, column]), float(self.floors[column])
        if bool(self.refused[query, column]):
            raise ReadoutError(
                f"the score of query {query} for source {source!r} is {value:.2g}, under the noise floor of "
                f"{floor:.2g}: it cannot be distinguished from 0 in the precision of the export, {self.dtype}."
            )
        return value

    def removal_effect(self, query: int, source: str) -> float:
        """Return the predicted change of the log-likelihood without the source, −s/N; raise under the noise floor."""
        return -self.score(query, source) / self.n

    def accepted(self, query: int) -> dict[str, float]:
        """Return the scores of a query that lie above the noise floor, by source id; the others are in `refused`."""
        self._refuse_query(query)
        row, refused = self.measured[query].tolist(), self.refused[query].tolist()
        return {name: s for name, s, no in zip(self.source_ids, row, refused, strict=True) if not no}

    def __str__(self) -> str:
        lines = [
            "scores per unit of ε/N: + means that the source helps the completion; the removal effect is −score/N, "
            f"N = {self.n}"
        ]
        for query, row in enumerate(self.measured.tolist()):
            for name, value, floor in zip(self.source_ids, row, self.floors.tolist(), strict=True):
                shown = f"{value:+.4g}" if abs(value) >= floor else f"refused: below the noise floor of {floor:.2g}"
                lines.append(f"query {query}, {name}: {shown}")
        return "\n".join(lines)

    def _refuse_query(self, query: int) -> None:
        if not 0 <= query < len(self.measured):
            raise ReadoutError(f"there is no query {query}: the scores have 0 to {len(self.measured) - 1}.")

    def _column(self, source: str) -> int:
        if source not in self.source_ids:
            raise ReadoutError(f"the export has no source {source!r}{suggest_names(source, self.source_ids)}")
        return self.source_ids.index(source)


def read(export: Export | str | os.PathLike[str], plus: Any, minus: Any) -> Scores:
    """Compute scores from the log-likelihoods of the completions under the adapters `plus` and `minus` of every source.

    plus, minus: (queries, sources) in the order of `Export.open(folder).ids`, as tensors, arrays or lists. Of an export
        with adapters without each source, `plus` is of the deployed adapter, and may have one column.
    """
    found = Export.open(export)
    up, down = (torch.as_tensor(values, dtype=torch.float64, device="cpu") for values in (plus, minus))
    if found.removes and down.dim() == 2 and up.shape == (len(down), 1):
        up = up.expand_as(down)
    for name, values in (("plus", up), ("minus", down)):
        if values.dim() != 2 or values.shape[1] != len(found.sources) or values.shape != up.shape:
            raise ReadoutError(
                f"{name} must be the log-likelihoods of every query under the adapters of every source, (queries, "
                f"{len(found.sources)}), got {tuple(values.shape)}."
            )
        if not bool(values.isfinite().all()):
            query, source = (~values.isfinite()).nonzero()[0].tolist()
            raise ReadoutError(
                f"the log-likelihood of query {query} under the {name} adapter of source {found.ids[source]!r} is "
                f"{float(values[query, source])}: scores are made from finite ones only."
            )
    return scores(found, (up - down) / (2 * found.gains))


def scores(export: Export, measured: Tensor) -> Scores:
    """Return scores with the noise floors of an export; warn of those under it."""
    if not bool(measured.isfinite().all()):
        query, source = (~measured.isfinite()).nonzero()[0].tolist()
        raise ReadoutError(f"the score of query {query} for source {export.ids[source]!r} is not finite.")
    found = Scores(export.ids, measured, export.floors, export.n, export.dtype)
    if refused := int(found.refused.sum()):
        logger.warning(
            "%d of %d scores lie under the noise floor of the export and are refused", refused, measured.numel()
        )
    return found
