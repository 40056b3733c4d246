"""Paths with momentum: d ← βd + (1 − β)·pull and θ ← θ − ηM⁻¹d, of the base path and of every row beside it."""

import json
import math
import re
import warnings
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from imprint import Plan, PlanError, SimulationError, check
from imprint.simulation import snapshot
from imprint.simulation.curvature import Spectrum
from tests.problems import (
    Problem,
    base,
    batch_weights,
    descents,
    imprints,
    known,
    quadratic,
    relative_error,
    softmax_regression,
    unconverged_mlp,
)
from tests.simulation.killing import contents, die_until_done
from tests.simulation.preconditioning import an_m, badly_scaled, check_trajectories, run, two_checkpoints

EXACT = 1e-10
PLANS = {
    "full batch": Plan(steps=7, lr=2.0, momentum=0.8),
    "damped": Plan(steps=7, lr=2.0, momentum=0.8, damping=0.2),
    "mini-batches": Plan(steps=7, lr=2.0, momentum=0.8, batch_size=6),
    "damped mini-batches": Plan(steps=7, lr=1.0, momentum=0.3, damping=0.2, batch_size=6),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
with_m_and_without = pytest.mark.parametrize("preconditioner", [None, "adam"])
both_engines = pytest.mark.parametrize("engine", ["tangent", "trajectories"])


def the_m(problem: Problem, plan: Plan) -> Tensor | None:
    """What the plan's steps are divided by."""
    return None if plan.preconditioner is None else an_m(problem)


def companion(problem: Problem, lr: float, momentum: float, damping: float = 0.0, m: Tensor | None = None) -> Tensor:
    """What a step does to (v_t, v_{t−1}), where the curvature is that of θ: v ← v + β(v − v₋) − (1 − β)ηM⁻¹H_λ v."""
    one = torch.eye(len(problem.theta), dtype=torch.float64)
    curved = problem.hessian(damping) / (torch.ones_like(problem.theta) if m is None else m)[:, None]
    above = torch.cat([(1 + momentum) * one - (1 - momentum) * lr * curved, -momentum * one], dim=1)
    return torch.cat([above, torch.cat([one, torch.zeros_like(one)], dim=1)])


def radius(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix).abs().max())


def sharpest(problem: Problem, damping: float = 0.0, m: Tensor | None = None) -> float:
    """The largest curvature of M⁻¹H_λ."""
    root = torch.ones_like(problem.theta) if m is None else m.sqrt()
    return float(torch.linalg.eigvalsh(problem.hessian(damping) / root[:, None] / root)[-1])


def longer(momentum: float) -> float:
    return (1 + momentum) / (1 - momentum)


# --- the mathematics


@with_m_and_without
@every_plan
def test_the_imprint_is_the_derivative_of_descents_with_momentum(plan: Plan, preconditioner: Any) -> None:
    problem, plan = unconverged_mlp(), replace(plan, preconditioner=preconditioner)
    m = the_m(problem, plan)
    store = run(problem, plan, m)
    bottom, end = descents(problem, plan, m)
    nothing = torch.zeros(len(problem.sources), dtype=torch.float64)
    derivative: Tensor = jacrev(end)(nothing)
    assert relative_error(base(store), bottom) < EXACT
    assert relative_error(imprints(store), derivative) < EXACT
    plain: Tensor = jacrev(descents(problem, replace(plan, momentum=0.0), m)[1])(nothing)
    assert relative_error(plain, derivative) > 0.1  # momentum matters


@pytest.mark.parametrize("variant", ["two_sided", "one_sided", "mirrored"])
@with_m_and_without
@every_plan
def test_trajectories_are_descents_with_momentum(variant: Any, plan: Plan, preconditioner: Any) -> None:
    problem, plan = unconverged_mlp(), replace(plan, preconditioner=preconditioner)
    check_trajectories(problem, plan, variant, the_m(problem, plan))


