"""`Plan.auto` against its formulas written out, and what must not matter to it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev
from torch.nn import functional as F

from imprint import Plan, PlanError, SimulationError, Sources, SourcesError, Task, TaskError, simulate
from imprint.data import Data
from imprint.simulation import auto as choosing
from imprint.simulation.auto import LEAST, MOST, Look, look, weigh
from imprint.simulation.descent import Descent
from tests.problems import (
    Problem,
    Rebuilt,
    TanhInReverse,
    TanhWithoutVmap,
    converge,
    descend,
    gauss_newton,
    imprints,
    known,
    overlapping,
    softmax_regression,
    squared_norm,
    tanh_mlp,
    unconverged_mlp,
)

pytestmark = pytest.mark.curvature


def looked(problem: Problem) -> Look:
    functional, theta = problem.task.at(problem.task.state())
    data, sources = Data(problem.data, device=torch.device("cpu")), Sources.groups({"all": [0]})
    descent = Descent(functional, theta, data, sources, Plan(engine="spectral"), steps=1, lr=1.0)
    with problem.task.evaluating():
        return look(descent, lambda products: None)


def chosen(problem: Problem, **more: Any) -> Plan:
    return Plan.auto(problem.task, problem.data, Sources.per_example(problem.n), progress=False, **more)


def linear(targets: float = 1.0, decay: float | None = 0.1) -> Problem:
    """Linear regression at its optimum, with targets in some unit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    y = targets * (x.sum(1, keepdim=True) + torch.randn(40, 1, generator=generator, dtype=torch.float64))
    model = nn.Linear(4, 1).double()
    task = Task.regression(model, regulariser=squared_norm(decay) if decay else None)
    return converge(Problem(task, (x, y), (x[:3], y[:3]), overlapping(40), lr=0.3))


