"""`Plan.auto` against its formulas written out: what it measures, damping, and weights."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev
from torch.nn import functional as F

from imprint import Plan, Sources, Task, simulate
from imprint.simulation import look as choosing
from imprint.simulation.auto import weigh
from imprint.simulation.look import LEAST, MOST, Look
from tests.problems import (
    Problem,
    gauss_newton,
    known,
    overlapping,
    softmax_regression,
    tanh_mlp,
    unconverged_mlp,
)
from tests.simulation.looking import chosen, classifier, descended, each_example, linear, looked, own_curvature

pytestmark = pytest.mark.curvature


PROBLEMS: list[Callable[[], Problem]] = [softmax_regression, tanh_mlp, unconverged_mlp, linear]


@pytest.mark.parametrize("make", PROBLEMS)
def test_the_trace_is_that_of_the_losses_curvature(make: Callable[[], Problem]) -> None:
    problem = make()
    bare = replace(problem, task=_without_regulariser(problem.task))
    trace = float(gauss_newton(bare).trace())
    assert looked(bare).trace == pytest.approx(trace, rel=1e-8)
    assert looked(problem).trace == pytest.approx(trace, rel=1e-6)


def _without_regulariser(task: Task) -> Task:
    if task.outputs is None:
        return Task(task.model, loss=task.loss)
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


@pytest.mark.parametrize(("make", "blind"), [(softmax_regression, False), (unconverged_mlp, True), (linear, False)])
def test_the_own_curvature_is_the_size_of_what_one_example_brings(
    make: Callable[[], Problem], blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """√(Σ_i ‖H_i‖²/N), with the curvature of every example written out, and without the regulariser's."""
    problem = make()
    if blind:
        task = Task(problem.task.model, loss=problem.task.loss, regulariser=problem.task.regulariser)
        problem = replace(problem, task=task)
    monkeypatch.setattr(choosing, "_SIGNED", 200)
    bare = replace(problem, task=_without_regulariser(problem.task))
    x, y = problem.data
    each = [replace(bare, data=(x[i : i + 1], y[i : i + 1])) for i in range(problem.n)]
    curvatures = [hessian(one.plain)(one.theta) if blind else gauss_newton(one) for one in each]
    size = torch.stack(curvatures).square().sum((1, 2)).mean().sqrt()
    assert own_curvature(problem) == pytest.approx(float(size), rel=0.15)


def test_outputs_of_their_own_directions_share_the_curvature_of_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example that is the mean of k others, such as a window of tokens, hangs √k times less on each direction."""
    monkeypatch.setattr(choosing, "_SIGNED", 200)
    k, n = 9, 24
    x = torch.randn(n, k, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def regression(weights: Tensor) -> Problem:
        task = Task(
            Windows(k).double(),
            outputs=lambda model, batch: model(batch[0]),
            output_loss=lambda z, batch: (weights * z.square()).sum(1),
        )
        return Problem(task, (x, x), (x, x), overlapping(n), lr=1.0)

    window = regression(torch.full((k,), 1 / k, dtype=torch.float64))
    token = regression(F.one_hot(torch.tensor(0), k).double())
    assert looked(window).trace == pytest.approx(looked(token).trace, rel=0.3)
    assert own_curvature(window) == pytest.approx(own_curvature(token) / math.sqrt(k), rel=0.2)


class Windows(nn.Module):
    """A linear map for each place of a window."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(places, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(-1)


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
    problem = descended(steps)
    found = looked(problem)
    assert found.signal(found.damping) == pytest.approx(distance(problem, found.damping), rel=0.15)


def test_the_signal_vanishes_at_an_optimum_and_is_large_far_from_it() -> None:
    rest, near, far = looked(softmax_regression()), looked(descended(20)), looked(descended(0))
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


def test_a_path_ends_where_an_example_would_matter_or_outputs_have_moved_enough() -> None:
    found = looked(softmax_regression())
    found = replace(found, halves=4 * found.halves)
    enough = _where(found, MOST)
    assert found.reach(0.1 * enough * found.n, None) == pytest.approx(enough, rel=0.01)
    assert found.reach(10 * enough * found.n, None) == pytest.approx(20 * enough)
    assert found.reach(10 * enough * found.n, 0.1 / enough) == pytest.approx(40 * enough)  # a quarter of the training
    assert found.reach(10 * enough * found.n, 1e-9) == pytest.approx(200 * enough)


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
    plans = [Plan.auto(*each_example(*classifier(c)), progress=False) for c in (1.0, scale)]
    assert plans[1].damping == pytest.approx((scale * plans[0].damping[0],), rel=1e-3)  # type: ignore[index]
    assert plans[0].weight == plans[1].weight == (1.0,)


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


def looks() -> list[Look]:
    return [looked(descended(steps)) for steps in (10, 12, 14)]


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


def test_a_path_from_a_checkpoint_far_from_rest_counts_less_only_where_that_is_very_far() -> None:
    one, *_ = looks()
    ratio = 40.0 / one.signal(one.damping)
    far, farther = (replace(one, gradient=(f * ratio) ** 0.5 * one.gradient) for f in (0.1, 1.0))
    at_rest = replace(one, gradient=0 * one.gradient, gradient_rest=0.0)
    found = weigh([at_rest, far, farther], [1.0] * 3)
    assert found == pytest.approx([1.0, 1 / 1.16, 1 / 17], rel=0.01)
    assert weigh([at_rest, far, farther]) == pytest.approx([1.0, 1 / 5, 1 / 41], rel=0.01)


def test_a_path_has_one_vote_however_long_it_is() -> None:
    one = looks()[0]
    first, second = weigh([one, one], [1.0, 4.0])
    assert second / first == pytest.approx(one.size(1.0) / one.size(0.25))


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
    states = [descended(steps).task.state() for steps in (0, 40, 60)]
    task = descended(0).task
    plan = Plan.auto(task, problem.data, Sources.per_example(problem.n), states, progress=False)
    assert isinstance(plan.weight, tuple) and isinstance(plan.damping, tuple)
    assert plan.weight[0] < 0.2 and max(plan.weight) == 1.0 and len(plan.damping) == 3
