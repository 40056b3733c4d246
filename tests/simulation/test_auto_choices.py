"""The plan that `Plan.auto` chooses, what must not matter to it, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from imprint import Plan, SimulationError, Sources, SourcesError, Task, TaskError, simulate
from imprint.simulation import look as choosing
from tests.problems import (
    Problem,
    Rebuilt,
    TanhInReverse,
    TanhWithoutVmap,
    imprints,
    overlapping,
    softmax_regression,
    unconverged_mlp,
)
from tests.simulation.looking import chosen, classifier, descended, each_example, linear, looked, own_curvature

pytestmark = pytest.mark.curvature


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
    plans = [Plan.auto(*each_example(*classifier(where=where)), progress=False) for where in ("tuple", "dict")]
    assert plans[0] == plans[1]


def test_a_model_is_left_as_it_was() -> None:
    task, data = classifier(dropout=True)
    task.model.train()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    Plan.auto(task, data, Sources.per_example(30), progress=False)
    assert task.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in task.model.state_dict().items())


def test_single_examples_get_the_spectral_engine() -> None:
    plan = chosen(softmax_regression())
    assert (plan.engine, plan.steps, plan.dropout) == ("spectral", "infinite", False)


@pytest.mark.parametrize("dropout", [False, True])
def test_groups_get_a_path_that_is_short_where_an_example_brings_much_curvature(dropout: bool) -> None:
    task, data = classifier(dropout=dropout)
    states = [task.state(), {name: 0.5 * tensor for name, tensor in task.state().items()}]
    plan = Plan.auto(task, data, overlapping(30), states, progress=False)
    assert (plan.engine, plan.curvature, plan.dropout) == ("tangent", "gauss-newton", dropout)
    assert plan.damping == 0.0 and isinstance(plan.steps, tuple) and isinstance(plan.lr, tuple)
    for steps, lr, state in zip(plan.steps, plan.lr, states, strict=True):
        assert isinstance(steps, int) and isinstance(lr, float)
        task.model.load_state_dict(state)
        problem = Problem(task, data, data, overlapping(30), lr=1.0)
        assert steps * lr == pytest.approx(1 / looked(problem).reach(own_curvature(problem), None), abs=lr / 2)
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


def test_a_task_that_does_not_show_its_outputs_is_chosen_for_through_its_hessian() -> None:
    task, data = classifier()
    blind = Task(task.model, loss=task.loss)
    path = Plan.auto(blind, data, overlapping(30), progress=False)
    assert (path.engine, path.curvature) == ("tangent", "hessian")
    each = Plan.auto(blind, data, Sources.per_example(30), progress=False)
    assert (each.engine, each.curvature, each.steps) == ("spectral", "hessian", "infinite")
    for sources, plan in ((overlapping(30), path), (Sources.per_example(30), each)):
        assert simulate(blind, data, sources, plan, progress=False).checkpoints  # beyond negative curvature


def test_a_quadratic_gets_the_same_path_with_and_without_outputs() -> None:
    """Of a linear regression the Hessian is the Gauss–Newton matrix; the trust region, in other units, is left out."""
    problem = linear(decay=None)
    found = []
    for task in (problem.task, Task(problem.task.model, loss=problem.task.loss)):
        seen = looked(replace(problem, task=task))
        found.append((seen.trace, seen.sharpest, seen.halves, seen.gradient.abs()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("blind", [False, True])
def test_a_factor_of_the_loss_changes_steps_in_inverse_proportion(blind: bool) -> None:
    plans = []
    for scale in (1.0, 50.0):
        task, data = classifier(scale)
        task = Task(task.model, loss=task.loss) if blind else task
        plans.append(Plan.auto(task, data, overlapping(30), progress=False))
    (first, second) = plans
    assert isinstance(first.lr, tuple) and isinstance(second.lr, tuple)
    assert first.steps == second.steps
    assert first.lr[0] == pytest.approx(50 * second.lr[0], rel=1e-3)


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
    states = [problem.task.state(), descended(3).task.state()]
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