def classifier(scale: float = 1.0, dropout: bool = False, where: str = "tuple") -> tuple[Task, Any]:
    """A softmax problem whose loss is multiplied, in float64."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 3
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64) + F.one_hot(y, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *([nn.Dropout(0.5)] if dropout else []), nn.Linear(4, 3)).double()
    nn.utils.vector_to_parameters(torch.randn(31, generator=generator, dtype=torch.float64), model.parameters())
    keys: tuple[Any, Any] = (0, 1) if where == "tuple" else ("x", "labels")
    task = Task(
        model,
        outputs=lambda model, batch: model(batch[keys[0]]),
        output_loss=lambda z, batch: scale * F.cross_entropy(z, batch[keys[1]], reduction="none"),
    )
    return task, ((x, y) if where == "tuple" else {"x": x, "labels": y})


# --- what is measured

PROBLEMS: list[Callable[[], Problem]] = [softmax_regression, tanh_mlp, unconverged_mlp, linear]


@pytest.mark.parametrize("make", PROBLEMS)
def test_the_trace_is_that_of_the_losses_curvature(make: Callable[[], Problem]) -> None:
    problem = make()
    bare = replace(problem, task=_without_regulariser(problem.task))
    trace = float(gauss_newton(bare).trace())
    assert looked(bare).trace == pytest.approx(trace, rel=1e-8)
    assert looked(problem).trace == pytest.approx(trace, rel=1e-6)


def _without_regulariser(task: Task) -> Task:
    return Task(task.model, outputs=task.outputs, output_loss=task.output_loss)


@pytest.mark.parametrize("make", [tanh_mlp, unconverged_mlp])
def test_outside_the_basis_the_trace_is_probed(make: Callable[[], Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make()
    exact = looked(problem).trace
    monkeypatch.setattr(choosing, "DIRECTIONS", 4)
    monkeypatch.setattr(choosing, "_PROBES", 100)
    few = looked(problem)
    assert len(few.values) == 4 and float(few.values.sum()) < 0.8 * exact
    assert few.trace == pytest.approx(exact, rel=0.1)


def distance(problem: Problem, damping: float) -> float:
    """N ḡᵀ(H+λ)⁻¹ḡ / mean_i g_iᵀ(H+λ)⁻¹g_i, written out."""
    inverse = gauss_newton(problem, damping).inverse()
    slope: Tensor = grad(problem.plain)(problem.theta)
    each: Tensor = jacrev(problem.losses)(problem.theta)
    noise = torch.einsum("ni,ij,nj->n", each, inverse, each).mean()
    return float(problem.n * slope @ inverse @ slope / noise)


@pytest.mark.parametrize("steps", [0, 1, 5, 20])
def test_the_signal_is_the_distance_from_rest_in_units_of_sampling(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "HALVES", 400)
    problem = _descended(steps)
    found = looked(problem)
    assert found.signal(found.damping) == pytest.approx(distance(problem, found.damping), rel=0.15)


def _descended(steps: int) -> Problem:
    """Softmax regression that starts far from the optimum."""
    problem = softmax_regression()
    model = nn.Linear(3, 3, dtype=torch.float64)
    nn.init.constant_(model.bias, 0.0)
    model.weight.data.copy_(2 / 3 - 2 * torch.eye(3))  # what all classes share would be seen by the regulariser alone
    task = Task.classifier(model, regulariser=squared_norm(0.1))
    return descend(replace(problem, task=task), steps)


def test_the_signal_vanishes_at_an_optimum_and_is_large_far_from_it() -> None:
    rest, near, far = looked(softmax_regression()), looked(_descended(20)), looked(_descended(0))
    assert rest.signal(rest.damping) < 1e-20
    assert near.signal(near.damping) < 0.1
    assert far.signal(far.damping) > 3


def test_a_step_away_from_rest_by_what_sampling_does_has_a_signal_of_about_one() -> None:
    """At the optimum for a fresh sample the gradient on ours is noise."""
    problem, signals = linear(decay=None), []
    x, y = problem.data
    inputs = torch.cat([x, torch.ones(problem.n, 1, dtype=torch.float64)], dim=1)
    for seed in range(12):
        picked = torch.randint(0, problem.n, (problem.n,), generator=torch.Generator().manual_seed(seed))
        best = torch.linalg.lstsq(inputs[picked], y[picked]).solution[:, 0]
        nn.utils.vector_to_parameters(best, problem.task.model.parameters())
        signals.append(looked(problem).signal(1e-9))
    assert 0.5 < sum(signals) / len(signals) < 2


@pytest.mark.parametrize("make", PROBLEMS)
def test_predicted_effects_fall_with_damping(make: Callable[[], Problem]) -> None:
    found = looked(make())
    sizes = [found.size(10.0**exponent) for exponent in range(-6, 4)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.5 * sizes[-1] > 0


def test_effects_are_those_of_the_response_to_halves() -> None:
    """−(H+λ)⁻¹(1/N)Σ±g_i, and its derivative of the margins."""
    problem = softmax_regression()
    found = looked(problem)
    signs = torch.randint(0, 2, (problem.n,), generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    half = signs @ jacrev(problem.losses)(problem.theta) / problem.n
    moved = -gauss_newton(problem, 0.2).inverse() @ half
    margins: Tensor = jacrev(lambda flat: problem.value(problem.task.measure, flat, problem.data))(problem.theta)
    torch.testing.assert_close(found.effects(0.2)[0], margins @ moved, rtol=1e-8, atol=1e-10)


# --- damping


@pytest.mark.parametrize("make", PROBLEMS)
def test_damping_is_the_trace_over_n_where_that_can_be_trusted(make: Callable[[], Problem]) -> None:
    found = looked(make())
    assert LEAST < found.size(found.damping) < MOST
    assert found.damping == pytest.approx(found.trace / found.n)


def test_damping_stays_where_predictions_are_neither_nothing_nor_too_much() -> None:
    found = looked(softmax_regression())
    wild = replace(found, trace=1e-9, halves=4 * found.halves)
    assert wild.size(wild.damping) == pytest.approx(MOST, rel=1e-4)
    shy = replace(found, trace=3 * found.n * _where(found, LEAST))
    assert shy.size(shy.damping) == pytest.approx(LEAST, rel=1e-4)


def _where(found: Look, size: float) -> float:
    """The damping at which halves have an effect of some size."""
    dampings = torch.logspace(-6, 3, 2000, dtype=torch.float64)
    return float(min(dampings, key=lambda damping: abs(found.size(float(damping)) - size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_plentiful_data_damping_falls_with_its_number_and_the_plan_is_accepted(dtype: torch.dtype) -> None:
    found = []
    for n in (300, 3000, 30_000):
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(n) % 3
        x = (torch.randn(n, 4, generator=generator, dtype=torch.float64) + F.one_hot(y, 4)).to(dtype)
        task = Task.classifier(nn.Linear(4, 3).to(dtype))
        for parameter in task.model.parameters():
            nn.init.zeros_(parameter)
        each, groups = Sources.per_example(n), Sources.by_label(y)
        plan = Plan.auto(task, (x, y), each, progress=False)
        some = Sources.groups({index: [index] for index in range(20)})
        norms = simulate(task, (x, y), some, plan, progress=False).checkpoints[0].measured.norms
        assert known(norms).least > 0
        steps = Plan.auto(task, (x, y), groups, progress=False).steps
        assert isinstance(steps, tuple) and isinstance(steps[0], int) and 10 < steps[0] <= 1000
        assert isinstance(plan.damping, tuple)
        found.append(n * plan.damping[0])
    assert max(found) < 12 * min(found)


@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_a_multiple_of_the_loss_has_that_multiple_of_damping(scale: float) -> None:
    plans = [Plan.auto(*_each(*classifier(c)), progress=False) for c in (1.0, scale)]
    assert plans[1].damping == pytest.approx((scale * plans[0].damping[0],), rel=1e-3)  # type: ignore[index]
    assert plans[0].weight == plans[1].weight == (1.0,)


def _each(task: Task, data: Any) -> tuple[Task, Any, Sources]:
    return task, data, Sources.per_example(30)


def test_the_unit_of_the_targets_does_not_matter() -> None:
    for one, other in zip(looked(linear()).effects(0.3), looked(linear(1000.0)).effects(0.3), strict=True):
        torch.testing.assert_close(one, other)
    assert chosen(linear()).damping == chosen(linear(1000.0)).damping


def test_of_a_regression_the_unit_is_the_size_of_the_residuals() -> None:
    problem = linear()
    x, y = problem.data
    residual = float((problem.task.model(x) - y).detach().square().mean().sqrt())
    found = looked(problem)
    signs = torch.randint(0, 2, (problem.n,), generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    moved = -gauss_newton(problem, 0.2).inverse() @ (signs @ jacrev(problem.losses)(problem.theta) / problem.n)
    outputs: Tensor = jacrev(lambda flat: problem.value(lambda m, b: m(b[0])[:, 0], flat, problem.data))(problem.theta)
    torch.testing.assert_close(found.effects(0.2)[0], outputs @ moved / residual, rtol=1e-8, atol=1e-10)


# --- what must not matter


def test_the_choice_is_repeatable_and_leaves_the_random_state_alone() -> None:
    problem = unconverged_mlp()
    torch.manual_seed(7)
    first = chosen(problem)
    assert float(torch.rand(())) == float(torch.rand((), generator=torch.Generator().manual_seed(7)))
    assert chosen(problem) == first


@pytest.mark.parametrize("batch_size", [1, 7])
def test_how_many_examples_are_evaluated_at_once_does_not_matter(batch_size: int) -> None:
    problem = unconverged_mlp()
    assert chosen(problem, batch_size=batch_size) == chosen(problem)


def test_batches_may_be_dictionaries() -> None:
    plans = [Plan.auto(*_each(*classifier(where=where)), progress=False) for where in ("tuple", "dict")]
    assert plans[0] == plans[1]


def test_a_model_is_left_as_it_was() -> None:
    task, data = classifier(dropout=True)
    task.model.train()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    Plan.auto(task, data, Sources.per_example(30), progress=False)
    assert task.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in task.model.state_dict().items())


# --- weights


def looks() -> list[Look]:
    return [looked(_descended(steps)) for steps in (10, 12, 14)]


def test_checkpoints_that_say_the_same_have_equal_weights() -> None:
    one = looks()[0]
    assert weigh([one]) == [1.0]
    assert weigh([one, one, one]) == pytest.approx([1.0, 1.0, 1.0])


def test_a_checkpoint_that_disagrees_with_the_others_has_less_weight() -> None:
    *others, last = looks()
    noise = torch.randn(last.moved.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    silent = replace(last, moved=noise * last.moved.norm() / noise.norm())
    found = weigh([*others, silent])
    assert min(weigh([*others, last])) > 0.5
    assert found[2] < 0.25 * min(found[:2])


def test_a_checkpoint_far_from_rest_has_less_weight() -> None:
    *others, last = looks()
    far = replace(last, gradient=1000 * last.gradient)
    before, after = weigh([*others, last])[2], weigh([*others, far])[2]
    assert after / before == pytest.approx((1 + last.signal(last.damping)) / (1 + far.signal(far.damping)), rel=0.2)
    assert after < 0.1


def test_each_checkpoint_has_one_vote_however_large_its_predictions() -> None:
    *others, last = looks()
    loud = replace(last, moved=1.2 * last.moved)  # still inside the trust region, so that the damping is the same
    assert loud.damping == last.damping
    ratio = [weigh([*others, one])[2] / weigh([*others, one])[0] for one in (loud, last)]
    assert ratio[0] == pytest.approx(ratio[1] / 1.2)


def test_where_nothing_agrees_all_count_alike() -> None:
    one = looks()[0]
    assert weigh([one, replace(one, moved=-one.moved)]) == [1.0, 1.0]


def test_an_early_checkpoint_is_found_to_be_far_from_rest() -> None:
    problem = softmax_regression()
    states = [_descended(steps).task.state() for steps in (0, 40, 60)]
    task = _descended(0).task
    plan = Plan.auto(task, problem.data, Sources.per_example(problem.n), states, progress=False)
    assert isinstance(plan.weight, tuple) and isinstance(plan.damping, tuple)
    assert plan.weight[0] < 0.2 and max(plan.weight) == 1.0 and len(plan.damping) == 3


# --- the plan


def test_single_examples_get_the_spectral_engine() -> None:
    plan = chosen(softmax_regression())
    assert (plan.engine, plan.steps, plan.dropout) == ("spectral", "infinite", False)


@pytest.mark.parametrize("dropout", [False, True])
def test_groups_get_a_path_as_long_as_damping_says(dropout: bool) -> None:
    task, data = classifier(dropout=dropout)
    states = [task.state(), {name: 0.5 * tensor for name, tensor in task.state().items()}]
    plan = Plan.auto(task, data, overlapping(30), states, progress=False)
    each = Plan.auto(task, data, Sources.per_example(30), states, progress=False)
    assert (plan.engine, plan.curvature, plan.dropout) == ("tangent", "gauss-newton", dropout)
    assert plan.damping == 0.0 and plan.weight == each.weight
    assert isinstance(plan.steps, tuple) and isinstance(plan.lr, tuple) and isinstance(each.damping, tuple)
    for steps, lr, damping in zip(plan.steps, plan.lr, each.damping, strict=True):
        assert isinstance(steps, int) and isinstance(lr, float)
        assert steps * lr == pytest.approx(1 / damping, abs=lr / 2)
    assert plan.lr[0] != plan.lr[1]
    assert simulate(task, data, overlapping(30), plan, checkpoints=states, progress=False).checkpoints


@pytest.mark.parametrize("sources", [Sources.per_example(30), overlapping(30)])
def test_a_simulation_may_leave_the_plan_to_auto(sources: Sources) -> None:
    task, data = classifier()
    plan = Plan.auto(task, data, sources, progress=False)
    left = simulate(task, data, sources, "auto", progress=False)
    given = simulate(task, data, sources, plan, progress=False)
    assert left.manifest.plan == plan
    torch.testing.assert_close(imprints(left), imprints(given), rtol=0, atol=0)


def test_a_task_that_does_not_show_its_outputs_is_refused() -> None:
    task, data = classifier()
    blind = Task(task.model, loss=task.loss)
    for sources in (Sources.per_example(30), overlapping(30)):
        with pytest.raises(PlanError, match="the Gauss–Newton curvature needs to see the model's outputs"):
            Plan.auto(blind, data, sources, progress=False)


def test_a_model_that_vmap_does_not_take_gets_the_same_plan(caplog: pytest.LogCaptureFixture) -> None:
    problem = unconverged_mlp()
    plain, alone = (
        Plan.auto(Task.classifier(model), problem.data, Sources.per_example(problem.n), progress=False)
        for model in (problem.task.model, Rebuilt(problem.task.model, TanhWithoutVmap))
    )
    assert plain == alone and "vmap does not support this model" in caplog.text


def test_a_model_without_forward_mode_is_chosen_for_and_simulated_alike() -> None:
    problem = unconverged_mlp()
    model, each = problem.task.model, Sources.per_example(problem.n)
    found = []
    for task in (Task.classifier(Rebuilt(model, tanh)) for tanh in (TanhInReverse, TanhWithoutVmap)):
        plan = Plan.auto(task, problem.data, each, progress=False)
        made = simulate(task, problem.data, each, plan, progress=False)
        found.append((plan, made.imprints(0, 0, problem.n, task.device)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_what_the_simulation_would_refuse_is_refused_in_its_words() -> None:
    problem, (x, y) = unconverged_mlp(), unconverged_mlp().data
    each = Sources.per_example(problem.n)
    broken = Task(problem.task.model, outputs=lambda m, b: m(b[2]), output_loss=problem.task.output_loss)
    with pytest.raises(TaskError, match="the loss function failed on the first batch: IndexError"):
        Plan.auto(broken, problem.data, each, progress=False)
    with pytest.raises(SimulationError, match=r"the loss of training example 3 .* is nan"):
        Plan.auto(problem.task, (x.index_fill(0, torch.tensor([3]), math.nan), y), each, progress=False)
    with pytest.raises(SourcesError, match=r"sources must be an imprint\.Sources, got a list"):
        Plan.auto(problem.task, problem.data, [1, 2], progress=False)  # type: ignore[arg-type]


def test_of_many_outputs_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = linear()
    every = looked(problem).effects(0.3)
    monkeypatch.setattr(choosing, "OUTPUTS", 7)
    some = looked(problem).effects(0.3)
    assert every.shape[1] == 40 and some.shape[1] == 7
    torch.testing.assert_close(some[:, [0, -1]], every[:, [0, -1]])


def test_a_checkpoint_with_nan_is_refused_by_number() -> None:
    task, data = classifier()
    states = [task.state(), {name: tensor * math.nan for name, tensor in task.state().items()}]
    with pytest.raises(SimulationError, match="of checkpoint 1 holds NaN"):
        Plan.auto(task, data, Sources.per_example(30), states, progress=False)


def test_a_checkpoint_without_curvature_is_refused_by_number() -> None:
    task, data = classifier()
    certain = {name: 1e6 * tensor for name, tensor in task.state().items()}
    with pytest.raises(SimulationError, match="checkpoint 1 has no curvature to choose a plan from"):
        Plan.auto(task, data, Sources.per_example(30), [task.state(), certain], progress=False)


def test_progress_ends_at_all_of_it_though_the_space_ends_before() -> None:
    told: list[tuple[int, int]] = []
    problem = softmax_regression()  # twelve parameters, of eighty directions
    states = [problem.task.state(), _descended(3).task.state()]
    each = Sources.per_example(problem.n)
    Plan.auto(problem.task, problem.data, each, states, progress=lambda *now: told.append(now))
    assert told[-1] == (2 * choosing.DIRECTIONS, 2 * choosing.DIRECTIONS)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_parameter_that_is_one_number_is_no_obstacle() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.tensor(1.5, dtype=torch.float64)), nn.Linear(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.linear(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    data = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 2
    found = Plan.auto(Task.classifier(Scaled()), data, Sources.per_example(20), progress=False)
    assert found.engine == "spectral"
