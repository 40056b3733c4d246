"""What a recording holds is enough to repeat the run, bit for bit."""

import copy
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Recording, RunRecorder, Sources, Task, simulate
from imprint.data import Data
from imprint.errors import ReliabilityWarning
from imprint.recording.folder import choose_interval
from imprint.recording.records import Clipping
from imprint.store.fingerprint import of_data
from tests.recording.runs import Make, N, X, Y, assert_same, make_adamw, make_model, mean_loss, repeat, train


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Divide the parameters of a model by their shape, as is common for weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]


OPTIMISERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": make_adamw,
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.05, amsgrad=True),
    "groups": lambda model: torch.optim.AdamW(make_groups(model)),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_run_is_repeated_from_its_recording_bit_for_bit(make: Make, tmp_path: Path) -> None:
    """Dropout, batch norm, clipping and a schedule included."""
    model, run = train(tmp_path / "run", make)
    recording = run.finish()
    assert_same(repeat(recording, make_model(5)), model)
    assert len(recording.steps) == 8
    assert recording.steps[0].groups[0]["lr"] != recording.steps[1].groups[0]["lr"]
    assert all(step.clipping is not None and step.gradient_norm is not None for step in recording.steps)


def test_the_end_is_the_trained_model_and_the_start_the_one_before(tmp_path: Path) -> None:
    model, run = train(tmp_path / "run", model=make_model(2))
    recording = run.finish()
    for state, expected in ((recording.state(0), make_model(2)), (recording.state(8), model)):
        own = expected.state_dict()
        assert state.keys() == own.keys()
        assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())
    assert recording.checkpoints == (0, 8)
    assert recording.seconds > 0
    with pytest.raises(Exception, match="has no checkpoint of step 3: it has those of 0, 8"):
        recording.state(3)


def test_losses_and_gradient_norms_are_those_of_the_training(tmp_path: Path) -> None:
    model, optimiser = make_model(), None
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    with RunRecorder(tmp_path / "run", model, optimiser) as run:
        for indices in run.batches(N, 6):
            with run.step(indices) as step:
                run.optimiser.zero_grad()
                loss = mean_loss(model, indices)
                step.backward(loss)
                losses.append(loss.item())
                norms.append(step.clip_grad_norm_(0.1).item())
                assert nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None) < 0.11
                optimiser.step()
    steps = Recording(tmp_path / "run").steps
    assert [step.batches[0].loss for step in steps] == losses
    assert [step.gradient_norm for step in steps] == norms
    assert [step.batches[0].normaliser for step in steps] == [6.0] * 4
    assert sorted(index for step in steps for index in step.batches[0].examples) == list(range(N))


def test_clipping_by_the_largest_value_is_kept_and_repeated(tmp_path: Path) -> None:
    model = make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser)
    for indices in run.batches(N, 6):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(mean_loss(model, indices))
            largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
            assert step.clip_grad_norm_(0.01, norm_type=math.inf).item() == largest > 0.01
            optimiser.step()
    recording = run.finish()
    assert recording.steps[0].clipping == Clipping("norm", 0.01, math.inf)
    assert b"Infinity" not in (tmp_path / "run" / "steps.jsonl").read_bytes()
    assert_same(repeat(recording, make_model(5)), model)


def test_clipping_without_a_limit_returns_the_norm_and_clips_nothing(tmp_path: Path) -> None:
    model = make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)
    for limit in (None, 0.1):
        with run.step(range(6)) as step:
            step.backward(mean_loss(model, torch.arange(6)))
            norm = step.clip_grad_norm_(math.inf)
            step.clip_grad_value_(math.inf)
            if limit is not None:
                assert step.clip_grad_norm_(limit) == norm
                assert step.clip_grad_norm_(math.inf) < norm
            optimiser.step()
    first, second = run.finish().steps
    assert first.clipping is None and second.clipping == Clipping("norm", 0.1)
    assert second.gradient_norm == norm.item()


def test_a_loss_that_is_not_told_is_unknown_and_its_gradients_are_not(tmp_path: Path) -> None:
    model = make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)
    with run.step([1, 2, 3, 4]):
        optimiser.zero_grad()
        mean_loss(model, torch.tensor([1, 2, 3, 4])).backward()
        optimiser.step()
    (step,) = run.finish().steps
    assert step.batches[0].loss is None and step.gradient_norm is not None and step.clipping is None


