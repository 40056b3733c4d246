"""Summarises ground truth source by source: the mean effect of a removal over queries, with its error over runs."""

from dataclasses import asdict, dataclass
from typing import Any

from imprint.evaluation.truth import Truth
from imprint.statistics import student_quantile


@dataclass(frozen=True)
class SourceEffect:
    """What removing one source does to F, on average over queries.

    size: how many training examples the source has.
    error: the standard error over runs; None with a single run.
    distinguishable: whether the 95% interval over runs leaves out 0; None with a single run.
    """

    source: str
    name: str
    size: int
    effect: float
    error: float | None
    distinguishable: bool | None

    def __str__(self) -> str:
        """Format the effect with its error; a tilde marks one that is not distinguishable from 0.

        >>> str(SourceEffect("a", "A", 3, -0.25, 0.1, False)), str(SourceEffect("a", "A", 3, 0.5, None, None))
        ('-0.25~ ± 0.1', '+0.5')
        """
        error = "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.effect:+.4g}{'~' * (self.distinguishable is False)}{error}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def list_effects(truth: Truth) -> list[SourceEffect]:
    """List the effect of every source that was removed by itself, largest first; empty if none was."""
    if truth.subsets.kind != "removal":
        return []
    means, runs, sources = truth.effects.mean(1), truth.runs, truth.subsets.sources  # (runs, removals)
    found = []
    for column, removed in enumerate(truth.lacking):
        if len(removed) != 1:
            continue
        values, (source,) = means[:, column], removed
        effect, error, mark = float(values.mean()), None, None
        if runs > 1:
            error = float(values.std()) / runs**0.5
            mark = abs(effect) > student_quantile(runs - 1) * error
        found.append(
            SourceEffect(sources.ids[source], sources.names[source], sources.sizes[source], effect, error, mark)
        )
    return sorted(found, key=lambda each: -abs(each.effect))
