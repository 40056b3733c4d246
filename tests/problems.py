"""Small smooth problems in float64, and their mathematics written out densely, to hold the library against.

Everything dense is in flattened parameters and takes no derivative the way the library does: Hessians are explicit
and the path is differentiated in reverse mode.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

from imprint import Attribution, Plan, Sources, Store, Task, attribute, simulate
from imprint.simulation.descent import minibatches
from imprint.task import PerExample

Columns = tuple[Tensor, Tensor]
Known = TypeVar("Known")


def known(figure: Known | None) -> Known:
    """Return a figure that must have been measured."""
    assert figure is not None
    return figure


class _Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: PerExample, batch: Columns) -> Tensor:
        return function(self.model, batch)


@dataclass(frozen=True, eq=False)
class Problem:
    """A task at a point, with its data, its queries, some overlapping sources, and a step size that is stable there."""

    task: Task
    data: Columns
    queries: Columns
    sources: Sources
    lr: float

    @property
    def n(self) -> int:
        return len(self.data[0])

    @property
    def theta(self) -> Tensor:
        """The parameters, flattened in the order of the model."""
        return torch.cat([p.detach().flatten() for p in self.task.model.parameters()])

    @property
    def indicator(self) -> Tensor:
        """1_b(i), shape (sources, examples)."""
        rows = torch.zeros(len(self.sources), self.n, dtype=torch.float64)
        for row, members in zip(rows, self.sources.members, strict=True):
            row[members] = 1.0
        return rows

    def value(self, function: PerExample, flat: Tensor, batch: Columns) -> Tensor:
        """`function` of the model with the parameters `flat`."""
        shapes = {name: p.shape for name, p in self.task.model.named_parameters()}
        pieces = torch.split(flat, [shape.numel() for shape in shapes.values()])
        named = {f"model.{n}": piece.reshape(s) for (n, s), piece in zip(shapes.items(), pieces, strict=True)}
        value: Tensor = functional_call(_Around(self.task.model), named, (function, batch))
        return value

    def losses(self, flat: Tensor) -> Tensor:
        """ℓ(θ; i) of every training example."""
        return self.value(self.task.loss, flat, self.data)

    def objective(self, flat: Tensor, weights: Tensor) -> Tensor:
        """Σ_i c_i ℓ(θ; i) + r(θ)."""
        total = weights @ self.losses(flat)
        regulariser = self.task.regulariser
        return total if regulariser is None else total + self.value(lambda m, _: regulariser(m), flat, self.data)

    def plain(self, flat: Tensor) -> Tensor:
        """L(θ), the objective of plain training."""
        return self.objective(flat, torch.full((self.n,), 1 / self.n, dtype=torch.float64))

    def hessian(self, damping: float = 0.0) -> Tensor:
        """H_λ = ∇²L + λI at θ."""
        curvature: Tensor = hessian(self.plain)(self.theta)
        return curvature + damping * torch.eye(len(curvature), dtype=torch.float64)

    def source_gradients(self) -> Tensor:
        """g_b at θ, shape (parameters, sources)."""
        per_example: Tensor = jacrev(self.losses)(self.theta)
        return (self.indicator @ per_example).T

    def query_gradients(self, at: Tensor | None = None) -> Tensor:
        """g_q at θ, or elsewhere, shape (queries, parameters)."""
        point = self.theta if at is None else at
        gradients: Tensor = jacrev(lambda flat: self.value(self.task.measure, flat, self.queries))(point)
        return gradients

    def filter(self, steps: int, damping: float = 0.0) -> Tensor:
        """S_T(H_λ) = η Σ_{t<T} (I − ηH_λ)^t."""
        step = torch.eye(len(self.theta), dtype=torch.float64) - self.lr * self.hessian(damping)
        return self.lr * sum((torch.linalg.matrix_power(step, t) for t in range(steps)), torch.zeros_like(step))

    def scores(self, steps: int, damping: float = 0.0) -> Tensor:
        """−g_qᵀ S_T(H_λ) g_b, shape (queries, sources)."""
        return -self.query_gradients() @ self.filter(steps, damping) @ self.source_gradients()

    def path(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """θ_T⁰ and dθ_T/d(ε/N), shape (parameters, sources), by differentiating the descent itself."""
        bottom, end = descents(self, plan)
        derivative: Tensor = jacrev(end)(torch.zeros(len(self.sources), dtype=torch.float64))
        return bottom, derivative

    def simulate(self, plan: Plan, sources: Sources | None = None, batch_size: int = 512) -> Store:
        return simulate(
            self.task, self.data, sources or self.sources, plan, batch_size=batch_size, memory="1GiB", progress=False
        )

    def attribute(self, store: Store) -> Attribution:
        return attribute(self.task, store, self.queries, memory="1GiB", progress=False)

    def literal(self, store: Store) -> Attribution:
        return attribute(self.task, store, self.queries, readout="literal", memory="1GiB", progress=False)


def batch_weights(problem: Problem, plan: Plan) -> Tensor:
    """What each example weighs in the objective of each step, shape (steps, examples)."""
    assert isinstance(plan.steps, int)
    drawn = minibatches(problem.n, plan.batch_size or problem.n, plan.seed)
    weights = torch.zeros(plan.steps, problem.n, dtype=torch.float64)
    for row in weights:
        examples = next(drawn)
        row[examples] = 1 / len(examples)
    return weights


def descents(problem: Problem, plan: Plan, m: Tensor | None = None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """θ_T⁰, and θ_T as a function of the shares ε/N of all sources, written out; m: the diagonal of M."""
    assert isinstance(plan.damping, float) and isinstance(plan.lr, float)
    lr, damping, beta = plan.lr, plan.damping, plan.momentum
    scale = torch.ones_like(problem.theta) if m is None else m
    weights = batch_weights(problem, plan)
    still = torch.zeros_like(problem.theta)
    unperturbed, direction = [problem.theta], still
    for row in weights:
        direction = beta * direction + (1 - beta) * grad(problem.objective)(unperturbed[-1], row)
        unperturbed.append(unperturbed[-1] - lr * direction / scale)

    def end(shares: Tensor) -> Tensor:
        theta, direction = unperturbed[0], still
        for row, beside in zip(weights, unperturbed[:-1], strict=True):
            downhill: Tensor = grad(problem.objective)(theta, row + shares @ problem.indicator)
            direction = beta * direction + (1 - beta) * (downhill + damping * (theta - beside))
            theta = theta - lr * direction / scale
        return theta

    return unperturbed[-1], end


def flattened(stack: Mapping[str, Tensor]) -> Tensor:
    """A stack of rows as a matrix, shape (parameters, sources)."""
    return torch.cat([tensor.flatten(1) for tensor in stack.values()], dim=1).T


def imprints(store: Store, checkpoint: int = 0) -> Tensor:
    """All imprints of a checkpoint, shape (parameters, sources)."""
    return flattened(store.imprints(checkpoint, 0, len(store), torch.device("cpu")))


def midpoints(store: Store) -> Tensor:
    """All midpoints (θ⁺ + θ⁻)/2 − base, shape (parameters, sources)."""
    return flattened(store.midpoints(0, 0, len(store), torch.device("cpu")))


def base(store: Store, checkpoint: int = 0) -> Tensor:
    """The parameters at the read-out point, flattened; the problems have no buffers."""
    state = store.base(checkpoint, torch.device("cpu"))
    return torch.cat([state[name].flatten() for name in store.manifest.parameters])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖."""
    return float((actual - expected).norm() / expected.norm())


