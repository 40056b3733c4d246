"""What could not be repeated is refused while the training is young, with a message that says what to do."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import PlanError, RunRecorder, StoreError
from imprint.recording.steps import RunStep
from tests.recording.runs import N, X, Y, make_model, mean_loss, train

INDICES = torch.arange(6)


class Recorded:
    """A model, its optimiser and their recorder, before the first step."""

    def __init__(self, folder: Path, model: nn.Sequential | None = None) -> None:
        self.model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run = RunRecorder(folder / "run", self.model, self.optimiser, n=N)

    def make_step(self, act: "Act | None" = None, parts: int = 1) -> None:
        """Make a step; `act` is called after each backward pass."""
        with self.run.step() as step:
            for _ in range(parts):
                step.batch(INDICES)
                step.backward(mean_loss(self.model, INDICES))
                if act is not None:
                    act(self, step)
            self.optimiser.step()


Act = Callable[[Recorded, RunStep], Any]


def clip(recorded: Recorded, step: RunStep) -> None:
    nn.utils.clip_grad_norm_(recorded.model.parameters(), 1e6)  # also where it changes nothing


def scale(recorded: Recorded, step: RunStep) -> None:
    for parameter in recorded.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2


@pytest.mark.parametrize("change", [clip, scale])
def test_gradients_that_were_changed_unseen_are_refused(change: Act, tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    for _ in range(4):
        with pytest.raises(PlanError, match=r"gradient of '0.weight' was changed .* step\.clip_grad_norm_\(limit\)"):
            recorded.make_step(change)
        recorded.make_step()  # nothing has happened: the run goes on
    assert recorded.run.steps == 4


def test_gradients_that_were_dropped_between_micro_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="was changed"):
        Recorded(tmp_path).make_step(lambda recorded, step: recorded.optimiser.zero_grad(), parts=2)


def test_a_grad_scaler_is_refused_at_the_first_step(tmp_path: Path) -> None:
    """Torch does not count what it does to gradients as a change."""
    recorded, scaler = Recorded(tmp_path), torch.amp.GradScaler("cpu")

    def make_step() -> None:
        with recorded.run.step(INDICES):
            scaler.scale(mean_loss(recorded.model, INDICES)).backward()
            scaler.step(recorded.optimiser)

    with pytest.raises(PlanError, match="such as those of a GradScaler or a callback, cannot be replayed"):
        make_step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: step.clip_grad_norm_(-1.0), "max_norm must be a number of at least 0, or infinity .* got -1"),
        (lambda step: step.clip_grad_norm_(math.nan), "max_norm must be .* got nan"),
        (lambda step: step.clip_grad_norm_(1.0, norm_type=0), "norm_type must be a positive number or infinity, got 0"),
        (lambda step: step.clip_grad_value_(-1.0), "clip_value must be a number of at least 0, or infinity .* got -1"),
    ],
)
def test_limits_that_clip_nothing_sensible_are_refused(
    change: Callable[[RunStep], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        Recorded(tmp_path).make_step(lambda recorded, step: change(step))


@pytest.mark.parametrize("early", [False, True], ids=["forgotten", "before the step"])
def test_a_step_without_a_backward_pass_is_refused(early: bool, tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    loss = mean_loss(recorded.model, INDICES)
    if early:
        loss.backward()

    def make_step() -> None:
        with recorded.run.step(INDICES):
            mean_loss(recorded.model, INDICES)
            recorded.optimiser.step()

    with pytest.raises(PlanError, match="no parameter has a gradient at step 1: was the backward pass forgotten, or"):
        make_step()
    recorded.make_step()  # nothing has moved: the run goes on
    assert recorded.run.steps == 1


def test_clipping_twice_or_too_early_is_refused(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    with pytest.raises(PlanError, match="clipped twice"):
        recorded.make_step(lambda recorded, step: [step.clip_grad_norm_(1.0) for _ in range(2)])

    def clip_first(recorded: Recorded, step: RunStep) -> None:
        if not seen:
            step.clip_grad_norm_(1.0)
        seen.append(step.number)

    seen: list[int] = []
    with pytest.raises(PlanError, match="clipped before the last backward pass"):
        recorded.make_step(clip_first, parts=2)


def test_a_step_has_one_step_of_the_optimiser(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    with (
        pytest.raises(PlanError, match=r"step 1 ended without a step of the optimiser: call optimiser\.step\(\)"),
        recorded.run.step(INDICES),
    ):
        pass
    with pytest.raises(PlanError, match=r"stepped outside of run\.step"):
        recorded.optimiser.step()
    with pytest.raises(PlanError, match="stepped a second time within step 1"):
        recorded.make_step(lambda recorded, step: recorded.optimiser.step())
    with pytest.raises(StoreError, match="step 1 failed after the optimiser had moved the model"):
        recorded.make_step()


def test_backward_passes_belong_into_a_step(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.make_step()
    mean_loss(recorded.model, INDICES).backward()
    with pytest.raises(PlanError, match=r"'2\.\w+' got a gradient outside of run\.step"):
        recorded.make_step()


def test_steps_need_examples(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    with pytest.raises(PlanError, match="the step has no examples yet"), recorded.run.step() as step:
        step.backward(mean_loss(recorded.model, INDICES))
    with pytest.raises(PlanError, match="the optimiser stepped without examples"), recorded.run.step():
        recorded.optimiser.step()
    for wrong, message in (
        ([N], f"there is no training example {N}: indices go from 0 to 23"),
        ([-1], "no training example -1"),
        ([], r"got torch\.float32 of shape"),
        ([[0, 1]], r"shape \(1, 2\)"),
        (torch.ones(N, dtype=torch.bool), r"got torch\.bool"),
        ([0.5], r"torch\.float32"),
    ):
        with pytest.raises(PlanError, match=message):
            recorded.run.step(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="normaliser must be a positive number, got 0"):
        recorded.run.step(INDICES, normaliser=0)
    recorded.make_step()


def test_the_number_of_examples_must_be_known(tmp_path: Path) -> None:
    model = make_model()
    run = RunRecorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(PlanError, match="does not know how many training examples there are: give it data= or n="):
        run.step(INDICES)
    run.close()
    run = RunRecorder(tmp_path / "run", model, run.optimiser, data=(X, Y))
    with pytest.raises(PlanError, match="the recording is of 24 training examples, got 25"):
        run.batches(25, 6)


def test_parameters_outside_the_optimiser_and_of_other_models_are_refused(tmp_path: Path) -> None:
    model = make_model()
    head = torch.optim.SGD(model[4].parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"not in the optimiser: 0\.weight, 0\.bias.*Freeze them with requires_grad_"):
        RunRecorder(tmp_path / "run", model, head)
    with pytest.raises(PlanError, match="no parameter of the model"):
        RunRecorder(tmp_path / "run", make_model(), torch.optim.SGD(model.parameters(), lr=0.1))
    model.requires_grad_(False)[4].requires_grad_(True)
    run = RunRecorder(tmp_path / "run", model, head, n=N)
    model.requires_grad_(True)
    with pytest.raises(PlanError, match="require gradients are not in the optimiser"):
        run.step(INDICES)


def make_frozen(folder: Path) -> Recorded:
    """A recording whose optimiser has a frozen layer beside the one it trains."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return Recorded(folder, model)