@pytest.mark.parametrize("momentum", [0.3, 0.9])
@pytest.mark.parametrize("batch_size", [None, 6])
def test_the_path_is_that_of_sgd_with_momentum_and_a_shorter_step(momentum: float, batch_size: int | None) -> None:
    """`torch.optim.SGD` adds gradients up undiminished: its lr is (1 − β)η."""
    problem = unconverged_mlp()
    plan = Plan(steps=20, lr=2.0, momentum=momentum, batch_size=batch_size)
    theta = problem.theta.clone().requires_grad_()
    sgd = torch.optim.SGD([theta], lr=(1 - momentum) * 2.0, momentum=momentum)
    for weights in batch_weights(problem, plan):
        sgd.zero_grad()
        problem.objective(theta, weights).backward()
        sgd.step()
    assert relative_error(base(run(problem, plan)), theta.detach()) < EXACT


@pytest.mark.parametrize("momentum", [0.3, 0.9])
@pytest.mark.parametrize("damping", [0.0, 0.3])
@with_m_and_without
def test_on_a_quadratic_it_is_the_closed_form(damping: float, momentum: float, preconditioner: Any) -> None:
    """u = −(1 − β)η Σ_{t<T} Cᵗ M⁻¹g, of which C is the companion matrix of z² = (1 + β − (1 − β)ηM⁻¹H_λ)z − β."""
    problem, steps, lr = quadratic(), 9, 0.8
    plan = Plan(steps=steps, lr=lr, momentum=momentum, damping=damping, preconditioner=preconditioner)
    m = the_m(problem, plan)
    step = companion(problem, lr, momentum, damping, m)
    gradients = problem.source_gradients() / (1 if m is None else m[:, None])
    pushed = torch.cat([-(1 - momentum) * lr * gradients, torch.zeros_like(gradients)])
    summed = sum((torch.linalg.matrix_power(step, t) for t in range(steps)), torch.zeros_like(step)) @ pushed
    assert relative_error(imprints(run(problem, plan, m)), summed[: len(problem.theta)]) < EXACT


def test_where_outputs_are_linear_gauss_newton_responses_are_those_of_the_hessian() -> None:
    problem, plan = softmax_regression(), replace(PLANS["damped mini-batches"], preconditioner="adam")
    newton = run(problem, replace(plan, curvature="gauss-newton"), an_m(problem))
    assert relative_error(imprints(newton), imprints(run(problem, plan, an_m(problem)))) < EXACT


@both_engines
@with_m_and_without
def test_at_an_optimum_many_steps_lead_to_the_influence_function(preconditioner: Any, engine: Any) -> None:
    problem = quadratic()
    plan = Plan(engine=engine, steps=250, momentum=0.8, preconditioner=preconditioner)
    if engine == "trajectories":
        plan = replace(plan, epsilon=1e-3)
    influence = -torch.linalg.solve(problem.hessian(), problem.source_gradients())
    assert relative_error(imprints(run(problem, plan, the_m(problem, plan))), influence) < 1e-6


def test_where_scales_differ_as_many_steps_get_further_with_momentum() -> None:
    problem, plan = badly_scaled(), Plan(steps=100, preconditioner="adam")
    influence = -torch.linalg.solve(problem.hessian(), problem.source_gradients())
    plain, with_momentum = (run(problem, replace(plan, momentum=momentum)) for momentum in (0.0, 0.9))
    assert relative_error(imprints(plain), influence) > 0.25
    assert relative_error(imprints(with_momentum), influence) < 0.01


@both_engines
@pytest.mark.parametrize("changes", [{}, {"lr": "auto"}, {"damping": 0.2}, {"batch_size": 6}], ids=str)
def test_momentum_that_vanishes_is_plain_gradient_descent_to_the_bit(engine: Any, changes: dict[str, Any]) -> None:
    """1 − β is 1 here, yet directions are kept; β = 0 keeps none."""
    plain = Plan(**{"engine": engine, "steps": 7, "lr": 0.3, **changes})
    assert replace(plain, momentum=0.0) == plain
    store, expected = run(unconverged_mlp(), replace(plain, momentum=1e-300)), run(unconverged_mlp(), plain)
    assert torch.equal(imprints(store), imprints(expected))
    assert torch.equal(base(store), base(expected))
    assert store.checkpoints[0].choices.lr == expected.checkpoints[0].choices.lr
    assert store.checkpoints[0].measured.stability == expected.checkpoints[0].measured.stability