def gauss_newton(problem: Problem, damping: float = 0.0) -> Tensor:
    """Σ_i J_iᵀ ∇²ℓ(z_i) J_i / N + ∇²r + λI, written out."""
    task, (x, y), theta = problem.task, problem.data, problem.theta
    assert task.outputs is not None and task.output_loss is not None
    outputs, output_loss, regulariser = task.outputs, task.output_loss, task.regulariser
    z = problem.value(outputs, theta, problem.data)
    moved: Tensor = jacrev(lambda flat: problem.value(outputs, flat, problem.data))(theta)
    total = damping * torch.eye(len(theta), dtype=torch.float64)
    for i in range(problem.n):
        one = (x[i : i + 1], y[i : i + 1])
        bent: Tensor = hessian(lambda z, one=one: output_loss(z.unsqueeze(0), one)[0])(z[i])
        total = total + moved[i].T @ bent @ moved[i] / problem.n
    if regulariser is not None:
        pull: Tensor = hessian(lambda flat: problem.value(lambda m, _: regulariser(m), flat, problem.data))(theta)
        total = total + pull
    return total


def slope(x: list[float], y: list[float]) -> float:
    """The log–log slope of y on x, by least squares."""
    logs = torch.tensor([x, y], dtype=torch.float64).log()
    across, up = logs - logs.mean(1, keepdim=True)
    return float(across @ up / (across @ across))


class QuadraticForms(nn.Module):
    """½(θ − c_i)ᵀ A_i (θ − c_i): quadratic, and each example has a curvature of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, forms: Tensor, centres: Tensor) -> Tensor:
        away = self.point - centres
        return 0.5 * torch.einsum("ni,nij,nj->n", away, forms, away)


class TanhInReverse(torch.autograd.Function):
    """tanh that can be differentiated backwards only: no rule for forward mode, none for vmap."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return gradients[0] * (1 - torch.square(output))


