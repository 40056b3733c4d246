"""Lists what the removals of a ground truth did, one by one, for `imprint retrain` to print."""

from typing import Any, NamedTuple

from imprint.evaluation.truth import Truth
from imprint.statistics import half_interval


class RemovedSources(NamedTuple):
    """One removal: the ids and names of its sources, and what it did to the mean of F over queries.

    error: half the 95% interval of the effect over runs; None with a single run.
    """

    sources: tuple[str, ...]
    names: tuple[str, ...]
    effect: float
    error: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"sources": list(self.sources), "effect": self.effect, "error": self.error}


def list_effects(truth: Truth) -> list[RemovedSources]:
    """Return the removals of a ground truth, the largest effects first; none for models trained on halves."""
    if truth.subsets.kind == "halves":
        return []
    known, runs = truth.subsets.sources, truth.significant_effects.mean(1).numpy()
    mean, error = runs.mean(0), half_interval(runs)
    found = []
    for column, removed in enumerate(truth.lacking):
        ids, names = (tuple(all_[place] for place in removed) for all_ in (known.ids, known.names))
        found.append(RemovedSources(ids, names, float(mean[column]), None if error is None else float(error[column])))
    return sorted(found, key=lambda each: -abs(each.effect))
