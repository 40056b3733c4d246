"""The measured curvature, the step chosen from it, and what happens when the step is too large."""

import logging
import math
import re
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian

from imprint import Plan, SimulationError, Sources, Task, simulate
from imprint.data import Data
from imprint.simulation import curvature
from imprint.simulation.curvature import Spectrum, lanczos, spectrum
from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent, minibatches
from tests.problems import (
    CONVERGED,
    Problem,
    Rebuilt,
    TanhInReverse,
    imprints,
    known,
    quadratic,
    relative_error,
    softmax_regression,
    tanh_mlp,
    unconverged_mlp,
)

pytestmark = pytest.mark.curvature

everywhere = pytest.mark.parametrize("make", [*CONVERGED, unconverged_mlp])


def extremes(matrix: Tensor) -> tuple[float, float]:
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]), float(values[-1])


def close(found: Spectrum, matrix: Tensor, tolerance: float) -> bool:
    """Whether both ends are right, to a share of the larger one."""
    smallest, largest = extremes(matrix)
    allowed = tolerance * max(abs(smallest), abs(largest))
    return abs(found.smallest - smallest) <= allowed and abs(found.largest - largest) <= allowed


def measured(problem: Problem, batch_size: int = 512) -> Spectrum:
    functional, theta = problem.task.at(problem.task.state())
    data = Data(problem.data, device=torch.device("cpu"), batch_size=batch_size)
    descent = Descent(functional, theta, data, problem.sources, Plan(), steps=1, lr=1.0)
    return spectrum(functional, theta, next(descent.batches()))


