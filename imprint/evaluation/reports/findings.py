"""Brings scores and ground truth together, for every part of a report to read from.

Nothing here is computed twice: the metrics are those of `evaluate`, the verdict is that of `imprint.validation`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from imprint.attribution.result import Attribution
from imprint.evaluation.metrics import Metric, evaluate, removal
from imprint.evaluation.removal import RemovalCheck, compare_changes
from imprint.evaluation.reports.guesses import guess_by_size, guess_by_text
from imprint.evaluation.reports.judging import judge_truth
from imprint.evaluation.truth import Truth
from imprint.statistics import Array, centre, student_quantile
from imprint.store.reading import Store
from imprint.validation.verdict import Verdict


@dataclass(frozen=True)
class Effects:
    """Effects of removing some things, sources or sets of them.

    predicted: shape (queries, things).
    actual: shape (runs, queries, things); NaN for what was never removed.
    sizes: how many training examples each of them has.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    predicted: Array
    actual: Array

    @cached_property
    def removed(self) -> list[int]:
        """The places of those that were really removed."""
        return np.flatnonzero(~np.isnan(self.actual).any((0, 1))).tolist()

    @cached_property
    def mean(self) -> "Effects":
        """The same for the mean over queries, as for a single query."""
        return Effects(self.names, self.sizes, self.predicted.mean(0, keepdims=True), self.actual.mean(1)[:, None])

    @cached_property
    def outcome(self) -> Array:
        """Actual effects averaged over runs, shape (queries, things)."""
        return np.asarray(self.actual.mean(0))

    @cached_property
    def error(self) -> Array | None:
        """The standard error of `outcome` over runs; None with a single run."""
        runs = len(self.actual)
        return None if runs < 2 else np.asarray(self.actual.std(0, ddof=1) / np.sqrt(runs))

    @property
    def reach(self) -> float:
        """How many standard errors the 95% interval over runs reaches to either side, Student's."""
        return student_quantile(max(1, len(self.actual) - 1))


@dataclass(frozen=True)
class Findings:
    """Scores beside ground truth.

    metrics: what `evaluate` returns.
    guesses: the same metrics for guesses without a model, by the name of the guess.
    check: predicted and actual changes of F over removals, or over halves.
    verdict: what that validates.
    similarity: of queries and sources, by common words, shape (queries, sources).
    recordings: the recorded runs that scores and ground truth repeat, where they are known.
    notes: warnings of the evaluation itself.
    """

    result: Attribution
    truth: Truth
    metrics: tuple[Metric, ...]
    guesses: Mapping[str, tuple[Metric, ...]]
    check: RemovalCheck
    verdict: Verdict
    similarity: Array | None
    recordings: tuple[str | None, str | None] = (None, None)
    notes: tuple[str, ...] = ()

    @property
    def halves(self) -> bool:
        return self.truth.subsets.kind == "halves"

    @property
    def singles(self) -> bool:
        """Whether every removal took away a single source."""
        return not self.halves and all(len(removed) == 1 for removed in self.truth.lacking)

    @property
    def across(self) -> bool:
        """Whether scores and ground truth answer different questions."""
        return self.result.question != self.truth.question

    @property
    def by_construction(self) -> bool:
        """Whether predictions and ground truth are the same replays of single removals, which agree in any case."""
        same = None in self.recordings or self.recordings[0] == self.recordings[1]
        exact = self.result.labels.removes and self.truth.replayed and not any(self.result.labels.summed)
        return exact and same and self.singles and not self.across

    @cached_property
    def sources(self) -> Effects:
        """Effects of every source by itself."""
        labels, predicted = self.result.labels, self.result.removal_effect.double().cpu().numpy()
        unknown = np.broadcast_to(np.nan, (len(self.check.actual), *predicted.shape))  # takes no memory
        if self.halves:
            return Effects(labels.source_names, labels.source_sizes, predicted, unknown)
        actual = unknown.copy()
        for column, removed in enumerate(self.truth.lacking):
            if len(removed) == 1:
                actual[:, :, removed[0]] = self.check.actual[:, :, column]
        return Effects(labels.source_names, labels.source_sizes, predicted, actual)

    @cached_property
    def removals(self) -> Effects:
        """Effects of the removals that were made; of halves, F relative to its mean over them."""
        subsets, labels = self.truth.subsets, self.result.labels
        chosen = [index for index, removed in enumerate(subsets.removed) if removed]
        gone = tuple(subsets.n - len(subsets.examples(index)) for index in chosen)
        if self.halves:
            names = tuple(f"half {index}" for index in chosen)
            return Effects(names, gone, centre(self.check.predicted), centre(self.check.actual))
        names = tuple(" + ".join(labels.source_names[place] for place in removed) for removed in self.truth.lacking)
        return Effects(names, gone, self.check.predicted, self.check.actual)

    @property
    def shown(self) -> Effects:
        """What tables and single queries show: the removals that were made, or sources where those are single."""
        return self.sources if self.singles or self.halves else self.removals

    @cached_property
    def baseline(self) -> Array:
        """F of each query under models trained on everything, or on halves, shape (queries,)."""
        values, removed = self.truth.values, self.truth.subsets.removed
        whole = [index for index, lacking in enumerate(removed) if self.halves or not lacking]
        return np.asarray(values[:, whole].mean((0, 1)).numpy())


def collect_findings(
    result: Attribution,
    truth: Truth,
    *,
    across: bool = False,
    texts: tuple[list[str], list[str]] | None = None,
    store: Store | None = None,
) -> Findings:
    """Compare scores with ground truth.

    texts: of the queries and of the training examples, for a guess by common words.
    store: where the scores come from, for what it knows about its recording.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = tuple(evaluate(result, truth, across=across))
        changes = compare_changes(truth.match(result, across=across), truth.subsets, truth.changes, truth.replayed)
        check = changes if truth.subsets.kind == "halves" else removal(result, truth, across=across)
        similarity = None if texts is None else guess_by_text(truth.subsets.sources, *texts)
        guesses = {"size": guess_by_size(truth.subsets.sources, check.predicted.shape[0])}
        guesses |= {} if similarity is None else {"text": similarity}
        sign = 1.0 if result.labels.better == "higher" else -1.0  # the guess: whatever is removed was of use
        guessed = {name: tuple(evaluate(sign * scores, truth)) for name, scores in guesses.items()}
    deviation = None if store is None else store.checkpoints[0].measured.deviation
    verdict = judge_truth(result, truth, changes, deviation)
    training = truth.about.get("training")
    recorded = training.get("recording") if isinstance(training, dict) else None
    recordings = None if store is None else store.manifest.request.recording, recorded
    notes = [str(each.message) for each in caught]
    if None not in recordings and recordings[0] != recordings[1]:
        notes.append("the scores and the ground truth are of two different recorded runs")
    return Findings(
        *(result, truth, metrics, guessed, check, verdict),
        None if similarity is None else similarity.numpy(),
        recordings,
        tuple(dict.fromkeys(notes)),
    )
