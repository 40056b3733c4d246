"""The result: labelled scores of queries and sources, with sign and units; and the calls that make it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.saved import load_scores, save_scores
from imprint.data import Collate, Data, query_batches
from imprint.display import for_html, for_picture, for_terminal
from imprint.errors import MissingExtra, ReadoutError
from imprint.readout.reader import Kind, Reader
from imprint.runtime.notices import Notices
from imprint.runtime.progress import Advance, Progress
from imprint.runtime.turns import settle_child
from imprint.sources import Sources
from imprint.store.fingerprint import of_batches, of_sources, probe_measures, recognise_data
from imprint.store.reading import Store
from imprint.task import Better, Task

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Order = Literal["magnitude", "raises", "lowers"]
Query = int | Literal["mean"]
"""The number of a query, or the mean over queries."""


class ReadoutOptions(TypedDict, total=False):
    """The options of `attribute`, for its two signatures."""

    readout: Kind
    by: Order
    batch_size: int
    collate_fn: Collate | None
    step: float | None
    memory: int | str | None
    progress: bool | Advance


class Credit(NamedTuple):
    """What one source does to one query; `removal_effect` is the predicted change of F were the source gone."""

    query: Query
    source: str
    name: str
    score: float
    removal_effect: float


@dataclass(frozen=True)
class Labels:
    """What scores are about: the sources, N, and the measurement F with its direction.

    fingerprints: hashes of the "store", of the training "data", of the "sources", and of the "queries" where the scores
        are of all of them in their order; and the "parameters" by name, with their shapes.
    warnings: what to know before believing the scores: those of the store, and what the readout has found.
    """

    n: int
    source_ids: tuple[str, ...]
    source_names: tuple[str, ...]
    source_sizes: tuple[int, ...]
    measure: str
    better: Better
    details: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What a removal effect is measured in, with the meaning of its sign."""
        meaning = {"lower": ": + means the source helps", "higher": ": − means the source helps", None: ""}
        return f"change of {self.measure} if the source were removed{meaning[self.better]}"


@dataclass(frozen=True)
class Top:
    """The first sources of each query: `indices` and `scores` have shape (queries, k).

    Indexing and iterating give lists of `Credit`, one list for each query; `queries` are their numbers.
    """

    labels: Labels
    indices: Tensor
    scores: Tensor
    queries: tuple[Query, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing the scores."""
        return self.labels.warnings

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, query: int) -> list[Credit]:
        labels, number = self.labels, self.queries[query]
        return [
            Credit(number, labels.source_ids[i], labels.source_names[i], score, -score / labels.n)
            for i, score in zip(self.indices[query].tolist(), self.scores[query].tolist(), strict=True)
        ]

    def __iter__(self) -> Iterator[list[Credit]]:
        return (self[query] for query in range(len(self)))

    def __repr__(self) -> str:
        """As many sources of the first five queries as fit on lines of 120 characters."""
        lines = [for_terminal(self.labels.unit)]
        for credits in list(self)[:5]:
            head = f"  {for_terminal(called(credits[0].query))}: "
            shown = [f"{for_terminal(credit.name)} {credit.removal_effect:+.3g}" for credit in credits]
            ends = accumulate(len(each) + len(", ") for each in shown)
            fit = max(1, sum(len(head) + end <= 120 for end in ends))
            lines.append(head + ", ".join(shown[:fit] + ["…"] * (fit < len(shown))))
        lines += ["  …"] * (len(self) > 5)
        return "\n".join([*lines, *(f"warning: {for_terminal(message)}" for message in self.warnings)])

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: what was measured, and for each query its sources."""
        labels = self.labels
        queries = [[credit._asdict() for credit in credits] for credits in self]
        return {
            **{"n": labels.n, "measure": labels.measure, "better": labels.better, "unit": labels.unit},
            **{"details": labels.details, "warnings": list(labels.warnings), "queries": queries},
        }

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each query and source in the list."""
        frame: pd.DataFrame = _pandas().DataFrame([credit._asdict() for credits in self for credit in credits])
        return frame


@runtime_checkable
class Calibrator(Protocol):
    """Ground truth, as far as calibration needs it: `imprint.evaluation.truth.Truth` is one."""

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
        """The same attribution of some of the queries, which keep their numbers."""
        chosen = _places(queries, len(self))
        return self._of(self.scores[chosen], tuple(self.queries[i] for i in chosen.tolist()))

    def _of(self, scores: Tensor, queries: tuple[Query, ...]) -> "Attribution":
        """The same of other queries, which are not those of the fingerprint unless they are all of them in order."""
        if queries == self.queries:
            return self
        prints = {
            name: value for name, value in self.labels.fingerprints.items() if name not in ("queries", "measures")
        }
        return Attribution(replace(self.labels, fingerprints=prints), scores, queries)

    def top(self, k: int = 5, by: Order = "magnitude") -> Top:
        """The k sources that matter most to each query.

        by: "magnitude" of the effect, or only its sign: whose removal "raises" or "lowers" F most.
        """
        k = _checked_k(k, self.scores.shape[1])
        indices = _rank(self.scores, by).topk(k, dim=1).indices
        return Top(self.labels, indices, self.scores.gather(1, indices), self.queries)

    def calibrate(self, truth: Calibrator) -> "Attribution":
        """The same with effects as large as the truth's: scores times the slope of actual on predicted effects."""
        if not isinstance(truth, Calibrator):
            raise ReadoutError(f"calibrate needs a Truth, got a {type(truth).__name__}: Truth.load reads a folder.")
        slope = truth.slope(self)
        if not slope > 0:  # nothing is flipped, and constant scores have no slope
            raise ReadoutError(f"scores and truth do not rise together (slope {slope:.3g}): there is no scale to set.")
        details = {**self.details, "calibration": slope * self.details.get("calibration", 1.0)}
        return replace(self, scores=slope * self.scores, labels=replace(self.labels, details=details))

    def mean(self) -> "Attribution":
        """The mean over queries, as an attribution of one that is called "mean"."""
        return self._of(self.scores.mean(0, keepdim=True), ("mean",))

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
            rows.append(f"<tr><th>{for_html(called(credits[0].query))}</th>{cells}</tr>")
        more = f"<p>{len(self) - 10} more queries</p>" if len(self) > 10 else ""
        told = "".join(f"<p><b>warning:</b> {for_html(message)}</p>" for message in self.warnings)
        return f"<table><caption>{for_html(self.labels.unit)}</caption>{''.join(rows)}</table>{more}{told}"

    def to_pandas(self, values: Literal["removal_effect", "scores"] = "removal_effect") -> "pd.DataFrame":
        """Queries × sources as a table with the sources' ids as columns."""
        table = getattr(self, values).numpy()
        frame: pd.DataFrame = _pandas().DataFrame(table, list(self.queries), list(self.labels.source_ids))
        return frame.rename_axis(index="query", columns="source")

    def plot(self, query: int | None = None, k: int = 12, ax: "Axes | None" = None) -> "Axes":
        """Bars of the k largest removal effects: of the query with this number, or of the mean over all queries."""
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
        """Read what `save` wrote. A file that was changed since, or does not fit its labels, is refused.

        Files of versions that wrote no checksum are read, and the log says so.
        """
        about, scores, queries = load_scores(Path(path), {each.name for each in fields(Labels)})
        labels: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about.items()}
        return cls(Labels(**labels), scores, queries)  # type: ignore[arg-type]


