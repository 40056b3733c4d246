"""Score queries from a store: put checkpoints, kernels, memory budget and captured readouts together.

The first queries decide how a model is read (`settling`). After that a query is a few calls of the kernels.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from imprint.batches import describe_batch, is_columnar, length, map_tensors
from imprint.errors import ReadoutError, UndefinedScore
from imprint.readout.base import Base, load_bases
from imprint.readout.budget import Activations, ImprintCache, Loaded, split_sources
from imprint.readout.captured import Captured
from imprint.readout.factored import FactoredReadout
from imprint.readout.guards import Observed, explain_silence, explain_undefined
from imprint.readout.kernels import ReadoutName, forward_only, gradient_scores
from imprint.readout.settling import ReadoutSettings, Trial, choose_settings, observe_first, read_pairs, settle
from imprint.readout.sizes import BySize, find_peak, take_some
from imprint.readout.units import find_units
from imprint.runtime.memory import budget, peak_bytes, tensor_bytes
from imprint.runtime.turns import settle_child
from imprint.store.reading import Store
from imprint.task import Batch, Parameters, PerExample, Task

Result = TypeVar("Result")


class Reader:
    """A store made ready to score queries of a task; what fits the memory budget is kept between calls.

    readout: "jvp", "central", "literal" or "gradient"; `jvp` gives way to `central` on models without forward mode. The
        removals of a replay are read out by "removed". The default is "jvp", or "removed" where nothing else is right.
    step: of `central`: the length of a displacement relative to that of the parameters, or to that of as many of the
        model's other weights where the selected ones are near 0; by default calibrated on the first queries and kept in
        `details`.
    measure: what to measure of a query instead of the task's own measurement.
    capture: whether to repeat readouts as CUDA graphs on a GPU (`imprint.readout.captured`): of any task, or of none;
        by default of those whose measurement is the library's own.

    `base` is the first checkpoint that counts; of a replay, the end of the recorded run. `units` are the runs of the
    store, or the checkpoints of its only run; None where there is one checkpoint.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        readout: ReadoutName | None = None,
        step: float | None = None,
        memory: int | str | None = None,
        measure: PerExample | None = None,
        capture: bool | None = None,
    ) -> None:
        self._settings = choose_settings(store, readout, step)
        settle_child()
        store.check_task(task)
        self.task, self.store, self._device = task, store, task.device
        self.observed = Observed()
        self._budget = budget(memory, self._device)
        self._captured = Captured(task, self._budget // 4, capture=capture, own=measure is None)
        self._working = self._budget - self._captured.room
        self._activations = BySize[Activations](lambda *queries: self._settings.measure(self._bases[0], *queries))
        self._peaks = BySize[int](self._measure_peak)
        self._silent = False  # whether some queries have scores of 0 alone
        self._gradients: dict[int, tuple[Batch, Parameters]] = {}  # of the last batch, for its next chunk of sources
        with torch.inference_mode(False):
            self._bases = load_bases(task, store, measure)
            self.units = find_units(store, [b.index for b in self._bases], [b.share for b in self._bases])
            self.base = first = self._bases[0]
            store.check_loss(first.functional, {name: first.theta[name] for name in task.names})
            room = self._budget // 2
            shared = {index: file.bytes for index, c in enumerate(store.checkpoints) if (file := c.basis) and c.weight}
            keep = sum(shared.values()) <= room
            self._factored = {
                base.index: FactoredReadout(store, base.index, base.functional, base.theta, keep=keep)
                for base in self._bases
                if base.index in shared
            }
        self._settings = replace(self._settings, factors=bool(self._factored))
        self._imprints = ImprintCache(self._load, room - sum(shared.values()) if keep else room)

    @property
    def readout(self) -> ReadoutName:
        """The readout that is used, which the first queries settle."""
        return self._settings.readout

    @property
    def details(self) -> dict[str, float | str]:
        """What results say about how imprints were read."""
        return self._settings.details

    def scores(self, batch: Batch, count: int | None = None) -> Tensor:
        """Return s(b, q) of the queries of a batch, shape (queries, sources).

        count: how many queries there are, where the first tensor of the batch does not have one row for each.
        """
        with forward_only(self.task):
            return torch.cat([total for total, _ in self._read_all(batch, count)], dim=1)

    def scores_with_deviations(self, batch: Batch, count: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the same, and how the scores of each of the `units` deviate, shape (units, queries, sources)."""
        with forward_only(self.task):
            found = [(total, self._deviate(each, total)) for total, each in self._read_all(batch, count)]
            parts = [deviations for _, deviations in found if deviations is not None]
            return torch.cat([total for total, _ in found], dim=1), torch.cat(parts, dim=2) if parts else None

    def _read_all(self, batch: Batch, count: int | None) -> list[tuple[Tensor, list[Tensor]]]:
        return repeat_if_stale(self, lambda: list(self._read_chunks(batch, count)))

    @property
    def stale(self) -> bool:
        """Whether captured readouts turned out not to repeat themselves; what was read before may be wrong."""
        return bool(self._captured.warnings)

    def _read_chunks(self, batch: Batch, count: int | None) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Read the queries of a batch against all sources, chunk by chunk."""
        count = length(batch) if count is None else count
        batch = map_tensors(lambda t: t.to(self._device), batch)
        self._gradients.clear()  # the caller may have changed a batch in place
        for factored in self._factored.values():
            factored.forget()
        for start, stop in self.chunks(batch, count):
            yield self._read_block(start, stop, batch, count, 0)

    def chunks(self, batch: Batch, count: int) -> list[tuple[int, int]]:
        """Return the sources in pieces that fit the memory budget, for so many queries at once."""
        with forward_only(self.task):
            self._prepare(batch, count)
            activations = self._activations.of(batch, count)
        size = self.store.bytes // len(self.store) if self._settings.by_factors else tensor_bytes(self._bases[0].theta)
        each = len(self._bases) * (2 * size + activations.per_source * count)
        return split_sources(len(self.store), (self._working - activations.shared * count) // each)

    def fit(self, batch: Batch, count: int) -> int:
        """Return how many queries of a batch may be read at once within the memory budget; 0 if one does not fit."""
        peak, room = self._peaks.recall(batch, count), self._working - self._budget // 2  # half keeps imprints
        if peak is None:
            batch = map_tensors(lambda t: t.to(self._device), batch)
            with forward_only(self.task):
                self._prepare(*take_some(batch, count))
                peak = find_peak(self._peaks, batch, count, room)
        return room // max(peak, 1)

    def block(self, start: int, stop: int, batch: Batch, count: int, first: int = 0) -> Tensor:
        """Return the mean over checkpoints of the scores of some sources, shape (queries, stop − start).

        first: the number of the batch's first query, for messages.
        """
        return self._read_block(start, stop, batch, count, first)[0]

    def block_with_deviations(
        self, start: int, stop: int, batch: Batch, count: int, first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return the same, and how the scores of each of the `units` deviate, shape (units, queries, stop − start)."""
        total, each = self._read_block(start, stop, batch, count, first)
        return total, self._deviate(each, total)

    def _deviate(self, each: list[Tensor], total: Tensor) -> Tensor | None:
        return None if self.units is None else self.units.deviate(each, total)

    def _read_block(self, start: int, stop: int, batch: Batch, count: int, first: int) -> tuple[Tensor, list[Tensor]]:
        """Return the mean scores of a block, and those of each checkpoint, shape (sources, queries)."""
        with forward_only(self.task):
            self._prepare(batch, count)
            self._check_unchanged(start, stop)
            for read in (self._read, self._scores):  # a graph also computes what does not count, and that may be NaN
                each = [read(base, start, stop, batch, count) for base in self._bases]
                total = torch.zeros(count, stop - start, device=self._device, dtype=torch.float64)
                for base, scores in zip(self._bases, each, strict=True):
                    total += base.share * scores.T
                largest = float(total.abs().amax())  # not finite if one of them is not
                if math.isfinite(largest):
                    break
            self._silent |= largest == 0
            self.observed.add(largest, each)
        if not math.isfinite(largest):
            raise explain_undefined(total, first, self.store.source_ids[start:stop])
        return total, each

    def observe_only(self, scores: Tensor) -> None:
        """Have `warnings` speak of these scores, not of all so far; what checkpoints have shown of each other stays."""
        largest = float(scores.abs().amax())
        self.observed, self._silent = replace(self.observed, largest=largest), largest == 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the scores must know: the store's warnings, then what the readout itself has found."""
        checkpoints, shares = [base.index for base in self._bases], [base.share for base in self._bases]
        found = self.observed.warnings(self.store.n, checkpoints, shares, predicted=not self.store.removes)
        silent = explain_silence(self.store.checkpoints[self.base.index].measured, removes=self.store.removes)
        own = (*self._settings.warnings, *[silent] * self._silent, *self._captured.warnings, *map(str, found))
        return tuple(dict.fromkeys((*self.store.warnings, *own)))

    def values(self, batch: Batch, count: int) -> Tensor:
        """Return F of each query itself, the mean over checkpoints, shape (queries,)."""
        batch = map_tensors(lambda t: t.to(self._device), batch)
        with forward_only(self.task):
            return torch.stack([base.share * base.measure(batch, count)(base.theta) for base in self._bases]).sum(0)

    def noise_changes(self, batch: Batch, count: int | None = None) -> Tensor | None:
        """Return how F of each query changes in the runs whose start was perturbed, shape (runs, queries).

        None where the store has no such runs. Effects of this size say nothing about their source.
        """
        if self.store.checkpoints[self.base.index].noise is None:
            return None
        count = length(batch) if count is None else count
        batch = map_tensors(lambda t: t.to(self._device), batch)
        with forward_only(self.task):
            self._prepare(batch, count)
            self.store.check_unchanged(self.base.index, 0, 0)
            rows, n = self.store.noise(self.base.index, self._device), self.store.n
            assert rows is not None
            changes = self.base.removed(rows, n, batch, count, vectorise=self._settings.vectorise).double() / -n
        if not bool(changes.isfinite().all()):
            raise UndefinedScore("a run with a perturbed start gives queries a value that is no finite number.")
        return changes

    def diagonal(self, batch: Batch, start: int, stop: int) -> Tensor:
        """Return s(b, q_b): each source from `start` up to `stop` on the query in its own row of the batch."""
        count = stop - start
        with forward_only(self.task):
            if not is_columnar(batch, count):
                raise ReadoutError(
                    f"a diagonal readout needs batches of tensors with one row per query, got {describe_batch(batch)}."
                )
            self._prepare(batch, count)
            self._check_unchanged(start, stop)
            if self.readout not in ("jvp", "central", "removed"):
                raise ReadoutError(f'a diagonal is read out by "jvp" or "central", not by {self.readout!r}.')
            total = torch.zeros(count, device=self._device, dtype=torch.float64)
            single = map_tensors(lambda t: t.unsqueeze(1), batch)
            for base in self._bases:
                imprints = self._imprints.get(base.index, start, stop)[0]
                found, self._settings = read_pairs(self._settings, base, self.store.n, imprints, single)
                total += base.share * found
        if not bool(total.isfinite().all()):
            index = int((~total.isfinite()).nonzero()[0, 0])
            raise UndefinedScore(
                f"the self-influence of example {start + index} is {float(total[index])}: look for NaN in it."
            )
        return total

    def _check_unchanged(self, start: int, stop: int) -> None:
        """Refuse files that were damaged after they were read, even if what was read is still kept."""
        for base in self._bases:
            self.store.check_unchanged(base.index, start, stop)

    def _read(self, base: Base, start: int, stop: int, batch: Batch, count: int) -> Tensor:
        """Score some sources at one checkpoint, by a CUDA graph if they were read before; shape (sources, queries)."""
        place, factored = (base.index, start, stop), self._settings.by_factors and base.index in self._factored
        if self._captured.is_on and self._settings.vectorise and not factored and self.readout != "gradient":
            imprints, midpoints = self._imprints.get(*place)
            if self._imprints.keeps(*place):
                tensors = (*imprints.values(), *(midpoints or {}).values())
                prepare = partial(self._reading, self._settings, base, start, stop)
                found = self._captured.read(
                    place, (batch, count), tensors, prepare, self._activations.of, linear=self._settings.linear
                )
                if found is not None:
                    return found
        return self._scores(base, start, stop, batch, count)

    def _scores(self, base: Base, start: int, stop: int, batch: Batch, count: int) -> Tensor:
        """Score some sources at one checkpoint, shape (sources, queries)."""
        return self._reading(self._settings, base, start, stop)(batch, count)

    def _reading(self, settings: ReadoutSettings, base: Base, start: int, stop: int) -> Callable[[Batch, int], Tensor]:
        """Return what scores some sources at one checkpoint; whatever looks at their values is done before."""
        if settings.by_factors and base.index in self._factored:
            factored = self._factored[base.index]
            return partial(factored.forward if settings.readout == "jvp" else factored.backward, start, stop)
        imprints, midpoints = self._imprints.get(base.index, start, stop)
        if settings.readout == "gradient":
            return partial(self._gradient_scores, base, imprints, settings.vectorise)
        return settings.reading(self.store, base, imprints, midpoints)

    def _gradient_scores(self, base: Base, u: Parameters, vectorise: bool, batch: Batch, count: int) -> Tensor:
        if base.index not in self._gradients or self._gradients[base.index][0] is not batch:
            self._gradients[base.index] = batch, base.gradients(batch, count, vectorise=vectorise)
        return gradient_scores(u, self._gradients[base.index][1])

    def _load(self, checkpoint: int, start: int, stop: int) -> Loaded:
        """Read imprints from the store, with the midpoints where the readout wants them."""
        if checkpoint in self._factored:
            return self._factored[checkpoint].multiplied_out(start, stop), None
        imprints = self.store.imprints(checkpoint, start, stop, self._device)
        if self.readout != "literal" or not self.store.checkpoints[checkpoint].midpoints:
            return imprints, None
        return imprints, self.store.midpoints(checkpoint, start, stop, self._device)

    def _prepare(self, batch: Batch, count: int) -> None:
        """Have the first queries settle how this model is read."""
        if self._settings.settled:
            return
        base, some = self._bases[0], partial(min, len(self.store))
        self.observed = observe_first(self.store, base, batch, count)
        trial = Trial(
            base,
            self._factored.get(base.index),
            batch,
            count,
            score=lambda settings, sources: self._reading(settings, base, 0, some(sources))(batch, count),
            load=lambda sources: self._load(base.index, 0, some(sources))[0],
        )
        self._settings = settle(self._settings, trial)

    def _measure_peak(self, batch: Batch, count: int) -> int:
        """Return how many bytes of each query are alive at once while two sources are read."""
        base, some = self._bases[0], min(2, len(self.store))
        reading = peak_bytes(lambda: self._scores(base, 0, some, batch, count))
        return max(reading, peak_bytes(lambda: self.noise_changes(batch, count))) // count


def repeat_if_stale(reader: Reader, read: Callable[[], Result]) -> Result:
    """Return what a function reads; it is called again if captured readouts turn out to be stale on the way."""
    before, found = reader.stale, read()
    return found if reader.stale == before else read()
