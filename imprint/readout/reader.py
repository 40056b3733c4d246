"""Forward-only scores: the measurement F evaluated along, or at, the imprinted parameters.

`jvp`      F'(θ_T⁰)[u_b] by forward mode: exact, no step size, each imprint is read once.
`central`  [F(θ + c·u_b) − F(θ − c·u_b)]/2c from plain evaluations, c calibrated.
`literal`  the paper's difference between the two perturbed end points.
`gradient` one backward pass per query, then dot products: for very many sources where a backward exists.

All are functions of (F, θ, imprints) and return (sources, queries); `Reader` applies them to a store.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from imprint.batches import is_columnar, length, map_tensors
from imprint.checks.measuring import SILENT, check_derivative, measured, unit_of
from imprint.errors import ReadoutError
from imprint.readout.factored import FactoredReadout
from imprint.readout.guards import Seen
from imprint.runtime.memory import activation_bytes, budget, tensor_bytes
from imprint.runtime.turns import jvp, settle_child
from imprint.store.reading import Store
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.batching import attempt, vectorise_or_loop
from imprint.tensors.linear import FastLinear
from imprint.tensors.vectors import over_rows, row, row_norms, scale, zeros_like

logger = logging.getLogger(__name__)

Kind = Literal["jvp", "central", "literal", "gradient"]
Measure = Callable[[Parameters], Tensor]
"""F of the queries of one batch as a function of the selected parameters, shape (queries,)."""

_SHIFTED_BYTES = 64 << 20  # shifted copies θ ± c·u alive at once on a CPU: more only moves memory
_LARGE_BYTES = 1 << 20  # parameters from which a CPU shifts them faster one by one than by vmap
_RELATIVE_STEPS = tuple(10 ** (exponent / 2) for exponent in range(-12, -1))


def along(measure: Measure, theta: Parameters, imprints: Parameters, *, vectorise: bool) -> Tensor:
    """F'(θ)[u_b] for every row, by forward mode."""

    def fast(theta: Parameters) -> Tensor:
        with FastLinear():
            return measure(theta)

    return over_rows(lambda u: jvp(fast, (theta,), (u,))[1], imprints, vectorise=vectorise)  # type: ignore[no-any-return]


