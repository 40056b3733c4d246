"""A Trainer keeps the checkpoints that imprints are simulated from, with the second moments of its optimiser."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainingArguments

from imprint import Plan, TaskError, simulate
from imprint.language import CheckpointCallback, Completions, task
from tests.language.models import LABELS, documents, gpt2, tokenizer
from tests.language.test_task import scores


def train(
    model: Any, recording: CheckpointCallback, folder: Path, optimiser: Any = None, **options: Any
) -> dict[int, dict[str, Tensor]]:
    """A real training of four steps. Gives the state after each, as another callback sees it."""
    seen: dict[int, dict[str, Tensor]] = {}

    class Watching(CheckpointCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen[state.global_step] = {n: t.detach().clone() for n, t in given["model"].state_dict().items()}

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    rows = documents().rows
    callbacks = [recording, Watching(folder / "unused")]
    optimisers = (optimiser, None)  # without a schedule of its own
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks, optimizers=optimisers).train()
    return seen


def test_steps_worth_keeping_are_kept_with_their_second_moments(tmp_path: Path) -> None:
    model, recording = gpt2().float(), CheckpointCallback(tmp_path / "kept", at=(1, 3))
    seen = train(model, recording, tmp_path)
    assert [path.name for path in recording.paths] == ["checkpoint-000001.safetensors", "checkpoint-000003.safetensors"]
    assert repr(recording) == f"CheckpointCallback({str(tmp_path / 'kept')!r}, at 1, 3: 2 saved)"
    language = task(model)
    for path, step in zip(recording.paths, (1, 3), strict=True):
        kept = language.complete(load_file(path))
        assert all(torch.equal(tensor, seen[step][name]) for name, tensor in kept.items())
        moments = load_file(path.with_name(f"{path.stem}.moments.safetensors"))
        assert set(moments) == set(language.names)
    data = documents()
    plan = Plan(steps=1, lr=1e-5, preconditioner="adam")
    store = simulate(language, data.columns, data.sources(LABELS), plan, checkpoints=recording.paths, progress=False)
    assert scores(language, store, Completions(["the"], [" cat"], tokenizer()).columns).any()


def test_of_a_fine_tune_the_adapter_alone_is_kept(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model, recording = get_peft_model(gpt2().float(), config), CheckpointCallback(tmp_path / "kept", at=(2,))
    seen = train(model, recording, tmp_path)
    language = task(model)
    (path,) = recording.paths
    assert set(load_file(path)) == set(language.names)
    kept = language.complete(load_file(path))
    assert all(torch.equal(kept[name], seen[2][name]) for name in kept)
    assert any(not torch.equal(kept[name], tensor) for name, tensor in language.state().items())


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_what_is_trained_beside_the_adapter_is_kept_too(
    bias: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, bias=bias)
    model, recording = get_peft_model(gpt2().float(), config), CheckpointCallback(tmp_path / "kept", at=(2,))
    seen = train(model, recording, tmp_path)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    (path,) = recording.paths
    assert set(load_file(path)) == trained
    with caplog.at_level("WARNING", logger="imprint"):
        language = task(model)
    beside = len(trained) - len(language.names)
    assert f"{beside} trainable parameters beside the adapter carry no imprint" in caplog.text
    caplog.clear()
    assert set(task(model, parameters="*").names) == trained
    assert not caplog.text
    kept = language.complete(load_file(path))
    assert all(torch.equal(kept[name], seen[2][name]) for name in kept)
    alone = {name: tensor for name, tensor in kept.items() if name in language.names}
    with pytest.raises(TaskError, match=r"does not fit the model: it lacks .*bias"):
        language.complete(alone)


class _Lion(torch.optim.Optimizer):
    """Has betas, and no second moments."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.sub_(self.state[parameter]["exp_avg"].sign(), alpha=self.param_groups[0]["lr"])


def test_an_optimiser_whose_moments_are_not_found_does_not_stop_the_training(tmp_path: Path) -> None:
    model, recording = gpt2().float(), CheckpointCallback(tmp_path / "kept", at=(2, 3))
    with pytest.warns(UserWarning, match=r"without second moments: .* it has exp_avg") as warned:
        seen = train(model, recording, tmp_path, optimiser=_Lion(model.parameters()))
    assert sum("without second moments" in str(each.message) for each in warned) == 1
    assert len(seen) == 4
    names = [path.name for path in recording.paths]
    assert names == ["checkpoint-000002.safetensors", "checkpoint-000003.safetensors"]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == names


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_other_optimisers_have_no_moments_to_keep(tmp_path: Path) -> None:
    recording = CheckpointCallback(tmp_path / "kept", at=(2,))
    train(gpt2().float(), recording, tmp_path, optim="sgd")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["checkpoint-000002.safetensors"]


def test_without_the_extra_the_package_imports_and_says_what_it_lacks() -> None:
    code = (
        "import sys; sys.modules.update(transformers=None, peft=None)\n"
        "from imprint import MissingExtra, language\n"
        "for make in (language.CheckpointCallback, lambda folder: language.recording.attach(None, folder)):\n"
        "    try: make('checkpoints')\n"
        "    except MissingExtra as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    needs = 'needs an optional dependency: pip install "imprint-attribution[language]"'
    assert told == f"language.CheckpointCallback {needs}\nlanguage.recording.attach {needs}\n"


def test_steps_that_the_training_never_had_are_told(tmp_path: Path) -> None:
    recording = CheckpointCallback(tmp_path / "kept", at=(0, 2, 9))
    with pytest.warns(UserWarning, match=r"no checkpoint was kept at step 0, 9: the training had steps 1 to 4\."):
        train(gpt2().float(), recording, tmp_path)
    assert [path.name for path in recording.paths] == ["checkpoint-000002.safetensors"]


def test_checkpoints_of_an_adapter_are_told_from_those_of_a_model(tmp_path: Path) -> None:
    recording = CheckpointCallback(tmp_path / "kept", at=(2,))
    adapted = get_peft_model(gpt2().float(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    train(adapted, recording, tmp_path)
    with pytest.raises(TaskError, match=r"and \d+ more; .* an adapter's checkpoint. Build the task from the model"):
        task(gpt2().float()).complete(load_file(recording.paths[0]))
