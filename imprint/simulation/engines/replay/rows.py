"""Replays the rows of a line-up to their end: the run without each source, and runs from slightly perturbed starts.

Interrupted, they resume from their last snapshot. A row's end holds the trained parameters and all buffers.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from imprint.errors import PlanError, StoreError, first_line
from imprint.simulation.engines.replay.agreement import Watch
from imprint.simulation.engines.replay.remembering import pack_optimiser, restore_optimiser
from imprint.simulation.engines.replay.stack import Rows, Stack
from imprint.simulation.engines.replay.training import Excluded, Repetition, Seen, Training, as_recorded, load_tensors
from imprint.simulation.path import Hooks
from imprint.simulation.snapshot import Found, Snapshot
from imprint.sources import Sources
from imprint.task import Parameters
from imprint.tensors.vectors import row

logger = logging.getLogger(__name__)
NOISE_ROWS = 2
_NOISE = 1e-3  # of a parameter: by how much the start of a noise row differs


@dataclass(frozen=True)
class Lineup:
    """The rows of some sources and, with the first of a checkpoint, of perturbed starts.

    seed: of the perturbed starts; None for no such rows.
    control: whether an unperturbed row goes along, which shows what stacking does to rounding.
    """

    sources: Sources
    seed: int | None = None
    control: bool = False

    @property
    def rows(self) -> Rows:
        nothing = np.zeros(0, dtype=np.int64)
        extra = NOISE_ROWS * (self.seed is not None)
        names = [f"the run without source {identity!r}" for identity in self.sources.ids]
        names += ["the run from a slightly perturbed start"] * extra + ["the unperturbed run"] * self.control
        return Rows((*self.sources.members, *[nothing] * (extra + self.control)), tuple(names))

    def starts(self, start: Parameters, trained: tuple[str, ...]) -> list[Parameters]:
        """Return where the rows begin, not copied: θ₀, or θ₀(1 + 10⁻³z) for normal z."""
        found = [start] * len(self.sources)
        if self.seed is not None:
            draw = torch.Generator().manual_seed(self.seed)
            found += [{**start, **_perturb(start, trained, draw)} for _ in range(NOISE_ROWS)]
        return found + [start] * self.control


def _perturb(start: Parameters, trained: tuple[str, ...], draw: torch.Generator) -> Parameters:
    def perturb(tensor: Tensor) -> Tensor:
        z = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        return (tensor.double() * (1 + _NOISE * z.to(tensor.device))).to(tensor.dtype)

    return {name: perturb(start[name]) for name in trained}


def replay_together(repetition: Repetition, lineup: Lineup, hooks: Hooks, *, plain_attention: bool) -> list[Parameters]:
    """Replay all rows of a line-up as one stack; return where each ends."""
    rows, start = lineup.rows, repetition.start()
    starts = lineup.starts(start, repetition.trained)
    together = {name: torch.stack([each[name] for each in starts]) for name in repetition.trained}
    with as_recorded(repetition.run.circumstances):
        stack = Stack(repetition, rows, together, plain_attention=plain_attention)
        del together, starts
        done, watch = _restore_stack(stack, hooks.snapshot), Watch(rows.names)
        hooks.skip(done * len(lineup.sources))
        for number in repetition.steps[done:]:
            watch.add(number, stack.step(number))
            hooks.advance(len(lineup.sources))
            if hooks.snapshot:
                hooks.snapshot.keep_tensors(number + 1 - repetition.begin, lambda: _pack_stack(stack))
        watch.check()
    buffers = {name: tensor for name, tensor in start.items() if name not in repetition.trained}
    ends = {name: p.detach() for name, p in stack.parameters.items()}
    return [{**row(ends, index), **buffers} for index in range(len(rows))]


def _pack_stack(stack: Stack) -> tuple[Parameters, str]:
    return _pack_with_memory(stack, {f"rows/{name}": p.detach() for name, p in stack.parameters.items()})


def _pack_with_memory(trained: Stack | Training, state: Parameters) -> tuple[Parameters, str]:
    """Return a state with what its optimiser remembers; nothing if that cannot be kept."""
    try:
        tensors, text = pack_optimiser(trained)
    except PlanError as error:
        logger.info("what is interrupted here will start over: %s", error)
        return {}, ""
    return {**state, **{f"memory/{name}": tensor for name, tensor in tensors.items()}}, text


def _restore_stack(stack: Stack, snapshot: Snapshot | None) -> int:
    """Go on from the snapshot of an earlier run, if there is one; return how many steps are behind."""
    found = snapshot.read_tensors(stack.repetition.data.device) if snapshot else None
    if found is None or snapshot is None:
        return 0
    rows = _named(found.tensors, "rows/")
    if not found.note or _shapes(rows) != _shapes(stack.parameters) or found.step > len(stack.repetition.steps):
        return 0
    try:
        restore_optimiser(stack, _named(found.tensors, "memory/"), found.note)
    except StoreError as error:
        snapshot.refuse(first_line(error))
        return 0
    with torch.no_grad():
        for name, p in stack.parameters.items():
            p.copy_(rows[name])
    snapshot.use()
    return found.step


def replay_one_by_one(repetition: Repetition, lineup: Lineup, hooks: Hooks, *, leaves_out: bool) -> list[Parameters]:
    """Replay the rows of a line-up one after the other; return where each ends."""
    rows, starts = lineup.rows, lineup.starts(repetition.start(), repetition.trained)
    ends, left = restore_ends(repetition, len(rows), hooks.snapshot)
    for index in range(len(ends)):
        hooks.skip(len(repetition.steps) * (index < len(lineup.sources)))
    for index in range(len(ends), len(rows)):
        excluded: Excluded = np.zeros(repetition.run.n, dtype=bool)
        excluded[rows.without[index]] = True

        def hear(number: int, seen: Seen, index: int = index) -> None:
            if index >= len(lineup.sources):
                hooks.announce(f"replaying {rows.names[index]}, {repetition.describe_step(number)}")
            hooks.advance(int(index < len(lineup.sources)))

        training = Training(repetition, excluded, leaves_out=leaves_out)
        load_tensors(training.model, starts[index])
        keeping = Keeping(hooks.snapshot, ends, left)
        done = follow(training, keeping, hear, watch=Watch((rows.names[index],)))
        hooks.skip(done * (index < len(lineup.sources)))
        left = None
        ends.append({name: tensor.clone() for name, tensor in training.state().items()})
    return ends


@dataclass(frozen=True)
class Keeping:
    """Where the state of a plain training is kept meanwhile, with the ends of the rows before it.

    left: what an earlier run has left of this training.
    beside: returns what else is kept, under names that nothing else has.
    """

    snapshot: Snapshot | None = None
    ends: list[Parameters] = field(default_factory=list)
    left: Found | None = None
    beside: Callable[[], Parameters] = dict


def follow(
    training: Training, keeping: Keeping, hear: Callable[[int, Seen], None], *, watch: Watch, measure: bool = False
) -> int:
    """Make all steps of a plain training; return how many of them an earlier run had made.

    hear: called with the number of each step that is made and what it shows.
    """
    repetition, snapshot = training.repetition, keeping.snapshot
    done = _restore_training(training, keeping.left)
    with as_recorded(repetition.run.circumstances):
        for number in repetition.steps[done:]:
            seen = training.step(number, measure=measure)
            watch.add(number, seen.loss.reshape(1))
            hear(number, seen)
            if snapshot:
                made = len(keeping.ends) * len(repetition.steps) + number + 1 - repetition.begin
                snapshot.keep_tensors(made, lambda: _pack_training(training, keeping))
        watch.check()
    return done


def _pack_training(training: Training, keeping: Keeping) -> tuple[Parameters, str]:
    """Return the state of a training, with the ends of the rows before it."""
    ends = {f"ends/{index}/{name}": tensor for index, end in enumerate(keeping.ends) for name, tensor in end.items()}
    now, text = _pack_with_memory(training, {f"now/{name}": tensor for name, tensor in training.state().items()})
    return {**ends, **now, **keeping.beside()}, text


def restore_ends(repetition: Repetition, rows: int, snapshot: Snapshot | None) -> tuple[list[Parameters], Found | None]:
    """Return the ends of rows that an earlier run has finished, and what it has left of the one after them."""
    found = snapshot.read_tensors(repetition.data.device) if snapshot else None
    if found is None or snapshot is None:
        return [], None
    count = len({name.split("/")[1] for name in found.tensors if name.startswith("ends/")})
    done = found.step - count * len(repetition.steps)
    ends = [_named(found.tensors, f"ends/{index}/") for index in range(count)]
    expected = {name: tensor.shape for name, tensor in repetition.start().items()}
    if (
        count >= rows
        or not 0 <= done <= len(repetition.steps)
        or any({name: _shapes(end).get(name) for name in expected} != expected for end in ends)
    ):
        snapshot.refuse("its rows are not those of this run")
        return [], None
    snapshot.use()
    return ends, replace(found, step=done)


def _restore_training(training: Training, left: Found | None) -> int:
    """Go on with a training where an earlier run has left it; return how many steps are behind."""
    if left is None or not left.note:
        return 0
    now = _named(left.tensors, "now/")
    if _shapes(now) != _shapes(training.state()):
        return 0
    try:
        restore_optimiser(training, _named(left.tensors, "memory/"), left.note)
    except StoreError:
        return 0
    load_tensors(training.model, now)
    return left.step


def _named(tensors: Parameters, start: str) -> Parameters:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
