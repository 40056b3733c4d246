"""Paths that follow Adam: every step is divided by M = diag(√v̂ + 1e-8), and nothing else changes."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from imprint import Plan, PlanError, check
from tests.problems import (
    base,
    descents,
    imprints,
    known,
    quadratic,
    relative_error,
    slope,
    softmax_regression,
    unconverged_mlp,
)
from tests.simulation.preconditioning import EXACT, PLANS, an_m, badly_scaled, check_trajectories, every_plan, run


@every_plan
def test_the_imprint_is_the_derivative_of_preconditioned_descents(plan: Plan) -> None:
    problem, m = unconverged_mlp(), an_m(unconverged_mlp())
    store = run(problem, plan, m)
    bottom, end = descents(problem, plan, m)
    nothing = torch.zeros(len(problem.sources), dtype=torch.float64)
    derivative: Tensor = jacrev(end)(nothing)
    assert relative_error(base(store), bottom) < EXACT
    assert relative_error(imprints(store), derivative) < EXACT
    share = 1e-4
    for column, one in enumerate(torch.eye(len(problem.sources), dtype=torch.float64)):
        difference = (end(share * one) - end(-share * one)) / (2 * share)
        assert relative_error(imprints(store)[:, column], difference) < 1e-5
    plain: Tensor = jacrev(descents(problem, plan, torch.ones_like(m))[1])(nothing)
    assert relative_error(plain, derivative) > 0.1  # M matters


@pytest.mark.parametrize("variant", ["two_sided", "one_sided", "mirrored"])
@every_plan
def test_trajectories_are_preconditioned_descents(variant: Any, plan: Plan) -> None:
    problem, m = unconverged_mlp(), an_m(unconverged_mlp())
    check_trajectories(problem, plan, variant, m)


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_on_a_quadratic_it_is_the_closed_form(damping: float) -> None:
    """u = −η Σ_{t<T} (I − ηM⁻¹H_λ)^t M⁻¹ g."""
    problem, m, steps, lr = quadratic(), an_m(quadratic()), 9, 0.1
    store = run(problem, Plan(steps=steps, lr=lr, damping=damping, preconditioner="adam"), m)
    step = torch.eye(len(m), dtype=torch.float64) - lr * problem.hessian(damping) / m[:, None]
    filtered = sum((torch.linalg.matrix_power(step, t) for t in range(steps)), torch.zeros_like(step))
    assert relative_error(imprints(store), -lr * filtered @ (problem.source_gradients() / m[:, None])) < EXACT


def test_where_outputs_are_linear_gauss_newton_responses_are_those_of_the_hessian() -> None:
    problem, m = softmax_regression(), an_m(softmax_regression())
    newton = run(problem, replace(PLANS["damped"], curvature="gauss-newton"), m)
    assert relative_error(imprints(newton), imprints(run(problem, PLANS["damped"], m))) < EXACT


@pytest.mark.curvature
def test_at_an_optimum_many_steps_lead_to_the_influence_function_whatever_m_is() -> None:
    problem = quadratic()
    store = run(problem, Plan(steps=400, preconditioner="adam"), an_m(problem))
    influence = -torch.linalg.solve(problem.hessian(), problem.source_gradients())
    assert relative_error(imprints(store), influence) < 1e-6


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
@pytest.mark.parametrize("changes", [{}, {"lr": "auto"}, {"damping": 0.2}, {"batch_size": 6}], ids=str)
def test_m_of_one_is_plain_gradient_descent_to_the_bit(engine: Any, changes: dict[str, Any]) -> None:
    problem = unconverged_mlp()
    plain = Plan(**{"engine": engine, "steps": 7, "lr": 0.3, **changes})
    store = run(problem, replace(plain, preconditioner="adam"), torch.ones_like(problem.theta))
    expected = run(problem, plain)
    assert torch.equal(imprints(store), imprints(expected))
    assert torch.equal(base(store), base(expected))
    assert store.checkpoints[0].choices.lr == expected.checkpoints[0].choices.lr


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_m_and_the_step_scaled_together_change_nothing(engine: Any) -> None:
    problem, m = unconverged_mlp(), an_m(unconverged_mlp())
    plan = Plan(engine=engine, steps=7, lr=0.3, damping=0.2, preconditioner="adam")
    scaled = run(problem, replace(plan, lr=0.3 * 5), 5 * m)
    assert relative_error(imprints(scaled), imprints(run(problem, plan, m))) < EXACT


@pytest.mark.curvature
def test_an_automatic_step_scales_with_m() -> None:
    problem, m = unconverged_mlp(), an_m(unconverged_mlp())
    plan = Plan(steps=7, damping=0.2, preconditioner="adam")
    one, five = run(problem, plan, m), run(problem, plan, 5 * m)
    assert five.checkpoints[0].choices.lr == pytest.approx(5 * one.checkpoints[0].choices.lr, rel=1e-6)
    assert relative_error(imprints(five), imprints(one)) < 1e-6


def test_two_sided_error_shrinks_as_epsilon_squared() -> None:
    problem, m = unconverged_mlp(), an_m(unconverged_mlp())
    exact = imprints(run(problem, PLANS["full batch"], m))
    epsilons = [0.25, 0.5, 1.0]
    plans = [replace(PLANS["full batch"], engine="trajectories", epsilon=epsilon) for epsilon in epsilons]
    errors = [relative_error(imprints(run(problem, plan, m)), exact) for plan in plans]
    assert 1.9 < slope(epsilons, errors) < 2.1


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.curvature
def test_stability_is_that_of_the_preconditioned_operator(damping: float) -> None:
    problem, m = unconverged_mlp(), an_m(unconverged_mlp())
    with_damping = Plan(steps=2, lr=0.1, damping=damping, preconditioner="adam")
    measured = run(problem, with_damping, m).checkpoints[0].measured
    root = m.sqrt()
    curvatures = torch.linalg.eigvalsh(problem.hessian(damping) / root[:, None] / root)
    smallest, largest = float(curvatures[0]), float(curvatures[-1])
    assert measured.curvature == pytest.approx([smallest, largest], rel=1e-2, abs=3e-2 * largest)
    expected = max(abs(1 - 0.1 * smallest), abs(1 - 0.1 * largest))
    assert measured.stability == pytest.approx(expected, abs=0.1 * 3e-2 * largest)


@pytest.mark.curvature
def test_a_step_that_is_too_long_for_the_preconditioned_curvature_is_warned_of() -> None:
    problem = quadratic()
    plain = Plan(steps=2, lr=problem.lr)
    run(problem, plain)  # is fine
    small = torch.full_like(problem.theta, 0.01)
    with pytest.warns(UserWarning, match="the descent may diverge"):
        run(problem, replace(plain, preconditioner="adam", lr=30 * problem.lr), small)


@pytest.mark.curvature
def test_where_scales_differ_the_preconditioned_path_is_stable_and_gets_further() -> None:
    problem = badly_scaled()
    influence = -torch.linalg.solve(problem.hessian(), problem.source_gradients())
    plain, adam = run(problem, Plan(steps=200)), run(problem, Plan(steps=200, preconditioner="adam"))
    assert known(adam.checkpoints[0].measured.stability) <= 1 + 1e-2
    assert adam.checkpoints[0].measured.moments == "estimated"
    assert relative_error(imprints(plain), influence) > 0.9
    assert relative_error(imprints(adam), influence) < 0.2


def test_only_paths_can_be_preconditioned() -> None:
    with pytest.raises(PlanError, match='preconditioner belongs to engine="tangent" or engine="trajectories"'):
        Plan(engine="spectral", preconditioner="adam")
    with pytest.raises(PlanError, match='preconditioner must be None or "adam", got'):
        Plan(preconditioner="adagrad")  # type: ignore[arg-type]
    plan = Plan(preconditioner="adam")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert Plan.from_json({}).preconditioner is None


def test_a_preconditioned_simulation_can_be_checked_before() -> None:
    problem = unconverged_mlp()
    found = check(problem.task, problem.data, problem.sources, Plan(steps=5, preconditioner="adam"))
    assert found.ok, str(found)
    assert {engine.name for engine in found.engines if engine.works} == {"tangent", "trajectories", "spectral"}
