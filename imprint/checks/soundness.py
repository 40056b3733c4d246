"""Tries a task on a few examples before it is simulated, and finds what would make its scores silently wrong.

A simulation differentiates ℓ(θ; i) as a function of the selected parameters θ and of one example i. That is a claim
about the user's model and loss, and here it is put to the test: the loss is a function of the model it is given, and of
nothing it keeps from call to call; it does not draw random numbers; an example's loss does not depend on its
neighbours; every weight that training moves is a parameter of the model. `simulate` and `check` call `examine`.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imprint.compat import has_gradient_hooks
from imprint.data import Data
from imprint.errors import ImprintError, TaskError, first_line
from imprint.model.replica import tensors_of
from imprint.runtime.notices import Notices
from imprint.task import Batch, Functional, Parameters, Task, own_containers

logger = logging.getLogger(__name__)
PROBES = 8  # examples that are tried
_NAMED = 6  # names in a message
_COPIED = 1 << 30  # bytes of parameters up to which a model is compared with a copy that has weights of its own
_TRIED = 8192  # examples on which parameters without a gradient are looked at
_MOVED = 0.02  # by how much parameters are moved, relative to the root mean square of each tensor


def examine(task: Task, state: Parameters, data: Data, notices: Notices) -> None:
    """Refuse a task whose loss is no function of parameters and single examples; report what its imprints leave out."""
    functional, theta = task.at(state)
    spread = torch.linspace(0, len(data) - 1, min(PROBES, len(data)), dtype=torch.float64)
    examples = spread.round().long().unique()
    batch, count = data.gather(examples), len(examples)
    refuse_changed_parameters(functional, theta, batch, count)
    losses, moved = _losses(functional, theta, batch, count), moved_from(theta)
    checks: list[Callable[[], None]] = [
        lambda: refuse_shared_memory(task),
        lambda: report_unselectable(task, notices),
        lambda: refuse_random_losses(functional, theta, batch, losses),
        lambda: refuse_foreign_tensors(task, functional, theta, batch, count, notices),
        lambda: refuse_batch_dependence(functional, theta, data, examples, losses),
        lambda: refuse_memory(task, functional, theta, moved, batch, count),
        lambda: refuse_other_model(task, functional, moved, batch, count),
        lambda: report_still_parameters(functional, moved, data, batch, count, notices),
    ]
    for check in checks:
        try:
            check()
        except (ImprintError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model that takes no gradient: the engine says so in its own words
            logger.warning("a check of the task could not be made: %s", first_line(error))


def refuse_shared_memory(task: Task) -> None:
    """Refuse a trainable parameter that shares memory with another tensor, as `a.data = b.data` makes it."""
    tensors = {**dict(task.model.named_parameters()), **dict(task.model.named_buffers())}
    spans = sorted((*_memory(tensor), name) for name, tensor in tensors.items() if tensor.numel() > 0)
    reached, one = 0, ""  # how far memory is taken, and by which tensor
    for start, end, other in spans:
        if start < reached and _share(tensors[one], tensors[other]):
            raise TaskError(
                f"{one!r} and {other!r} are two tensors in the same memory: training moves both at once, a simulation "
                "would move each by itself. Tie parameters by making them one, such as decoder.weight = encoder.weight."
            )
        if end > reached:
            reached, one = end, other


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether training moves two tensors at once whose spans of memory overlap; columns of one matrix interleave."""
    same = one.data_ptr() == other.data_ptr() or (one.is_contiguous() and other.is_contiguous())
    return same and (one.requires_grad or other.requires_grad)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where the values of a tensor begin and end in memory; nowhere for one that holds none."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def report_unselectable(task: Task, notices: Notices) -> None:
    """Report weights that training moves and that no choice of parameters can reach."""
    named = dict(task.model.named_parameters())
    complex_ones = [name for name, p in named.items() if p.requires_grad and p.is_complex()]
    if complex_ones:
        notices.add(
            f"complex parameters carry no imprint, and their share of every effect is missing: {_few(complex_ones)}. "
            "Hold them as real parameters (torch.view_as_complex of a real tensor), or freeze them."
        )
    hooked = [name for name, p in named.items() if name in task.names and has_gradient_hooks(p)]
    if hooked:
        notices.add(
            f"hooks on the gradients of parameters are not simulated, and imprints are those of training without them: "
            f"{_few(hooked)}. Put what they do into the loss, or leave these parameters out with parameters=."
        )
    known = {id(parameter) for parameter in named.values()}
    hidden = {id(t): t for t in tensors_of(task.model) if t.is_leaf and t.requires_grad and id(t) not in known}
    if hidden:
        shapes = _few([str(tuple(t.shape)) for t in hidden.values()])
        notices.add(
            f"{_count(len(hidden), 'trainable tensor')} of the model ({shapes}) "
            "can carry no imprint, because it is no parameter of it, and its share of every effect is missing. "
            "Hold weights in nn.Parameter attributes or an nn.ParameterList, and modules in an nn.ModuleList."
        )


