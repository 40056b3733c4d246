"""Of a run with frozen parameters, the recording has what was trained, and a hash of the rest."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import Recording, RunRecorder, Sources, StoreError, Task, TaskError, simulate
from imprint.recording.header import read_header
from imprint.store.fingerprint import of_tensors
from tests.recording.runs import N, X, Y, assert_same, contents, make_model, mean_loss, repeat


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def record(run: RunRecorder) -> Recording:
    """Train for one epoch, and leave it to the recorder to clear gradients."""
    for indices in run.batches(N, 6):
        with run.step(indices) as step:
            step.backward(mean_loss(run.model, indices))
            run.optimiser.step()
    return run.finish()


def record_adapted(folder: Path, given: str) -> tuple[Adapted, Recording]:
    """Train an adapter; the optimiser has all parameters, or only those that are trained."""
    model = Adapted()
    parameters = model.parameters() if given == "all" else [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=0.1)
    run = RunRecorder(folder, model, optimiser)
    for indices in run.batches(N, 6):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(mean_loss(model, indices))
            optimiser.step()
    return model, run.finish()


def test_recordings_of_the_first_schema_hash_all_frozen_parameters_at_once(tmp_path: Path) -> None:
    model, recording = record_adapted(tmp_path / "run", "trained")
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    header = replace(read_header(recording.path), schema=1, frozen_sha256=of_tensors(frozen))
    header.write(recording.path)
    first = Recording(recording.path)
    assert first.complete(Task.classifier(Adapted()), 4)
    with pytest.raises(TaskError, match="other values of the 2 frozen parameters"):
        first.complete(Task.classifier(Adapted(seed=1)), 4)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_unfinished_recording_of_the_first_schema_resumes_with_the_frozen_parameters_it_had(
    seed: int, tmp_path: Path
) -> None:
    def begin(model: Adapted) -> RunRecorder:
        trained = [p for p in model.parameters() if p.requires_grad]
        return RunRecorder(tmp_path / "run", model, torch.optim.AdamW(trained, lr=0.1), n=N)

    run = begin(Adapted())
    with run.step([0, 1, 2]) as step:
        step.backward(mean_loss(run.model, torch.tensor([0, 1, 2])))
        run.optimiser.step()
    run.close()
    frozen = {name: p for name, p in run.model.named_parameters() if not p.requires_grad}
    replace(read_header(tmp_path / "run"), schema=1, frozen_sha256=of_tensors(frozen)).write(tmp_path / "run")
    if seed:
        with pytest.raises(StoreError, match="an unfinished recording with other frozen parameters"):
            begin(Adapted(seed))
    else:
        resumed = begin(Adapted())
        assert resumed.resume() == 0
        assert record(resumed).complete(Task.classifier(Adapted()), 4)
        assert read_header(tmp_path / "run").schema == 1


def test_of_a_fine_tune_the_adapter_is_kept_and_a_hash_of_what_is_frozen(tmp_path: Path) -> None:
    model, recording = record_adapted(tmp_path / "run", "trained")
    assert recording.frozen == ("base.weight", "base.bias")
    assert recording.state(4).keys() == {"down.weight", "up.weight"}
    task = Task.classifier(Adapted())
    (whole,) = recording.complete(task, 4)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())
    assert_same(repeat(recording, Adapted()), model)
    with pytest.raises(TaskError, match="other values of the 2 frozen parameters"):
        recording.complete(Task.classifier(Adapted(1)), 4)
    with pytest.raises(TaskError, match=r"another model: the recording lacks 0\.bias.*the model lacks base\.bias"):
        recording.complete(Task.classifier(make_model()), 4)


def test_a_model_in_another_precision_is_refused(tmp_path: Path) -> None:
    _, recording = record_adapted(tmp_path / "run", "all")
    with pytest.raises(TaskError, match=r"another precision: 'down\.weight' is torch\.float32 there and torch\.bfl"):
        recording.complete(Task.classifier(Adapted().bfloat16()), 4)
    _, recording = record_adapted(tmp_path / "adapter", "trained")
    with pytest.raises(
        TaskError, match=r"another precision: 'down\.weight' is torch\.float32 there and torch\.float64"
    ):
        recording.complete(Task.classifier(Adapted().double()), 4)
    model = Adapted()
    model.base.bfloat16()
    with pytest.raises(TaskError, match=r"other values of the 2 frozen parameters .*, or with the same in another pre"):
        recording.complete(Task.classifier(model), 4)


def test_an_optimiser_of_all_parameters_makes_the_recording_of_one_of_the_trained_ones(tmp_path: Path) -> None:
    whole, recording = record_adapted(tmp_path / "all", "all")
    few, other = record_adapted(tmp_path / "trained", "trained")
    assert_same(whole, few)
    assert contents(tmp_path / "all") == contents(tmp_path / "trained")
    assert recording.frozen == other.frozen == ("base.weight", "base.bias")
    assert recording.groups == other.groups and not any(step.missing for step in recording.steps)


def test_what_is_frozen_after_the_recorder_is_made_is_kept_and_has_no_gradient(tmp_path: Path) -> None:
    """As earlier versions kept whatever the optimiser had, trained or not."""
    model = Adapted()
    model.base.requires_grad_(True)
    run = RunRecorder(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), lr=0.1), n=N)
    for number in range(2):
        model.base.requires_grad_(number == 1)
        with run.step(range(6)) as step:
            step.backward(mean_loss(model, torch.arange(6)))
            run.optimiser.step()
    recording = run.finish()
    assert recording.frozen == () and "base.weight" in recording.state(2)
    assert [step.missing for step in recording.steps] == [{"base.weight", "base.bias"}, set()]


def test_a_recording_that_has_frozen_parameters_as_trained_says_so_and_how_to_replay_it(tmp_path: Path) -> None:
    model, data, sources = Adapted().double(), (X.double(), Y), Sources.groups({"ann": [0, 1], "ben": [2]})
    model.base.requires_grad_(True)
    run = RunRecorder(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), lr=0.1), data=data)
    model.base.requires_grad_(False)
    for indices in run.batches(N, 12):
        with run.step(indices) as step:
            step.backward(nn.functional.cross_entropy(model(data[0][indices]), Y[indices]))
            run.optimiser.step()
    recording = run.finish()
    with pytest.raises(TaskError, match=r"base\.bias, base\.weight had no gradient in any step.* or select them too"):
        simulate(Task.classifier(model), data, sources, run=recording, progress=False)
    model.requires_grad_(True)
    store = simulate(Task.classifier(model, parameters="*"), data, sources, run=recording, progress=False)
    rows = store.imprints(0, 0, 1, torch.device("cpu"))
    assert bool(rows["up.weight"].any()) and not bool(rows["base.weight"].any())


def test_groups_of_frozen_parameters_alone_keep_their_settings(tmp_path: Path) -> None:
    model = Adapted()
    trained = [model.down.weight, model.up.weight]
    groups: list[dict[str, Any]] = [{"params": list(model.base.parameters()), "lr": 9.0}, {"params": trained}]
    optimiser = torch.optim.AdamW(groups, lr=0.1)
    recording = record(RunRecorder(tmp_path / "run", model, optimiser))
    assert recording.groups == ((), ("down.weight", "up.weight"))
    assert [group["lr"] for group in recording.steps[0].groups] == [9.0, 0.1]
    assert_same(repeat(recording, Adapted()), model)
    sources = Sources.groups({"ann": [0, 1], "ben": [2]})
    store = simulate(Task.classifier(model), (X, Y), sources, run=recording, progress=False)
    assert store.checkpoints[0].choices.lr == 0.1, "what the frozen group has is no rate of a step"


def test_an_optimiser_may_remember_what_is_frozen_by_now(tmp_path: Path) -> None:
    """As after a first training of everything; a frozen parameter is not moved by it."""
    model = Adapted()
    model.base.requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    mean_loss(model, torch.arange(N)).backward()
    optimiser.step()
    model.base.requires_grad_(False)
    start = copy.deepcopy(model)
    recording = record(RunRecorder(tmp_path / "run", model, optimiser))
    assert recording.groups == (("down.weight", "up.weight"),)
    assert_same(repeat(recording, start), model)
    assert sum(path.stat().st_size for path in (tmp_path / "run").glob("*.moments.*")) < 1000


@pytest.mark.wide
def test_a_fine_tune_by_peft_is_recorded(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=16, vocab_size=20)
    base = transformers.GPT2LMHeadModel(config)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    tokens = torch.randint(0, 20, (8, 10))
    run = RunRecorder(tmp_path / "run", model, optimiser)
    for indices in run.batches(8, 4, epochs=2):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(model(input_ids=tokens[indices], labels=tokens[indices]).loss)
            optimiser.step()
    recording = run.finish()
    assert all("lora_" in name for name in recording.groups[0])
    assert len(recording.frozen) > 10
    size = sum(path.stat().st_size for path in recording.paths)
    assert size < 10_000
    task = Task(model, loss=lambda model, batch: model(input_ids=batch).logits.mean((1, 2)))
    (whole,) = recording.complete(task, 4)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in task.state().items())
