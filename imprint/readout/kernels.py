"""Forward-only scores as pure functions of (F, θ, imprints): the measurement evaluated along, or at, imprints.

`jvp`      F'(θ_T⁰)[u_b] by forward mode: exact, no step size, each imprint is read once.
`central`  [F(θ + c·u_b) − F(θ − c·u_b)]/2c from plain evaluations, c calibrated (`calibration`).
`literal`  the paper's difference between the two perturbed end points.
`removed`  N·[F(θ) − F(θ − u_b/N)] of a replay, whose rows are finite removals: plain evaluations, nothing linearised.
`gradient` one backward pass per query, then dot products: for very many sources where a backward exists.

All return (sources, queries), for as many imprints as are given. `Reader` applies them to a store.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from imprint.batches import is_columnar, map_tensors
from imprint.runtime.memory import tensor_bytes
from imprint.runtime.turns import jvp
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.linear import FastLinear
from imprint.tensors.vectors import over_rows

ReadoutName = Literal["jvp", "central", "literal", "removed", "gradient"]
Measure = Callable[[Parameters], Tensor]
"""F of the queries of one batch as a function of the selected parameters, shape (queries,)."""

UNLIKE_DERIVATIVES = "along a finite removal a derivative is 55 to 130% off"
_SHIFTED_BYTES = 64 << 20  # shifted copies θ ± c·u alive at once on a CPU: more only moves memory
_LARGE_BYTES = 1 << 20  # parameters from which a CPU shifts them faster one by one than by vmap


@contextmanager
def forward_only(task: Task) -> Iterator[None]:
    """Build no autograd graph, evaluate the model, and leave `inference_mode`, where forward mode may return zeros."""
    with torch.inference_mode(False), torch.no_grad(), task.evaluating():
        yield


def jvp_scores(measure: Measure, theta: Parameters, imprints: Parameters, *, vectorise: bool) -> Tensor:
    """Return F'(θ)[u_b] for every row, by forward mode."""

    def fast(theta: Parameters) -> Tensor:
        with FastLinear():
            return measure(theta)

    return over_rows(lambda u: jvp(fast, (theta,), (u,))[1], imprints, vectorise=vectorise)  # type: ignore[no-any-return]


