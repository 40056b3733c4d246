"""What the imprints are: orders of convergence, closed forms at an optimum, and the path's own derivative off it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, SimulationError, Sources, Task, attribute, simulate
from imprint.data import Data
from imprint.plan import Variant
from imprint.simulation.descent import Descent
from imprint.simulation.engines.trajectories import EPSILONS
from imprint.simulation.source_gradients import source_gradients
from tests.problems import (
    CONVERGED,
    Problem,
    base,
    imprints,
    midpoints,
    quadratic,
    relative_error,
    slope,
    softmax_regression,
    squared_norm,
    tanh_mlp,
    unconverged_mlp,
)

SHARES = [1e-5, 1e-4, 1e-3, 1e-2]  # ε/N
STEPS = 10

at_an_optimum = pytest.mark.parametrize("make", CONVERGED)
with_and_without_damping = pytest.mark.parametrize("damping", [0.0, 0.1])
full_and_mini_batches = pytest.mark.parametrize("batch_size", [None, 6])
anywhere = pytest.mark.parametrize("make", [*CONVERGED, unconverged_mlp])


@dataclass(frozen=True)
class Sweep:
    """Trajectories over all SHARES: the literal scores, and ‖Δδ‖ and ‖ΔΣ‖ where there are two sides."""

    scores: list[Tensor]
    differences: list[float]
    sums: list[float]

    def order(self, exact: Tensor) -> float:
        return slope(SHARES, [relative_error(scores, exact) for scores in self.scores])


@cache
def sweep(make: Callable[[], Problem], variant: Variant, damping: float = 0.0, batch_size: int | None = None) -> Sweep:
    problem, swept = make(), Sweep([], [], [])
    for share in SHARES:
        plan = Plan(
            engine="trajectories",
            variant=variant,
            epsilon=share * problem.n,
            steps=STEPS,
            lr=problem.lr,
            damping=damping,
            batch_size=batch_size,
            keep_pair=variant == "two_sided",
        )
        store = problem.simulate(plan)
        swept.scores.append(problem.literal(store).scores)
        if variant == "two_sided":
            swept.differences.append(2 * share * float(imprints(store).norm()))
            swept.sums.append(2 * float(midpoints(store).norm()))
    return swept


# At an optimum, against the closed form −g_qᵀ S_T(H_λ) g_b.


@at_an_optimum
@with_and_without_damping
def test_two_sided_error_shrinks_as_epsilon_squared(make: Callable[[], Problem], damping: float) -> None:
    swept = sweep(make, "two_sided", damping)
    assert swept.order(make().scores(STEPS, damping)) == pytest.approx(2, abs=0.25)


@at_an_optimum
@with_and_without_damping
def test_mirrored_error_shrinks_as_epsilon_at_an_optimum(make: Callable[[], Problem], damping: float) -> None:
    swept = sweep(make, "mirrored", damping)
    assert swept.order(make().scores(STEPS, damping)) == pytest.approx(1, abs=0.25)


@at_an_optimum
@with_and_without_damping
def test_the_two_sides_part_as_epsilon_and_bend_as_epsilon_squared(make: Callable[[], Problem], damping: float) -> None:
    swept = sweep(make, "two_sided", damping)
    assert slope(SHARES, swept.differences) == pytest.approx(1, abs=0.05)
    assert slope(SHARES, swept.sums) == pytest.approx(2, abs=0.1)


@at_an_optimum
@with_and_without_damping
def test_tangent_is_the_closed_form_at_an_optimum(make: Callable[[], Problem], damping: float) -> None:
    problem = make()
    store = problem.simulate(Plan(steps=STEPS, lr=problem.lr, damping=damping))
    assert relative_error(imprints(store), -problem.filter(STEPS, damping) @ problem.source_gradients()) < 1e-9
    assert relative_error(problem.attribute(store).scores, problem.scores(STEPS, damping)) < 1e-9
    assert relative_error(base(store), problem.theta) < 1e-12


@at_an_optimum
@with_and_without_damping
def test_too_few_steps_miss_the_influence_by_the_filtered_rest(make: Callable[[], Problem], damping: float) -> None:
    """s − (−g_qᵀ H_λ⁻¹ g_b) = g_qᵀ (I − ηH_λ)^T H_λ⁻¹ g_b, with its sign."""
    problem, steps = make(), 4
    store = problem.simulate(Plan(steps=steps, lr=problem.lr, damping=damping))
    curvature = problem.hessian(damping)
    influence = torch.linalg.solve(curvature, problem.source_gradients())
    step = torch.eye(len(curvature), dtype=torch.float64) - problem.lr * curvature
    rest = problem.query_gradients() @ torch.linalg.matrix_power(step, steps) @ influence
    missed = problem.attribute(store).scores + problem.query_gradients() @ influence
    assert relative_error(missed, rest) < 1e-8


@pytest.mark.parametrize(("make", "damping"), [(quadratic, 0.0), (softmax_regression, 0.3), (tanh_mlp, 0.5)])
def test_many_steps_give_the_damped_influence_function(make: Callable[[], Problem], damping: float) -> None:
    problem = make()
    store = problem.simulate(Plan(steps=100, lr=problem.lr, damping=damping))
    influence = -torch.linalg.solve(problem.hessian(damping), problem.source_gradients())
    assert relative_error(imprints(store), influence) < 1e-9


# Off the optimum, against the derivative of the path.


@pytest.mark.parametrize(("damping", "batch_size"), [(0.0, None), (0.1, None), (0.0, 6)])
@pytest.mark.parametrize(("variant", "order"), [("two_sided", 2), ("one_sided", 1)])
def test_trajectories_keep_their_order_off_the_optimum(
    variant: Variant, order: int, damping: float, batch_size: int | None
) -> None:
    problem = unconverged_mlp()
    store = problem.simulate(Plan(steps=STEPS, lr=problem.lr, damping=damping, batch_size=batch_size))
    exact = problem.attribute(store).scores
    assert sweep(unconverged_mlp, variant, damping, batch_size).order(exact) == pytest.approx(order, abs=0.25)


@full_and_mini_batches
@with_and_without_damping
@anywhere
def test_tangent_is_the_derivative_of_the_path(
    make: Callable[[], Problem], damping: float, batch_size: int | None
) -> None:
    problem = make()
    plan = Plan(steps=8, lr=problem.lr, damping=damping, batch_size=batch_size, seed=3)
    end, derivative = problem.path(plan)
    store = problem.simulate(plan)
    assert relative_error(imprints(store), derivative) < 1e-9
    assert relative_error(base(store), end) < 1e-12
    scores = problem.query_gradients(end) @ derivative
    assert relative_error(problem.attribute(store).scores, scores) < 1e-9


def test_the_closed_form_is_wrong_off_the_optimum() -> None:
    problem = unconverged_mlp()
    store = problem.simulate(Plan(steps=STEPS, lr=problem.lr))
    assert relative_error(problem.attribute(store).scores, problem.scores(STEPS)) > 0.1


@full_and_mini_batches
def test_mirrored_refuses_off_the_optimum_and_names_the_remedy(batch_size: int | None) -> None:
    problem = unconverged_mlp()
    plan = Plan(engine="trajectories", variant="mirrored", steps=5, lr=problem.lr, batch_size=batch_size)
    words = r"only at an optimum: further training moves .*source '.*one_sided.*accept_drift"
    with pytest.raises(SimulationError, match=words):
        problem.simulate(plan)


def test_mirrored_names_the_remedy_when_epsilon_is_chosen_too() -> None:
    problem = unconverged_mlp()
    plan = Plan(engine="trajectories", variant="mirrored", epsilon="auto", steps=5, lr=problem.lr)
    with pytest.raises(SimulationError, match="one_sided"):
        problem.simulate(plan)


def test_mirrored_takes_the_drift_in_full_when_asked_to() -> None:
    """(θ⁺ − θ*)/(ε/N): the error is the drift over ε/N, so it grows as ε shrinks."""
    problem = unconverged_mlp()
    plan = Plan(engine="trajectories", variant="mirrored", steps=5, lr=problem.lr, accept_drift=True)
    drift = problem.path(plan)[0] - problem.theta
    for epsilon in (0.1, 1.0):
        mirrored = problem.simulate(replace(plan, epsilon=epsilon))
        one_sided = problem.simulate(replace(plan, epsilon=epsilon, variant="one_sided", accept_drift=False))
        entered = imprints(mirrored) - imprints(one_sided)
        assert relative_error(entered, (drift / (epsilon / problem.n))[:, None].expand_as(entered)) < 1e-9
        assert torch.equal(base(mirrored), problem.theta)


# Sources.


@anywhere
@full_and_mini_batches
def test_the_imprint_of_a_group_is_the_sum_of_its_members(make: Callable[[], Problem], batch_size: int | None) -> None:
    problem = make()
    plan = Plan(steps=6, lr=problem.lr, damping=0.05, batch_size=batch_size)
    each = imprints(problem.simulate(plan, Sources.per_example(problem.n)))
    assert relative_error(imprints(problem.simulate(plan)), each @ problem.indicator.T) < 1e-10


def regularised(problem: Problem, scale: float) -> Problem:
    """The same model and data with another regulariser."""
    task = Task.classifier(problem.task.model, measure="margin", regulariser=squared_norm(scale))
    return replace(problem, task=task)


def test_the_regulariser_is_no_part_of_a_sources_own_loss() -> None:
    problem = regularised(softmax_regression(), 0.7)
    one_step = problem.simulate(Plan(steps=1, lr=problem.lr))
    assert relative_error(imprints(one_step), -problem.lr * problem.source_gradients()) < 1e-12


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_the_regulariser_enters_once_however_many_batches_there_are(engine: str) -> None:
    problem = regularised(softmax_regression(), 0.7)
    plan = Plan(steps=5, lr=problem.lr)
    end, derivative = problem.path(plan)
    if engine == "trajectories":
        plan = replace(plan, engine=engine, epsilon=1e-3)
    store = problem.simulate(plan, batch_size=3)
    assert relative_error(base(store), end) < 1e-12
    assert relative_error(imprints(store), derivative) < (1e-10 if engine == "tangent" else 1e-6)


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
@full_and_mini_batches
def test_damping_acts_on_the_response_only(engine: str, batch_size: int | None) -> None:
    problem = unconverged_mlp()
    plan = Plan(steps=10, lr=problem.lr, batch_size=batch_size)
    if engine == "trajectories":
        plan = replace(plan, engine=engine, epsilon=0.01)
    plain, damped = problem.simulate(plan), problem.simulate(replace(plan, damping=0.5))
    assert torch.equal(base(plain), base(damped))
    assert relative_error(base(plain), problem.theta) > 0.01
    assert float(imprints(damped).norm()) < 0.9 * float(imprints(plain).norm())


# Samples of a source.


def sampled_gradient(problem: Problem, sample: int | None, seed: int, step: int = 0) -> Tensor:
    """What stands for ∇ℓ_b of each source in one step, shape (parameters, sources)."""
    functional, theta = problem.task.at(problem.task.state())
    data = Data(problem.data, device=torch.device("cpu"))
    plan = Plan(batch_size=5, source_sample=sample, seed=seed)
    descent = Descent(functional, theta, data, problem.sources, plan, steps=1, lr=1.0)
    stack = source_gradients(descent, theta, step)
    return torch.cat([tensor.flatten(1) for tensor in stack.values()], dim=1).T


@pytest.mark.parametrize("step", [0, 1, 2], ids=["the first", "the second", "the third"])
def test_a_sample_of_a_source_is_unbiased_in_every_step(step: int) -> None:
    problem = softmax_regression()
    draws = torch.stack([sampled_gradient(problem, 2, seed, step) for seed in range(400)])
    full = problem.source_gradients()
    assert relative_error(sampled_gradient(problem, None, 0), full) < 1e-12
    assert relative_error(draws[0], full) > 0.05
    error = (draws.mean(0) - full).norm(dim=0)
    expected_error = draws.std(0).norm(dim=0) / len(draws) ** 0.5
    assert bool((error <= 2.5 * expected_error + 1e-12).all())


def test_a_source_within_the_sample_size_is_taken_whole_and_of_larger_ones_another_sample_in_each_step() -> None:
    problem = softmax_regression()
    full, first, second = problem.source_gradients(), *(sampled_gradient(problem, 4, 0, step) for step in (0, 1))
    small = torch.tensor([size <= 4 for size in problem.sources.sizes])
    assert torch.allclose(first[:, small], full[:, small], rtol=1e-12)
    assert bool(((first - second)[:, ~small].norm(dim=0) > 1e-3).all())


@pytest.mark.parametrize("sample", [1, 2, 3])
def test_steps_go_through_all_members_of_a_source_in_turn(sample: int) -> None:
    """After as many steps as a source has members, each of them was drawn `sample` times: the noise is gone."""
    problem = softmax_regression()
    full = problem.source_gradients()
    for index, size in enumerate(problem.sources.sizes):
        draws = torch.stack([sampled_gradient(problem, sample, 0, step)[:, index] for step in range(size)])
        assert relative_error(draws.mean(0), full[:, index]) < 1e-12
        assert size <= sample or relative_error(draws[0], full[:, index]) > 1e-3


@pytest.mark.parametrize(
    ("variant", "order"),
    [
        ("two_sided", 2),
        ("one_sided", 1),
    ],
)
def test_trajectories_and_tangent_share_the_samples_of_a_source(variant: Variant, order: int) -> None:
    problem = unconverged_mlp()
    plan = Plan(steps=6, lr=problem.lr, batch_size=6, source_sample=2)
    exact = imprints(problem.simulate(plan))
    errors = []
    for share in SHARES:
        varied = replace(plan, engine="trajectories", variant=variant, epsilon=share * problem.n)
        errors.append(relative_error(imprints(problem.simulate(varied)), exact))
    assert slope(SHARES, errors) == pytest.approx(order, abs=0.25)


def test_ids_of_sources_are_free() -> None:
    sources = Sources.groups({"a": [0], "a (lighter)": [1]})
    plan = Plan(engine="trajectories", steps=2, lr=0.5)
    expected = unconverged_mlp().simulate(plan, Sources.groups({"a": [0], "b": [1]}))
    assert torch.equal(imprints(unconverged_mlp().simulate(plan, sources)), imprints(expected))


# Checkpoints.


def test_checkpoints_combine_by_their_weighted_mean_and_weight_zero_skips() -> None:
    early, late = unconverged_mlp(), tanh_mlp()
    states = [early.task.state(), late.task.state()]

    def scores(weight: tuple[float, ...] | float, chosen: list[int]) -> Tensor:
        plan = Plan(steps=8, lr=late.lr, weight=weight)
        checkpoints = [states[index] for index in chosen]
        store = simulate(late.task, late.data, late.sources, plan, checkpoints=checkpoints, progress=False)
        assert [bool(checkpoint.imprints) for checkpoint in store.checkpoints] == [
            weight != 0 for weight in ([weight] * len(chosen) if isinstance(weight, float) else weight)
        ]
        return attribute(late.task, store, late.queries, progress=False).scores

    first, second = scores(1.0, [0]), scores(5.0, [1])
    assert relative_error(first, second) > 0.1
    assert relative_error(scores((1.0, 3.0), [0, 1]), (first + 3 * second) / 4) < 1e-12
    assert relative_error(scores(2.0, [0, 1]), (first + second) / 2) < 1e-12
    assert relative_error(scores((0.0, 2.0), [0, 1]), second) < 1e-12


# The choice of ε.


def test_automatic_epsilon_takes_the_best_agreement_with_its_double_and_records_it() -> None:
    problem = unconverged_mlp()
    plan = Plan(engine="trajectories", epsilon="auto", steps=10, lr=problem.lr)
    three = Sources.groups({"first": [0], "few": range(4), "every third": range(0, 20, 3)})
    checkpoint = problem.simulate(plan, three).checkpoints[0]
    epsilon, disagreement = checkpoint.choices.epsilon, checkpoint.measured.epsilon_disagreement
    assert epsilon is not None
    assert set(disagreement) == {f"{tried:g}" for tried in EPSILONS[:-1]}
    chosen = disagreement[f"{epsilon:g}"]
    assert chosen == min(disagreement.values()) < 0.01

    at, double = (imprints(problem.simulate(replace(plan, epsilon=factor * epsilon), three)) for factor in (1, 2))
    assert chosen == pytest.approx(float(((double - at).norm(dim=0) / at.norm(dim=0)).mean()))
    exact = imprints(problem.simulate(Plan(steps=10, lr=problem.lr), three))
    assert relative_error(at, exact) < chosen


def test_automatic_epsilon_is_large_where_only_rounding_counts() -> None:
    """A loss that is linear in θ bends nothing, so in single precision the largest difference is the best one."""
    directions = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    task = Task(
        nn.Linear(100, 1, bias=False),
        loss=lambda model, batch: model(batch[0]).squeeze(-1),
        regulariser=squared_norm(1.0),
    )
    plan = Plan(engine="trajectories", epsilon="auto", steps=5, lr=0.3)
    store = simulate(task, (directions,), Sources.per_example(20), plan, progress=False)
    assert (store.checkpoints[0].choices.epsilon or 0) > 1


def squared_hinge() -> Problem:
    """A linear classifier whose first example is classified well enough to pull at nothing."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    task = Task(
        model,
        loss=lambda model, batch: torch.relu(1 - batch[1] * model(batch[0]).squeeze(-1)).square(),
        regulariser=squared_norm(0.1),
    )
    x = torch.tensor([[5.0, 5.0], [0.1, 0.2], [-0.3, 0.1]], dtype=torch.float64)
    y = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    return Problem(task, (x, y), (x, y), Sources.per_example(3), lr=0.1)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(steps=3, lr=0.1),
        Plan(engine="trajectories", variant="one_sided", steps=3, lr=0.1),
        Plan(engine="trajectories", steps=3, lr=0.1),
        Plan(engine="trajectories", epsilon="auto", steps=3, lr=0.1),
    ],
    ids=["tangent", "one-sided", "two-sided", "automatic epsilon"],
)
def test_a_source_without_a_gradient_has_a_zero_imprint(plan: Plan) -> None:
    found = imprints(squared_hinge().simulate(plan))
    assert bool((found[:, 0] == 0).all())
    assert bool((found[:, 1:].norm(dim=0) > 0.01).all())
