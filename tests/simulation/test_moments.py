"""Where the moments of a preconditioned path come from, and what a store remembers of them."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.func import grad

from imprint import Plan, PlanError, SimulationError, StoreError, TaskError
from imprint.cli.inspection import inspect_store
from imprint.plan import State
from imprint.simulation import snapshot
from imprint.simulation.descent import minibatches
from imprint.simulation.moments import BATCHES
from tests.problems import (
    Problem,
    base,
    imprints,
    relative_error,
    tanh_mlp,
    unconverged_mlp,
)
from tests.simulation.killing import Killed, contents, die_until_done, dies_after
from tests.simulation.preconditioning import PLANS, an_m, moments_of, named, run, small_task, two_checkpoints


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


RESUMED = {
    "automatic step on mini-batches": Plan(steps=6, batch_size=7, preconditioner="adam"),
    "two-sided": Plan(engine="trajectories", steps=6, lr=0.05, keep_pair=True, preconditioner="adam"),
}


@pytest.mark.parametrize("plan", RESUMED.values(), ids=RESUMED.keys())
def test_a_run_that_dies_again_and_again_ends_in_the_same_store(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SECONDS", 0.0)
    whole = two_checkpoints(tmp_path / "whole", plan)
    expected = contents(whole.path)
    assert sum("imprints-" in name for name in expected) > 3
    assert [c.measured.moments for c in whole.checkpoints] == ["recorded", "estimated"]
    die_until_done(lambda progress: two_checkpoints(tmp_path / "broken", plan, progress=progress), 60)
    assert contents(tmp_path / "broken") == expected
    again = two_checkpoints(tmp_path / "again", plan, repeat=whole)
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
    with pytest.raises(StoreError, match=f"cannot be repeated: {changed}"):
        two_checkpoints(tmp_path / "again", plan, scale=1.5, repeat=whole)


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
