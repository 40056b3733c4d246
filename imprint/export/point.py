"""What an export starts from: one checkpoint of a store, some of its sources, and the library's own scores of them.

`read` at given gains is what an exported artefact must reproduce, by the readout `central`, or of a replay `removed`.
`exact` is the derivative that `central` approximates, or the removal itself; `served` what a serving engine would find
with weights and adapters in a given precision.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from imprint.display import suggest_names
from imprint.errors import ReadoutError, SourcesError, TaskError
from imprint.export.likelihood import is_log_likelihood, log_likelihood, widened
from imprint.export.lora import Adapted, adapted_layers, weight_moves
from imprint.readout.base import Base
from imprint.readout.kernels import ReadoutName, difference_scores, forward_only
from imprint.store.reading import Store
from imprint.task import Batch, Parameters, Task, require_task
from imprint.tensors.batching import attempt, vectorise_or_loop

Counted = tuple[int, Batch]
_AT_ONCE = 16  # sources whose imprints are in memory at a time


@dataclass(frozen=True, eq=False)
class Point:
    """A checkpoint made ready to be exported: all tensors there, and the rows of the chosen sources in the store.

    state: in float32 at least, where what is exported is compared.
    """

    task: Task
    store: Store
    checkpoint: int
    rows: tuple[int, ...]
    layers: list[Adapted]
    state: Parameters

    @classmethod
    def of(cls, task: Task, store: Store, sources: Sequence[str] | None, checkpoint: int | None) -> "Point":
        """Take the checkpoint with the most weight, or the given one, once task and store are known to fit."""
        require_task(task)
        if getattr(task, "compute", None):
            raise TaskError(f"the task computes in {task.compute}: export with a task made without compute=.")  # type: ignore[attr-defined]
        layers = adapted_layers(task)
        store.check_task(task)
        if buffers := list(store.manifest.request.buffers):
            raise TaskError(f"removals of this store changed the buffer {buffers[0]!r} too, which no adapter carries.")
        first = next(index for index, about in enumerate(store.checkpoints) if about.weight > 0)
        store.check_loss(*task.at(store.state(first, task)))
        index = _checkpoint(store, checkpoint)
        state = {name: widened(tensor) for name, tensor in store.state(index, task).items()}
        return cls(task, store, index, _rows(store, sources), layers, state)

    @property
    def ids(self) -> list[str]:
        """The ids of the chosen sources."""
        return [self.store.source_ids[row] for row in self.rows]

    @property
    def context(self) -> int | None:
        """How many tokens the model takes; None where its configuration does not say."""
        from imprint.language.presets import text_config  # brings transformers, which reading does without

        found: int | None = getattr(text_config(self.task.model), "max_position_embeddings", None)
        return found

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        from imprint.language.presets import causal

        return len(causal(self.task.model).get_input_embeddings().weight)

    @cached_property
    def base(self) -> Base:
        """The checkpoint as `Reader` reads it."""
        return Base(self.checkpoint, 1.0, *self.task.at(self.state))

    @property
    def removes(self) -> bool:
        """Whether sources were really removed: adapters then go where the training led without them."""
        return self.store.removes

    @property
    def readout(self) -> ReadoutName:
        """The readout that an export must reproduce."""
        return "removed" if self.removes else "central"

    @property
    def theta(self) -> Parameters:
        """The selected parameters at the checkpoint."""
        return self.base.theta

    def rounded(self, dtype: torch.dtype) -> Parameters:
        """Return all tensors at the checkpoint, as a serving engine holds them that computes in `dtype`."""
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.state.items()}

    def imprints(self, positions: Sequence[int]) -> Parameters:
        """Return u_b of some of the chosen sources, stacked."""
        rows, device = [self.rows[position] for position in positions], self.task.device
        pieces = [self.store.imprints(self.checkpoint, row, row + 1, device) for row in rows]
        return {name: torch.cat([widened(piece[name]) for piece in pieces]) for name in self.task.names}

    def chunks(self) -> Iterator[tuple[list[int], Parameters]]:
        """Yield the imprints of all chosen sources, a few at a time."""
        for start in range(0, len(self.rows), _AT_ONCE):
            positions = list(range(start, min(start + _AT_ONCE, len(self.rows))))
            yield positions, self.imprints(positions)

    def moves(self) -> Tensor:
        """Return how far each imprint moves the adapted weights per unit, relative to them; shape (sources,)."""
        return torch.cat([weight_moves(self.layers, self.state, imprints) for _, imprints in self.chunks()])

    def refuse_measure(self, queries: list[Counted]) -> None:
        """Refuse a task whose measurement is not what the exported artefacts measure."""
        with forward_only(self.task):
            for count, batch in queries:
                values = self.base.measure(batch, count)(self.theta)
                if not bool(values.isfinite().all()):
                    raise ReadoutError(
                        "the log-likelihood of a query is not finite at the checkpoint: look for NaN in its weights, "
                        "or in the checkpoint."
                    )
                if not is_log_likelihood(values, self.task, self.state, batch):
                    raise TaskError(
                        f"the task measures {self.task.measure_name!r}, and exports score the log-likelihood of "
                        "completions, Σ weights · log p: use the measure of language.task."
                    )

    def read(self, queries: list[Counted], gains: Tensor) -> Tensor:
        """Return [F(θ + c·u) − F(θ − c·u)]/2c of the task's own measurement, shape (queries, sources).

        Of removals N·[F(θ) − F(θ − u/N)].
        """

        def read(imprints: Parameters, c: Tensor, count: int, batch: Batch, vectorise: bool) -> Tensor:
            if self.removes:
                return self.base.removed(imprints, self.store.n, batch, count, vectorise=vectorise).double()
            steps = c.to(next(iter(imprints.values())).dtype)
            return self.base.central(imprints, steps, batch, count, vectorise=vectorise).double()

        return self._scores(queries, gains, range(len(self.rows)), read)

    def ends(self, batch: Batch, gains: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-likelihoods at θ + c·u and θ − c·u, (queries, sources); of removals at θ and θ − u/N."""
        found = []
        with forward_only(self.task):
            for row, c in enumerate(gains.tolist()):
                imprints = self.imprints([row])
                for sign in (0.0, -1 / self.store.n) if self.removes else (c, -c):
                    moved = {name: self.state[name] + sign * u[0] for name, u in imprints.items()}
                    found.append(self.task.call(log_likelihood, {**self.state, **moved}, batch).double().cpu())
        values = torch.stack(found, 1)
        return values[:, 0::2].contiguous(), values[:, 1::2].contiguous()

    def exact(self, queries: list[Counted], positions: Sequence[int] | None = None) -> tuple[Tensor, str]:
        """Return F'(θ)[u], shape (queries, sources), and its readout: "jvp", or "gradient" without forward mode.

        Of removals what `read` returns, which is exact.
        """

        def removed(imprints: Parameters, _: Tensor, count: int, batch: Batch, vectorise: bool) -> Tensor:
            return self.base.removed(imprints, self.store.n, batch, count, vectorise=vectorise).double()

        def forward(imprints: Parameters, _: Tensor, count: int, batch: Batch, vectorise: bool) -> Tensor:
            return self.base.jvp(imprints, batch, count, vectorise=vectorise).double()

        def backward(imprints: Parameters, _: Tensor, count: int, batch: Batch, vectorise: bool) -> Tensor:
            return self.base.gradient(imprints, batch, count, vectorise=vectorise).double()

        chosen = range(len(self.rows)) if positions is None else positions
        gains = torch.ones(len(self.rows))
        if self.removes:
            return self._scores(queries, gains, chosen, removed), "removed"
        scores, _ = attempt(lambda: self._scores(queries, gains, chosen, forward))
        if scores is not None:
            return scores, "jvp"
        return self._scores(queries, gains, chosen, backward), "gradient"

    def served(self, queries: list[Counted], gains: Tensor, positions: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the scores of `read` with weights and adapters in `dtype`, as a serving engine has them."""
        state = self.rounded(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        theta = {name: tensor.to(wide) for name, tensor in self.theta.items()}

        def read(imprints: Parameters, c: Tensor, _: int, batch: Batch, vectorise: bool) -> Tensor:
            def measure(at: Parameters) -> Tensor:
                rounded = {name: tensor.to(dtype) for name, tensor in at.items()}
                return self.task.call(log_likelihood, {**state, **rounded}, batch).double()

            moves, down = {name: u.to(wide) for name, u in imprints.items()}, c.to(wide)
            up = down
            if self.removes:
                up, down = torch.zeros_like(up), torch.full_like(down, 1 / self.store.n)
            return difference_scores(measure, theta, moves, up, down, vectorise=vectorise)

        return self._scores(queries, gains, positions, read)

    def _scores(
        self,
        queries: list[Counted],
        gains: Tensor,
        positions: Sequence[int],
        read: Callable[[Parameters, Tensor, int, Batch, bool], Tensor],
    ) -> Tensor:
        """Read all queries for the sources at `positions`, by `vmap` or in a loop."""
        blocks = []
        gains = gains.to(self.task.device)
        with forward_only(self.task):
            for start in range(0, len(positions), _AT_ONCE):
                part = list(positions[start : start + _AT_ONCE])
                imprints = self.imprints(part)
                columns = []
                for count, batch in queries:
                    column, _ = vectorise_or_loop(partial(read, imprints, gains[part], count, batch))
                    columns.append(column.cpu())
                blocks.append(torch.cat(columns, 1))
        return torch.cat(blocks).T


def _checkpoint(store: Store, asked: int | None) -> int:
    weights = [about.weight for about in store.checkpoints]
    if asked is None:
        return max(range(len(weights)), key=weights.__getitem__)
    used = [index for index, weight in enumerate(weights) if weight > 0]
    if asked not in used:
        raise ReadoutError(f"checkpoint {asked} is not in the store: it has {', '.join(map(str, used))}.")
    return asked


def _rows(store: Store, sources: Sequence[str] | None) -> tuple[int, ...]:
    if sources is None:
        return tuple(range(len(store)))
    if isinstance(sources, str) or not len(sources):
        raise SourcesError(f"sources must be a list of ids of the store, with at least one, got {sources!r}.")
    places = {name: row for row, name in enumerate(store.source_ids)}
    for name in sources:
        if name not in places:
            raise SourcesError(f"the store has no source {name!r}{suggest_names(str(name), places)}")
    if len(set(sources)) < len(sources):
        raise SourcesError("a source is asked for twice: give each id once.")
    return tuple(places[name] for name in sources)
