"""The spectral engine: the curvature at a checkpoint once for all sources, then one gradient for each of them."""

import logging
import math
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Literal

import torch

from imprint.errors import SimulationError, TaskError
from imprint.plan import Curvature, EngineRules, Plan, Settings
from imprint.runtime.memory import budget, tensor_bytes
from imprint.runtime.timing import measure_seconds
from imprint.simulation.curvature import Spectrum
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.engines.protocol import AutoFindings, Chunk, Cost, Engine, Simulated, Work
from imprint.simulation.factored_gradients import count_values, find_layers, take_gradients
from imprint.simulation.frozen import (
    FrozenCurvature,
    attempt_products,
    freeze_curvature,
    make_imprints,
    project_imprints,
    refuse_unstable,
)
from imprint.simulation.path import Hooks
from imprint.sources import Sources
from imprint.store.checkpoint import Decided, File, Measured
from imprint.store.layouts import Layout, layout
from imprint.store.values import Value
from imprint.store.workspace import SCRATCH
from imprint.task import Parameters
from imprint.tensors.rows import MULTIPLIED, Rows, along, orthonormal
from imprint.tensors.vectors import Flat

logger = logging.getLogger(__name__)
_PASSES = 3  # over the data, in units of a gradient of every example, that a product with the curvature takes
_COPIES = 5  # of the numbers of a source that are alive at once: its gradient, its imprint, and what is written
_SHARD = 4096  # sources in one file at most
_FILE = 256, 64 << 20  # sources or bytes that a file has at least, however few sources are in memory at once
_BESIDE = 4  # the part of the size of the basis that sources may take where the budget leaves them less
_ROUNDING = 1e-5  # a share of squared lengths that rounding may make
_MEASURED = 4, 64, 256  # directions of the curvature, directions of coefficients and sources that an estimate measures
_LOOKED = 50  # directions on which a curvature of zero is looked for, where looking closely would take long
_VALUE = 22  # bytes of a curvature, which the file of a basis has as text


