"""Tests a task on a few examples before it is simulated, and finds what would make its scores silently wrong.

A simulation differentiates ℓ(θ; i) as a function of the selected parameters θ and of one example i. That is an
assumption about the user's model and loss, and these checks test it: the loss depends on the given model and on no
state kept between calls; it draws no random numbers; an example's loss does not depend on its batch; every weight that
training moves is a parameter of the model. `simulate` and `check` call `examine`.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imprint.batches import own_containers
from imprint.checks.agreement import MOVED
from imprint.compat import has_gradient_hooks
from imprint.data import Data, spread_examples
from imprint.display import count_of, name_some
from imprint.errors import ImprintError, TaskError, first_line
from imprint.model.replica import tensors_of
from imprint.runtime.notices import Notices
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.noise import move_parameters

logger = logging.getLogger(__name__)
_COPIED = 1 << 30  # bytes of parameters; larger models are not compared with an independent copy
_TRIED = 8192  # examples searched for gradients of parameters that seem to have none


def examine(task: Task, state: Parameters, data: Data, notices: Notices) -> None:
    """Refuse a task whose loss is not a function of parameters and single examples; report what imprints leave out."""
    functional, theta = task.at(state)
    examples = spread_examples(len(data))
    batch, count = data.gather(examples), len(examples)
    refuse_changed_parameters(functional, theta, batch, count)
    losses, moved = _losses(functional, theta, batch, count), move_parameters(theta, MOVED, 0)
    checks: list[Callable[[], None]] = [
        lambda: refuse_shared_memory(task),
        lambda: report_unselectable(task, notices),
        lambda: refuse_random_loss(functional, theta, batch, losses),
        lambda: refuse_foreign_tensors(task, functional, theta, batch, count, notices),
        lambda: refuse_batch_dependence(functional, theta, data, examples, losses),
        lambda: refuse_caching(task, functional, theta, moved, batch, count),
        lambda: refuse_swapping_errors(task, functional, moved, batch, count),
        lambda: report_without_gradient(functional, moved, data, batch, count, notices),
    ]
    for check in checks:
        try:
            check()
        except (ImprintError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # such as a model without gradients, which the engine reports
            logger.warning("a check of the task could not run: %s", first_line(error))


def refuse_shared_memory(task: Task) -> None:
    """Refuse a trainable parameter that shares memory with another tensor, as after `a.data = b.data`."""
    tensors = {**dict(task.model.named_parameters()), **dict(task.model.named_buffers())}
    spans = sorted((*_memory_range(tensor), name) for name, tensor in tensors.items() if tensor.numel() > 0)
    reached, one = 0, ""  # the end of the memory seen so far, and the tensor that reaches it
    for start, end, other in spans:
        if start < reached and _overlap(tensors[one], tensors[other]):
            raise TaskError(
                f"{one!r} and {other!r} are two tensors in the same memory: training moves both at once, a simulation "
                "would move them separately. Tie parameters by assignment, such as decoder.weight = encoder.weight."
            )
        if end > reached:
            reached, one = end, other


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether training moves both of two tensors whose memory ranges overlap; columns of one matrix interleave."""
    same = one.data_ptr() == other.data_ptr() or (one.is_contiguous() and other.is_contiguous())
    return same and (one.requires_grad or other.requires_grad)


