"""Paths that follow Adam: every step is divided by M = diag(√v̂ + 1e-8), and nothing else changes."""

import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import grad, jacrev

from imprint import Plan, PlanError, SimulationError, Sources, Store, StoreError, Task, TaskError, check, simulate
from imprint.cli.inspection import inspect_store
from imprint.plan import State
from imprint.simulation import snapshot
from imprint.simulation.descent import minibatches
from imprint.simulation.moments import BATCHES
from tests.problems import (
    Problem,
    base,
    descents,
    imprints,
    known,
    quadratic,
    relative_error,
    slope,
    softmax_regression,
    tanh_mlp,
    unconverged_mlp,
)
from tests.simulation.killing import Killed, contents, dies_after

EXACT = 1e-10
PLANS = {
    "full batch": Plan(steps=7, lr=0.3, preconditioner="adam"),
    "damped": Plan(steps=7, lr=0.3, damping=0.2, preconditioner="adam"),
    "mini-batches": Plan(steps=7, lr=0.3, batch_size=6, preconditioner="adam"),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def named(problem: Problem, flat: Tensor) -> dict[str, Tensor]:
    """A vector by parameters."""
    parameters = dict(problem.task.model.named_parameters())
    pieces = torch.split(flat, [p.numel() for p in parameters.values()])
    return {name: piece.reshape(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}


def an_m(problem: Problem) -> Tensor:
    """M of a training: a value for each parameter, from a third to three."""
    draw = torch.rand(len(problem.theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return 3 ** (2 * draw - 1)


def with_m(problem: Problem, m: Tensor) -> list[State]:
    """The model as it is, with the second moments that M is made of."""
    return [(problem.task.state(), named(problem, (m - 1e-8).square()))]


def run(problem: Problem, plan: Plan, m: Tensor | None = None, **options: Any) -> Store:
    checkpoints = None if m is None else with_m(problem, m)
    given = {"checkpoints": checkpoints, "batch_size": 512, "memory": "1GiB", "progress": False, **options}
    return simulate(problem.task, problem.data, problem.sources, plan, **given)


def check_trajectories(problem: Problem, plan: Plan, variant: Any, m: Tensor | None) -> None:
    """Simulated trajectories of a variant are the descents written out."""
    plan = replace(plan, engine="trajectories", variant=variant, accept_drift=variant == "mirrored")
    store = run(problem, plan, m)
    bottom, end = descents(problem, plan, m)
    share = 1 / problem.n
    for column, one in enumerate(torch.eye(len(problem.sources), dtype=torch.float64)):
        other = {"two_sided": end(-share * one), "one_sided": bottom, "mirrored": problem.theta}[variant]
        expected = (end(share * one) - other) / (2 * share if variant == "two_sided" else share)
        assert relative_error(imprints(store)[:, column], expected) < EXACT


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
        run(problem, replace(plain, preconditioner="adam"), small)


def badly_scaled() -> Problem:
    """Linear regression on columns of sizes from 0.1 to 10, at its optimum."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, 6, dtype=torch.float64)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64) * sizes
    y = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    sources = Sources.groups({"few": range(5), "some": range(3, 20), "one": [30]})
    return Problem(Task.regression(model), (x, y), (x[:3], y[:3]), sources, lr=0.01)


@pytest.mark.curvature
def test_where_scales_differ_the_preconditioned_path_is_stable_and_gets_further() -> None:
    problem = badly_scaled()
    influence = -torch.linalg.solve(problem.hessian(), problem.source_gradients())
    plain, adam = run(problem, Plan(steps=200)), run(problem, Plan(steps=200, preconditioner="adam"))
    assert known(adam.checkpoints[0].measured.stability) <= 1 + 1e-2
    assert adam.checkpoints[0].measured.moments == "estimated"
    assert relative_error(imprints(plain), influence) > 0.9
    assert relative_error(imprints(adam), influence) < 0.2


# --- where moments come from


def by_hand(problem: Problem, size: int) -> Tensor:
    """The mean of squared gradients of the objective over mini-batches."""
    total = torch.zeros_like(problem.theta)
    drawn = minibatches(problem.n, size, 0)
    for _ in range(BATCHES):
        weights = torch.zeros(problem.n, dtype=torch.float64)
        weights[next(drawn)] = 1 / size
        total += grad(problem.objective)(problem.theta, weights).square() / BATCHES
    return total


@pytest.mark.parametrize("batch_size", [None, 6, 20])
def test_without_moments_they_are_estimated_from_mini_batches(batch_size: int | None) -> None:
    """A batch of all examples would not do: at an optimum its gradient vanishes."""
    problem = tanh_mlp()
    plan = Plan(steps=3, lr=0.01, batch_size=batch_size, preconditioner="adam")
    store = run(problem, plan)
    estimated = by_hand(problem, 6 if batch_size == 6 else problem.n // 4)
    assert store.checkpoints[0].measured.moments == "estimated"
    expected = run(problem, plan, estimated.sqrt() + 1e-8)
    assert expected.checkpoints[0].measured.moments == "recorded"
    assert relative_error(imprints(store), imprints(expected)) < 1e-8


def test_moments_are_taken_as_a_dict_or_a_file_or_from_beside_the_checkpoint(tmp_path: Path) -> None:
    problem, plan = unconverged_mlp(), PLANS["full batch"]
    state, moments = problem.task.state(), named(problem, an_m(problem))
    alone, beside, apart = tmp_path / "alone.safetensors", tmp_path / "beside.safetensors", tmp_path / "v.safetensors"
    save_file(state, alone)
    save_file(state, beside)
    save_file(moments, apart)
    save_file(moments, tmp_path / "beside.moments.safetensors")
    pairs: list[State] = [(state, moments), (state, str(apart)), (alone, apart), (str(alone), moments), beside]
    expected, *others = (run(problem, plan, checkpoints=[pair]) for pair in pairs)
    for store in others:
        assert torch.equal(imprints(store), imprints(expected))
        assert store.checkpoints[0].measured.moments == "recorded"
    estimated = run(problem, plan, checkpoints=[alone])
    assert estimated.checkpoints[0].measured.moments == "estimated"
    assert relative_error(imprints(estimated), imprints(expected)) > 0.1
    plain = run(problem, Plan(steps=7, lr=0.3), checkpoints=[beside])  # which asks for no moments
    assert torch.equal(imprints(plain), imprints(run(problem, Plan(steps=7, lr=0.3))))
    assert plain.checkpoints[0].measured.moments is None


def test_moments_beside_a_checkpoint_that_are_of_other_parameters_are_estimated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problem, place = unconverged_mlp(), tmp_path / "adapted.safetensors"
    save_file(problem.task.state(), place)
    save_file({"0.weight": torch.ones(4, 3)}, tmp_path / "adapted.moments.safetensors")
    store = run(problem, PLANS["full batch"], checkpoints=[place])
    assert store.checkpoints[0].measured.moments == "estimated"
    assert "has no second moments of parameter '0.bias' and 2 more" in caplog.text


def test_where_adam_has_seen_no_gradient_nothing_moves() -> None:
    problem, plan = unconverged_mlp(), PLANS["damped"]
    m = an_m(problem)
    moments = (m - 1e-8).square()
    moments[:5] = 0.0
    store = run(problem, plan, checkpoints=[(problem.task.state(), named(problem, moments))])
    assert store.checkpoints[0].measured.unmoved == pytest.approx(5 / len(m))
    assert torch.equal(base(store)[:5], problem.theta[:5])
    assert not imprints(store)[:5].any()
    still = m.clone()
    still[:5] = 1e12
    assert relative_error(imprints(store), imprints(run(problem, plan, still))) < 1e-8


def test_estimating_is_said_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "imprint"):
        store = run(unconverged_mlp(), PLANS["full batch"])
    assert "checkpoint 0: second moments are estimated from the gradients of 16 batches" in caplog.text
    assert inspect_store(store)["checkpoints"][0]["measured"]["moments"] == "estimated"


def test_half_of_the_moments_may_be_in_half_precision() -> None:
    """Moments come in what the optimiser keeps; M has the precision of the parameters."""
    problem = unconverged_mlp()
    m = an_m(problem)
    moments = {name: tensor.bfloat16() for name, tensor in named(problem, (m - 1e-8).square()).items()}
    store = run(problem, PLANS["full batch"], checkpoints=[(problem.task.state(), moments)])
    assert relative_error(imprints(store), imprints(run(problem, PLANS["full batch"], m))) < 1e-2


def refused(moments: Any) -> pytest.ExceptionInfo[TaskError]:
    problem = unconverged_mlp()
    with pytest.raises(TaskError) as error:
        run(problem, PLANS["full batch"], checkpoints=[(problem.task.state(), moments)])
    return error


def test_moments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    problem = unconverged_mlp()
    good = named(problem, an_m(problem))
    lacking = {name: tensor for name, tensor in good.items() if name != "2.bias"}
    assert "second moments of checkpoint 0 lack parameter '2.bias'" in str(refused(lacking).value)
    assert "must be real numbers of shape (3,), got (7,)." in str(refused({**good, "2.bias": torch.ones(7)}).value)
    assert "must be real numbers of shape (3,), got list." in str(refused({**good, "2.bias": [1.0]}).value)
    for bad in (-1.0, float("nan"), float("inf")):
        wrong = {**good, "2.bias": torch.tensor([1.0, bad, 1.0])}
        assert "'2.bias' at checkpoint 0 are not all finite and at least 0" in str(refused(wrong).value)
    assert "second moments file nowhere.safetensors does not exist" in str(refused("nowhere.safetensors").value)
    assert "have type Adam, where" in str(refused(torch.optim.Adam(problem.task.model.parameters())).value)
    with pytest.raises(SimulationError, match="the recorded second moments are all 0"):
        run(problem, PLANS["full batch"], torch.full_like(problem.theta, 1e-8))
    with pytest.raises(PlanError, match="checkpoint 0 is a tuple of 3"):
        run(problem, PLANS["full batch"], checkpoints=[(problem.task.state(), good, good)])
    save_file(good, tmp_path / "checkpoint-000001.moments.safetensors")
    with pytest.raises(TaskError, match="holds the second moments of a checkpoint, not its weights"):
        run(problem, Plan(steps=1, lr=0.1), checkpoints=[tmp_path / "checkpoint-000001.moments.safetensors"])


# --- plans, stores


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


RESUMED = {
    "automatic step on mini-batches": Plan(steps=6, batch_size=7, preconditioner="adam"),
    "two-sided": Plan(engine="trajectories", steps=6, lr=0.05, keep_pair=True, preconditioner="adam"),
}


def small_task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def moments_of(state: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    return {name: scale * (0.1 + tensor.square()) for name, tensor in state.items()}


def two_checkpoints(out: Path, plan: Plan, scale: float = 1.0, **options: Any) -> Store:
    """One with moments and one without, several shards to die between."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    state = small_task().state()
    checkpoints: list[State] = [(state, moments_of(state, scale)), {name: t / 2 for name, t in state.items()}]
    memory = "12kB" if plan.batch_size else "56kB"
    given = {"checkpoints": checkpoints, "memory": memory, "progress": False, **options}
    return simulate(small_task(), data, Sources.by_label([i % 6 for i in range(24)]), plan, out=out, **given)


@pytest.mark.parametrize("plan", RESUMED.values(), ids=RESUMED.keys())
def test_a_run_that_dies_again_and_again_ends_in_the_same_store(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SECONDS", 0.0)
    whole = two_checkpoints(tmp_path / "whole", plan)
    expected = contents(whole.path)
    assert sum("imprints-" in name for name in expected) > 3
    assert [c.measured.moments for c in whole.checkpoints] == ["recorded", "estimated"]
    draw = random.Random(0)
    for _ in range(100):
        try:
            two_checkpoints(tmp_path / "broken", plan, progress=dies_after(draw.randrange(1, 60)))
            break
        except Killed:
            continue
    assert contents(tmp_path / "broken") == expected
    again = two_checkpoints(tmp_path / "again", plan, replay=whole)
    assert contents(again.path) == expected


def test_other_moments_are_noticed(tmp_path: Path) -> None:
    plan, changed = RESUMED["two-sided"], "the second moments of checkpoint 0 changed"
    with pytest.raises(Killed):
        two_checkpoints(tmp_path / "broken", plan, progress=dies_after(20))
    with pytest.raises(StoreError, match=f"unfinished simulation of something else: {changed}"):
        two_checkpoints(tmp_path / "broken", plan, scale=1.5)
    whole = two_checkpoints(tmp_path / "whole", plan)
    with pytest.raises(StoreError, match=f"made otherwise: {changed}"):
        two_checkpoints(tmp_path / "whole", plan, scale=1.5)
    with pytest.raises(StoreError, match=f"cannot be replayed: {changed}"):
        two_checkpoints(tmp_path / "again", plan, scale=1.5, replay=whole)


def test_moments_that_appear_or_vanish_are_noticed(tmp_path: Path) -> None:
    plan, state = RESUMED["two-sided"], small_task().state()
    place, beside = tmp_path / "state.safetensors", tmp_path / "state.moments.safetensors"
    save_file(state, place)
    two_checkpoints(tmp_path / "store", plan, checkpoints=[place])
    save_file(moments_of(state), beside)
    with pytest.raises(StoreError, match="the second moments of checkpoint 0 changed"):
        two_checkpoints(tmp_path / "store", plan, checkpoints=[place])
    beside.unlink()
    two_checkpoints(tmp_path / "store", plan, checkpoints=[place])


def test_where_no_plan_asks_for_moments_they_do_not_matter(tmp_path: Path) -> None:
    plan = Plan(steps=3, lr=0.05)
    store = two_checkpoints(tmp_path / "store", plan)
    assert store.manifest.request.moments == (None, None)
    assert two_checkpoints(tmp_path / "store", plan, scale=1.5).manifest == store.manifest
