"""The spectral engine against its formulas: −S_T(H_λ) g_b with dense matrices, and against the other engines."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from imprint import Plan, PlanError, SimulationError, Sources, Store, Task, simulate
from imprint.data import Data
from imprint.plan import Curvature, Settings, Steps
from imprint.simulation import frozen as spectral
from imprint.simulation.curvature import curvature_product, lanczos_basis
from imprint.simulation.descent import FullBatch
from imprint.simulation.frozen import FrozenCurvature, freeze_curvature, respond
from tests.problems import (
    Problem,
    converge,
    gauss_newton,
    imprints,
    known,
    overlapping,
    relative_error,
    softmax_regression,
    squared_norm,
    tanh_mlp,
    unconverged_mlp,
)

EVERY = 10_000  # more directions than there are


def seen(problem: Problem, curvature: Curvature, damping: float = 0.0) -> Tensor:
    return problem.hessian(damping) if curvature == "hessian" else gauss_newton(problem, damping)


def filtered(matrix: Tensor, steps: Steps, lr: float) -> Tensor:
    """S_T of a matrix: its inverse, or the sum that T steps make."""
    if steps == "infinite":
        return matrix.inverse()
    step, total, power = torch.eye(len(matrix), dtype=torch.float64) - lr * matrix, torch.zeros_like(matrix), None
    for _ in range(steps):
        power = torch.eye(len(matrix), dtype=torch.float64) if power is None else power @ step
        total = total + lr * power
    return total


@cache
def linear_regression() -> Problem:
    """At the optimum, where the path stands still and its curvature is the Gauss–Newton matrix."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(18, 4, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(18, 1, generator=generator, dtype=torch.float64)
    task = Task.regression(nn.Linear(4, 1).double(), regulariser=squared_norm(0.1))
    return converge(Problem(task, (x[:14], y[:14]), (x[14:], y[14:]), overlapping(14), lr=0.3))


def frozen(problem: Problem, directions: int, curvature: Curvature = "gauss-newton") -> FrozenCurvature:
    functional, theta = problem.task.at(problem.task.state())
    with problem.task.evaluating():
        return freeze_curvature(functional, theta, batches(problem), curvature, directions)


def batches(problem: Problem) -> FullBatch:
    return FullBatch(Data(problem.data, device=torch.device("cpu")), torch.float64)


# --- the curvature


def product(problem: Problem, curvature: Curvature) -> Tensor:
    """The matrix that products with all unit vectors make."""
    functional, theta = problem.task.at(problem.task.state())
    with problem.task.evaluating():
        multiply = curvature_product(functional, theta, batches(problem), curvature)
        return torch.stack([multiply(unit) for unit in torch.eye(len(problem.theta), dtype=torch.float64)])