def _memory_range(tensor: Tensor) -> tuple[int, int]:
    """Return where the values of a tensor begin and end in memory, (0, 0) if it has none."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def report_unselectable(task: Task, notices: Notices) -> None:
    """Report weights that training moves but that cannot be selected as parameters."""
    named = dict(task.model.named_parameters())
    complex_ones = [name for name, p in named.items() if p.requires_grad and p.is_complex()]
    if complex_ones:
        notices.add(
            f"complex parameters have no imprint, so their part of every effect is missing: {name_some(complex_ones)}. "
            "Store them as real parameters (torch.view_as_complex of a real tensor), or freeze them."
        )
    hooked = [name for name, p in named.items() if name in task.names and has_gradient_hooks(p)]
    if hooked:
        notices.add(
            f"gradient hooks are not simulated, so imprints describe training without them: {name_some(hooked)}. Move "
            "what they do into the loss, or leave these parameters out with parameters=."
        )
    known = {id(parameter) for parameter in named.values()}
    hidden = {id(t): t for t in tensors_of(task.model) if t.is_leaf and t.requires_grad and id(t) not in known}
    if hidden:
        shapes = name_some([str(tuple(t.shape)) for t in hidden.values()])
        notices.add(
            f"the model has {count_of(len(hidden), 'trainable tensor')} ({shapes}) outside model.parameters(), whose "
            "part of every effect is missing. Keep weights in nn.Parameter attributes or an nn.ParameterList, and "
            "modules in an nn.ModuleList."
        )


def refuse_changed_parameters(functional: Functional, theta: Parameters, batch: Batch, count: int) -> None:
    """Refuse a loss that changes parameters or buffers in place, such as an embedding that renormalises its rows."""
    weights = {name for name, _ in functional.task.model.named_parameters()}
    kept = {**{name: t for name, t in functional.fixed.items() if name not in weights}, **theta}
    given = {name: tensor.detach().clone() for name, tensor in kept.items()}
    _losses(replace(functional, fixed={**functional.fixed, **given}), given, batch, count)
    changed = [name for name, tensor in kept.items() if not torch.equal(tensor, given[name])]
    if changed:
        raise TaskError(
            f"calling the loss changes parameters or buffers in place ({name_some(changed)}): look for an "
            "embedding with max_norm, weights clamped inside forward, or a counter. Change a copy instead, such as "
            "weight.clamp(-1, 1)."
        )


def refuse_random_loss(functional: Functional, theta: Parameters, batch: Batch, losses: Tensor) -> None:
    """Refuse a loss or a regulariser that returns different values for the same input."""
    again = _losses(functional, theta, batch, len(losses))
    if functional.task.regulariser is not None:
        with torch.no_grad():
            pull, pulled = (functional.regulariser(theta).reshape(1) for _ in range(2))
        if find_difference(pull, pulled, rounding_tolerance(functional.task)) is not None:
            raise TaskError("the regulariser returns a different value on each call: make it deterministic.")
    if (worst := find_difference(losses, again, rounding_tolerance(functional.task))) is not None:
        raise TaskError(
            f"the loss of one example is {float(losses[worst]):.4g} on the first call and {float(again[worst]):.4g} on "
            "the second: it draws random numbers even in evaluation mode (such as F.dropout without "
            "training=self.training), or changes some state. Make it deterministic."
        )


def refuse_foreign_tensors(
    task: Task, functional: Functional, theta: Parameters, batch: Batch, count: int, notices: Notices
) -> None:
    """Refuse a loss that uses the user's own model instead of its argument, and report other trainable tensors.

    All tensors of the model passed in are constants here, so anything that requires a gradient came from elsewhere.
    """
    with torch.enable_grad():
        fixed = {name: tensor.detach() for name, tensor in functional.fixed.items()}
        given = Functional(task, fixed), {name: p.detach() for name, p in theta.items()}
        losses = given[0].losses(given[1], batch, count)
        pull = None if task.regulariser is None else given[0].regulariser(given[1])
    found = find_leaves(losses) + ([] if pull is None else find_leaves(pull))
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    own = [names[id(tensor)] for tensor in found if id(tensor) in names]
    if own:
        raise TaskError(
            f"the loss uses another reference to the model, or a value computed earlier from its weights "
            f"({name_some(own)}): inside loss(model, batch) and regulariser(model) use only the argument `model`, and "
            "compute whatever depends on weights in each call."
        )
    hidden = {id(tensor) for tensor in tensors_of(task.model)}
    others = [tensor for tensor in found if id(tensor) not in hidden]
    if others:  # tensors that a call creates, such as inputs that require gradients, are new each time
        with torch.enable_grad():
            again = {id(tensor) for tensor in find_leaves(given[0].losses(given[1], batch, count))}
        others = [tensor for tensor in others if id(tensor) in again]
    if others:
        shapes = name_some([str(tuple(tensor.shape)) for tensor in others])
        notices.add(
            f"the loss depends on {count_of(len(others), 'trainable tensor')} outside the model ({shapes}), whose part "
            "of every effect is missing. Is it another copy of the model? Inside loss(model, batch) use the argument "
            "`model`; freeze whatever is not trained with requires_grad_(False)."
        )


def refuse_swapping_errors(task: Task, functional: Functional, moved: Parameters, batch: Batch, count: int) -> None:
    """Refuse a model that computes something else with swapped parameters than with parameters of its own.

    Losses and gradients are compared with those of an independent copy after its own eval(). They differ where eval()
    merges weights, or where a backward pass recomputes activations after the swap has ended.
    """
    if sum(t.nbytes for t in (*functional.fixed.values(), *moved.values())) > _COPIED:
        return
    try:
        apart = copy.deepcopy(task.model)
        if {p.data_ptr() for p in apart.parameters()} & {p.data_ptr() for p in task.model.parameters()}:
            return  # the copy shares memory
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
    except Exception:  # no independent copy can be made or used, so there is nothing to compare with
        return
    losses, mine = _losses(functional, moved, batch, count), _gradient(functional, moved, batch, count)
    if (worst := find_difference(losses, values, rounding_tolerance(task))) is not None:
        raise TaskError(
            f"a loss is {float(losses[worst]):.4g}, but {float(values[worst]):.4g} after the model's own eval(): some "
            "module overrides train() and changes weights there. Compute whatever depends on weights in each call."
        )
    apart_by = sum(float((a - b).norm()) ** 2 for a, b in zip(mine, slopes, strict=True)) ** 0.5
    size = sum(float(slope.norm()) ** 2 for slope in slopes) ** 0.5
    if apart_by > max(10 * rounding_tolerance(task), 1e-4) * size > 0:
        raise TaskError(
            f"the gradient at swapped parameters is {100 * apart_by / size:.2g}% off that of a model with the same "
            "parameters: does forward use torch.utils.checkpoint, which recomputes with the model's own weights? "
            "Turn it off for the simulation."
        )


def refuse_batch_dependence(
    functional: Functional, theta: Parameters, data: Data, examples: Tensor, losses: Tensor
) -> None:
    """Refuse a loss whose value for an example depends on the other examples of its batch."""
    if len(examples) < 2:
        return
    try:
        company, found = "alone", [_losses(functional, theta, data.gather(one), 1) for one in examples.split(1)]
    except Exception:  # some models do not accept a batch of one
        pairs = zip(examples, examples.roll(1), strict=True)
        company = "in another batch"
        found = [_losses(functional, theta, data.gather(torch.stack(pair)), 2)[:1] for pair in pairs]
    other = torch.cat(found)
    if (worst := find_difference(losses, other, rounding_tolerance(functional.task))) is not None:
        raise TaskError(
            f"the loss of training example {int(examples[worst])} is {float(losses[worst]):.4g} among other examples "
            f"and {float(other[worst]):.4g} {company}. {ON_ITS_OWN}"
        )
    whole = _gradient(functional, theta, data.gather(examples), len(examples))
    halves = [_gradient(functional, theta, data.gather(part), len(part)) for part in (examples[::2], examples[1::2])]
    apart = sum(float((a - b - c).norm()) ** 2 for a, b, c in zip(whole, *halves, strict=True)) ** 0.5
    if apart > 10 * rounding_tolerance(functional.task) * sum(float(a.norm()) ** 2 for a in whole) ** 0.5:
        raise TaskError(
            "the gradient of a batch is not the sum of its examples' gradients: look for scale_grad_by_freq in an "
            f"embedding, or a custom backward pass over the whole batch. {ON_ITS_OWN}"
        )


ON_ITS_OWN = (
    "The value of an example must not depend on its batch: look for normalisation over the batch, batch norm without "
    "running statistics, in-batch negatives, or padding that the model does not mask."
)


def refuse_caching(
    task: Task, functional: Functional, theta: Parameters, moved: Parameters, batch: Batch, count: int
) -> None:
    """Refuse a model that keeps state between calls, such as a cached weight."""
    _losses(functional, theta, batch, count)
    after = _losses(functional, moved, batch, count)
    with task.afresh():
        fresh = _losses(functional, moved, batch, count)
    if (worst := find_difference(fresh, after, rounding_tolerance(task))) is not None:
        raise TaskError(
            "the model keeps state from one call to the next: at other parameters a loss is "
            f"{float(after[worst]):.4g}, but {float(fresh[worst]):.4g} in a fresh copy of the model. Compute anything "
            "that depends on the weights in each call instead of caching it."
        )


def report_without_gradient(
    functional: Functional, moved: Parameters, data: Data, batch: Batch, count: int, notices: Notices
) -> None:
    """Report selected parameters without a gradient on any example; refuse if that is all of them.

    Gradients are taken near θ, not at θ, where a factor that happens to be 0, as in a fresh adapter, would hide some.
    """
    still = _without_gradient(functional, moved, batch, count, list(moved))
    seen = 0
    for indices, part in data.batches():
        if not still or seen >= _TRIED:
            break
        still, seen = _without_gradient(functional, moved, part, len(indices), still), seen + len(indices)
    if not still:
        return
    if len(still) == len(moved) and not _depends_on(functional, moved, batch, count):
        raise TaskError(
            "the loss does not depend on the model it is given: no selected parameter changes it on any example. "
            "Inside loss(model, batch), use the argument `model`, and keep the computation differentiable: no "
            "torch.no_grad, .detach() or NumPy."
        )
    notices.add(
        f"{count_of(len(still), 'selected parameter')} {'has' if len(still) == 1 else 'have'} no gradient on any "
        f"training example, so no source gets credit through {'it' if len(still) == 1 else 'them'}: "
        f"{name_some(still)}. If training moves {'it' if len(still) == 1 else 'them'}, look for detached or cached "
        "values; otherwise leave it out with parameters=."
    )


def rounding_tolerance(task: Task) -> float:
    """Return the relative difference that rounding may cause between two ways to compute a value."""
    widths = {p.dtype.itemsize for p in task.model.parameters() if p.is_floating_point()}
    if min(widths) < 4 or getattr(task, "compute", None) or torch.is_autocast_enabled(task.device.type):
        return 0.1
    if task.device.type != "cpu":
        return 1e-2  # convolutions in TF32
    return 1e-5 if min(widths) == 8 else 1e-3


def find_difference(one: Tensor, other: Tensor, allowed: float) -> int | None:
    """Return where two rows of values differ most, of the places beyond the allowed relative difference, or None."""
    one, other = one.detach().double(), other.detach().double()
    finite = one.isfinite() & other.isfinite()
    size = torch.maximum(one.abs(), other.abs())
    typical = size[finite].square().mean().sqrt() if bool(finite.any()) else size.new_zeros(())
    excess = (one - other).abs() - allowed * (size + typical)
    excess = torch.where(finite, excess, -torch.inf)  # non-finite values are refused elsewhere
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


def _depends_on(functional: Functional, theta: Parameters, batch: Batch, count: int) -> bool:
    """Return whether any loss at θ differs, even in the last bit, from its value at parameters near and far."""
    here = _losses(functional, theta, batch, count)
    far = (move_parameters(theta, distance, 0) for distance in (MOVED, 1.0, 10.0))
    return any(not torch.equal(here, _losses(functional, at, batch, count)) for at in far)


def _without_gradient(
    functional: Functional, theta: Parameters, batch: Batch, count: int, names: Iterable[str]
) -> list[str]:
    """List the named parameters whose gradient is zero or absent."""
    names = list(names)
    with torch.enable_grad():
        leaves = {name: p.detach().requires_grad_() for name, p in theta.items() if name in set(names)}
        losses = functional.losses({**theta, **leaves}, batch, count)
        if not losses.requires_grad:
            return names
        slopes = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    gradients: Mapping[str, Any] = dict(zip(leaves, slopes, strict=True))
    return [name for name in names if gradients[name] is None or not bool(gradients[name].any())]


def find_leaves(values: Tensor) -> list[Tensor]:
    """List the tensors requiring a gradient that some values were computed from."""
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
