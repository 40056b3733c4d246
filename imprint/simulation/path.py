"""Walks the unperturbed path and one row per trajectory beside it, step by step, for the engines that follow a path."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent
from imprint.simulation.divergence import Watch
from imprint.simulation.snapshot import PathState, Snapshot
from imprint.task import Parameters
from imprint.tensors.vectors import add_scaled_, scale

Moving = Callable[[Parameters, Parameters, Iterable[Weighted], int], Parameters]


@dataclass(frozen=True)
class Hooks:
    """What the runner hears while sources are simulated, and where their state is kept meanwhile.

    advance, skip: called with the number of rows that made a step, or had made it in an earlier run.
    first: whether these are the first sources of a checkpoint, with which an engine measures what it measures once.
    announce: called with what is done while no row of a source makes a step.
    """

    advance: Callable[[int], None] = lambda rows: None
    skip: Callable[[int], None] = lambda rows: None
    snapshot: Snapshot | None = None
    first: bool = False
    announce: Callable[[str], None] = lambda phase: None


def follow(
    descent: Descent,
    rows: Parameters,
    moving: Moving,
    responses: Callable[[Parameters, Parameters], Parameters],
    removal: float,
    hooks: Hooks,
) -> tuple[Parameters, Parameters]:
    """Make T steps of the base path and of every row beside it; return both at the end.

    moving: what moves the rows, from (base, rows, batches, step); it is damped, then a step is made of it.
    responses: how far each row is displaced by its source, from (base, rows); `removal` times that is a removal.
    """
    base = {name: p.clone() for name, p in descent.start.items()}
    count = len(next(iter(rows.values())))
    watch = Watch(descent.sources.ids, scale(descent.start, descent.task), descent.plan.momentum, removal)
    begin, kept, kept_rows = 0, descent.at_rest(base), descent.at_rest(rows)
    left = hooks.snapshot and hooks.snapshot.restore(PathState(0, base, rows, None, kept, kept_rows), descent.steps)
    if left:
        base, rows, watch.pull, begin = left.base, left.rows, left.pull, left.step
        kept, kept_rows = left.kept, left.kept_rows
        hooks.skip(begin * count)
    for step, parts in enumerate(descent.batches(begin), begin):
        downhill = descent.base_gradient(base, parts, step)
        change = moving(base, rows, parts, step)
        if descent.damping:
            add_scaled_(change, responses(base, rows), descent.damping)
        descent.move_(rows, change, kept_rows)
        descent.move_(base, downhill, kept)
        del downhill, change  # or the next step would be made beside them
        watch(responses(base, rows), step)
        hooks.advance(count)
        if hooks.snapshot:
            hooks.snapshot.keep(PathState(step + 1, base, rows, watch.pull, kept, kept_rows))
    return base, rows
