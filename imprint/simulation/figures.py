"""Figures of simulated imprints as their files have them; what could not be read again is refused."""

import math
from dataclasses import replace

from imprint.errors import SimulationError
from imprint.simulation.engines import Chunk, Engine, Simulated
from imprint.sources import Sources
from imprint.store.checkpoint import Measured, ShardFigures, Spread
from imprint.store.layouts import layout
from imprint.tensors.vectors import row_norms, six_digits


def check_rows(engine: Engine, sources: Sources, chunk: Chunk) -> ShardFigures:
    """Return the figures of some imprints; refuse those that are no numbers, or could not be read again."""
    norms = row_norms(chunk.imprints).tolist() if chunk.norms is None else chunk.norms
    for identity, norm in zip(sources.ids, norms, strict=True):
        if not math.isfinite(norm):
            raise SimulationError(f"the imprint of source {identity!r} by the {engine.name} engine is not finite.")
    _refuse_noise(engine, chunk)
    expected = engine.layout(len(sources))
    if expected is not None and layout(chunk.imprints, dtype=engine.work.stored) != expected:
        raise SimulationError(
            f"the {engine.name} engine must return one row per source for each selected parameter: {len(sources)} "
            f"sources came as { {name: tuple(tensor.shape) for name, tensor in chunk.imprints.items()} }."
        )
    return _round(chunk, norms)


def _refuse_noise(engine: Engine, chunk: Chunk) -> None:
    """Refuse rows of perturbed starts that are no numbers, or not those that were decided."""
    if chunk.noise is None:
        return
    if not bool(row_norms(chunk.noise).isfinite().all()):
        raise SimulationError(f"a run of the {engine.name} engine with a slightly perturbed start is not finite.")
    wanted = layout(engine.descent.start, engine.choices.noise_rows, engine.work.stored)
    if layout(chunk.noise, dtype=engine.work.stored) != wanted:
        raise SimulationError(f"the {engine.name} engine decided on {engine.choices.noise_rows} rows of noise.")


def _round(chunk: Chunk, norms: list[float]) -> ShardFigures:
    """Round figures to six digits: the last ones depend on where tensors lie in memory.

    A resumed store is the same to the bit.
    """

    def one(value: float | None) -> float | None:
        return None if value is None else six_digits([value])[0]

    return ShardFigures(
        drift=six_digits([chunk.drift])[0],
        norms=tuple(six_digits(norms)),
        linearity=tuple(six_digits(chunk.linearity)),
        whole=tuple(six_digits(chunk.whole)),
        effects=tuple(six_digits(chunk.effects)),
        noise_effect=one(chunk.noise_effect),
        deviation=one(chunk.deviation),
    )


def summarise(engine: type[Engine], found: Simulated) -> Measured:
    """Add what was measured on the imprints to what was measured before."""
    norms, linearity = found.collect("norms"), found.collect("linearity")
    measured = replace(
        found.measured,
        drift=found.shards[0].drift,
        norms=Spread.of(norms),
        linearity=Spread.of(linearity) if linearity else None,
    )
    return engine.conclude(replace(found, measured=measured))