def symmetric(values: list[float]) -> Tensor:
    """A dense symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(1)
    basis: Tensor = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (basis * torch.tensor(values, dtype=torch.float64)) @ basis.T


@pytest.mark.parametrize(
    "values",
    [[1.0, 2.0, 3.0, 10.0], [-7.0, -1.0, 0.0, 2.0], [-3.0, -2.0, -1.0], [5.0], [2.0, 2.0, 2.0, 2.0], [0.0] * 5],
    ids=["positive", "mostly negative", "negative", "one", "equal", "flat"],
)
def test_lanczos_run_to_its_end_finds_the_extremes_exactly(values: list[float]) -> None:
    matrix = symmetric(values)
    start = torch.linspace(1, 2, len(values), dtype=torch.float64)
    found = lanczos(lambda v: matrix @ v, start, iterations=50, tolerance=0.0)
    assert [found.smallest, found.largest] == pytest.approx([min(values), max(values)], abs=1e-9)


def test_lanczos_finds_the_extremes_of_a_large_matrix_in_few_products() -> None:
    values = torch.linspace(0, 1, 400, dtype=torch.float64)
    values[:2], values[-1] = torch.tensor([-2.0, -1.0]), 9.0
    products = 0

    def product(vector: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return values * vector

    start = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = lanczos(product, start, iterations=30)
    assert close(found, torch.diag(values), 0.01)
    assert products < 30


@pytest.mark.parametrize("size", [1500, 5000])
def test_lanczos_does_not_stop_before_it_has_seen_an_isolated_negative_curvature(size: int) -> None:
    values = 10 * torch.logspace(0, -6, size, dtype=torch.float64)
    values[-1] = -0.5
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(8, size, generator=generator, dtype=torch.float64)
    found = [lanczos(lambda v: values * v, start, iterations=30).smallest for start in starts]
    assert found == pytest.approx([-0.5] * 8, abs=0.05)


def test_lanczos_keeps_few_vectors_and_the_extremes_long_after_they_have_settled() -> None:
    values = torch.logspace(0, -6, 200, dtype=torch.float64)
    values[0], values[-1] = 1e4, -50.0
    met: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def product(vector: Tensor) -> Tensor:
        met.append(weakref.ref(vector))
        alive.append(sum(each() is not None for each in met))
        return (values * vector).float().double()  # rounded, as the products of a model are

    start = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = lanczos(product, start, iterations=100, tolerance=0.0)
    assert [found.smallest, found.largest] == pytest.approx([-50.0, 1e4], rel=1e-4)
    assert len(met) > 50 and max(alive) == 2


def test_lanczos_refuses_curvature_that_is_not_finite() -> None:
    with pytest.raises(SimulationError, match="curvature is not finite"):
        lanczos(lambda v: v * torch.nan, torch.ones(3, dtype=torch.float64), iterations=3)


@everywhere
@pytest.mark.parametrize("batch_size", [3, 512])
def test_the_measured_extremes_are_those_of_the_explicit_hessian(make: Callable[[], Problem], batch_size: int) -> None:
    assert close(measured(make(), batch_size), make().hessian(), 0.03)


def test_negative_curvature_is_seen() -> None:
    assert extremes(unconverged_mlp().hessian())[0] < -0.05
    assert measured(unconverged_mlp()).smallest < -0.05


def test_mini_batches_are_measured_by_the_sharpest_of_the_first() -> None:
    problem = quadratic()
    drawn = minibatches(problem.n, 2, seed=2)
    ends = [extremes(problem.data[0][next(drawn)].mean(0)) for _ in range(2)]
    store = problem.simulate(Plan(steps=5, lr=0.1, batch_size=2, seed=2))
    expected = [min(low for low, _ in ends), max(high for _, high in ends)]
    assert store.checkpoints[0].measured.curvature == pytest.approx(expected, abs=0.01 * expected[1])
    assert ends[1][1] > 1.2 * ends[0][1] > 1.2 * extremes(problem.hessian())[1]


def in_reverse_only(problem: Problem) -> Problem:
    """The same problem, its model without forward mode."""
    model = Rebuilt(problem.task.model, TanhInReverse)
    return replace(problem, task=Task.classifier(model, regulariser=problem.task.regulariser))


@pytest.mark.parametrize("make", [tanh_mlp, unconverged_mlp])
def test_differences_of_gradients_stand_in_for_forward_mode(
    make: Callable[[], Problem], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = measured(in_reverse_only(make()), batch_size=7)
    assert "measured by differences of gradients" in caplog.text
    exact = measured(make())
    assert [found.smallest, found.largest] == pytest.approx([exact.smallest, exact.largest], rel=1e-4, abs=1e-5)


def test_a_model_without_forward_mode_gets_its_imprints_from_trajectories() -> None:
    problem = unconverged_mlp()
    plan = Plan(engine="trajectories", steps=6, epsilon=0.1)
    store, expected = in_reverse_only(problem).simulate(plan), problem.simulate(plan)
    assert store.checkpoints[0].choices.lr == pytest.approx(expected.checkpoints[0].choices.lr, rel=1e-4)
    plan = replace(plan, lr=problem.lr)
    same = [imprints(each.simulate(plan)) for each in (in_reverse_only(problem), problem)]
    assert relative_error(*same) < 1e-10


def test_differences_of_gradients_work_at_the_origin() -> None:
    problem = in_reverse_only(unconverged_mlp())
    functional, theta = problem.task.at({name: torch.zeros_like(t) for name, t in problem.task.state().items()})
    data = Data(problem.data, device=torch.device("cpu"))
    descent = Descent(functional, theta, data, problem.sources, Plan(), steps=1, lr=1.0)
    found = spectrum(functional, theta, next(descent.batches()))
    at_origin: Tensor = hessian(unconverged_mlp().plain)(torch.zeros_like(problem.theta))
    assert close(found, at_origin, 0.03)


# The step.


@everywhere
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_the_automatic_step_is_one_over_the_largest_curvature(make: Callable[[], Problem], damping: float) -> None:
    checkpoint = make().simulate(Plan(steps=2, damping=damping)).checkpoints[0]
    assert checkpoint.choices.lr == pytest.approx(1 / extremes(make().hessian(damping))[1], rel=0.02)
    assert checkpoint.choices.lr == pytest.approx(1 / (known(checkpoint.measured.curvature)[1] + damping), rel=1e-12)


def test_the_automatic_step_suits_the_sharpest_point_of_the_path() -> None:
    """½(xw − 4)² with x and w from 0.1: curvature ±4 at the start, where it is a saddle, and 8 where the path ends."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)))
    nn.utils.vector_to_parameters(torch.full((2,), 0.1, dtype=torch.float64), model.parameters())
    data = torch.ones(3, 1, dtype=torch.float64), torch.full((3, 1), 4.0, dtype=torch.float64)
    problem = Problem(Task.regression(model), data, data, Sources.per_example(3), lr=1.0)
    assert extremes(problem.hessian()) == pytest.approx((-4, 4), rel=0.02)
    checkpoint = problem.simulate(Plan(steps=100)).checkpoints[0]
    assert 0.75 < 8 * checkpoint.choices.lr < 1.25
    smallest, largest = known(checkpoint.measured.curvature)
    assert smallest == pytest.approx(-4, rel=0.02)
    assert largest >= 7.9