@pytest.mark.parametrize("kind", ["mean", "tokens"])
def test_accumulated_gradients_are_repeated_with_their_normalisers(kind: str, tmp_path: Path) -> None:
    model = make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)
    for start in (0, 8):
        parts = [torch.arange(start, start + 3), torch.arange(start + 3, start + 8)]
        with run.step() as step:
            run.optimiser.zero_grad()
            for indices in parts:
                step.batch(indices, normaliser=None if kind == "mean" else 8)
                scale = 0.5 if kind == "mean" else len(indices) / 8
                step.backward(mean_loss(model, indices) * scale)
            step.clip_grad_value_(0.01)
            optimiser.step()
    recording = run.finish()
    assert [batch.normaliser for batch in recording.steps[0].batches] == ([6.0, 10.0] if kind == "mean" else [8.0, 8.0])
    assert [batch.examples for batch in recording.steps[1].batches] == [(8, 9, 10), (11, 12, 13, 14, 15)]
    assert_same(repeat(recording, make_model(5)), model)


def test_an_optimiser_that_evaluates_the_loss_itself_is_repeated(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=3)
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N, every=2)
    everything = torch.arange(N)
    first: list[float] = []
    for _ in range(4):
        with run.step(everything) as step:

            def closure() -> Tensor:
                optimiser.zero_grad()
                loss = mean_loss(model, everything)
                step.backward(loss)
                first.append(loss.item())
                return loss

            optimiser.step(closure)
    recording = run.finish()
    assert all(step.closure and step.gradient_norm is None and not step.missing for step in recording.steps)
    assert recording.steps[0].batches[0].loss == first[0]
    assert_same(repeat(recording, nn.Linear(4, 3)), model)
    remembered = recording.optimiser_state(2)
    assert len(remembered.numbers["weight"]["old_dirs"]) > 0  # lists of tensors, kept as such


def loop_that(clears: str, folder: Path) -> list[float]:
    """Train a few steps, and clear gradients in some way; return the norm of each gradient."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = RunRecorder(folder, model, optimiser, n=N)
    for number in range(4):
        with run.step(range(6)) as step:
            model.weight.requires_grad_(number != 1)  # a step in which one of them gets no gradient
            if clears == "after another pass":  # as of an adversarial example
                mean_loss(model, torch.arange(6)).backward()
                optimiser.zero_grad()
            if clears in ("to None", "to 0"):
                optimiser.zero_grad(set_to_none=clears == "to None")
            for parameter in model.parameters() if clears == "by hand" else ():
                parameter.grad = None
            step.backward(mean_loss(model, torch.arange(6)))
            step.clip_grad_norm_(10.0)
            optimiser.step()
        if clears == "after the step, to 0":
            optimiser.zero_grad(set_to_none=False)
    return [each.gradient_norm or 0.0 for each in run.finish().steps]


@pytest.mark.parametrize("clears", ["to None", "to 0", "by hand", "after the step, to 0", "after another pass"])
def test_a_loop_that_forgets_to_clear_gradients_is_warned_of_it(clears: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = loop_that(clears, tmp_path / "clearing")
    with pytest.warns(
        ReliabilityWarning, match=r"leaves gradients to add up .* Call optimiser\.zero_grad\(\)"
    ) as found:
        norms = loop_that("not", tmp_path / "forgetting")
    assert norms == expected, "each step takes its own gradient"
    assert len(found) == 1


class Halving(torch.optim.SGD):
    """Halves the gradients in its own step, and leaves the rest to the class it derives from."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        super().step(closure)


def test_an_optimiser_that_calls_the_step_of_its_parent_makes_one_step(tmp_path: Path) -> None:
    model = make_model()
    torch.optim.SGD(model.parameters(), lr=0.1)  # since when torch calls the hooks of both steps
    optimiser = Halving(model.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)
    with run.step(range(6)) as step:
        step.backward(mean_loss(model, torch.arange(6)))
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimiser.step()
    assert run.finish().steps[0].gradient_norm == pytest.approx(float(norm))


def test_parameters_without_a_gradient_are_named(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "idle": nn.Linear(2, 2)})
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser)
    before = model.get_parameter("idle.weight").clone()
    for indices in run.batches(N, 12):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(mean_loss(model["used"], indices))
            optimiser.step()
    recording = run.finish()
    assert recording.steps[0].missing == {"idle.weight", "idle.bias"}
    assert torch.equal(recording.state(2)["idle.weight"], before)
    assert not recording.optimiser_state(2).tensors.keys() & {"idle.weight"}


def test_how_forward_passes_ran_is_known(tmp_path: Path) -> None:
    model = make_model()
    model[1].eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", model, optimiser)
    for indices in run.batches(N, 12):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = mean_loss(model, indices)
            step.backward(loss)
            optimiser.step()
        model.eval()
        model(X)  # an evaluation between steps is none of the recording's business
        model.train()
        model[1].eval()
    circumstances = run.finish().circumstances
    assert circumstances.device == "cpu" and circumstances.autocast == "bfloat16"
    assert circumstances.evaluating == {"1"}


