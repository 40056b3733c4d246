"""Dropout along the path: drawn by the seed, the same for every source and engine, and never outside of training."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from imprint import Plan, PlanError, Sources, Task, simulate
from imprint.model.dropout import apply_dropout, dropouts
from tests.problems import Problem, base, imprints, overlapping, relative_error

STEPS, LR = 5, 0.3


def noisy(p: float = 0.4) -> Problem:
    """A tanh network with dropout."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(18, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (18,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3)).double().eval()
    return Problem(Task.classifier(model), (x[:14], y[:14]), (x[14:], y[14:]), overlapping(14), lr=LR)


def uniform(problem: Problem) -> Tensor:
    """The weight of every example in plain training."""
    return torch.full((problem.n,), 1 / problem.n, dtype=torch.float64)


def plan(**options: object) -> Plan:
    return Plan(**{"steps": STEPS, "lr": LR, "dropout": True, **options})  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_imprints_and_another_others() -> None:
    problem = noisy()
    one, same, other = (imprints(problem.simulate(plan(seed=seed))) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert relative_error(other, one) > 0.01
    assert relative_error(imprints(problem.simulate(plan(dropout=False))), one) > 0.01


def test_the_tangent_is_the_derivative_of_the_noisy_path() -> None:
    """Gradient descent with the masks of each step is differentiated itself, in reverse."""
    problem = noisy()

    def end(shares: Tensor) -> Tensor:
        theta = problem.theta
        for step in range(STEPS):
            with apply_dropout(problem.task.model, (0, step, 0)):
                theta = theta - LR * grad(problem.objective)(theta, uniform(problem) + shares @ problem.indicator)
        return theta

    expected = jacrev(end)(torch.zeros(len(problem.sources), dtype=torch.float64))
    assert relative_error(imprints(problem.simulate(plan())), expected) < 1e-10


def test_gauss_newton_responses_see_the_masks_too() -> None:
    """v ← v − η[Gv + g_b] along the noisy path, with G from the outputs' derivative under the masks of the step."""
    problem = noisy()
    predict = problem.task.outputs
    assert predict is not None
    theta, response = problem.theta, torch.zeros(len(problem.theta), len(problem.sources), dtype=torch.float64)
    for step in range(STEPS):

        def outputs(flat: Tensor, step: int = step) -> Tensor:
            with apply_dropout(problem.task.model, (0, step, 0)):
                return problem.value(predict, flat, problem.data)

        def losses(flat: Tensor, outputs: Callable[[Tensor], Tensor] = outputs) -> Tensor:
            return nn.functional.cross_entropy(outputs(flat), problem.data[1], reduction="none")

        p, moved, slopes = outputs(theta).softmax(1), jacrev(outputs)(theta), jacrev(losses)(theta)
        bent = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        newton = torch.einsum("nip,nij,njq->pq", moved, bent, moved) / problem.n
        response = response - LR * (newton @ response + slopes.T @ problem.indicator.T)
        theta = theta - LR * slopes.mean(0)
    found = problem.simulate(plan(curvature="gauss-newton"))
    assert relative_error(base(found), theta) < 1e-10
    assert relative_error(imprints(found), response) < 1e-10


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_what_a_source_drops_does_not_depend_on_its_neighbours(engine: str) -> None:
    """Sources of other sizes beside it, or less memory, which cuts them into other chunks."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3)]
    x, y = torch.randn(60, 3, dtype=torch.float64), torch.randint(0, 3, (60,))
    task = Task.classifier(nn.Sequential(*layers).double().eval())
    one = {"a": [0, 1, 2]}
    found = [
        imprints(
            simulate(task, (x, y), Sources.groups({**one, **others}), plan(**options), memory=memory, progress=False)
        )
        for others, memory in (
            ({}, None),
            ({"b": range(3, 12)}, None),
            ({"b": range(10, 50)}, None),
            ({"b": [4]}, "40kB"),
        )
        for options in [{"batch_size": 6, "engine": engine}]
    ]
    for other in found[1:]:
        torch.testing.assert_close(other[:, 0], found[0][:, 0], rtol=1e-10, atol=1e-13)


def test_small_perturbations_agree_with_the_tangent() -> None:
    problem = noisy()
    exact = imprints(problem.simulate(plan()))
    for variant, tolerance in (("two_sided", 1e-6), ("one_sided", 1e-3)):
        pair = problem.simulate(plan(engine="trajectories", variant=variant, epsilon=1e-3))
        assert relative_error(imprints(pair), exact) < tolerance


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_mini_batches_drop_too_and_engines_agree(engine: str) -> None:
    problem = noisy()
    options = {"batch_size": 5, **({"engine": engine, "epsilon": 1e-3} if engine == "trajectories" else {})}
    exact = imprints(problem.simulate(plan(batch_size=5)))
    assert relative_error(imprints(problem.simulate(plan(**options))), exact) < 1e-6
    assert relative_error(imprints(problem.simulate(plan(**options, dropout=False))), exact) > 0.01


def test_many_sources_at_once_see_what_one_by_one_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = noisy()
    together = problem.simulate(plan())
    monkeypatch.setattr("imprint.simulation.engines.protocol.find_why_not_vmap", lambda *given: "this is a test")
    alone = problem.simulate(plan())
    assert together.checkpoints[0].choices.vectorised and not alone.checkpoints[0].choices.vectorised
    torch.testing.assert_close(imprints(together), imprints(alone), rtol=1e-10, atol=1e-13)


def test_scores_are_read_without_dropout() -> None:
    problem = noisy()
    store = problem.simulate(plan())
    at_the_end = Problem(Task.classifier(noisy().task.model), problem.data, problem.queries, problem.sources, LR)
    expected = at_the_end.query_gradients(base(store)) @ imprints(store)
    for training in (False, True):
        problem.task.model.train(training)
        torch.testing.assert_close(problem.attribute(store).scores, expected, rtol=1e-9, atol=1e-11)


def test_a_plan_with_dropout_needs_a_model_with_it() -> None:
    for model in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))):
        task = Task.classifier(model.double())
        problem = noisy()
        with pytest.raises(PlanError, match="the model has no dropout module"):
            Problem(task, problem.data, problem.queries, problem.sources, LR).simulate(plan())


# --- the draw itself

KINDS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "values": (nn.Dropout(0.3), (40, 50), 0),
    "sequences": (nn.Dropout1d(0.3), (40, 50, 3), 1),
    "images": (nn.Dropout2d(0.3), (40, 50, 3, 2), 2),
    "volumes": (nn.Dropout3d(0.3), (40, 50, 3, 2, 2), 3),
}


@pytest.mark.parametrize(("module", "shape", "together"), KINDS.values(), ids=KINDS.keys())
def test_what_is_dropped_is_dropped_whole_and_the_rest_made_up_for(
    module: nn.Module, shape: tuple[int, ...], together: int
) -> None:
    model = nn.Sequential(module).eval()
    with apply_dropout(model, (1, 2)):
        found = model(torch.ones(shape))
    kept = found != 0
    assert float(kept.float().mean()) == pytest.approx(0.7, abs=0.04)
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / 0.7))
    each = kept.reshape(*shape[: len(shape) - together], -1)
    assert torch.equal(each.all(-1), each.any(-1))
    assert torch.equal(model(torch.ones(shape)), torch.ones(shape))  # nothing stays behind


def test_modules_draw_in_their_turn_and_a_draw_comes_again() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5)).eval()
    draws = []
    for noise in ((0, 1), (0, 1), (0, 2)):
        with apply_dropout(model, noise):
            draws.append(model(torch.ones(2000)))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert float((draws[0] != 0).float().mean()) == pytest.approx(0.25, abs=0.05)  # two masks, not one twice


def test_a_draw_is_shared_by_all_that_vmap_runs_over() -> None:
    model = nn.Sequential(nn.Dropout(0.5)).eval()
    with apply_dropout(model, (3,)):
        rows = vmap(model, randomness="same")(torch.ones(4, 30))
    assert bool((rows == rows[0]).all()) and bool((rows == 0).any())


def test_dropout_that_drops_nothing_or_everything_is_left_alone() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(1.0), nn.AlphaDropout(0.5), nn.Dropout2d(0.5))
    assert [type(module) for module in dropouts(model)] == [nn.Dropout2d]