def test_the_automatic_step_refuses_a_flat_objective() -> None:
    task = Task(nn.Linear(2, 1, dtype=torch.float64), loss=lambda model, batch: model(batch[0]).squeeze(-1))
    data = (torch.ones(3, 2, dtype=torch.float64),)
    with pytest.raises(SimulationError, match=r"no curvature to choose a step from.*give lr a number"):
        simulate(task, data, Sources.per_example(3), Plan(steps=2), progress=False)


@everywhere
@pytest.mark.parametrize(("share", "damping"), [(0.5, 0.0), (1.8, 0.2)])
def test_the_stability_figure_is_the_norm_of_one_step(
    make: Callable[[], Problem], share: float, damping: float
) -> None:
    curvature = make().hessian(damping)
    lr = share / extremes(curvature)[1]
    exact = torch.linalg.matrix_norm(torch.eye(len(curvature), dtype=torch.float64) - lr * curvature, ord=2)
    store = make().simulate(Plan(steps=2, lr=lr, damping=damping))
    assert store.checkpoints[0].measured.stability == pytest.approx(float(exact), rel=0.04)


def test_a_step_beyond_the_curvature_is_warned_of() -> None:
    problem = softmax_regression()
    largest = extremes(problem.hessian())[1]
    with pytest.warns(UserWarning, match="may diverge") as caught:
        problem.simulate(Plan(steps=2, lr=2.2 / largest))
    safe = re.search(r"lr=(\S+) would be safe", str(caught[0].message))
    assert safe is not None and float(safe[1]) == pytest.approx(1 / largest, rel=0.05)


def test_a_step_beyond_the_damped_curvature_is_warned_of() -> None:
    problem, damping = quadratic(), 10.0
    with pytest.warns(UserWarning, match="may diverge"):
        problem.simulate(Plan(steps=2, lr=2.2 / extremes(problem.hessian(damping))[1], damping=damping))