def difference_scores(
    measure: Measure,
    theta: Parameters,
    imprints: Parameters,
    up: Tensor,
    down: Tensor,
    midpoints: Parameters | None = None,
    *,
    vectorise: bool,
) -> Tensor:
    """Return [F(θ + m_b + up_b·u_b) − F(θ + m_b − down_b·u_b)]/(up_b + down_b) for every row."""

    def one(u: Parameters, up: Tensor, down: Tensor, middle: Parameters) -> Tensor:
        centre = {name: theta[name] + middle[name] for name in theta} if middle else theta
        return difference(measure, centre, u, up, down)

    size, rows = tensor_bytes(theta), len(up)
    if not vectorise or (size > _LARGE_BYTES and up.device.type == "cpu"):
        return _loop_differences(measure, theta, imprints, up, down, midpoints)
    blocks = []
    width = rows if up.device.type == "cuda" else max(1, _SHIFTED_BYTES // (2 * size))
    for start in range(0, rows, width):
        part = slice(start, min(start + width, rows))
        blocks.append(
            vmap(one)(
                {name: u[part] for name, u in imprints.items()},
                up[part],
                down[part],
                {name: m[part] for name, m in (midpoints or {}).items()},
            )
        )
    return torch.cat(blocks)


def difference(measure: Measure, centre: Parameters, u: Parameters, up: Tensor, down: Tensor) -> Tensor:
    """Return [F(centre + up·u) − F(centre − down·u)]/(up + down)."""
    higher = measure({name: tensor + up * u[name] for name, tensor in centre.items()})
    lower = measure({name: tensor - down * u[name] for name, tensor in centre.items()})
    return (higher - lower) / (up + down)


def _loop_differences(
    measure: Measure,
    theta: Parameters,
    imprints: Parameters,
    up: Tensor,
    down: Tensor,
    midpoints: Parameters | None,
) -> Tensor:
    """Loop over the rows, shifting the parameters in one buffer: fresh memory for each shift would cost more."""
    buffer = {name: torch.empty_like(tensor) for name, tensor in theta.items()}

    def shifted(row: int, by: float) -> Tensor:
        for name, tensor in theta.items():
            torch.add(tensor, imprints[name][row], alpha=by, out=buffer[name])
            if midpoints:
                buffer[name] += midpoints[name][row]
        return measure(buffer).clone()

    pairs = zip(up.tolist(), down.tolist(), strict=True)
    return torch.stack([(shifted(i, u) - shifted(i, -d)) / (u + d) for i, (u, d) in enumerate(pairs)])


def find_changed(removals: Parameters) -> list[str]:
    """Name the tensors that some removal has changed."""
    return [name for name, rows in removals.items() if bool(rows.any())]


def removed_scores(
    measure: Measure,
    theta: Parameters,
    removals: Parameters,
    n: int,
    changed_names: Sequence[str] | None = None,
    *,
    vectorise: bool,
) -> Tensor:
    """Return N·[F(θ) − F(θ − u_b/N)] for every row u_b = N(θ − θ₋b): how F changes when the removal is undone.

    F(θ) is evaluated as one more row, so that its rounding is that of the others. Tensors that no removal has changed
    are not stacked: what the model computes before the first changed layer is then computed once.

    changed_names: as `find_changed` returns them; by default they are looked up.
    """
    changed = {name: removals[name] for name in (find_changed(removals) if changed_names is None else changed_names)}
    count, device = len(next(iter(removals.values()))), next(iter(theta.values())).device
    size = max(tensor_bytes({name: theta[name] for name in changed}), 1)
    if not vectorise or (size > _LARGE_BYTES and device.type == "cpu"):
        return _loop_removals(measure, theta, changed, count, n)
    width = count if device.type == "cuda" else max(1, _SHIFTED_BYTES // size)
    blocks = []
    for start in range(0, count, width):
        stack = {name: _stack_removed(theta[name], rows[start : start + width], n) for name, rows in changed.items()}
        values = _evaluate_stack(measure, theta, stack, min(width, count - start) + 1)
        blocks.append(n * (values[:1] - values[1:]))
    return torch.cat(blocks)


def removed_score(measure: Measure, theta: Parameters, removal: Parameters, n: int) -> Tensor:
    """Return N·[F(θ) − F(θ − u/N)] of one removal."""
    without = {name: (t.to(removal[name].dtype) - removal[name] / n).to(t.dtype) for name, t in theta.items()}
    return n * (measure(theta) - measure(without))


def _stack_removed(tensor: Tensor, rows: Tensor, n: int) -> Tensor:
    """Return θ, then θ − u_b/N for every row, subtracted in the precision of the rows."""
    stack = tensor.new_empty((len(rows) + 1, *tensor.shape))
    stack[0] = tensor
    stack[1:] = tensor.to(rows.dtype) - rows / n
    return stack


def _evaluate_stack(measure: Measure, theta: Parameters, stack: Parameters, count: int) -> Tensor:
    """Return F at every row of a stack of some of the parameters, shape (rows, queries)."""
    if not stack:  # removals that changed nothing
        return measure(theta).expand(count, -1)
    return vmap(lambda changed: measure({**theta, **changed}))(stack)


def _loop_removals(measure: Measure, theta: Parameters, changed: Parameters, count: int, n: int) -> Tensor:
    """Loop over the removals, with the parameters in one buffer."""
    buffer = {name: torch.empty_like(theta[name]) for name in changed}

    def without(row: int | None) -> Tensor:
        for name, tensor in buffer.items():
            rows = changed[name]
            tensor.copy_(theta[name] if row is None else theta[name].to(rows.dtype) - rows[row] / n)
        return measure({**theta, **buffer}).clone()

    deployed = without(None)
    return torch.stack([n * (deployed - without(row)) for row in range(count)])


def query_gradients(
    functional: Functional, theta: Parameters, batch: Batch, count: int, *, vectorise: bool
) -> Parameters:
    """Return ∇F of each query, one row per query."""
    if vectorise and is_columnar(batch, count):
        single = map_tensors(lambda t: t.unsqueeze(1), batch)
        each = vmap(lambda sample: grad(lambda t: functional.measures(t, sample, 1)[0])(theta))
        return each(single)  # type: ignore[no-any-return]
    values, pull, *_ = vjp(lambda t: functional.measures(t, batch, count), theta)
    rows = [pull(torch.eye(count, dtype=values.dtype, device=values.device)[i])[0] for i in range(count)]
    return {name: torch.stack([row[name] for row in rows]) for name in theta}


def gradient_scores(imprints: Parameters, gradients: Parameters) -> Tensor:
    """Return u_bᵀ g_q for all pairs, shape (sources, queries)."""
    products = [
        u.reshape(len(u), -1) @ gradients[name].reshape(len(gradients[name]), -1).T for name, u in imprints.items()
    ]
    return torch.stack(products).sum(0)