def unfreeze(recorded: Recorded) -> None:
    recorded.model[0].requires_grad_(True)


def give_gradient(recorded: Recorded) -> None:
    weight = recorded.model.get_parameter("0.weight")
    weight.grad = torch.ones_like(weight)


@pytest.mark.parametrize("change", [unfreeze, give_gradient])
def test_training_what_was_frozen_at_first_is_refused_at_that_step(
    change: Callable[[Recorded], None], tmp_path: Path
) -> None:
    recorded = make_frozen(tmp_path)
    recorded.make_step()
    before = recorded.model.get_parameter("0.weight").clone()
    with pytest.raises(PlanError, match=r"step 2 trains 0\.weight.* leaves out because .* in a new folder"):
        recorded.make_step(lambda recorded, step: change(recorded))
    assert torch.equal(recorded.model.get_parameter("0.weight"), before)
    recorded.model[0].requires_grad_(False)
    recorded.make_step()  # nothing has moved: the run goes on
    unfreeze(recorded)
    with pytest.raises(PlanError, match=r"step 3 trains 0\.weight, 0\.bias, which"):
        recorded.make_step()


def test_optimisers_that_do_not_pass_over_frozen_parameters_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    with pytest.raises(PlanError, match="LBFGS moves all its parameters as one, and some of them are frozen"):
        RunRecorder(tmp_path / "run", model, torch.optim.LBFGS(model.parameters()))
    model.requires_grad_(False)
    with pytest.raises(PlanError, match="no parameters to train: none of those it was given requires gradients"):
        RunRecorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_another_optimiser_and_other_changes_of_the_model_are_refused(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.make_step()
    with torch.no_grad():
        recorded.model.get_parameter("0.bias").clamp_(0)
    with pytest.raises(PlanError, match=r"'0\.bias' was changed between two steps, other than by the recorded"):
        recorded.make_step()
    recorded = Recorded(tmp_path / "two")
    other = torch.optim.SGD(recorded.model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"'0\.weight' was changed before the optimiser stepped"):
        recorded.make_step(lambda recorded, step: other.step())


def test_a_teacher_that_follows_the_model_is_refused_once_it_has_moved(tmp_path: Path) -> None:
    model = nn.ModuleDict({"student": nn.Linear(4, 3), "teacher": nn.Linear(4, 3).requires_grad_(False)})
    student, teacher = model["student"], model["teacher"]
    optimiser = torch.optim.SGD(student.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)
    with run.step(INDICES) as step:
        step.backward((student(X[INDICES]) - teacher(X[INDICES])).square().mean())
        optimiser.step()
    with torch.no_grad():
        teacher.get_parameter("weight").lerp_(student.get_parameter("weight"), 0.1)
    with pytest.raises(
        PlanError, match=r"frozen parameter 'teacher\.weight' was changed during training without the opt"
    ):
        run.step(INDICES)


def test_an_evaluation_in_training_mode_is_refused_since_it_moves_buffers(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, make_model())
    recorded.make_step()
    with torch.no_grad():
        recorded.model(X)
    with pytest.raises(PlanError, match=r"'1\.num_batches_tracked' was changed between two steps.*model\.eval\(\)"):
        recorded.make_step()


def test_a_change_of_mode_or_precision_is_refused_by_name(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.make_step()
    recorded.model[1].eval()
    with pytest.raises(PlanError, match="module '1' is in evaluation mode in step 2, and was in training mode before"):
        recorded.make_step()
    recorded.model.train()
    with (
        pytest.raises(PlanError, match="the dtype of autocast is bfloat16 in step 2, and was None before"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        recorded.make_step()
    recorded.make_step()
    assert recorded.run.steps == 2


def test_groups_that_change_are_refused(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.model.register_parameter("more", nn.Parameter(torch.zeros(2)))
    recorded.optimiser.add_param_group({"params": [recorded.model.get_parameter("more")]})
    with pytest.raises(PlanError, match="parameter groups changed during the run"):
        recorded.make_step()


def test_settings_that_json_cannot_keep_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimiser = torch.optim.SGD([{"params": list(model.parameters()), "rule": len}], lr=0.1)
    with pytest.raises(PlanError, match="setting 'rule' of the optimiser's parameter group 0 is a builtin"):
        RunRecorder(tmp_path / "run", model, optimiser)
    optimiser = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with pytest.raises(PlanError, match="setting 'lr' of the optimiser's parameter group 0 is inf"):
        RunRecorder(tmp_path / "run", model, optimiser)
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_is_refused(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.model.get_parameter("0.weight").data *= float("nan")
    with pytest.raises(PlanError, match="the loss of step 1 is nan: the run diverged"):
        recorded.make_step()


def test_sparse_gradients_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Embedding(N, 3, sparse=True)
    optimiser = torch.optim.SparseAdam(model.parameters())
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)
    step = run.step(INDICES)
    step.backward(model(INDICES).sum())
    with pytest.raises(PlanError, match="the gradient of 'weight' is sparse"):
        optimiser.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a number of steps of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"scheduler": 3}, "scheduler must have state_dict"),
        ({"model": "mlp"}, "model must be an nn.Module, got str"),
        ({"optimiser": "sgd"}, "optimiser must be a torch.optim.Optimizer, got str"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_model()
    given = {"model": model, "optimiser": torch.optim.SGD(model.parameters(), lr=0.1), **options}
    with pytest.raises(PlanError, match=message):
        RunRecorder(tmp_path / "run", **given)


def test_a_training_in_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(PlanError, match="the training runs in 2 processes"):
        Recorded(tmp_path)


def test_folders_that_hold_something_else_or_a_finished_recording_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="holds something else: give a new folder for the recording"):
        train(tmp_path / "other")
    train(tmp_path / "run")[1].finish()
    with pytest.raises(StoreError, match=r"holds a finished recording.*run=imprint\.Recording"):
        train(tmp_path / "run")


def test_one_recorder_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    with pytest.raises(
        StoreError, match=re.escape("is held by an earlier RunRecorder of this process: call its close")
    ):
        Recorded(tmp_path)
    recorded.run.close()
    Recorded(tmp_path)  # nobody refers to it: it is collected, and its folder free
    assert not list((tmp_path / "run").iterdir())
    Recorded(tmp_path).run.close()
    with pytest.raises(StoreError, match="cannot be recorded any further: it is closed"):
        recorded.make_step()


def test_a_recorder_without_a_step_has_nothing_to_finish(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    with pytest.raises(PlanError, match="no step was recorded"):
        recorded.run.finish()
    with pytest.raises(PlanError, match="a step is being recorded"), recorded.run.step(INDICES):
        recorded.run.step(INDICES)