@everywhere
@pytest.mark.parametrize("share", [0.5, 1.8])
def test_a_step_within_the_curvature_is_not_warned_of(make: Callable[[], Problem], share: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make().simulate(Plan(steps=2, lr=share / extremes(make().hessian())[1]))


@pytest.mark.filterwarnings("ignore:.*may diverge")
@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_runaway_growth_names_source_spectrum_and_a_step_that_holds(engine: str) -> None:
    problem = quadratic()
    plan = Plan(steps=60, lr=50.0)
    if engine == "trajectories":
        plan = replace(plan, engine=engine, epsilon=0.01)
    with pytest.raises(SimulationError, match="runs away") as caught:
        problem.simulate(plan)
    message = str(caught.value)
    named = re.search(r"source '([^']+)'", message)
    assert named is not None and named[1] in problem.sources.ids
    shown = re.search(r"lr=50 and the measured curvature runs from (\S+) to (\S+)\.", message)
    assert shown is not None
    assert [float(end) for end in shown.groups()] == pytest.approx(extremes(problem.hessian()), rel=0.02)
    holds = re.search(r"A step below (\S+) holds", message)
    assert holds is not None and float(holds[1]) == pytest.approx(2 / extremes(problem.hessian())[1], rel=0.05)
    problem.simulate(replace(plan, lr=0.9 * float(holds[1])))


class Adapted(nn.Module):
    """x ↦ (w + b)·x with a weight that stays, and one beside it that is hardly there."""

    def __init__(self, b: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([b], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w + self.b) * x


def test_a_response_that_grows_from_zero_is_held_against_the_weights_beside() -> None:
    """It doubles with every step, and ends far below what would move a model whose weight is 1."""
    task = Task(
        Adapted(0.0),
        loss=lambda model, batch: model(batch[0]),
        regulariser=lambda model: -0.5 * dict(model.named_parameters())["b"].square().sum(),
        parameters="b",
    )
    data = (torch.tensor([1e-12, -1e-12], dtype=torch.float64),)
    found = simulate(task, data, Sources.groups({"a": [0]}), Plan(steps=20, lr=1.0), progress=False)
    assert float(imprints(found).abs().max()) == pytest.approx(1e-12 * (2**20 - 1), rel=1e-9)


@pytest.mark.parametrize("b", [0.0, 1e-9, 1e-6, 1e-4])
def test_differences_of_gradients_take_their_step_from_the_weights_beside(b: float) -> None:
    task = Task(Adapted(b), loss=lambda model, batch: model(batch[0]).sin(), parameters="b")
    functional, theta = task.at(task.state())
    parts = [Weighted(torch.arange(1), torch.ones(1, dtype=torch.float64), (torch.tensor([2.0], dtype=torch.float64),))]
    found = curvature._by_difference(functional, theta, parts, {"b": torch.ones(1, dtype=torch.float64)})
    assert float(found["b"]) == pytest.approx(-4 * math.sin(2 * (1 + b)), rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*may diverge")
def test_a_small_source_that_runs_away_is_refused_in_any_company() -> None:
    """Curvature 1 and 40 along two axes, lr = 1: the small source lies along the sharp one and grows 39-fold a step."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    sharpness = torch.tensor([1.0, 40.0], dtype=torch.float64)
    task = Task(
        model,
        loss=lambda model, batch: model(batch[0]).squeeze(-1),
        regulariser=lambda model: 0.5 * torch.stack([(sharpness * p.square()).sum() for p in model.parameters()]).sum(),
    )
    data = (torch.tensor([[1.0, 0.0], [0.0, 1e-9]], dtype=torch.float64),)
    for sources in (Sources.groups({"small": [1]}), Sources.groups({"large": [0], "small": [1]})):
        with pytest.raises(SimulationError, match="source 'small' runs away"):
            simulate(task, data, sources, Plan(steps=10, lr=1.0), progress=False)


def test_growth_that_the_path_survives_is_no_runaway() -> None:
    """Negative curvature lets responses grow at first; that is training, not an error."""
    problem = unconverged_mlp()
    store = problem.simulate(Plan(steps=60, lr=problem.lr))
    assert known(store.checkpoints[0].measured.stability) > 1


@pytest.mark.filterwarnings("ignore:.*may diverge")
def test_a_path_that_leaves_the_finite_is_refused_with_the_advice() -> None:
    """With a quartic term the unperturbed path itself explodes: the loss overflows before any imprint runs away."""
    task = Task(
        nn.Linear(1, 1, bias=False, dtype=torch.float64),
        loss=lambda model, batch: (model(batch[0]).squeeze(-1) - 3).pow(4),
    )
    data = (torch.ones(2, 1, dtype=torch.float64),)
    with pytest.raises(SimulationError, match=r"A step below .* holds"):
        simulate(task, data, Sources.per_example(2), Plan(steps=60, lr=10.0), progress=False)
