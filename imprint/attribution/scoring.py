"""Score every query against every source of a store: `attribute`, and `self_influence` of training examples.

`Scorer` does the same for a service, which reads one batch after another from the same store.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.collecting import Collected
from imprint.attribution.labels import SHARED_EXAMPLES, Labels, describe_replay
from imprint.attribution.noise import assess_noise
from imprint.attribution.replicates import Replicates, replicate
from imprint.attribution.result import Attribution
from imprint.attribution.top import Order, Top, limit_top, rank_scores
from imprint.attribution.uncertainty import ERROR, LACKING, explain_errors
from imprint.batches import is_columnar
from imprint.data import Collate, Data, query_batches, read_texts
from imprint.errors import ReadoutError, TooLarge
from imprint.readout.kernels import ReadoutName
from imprint.readout.reader import Reader, repeat_if_stale
from imprint.readout.sizes import pick_rows
from imprint.runtime.memory import budget
from imprint.runtime.notices import Notices
from imprint.runtime.progress import Advance, Progress
from imprint.runtime.turns import settle_child
from imprint.sources import Sources
from imprint.store.fingerprint import are_sources, of_batches, probe_measures, recognise_data
from imprint.store.reading import Store
from imprint.task import Batch, Task
from imprint.tensors.vectors import root_mean_square, root_mean_squares
from imprint.validation.record import find_verdict, has_witnesses, read_validation
from imprint.validation.verdict import QUERIES
from imprint.validation.witnesses import judge_queries


class ReadoutOptions(TypedDict, total=False):
    """The options of `attribute`, for its two signatures."""

    readout: ReadoutName | None
    by: Order
    batch_size: int
    collate_fn: Collate | None
    step: float | None
    memory: int | str | None
    progress: bool | Advance


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
    readout: ReadoutName | None = None,
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
    queries: a map-style dataset, a tuple or mapping of tensors with one row per query, or a generator of batches. The
        result names the queries of `imprint.language.Completions` by their texts.
    readout: "jvp", "central", "literal" or "gradient", and "removed" for stores of a repeated run; see
        `imprint.readout.kernels`. By default "jvp", or "removed" for those.
    top: keep only this many sources per query, without ever holding all scores; `by` orders them.
    step: relative step of the "central" readout; calibrated by default.
    memory: what the readout may use, in bytes or as "4GiB"; by default a share of what is available.
    progress: True for a line on standard error, False for none, or a function of (done, total).
    """
    settle_child()
    store = Store.of(store)
    batches = query_batches(queries, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    reader = Reader(task, store, readout=readout, step=step, memory=memory)
    k = None if top is None else limit_top(top, len(store))
    rank_scores(torch.zeros(1), by)
    count, batch = max(batches, key=lambda pair: pair[0])
    chunks = reader.chunks(batch, count)
    bar = Progress("attributing", 0, "scores", progress)
    firsts = [0, *accumulate(count for count, _ in batches)]
    lacking = _find_lacking(reader, firsts[-1] * (k or len(store)), memory)

    def collect() -> Collected:
        bar.total += firsts[-1] * len(store)
        found = Collected(len(batches), None if lacking else reader.units, k, by)
        read = reader.block_with_deviations if found.units else lambda *given: (reader.block(*given), None)
        for (start, stop), index in _order_blocks(reader, chunks, len(batches)):
            count, batch = batches[index]
            block, deviations = read(start, stop, batch, count, firsts[index])
            found.add(index, start, block.cpu(), None if deviations is None else deviations.cpu())
            bar.advance(count * (stop - start))
        return found

    try:
        found = repeat_if_stale(reader, collect)
    finally:
        bar.close()
    noise, scores, replicates = _read_noise(reader, batches), found.scores, found.replicates
    effect = (found.squares / (firsts[-1] * len(store))) ** 0.5 / store.n
    asked = {"queries": of_batches(batches), "measures": probe_measures(task, batches)}
    labels = replace(_make_labels(task, reader, noise, effect, asked), query_texts=read_texts(queries, firsts[-1]))
    labels.details[ERROR] = explain_errors(noise, replicates, lacking)
    if k is None:
        result = Attribution(labels, scores, noise_changes=noise, replicates=replicates)
        return _with_verdict(result, task, store, batches, memory)
    rms = None if noise is None else root_mean_squares(noise)
    return Top(labels, found.indices, scores, tuple(range(len(scores))), rms, replicates)


def _find_lacking(reader: Reader, scores: int, memory: int | str | None) -> str:
    """Say why there will be no deviations of runs from so many scores; empty if there will be."""
    if reader.units is None:
        return LACKING[reader.store.question]
    wanted, allowed = 8 * scores * len(reader.units), budget(memory, reader.task.device)
    if wanted <= allowed:
        return ""
    return (
        f"not kept: all scores of {len(reader.units)} {reader.units.over} take {wanted / 1e9:.2g} GB, more than the "
        f"{allowed / 1e9:.2g} GB allowed. Ask for the first sources (top=), attribute fewer queries at a time, or give "
        "memory="
    )


def _with_verdict(
    result: Attribution, task: Task, store: Store, batches: Sequence[tuple[int, Batch]], memory: int | str | None
) -> Attribution:
    """Return a result with the verdict on its own queries, if its store was validated and they are enough."""
    validation = read_validation(store)
    if validation is None or len(result) < QUERIES or not has_witnesses(store):
        return result
    verdict = judge_queries(task, store, validation, result.removal_effect, batches, memory)
    return replace(result, labels=replace(result.labels, validation=verdict))


def _order_blocks(reader: Reader, chunks: list[tuple[int, int]], batches: int) -> list[tuple[tuple[int, int], int]]:
    """Return pairs of a chunk of sources and the number of a batch, in the order that computes least."""
    order = list(product(chunks, range(batches)))
    if reader.readout == "gradient":  # one backward per query: all sources of a batch before the next batch
        order.sort(key=lambda step: step[1])
    return order


def _read_noise(reader: Reader, batches: Sequence[tuple[int, Batch]]) -> Tensor | None:
    """Return how chance moves F of every query, shape (runs, queries); None where the store does not know."""
    changes = [reader.noise_changes(batch, count) for count, batch in batches]
    found = [each.cpu() for each in changes if each is not None]
    return torch.cat(found, dim=1) if found else None


def _make_labels(
    task: Task, reader: Reader, noise: Tensor | None, effect: float, asked: Mapping[str, Any], *, show: bool = True
) -> Labels:
    """Return what the scores are about, with all warnings.

    effect: the root mean square of removal effects.
    asked: the fingerprints of the queries.
    show: whether warnings that the store did not show are shown.
    """
    store = reader.store
    request, first = store.manifest.request, store.checkpoints[0]
    chaos, warnings = assess_noise(noise, effect)
    return Labels(
        store.n,
        store.source_ids,
        store.source_names,
        store.source_sizes,
        task.measure_name,
        task.better,
        {
            **{"readout": reader.readout, **reader.details, **chaos, **describe_replay(first.measured, first.steps)},
            **({} if store.manifest.shared is None else {SHARED_EXAMPLES: store.manifest.shared}),
        },
        {
            **{"store": store.sha256, "model": store.model_sha256},
            **{"data": vars(request.data), "sources": request.sources, "plan": request.plan.to_json()},
            "parameters": {name: spec.to_json() for name, spec in request.parameters.items()},
            **asked,
            **({} if request.recording is None else {"recording": request.recording}),
            **({} if store.signed is None else {"signer": store.signed.key}),
        },
        _show_warnings(reader, warnings) if show else tuple(dict.fromkeys((*reader.warnings, *warnings))),
        store.question,
        store.removes,
        validation=(verdict := find_verdict(store, task.measure_name)),
        store_validation=verdict,
        source_about=store.about,
    )


@dataclass(frozen=True)
class Scored:
    """What a readout finds of some queries: scores, how those of each unit deviate, and how chance moves F.

    Shapes (queries, sources), (units, queries, sources) and (runs, queries); None where a store does not know.
    """

    scores: Tensor
    deviations: Tensor | None
    noise: Tensor | None

    @classmethod
    def join(cls, parts: "Sequence[Scored]", places: Sequence[int]) -> "Scored":
        """Return what was read in parts. places: of each query in turn, its place among all of them."""
        order = torch.tensor(places).argsort()

        def join(found: list[Tensor | None], dim: int) -> Tensor | None:
            known = [each for each in found if each is not None]
            return torch.cat(known, dim).index_select(dim, order) if known else None

        scores = join([part.scores for part in parts], 0)
        assert scores is not None
        return cls(scores, join([part.deviations for part in parts], 1), join([part.noise for part in parts], 1))


class Scorer:
    """A store made ready to attribute batches of queries, one after another.

    Unlike `attribute`, it prepares the readout once, says nothing on standard error, and leaves out what is about all
    queries of a call: their fingerprints, and the verdict on their own effects. Not for several threads at once.

    >>> import imprint
    >>> task = imprint.Task.classifier(torch.nn.Linear(2, 2))
    >>> data = torch.eye(2), torch.tensor([0, 1])
    >>> sources, plan = imprint.Sources.per_example(2), imprint.Plan(steps=5, lr=0.1)
    >>> store = imprint.simulate(task, data, sources, plan, progress=False)
    >>> [result.scores.shape for result in Scorer(task, store).attribute(data, 2, [(0, 1), (1, 2)])]
    [torch.Size([1, 2]), torch.Size([1, 2])]
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        readout: ReadoutName | None = None,
        step: float | None = None,
        memory: int | str | None = None,
    ) -> None:
        self.task, self.store = task, store
        self.reader = Reader(task, store, readout=readout, step=step, memory=memory)

    def describe(self) -> Labels:
        """Return what scores are about, whatever the queries are."""
        return _make_labels(self.task, self.reader, None, 0.0, {}, show=False)

    def attribute(self, batch: Batch, count: int, spans: Sequence[tuple[int, int]] = ()) -> list[Attribution]:
        """Score the `count` queries of a batch against every source; return a result for each span of them.

        spans: where the queries of each asker begin and end; by default all are one's. A result speaks of its own
            queries alone, whatever else was in the batch.
        """
        return self.label(self.read(batch, count), spans or [(0, count)])

    def read(self, batch: Batch, count: int, check: Callable[[], None] = lambda: None) -> Scored:
        """Score the queries of a batch, as many at once as fit the memory budget; refuse those that do not fit alone.

        check: is called again and again, and may raise an error to end this.
        """
        check()
        at_once = self.reader.fit(batch, count)
        if not at_once:
            raise TooLarge(
                "a query takes more memory to be read than the readout may use: shorten it, or give memory=."
            )
        size = min(at_once, count) if is_columnar(batch, count) else count

        def collect() -> list[Scored]:
            parts = []
            for first in range(0, count, size):
                check()
                some = batch if size == count else pick_rows(batch, first, first + size)
                parts.append(self._read_part(some, min(size, count - first)))
            return parts

        return Scored.join(repeat_if_stale(self.reader, collect), range(count))

    def _read_part(self, batch: Batch, count: int) -> Scored:
        """Score queries that fit the memory budget."""
        scores, deviations = self.reader.scores_with_deviations(batch, count)
        noise = self.reader.noise_changes(batch, count)
        return Scored(scores.cpu(), *(None if each is None else each.cpu() for each in (deviations, noise)))

    def label(self, scored: Scored, spans: Sequence[tuple[int, int]]) -> list[Attribution]:
        """Return a result for each span of queries that were read."""
        replicates = replicate(self.reader.units, scored.deviations)
        return [self._label(span, scored.scores, scored.noise, replicates) for span in spans]

    def _label(
        self, span: tuple[int, int], scores: Tensor, noise: Tensor | None, replicates: tuple[Replicates, ...]
    ) -> Attribution:
        own = slice(*span)
        scores, noise = scores[own], None if noise is None else noise[:, own]
        replicates = tuple(each.change(lambda values: values[..., own, :]) for each in replicates)
        self.reader.observe_only(scores)
        effect = root_mean_square(scores) / self.store.n
        labels = _make_labels(self.task, self.reader, noise, effect, {}, show=False)
        labels.details[ERROR] = explain_errors(noise, replicates, LACKING[self.store.question])
        return Attribution(labels, scores, noise_changes=noise, replicates=replicates)


def _show_warnings(reader: Reader, more: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings of a readout, and show those that the store did not show before."""
    notices = Notices(reader.store.warnings)
    for message in (*reader.warnings, *more):
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
    """Return s(b, b) of each source on the example in its own row of `data`, shape (sources,).

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
    in_order = are_sources(Sources(store.source_ids, store.source_names, each), request.sources)
    data = recognise_data(vars(request.data), examples)
    if data.by != "none" and in_order != data.same:
        raise ReadoutError(
            "self-influence pairs each source with its own example: these are not the training examples in the order "
            f"of the sources{data.remark}."
        )
    if data.same:
        data.warn()
