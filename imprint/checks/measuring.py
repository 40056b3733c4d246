"""Tests a measurement on the first queries, before any score is reported.

F(q; θ) must be a deterministic function of the given model and of one query, and automatic differentiation must return
its true derivative. `Reader` runs these checks once for each task.
"""

from dataclasses import replace

from torch import OutOfMemoryError, Tensor, enable_grad

from imprint.batches import is_columnar, map_tensors
from imprint.checks.agreement import NOTICED, measurement_error
from imprint.checks.soundness import ON_ITS_OWN, find_difference, find_leaves, rounding_tolerance
from imprint.errors import ImprintError, ReadoutError, UndefinedScore
from imprint.model.measures import find_targets
from imprint.task import Batch, Functional, Parameters, Task

_QUERIES = 4  # for which derivatives are checked


def natural_scale(task: Task, batch: Batch) -> float:
    """Return 1 (nat) if F is the loss or a named measure of a classifier, 0 if F may have any scale."""
    right = find_targets(batch)
    classes = right is not None and right.dim() == 1 and not right.is_floating_point()
    return 1.0 if task.outputs is not None and task.better is not None and classes else 0.0


def measure_first_queries(functional: Functional, theta: Parameters, batch: Batch, count: int) -> list[float]:
    """Compute F of the first queries without any transformation, so that an error in the user's code surfaces here."""
    try:
        with enable_grad():  # the given tensors are constants: whatever requires a gradient came from elsewhere
            fixed = {name: tensor.detach() for name, tensor in functional.fixed.items()}
            plain = {name: p.detach() for name, p in theta.items()}
            values = replace(functional, fixed=fixed).measures(plain, batch, count)
    except ImprintError:
        raise
    except Exception as error:
        raise ReadoutError(f"the measurement failed on the first queries: {type(error).__name__}: {error}") from error
    own = {id(parameter) for parameter in functional.task.model.parameters()}
    if any(id(tensor) in own for tensor in find_leaves(values)):
        raise ReadoutError(
            "the measurement uses another reference to the model than the one it is given: use the argument `model` "
            "inside measure(model, batch)."
        )
    values = values.detach()
    if not bool(values.isfinite().all()):
        index = int((~values.isfinite()).nonzero()[0, 0])
        raise UndefinedScore(f"the measurement of query {index} is {float(values[index])}: look for NaN in that query.")
    _refuse_dependence(functional, theta, batch, count, values)
    return values.tolist()


def _refuse_dependence(functional: Functional, theta: Parameters, batch: Batch, count: int, values: Tensor) -> None:
    """Refuse a measurement that is random, or whose value for a query depends on the other queries in the batch."""
    alone = count > 1 and is_columnar(batch, count)
    again = functional.measures(theta, *((map_tensors(lambda t: t[:1], batch), 1) if alone else (batch, count)))
    worst = find_difference(values[: len(again)], again, rounding_tolerance(functional.task))
    if worst is None:
        return
    was, now = float(values[worst]), float(again[worst])
    if alone:
        raise ReadoutError(
            f"the measurement of query {worst} is {was:.4g} among other queries and {now:.4g} alone. {ON_ITS_OWN}"
        )
    raise ReadoutError(
        f"the measurement of query {worst} is {was:.4g} on the first call and {now:.4g} on the second: it draws random "
        "numbers even in evaluation mode, or changes some state. Make it deterministic."
    )


def check_derivative(
    functional: Functional, theta: Parameters, batch: Batch, count: int, direction: Parameters, *, backward: bool
) -> tuple[str, ...]:
    """Compare the derivative that a readout uses with finite differences of F, once for each model and measurement.

    Return the warnings that the scores must carry, if any.
    """
    task = functional.task
    key = task.measure_name, getattr(functional.measure or task.measure, "__code__", None), backward
    known = task.derivatives
    if key not in known:
        if count > _QUERIES and is_columnar(batch, count):
            batch, count = map_tensors(lambda t: t[:_QUERIES], batch), _QUERIES
        try:
            found = measurement_error(functional, theta, batch, count, direction, backward=backward)
        except (ImprintError, OutOfMemoryError):
            raise
        except Exception:  # the model does not run in float64
            return ()
        known[key] = () if found <= NOTICED else (_explain_error(found),)
    return known[key]


def _explain_error(error: float) -> str:
    return (
        f"the derivative of the measurement is {100 * error:.3g}% off finite differences of its values, and scores are "
        "off by about as much, unless this is intended, as with a straight-through estimator: look for .detach(), "
        '.item(), NumPy and custom autograd functions in it, or use readout="central".'
    )
