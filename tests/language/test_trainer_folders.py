"""A Trainer's checkpoint folders are checkpoints: their weights, and their optimiser's second moments by name."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from imprint import Plan, TaskError, simulate
from imprint.language import CheckpointCallback, Documents, task
from imprint.simulation.state_files import load_state
from imprint.simulation.states import States
from tests.language.models import LABELS, TEXTS, documents, gpt2, llama, tokenizer
from tests.language.trainings import make_trainer


def adapted() -> Any:
    torch.manual_seed(0)
    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))


def train(model: Any, folder: Path, **options: Any) -> tuple[Path, dict[str, Tensor]]:
    """Train five steps; return the folder of step 3, and the moments that a callback kept there by name."""
    trainer = make_trainer(model, folder, save_strategy="steps", save_steps=3, **options)
    kept = CheckpointCallback(folder / "kept", at=(3,))
    trainer.add_callback(kept)
    trainer.train()
    (path,) = kept.paths
    return folder / "trainer" / "checkpoint-3", load_state(path.with_name("checkpoint-000003.moments.safetensors"))


MODELS = {"layer norms and biases": gpt2, "root mean squares": llama, "an adapter": adapted}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("decay", [0.1, pytest.param(0.0, marks=pytest.mark.wide)])
def test_second_moments_get_the_names_of_their_parameters(make: Any, decay: float, tmp_path: Path) -> None:
    model = make().float()
    folder, kept = train(model, tmp_path, weight_decay=decay)
    states = States(task(make().float()), [folder])
    moments = states.moments(0)
    assert moments is not None and moments.keys() == kept.keys()
    for name, expected in kept.items():
        assert torch.equal(moments[name], expected), name
    shapes = [tuple(tensor.shape) for tensor in kept.values()]
    assert len(set(shapes)) < len(shapes)  # so that a wrong order could have fitted
    weights = load_state(tmp_path / "kept" / "checkpoint-000003.safetensors")
    assert all(torch.equal(states[0][name], tensor) for name, tensor in weights.items() if name in states[0])


def test_a_simulation_follows_the_optimiser_of_a_trainers_folder(tmp_path: Path) -> None:
    model, folders = gpt2().float(), tmp_path / "trainer"
    train(model, tmp_path)
    rows, plan = documents(), Plan(steps=2, lr=1e-3, preconditioner="adam")
    options: dict[str, Any] = {"progress": False}
    found, kept = (
        simulate(task(model), rows.columns, rows.sources(LABELS), plan, checkpoints=[place], **options)
        for place in (folders / "checkpoint-3", tmp_path / "kept" / "checkpoint-000003.safetensors")
    )
    for name, row in kept.imprints(0, 0, len(kept), torch.device("cpu")).items():
        assert torch.equal(found.imprints(0, 0, len(kept), torch.device("cpu"))[name], row)


def test_an_optimiser_of_other_parameters_is_refused(tmp_path: Path) -> None:
    folder, _ = train(gpt2().float(), tmp_path)
    partly = gpt2().float()
    partly.transformer.wte.requires_grad_(False)
    with pytest.raises(TaskError, match=r"does not fit the model: its groups have .* Freeze what was frozen"):
        States(task(partly), [folder]).moments(0)


def edit(folder: Path, change: Any) -> None:
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    torch.save(change(state), folder / "optimizer.pt")


def test_moments_of_other_shapes_and_files_that_hold_no_optimiser_are_refused(tmp_path: Path) -> None:
    folder, _ = train(gpt2().float(), tmp_path)
    states = States(task(gpt2().float()), [folder])

    def transpose(state: Any) -> Any:
        state["state"][2]["exp_avg_sq"] = state["state"][2]["exp_avg_sq"].T
        return state

    edit(folder, transpose)
    with pytest.raises(TaskError, match="no order of these that a Trainer uses has its shapes"):
        states.moments(0)
    edit(folder, lambda state: {"state": {}})
    with pytest.raises(TaskError, match="is no state of an optimiser"):
        states.moments(0)


def test_without_second_moments_they_are_estimated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = gpt2().float()
    folder = make_trainer(model, tmp_path, save_strategy="steps", save_steps=3, optim="sgd")
    folder.train()
    assert States(task(model), [tmp_path / "trainer" / "checkpoint-3"]).moments(0) is None
    assert "has no second moments that can be read" in caplog.text
    (tmp_path / "trainer" / "checkpoint-3" / "optimizer.pt").unlink()
    assert States(task(model), [tmp_path / "trainer" / "checkpoint-3"]).moments(0) is None


@pytest.mark.parametrize("made_of", ["matrices and vectors", "vectors"])
def test_factored_second_moments_are_estimated(made_of: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = gpt2().float()
    if made_of == "vectors":  # for which Adafactor has plain second moments, but no β₂
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
    make_trainer(model, tmp_path, save_strategy="steps", save_steps=3, optim="adafactor").train()
    assert States(task(model), [tmp_path / "trainer" / "checkpoint-3"]).moments(0) is None
    assert "has no second moments that can be read" in caplog.text


def test_named_groups_of_an_optimiser_are_taken_by_name(tmp_path: Path) -> None:
    model = gpt2().float()
    names = [
        [n for n, p in model.named_parameters() if p.dim() < 2],
        [n for n, p in model.named_parameters() if p.dim() > 1],
    ]
    own = dict(model.named_parameters())
    optimiser = torch.optim.AdamW([{"params": [(n, own[n]) for n in group]} for group in names], lr=1e-2)
    task(model).loss(model, documents().columns).mean().backward()
    optimiser.step()
    model.save_pretrained(tmp_path)
    torch.save(optimiser.state_dict(), tmp_path / "optimizer.pt")
    moments = States(task(deepcopy(model)), [tmp_path]).moments(0)
    assert moments is not None
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None  # of a first step: v/(1 − β₂) = g²
        torch.testing.assert_close(moments[name], parameter.grad.square(), rtol=1e-5, atol=0)


def test_a_sharded_model_of_transformers_is_read(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    found = States(task(gpt2(initializer_range=0.1)), [tmp_path])[0]
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


def test_an_adapter_made_for_the_task_has_its_moments_estimated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = train(gpt2().float(), tmp_path)
    made = task(gpt2().float(), parameters="lora:2")
    assert States(made, [folder]).moments(0) is None
    assert "those of all parameters are estimated" in caplog.text
    rows = Documents(TEXTS, tokenizer(), length=12)
    store = simulate(
        made, rows.columns, rows.sources(LABELS), Plan(steps=1, lr=1e-3), checkpoints=[folder], progress=False
    )
    assert len(store) == 3
