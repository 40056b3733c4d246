"""Judges scores by a ground truth, with the test of `imprint.validation`.

That test permutes predictions over the removed sources. Models that are trained on what is left give every example the
weight 1/|S|, so predictions are those that `evaluate` takes the slope of, and both agree on it.
"""

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.result import Attribution
from imprint.evaluation.removal import RemovalCheck
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.statistics import Array
from imprint.validation.verdict import Verdict, judge

MOST = 500  # removals that are judged; of more, so many at random
_SOURCES = 300  # removed in sets: more would take minutes, and have more sources than sets in practice


def judge_truth(result: Attribution, truth: Truth, changes: RemovalCheck, deviation: float | None) -> Verdict:
    """Judge scores by a ground truth.

    changes: predicted and actual changes of F over removals, or over halves.
    deviation: how far the replay that made the scores ends from its recording, if they were made by one.
    """
    subsets, lacking = truth.subsets, [removed for removed in truth.subsets.removed if removed]
    known = (truth.question, result.details.get("chaos"), deviation)
    involved = {source for removed in lacking for source in removed}
    if len(involved) <= _SOURCES and any(len(removed) > 1 for removed in lacking):
        effects = _weigh(truth.match(result, across=True), subsets, truth.replayed)
        return judge(effects, lacking, changes.actual, np.array(subsets.sources.sizes), *known, own=True)
    gone = [subsets.n - len(subsets.examples(index)) for index, removed in enumerate(subsets.removed) if removed]
    chosen = np.sort(np.random.default_rng(0).permutation(len(gone))[:MOST])
    alone = [(place,) for place in range(len(chosen))]  # as if each removal were a source of its own
    return judge(
        changes.predicted[:, chosen], alone, changes.actual[:, :, chosen], np.array(gone)[chosen], *known, own=True
    )


def _weigh(scores: Tensor, subsets: Subsets, replayed: bool) -> Array:
    """Return effects of removing each source, (queries, sources), that add up to those of removing several.

    A replay keeps the weight 1/N of the examples that are left. A model trained on S gives them 1/|S|: F changes by
    (T − Σ s)/|S| − T/N, summed over what is removed, where T is the sum of all scores. Without n of N examples this is
    (T·n/N − Σ s)/(N − n), which adds up as far as removals are of one size.
    """
    n = subsets.n
    if replayed:
        return (-scores / n).numpy()
    left = [len(subsets.examples(index)) for index, removed in enumerate(subsets.removed) if removed]
    shares = torch.tensor(subsets.sources.sizes, dtype=torch.float64) / n
    weighed = (scores.sum(1, keepdim=True) * shares - scores) / (sum(left) / len(left))
    return np.asarray(weighed.numpy())