# --- steps and stability


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_growth_is_the_spectral_radius_of_a_step(momentum: float, damping: float) -> None:
    for mu in (-2.0, -0.1, 0.05, 1.0, 3.0, 10.0):
        for lr in (0.01, 0.3, 2.0, 11.0):
            curved = (1 - momentum) * lr * (mu + damping)
            step = torch.tensor([[1 + momentum - curved, -momentum], [1, 0]], dtype=torch.float64)
            assert Spectrum(mu, mu).growth(lr, damping, momentum) == pytest.approx(radius(step), rel=EXACT)


@pytest.mark.curvature
@pytest.mark.parametrize("momentum", [0.3, 0.9])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_an_automatic_step_is_as_much_longer_as_momentum_allows(momentum: float, damping: float) -> None:
    """On the sharpest direction the step is half of what is stable, and multiplies by √β."""
    problem = quadratic()
    plan = Plan(steps=5, damping=damping)
    plain, longest = (run(problem, replace(plan, momentum=beta)).checkpoints[0] for beta in (0.0, momentum))
    assert longest.choices.lr == pytest.approx(longer(momentum) * plain.choices.lr, rel=1e-6)
    assert longest.choices.lr == pytest.approx(longer(momentum) / sharpest(problem, damping), rel=2e-2)
    edge = Spectrum(*[known(longest.measured.curvature)[1]] * 2)
    assert edge.growth(longest.choices.lr, damping, momentum) == pytest.approx(math.sqrt(momentum), rel=EXACT)
    assert edge.growth(2 * longest.choices.lr, damping, momentum) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.curvature
@pytest.mark.filterwarnings("ignore:.*may diverge")
@pytest.mark.parametrize(
    ("share", "damping", "momentum"), [(0.5, 0.0, 0.3), (1.0, 0.3, 0.9), (2.2, 0.0, 0.9), (2.2, 0.3, 0.3)]
)
@pytest.mark.parametrize("make", [quadratic, unconverged_mlp])
@with_m_and_without
def test_the_stability_figure_is_the_spectral_radius_of_one_step(
    make: Any, share: float, damping: float, momentum: float, preconditioner: Any
) -> None:
    problem = make()
    plan = Plan(steps=1, momentum=momentum, damping=damping, preconditioner=preconditioner)
    m = the_m(problem, plan)
    lr = share * longer(momentum) / sharpest(problem, damping, m)
    figure = run(problem, replace(plan, lr=lr), m).checkpoints[0].measured.stability
    assert figure == pytest.approx(radius(companion(problem, lr, momentum, damping, m)), rel=0.04)


@pytest.mark.curvature
@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_a_step_is_warned_of_where_it_is_too_long_even_with_momentum(momentum: float, damping: float) -> None:
    problem = quadratic()
    limit = 2 * longer(momentum) / sharpest(problem, damping)
    plan = Plan(steps=2, lr=0.95 * limit, momentum=momentum, damping=damping)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(problem, plan)
    with pytest.warns(UserWarning, match="may diverge"):
        run(problem, replace(plan, momentum=0.0))
    with pytest.warns(UserWarning, match="a step multiplies some direction by .* the descent may diverge") as caught:
        run(problem, replace(plan, lr=1.05 * limit))
    safe = re.search(r"lr=(\S+) would be safe", str(caught[0].message))
    assert safe is not None and float(safe[1]) == pytest.approx(limit / 2, rel=0.05)