def refuse_changed_parameters(functional: Functional, theta: Parameters, batch: Batch, count: int) -> None:
    """Refuse a loss that changes parameters in place, such as an embedding that renormalises its rows."""
    weights = {name for name, _ in functional.task.model.named_parameters()}
    kept = {**{name: t for name, t in functional.fixed.items() if name not in weights}, **theta}
    given = {name: tensor.detach().clone() for name, tensor in kept.items()}
    _losses(replace(functional, fixed={**functional.fixed, **given}), given, batch, count)
    changed = [name for name, tensor in kept.items() if not torch.equal(tensor, given[name])]
    if changed:
        raise TaskError(
            f"calling the loss changes parameters or buffers in place ({_few(changed)}): an embedding with max_norm, "
            "weights clamped inside forward, or a counter do. Change a copy instead, such as weight.clamp(-1, 1)."
        )


def refuse_random_losses(functional: Functional, theta: Parameters, batch: Batch, losses: Tensor) -> None:
    """Refuse a loss that is another one each time it is asked for."""
    again = _losses(functional, theta, batch, len(losses))
    if functional.task.regulariser is not None:
        with torch.no_grad():
            pull, pulled = (functional.regulariser(theta).reshape(1) for _ in range(2))
        if furthest(pull, pulled, tolerance(functional.task)) is not None:
            raise TaskError("the regulariser is another number each time it is asked for: make it the same each time.")
    if (worst := furthest(losses, again, tolerance(functional.task))) is not None:
        raise TaskError(
            f"the loss of one example is {float(losses[worst]):.4g} and then, asked again, {float(again[worst]):.4g}: "
            "it draws random numbers in evaluation mode too (such as F.dropout without training=self.training), or "
            "changes something as it is called. Make it the same each time."
        )


def refuse_foreign_tensors(
    task: Task, functional: Functional, theta: Parameters, batch: Batch, count: int, notices: Notices
) -> None:
    """Refuse a loss that uses the user's own model in place of the one it is given; report other trainable tensors.

    All tensors of the given model are constants here, so whatever still asks for a gradient came from elsewhere.
    """
    with torch.enable_grad():
        fixed = {name: tensor.detach() for name, tensor in functional.fixed.items()}
        given = Functional(task, fixed), {name: p.detach() for name, p in theta.items()}
        losses = given[0].losses(given[1], batch, count)
        pull = None if task.regulariser is None else given[0].regulariser(given[1])
    found = leaves_of(losses) + ([] if pull is None else leaves_of(pull))
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    own = [names[id(tensor)] for tensor in found if id(tensor) in names]
    if own:
        raise TaskError(
            f"the loss does not use the model that it is given, but another reference to it or a value that was "
            f"computed from its weights before ({_few(own)}): inside loss(model, batch) and regulariser(model) use the "
            "argument `model` only, and compute what depends on weights in each call."
        )
    hidden = {id(tensor) for tensor in tensors_of(task.model)}
    others = [tensor for tensor in found if id(tensor) not in hidden]
    if (
        others
    ):  # those that a call makes itself, such as inputs that are told to require gradients, are others each time
        with torch.enable_grad():
            again = {id(tensor) for tensor in leaves_of(given[0].losses(given[1], batch, count))}
        others = [tensor for tensor in others if id(tensor) in again]
    if others:
        shapes = _few([str(tuple(tensor.shape)) for tensor in others])
        notices.add(
            f"the loss depends on {_count(len(others), 'trainable tensor')} outside the model ({shapes}), whose share "
            "of every effect is missing. Is it another copy of the model? Inside loss(model, batch) use the argument "
            "`model`; freeze what is not trained with requires_grad_(False)."
        )