class TanhWithoutVmap(TanhInReverse):
    """tanh with derivatives in both modes, but no rule for vmap."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return tangents[0] * (1 - torch.square(output))


class Rebuilt(nn.Module):
    """A tanh network of two layers on the same weights, with another implementation of tanh."""

    def __init__(self, like: nn.Module, tanh: type[torch.autograd.Function]) -> None:
        super().__init__()
        first, _, last = like.children()
        self.first, self.last, self.tanh = first, last, tanh

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.tanh.apply(self.first(x)))
        return output


def overlapping(n: int) -> Sources:
    """Two single examples, and three groups that overlap each other and them."""
    return Sources.groups(
        {"first": [0], "last": [n - 1], "few": range(4), "some": range(2, 7), "every third": range(0, n, 3)}
    )


def squared_norm(scale: float) -> Callable[[nn.Module], Tensor]:
    """r(θ) = scale/2 ‖θ‖²."""

    def regulariser(model: nn.Module) -> Tensor:
        flat = nn.utils.parameters_to_vector(model.parameters())
        return 0.5 * scale * torch.dot(flat, flat)

    return regulariser


def descend(problem: Problem, steps: int) -> Problem:
    """Train the problem's model in place by `steps` of gradient descent."""
    theta = problem.theta
    for _ in range(steps):
        theta = theta - problem.lr * grad(problem.plain)(theta)
    nn.utils.vector_to_parameters(theta, problem.task.model.parameters())
    return problem


def converge(problem: Problem) -> Problem:
    """Train the problem's model in place to ‖∇L‖ < 1e-12, by gradient descent and then Newton's method."""
    descend(problem, 500)
    for _ in range(20):
        gradient: Tensor = grad(problem.plain)(problem.theta)
        if float(gradient.norm()) < 1e-14:
            break
        theta = problem.theta - torch.linalg.solve(problem.hessian(), gradient)
        nn.utils.vector_to_parameters(theta, problem.task.model.parameters())
    assert float(grad(problem.plain)(problem.theta).norm()) < 1e-12
    assert float(torch.linalg.eigvalsh(problem.hessian())[0]) > 0
    return problem


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@cache
def quadratic() -> Problem:
    """Quadratic forms at the optimum; F is the loss, which is quadratic too, so no derivative of it is exact."""
    n, size, generator = 15, 4, _generator()
    factors = torch.randn(n + 3, size, size, generator=generator, dtype=torch.float64) / 2
    forms = factors @ factors.mT
    centres = torch.randn(n + 3, size, generator=generator, dtype=torch.float64)
    task = Task(QuadraticForms(size), loss=lambda model, batch: model(*batch))
    return converge(Problem(task, (forms[:n], centres[:n]), (forms[n:], centres[n:]), overlapping(n), lr=0.25))


def _blobs(n: int, queries: int) -> tuple[Columns, Columns]:
    """Three overlapping classes of points."""
    generator = _generator()
    y = torch.arange(n + queries) % 3
    x = torch.randn(n + queries, 3, generator=generator, dtype=torch.float64)
    x = x + torch.nn.functional.one_hot(y, 3)
    return (x[:n], y[:n]), (x[n:], y[n:])


@cache
def softmax_regression() -> Problem:
    """L2-regularised softmax regression at the optimum; F is the margin."""
    data, queries = _blobs(20, 4)
    model = nn.Linear(3, 3, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    task = Task.classifier(model, measure="margin", regulariser=squared_norm(0.1))
    return converge(Problem(task, data, queries, overlapping(20), lr=1.0))


def _tanh_mlp(n: int) -> Problem:
    data, queries = _blobs(n, 4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    nn.utils.vector_to_parameters(
        0.5 * torch.randn(31, generator=_generator(), dtype=torch.float64), model.parameters()
    )
    task = Task.classifier(model, regulariser=squared_norm(0.05))
    return Problem(task, data, queries, overlapping(n), lr=0.5)


@cache
def tanh_mlp() -> Problem:
    """An L2-regularised tanh network at the optimum; F is the loss."""
    return converge(_tanh_mlp(20))


@cache
def unconverged_mlp(n: int = 20) -> Problem:
    """The same network early in its training: far from any optimum, with negative curvature."""
    return descend(_tanh_mlp(n), 5)


CONVERGED: tuple[Callable[[], Problem], ...] = (quadratic, softmax_regression, tanh_mlp)
