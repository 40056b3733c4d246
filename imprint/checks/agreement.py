"""Compares derivatives with finite differences, in float64, where only a wrong derivative makes them differ.

A custom autograd function with a wrong rule, or a detached value, gives derivatives that are not those of the function.
Curvature and readouts would then be wrong without any sign of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from imprint.batches import map_tensors
from imprint.runtime.memory import tensor_bytes
from imprint.runtime.turns import jvp
from imprint.task import Batch, Functional, Parameters

NOTICED = 0.01  # relative error above which derivatives are reported
MOVED = 0.02  # how far parameters are moved in a check, relative to the root mean square of each tensor
_STEPS = (1e-6, 1e-4, 1e-2)  # relative to the parameters; the shortest crosses no kink and is far above rounding
_SURE = 10  # how much larger an error must be than the disagreement of two step sizes
_LARGEST = 1 << 30  # bytes of float64 parameters; larger models are not compared


def to_float64(functional: Functional, theta: Parameters, batch: Batch) -> tuple[Functional, Parameters, Batch] | None:
    """Convert a task, its parameters and a batch to float64; None if too large, or if the task fixes its own dtype."""
    everything: Mapping[str, Tensor] = {**functional.fixed, **theta}
    if getattr(functional.task, "compute", None) or 2 * tensor_bytes(everything) > _LARGEST:
        return None
    fixed = {name: _double(tensor) for name, tensor in functional.fixed.items()}
    return (
        replace(functional, fixed=fixed),
        {name: _double(tensor) for name, tensor in theta.items()},
        map_tensors(_double, batch),
    )


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def derivative_error(
    values: Callable[[Parameters], Tensor], slope: Tensor, theta: Parameters, direction: Parameters
) -> float:
    """Return the relative difference between a derivative along a direction and finite differences.

    It is 0 where finite differences are inconclusive: a model may round to float32 inside, or have kinks within the
    shortest step.
    """
    length = _norm(direction)
    if length == 0:
        return 0.0
    found = []
    for relative in _STEPS:
        step = relative * max(_norm(theta), 1e-3) / length
        near = _central_difference(values, theta, direction, step)
        apart, size = float((slope.double() - near).norm()), max(float(slope.norm()), float(near.norm()))
        if apart <= NOTICED * size:
            return 0.0
        unsure = float((near - _central_difference(values, theta, direction, 2 * step)).norm())
        found.append((unsure, apart, size))
    unsure, apart, size = min(found)
    return apart / size if apart > _SURE * unsure else 0.0


def _central_difference(
    values: Callable[[Parameters], Tensor], theta: Parameters, direction: Parameters, step: float
) -> Tensor:
    with torch.no_grad():
        ahead, behind = (
            values({name: p + sign * step * direction[name] for name, p in theta.items()}).double()
            for sign in (1.0, -1.0)
        )
    return (ahead - behind) / (2 * step)


def measurement_error(
    functional: Functional, theta: Parameters, batch: Batch, count: int, direction: Parameters, *, backward: bool
) -> float:
    """Return the `derivative_error` of a measurement, with the derivative from forward mode or from gradients."""
    wide = to_float64(functional, theta, batch)
    if wide is None:
        return 0.0
    functional, theta, batch = wide
    direction = {name: _double(tensor) for name, tensor in direction.items()}

    def values(at: Parameters) -> Tensor:
        return functional.measures(at, batch, count)

    if not backward:
        return derivative_error(values, jvp(values, (theta,), (direction,))[1], theta, direction)
    with torch.enable_grad():
        leaves = {name: p.requires_grad_() for name, p in theta.items()}
        each = values(leaves)
        rows = [
            torch.autograd.grad(value, list(leaves.values()), retain_graph=True, materialize_grads=True)
            if value.requires_grad
            else [torch.zeros_like(p) for p in leaves.values()]
            for value in each
        ]
    slopes = [sum((g * direction[name]).sum() for name, g in zip(leaves, row, strict=True)) for row in rows]
    theta = {name: p.detach() for name, p in leaves.items()}
    return derivative_error(values, torch.stack([torch.as_tensor(slope) for slope in slopes]), theta, direction)


def _norm(vector: Parameters) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in vector.values()))