class Spectral(Engine):
    """The response in closed form on the leading directions of the curvature, for sources in the thousands."""

    name = "spectral"
    rules = EngineRules(
        frozenset({"directions", "form", "curvature"}),
        curvature="gauss-newton",
        infinite=True,
        trial={"lr": "auto", "damping": 1.0, "directions": _MEASURED[0]},
        tried=("curvature", "form"),
    )
    unit = "example gradients"
    requires = ("decided.directions", "measured.curvature")

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.frozen: FrozenCurvature | None = None
        self._turn: torch.Tensor | None = None  # from an orthonormal basis to the rounded one that is kept

    def settle(self) -> None:
        """Measure the curvature, refuse steps that grow on it, and see how sources fit memory and files."""
        one_by_one, settings = self.choose_vectorised(), self.work.settings
        self.frozen = frozen = self._freeze()
        curvature = Spectrum(frozen.smallest, frozen.largest)
        lr = curvature.step(settings.damping) if settings.lr == "auto" else settings.lr
        refuse_unstable(frozen, settings, lr, self.work.index)
        directions, layers = len(frozen.values), find_layers(self.descent)
        if self.work.first and self._room(directions) < 0:
            logger.warning(
                "the basis of %d directions takes %d bytes, more than the memory budget: few sources fit at once",
                *(directions, directions * tensor_bytes(self.descent.start)),
            )
        fit = self._fit_rows(directions, layers)
        self.decided = Decided(
            lr, self._fit_file(directions, layers, fit), fit, self.descent.vectorise, None, directions, layers
        )
        self.measured = Measured(
            curvature=(curvature.smallest, curvature.largest),
            curvature_of=self.plan.seen_curvature,
            stability=curvature.growth(lr, settings.damping),
            one_by_one=one_by_one,
            rest=frozen.rest,
            share=frozen.share,
        )

    def choose_vectorised(self) -> str | None:
        refuse_mixed(self.descent.start)
        return super().choose_vectorised()

    def attempt(self, trial: Descent) -> None:
        attempt_products(trial)

    def rows_that_fit(self, before: int | None = None) -> int:
        return self._fit_rows(self._directions, self.choices.layers)

    def prepare(self) -> File | None:
        """Keep the curvature, so that a killed run need not measure it again; what is read later is what counts now.

        A basis that is rounded is orthonormal no more: imprints are found on the one nearest to it that is, and its
        matrix leads their coefficients to what is kept. Imprints that are kept in full do without the basis: then the
        file goes when the store is complete.
        """
        files = self.work.files
        assert files is not None
        frozen = self.frozen or self._restore() or self._freeze()
        kept, name = frozen.basis, SCRATCH
        if self._on_basis:
            kept, name = {key: tensor.to(self.work.stored) for key, tensor in kept.items()}, "basis"
        basis = {key: tensor.to(self.descent.dtype).contiguous() for key, tensor in kept.items()}
        about = {"values": frozen.values.tolist(), "rest": frozen.rest, "share": frozen.share}
        file = files.keep(name, kept, about)
        if self._on_basis and self.work.stored.itemsize < self.descent.dtype.itemsize:
            basis, self._turn = orthonormal(basis)
        self.frozen = replace(frozen, basis=basis)
        self.decided = replace(self.choices, directions=len(frozen.values))
        self.measured = replace(self.measured, rest=frozen.rest, share=frozen.share)
        return file if self._on_basis else None

    def simulate(self, descent: Descent, hooks: Hooks) -> Chunk:
        """Turn the gradients of some sources into their imprints."""
        assert self.frozen is not None
        slopes, settings, lr = take_gradients(descent, self.choices.layers), self.work.settings, self.choices.lr
        outside = self.frozen.outside(settings, lr)
        if self._turn is not None and not self._projected and outside:
            # what lies along sharp directions cancels between factors and coefficients: the rounded ones must agree
            slopes = slopes.rounded(self.work.stored, -outside)
        seen = along(slopes, self.frozen.basis)
        found, whole = make_imprints(self.frozen, slopes, seen, settings, lr)
        norms = whole
        if self._projected:
            found, norms = project_imprints(self.frozen, seen, settings, lr)
        self._refuse_infinite(descent.sources, whole)
        if self._turn is not None and found.coefficients is not None:
            found = replace(found, coefficients=found.coefficients @ self._turn)
        return Chunk(
            descent.start,
            found.tensors() if self._on_basis else found.multiplied_out(descent.start),
            exact=frozenset({"coefficients"} if self.choices.layers and not self._projected else ()),
            norms=norms.tolist(),
            whole=whole.tolist() if self._projected else [],
        )

    def _refuse_infinite(self, sources: Sources, norms: torch.Tensor) -> None:
        assert self.frozen is not None
        for identity, norm in zip(sources.ids, norms.tolist(), strict=True):
            if not math.isfinite(norm):
                raise SimulationError(
                    f"the imprint of source {identity!r} is not finite: its gradient is not, or its response has "
                    f"grown beyond all numbers where curvature is negative (down to {self.frozen.smallest:.3g}). Take "
                    "fewer steps, or some damping."
                )

    @classmethod
    def conclude(cls, found: Simulated) -> Measured:
        """Add the share of squared length that a projection lost."""
        measured = super().conclude(found)
        if found.plan.form != "projected":
            return measured
        kept, before = (sum(x**2 for x in lengths) for lengths in (found.collect("norms"), found.collect("whole")))
        lost = max(1 - kept / before, 0.0) if before else 0.0
        if lost > _ROUNDING:
            logger.warning(
                "checkpoint %d: on %d directions imprints lose %.2g of their squared length",
                *(found.index, found.choices.directions or 0, lost),
            )
        return replace(measured, lost=float(f"{lost:.4g}"))

    def layout(self, rows: int) -> Layout | None:
        return None

    @classmethod
    def units(cls, plan: Plan, settings: Settings, sources: Sources) -> int:
        return sum(sources.sizes)

    @classmethod
    def shared_units(cls, plan: Plan, n: int) -> int:
        return _PASSES * n * plan.directions

    @classmethod
    def propose(cls, found: AutoFindings) -> Plan | None:
        """Return a plan for sources of one example each."""
        if found.grouped:
            return None
        seen: Curvature | Literal["auto"] = "auto" if found.curvature == cls.rules.curvature else found.curvature
        return Plan(engine=cls.name, steps="infinite", damping=found.dampings, weight=found.weights, curvature=seen)

    @property
    def _projected(self) -> bool:
        return self.plan.form == "projected"

    @property
    def _on_basis(self) -> bool:
        """Whether imprints are kept as combinations of the basis, with factors beside them or without."""
        return bool(self.choices.layers) or self._projected

    @property
    def _directions(self) -> int:
        return self.choices.directions or 0

    # --- the curvature

    def _freeze(self, directions: int | None = None) -> FrozenCurvature:
        descent, work = self.descent, _PASSES * len(self.descent.data)
        return freeze_curvature(
            descent.task,
            descent.start,
            FullBatch(descent.data, descent.dtype),
            self.plan.seen_curvature,
            directions or self.plan.directions,
            on_product=lambda products: self.work.advance(products * work),
            memory=None if directions is None else self.work.memory,
        )

    def _restore(self) -> FrozenCurvature | None:
        """Read the curvature as an earlier run has left it."""
        files, descent = self.work.files, self.descent
        assert files is not None
        name = "basis" if self._on_basis else SCRATCH
        stack = layout(descent.start, self._directions, self.work.stored if self._on_basis else None)
        done = files.find(name, None, stack, lambda about: _read_curvature(about, self._directions))
        if done is None:
            return None
        (values, rest, share), found = done[1], files.load(name, descent.data.device)
        # copied to where tensors lie as they do when fresh: products of others differ in the last bits
        basis = {name: found[name].to(descent.dtype, copy=True) for name in descent.start}
        return FrozenCurvature(torch.tensor(values, dtype=torch.float64), basis, rest, share)

    def look_ahead(self, patient: bool) -> None:
        """Refuse infinitely many steps where the curvature goes down to zero.

        The estimate knows a few directions, and with more the least curvature can only fall. It is measured where
        nothing else keeps it from zero: without damping, and where the Hessian may be negative.
        """
        settings = self.work.settings
        safe = settings.damping > 0 and self.plan.seen_curvature == "gauss-newton"
        if settings.steps == "infinite" and not safe:
            many = self.plan.directions if patient else min(_LOOKED, self.plan.directions)
            refuse_unstable(self._freeze(many), settings, 0.0, self.work.index)

    # --- memory, files and time

    def _fit_file(self, directions: int, layers: tuple[str, ...], fit: int) -> int:
        """Return how many sources are in one file: those in memory at once, or more, so that files are not too many."""
        sources, size = _FILE
        size = min(size, budget(self.work.memory, self.descent.data.device) // 4)  # a file is put together in memory
        each = count_values(self.descent, directions, layers) * self.descent.dtype.itemsize
        return min(max(fit, min(sources, size // each)), len(self.descent.sources))

    def _fit_rows(self, directions: int, layers: tuple[str, ...]) -> int:
        """Return how many sources fit into the memory budget at once, next to the basis.

        Factors are multiplied out for comparison with the basis, MULTIPLIED rows at a time, or all if fewer fit.
        """
        one = tensor_bytes(self.descent.start)
        room, out = max(self._room(directions), directions * one // _BESIDE), 2 * one if layers else 0
        each = _COPIES * count_values(self.descent, directions, layers) * self.descent.dtype.itemsize
        fit = max(room // (each + out), (room - MULTIPLIED * out) // each)
        return int(max(1, min(fit, len(self.descent.sources), _SHARD)))

    def _room(self, directions: int) -> int:
        """Return the bytes of the budget that the basis leaves."""
        allowed = budget(self.work.memory, self.descent.data.device)
        return allowed - directions * tensor_bytes(self.descent.start)

    def cost(self, checkpoints: list[Settings]) -> Cost:
        """Estimate the cost by timing a few curvature products and the gradients of a few sources."""
        trying, one_by_one = measure_seconds(self.choose_vectorised)
        finding, layers = measure_seconds(lambda: find_layers(self.descent))
        self.measured = Measured(one_by_one=one_by_one)
        flat, stored = Flat(self.descent.start), self.work.stored
        directions = min(self.plan.directions, flat.size)
        freezing = self._freezing_seconds(directions)
        fit = self._fit_rows(directions, layers)
        few = self.descent.sources.spread(min(fit, _MEASURED[2]))
        each = _source_seconds(self.descent.with_sources(few), directions, layers) / len(few)
        seconds = len(checkpoints) * (trying + finding + freezing + each * len(self.descent.sources))

        on_basis, basis = bool(layers) or self._projected, directions * flat.size
        values = directions if self._projected else count_values(self.descent, directions, layers)
        wide = layers and not self._projected  # coefficients keep more digits
        wider = directions * (torch.promote_types(stored, torch.float32).itemsize // stored.itemsize - 1) if wide else 0
        return Cost(
            seconds,
            values + wider,
            fit,
            shared=basis * stored.itemsize + _VALUE * directions if on_basis else 0,
            scratch=0 if on_basis else basis * self.descent.dtype.itemsize,
            memory=self.descent.dtype.itemsize * (2 * basis + _COPIES * values * (fit - len(few))),
        )

    def _freezing_seconds(self, directions: int) -> float:
        """Measure what it takes to find so many directions of the curvature, on a few; refuse what those show."""
        moments, settings = [time.monotonic()], self.work.settings
        frozen = freeze_curvature(
            self.descent.task,
            self.descent.start,
            FullBatch(self.descent.data, self.descent.dtype),
            self.plan.seen_curvature,
            min(_MEASURED[0], directions),
            on_product=lambda products: moments.append(time.monotonic()),
        )
        outside = time.monotonic() - moments[-1]
        gaps = [after - before for before, after in pairwise(moments)]
        some = _draw_directions(self.descent, min(_MEASURED[1], directions))
        wide, vector = len(some), some[0].clone()
        once = min(measure_seconds(lambda: (some @ vector) @ some)[0] for _ in range(3))
        turning = min(measure_seconds(lambda: some[:, :wide] @ some)[0] for _ in range(2))
        orthogonal = 2 * once * directions / 2 / wide  # twice, on half of the directions in the mean
        refuse_unstable(frozen, settings, self.descent.lr if settings.lr != "auto" else 0.0, self.work.index)
        return directions * (median(gaps[1:] or gaps) + orthogonal) + outside + turning * (directions / wide) ** 2


def _read_curvature(about: Value, directions: int) -> tuple[tuple[float, ...], float, float]:
    """Read the curvatures along the directions of a basis, that of the rest, and its share."""
    known = about.record("values", "rest", "share")
    if len(values := known["values"].numbers()) != directions:
        known["values"].refuse(f"{directions} curvatures, one for each direction")
    return values, known["rest"].number(), known["share"].number()


def _source_seconds(descent: Descent, directions: int, layers: tuple[str, ...]) -> float:
    """Measure the gradients of the sources, and their coefficients on so many directions."""
    take_gradients(descent, layers)  # warms up
    taking, slopes = measure_seconds(lambda: take_gradients(descent, layers))
    some = Flat(descent.start).parameters(_draw_directions(descent, min(_MEASURED[1], directions)))
    wide, settings = len(next(iter(some.values()))), Settings(descent.steps, 0.0, 0.0, 1.0)

    def measure(count: int) -> float:
        part = {name: tensor[:count] for name, tensor in some.items()}
        frozen = FrozenCurvature(torch.ones(count), part, rest=1.0, share=1.0)

        def respond() -> Rows:
            found = make_imprints(frozen, slopes, along(slopes, part), settings, lr=0.0)[0]
            return found if layers else Rows({}, {}, found.multiplied_out(descent.start))

        return min(measure_seconds(respond)[0] for _ in range(2))

    one, many = measure(1), measure(wide)
    return taking + many + max(many - one, 0.0) * (directions - wide) / max(wide - 1, 1)


def _draw_directions(descent: Descent, count: int) -> torch.Tensor:
    flat = Flat(descent.start)
    return torch.rand(count, flat.size, device=flat.device, dtype=flat.dtype)


def refuse_mixed(theta: Parameters) -> None:
    """Refuse parameters that do not make one vector."""
    (first, one), *others = theta.items()
    for name, other in others:
        if other.dtype != one.dtype:
            raise TaskError(
                f"parameter {first!r} is {one.dtype} and {name!r} is {other.dtype}: the spectral engine takes selected "
                'parameters of one dtype. Convert the model, select fewer, or take engine="tangent".'
            )