def refuse_other_model(task: Task, functional: Functional, moved: Parameters, batch: Batch, count: int) -> None:
    """Refuse a model that does other things with swapped parameters than with parameters of its own.

    A copy with weights of its own, put to evaluation mode by itself, has the losses and gradients to compare with. They
    differ where eval() merges weights, or where a backward pass computes activations again after the swap is over.
    """
    if sum(t.nbytes for t in (*functional.fixed.values(), *moved.values())) > _COPIED:
        return
    try:
        apart = copy.deepcopy(task.model)
        if {p.data_ptr() for p in apart.parameters()} & {p.data_ptr() for p in task.model.parameters()}:
            return  # it is no copy
        state = {**functional.fixed, **moved}
        tensors = {**dict(apart.named_parameters()), **dict(apart.named_buffers())}
        with torch.no_grad():
            for name, tensor in state.items():
                tensors[name].copy_(tensor)
        apart.eval()
        with torch.enable_grad():
            theirs = task.loss(apart, own_containers(batch))
            values = theirs.detach()
            leaves = [tensors[name] for name in moved]
            slopes = torch.autograd.grad(theirs.sum(), leaves, allow_unused=True, materialize_grads=True)
    except Exception:  # it cannot be copied with weights of its own, or not used so: nothing to compare with
        return
    losses, mine = _losses(functional, moved, batch, count), _gradient(functional, moved, batch, count)
    if (worst := furthest(losses, values, tolerance(task))) is not None:
        raise TaskError(
            f"a loss is {float(losses[worst]):.4g}, and after the model's own eval() {float(values[worst]):.4g}: some "
            "module overrides train() and changes weights there. Compute what depends on weights in each call."
        )
    apart_by = sum(float((a - b).norm()) ** 2 for a, b in zip(mine, slopes, strict=True)) ** 0.5
    size = sum(float(slope.norm()) ** 2 for slope in slopes) ** 0.5
    if apart_by > max(10 * tolerance(task), 1e-4) * size > 0:
        raise TaskError(
            f"the gradient by swapped parameters is {100 * apart_by / size:.2g}% off that of a model with these "
            "parameters: does forward use torch.utils.checkpoint, which computes again with the model's own weights? "
            "Turn it off for the simulation."
        )


def refuse_batch_dependence(
    functional: Functional, theta: Parameters, data: Data, examples: Tensor, losses: Tensor
) -> None:
    """Refuse a loss in which an example's value depends on the other examples of its batch."""
    if len(examples) < 2:
        return
    try:
        company, found = "alone", [_losses(functional, theta, data.gather(one), 1) for one in examples.split(1)]
    except Exception:  # some models take no batch of one
        pairs = zip(examples, examples.roll(1), strict=True)
        company = "in other company"
        found = [_losses(functional, theta, data.gather(torch.stack(pair)), 2)[:1] for pair in pairs]
    other = torch.cat(found)
    if (worst := furthest(losses, other, tolerance(functional.task))) is not None:
        raise TaskError(
            f"the loss of training example {int(examples[worst])} is {float(losses[worst]):.4g} among other examples "
            f"and {float(other[worst]):.4g} {company}. {ON_ITS_OWN}"
        )
    whole = _gradient(functional, theta, data.gather(examples), len(examples))
    halves = [_gradient(functional, theta, data.gather(part), len(part)) for part in (examples[::2], examples[1::2])]
    apart = sum(float((a - b - c).norm()) ** 2 for a, b, c in zip(whole, *halves, strict=True)) ** 0.5
    if apart > 10 * tolerance(functional.task) * sum(float(a.norm()) ** 2 for a in whole) ** 0.5:
        raise TaskError(
            "the gradient of a batch is not the sum of its examples' gradients: look for scale_grad_by_freq in an "
            f"embedding, and for what a backward pass does with the whole batch. {ON_ITS_OWN}"
        )


ON_ITS_OWN = (
    "An example must have a value of its own: look for normalisation over the batch, batch norm without running "
    "statistics, negatives taken from the batch, or padding that the model does not mask."
)


def refuse_memory(
    task: Task, functional: Functional, theta: Parameters, moved: Parameters, batch: Batch, count: int
) -> None:
    """Refuse a model that keeps something from one call for the next, such as a weight derived in evaluation mode."""
    _losses(functional, theta, batch, count)
    after = _losses(functional, moved, batch, count)
    with task.afresh():
        fresh = _losses(functional, moved, batch, count)
    if (worst := furthest(fresh, after, tolerance(task))) is not None:
        raise TaskError(
            "the model keeps something from one call for the next: at other parameters a loss is "
            f"{float(after[worst]):.4g} where a fresh copy of the model says {float(fresh[worst]):.4g}. Compute what "
            "depends on weights in each call, instead of caching it."
        )


