"""The result: labelled scores of queries and sources, with sign and units."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from imprint.attribution.labels import Labels, Query, describe_query
from imprint.attribution.saved import load_scores, save_scores
from imprint.attribution.top import Order, Top, import_pandas, limit_top, rank_scores
from imprint.display import for_html, for_picture, for_terminal
from imprint.errors import MissingExtra, ReadoutError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@runtime_checkable
class Calibrator(Protocol):
    """Ground truth, as far as calibration needs it, such as `imprint.evaluation.truth.Truth`."""

    def slope(self, result: "Attribution", /) -> float: ...


@dataclass(frozen=True)
class Attribution:
    """Scores s(b, q), shape (queries, sources): the change of F(q) per unit of ε/N of the source."""

    labels: Labels
    scores: Tensor
    queries: tuple[Query, ...] = ()

    def __post_init__(self) -> None:
        if not self.queries:
            object.__setattr__(self, "queries", tuple(range(len(self.scores))))

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

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, queries: int | slice | Sequence[int] | Tensor) -> "Attribution":
        """Return the attribution of some of the queries, which keep their numbers."""
        chosen = _places(queries, len(self))
        return self._of_queries(self.scores[chosen], tuple(self.queries[i] for i in chosen.tolist()))

    def _of_queries(self, scores: Tensor, queries: tuple[Query, ...]) -> "Attribution":
        """Return other queries with the same labels; the fingerprint of all queries in order fits no others."""
        if queries == self.queries:
            return self
        prints = {
            name: value for name, value in self.labels.fingerprints.items() if name not in ("queries", "measures")
        }
        return Attribution(replace(self.labels, fingerprints=prints), scores, queries)

    def top(self, k: int = 5, by: Order = "magnitude") -> Top:
        """Return the k sources that matter most to each query.

        by: "magnitude" of the effect, or only its sign: whose removal "raises" or "lowers" F most.
        """
        k = limit_top(k, self.scores.shape[1])
        indices = rank_scores(self.scores, by).topk(k, dim=1).indices
        return Top(self.labels, indices, self.scores.gather(1, indices), self.queries)

    def calibrate(self, truth: Calibrator) -> "Attribution":
        """Return scores scaled to the ground truth: times the slope of actual on predicted effects."""
        if not isinstance(truth, Calibrator):
            raise ReadoutError(f"calibrate needs a Truth, got a {type(truth).__name__}: Truth.load reads a folder.")
        slope = truth.slope(self)
        if not slope > 0:  # nothing is flipped, and constant scores have no slope
            raise ReadoutError(
                f"scores and ground truth do not rise together (slope {slope:.3g}): there is no scale to set."
            )
        details = {**self.details, "calibration": slope * self.details.get("calibration", 1.0)}
        return replace(self, scores=slope * self.scores, labels=replace(self.labels, details=details))

    def mean(self) -> "Attribution":
        """Return the mean over queries, as an attribution of one query that is called "mean"."""
        return self._of_queries(self.scores.mean(0, keepdim=True), ("mean",))

    def __repr__(self) -> str:
        queries, sources = self.scores.shape
        head = f"Attribution: {queries} {'query' if queries == 1 else 'queries'} × {sources} sources"
        credits = self.mean().top(min(5, sources))[0]
        mean = ", ".join(f"{for_terminal(credit.name)} {credit.removal_effect:+.3g}" for credit in credits)
        return f"{head}\n  mean over queries: {mean}\n{self.top(min(3, sources))!r}"

    def _repr_html_(self) -> str:
        sources = self.scores.shape[1]
        rows = []
        for credits in list(self[: min(10, len(self))].top(min(5, sources))):
            cells = "".join(f"<td>{for_html(c.name)} <b>{c.removal_effect:+.3g}</b></td>" for c in credits)
            rows.append(f"<tr><th>{for_html(describe_query(credits[0].query))}</th>{cells}</tr>")
        more = f"<p>{len(self) - 10} more queries</p>" if len(self) > 10 else ""
        warned = "".join(f"<p><b>warning:</b> {for_html(message)}</p>" for message in self.warnings)
        return f"<table><caption>{for_html(self.labels.unit)}</caption>{''.join(rows)}</table>{more}{warned}"

    def to_pandas(self, values: Literal["removal_effect", "scores"] = "removal_effect") -> "pd.DataFrame":
        """Return queries × sources as a table with the sources' ids as columns."""
        table = getattr(self, values).numpy()
        frame: pd.DataFrame = import_pandas().DataFrame(table, list(self.queries), list(self.labels.source_ids))
        return frame.rename_axis(index="query", columns="source")

    def plot(self, query: int | None = None, k: int = 12, ax: "Axes | None" = None) -> "Axes":
        """Plot the k largest removal effects as bars: of the query with this number, or of the mean of all."""
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise MissingExtra("plot", "report") from error
        if ax is None:
            ax = plt.subplots(layout="constrained")[1]
        if query is not None and query not in self.queries:
            raise ReadoutError(f"there is no query {query}: the attribution has {_numbers(self.queries)}.")
        effect = self.removal_effect.mean(0) if query is None else self.removal_effect[self.queries.index(query)]
        order = effect.abs().argsort(descending=True)[:k].flip(0)
        helps = effect[order] * (1 if self.labels.better != "higher" else -1) >= 0
        colours = ["#2a6f97" if positive else "#c8553d" for positive in helps.tolist()]
        names = [for_picture(self.labels.source_names[i]) for i in order.tolist()]
        ax.barh(range(len(names)), effect[order].tolist(), color=colours, tick_label=names)
        ax.axvline(0, color="0.3", linewidth=0.8)
        ax.set_xlabel(for_picture(self.labels.unit))
        ax.set_title("mean over queries" if query is None else f"query {query}")
        return ax

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one .safetensors file, with a checksum of scores and labels."""
        if Path(path).suffix != ".safetensors":
            raise ReadoutError(
                f"an attribution is saved as .safetensors, got {os.fspath(path)!r}: for a table, "
                "result.to_pandas().to_csv(...), or `imprint attribute --out scores.csv`."
            )
        save_scores(Path(path), vars(self.labels), self.scores, self.queries)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Attribution":
        """Read what `save` wrote; refuse a file that was changed since, or that does not fit its labels.

        Files of versions that wrote no checksum are read, and the log says so.
        """
        about, scores, queries = load_scores(Path(path), {each.name for each in fields(Labels)})
        labels: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about.items()}
        return cls(Labels(**labels), scores, queries)  # type: ignore[arg-type]


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
