"""Plain descent in Adam's metric is preconditioned descent, so that what is chosen there holds for it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from imprint import Plan, Sources, Task
from imprint.data import Data
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.metric import in_metric
from imprint.simulation.preconditioner import Preconditioner
from imprint.simulation.step_size import measure_curvature, measure_start
from imprint.tensors.vectors import Flat
from tests.problems import overlapping, unconverged_mlp
from tests.simulation.looking import classifier
from tests.simulation.preconditioning import an_m, named, with_m

pytestmark = pytest.mark.curvature


def preconditioned(steps: int, still: str | None = None) -> Descent:
    """A descent in the metric of some M, infinite for the parameter that is to stay still."""
    problem = unconverged_mlp()
    functional, theta = problem.task.at(problem.task.state())
    diagonal = named(problem, an_m(problem))
    if still:
        diagonal[still] = torch.full_like(diagonal[still], torch.inf)
    data = Data(problem.data, device=torch.device("cpu"))
    plan = Plan(preconditioner="adam")
    preconditioner = Preconditioner(diagonal, "recorded")
    return Descent(functional, theta, data, problem.sources, plan, steps, lr=0.1, preconditioner=preconditioner)


def walk(descent: Descent) -> dict[str, Tensor]:
    theta = {name: p.clone() for name, p in descent.start.items()}
    for step, parts in enumerate(descent.batches()):
        descent.move_(theta, descent.base_gradient(theta, parts, step), {})
    return theta


@pytest.mark.parametrize("still", [None, "0.weight"])
def test_a_path_in_the_metric_is_the_preconditioned_path(still: str | None) -> None:
    descent = preconditioned(6, still)
    inside = in_metric(descent)
    assert inside.preconditioner is None and not any(bool(p.any()) for p in inside.start.values())
    assert descent.preconditioner is not None
    roots = {name: m.rsqrt() for name, m in descent.preconditioner.diagonal.items()}
    moved = {name: descent.start[name] + roots[name] * phi for name, phi in walk(inside).items()}
    torch.testing.assert_close(moved, walk(descent), rtol=1e-10, atol=1e-12)
    if still:
        assert torch.equal(moved[still], descent.start[still])


def test_curvature_in_the_metric_is_that_of_the_preconditioned_descent() -> None:
    descent = preconditioned(1)
    inside = in_metric(descent)
    found = measure_curvature(inside, inside.start, FullBatch(inside.data, inside.dtype), Flat(inside.start).size)
    expected = measure_start(descent)
    assert found.largest == pytest.approx(expected.largest, rel=1e-3)


def test_without_a_preconditioner_nothing_changes() -> None:
    descent = replace(preconditioned(1), preconditioner=None)
    assert in_metric(descent) is descent


def test_recorded_moments_make_the_plan_follow_adam() -> None:
    problem = unconverged_mlp()
    task = Task.classifier(problem.task.model)
    states = with_m(problem, an_m(problem))
    plan = Plan.auto(task, problem.data, problem.sources, states, progress=False)
    assert plan.preconditioner == "adam"
    alone = Plan.auto(task, problem.data, problem.sources, [problem.task.state()], progress=False)
    assert alone.preconditioner is None
    some = Plan.auto(task, problem.data, problem.sources, [*states, problem.task.state()], progress=False)
    assert some.preconditioner is None, "a metric for some checkpoints only would mix two"
    each = Plan.auto(task, problem.data, Sources.per_example(problem.n), states, progress=False)
    assert each.preconditioner is None, "single examples have no path"


def test_a_factor_of_the_moments_changes_nothing_but_the_unit_of_steps() -> None:
    task, data = classifier()
    generator = torch.Generator().manual_seed(3)
    moments = {
        name: 10 ** (2 * torch.rand(p.shape, generator=generator, dtype=p.dtype))
        for name, p in task.model.named_parameters()
    }
    plans = [
        Plan.auto(
            *(task, data, overlapping(30)),
            [(task.state(), {name: scale**2 * v for name, v in moments.items()})],
            progress=False,
        )
        for scale in (1.0, 3.0)
    ]
    first, second = plans
    assert isinstance(first.lr, tuple) and isinstance(second.lr, tuple)
    assert first.steps == second.steps and first.weight == second.weight
    assert second.lr[0] == pytest.approx(3 * first.lr[0], rel=1e-3)