@pytest.mark.parametrize("make", [softmax_regression, unconverged_mlp, linear_regression])
def test_the_gauss_newton_product_is_what_the_matrix_gives(make: Callable[[], Problem]) -> None:
    torch.testing.assert_close(product(make(), "gauss-newton"), gauss_newton(make()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [softmax_regression, linear_regression])
def test_for_a_linear_model_gauss_newton_is_the_hessian(make: Callable[[], Problem]) -> None:
    torch.testing.assert_close(product(make(), "gauss-newton"), make().hessian(), rtol=1e-10, atol=1e-12)


def test_gauss_newton_has_no_negative_directions_where_the_hessian_has() -> None:
    problem = unconverged_mlp()
    assert float(torch.linalg.eigvalsh(problem.hessian())[0]) < -1e-3
    assert float(torch.linalg.eigvalsh(product(problem, "gauss-newton"))[0]) > 0


def symmetric(values: Tensor) -> Tensor:
    turn: Tensor = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return turn @ torch.diag(values) @ turn.T


def test_the_lanczos_basis_is_orthonormal_and_exact_when_complete() -> None:
    values = torch.linspace(-1, 3, 12, dtype=torch.float64)
    matrix = symmetric(values)
    basis = lanczos_basis(lambda v: matrix @ v, torch.randn(12, dtype=torch.float64), EVERY)
    torch.testing.assert_close(basis.values, values, rtol=0, atol=1e-10)
    torch.testing.assert_close(basis.vectors @ basis.vectors.T, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(basis.vectors @ matrix, values[:, None] * basis.vectors, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_lanczos_basis_stays_orthonormal_in_a_long_run(dtype: torch.dtype) -> None:
    """Without reorthogonalisation it is lost once an extreme value has converged."""
    matrix = symmetric(torch.logspace(-6, 2, 150, dtype=torch.float64)).to(dtype)
    basis = lanczos_basis(lambda v: matrix @ v, torch.randn(150, dtype=dtype), 80)
    assert len(basis.values) == 80
    error = (basis.vectors @ basis.vectors.T - torch.eye(80, dtype=dtype)).abs().max()
    assert float(error) < 100 * torch.finfo(dtype).eps
    assert float(basis.values[-1]) == pytest.approx(100, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_lanczos_basis_ends_where_the_rank_does(dtype: torch.dtype) -> None:
    matrix = symmetric(torch.tensor([0.0] * 15 + [1.0, 2.0, 3.0, 4.0], dtype=torch.float64)).to(dtype)
    products: list[int] = []
    basis = lanczos_basis(lambda v: matrix @ v, torch.randn(19, dtype=dtype), EVERY, products.append)
    assert len(basis.values) == sum(products) == 5  # the four, and one of none
    torch.testing.assert_close(basis.values, torch.arange(5.0, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_matrix_of_zeros_has_one_direction() -> None:
    basis = lanczos_basis(torch.zeros_like, torch.randn(7, dtype=torch.float64), EVERY)
    assert basis.values.tolist() == [0.0]


# --- the filter


@pytest.mark.parametrize("mu", [-0.3, -1e-9, 0.0, 1e-15, 1e-6, 0.4, 1.0, 2.0, 3.3, 3.9])
@pytest.mark.parametrize("damping", [0.0, 0.05])
def test_the_response_is_the_sum_that_the_steps_make(mu: float, damping: float) -> None:
    """Also where a step overshoots (ημ > 1), where curvature is negative, and where there is hardly any."""
    lr, steps = 0.5, 60
    settings = Settings(steps, lr, damping, 1.0)
    expected = lr * math.fsum((1 - lr * (mu + damping)) ** t for t in range(steps))
    found = respond(torch.tensor([mu], dtype=torch.float64), settings, lr)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_no_digits_cancel_at_tiny_curvature() -> None:
    """(1 − (1 − x)^T)/x would have lost all of them."""
    for mu in (1e-17, 1e-13, 1e-9):
        found = float(respond(torch.tensor([mu]), Settings(1000, 0.1, 0.0, 1.0), 0.1))
        assert found == pytest.approx(0.1 * 1000 * (1 - 0.1 * mu * 999 / 2), rel=1e-12)


def test_infinitely_many_steps_invert() -> None:
    found = respond(torch.tensor([0.5, 2.0]), Settings("infinite", 0.1, 0.5, 1.0), 0.1)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.4], dtype=torch.float64))


# --- imprints


@cache
def several_outputs() -> Problem:
    """Every curvature three times over: one for each output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    task = Task.regression(nn.Linear(5, 3).double(), regulariser=squared_norm(0.1))
    return converge(Problem(task, (x[:20], y[:20]), (x[20:], y[20:]), overlapping(20), lr=0.3))


CASES: dict[str, tuple[Callable[[], Problem], Curvature, Steps, float]] = {
    "several outputs": (several_outputs, "gauss-newton", 30, 0.0),
    "several outputs, infinite": (several_outputs, "gauss-newton", "infinite", 0.1),
    "softmax": (softmax_regression, "gauss-newton", 9, 0.0),
    "softmax, damped": (softmax_regression, "gauss-newton", 40, 0.3),
    "softmax, infinite": (softmax_regression, "hessian", "infinite", 0.0),
    "network at its optimum": (tanh_mlp, "hessian", 25, 0.1),
    "network": (unconverged_mlp, "gauss-newton", 25, 0.0),
    "network, infinite": (unconverged_mlp, "gauss-newton", "infinite", 0.02),
    "network, negative curvature": (unconverged_mlp, "hessian", 25, 0.0),
}


@pytest.mark.parametrize("form", ["factored", "dense"])
@pytest.mark.parametrize(("make", "curvature", "steps", "damping"), CASES.values(), ids=CASES.keys())
def test_imprints_on_all_directions_are_the_frozen_response(
    make: Callable[[], Problem], curvature: Curvature, steps: Steps, damping: float, form: Any
) -> None:
    problem, sources = make(), Sources.per_example(make().n)
    lr = problem.lr / 4
    plan = Plan(
        engine="spectral", steps=steps, lr=lr, damping=damping, directions=EVERY, curvature=curvature, form=form
    )
    store = problem.simulate(plan, sources)
    gradients: Tensor = jacrev(problem.losses)(problem.theta).T
    expected = -filtered(seen(problem, curvature, damping), steps, lr) @ gradients
    assert relative_error(imprints(store), expected) < 1e-10
    assert (store.checkpoints[0].basis is None) == (form == "dense")


def test_imprints_of_groups_are_the_sums_of_their_members() -> None:
    problem = unconverged_mlp()
    plan = Plan(engine="spectral", steps=30, directions=8)
    groups, single = problem.simulate(plan), problem.simulate(plan, Sources.per_example(problem.n))
    assert groups.checkpoints[0].choices.layers == () and single.checkpoints[0].choices.layers == ("0", "2")
    torch.testing.assert_close(imprints(groups), imprints(single) @ problem.indicator.T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", [linear_regression, several_outputs, softmax_regression, tanh_mlp])
def test_at_an_optimum_the_tangent_engine_agrees(make: Callable[[], Problem]) -> None:
    """There the path stands still, and its curvature is the frozen one."""
    problem = make()
    plan = Plan(engine="spectral", curvature="hessian", steps=30, lr=problem.lr, damping=0.1, directions=EVERY)
    along = problem.simulate(Plan(steps=30, lr=problem.lr, damping=0.1))
    assert relative_error(imprints(problem.simulate(plan)), imprints(along)) < 1e-9


@pytest.mark.parametrize("make", [linear_regression, softmax_regression])
def test_a_tangent_with_gauss_newton_is_one_with_the_hessian_for_linear_models(make: Callable[[], Problem]) -> None:
    problem = make()
    one, other = (problem.simulate(Plan(steps=9, lr=0.1, curvature=kind)) for kind in ("hessian", "gauss-newton"))
    assert relative_error(imprints(one), imprints(other)) < 1e-10


def test_a_tangent_with_gauss_newton_follows_its_own_recursion() -> None:
    """On a path that moves: v ← v − η(G(θ_t) v + λv + g_b(θ_t))."""
    problem = unconverged_mlp()
    plan = Plan(steps=6, lr=0.3, damping=0.05, curvature="gauss-newton")
    store, model = problem.simulate(plan), problem.task.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    responses = torch.zeros(len(problem.theta), len(problem.sources), dtype=torch.float64)
    try:
        for _ in range(6):
            theta = problem.theta
            pulled = gauss_newton(problem, 0.05) @ responses + problem.source_gradients()
            responses = responses - 0.3 * pulled
            slope: Tensor = torch.func.grad(problem.plain)(theta)
            nn.utils.vector_to_parameters(theta - 0.3 * slope, model.parameters())
    finally:
        model.load_state_dict(before)
    assert relative_error(imprints(store), responses) < 1e-10


def test_more_directions_come_closer() -> None:
    problem, sources = unconverged_mlp(), Sources.per_example(20)
    plan = Plan(engine="spectral", steps=200, lr=0.5, directions=EVERY)
    exact = imprints(problem.simulate(plan, sources))
    errors = []
    for directions in (1, 8, 24):
        few = Plan(engine="spectral", steps=200, lr=0.5, directions=directions)
        errors.append(relative_error(imprints(problem.simulate(few, sources)), exact))
    assert errors == sorted(errors, reverse=True) and errors[0] > 3 * errors[-1]


# --- what lies outside of the basis


@pytest.mark.parametrize("directions", [3, 10])
def test_the_curvature_outside_is_the_mean_that_gradients_see_there(
    directions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectral, "_PROBES", 300)
    problem = unconverged_mlp()
    found = frozen(problem, directions)
    vectors = torch.cat([found.basis[name].flatten(1) for name in problem.task.names], 1)
    gradients: Tensor = jacrev(problem.losses)(problem.theta)
    outside = gradients - gradients @ vectors.T @ vectors
    rest = float((outside @ gauss_newton(problem) * outside).sum() / outside.square().sum())
    assert found.rest == pytest.approx(rest, rel=0.15)
    assert found.share == pytest.approx(float(outside.square().sum() / gradients.square().sum()), rel=0.15)


def test_nothing_is_outside_of_a_complete_basis() -> None:
    found = frozen(unconverged_mlp(), EVERY)
    assert (found.rest, found.share) == (0.0, 0.0)


# --- refusals


def unregularised(steps: Steps, **options: object) -> Store:
    """A network with directions in which nothing bends."""
    task = Task.classifier(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    data = unconverged_mlp().data
    plan = Plan(engine="spectral", steps=steps, directions=EVERY, **options)  # type: ignore[arg-type]
    return simulate(task, data, Sources.per_example(20), plan, progress=False)


def test_infinitely_many_steps_on_a_singular_curvature_are_refused_with_advice() -> None:
    with pytest.raises(SimulationError, match=r"with a damping of 0 it goes down to 0: give a damping above .*, or a"):
        unregularised("infinite")
    assert len(unregularised("infinite", damping=0.01)) == 20


def test_infinitely_many_steps_on_negative_curvature_are_told_how_much_damping_they_need() -> None:
    problem = unconverged_mlp()
    lowest = float(torch.linalg.eigvalsh(problem.hessian())[0])
    options = {"engine": "spectral", "steps": "infinite", "curvature": "hessian", "directions": EVERY}
    with pytest.raises(SimulationError, match=rf"goes down to {lowest / 2:.3g}: give a damping above {-lowest:.2g}"):
        problem.simulate(Plan(**options, damping=0.5 * -lowest))  # type: ignore[arg-type]
    problem.simulate(Plan(**options, damping=2 * -lowest))  # type: ignore[arg-type]


def test_a_step_that_is_too_long_is_refused_with_one_that_holds() -> None:
    problem = softmax_regression()
    top = float(torch.linalg.eigvalsh(problem.hessian())[-1])
    with pytest.raises(SimulationError, match=rf"too long for curvature .*: a step below {2 / top:.2g} holds"):
        problem.simulate(Plan(engine="spectral", lr=2.1 / top, directions=EVERY))
    store = problem.simulate(Plan(engine="spectral", lr=1.9 / top, directions=EVERY))
    assert known(store.checkpoints[0].measured.stability) <= 1
    automatic = problem.simulate(Plan(engine="spectral", directions=EVERY))
    assert automatic.checkpoints[0].choices.lr == pytest.approx(1 / top)


def test_a_response_beyond_all_numbers_is_refused_and_its_source_named() -> None:
    plan = Plan(engine="spectral", curvature="hessian", steps=10**6, lr=0.5, directions=EVERY)
    with pytest.raises(SimulationError, match=r"imprint of source 'first' is not finite: .* some damping"):
        unconverged_mlp().simulate(plan)


def test_a_task_without_outputs_has_no_gauss_newton_curvature() -> None:
    problem = softmax_regression()
    task = Task(problem.task.model, loss=problem.task.loss)
    for plan in (Plan(engine="spectral"), Plan(curvature="gauss-newton")):
        with pytest.raises(PlanError, match=r"needs to see the model's outputs: .*curvature=\"hessian\""):
            simulate(task, problem.data, problem.sources, plan, progress=False)
    plan = Plan(engine="spectral", curvature="hessian", steps=5)
    assert len(simulate(task, problem.data, problem.sources, plan, progress=False)) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "infinite"}, "steps must be a whole number of at least 1"),
        ({"engine": "spectral", "steps": "forever"}, "steps must be a whole number of at least 1"),
        ({"directions": 5}, r'directions belongs to engine="spectral"; the tangent engine does not use it'),
        ({"form": "dense"}, 'form belongs to engine="spectral"'),
        ({"engine": "spectral", "dropout": True}, 'dropout belongs to engine="tangent" or engine="trajectories"'),
        ({"engine": "spectral", "batch_size": 8}, 'batch_size belongs to engine="tangent" or'),
        ({"engine": "trajectories", "curvature": "hessian"}, 'curvature belongs to engine="tangent" or engine="spect'),
        ({"curvature": "flat"}, "curvature 'flat' is unknown: use one of auto, hessian, gauss-newton"),
        ({"engine": "spectral", "form": "loose"}, "form 'loose' is unknown"),
        ({"engine": "spectral", "directions": 0}, "directions must be at least 1, got 0"),
        ({"engine": "spectral", "keep_pair": True}, 'keep_pair belongs to engine="trajectories"'),
    ],
)
def test_plans_say_what_does_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**options)  # type: ignore[arg-type]


def test_plans_of_the_spectral_engine_survive_json() -> None:
    plan = Plan(engine="spectral", steps=("infinite", 5), damping=0.1, directions=7, form="dense", weight=(0.0, 1.0))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.seen_curvature == "gauss-newton" and Plan().seen_curvature == "hessian"


@pytest.mark.parametrize("directions", [1, 2])
def test_a_step_chosen_with_few_directions_suits_what_lies_outside_of_them(directions: int) -> None:
    """The random start sees little of the sharpest direction, and gradients more."""
    problem = unconverged_mlp()
    plan = Plan(engine="spectral", steps=200, directions=directions)
    (checkpoint,) = problem.simulate(plan).checkpoints
    assert checkpoint.choices.lr * known(checkpoint.measured.rest) <= 1


def test_a_model_in_half_precision_has_as_many_directions_as_others() -> None:
    problem, found = unconverged_mlp(), []
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
        task, data = Task.classifier(model), (problem.data[0][:, :3].to(dtype), problem.data[1])
        functional, theta = task.at(task.state())
        with task.evaluating():
            parts = FullBatch(Data(data, device=torch.device("cpu")), dtype)
            found.append(freeze_curvature(functional, theta, parts, "gauss-newton", 8))
    assert len(found[0].values) == len(found[1].values) == 8
    assert found[0].basis["0.weight"].dtype == torch.bfloat16
