"""Compares the curvature that responses will see with differences of gradients, on a few examples in float64."""

import torch
from torch import Tensor

from imprint.checks.agreement import MOVED, NOTICED, derivative_error, to_float64
from imprint.data import Data
from imprint.plan import Curvature, first_order_engine
from imprint.runtime.notices import Notices
from imprint.runtime.turns import jvp
from imprint.simulation.derivatives import gradient, gradient_along
from imprint.task import Functional, Parameters
from imprint.tensors.noise import move_parameters

_EXAMPLES = 2


def report_curvature(functional: Functional, theta: Parameters, data: Data, kind: Curvature, notices: Notices) -> None:
    """Report a loss whose second derivatives are not the derivatives of its gradients."""
    count = min(_EXAMPLES, len(data))
    wide = to_float64(functional, theta, data.gather(torch.arange(count)))
    if wide is None:
        return
    functional, theta, batch = wide
    direction = {name: there - theta[name] for name, there in move_parameters(theta, MOVED, 0).items()}
    weights = torch.ones(count, dtype=torch.float64, device=data.device)

    def outputs(at: Parameters) -> Tensor:
        return functional.outputs(at, batch).flatten()

    def slopes(at: Parameters) -> Tensor:
        return _flat(gradient(functional, at, weights, batch, plain=True)[0])

    try:
        if kind == "gauss-newton":
            found = derivative_error(outputs, jvp(outputs, (theta,), (direction,))[1], theta, direction)
        else:
            along = gradient_along(functional, theta, weights, batch, direction, torch.zeros_like(weights))
            found = derivative_error(slopes, _flat(along), theta, direction)
    except Exception:  # a model that float64 or forward mode does not take: the engine itself says so
        return
    if found > NOTICED:
        notices.add(
            f"the curvature of the loss, by forward mode, is {100 * found:.2g}% off the differences of its gradients: "
            "look for .detach() in the loss and for custom autograd functions. Imprints are wrong by about as much; "
            f'engine="{first_order_engine()}" uses gradients alone.'
        )


def _flat(parameters: Parameters) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in parameters.values()])