@overload
def attribute(
    task: Task,
    store: Store | str | os.PathLike[str],
    queries: Any,
    *,
    top: None = None,
    **options: Unpack[ReadoutOptions],
) -> Attribution: ...
@overload
def attribute(
    task: Task, store: Store | str | os.PathLike[str], queries: Any, *, top: int, **options: Unpack[ReadoutOptions]
) -> Top: ...
def attribute(
    task: Task,
    store: Store | str | os.PathLike[str],
    queries: Any,
    *,
    readout: Kind = "jvp",
    top: int | None = None,
    by: Order = "magnitude",
    batch_size: int = 64,
    collate_fn: Collate | None = None,
    step: float | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Attribution | Top:
    """Score every query against every source of a store, with forward passes only.

    store: what `simulate` returned, or its folder.
    queries: a map-style dataset, a tuple or mapping of tensors with one row per query, or a generator of batches.
    readout: "jvp" (default), "central", "literal" or "gradient"; see `imprint.readout.reader`.
    top: keep only this many sources per query, without ever holding all scores; `by` orders them.
    step: relative step of the "central" readout; calibrated by default.
    memory: what the readout may use, in bytes or as "4GiB"; by default a share of what is free.
    progress: True for a line on standard error, False for none, or a function of (done, total).
    """
    settle_child()
    store = Store.of(store)
    batches = query_batches(queries, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    reader = Reader(task, store, readout=readout, step=step, memory=memory)
    k = None if top is None else _checked_k(top, len(store))
    _rank(torch.zeros(1), by)
    count, batch = max(batches, key=lambda pair: pair[0])
    chunks = reader.chunks(batch, count)
    bar = Progress("attributing", sum(count for count, _ in batches) * len(store), "scores", progress)
    parts: list[list[Tensor]] = [[] for _ in batches]
    best: list[tuple[Tensor, Tensor] | None] = [None for _ in batches]
    firsts = [0, *accumulate(count for count, _ in batches)]
    order = list(product(chunks, range(len(batches))))
    if reader.readout == "gradient":  # one backward per query: all sources of a batch before the next batch
        order.sort(key=lambda step: step[1])
    try:
        for (start, stop), index in order:
            count, batch = batches[index]
            block = reader.block(start, stop, batch, count, firsts[index]).cpu()
            if k is None:
                parts[index].append(block)
            else:
                best[index] = _merge(best[index], block, start, k, by)
            bar.advance(count * (stop - start))
    finally:
        bar.close()
    request = store.manifest.request
    labels = Labels(
        store.n,
        store.source_ids,
        store.source_names,
        store.source_sizes,
        task.measure_name,
        task.better,
        {"readout": reader.readout, **reader.details},
        {
            "store": store.sha256,
            **{"data": asdict(request.data), "sources": request.sources},
            "parameters": {name: spec.to_json() for name, spec in request.parameters.items()},
            "queries": of_batches(batches),
            "measures": probe_measures(task, batches),
        },
        _warned(reader),
    )
    if k is None:
        return Attribution(labels, torch.cat([torch.cat(blocks, dim=1) for blocks in parts]))
    kept = [entry for entry in best if entry is not None]
    scores = torch.cat([scores for _, scores in kept])
    return Top(labels, torch.cat([indices for indices, _ in kept]), scores, tuple(range(len(scores))))


def _warned(reader: Reader) -> tuple[str, ...]:
    """The warnings of a readout, of which those that are not the store's are shown."""
    notices = Notices(reader.store.warnings)
    for message in reader.warnings:
        notices.add(message)
    return notices.messages


def self_influence(
    task: Task,
    store: Store | str | os.PathLike[str],
    data: Any,
    *,
    batch_size: int = 64,
    collate_fn: Collate | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Tensor:
    """s(b, b) of each source on the example in its own row of `data`, shape (sources,).

    With one source per example and the training data this is each example's influence on itself; data in another order
    is refused. Mislabelled examples stand out: for a loss with the most negative values, for a margin with the largest.
    Compare with the plain loss of each example (`imprint.evaluation.example_losses`), which often finds them better.
    """
    settle_child()
    store = Store.of(store)
    examples = Data(data, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    if len(examples) != len(store):
        raise ReadoutError(
            f"self-influence pairs sources and examples: {len(store)} sources, {len(examples)} examples."
        )
    _refuse_mispaired(store, examples)
    reader = Reader(task, store, memory=memory)
    bar = Progress("self-influence", len(store), "examples", progress)
    parts = []
    try:
        for indices, batch in examples.batches():
            parts.append(reader.diagonal(batch, int(indices[0]), int(indices[-1]) + 1).cpu())
            bar.advance(len(indices))
    finally:
        bar.close()
    return torch.cat(parts)


def _refuse_mispaired(store: Store, examples: Data) -> None:
    """Refuse rows that are not the examples of their sources, where each example is a source."""
    if len(store) != store.n or max(store.source_sizes) > 1:
        return
    request, each = store.manifest.request, tuple(np.array([index]) for index in range(store.n))
    in_order = request.sources == of_sources(Sources(store.source_ids, store.source_names, each))
    data = recognise_data(vars(request.data), examples)
    if data.by != "none" and in_order != data.same:
        raise ReadoutError(
            "self-influence pairs each source with its own example: these are not the training examples in the order "
            f"of the sources{data.remark}."
        )
    if data.same:
        data.warn()


def _places(queries: int | slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """The places of some of so many queries."""
    try:
        if isinstance(queries, str) or (isinstance(queries, list | tuple) and any(isinstance(q, str) for q in queries)):
            raise TypeError("names are not places")
        return torch.arange(count)[[queries] if isinstance(queries, int) else queries]
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ReadoutError(
            f"an attribution is indexed by the places of its {count} queries, got {queries!r}; of a source, "
            'result.to_pandas()["its id"] has the effects, and result.scores one column for each.'
        ) from error


def _rank(scores: Tensor, by: Order) -> Tensor:
    if by == "magnitude":
        return scores.abs()
    if by in ("raises", "lowers"):
        return -scores if by == "raises" else scores  # a removal's effect is −s/N
    raise ReadoutError(f'sources can be ordered by "magnitude", "raises" or "lowers", not by {by!r}.')


def _merge(best: tuple[Tensor, Tensor] | None, block: Tensor, start: int, k: int, by: Order) -> tuple[Tensor, Tensor]:
    """The k first of what was best so far and a new block of sources."""
    indices = torch.arange(start, start + block.shape[1]).expand_as(block)
    if best is not None:
        indices, block = torch.cat([best[0], indices], 1), torch.cat([best[1], block], 1)
    order = _rank(block, by).topk(min(k, block.shape[1]), dim=1).indices
    return indices.gather(1, order), block.gather(1, order)


def called(query: Query) -> str:
    """A query by its number, in words."""
    return "mean over queries" if query == "mean" else f"query {query}"


def _numbers(queries: tuple[Query, ...]) -> str:
    return ", ".join(map(str, queries[:5])) + (", …" if len(queries) > 5 else "")


def _checked_k(k: int, sources: int) -> int:
    if k < 1:
        raise ReadoutError(f"top needs at least 1 source, got {k}.")
    return min(k, sources)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("to_pandas", "report") from error
    return pandas