@pytest.mark.curvature
@pytest.mark.filterwarnings("ignore:.*may diverge")
@both_engines
def test_a_descent_that_runs_away_is_told_the_step_that_holds_with_momentum(engine: Any) -> None:
    problem, momentum = quadratic(), 0.9
    plan = Plan(engine=engine, steps=60, lr=500.0, momentum=momentum)
    if engine == "trajectories":
        plan = replace(plan, epsilon=0.01)
    with pytest.raises(SimulationError, match="runs away") as caught:
        run(problem, plan)
    holds = re.search(r"A step below (\S+) holds", str(caught.value))
    assert holds is not None
    assert float(holds[1]) == pytest.approx(2 * longer(momentum) / sharpest(problem), rel=0.05)
    run(problem, replace(plan, lr=0.9 * float(holds[1])))


# --- runs, plans


RESUMED = {
    "automatic step on mini-batches": Plan(steps=6, batch_size=7, momentum=0.9),
    "two-sided with M": Plan(
        engine="trajectories", steps=6, lr=0.2, keep_pair=True, preconditioner="adam", momentum=0.9
    ),
}


@pytest.mark.parametrize("plan", RESUMED.values(), ids=RESUMED.keys())
def test_a_run_that_dies_again_and_again_ends_in_the_same_store(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SECONDS", 0.0)
    whole = two_checkpoints(tmp_path / "whole", plan)
    expected = contents(whole.path)
    assert sum("imprints-" in name for name in expected) > 3
    die_until_done(lambda progress: two_checkpoints(tmp_path / "broken", plan, progress=progress), 30)
    assert contents(tmp_path / "broken") == expected
    assert contents(two_checkpoints(tmp_path / "again", plan, repeat=whole).path) == expected


def test_directions_that_are_kept_are_counted_in_memory_and_on_disk() -> None:
    problem, plan = unconverged_mlp(), Plan(steps=1, lr=0.1)
    each, count = problem.theta.nbytes, len(problem.sources)

    def together(memory: int, momentum: float = 0.0) -> int:
        """How many sources are simulated together in so much memory."""
        store = run(problem, replace(plan, momentum=momentum), memory=f"{memory}B")
        return store.checkpoints[0].choices.rows_at_once

    def estimated(momentum: float) -> int:
        changed = replace(plan, momentum=momentum)
        found = check(problem.task, problem.data, problem.sources, changed, memory="1GiB").estimate
        assert found is not None and found.rows_at_once == count
        return found.disk_bytes

    enough = bisect_left(range(10**5), count, 1, key=together)
    assert together(enough) == together(enough + count * each, momentum=0.9) == count
    assert together(enough - 1) == together(enough + count * each - 1, momentum=0.9) == count - 1
    assert estimated(0.9) - estimated(0.0) == (1 + count) * each


@both_engines
def test_a_simulation_with_momentum_can_be_checked_before(engine: Any) -> None:
    problem, plan = unconverged_mlp(), Plan(engine=engine, steps=5, preconditioner="adam", momentum=0.9)
    found = check(problem.task, problem.data, problem.sources, plan)
    assert found.ok, str(found)
    assert {engine.name for engine in found.engines if engine.works} == {"tangent", "trajectories", "spectral"}


def test_only_paths_have_momentum_and_it_is_a_share() -> None:
    with pytest.raises(PlanError, match='momentum belongs to engine="tangent" or engine="trajectories"'):
        Plan(engine="spectral", momentum=0.9)
    wrong: list[Any] = [1, 1.0, -0.1, float("nan"), float("inf"), "0.9", None, True, (0.9, 0.9)]
    for momentum in wrong:
        with pytest.raises(PlanError, match=r"momentum must be at least 0 and below 1, got "):
            Plan(momentum=momentum)
    assert Plan(momentum=0) == Plan()


def test_a_plan_keeps_its_momentum_and_one_written_without_has_none() -> None:
    plan = Plan(momentum=torch.tensor(0.75))  # type: ignore[arg-type]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.momentum == 0.75
    older = {name: value for name, value in Plan().to_json().items() if name != "momentum"}
    assert Plan.from_json(older).momentum == 0.0