@pytest.mark.wide
def test_a_compiled_model_is_recorded_under_its_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    compiled: Any = torch.compile(model, backend="eager")
    optimiser = torch.optim.SGD(compiled.parameters(), lr=0.1)
    run = RunRecorder(tmp_path / "run", compiled, optimiser)
    for indices in run.batches(N, 12):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = mean_loss(compiled, indices)
            step.backward(loss)
            optimiser.step()
    recording = run.finish()
    assert recording.groups == (("0.weight", "0.bias"),)
    assert recording.circumstances.autocast == "bfloat16"


def test_a_forward_pass_that_was_not_seen_triggers_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    run = RunRecorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), n=N)
    step = run.step([0, 1])
    step.backward((X[:2] @ model.weight.T).sum())
    with pytest.warns(ReliabilityWarning, match=r"no forward pass of the model was seen.*torch\.autocast"):
        run.optimiser.step()


def test_random_numbers_of_a_step_depend_on_its_seed_alone(tmp_path: Path) -> None:
    drawn = []
    for noise in (0, 7):
        model = nn.Linear(4, 3)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        run = RunRecorder(tmp_path / str(noise), model, optimiser, n=N)
        for _ in range(2):
            torch.rand(noise)
            with run.step([0, 1]) as step:
                drawn.append(torch.rand(2))
                step.backward(mean_loss(model, torch.tensor([0, 1])))
                optimiser.step()
        run.finish()
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3]) and not torch.equal(drawn[0], drawn[1])


def test_there_are_few_checkpoints_however_long_a_run_is(tmp_path: Path) -> None:
    assert all(steps // choose_interval(steps) <= 8 for steps in range(1, 5000, 7))
    _, run = train(tmp_path / "run", epochs=23)
    recording = run.finish()
    assert recording.checkpoints == (0, 20, 40, 60, 80, 92)
    found = {path.name for path in (tmp_path / "run").glob("checkpoint-*[0-9].safetensors")}
    assert found == {f"checkpoint-{step:06}.safetensors" for step in recording.checkpoints}


def test_checkpoints_of_a_recording_serve_the_other_engines(tmp_path: Path) -> None:
    model, run = train(tmp_path / "run", model=nn.Sequential(nn.Linear(4, 3)), every=3)
    recording = run.finish()
    assert [path.name for path in recording.paths] == [f"checkpoint-{step:06}.safetensors" for step in (3, 6, 8)]
    plan = Plan(steps=3, preconditioner="adam")
    task, sources = Task.classifier(model), Sources.per_example(N)
    store = simulate(task, (X, Y), sources, plan, checkpoints=recording.paths, progress=False)
    assert [checkpoint.measured.moments for checkpoint in store.checkpoints] == ["recorded"] * 3


def test_data_are_hashed_as_stores_hash_them(tmp_path: Path) -> None:
    _, run = train(tmp_path / "run", data=(X, Y))
    assert run.finish().data == of_data(Data((X, Y), device="cpu"))


def test_settings_are_written_only_where_they_differ(tmp_path: Path) -> None:
    train(tmp_path / "run")[1].finish()
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    changed = [json.loads(line.partition(" ")[2])["changed"][0] for line in lines]
    assert "betas" in changed[0]
    assert all(settings.keys() == {"lr"} for settings in changed[1:])


def test_models_can_be_copied_and_pickled_while_they_are_recorded(tmp_path: Path) -> None:
    model = make_model()
    run = RunRecorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), n=N)
    step = run.step([0, 1, 2])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.eval()(X)
    step.backward(mean_loss(model, torch.arange(3)))
    run.optimiser.step()
    step.__exit__(None, None, None)
    assert run.finish().circumstances.evaluating == frozenset()


def test_a_model_that_is_changed_before_the_end_is_saved_triggers_a_warning(tmp_path: Path) -> None:
    model, run = train(tmp_path / "run")
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1)
    with pytest.warns(ReliabilityWarning, match=r"'0\.weight' was changed after the last step"):
        run.finish()


def test_a_recorder_says_what_it_has_recorded(tmp_path: Path) -> None:
    _, run = train(tmp_path / "run", stop=3)
    assert repr(run) == f"RunRecorder({str(tmp_path / 'run')!r}, AdamW: 3 steps)"
    _, run = train(tmp_path / "other")
    assert run.finish() is run.finish()
    shown = repr(run.finish())
    assert shown.startswith(
        f"Recording({str(tmp_path / 'other')!r}: 8 steps of AdamW on 24 examples, 6 trained tensors"
    )
    assert "2 checkpoints" in shown
