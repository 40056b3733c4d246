"""How the runs without a source are made: as a stack, or one by one; at weight 0, or left out of batches."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from imprint.batches import Batch, is_columnar, leaves, map_tensors
from imprint.compat import trains_batch_norm
from imprint.errors import SimulationError
from imprint.recording.records import MicroBatch, micro_seed
from imprint.recording.seeding import seed_everything
from imprint.simulation.engines.replay.agreement import tolerance
from imprint.simulation.engines.replay.optimisers import find_why_not_stackable
from imprint.simulation.engines.replay.stack import Rows, Stack
from imprint.simulation.engines.replay.training import Excluded, Repetition, Training, compute_losses
from imprint.store.checkpoint import LEFT_OUT
from imprint.task import Parameters
from imprint.tensors.batching import attempt
from imprint.tensors.vectors import repeated

logger = logging.getLogger(__name__)
_TRIED = 2  # steps that are made both ways


@dataclass(frozen=True)
class Way:
    """How rows are replayed.

    leaves_out: whether examples are left out of batches, because those of a batch see each other.
    one_by_one: why rows are not stacked; None if they are.
    plain_attention: whether a stack computes attention by plain matrix products instead of the user's kernels.
    fresh_draws: why the examples that stay in a batch get other random numbers than in training; None if they do not.
    """

    leaves_out: bool
    one_by_one: str | None
    plain_attention: bool = False
    fresh_draws: str | None = None


def find_way(repetition: Repetition, *, stacks: bool = True) -> Way:
    """Find out how the runs without a source can be made; `stacks` if many of them may be made at once."""
    dependence = find_dependence(repetition)
    if dependence is None and not stacks:
        return Way(False, "the plan has stacked=False")
    way = leave_out(repetition, dependence) if dependence is not None else _try_stack(repetition)
    if way.one_by_one is not None:
        logger.warning("runs are replayed one by one: %s", way.one_by_one)
    return way


def leave_out(repetition: Repetition, reason: str) -> Way:
    """Return the way that leaves examples out of batches; a step without one of them shows what is drawn for others."""
    step, _, micro = next(_larger_batches(repetition), (0, 0, None))
    excluded: Excluded = np.zeros(repetition.run.n, dtype=bool)
    if micro is not None:
        excluded[micro.examples[0]] = True
    training = Training(repetition, excluded, leaves_out=True)
    training.step(step if micro is not None else repetition.begin)
    return Way(True, reason, fresh_draws=training.fresh_draws)


def find_dependence(repetition: Repetition) -> str | None:
    """Return why the loss of an example depends on which others are in its batch; None if it does not."""
    model, run = repetition.make_model(), repetition.run
    if trains_batch_norm(model):
        return f"batch normalisation lets examples of a batch see each other, {LEFT_OUT}"
    first = repetition.begin, 0, run.steps[repetition.begin].batches[0]
    step, index, micro = next(_larger_batches(repetition), first)
    examples, batch = repetition.gather(micro)
    count, seed = len(examples), micro_seed(run.steps[step].seed, index)

    def losses(given: Batch) -> Tensor:
        seed_everything(seed)
        with torch.no_grad():
            return compute_losses(repetition, model, given, count)

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plain = losses(batch)
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            return f"a forward pass in training changes the buffer {name!r}, {LEFT_OUT}"
    if len(set(micro.examples)) == 1:  # as in every batch of the run: nobody is there to be seen
        return None
    places = torch.arange(count)
    places[-1] = 0  # in place of the last example the first one again
    if is_columnar(batch, count):
        other = map_tensors(lambda t: t[places.to(t.device)], batch)
    else:
        other = repetition.data.gather(examples[places])
        if _shapes(other) != _shapes(batch):  # which draw other random numbers: compare without them
            model.eval()
            plain = losses(batch)
    change = (losses(other) - plain)[:-1].abs().max()
    if float(change) > tolerance(repetition) * float(plain.abs().mean()):
        return f"the loss of an example depends on the others in its batch, {LEFT_OUT}"
    return None


def _shapes(batch: Batch) -> list[torch.Size]:
    return [leaf.shape for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def find_unkept_state(repetition: Repetition, *, twice: bool) -> str | None:
    """Name a tensor that forward passes change and no checkpoint keeps; None if there is none.

    twice: whether a replay makes two passes of a batch where a source is left out. A loss that differs from one to the
        other is refused then.
    """
    model, step = repetition.make_model(), repetition.run.steps[repetition.begin]
    examples, batch = repetition.gather(step.batches[0])
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    # frozen parameters are those of the user's model, and may be most of it: they are neither copied nor written to
    persistent = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in frozen}

    def forward() -> tuple[Tensor, Parameters]:
        model.load_state_dict(persistent, strict=False)
        seed_everything(micro_seed(step.seed, 0))
        with torch.no_grad():
            losses = compute_losses(repetition, model, batch, len(examples))
        return losses, {name: tensor.detach().clone() for name, tensor in _list_unkept(model, persistent)}

    (first, before), (second, after) = forward(), forward()
    if twice and float((first - second).abs().max()) > tolerance(repetition) * float(first.abs().mean()):
        raise SimulationError(
            "the loss of the same batch with the same random numbers differs from one forward pass to the next: the "
            "model or the loss counts its calls, or remembers them outside its buffers, and examples of a batch see "
            "each other. Such a training cannot be replayed without a source: keep that state in a buffer."
        )
    for name, tensor in before.items():
        other = after.get(name)
        if other is not None and other.shape == tensor.shape and not torch.equal(other, tensor):
            return repr(name)
    return None


def _list_unkept(model: nn.Module, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """List non-persistent buffers, and tensors that modules have as plain attributes."""
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in kept)
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{place}.{name}".lstrip("."), value


def _larger_batches(repetition: Repetition) -> Iterator[tuple[int, int, MicroBatch]]:
    """Yield the micro-batches of different examples, each with its step and its number there."""
    for step in repetition.steps:
        for index, micro in enumerate(repetition.run.steps[step].batches):
            if len(set(micro.examples)) > 1:
                yield step, index, micro


def _try_stack(repetition: Repetition) -> Way:
    """Find out whether many runs can be made at once, and by which attention."""
    reason = _find_why_not_moved(repetition)
    if reason is not None:
        return Way(False, reason)
    own, slow = _find_why_not_computed(repetition, plain_attention=False)
    if own is None and not slow:
        return Way(False, None)
    plain, still_slow = _find_why_not_computed(repetition, plain_attention=True)
    if plain is None and (own is not None or not still_slow):
        return Way(False, None, plain_attention=True)
    return Way(False, own)


def _find_why_not_moved(repetition: Repetition) -> str | None:
    """Return why the optimiser cannot move many runs at once; None if it can."""
    run, steps = repetition.run, repetition.steps
    if any(run.steps[number].closure for number in steps):
        return f"{run.optimiser.__name__} evaluates the loss itself, as often as it wants"
    shapes = dict(repetition.task.model.named_parameters())
    groups = [[shapes[name].shape for name in group] for group in run.groups]
    return find_why_not_stackable(run.optimiser, run.steps[steps[0]].groups, groups)


def _find_why_not_computed(repetition: Repetition, *, plain_attention: bool) -> tuple[str | None, bool]:
    """Return why the losses of many runs cannot be computed at once, None if they can; and whether that is slow."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        missed, reason = attempt(lambda: _compare_ways(repetition, plain_attention))
    slow = any("batching rule" in str(warning.message) for warning in found)
    if missed is None:
        return f"vmap does not support this model: {reason}", slow
    if missed > 10 * tolerance(repetition):
        return f"losses differ between stacked and plain training, by {missed:.1g} in {_TRIED} steps", slow
    return None, slow


def _compare_ways(repetition: Repetition, plain_attention: bool) -> float:
    """Return the largest relative difference in loss between an unperturbed row of a stack and a plain training.

    Parameters would not do: those without a gradient follow rounding wherever Adam takes them.
    """
    nothing = np.zeros(0, dtype=np.int64)
    rows, start = Rows((nothing, nothing), ("a row", "another")), repeated(repetition.start(), 2)
    stack = Stack(repetition, rows, start, plain_attention=plain_attention)
    plain = Training(repetition)
    losses = [(stack.step(number)[0], plain.step(number).loss) for number in repetition.steps[:_TRIED]]
    return max(abs(float(one - other)) / max(abs(float(other)), 1e-30) for one, other in losses)