def between(
    measure: Measure,
    theta: Parameters,
    imprints: Parameters,
    up: Tensor,
    down: Tensor,
    midpoints: Parameters | None = None,
    *,
    vectorise: bool,
) -> Tensor:
    """[F(θ + m_b + up_b·u_b) − F(θ + m_b − down_b·u_b)]/(up_b + down_b) for every row."""

    def one(u: Parameters, up: Tensor, down: Tensor, middle: Parameters) -> Tensor:
        centre = {name: theta[name] + middle[name] for name in theta} if middle else theta
        return _difference(measure, centre, u, up, down)

    size, rows = tensor_bytes(theta), len(up)
    if not vectorise or (size > _LARGE_BYTES and up.device.type == "cpu"):
        return _between_one_by_one(measure, theta, imprints, up, down, midpoints)
    blocks = []
    width = rows if up.device.type == "cuda" else max(1, _SHIFTED_BYTES // (2 * size))
    for start in range(0, rows, width):
        part = slice(start, min(start + width, rows))
        blocks.append(
            vmap(one)(
                {name: u[part] for name, u in imprints.items()},
                up[part],
                down[part],
                {name: m[part] for name, m in (midpoints or {}).items()},
            )
        )
    return torch.cat(blocks)


def _difference(measure: Measure, centre: Parameters, u: Parameters, up: Tensor, down: Tensor) -> Tensor:
    """[F(centre + up·u) − F(centre − down·u)]/(up + down)."""
    higher = measure({name: tensor + up * u[name] for name, tensor in centre.items()})
    lower = measure({name: tensor - down * u[name] for name, tensor in centre.items()})
    return (higher - lower) / (up + down)


def _between_one_by_one(
    measure: Measure,
    theta: Parameters,
    imprints: Parameters,
    up: Tensor,
    down: Tensor,
    midpoints: Parameters | None,
) -> Tensor:
    """`between` in a loop that shifts the parameters in one buffer: fresh memory for each shift would cost more."""
    buffer = {name: torch.empty_like(tensor) for name, tensor in theta.items()}

    def shifted(row: int, by: float) -> Tensor:
        for name, tensor in theta.items():
            torch.add(tensor, imprints[name][row], alpha=by, out=buffer[name])
            if midpoints:
                buffer[name] += midpoints[name][row]
        return measure(buffer).clone()

    pairs = zip(up.tolist(), down.tolist(), strict=True)
    return torch.stack([(shifted(i, u) - shifted(i, -d)) / (u + d) for i, (u, d) in enumerate(pairs)])


def query_gradients(
    functional: Functional, theta: Parameters, batch: Batch, count: int, *, vectorise: bool
) -> Parameters:
    """∇F of each query, one row per query."""
    if vectorise and is_columnar(batch, count):
        single = map_tensors(lambda t: t.unsqueeze(1), batch)
        each = vmap(lambda sample: grad(lambda t: functional.measures(t, sample, 1)[0])(theta))
        return each(single)  # type: ignore[no-any-return]
    values, pull, *_ = vjp(lambda t: functional.measures(t, batch, count), theta)
    rows = [pull(torch.eye(count, dtype=values.dtype, device=values.device)[i])[0] for i in range(count)]
    return {name: torch.stack([row[name] for row in rows]) for name in theta}


def dots(imprints: Parameters, gradients: Parameters) -> Tensor:
    """u_bᵀ g_q for all pairs, shape (sources, queries)."""
    products = [
        u.reshape(len(u), -1) @ gradients[name].reshape(len(gradients[name]), -1).T for name, u in imprints.items()
    ]
    return torch.stack(products).sum(0)


@contextmanager
def forward_only(task: Task) -> Iterator[None]:
    """No autograd graph, evaluation mode, and out of `inference_mode`, in which forward mode may return zeros."""
    with torch.inference_mode(False), torch.no_grad(), task.evaluating():
        yield


@dataclass(frozen=True)
class _Base:
    """A checkpoint made ready: the task there, its selected parameters, and its share in the mean."""

    index: int
    share: float
    functional: Functional
    theta: Parameters

    @cached_property
    def scale(self) -> float:
        """What steps are relative to."""
        return scale(self.theta, self.functional)


class Reader:
    """A store made ready to score queries of a task; what fits the memory budget is kept between calls.

    readout: "jvp", "central", "literal" or "gradient"; `jvp` gives way to `central` on models without forward mode.
    step: of `central`: the length of a displacement relative to that of the parameters, or to that of as many of the
        model's other weights where the selected ones are near 0; by default calibrated on the first queries and kept in
        `details`.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        readout: Kind = "jvp",
        step: float | None = None,
        memory: int | str | None = None,
    ) -> None:
        if readout not in get_args(Kind):
            raise ReadoutError(f"readout {readout!r} is unknown: use one of {', '.join(get_args(Kind))}.")
        if step is not None and not (step > 0 and math.isfinite(step)):
            raise ReadoutError(f"step must be a positive number, got {step}.")
        settle_child()
        store.check_task(task)
        self.task, self.store = task, store
        self.readout: Kind = readout
        self.details: dict[str, float | str] = {}
        self._step = step
        self._budget = budget(memory, task.device)
        self._vectorise = True
        self._in_full = False  # factored imprints are multiplied out first
        self._reason = ""
        self._ready = False
        self._shared = 0  # bytes of activations for a query, however many sources there are
        self._live = 0  # … and for each source
        self._kept: dict[tuple[int, int, int], tuple[Parameters, Parameters | None]] = {}
        self._keep_bytes = self._budget // 2
        self._last: dict[int, tuple[tuple[int, int, int], tuple[Parameters, Parameters | None]]] = {}
        self.seen = Seen()
        self._silent = False  # whether some queries have scores of 0 alone
        self._derivative: tuple[str, ...] = ()  # what is to be said of the measurement's derivative
        self._gradients: dict[int, tuple[Batch, Parameters]] = {}  # of the last batch, for its next chunk of sources
        if readout == "literal":
            self._require_pair()
        weights = [checkpoint.weight for checkpoint in store.checkpoints]
        with torch.inference_mode(False):
            self._bases = [
                _Base(index, weight / sum(weights), *task.at(store.state(index, task)))
                for index, weight in enumerate(weights)
                if weight > 0
            ]
            store.check_loss(self._bases[0].functional, self._bases[0].theta)
            bases = {index: file.bytes for index, c in enumerate(store.checkpoints) if (file := c.basis) and c.weight}
            keep = sum(bases.values()) <= self._keep_bytes
            self._keep_bytes -= sum(bases.values()) if keep else 0
            self._factored = {
                base.index: FactoredReadout(store, base.index, base.functional, base.theta, keep=keep)
                for base in self._bases
                if base.index in bases
            }

    def scores(self, batch: Batch, count: int | None = None) -> Tensor:
        """s(b, q) of the queries of a batch, shape (queries, sources); `count` where its first tensor does not tell."""
        count = length(batch) if count is None else count
        batch = map_tensors(lambda t: t.to(self.task.device), batch)
        with forward_only(self.task):
            self._gradients.clear()  # the caller may have changed a batch in place
            for factored in self._factored.values():
                factored.forget()
            chunks = self.chunks(batch, count)
            return torch.cat([self.block(start, stop, batch, count) for start, stop in chunks], dim=1)

    def chunks(self, batch: Batch, count: int) -> list[tuple[int, int]]:
        """The sources in pieces that fit the memory budget, for so many queries at once."""
        with forward_only(self.task):
            self._prepare(batch, count)
        size = self.store.bytes // len(self.store) if self._by_factors else tensor_bytes(self._bases[0].theta)
        each = len(self._bases) * (2 * size + self._live * count)
        rows = max(1, min(len(self.store), (self._budget - self._shared * count) // each))
        return [(i, min(i + rows, len(self.store))) for i in range(0, len(self.store), rows)]

    def block(self, start: int, stop: int, batch: Batch, count: int, first: int = 0) -> Tensor:
        """The mean over checkpoints of the scores of some sources, shape (queries, stop − start).

        `first` is the number of the batch's first query, for messages.
        """
        with forward_only(self.task):
            self._prepare(batch, count)
            self._check_unchanged(start, stop)
            total = torch.zeros(count, stop - start, device=self.task.device, dtype=torch.float64)
            each = []
            for base in self._bases:
                each.append(self._scores(base, start, stop, batch, count))
                total += base.share * each[-1].T
            largest = float(total.abs().amax())  # not finite if one of them is not
            self._silent |= largest == 0
            self.seen.add(largest, each)
        if not math.isfinite(largest):
            query, source = (~total.isfinite()).nonzero()[0].tolist()
            raise ReadoutError(
                f"the score of query {first + query} for source {self.store.source_ids[start + source]!r} is "
                f"{float(total[query, source])}: look for NaN or infinity in the query, or an undefined measurement."
            )
        return total

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the scores must know: the store's warnings, then what the readout itself has found."""
        checkpoints, shares = [base.index for base in self._bases], [base.share for base in self._bases]
        found = self.seen.warnings(self.store.n, checkpoints, shares)
        own = (*self._derivative, *[SILENT] * self._silent, *map(str, found))
        return tuple(dict.fromkeys((*self.store.warnings, *own)))

    def diagonal(self, batch: Batch, start: int, stop: int) -> Tensor:
        """s(b, q_b): each source from `start` up to `stop` on the query in its own row of the batch."""
        count = stop - start
        with forward_only(self.task):
            if not is_columnar(batch, count):
                raise ReadoutError("a diagonal readout needs batches of tensors with one row per query.")
            self._prepare(batch, count)
            self._check_unchanged(start, stop)
            if self.readout not in ("jvp", "central"):
                raise ReadoutError(f'a diagonal is read out by "jvp" or "central", not by {self.readout!r}.')
            total = torch.zeros(count, device=self.task.device, dtype=torch.float64)
            single = map_tensors(lambda t: t.unsqueeze(1), batch)
            for base in self._bases:
                total += base.share * self._pairs(base, self._load(base.index, start, stop)[0], single)
        if not bool(total.isfinite().all()):
            index = int((~total.isfinite()).nonzero()[0, 0])
            raise ReadoutError(
                f"the self-influence of example {start + index} is {float(total[index])}: look for NaN in it."
            )
        return total

    def _check_unchanged(self, start: int, stop: int) -> None:
        """Refuse files that were damaged after they were read: what is kept of them may lie there still."""
        for base in self._bases:
            self.store.check_unchanged(base.index, start, stop)

    def _pairs(self, base: _Base, imprints: Parameters, single: Batch) -> Tensor:
        """Each imprint on the query in its own row; here `vmap` runs over the queries too, which may be refused."""

        def one(u: Parameters, c: Tensor, sample: Batch) -> Tensor:
            def measure(theta: Parameters) -> Tensor:
                return base.functional.measures(theta, sample, 1)[0]

            if self.readout == "jvp":
                return jvp(measure, (base.theta,), (u,))[1]  # type: ignore[no-any-return]
            return _difference(measure, base.theta, u, c, c)

        c = _lengths(base.scale, imprints, self._step or 1.0)
        if not self._vectorise:
            return over_rows(one, imprints, c, single, vectorise=False)  # type: ignore[no-any-return]
        found, reason = vectorise_or_loop(lambda vectorise: over_rows(one, imprints, c, single, vectorise=vectorise))
        if reason is not None:
            logger.warning("vmap does not take this model, examples are read one by one: %s", reason)
            self._vectorise = False
        return found  # type: ignore[no-any-return]

    def _scores(self, base: _Base, start: int, stop: int, batch: Batch, count: int) -> Tensor:
        """Scores of some sources at one checkpoint, shape (sources, queries)."""
        if self._by_factors and base.index in self._factored:
            factored = self._factored[base.index]
            read = factored.forward if self.readout == "jvp" else factored.backward
            return read(start, stop, batch, count)
        return self._read(base, *self._load(base.index, start, stop), batch, count)

    @property
    def _by_factors(self) -> bool:
        """Whether imprints are read as they are kept: where they are factored, and the readout is linear in them."""
        linear = self.readout in ("jvp", "gradient")
        return bool(self._factored) and not self._in_full and self._vectorise and linear

    def _read(
        self, base: _Base, imprints: Parameters, midpoints: Parameters | None, batch: Batch, count: int
    ) -> Tensor:
        def measure(theta: Parameters) -> Tensor:
            return base.functional.measures(theta, batch, count)

        if self.readout == "jvp":
            return along(measure, base.theta, imprints, vectorise=self._vectorise)
        if self.readout == "gradient":
            if base.index not in self._gradients or self._gradients[base.index][0] is not batch:
                gradients = query_gradients(base.functional, base.theta, batch, count, vectorise=self._vectorise)
                self._gradients[base.index] = batch, gradients
            return dots(imprints, self._gradients[base.index][1])
        if self.readout == "central":
            assert self._step is not None
            c = _lengths(base.scale, imprints, self._step)
            return between(measure, base.theta, imprints, c, c, vectorise=self._vectorise)
        checkpoint = self.store.checkpoints[base.index]
        assert checkpoint.choices.epsilon is not None
        rows = next(iter(imprints.values()))
        up = rows.new_full((len(rows),), checkpoint.choices.epsilon / self.store.n)
        down = torch.zeros_like(up) if self.store.manifest.plan.variant == "one_sided" else up
        return between(measure, base.theta, imprints, up, down, midpoints, vectorise=self._vectorise)

    def _require_pair(self) -> None:
        plan = self.store.manifest.plan
        if plan.engine != "trajectories":
            raise ReadoutError(
                f"a literal readout needs the perturbed end points, which the {plan.engine} engine does not make: "
                'simulate with Plan(engine="trajectories", keep_pair=True), or read out by "jvp".'
            )
        if plan.variant == "two_sided" and not plan.keep_pair:
            raise ReadoutError(
                "a literal readout needs both perturbed end points, and this store was made without them: simulate "
                'with keep_pair=True, or read out by "jvp".'
            )

    def _load(self, checkpoint: int, start: int, stop: int) -> tuple[Parameters, Parameters | None]:
        key = (checkpoint, start, stop)
        if key in self._kept:
            return self._kept[key]
        if self._last.get(checkpoint, (None,))[0] == key:  # the next batch of queries wants the same
            return self._last[checkpoint][1]
        imprints, midpoints = self._fetch(checkpoint, start, stop)
        size = tensor_bytes(imprints) + tensor_bytes(midpoints or {})
        if size <= self._keep_bytes:
            self._keep_bytes -= size
            self._kept[key] = imprints, midpoints
        self._last[checkpoint] = key, (imprints, midpoints)
        return imprints, midpoints

    def _fetch(self, checkpoint: int, start: int, stop: int) -> tuple[Parameters, Parameters | None]:
        """Imprints from the store, with the midpoints where the readout wants them."""
        if checkpoint in self._factored:
            return self._factored[checkpoint].multiplied_out(start, stop), None
        imprints = self.store.imprints(checkpoint, start, stop, self.task.device)
        if self.readout != "literal" or not self.store.checkpoints[checkpoint].midpoints:
            return imprints, None
        return imprints, self.store.midpoints(checkpoint, start, stop, self.task.device)

    def _prepare(self, batch: Batch, count: int) -> None:
        """Settle on the first queries what works for this model: vmap or a loop, forward mode or differences."""
        if self._ready:
            return
        base = self._bases[0]
        self.seen.values += measured(base.functional, base.theta, batch, count)
        self.seen.unit = unit_of(self.task, batch)
        if self.task.measure is self.task.loss and self.store.manifest.probes is not None:
            self.seen.values += self.store.manifest.probes.values.losses
        self._try_factors(base, batch, count)
        if self.readout == "jvp" and not self._works(batch, count):
            reason = self._reason
            self.readout = "central"
            if not self._works(batch, count):
                raise ReadoutError(f"the model can be read out neither by jvp nor by central: {self._reason}.")
            logger.warning("forward mode does not take this model, reading out by central differences: %s", reason)
            self.details["fallback"] = f"jvp is not possible: {reason}"
        elif not self._works(batch, count):
            raise ReadoutError(f"the model cannot be read out by {self.readout}: {self._reason}.")
        if self.readout == "central":
            self._step = self._step or self._calibrate(batch, count)
            self.details["central_step"] = self._step
        if self.readout in ("jvp", "gradient"):
            direction = row(self._fetch(base.index, 0, 1)[0], 0)
            given = (base.functional, base.theta, batch, count, direction)
            self._derivative = check_derivative(*given, backward=self.readout == "gradient")
        self._shared, self._live = (size // count for size in self._activations(base, batch, count))
        self._ready = True

    def _activations(self, base: _Base, batch: Batch, count: int) -> tuple[int, int]:
        """Bytes that reading out a batch computes however many sources there are, and bytes that each source adds."""

        def measure(theta: Parameters) -> Tensor:
            return base.functional.measures(theta, batch, count)

        def along_rows(rows: int) -> int:
            imprints = zeros_like(base.theta, rows)
            return activation_bytes(lambda: along(measure, base.theta, imprints, vectorise=True))

        if self.readout != "jvp" or self._by_factors or not self._vectorise:
            return 0, 2 * activation_bytes(lambda: measure(base.theta))
        one, two = along_rows(1), along_rows(2)
        return max(0, 2 * one - two), two - one

    def _try_factors(self, base: _Base, batch: Batch, count: int) -> None:
        """Have factored imprints multiplied out where their factors do not serve this measurement."""
        if not self._by_factors or base.index not in self._factored:
            return

        def in_full(imprints: Parameters) -> Tensor:
            return along(lambda at: base.functional.measures(at, batch, count), base.theta, imprints, vectorise=True)

        reason = self._factored[base.index].serves(in_full, self.readout == "jvp", batch, count)
        if reason is not None:
            logger.warning("factored imprints are multiplied out to be read: %s", reason)
            self._in_full = True

    def _works(self, batch: Batch, count: int) -> bool:
        """Try two sources by vmap, then by a loop; `_reason` says what failed last."""
        base = self._bases[0]
        step, self._step = self._step, self._step or _RELATIVE_STEPS[4]
        try:
            for self._vectorise in (True, False):
                _, failure = attempt(lambda: self._scores(base, 0, min(2, len(self.store)), batch, count))
                if failure is None:
                    if not self._vectorise:
                        logger.warning("vmap does not take this model, sources are read one by one: %s", self._reason)
                        self.details["one_by_one"] = self._reason
                    return True
                self._reason = failure
            return False
        finally:
            self._step = step

    def _calibrate(self, batch: Batch, count: int) -> float:
        """The relative step whose scores agree best with its neighbours': rounding grows below, curvature above."""
        base, rows = self._bases[0], min(4, len(self.store))
        imprints = self._fetch(base.index, 0, rows)[0]
        found = []
        for step in _RELATIVE_STEPS:
            c = _lengths(base.scale, imprints, step)
            found.append(
                between(
                    lambda theta: base.functional.measures(theta, batch, count),
                    base.theta,
                    imprints,
                    c,
                    c,
                    vectorise=self._vectorise,
                ).double()
            )
        # a step too small for the precision moves nothing: its scores are 0, and agree with their neighbours
        gaps = [
            float((here - below).norm() + (above - here).norm()) / float(here.norm()) if bool(here.any()) else math.inf
            for below, here, above in zip(found, found[1:], found[2:], strict=False)
        ]
        best = min(range(len(gaps)), key=gaps.__getitem__)
        return _RELATIVE_STEPS[best + 1 if math.isfinite(gaps[best]) else len(_RELATIVE_STEPS) // 2]


def _lengths(scale: float, imprints: Parameters, relative: float) -> Tensor:
    """c_b with ‖c_b·u_b‖ = relative · scale; 1 for an imprint that is zero."""
    norms = row_norms(imprints)
    lengths = torch.where(norms > 0, relative * scale / norms, 1.0)
    return lengths.to(next(iter(imprints.values())).dtype)
