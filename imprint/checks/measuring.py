"""Puts a measurement to the test on the first queries, before any score of it is believed.

F(q; θ) must be a function of the model it is given and of one query, the same each time it is asked for, and have the
derivative that forward mode or a backward pass takes of it. `Reader` asks once for each task.
"""

from dataclasses import replace

from torch import OutOfMemoryError, Tensor, enable_grad

from imprint.batches import is_columnar, map_tensors
from imprint.checks.agreement import NOTICED, measure_gap
from imprint.checks.soundness import ON_ITS_OWN, furthest, leaves_of, tolerance
from imprint.errors import ImprintError, ReadoutError
from imprint.task import Batch, Functional, Parameters, Task, targets

_QUERIES = 4  # on which it is tried


def unit_of(task: Task, batch: Batch) -> float:
    """A nat for what is measured of a classifier by name or as its loss; 0 where F may be anything."""
    right = targets(batch)
    classes = right is not None and right.dim() == 1 and not right.is_floating_point()
    return 1.0 if task.outputs is not None and task.better is not None and classes else 0.0


def measured(functional: Functional, theta: Parameters, batch: Batch, count: int) -> list[float]:
    """F of the first queries, from a plain run, in which an error of the measurement shows as such."""
    try:
        with enable_grad():  # all tensors of the given model are constants here, and no graph is made
            fixed = {name: tensor.detach() for name, tensor in functional.fixed.items()}
            plain = {name: p.detach() for name, p in theta.items()}
            values = replace(functional, fixed=fixed).measures(plain, batch, count)
    except ImprintError:
        raise
    except Exception as error:
        raise ReadoutError(f"the measurement failed on the first queries: {type(error).__name__}: {error}") from error
    own = {id(parameter) for parameter in functional.task.model.parameters()}
    if any(id(tensor) in own for tensor in leaves_of(values)):
        raise ReadoutError(
            "the measurement uses another reference to the model than the one it is given: inside "
            "measure(model, batch) use the argument `model`."
        )
    values = values.detach()
    if not bool(values.isfinite().all()):
        index = int((~values.isfinite()).nonzero()[0, 0])
        raise ReadoutError(f"the measurement of query {index} is {float(values[index])}: look for NaN in that query.")
    _refuse_dependence(functional, theta, batch, count, values)
    return values.tolist()


def _refuse_dependence(functional: Functional, theta: Parameters, batch: Batch, count: int, values: Tensor) -> None:
    """Refuse a measurement that is random, or in which a query's value depends on the other queries of its batch."""
    alone = count > 1 and is_columnar(batch, count)
    again = functional.measures(theta, *((map_tensors(lambda t: t[:1], batch), 1) if alone else (batch, count)))
    worst = furthest(values[: len(again)], again, tolerance(functional.task))
    if worst is None:
        return
    was, now = float(values[worst]), float(again[worst])
    if alone:
        raise ReadoutError(
            f"the measurement of query {worst} is {was:.4g} among other queries and {now:.4g} alone. {ON_ITS_OWN}"
        )
    raise ReadoutError(
        f"the measurement of query {worst} is {was:.4g} and then, asked again, {now:.4g}: it draws random numbers in "
        "evaluation mode too, or changes something as it is called. Make it the same each time."
    )


SILENT = (
    "every score of some queries is exactly 0, since their measurement has no derivative by the selected parameters. "
    "Does it use the argument `model`? Steps such as an accuracy, rounding or saturated losses are flat: measure a "
    "margin or a log-probability instead."
)


def check_derivative(
    functional: Functional, theta: Parameters, batch: Batch, count: int, direction: Parameters, *, backward: bool
) -> tuple[str, ...]:
    """Compare the derivative that a readout takes with differences of F; once for each model and measurement.

    Return the warnings that scores must carry, if any.
    """
    task = functional.task
    key = task.measure_name, getattr(functional.measure or task.measure, "__code__", None), backward
    known = task.derivatives
    if key not in known:
        if count > _QUERIES and is_columnar(batch, count):
            batch, count = map_tensors(lambda t: t[:_QUERIES], batch), _QUERIES
        try:
            found = measure_gap(functional, theta, batch, count, direction, backward=backward)
        except (ImprintError, OutOfMemoryError):
            raise
        except Exception:  # a model that float64 does not take
            return ()
        known[key] = _say(found)
    return known[key]


def _say(gap: float) -> tuple[str, ...]:
    if gap <= NOTICED:
        return ()
    return (
        f"the derivative of the measurement is {100 * gap:.3g}% off the differences of its values, and scores are off "
        "by about as much, unless that is meant, as of a straight-through estimator: look for .detach(), .item(), "
        'numpy and custom autograd functions in it, or read out by readout="central".',
    )
