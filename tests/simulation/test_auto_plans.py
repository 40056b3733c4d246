"""A plan that is chosen: checked, shown and told from what the user chose; and T = ∞ is refused before the work."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from imprint import Plan, PlanError, SimulationError, Sources, StoreError, Task, check, simulate
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.task import Batch

pytestmark = pytest.mark.curvature

torch.manual_seed(0)
DATA = (torch.randn(30, 4), torch.randint(0, 3, (30,)))
EACH, GROUPS = Sources.per_example(30), Sources.by_label(["a", "b", "c"] * 10)
INFINITE = Plan(engine="spectral", steps="infinite")
FILE = """
import torch
from torch import nn
import imprint

torch.manual_seed(0)
data = (torch.randn(12, 3), torch.randint(0, 3, (12,)))
sources = imprint.Sources.by_label(["times", "post", "blog"] * 4)
task = imprint.Task.classifier(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 3)))
"""


def classifier() -> Task:
    torch.manual_seed(1)
    return Task.classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def blind(task: Task) -> Task:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return Task(task.model, loss=loss)


@pytest.mark.parametrize("sources", [EACH, GROUPS])
def test_a_check_may_leave_the_plan_to_auto_and_says_what_was_chosen(sources: Sources) -> None:
    task = classifier()
    states = [task.state(), {name: 0.5 * tensor for name, tensor in task.state().items()}]
    found = check(task, DATA, sources, "auto", checkpoints=states)
    assert found.ok
    assert found.plan == Plan.auto(task, DATA, sources, states, progress=False)
    shown = str(found)
    assert f"plan: {found.plan.engine}, Gauss–Newton; steps " in shown
    assert isinstance(found.plan.weight, tuple)
    assert f"weight {', '.join(f'{weight:.4g}' for weight in found.plan.weight)}" in shown


@pytest.mark.parametrize("run", [check, simulate])
def test_a_misspelt_plan_is_told_of_auto(run: object) -> None:
    assert callable(run)
    with pytest.raises(PlanError, match=r"""got 'atuo': .*"auto" to have a plan chosen"""):
        run(classifier(), DATA, EACH, "atuo")


@pytest.mark.parametrize("sources", [EACH, GROUPS])
def test_a_task_without_outputs_is_checked_and_simulated_with_the_plan_that_is_chosen(sources: Sources) -> None:
    task = blind(classifier())
    found = check(task, DATA, sources, "auto")
    assert found.ok and found.plan.seen_curvature == "hessian"
    assert simulate(task, DATA, sources, "auto", progress=False).manifest.plan == found.plan


def test_a_plan_that_needs_outputs_is_refused_with_one_that_does_not() -> None:
    task = blind(classifier())
    with pytest.raises(PlanError, match=r"such as Plan\(engine=.spectral., curvature=.hessian.\)"):
        simulate(task, DATA, EACH, Plan(engine="spectral"), progress=False)


# --- infinitely many steps


def test_a_check_refuses_what_the_simulation_refuses_in_its_words() -> None:
    task = classifier()
    with pytest.raises(SimulationError) as refused:
        simulate(task, DATA, EACH, INFINITE, progress=False)
    assert check(task, DATA, EACH, INFINITE).problems == (str(refused.value),)


def test_a_check_finds_negative_curvature_beyond_the_damping() -> None:
    task = classifier()
    plan = Plan(engine="spectral", steps="infinite", curvature="hessian", damping=1e-4)
    with pytest.raises(SimulationError, match="infinitely many steps need positive curvature") as refused:
        simulate(task, DATA, EACH, plan, progress=False)
    assert check(task, DATA, EACH, plan).problems == (str(refused.value),)


def test_a_check_looks_at_every_checkpoint_that_counts() -> None:
    task = classifier()
    last = Plan(engine="spectral", steps="infinite", damping=(0.1, 0.0))
    (problem,) = check(task, DATA, EACH, last, checkpoints=[task.state()] * 2).problems
    assert problem.startswith("checkpoint 1: infinitely many steps")
    skipped = Plan(engine="spectral", steps="infinite", damping=(0.1, 0.0), weight=(1.0, 0.0))
    assert check(task, DATA, EACH, skipped, checkpoints=[task.state()] * 2).ok


def test_undamped_infinite_steps_pass_where_the_data_determines_the_model() -> None:
    task, data = Task.regression(nn.Linear(4, 1)), (DATA[0], torch.randn(30))
    assert check(task, data, EACH, INFINITE).ok
    assert simulate(task, data, EACH, INFINITE, progress=False).checkpoints


# --- a store that was made otherwise


def test_what_a_plan_is_chosen_from_is_compared_before_the_plan(tmp_path: Path) -> None:
    task = classifier()
    simulate(task, DATA, EACH, "auto", out=tmp_path / "store", progress=False)
    others = {
        "the training data changed": (task, (2 * DATA[0], DATA[1]), EACH, None),
        "the sources changed": (task, DATA, GROUPS, None),
        "the weights of checkpoint 0 changed": (
            *(task, DATA, EACH),
            [{name: 0.5 * tensor for name, tensor in task.state().items()}],
        ),
        "there were 1 checkpoints, are 2": (
            *(task, DATA, EACH),
            [{name: scale * tensor for name, tensor in task.state().items()} for scale in (1.0, 0.9)],
        ),
    }
    for words, (same, data, sources, states) in others.items():
        with pytest.raises(StoreError, match=words):
            simulate(same, data, sources, "auto", checkpoints=states, out=tmp_path / "store", progress=False)


# --- fields given besides


def objects(folder: Path, sources: str | None, **plan: object) -> Objects:
    (folder / "model.py").write_text(FILE)
    return Objects(Experiment(task=f"{folder / 'model.py'}:task", sources=sources, plan={"auto": True, **plan}))


def test_fields_that_do_not_fit_a_chosen_plan_are_told_with_those_that_were_chosen(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"got 'infinite'\. \(Chosen by auto: steps, damping, weight\.\)"):
        _ = objects(tmp_path, "per-example", engine="tangent").plan
    with pytest.raises(PlanError, match=r"dropout belongs to .* \(Chosen by auto: steps, .*dropout\.\)"):
        _ = objects(tmp_path, None, engine="spectral").plan


def test_a_wrong_field_of_a_plan_that_is_given_is_told_alone(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE)
    with pytest.raises(PlanError, match=re.escape("steps must be a whole number of at least 1, got 0.") + "$"):
        _ = Objects(Experiment(task=f"{tmp_path / 'model.py'}:task", plan={"steps": 0})).plan
