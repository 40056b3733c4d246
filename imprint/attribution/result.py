"""The result: labelled scores of queries and sources, with sign and units."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from imprint.attribution.comparing import check_comparable, order_sources, subtract
from imprint.attribution.drawing import draw_effects
from imprint.attribution.grouping import Groups, add_up, unite
from imprint.attribution.labels import Labels, Query, describe_groups, describe_query, validated_slope
from imprint.attribution.noise import combine, find_noise_quantile, measure_chaos, widen
from imprint.attribution.replicates import Replicates, find_quantiles, subtract_replicates
from imprint.attribution.saved import load_scores, save_scores
from imprint.attribution.top import (
    Credit,
    Order,
    Top,
    describe_table,
    describe_warnings,
    explain_marks,
    gather_sources,
    import_pandas,
    limit_top,
    link_source,
    rank_scores,
)
from imprint.attribution.uncertainty import (
    ERROR,
    describe_error,
    explain_errors,
    find_distinguishable,
    find_errors,
    has_errors,
    require_errors,
    require_level,
)
from imprint.display import count_of, for_html, for_picture, for_terminal
from imprint.errors import ReadoutError
from imprint.plan import Question
from imprint.tensors.vectors import root_mean_square, root_mean_squares

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_ONE_UNKNOWN = "unknown: those of one result are, or the results have some runs in common and others not"


@runtime_checkable
class Calibrator(Protocol):
    """Ground truth, as far as calibration needs it, such as `imprint.evaluation.truth.Truth`."""

    def slope(self, result: "Attribution", /) -> float: ...


@dataclass(frozen=True)
class Attribution:
    """Scores s(b, q), shape (queries, sources): the change of F(q) per unit of ε/N of the source.

    noise_changes: the change of F(q) in runs that differ from this one by a tiny change of their start alone, shape
        (runs, queries); None where there are none.
    replicates: how the scores of several runs deviate from their mean; of a difference, those of each result. Empty
        where there is nothing to compare. Standard errors of means, sums and differences are found from them.
    """

    labels: Labels
    scores: Tensor
    queries: tuple[Query, ...] = ()
    noise_changes: Tensor | None = None
    replicates: tuple[Replicates, ...] = ()

    def __post_init__(self) -> None:
        if not self.queries:
            object.__setattr__(self, "queries", tuple(range(len(self.scores))))

    @property
    def question(self) -> Question:
        """The question that the scores answer: "this_run" or "expected"; `labels.meaning` has it in words."""
        return self.labels.question

    @property
    def details(self) -> dict[str, Any]:
        """How the scores were read out: the readout, the step of a difference, the reason for a fallback."""
        return self.labels.details

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing the scores: the warnings of the store, and those of the readout."""
        return self.labels.warnings

    @property
    def removal_effect(self) -> Tensor:
        """Predicted change of F(q) if the source were gone, −s/N, shape (queries, sources)."""
        return -self.scores / self.labels.n

    @property
    def noise(self) -> Tensor | None:
        """How far chance moves F(q): the root mean square of `noise_changes`, shape (queries,), or None."""
        return None if self.noise_changes is None else root_mean_squares(self.noise_changes)

    @property
    def standard_error(self) -> Tensor | None:
        """The standard error of each removal effect, shape (queries, sources); None where nothing is known of it.

        Of this run: how far chance moves F(q); that of a sum of k removals is √(k(k + 1)/2) times that of one. Of
        expected effects: their spread over runs, or over the checkpoints of a single run, a lower bound. `details`
        says which, under "error". It is the error by chance: whether effects are right on average, only a comparison
        with removals that were really made tells.
        """
        return find_errors(self.labels, self.labels.counts, self.noise, self.replicates)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of an interval around each removal effect, each of shape (queries, sources).

        level: how often such intervals contain the effect that repetitions would have on average. With Student's t,
            of k runs with k − 1 degrees of freedom, of the noise of a run with one for each run that it is known from.
        """
        level, error = require_level(level), require_errors(self.labels, self.standard_error)
        if self.noise_changes is not None:
            half = error * find_noise_quantile(self.noise_changes, level, difference=self.labels.difference)
        else:
            half = error * find_quantiles(self.replicates, level)
        return self.removal_effect.double() - half, self.removal_effect.double() + half

    @property
    def distinguishable(self) -> Tensor | None:
        """Which effects are distinguishable from 0, shape (queries, sources); None where nothing is known of errors.

        Of this run: those above twice the noise. Of expected effects: those whose 95% interval excludes 0.
        """
        return find_distinguishable(self.removal_effect, self.standard_error, self.noise, self.replicates)

    def with_warnings(self, *messages: str) -> "Attribution":
        """Return the same with more to know before believing the scores."""
        return replace(self, labels=replace(self.labels, warnings=(*self.labels.warnings, *messages)))

    def _widened(self, noise: Tensor) -> Tensor:
        """Return the noise of each effect, shape (queries, sources)."""
        return widen(noise[:, None], self.labels.counts)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, queries: int | slice | Sequence[int] | Tensor) -> "Attribution":
        """Return the attribution of some of the queries, which keep their numbers."""
        chosen = _places(queries, len(self))
        numbers = tuple(self.queries[i] for i in chosen.tolist())
        return self._of_queries(lambda values: values.index_select(-2, chosen), numbers)

    def _of_queries(self, choose: Callable[[Tensor], Tensor], queries: tuple[Query, ...]) -> "Attribution":
        """Return other queries with the same labels; the fingerprint of all queries in order fits no others.

        choose: returns these queries of values of shape (…, queries, columns).
        """
        if queries == self.queries:
            return self
        prints = {
            name: value for name, value in self.labels.fingerprints.items() if name not in ("queries", "measures")
        }
        verdict = None if self.labels.validation is None else replace(self.labels.validation, own=False)
        labels = replace(self.labels, fingerprints=prints, validation=verdict)
        noise = None if self.noise_changes is None else choose(self.noise_changes[..., None])[..., 0]
        replicates = self._change_replicates(choose)
        return Attribution(labels, choose(self.scores), queries, noise, replicates)._with_chaos()

    def _change_replicates(self, linear: Callable[[Tensor], Tensor]) -> tuple[Replicates, ...]:
        return tuple(each.change(linear) for each in self.replicates)

    def _with_chaos(self) -> "Attribution":
        """Return the same with the chaos figure of these queries and sources in its details."""
        details = {name: value for name, value in self.details.items() if name != "chaos"}
        if self.noise is not None and self.scores.numel():
            noise, effect = (root_mean_square(v) for v in (self._widened(self.noise), self.removal_effect))
            if (chaos := measure_chaos(noise, effect)) is not None:
                details["chaos"] = chaos
        return self if details == self.details else replace(self, labels=replace(self.labels, details=details))

    def top(self, k: int = 5, by: Order = "magnitude") -> Top:
        """Return the k sources that matter most to each query.

        by: "magnitude" of the effect, or only its sign: whose removal "raises" or "lowers" F most.
        """
        k = limit_top(k, self.scores.shape[1])
        indices = rank_scores(self.scores, by).topk(k, dim=1).indices
        replicates = self._change_replicates(lambda values: gather_sources(values, indices))
        return Top(self.labels, indices, self.scores.gather(1, indices), self.queries, self.noise, replicates)

    def calibrate(self, truth: Calibrator | None = None) -> "Attribution":
        """Return scores scaled to removals that were really made: times the slope of actual on predicted effects.

        truth: ground truth, which must answer the same question as the scores. By default the validation of the scores
            (`imprint.validate`) gives the slope, if its interval is narrow enough.
        """
        if truth is not None and not isinstance(truth, Calibrator):
            raise ReadoutError(f"calibrate needs a Truth, got a {type(truth).__name__}: Truth.load reads a folder.")
        if self.labels.difference:
            raise ReadoutError("a difference of two results has no ground truth: calibrate both, then subtract.")
        slope = validated_slope(self.labels) if truth is None else truth.slope(self)
        if not slope > 0:  # nothing is flipped, and constant scores have no slope
            raise ReadoutError(
                f"scores and ground truth do not rise together (slope {slope:.3g}): there is no scale to set."
            )
        details = {**self.details, "calibration": slope * self.details.get("calibration", 1.0)}
        noise = None if self.noise_changes is None else slope * self.noise_changes
        own, other = self.labels.validation, self.labels.store_validation
        verdicts = [None if each is None else each.rescaled(slope) for each in (own, other)]
        labels = replace(self.labels, details=details, validation=verdicts[0], store_validation=verdicts[1])
        replicates = self._change_replicates(lambda values: slope * values)
        return replace(self, scores=slope * self.scores, labels=labels, noise_changes=noise, replicates=replicates)

    def mean(self) -> "Attribution":
        """Return the mean over queries, as an attribution of one query that is called "mean"."""
        return self._of_queries(lambda values: values.mean(-2, keepdim=True), ("mean",))

    def group(self, groups: Groups) -> "Attribution":
        """Return the scores of unions of sources: the sums of their scores, without a new simulation.

        groups: lists of the sources' ids, or of their places, by the group's name; or one label per source. Where each
            training example is a source, any `Sources` of the same data will do. Groups may overlap; sources in no
            group are left out, and the result says how many. Sources that share examples cannot be summed.

        The sum is exact for derivatives. Of a store of removals it is an estimate, which the result says: half to twice
        the effect of removing all at once. For the exact value, simulate the unions: `sources.group(groups)`.
        """
        labels, places = unite(self.labels, groups)
        replicates = self._change_replicates(lambda values: add_up(values, places))
        return replace(self, labels=labels, scores=add_up(self.scores, places), replicates=replicates)._with_chaos()

    def __sub__(self, other: "Attribution") -> "Attribution":
        """Return how much larger the removal effects are here than in another result, of another store or model.

        Both need the same queries, and sources with the same ids; N and the order of sources may differ. The squares of
        both noises add up.
        """
        if not isinstance(other, Attribution):
            return NotImplemented
        check_comparable(self.labels, other.labels, (self.queries, other.queries))
        labels, scores = subtract(self.labels, other.labels, (self.removal_effect, other.removal_effect))
        noise, order = combine(self.noise_changes, other.noise_changes), order_sources(self.labels, other.labels)
        theirs = other._change_replicates(lambda values: self.labels.n / other.labels.n * values[..., order])
        replicates = subtract_replicates(self.replicates, theirs)
        labels.details[ERROR] = explain_errors(None if noise is None else self.noise_changes, replicates, _ONE_UNKNOWN)
        return Attribution(labels, scores, self.queries, noise, replicates)._with_chaos()

    def __repr__(self) -> str:
        queries, sources = self.scores.shape
        what = "difference of two results, " if self.labels.difference else ""
        head = f"Attribution: {what}{count_of(queries, 'query', 'queries')} × {sources} sources"
        credits = self.mean().top(min(5, sources))[0]
        mean = ", ".join(f"{for_terminal(credit.name)} {credit.format_effect()}" for credit in credits)
        lines = self.top(min(3, sources)).describe(earlier=credits)
        head += ", largest effects of either sign first"
        return "\n".join([head, f"  mean over queries: {mean}", *lines, *describe_warnings(self.labels)])

    def _repr_html_(self) -> str:
        sources, texts, shown, rows = self.scores.shape[1], self.labels.query_texts, list[Credit](), []
        for credits in self[: min(10, len(self))].top(min(5, sources)):
            cells = "".join(
                f"<td>{link_source(c)} <b>{c.format_effect()}</b>{c.format_error(' ± standard error ')}</td>"
                for c in credits
            )
            rows.append(f"<tr><th>{for_html(describe_query(credits[0].query, texts))}</th>{cells}</tr>")
            shown += credits
        more = [f"{len(self) - 10} more queries: to_pandas() has all of them"] if len(self) > 10 else []
        errors = describe_error(self.labels, has_errors(self.noise_changes, self.replicates))
        notes = [*more, *explain_marks(shown), *errors, *describe_groups(self.labels)]
        under = "".join(f"<p>{for_html(note)}</p>" for note in notes)
        warned = "".join(f"<p><b>warning:</b> {for_html(message)}</p>" for message in self.warnings)
        caption = f"{for_html(self.labels.unit)}<br>{for_html(self.labels.meaning)}<br>{for_html(self.labels.standing)}"
        return f"<table><caption>{caption}</caption>{''.join(rows)}</table>{under}{warned}"

    def to_pandas(
        self, values: Literal["removal_effect", "scores", "standard_error", "distinguishable"] = "removal_effect"
    ) -> "pd.DataFrame":
        """Return queries × sources as a table with the sources' ids as columns.

        values: the effects, the scores, the standard errors of the effects, or which effects are "distinguishable"
            from 0.

        The name of the columns says which question the numbers answer; `attrs` has it in words, with the unit, and
        what is known of the sources under "about".
        """
        table = require_errors(self.labels, getattr(self, values)).numpy()
        frame: pd.DataFrame = import_pandas().DataFrame(table, list(self.queries), list(self.labels.source_ids))
        frame.attrs.update(describe_table(self.labels))
        if known := {name: vars(each) for name, each in zip(frame, self.labels.source_about, strict=False) if each}:
            frame.attrs["about"] = known
        return frame.rename_axis(index="query", columns=f"source, {self.question.replace('_', ' ')}")

    def plot(self, query: int | None = None, k: int = 12, ax: "Axes | None" = None) -> "Axes":
        """Plot the k largest removal effects as bars: of the query with this number, or of the mean of all.

        Where standard errors are known, lines show the 95% intervals.
        """
        if query is not None and query not in self.queries:
            raise ReadoutError(f"there is no query {query}: the attribution has {_numbers(self.queries)}.")
        shown = self.mean() if query is None else self[self.queries.index(query)]
        marks = None if shown.distinguishable is None else shown.distinguishable[0]
        ends = None if shown.standard_error is None else torch.cat(shown.interval())
        title = for_picture(describe_query(shown.queries[0], self.labels.query_texts))
        return draw_effects(self.labels, shown.removal_effect[0], marks, ends, title, k, ax)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one .safetensors file, with a checksum of scores and labels."""
        if Path(path).suffix != ".safetensors":
            raise ReadoutError(
                f"an attribution is saved as .safetensors, got {os.fspath(path)!r}: for a table, "
                "result.to_pandas().to_csv(...), or `imprint attribute --out scores.csv`."
            )
        save_scores(Path(path), self.labels.to_json(), self.scores, self.queries, self.noise_changes, self.replicates)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Attribution":
        """Read what `save` wrote; refuse a file that was changed since, or that does not fit its labels.

        Files of versions that wrote no checksum are read, and the log says so. Those that name no question are of
        versions that knew one only: "expected".
        """
        about, scores, queries, noise, replicates = load_scores(Path(path), {each.name for each in fields(Labels)})
        return cls(Labels.from_json(about), scores, queries, noise, replicates)  # type: ignore[arg-type]


def _places(queries: int | slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """Return the places of some of so many queries."""
    try:
        if isinstance(queries, str) or (isinstance(queries, list | tuple) and any(isinstance(q, str) for q in queries)):
            raise TypeError("names are not places")
        return torch.arange(count)[[queries] if isinstance(queries, int) else queries]
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ReadoutError(
            f"an attribution is indexed by the places of its {count} queries, got {queries!r}; of a source, "
            'result.to_pandas()["its id"] has the effects, and result.scores one column for each.'
        ) from error


def _numbers(queries: tuple[Query, ...]) -> str:
    return ", ".join(map(str, queries[:5])) + (", …" if len(queries) > 5 else "")