def report_still_parameters(
    functional: Functional, moved: Parameters, data: Data, batch: Batch, count: int, notices: Notices
) -> None:
    """Report selected parameters that have no gradient on any example; refuse if none has one.

    Gradients are taken a little beside θ, where a factor that happens to be 0, as of a fresh adapter, hides nothing.
    """
    still = _without_gradient(functional, moved, batch, count, list(moved))
    seen = 0
    for indices, part in data.batches():
        if not still or seen >= _TRIED:
            break
        still, seen = _without_gradient(functional, moved, part, len(indices), still), seen + len(indices)
    if not still:
        return
    if len(still) == len(moved) and not _depends(functional, moved, batch, count):
        raise TaskError(
            "the loss does not depend on the model it is given: no selected parameter changes it on any example. "
            "Inside loss(model, batch) use the argument `model`, and compute the loss with gradients: without "
            "torch.no_grad, .detach() or numpy."
        )
    if still:
        notices.add(
            f"{_count(len(still), 'selected parameter')} {'has' if len(still) == 1 else 'have'} no gradient on any "
            f"training example, so that no source gets credit through {'it' if len(still) == 1 else 'them'}: "
            f"{_few(still)}. If training moves {'it' if len(still) == 1 else 'them'}, look for detached or cached "
            "values; otherwise leave it out with parameters=."
        )


def moved_from(theta: Parameters, by: float = _MOVED) -> Parameters:
    """θ moved a little in every direction, by a draw that is always the same; `by` is relative to its size."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, p in theta.items():
        size = float(torch.linalg.vector_norm(p.detach(), dtype=torch.float64)) / max(p.numel(), 1) ** 0.5
        draw = torch.randn(p.shape, generator=generator, dtype=torch.float32)
        moved[name] = p.detach() + (by * max(size, 0.1)) * draw.to(p)
    return moved


def tolerance(task: Task) -> float:
    """The relative difference that rounding may make between two ways to compute a value."""
    widths = {p.dtype.itemsize for p in task.model.parameters() if p.is_floating_point()}
    if min(widths) < 4 or getattr(task, "compute", None) or torch.is_autocast_enabled(task.device.type):
        return 0.1
    if task.device.type != "cpu":
        return 1e-2  # convolutions in TF32
    return 1e-5 if min(widths) == 8 else 1e-3


def furthest(one: Tensor, other: Tensor, allowed: float) -> int | None:
    """Where two rows of values differ most beyond what is allowed, relative to their size; None if nowhere."""
    one, other = one.detach().double(), other.detach().double()
    finite = one.isfinite() & other.isfinite()
    size = torch.maximum(one.abs(), other.abs())
    typical = size[finite].square().mean().sqrt() if bool(finite.any()) else size.new_zeros(())
    excess = (one - other).abs() - allowed * (size + typical)
    excess = torch.where(finite, excess, -torch.inf)  # what is never finite is refused elsewhere, by its example
    excess = torch.where(one.isfinite() ^ other.isfinite(), torch.inf, excess)
    return int(excess.argmax()) if bool((excess > 0).any()) else None


def _losses(functional: Functional, theta: Parameters, batch: Batch, count: int) -> Tensor:
    with torch.no_grad():
        return functional.losses(theta, batch, count)


def _gradient(functional: Functional, theta: Parameters, batch: Batch, count: int) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [p.detach().requires_grad_() for p in theta.values()]
        total = functional.losses(dict(zip(theta, leaves, strict=True)), batch, count).sum()
        if not total.requires_grad:
            return tuple(torch.zeros_like(p) for p in leaves)
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def _depends(functional: Functional, theta: Parameters, batch: Batch, count: int) -> bool:
    """Whether any loss changes to the bit between θ and places near and far."""
    here = _losses(functional, theta, batch, count)
    far = (moved_from(theta, by) for by in (_MOVED, 1.0, 10.0))
    return any(not torch.equal(here, _losses(functional, at, batch, count)) for at in far)


def _without_gradient(
    functional: Functional, theta: Parameters, batch: Batch, count: int, names: Iterable[str]
) -> list[str]:
    """Which of some parameters have a gradient of zeros, or none at all."""
    names = list(names)
    with torch.enable_grad():
        leaves = {name: p.detach().requires_grad_() for name, p in theta.items() if name in set(names)}
        losses = functional.losses({**theta, **leaves}, batch, count)
        if not losses.requires_grad:
            return names
        slopes = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    slope_of: Mapping[str, Any] = dict(zip(leaves, slopes, strict=True))
    return [name for name in names if slope_of[name] is None or not bool(slope_of[name].any())]


def leaves_of(values: Tensor) -> list[Tensor]:
    """The tensors that ask for a gradient and that some values were computed from."""
    found: dict[int, Tensor] = {}
    if values.is_leaf:
        return [values] if values.requires_grad else []
    pending, seen = [values.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found[id(variable)] = variable
        pending += [inner for inner, _ in node.next_functions]
    return list(found.values())


def _few(names: list[str]) -> str:
    others = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {others} more" if others > 0 else "")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
