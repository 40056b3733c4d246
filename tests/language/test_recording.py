"""A Trainer's run is recorded as it was: which examples, divided by what, at which learning rates, to which end."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

from imprint import DataError, PlanError, Sources, StoreError, simulate
from imprint.errors import ReliabilityWarning
from imprint.language import recording, task
from imprint.recording.reading import Recording
from imprint.recording.records import micro_seed
from imprint.recording.seeding import seed_everything
from tests.language.models import gpt2
from tests.language.trainings import ROWS, make_trainer, pad, rows

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_steps": -1},
    "workers": {"dataloader_num_workers": 2},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "drop last": {"dataloader_drop_last": True, "num_train_epochs": 2, "max_steps": -1},
    "kept columns": {"remove_unused_columns": False},
    "not clipped": {"max_grad_norm": 0.0},
    "clipped without a limit": {"max_grad_norm": float("inf")},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(4)},
    "bfloat16": {"bf16": True},
    "sgd": {"optim": "sgd"},
}


def record(model: Any, folder: Path, **options: Any) -> tuple[Any, Recording]:
    """Train and record; return the Trainer and the recording."""
    trainer = make_trainer(model, folder, **options)
    run = recording.attach(trainer, folder / "run")
    trainer.train()
    return trainer, run.finish()


def watch(model: nn.Module, seen: list[dict[str, Tensor]]) -> Any:
    """Keep what the model is given in training."""

    def hook(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        if module.training:
            seen.append({key: value.clone() for key, value in named.items() if isinstance(value, Tensor)})

    return model.register_forward_pre_hook(hook, with_kwargs=True)


def repeat(run: Recording, model: Any, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Train again by hand, as the recording says, with other weights of the examples."""
    weights = torch.ones(run.n) if weights is None else weights
    model.load_state_dict(run.state(0), strict=False)
    model.train()
    parameters, data = dict(model.named_parameters()), rows(run.n)
    kind: Any = run.optimiser
    optimiser = kind([{"params": [parameters[name] for name in group]} for group in run.groups], lr=1.0)
    for step in run.steps:
        optimiser.zero_grad()
        for number, batch in enumerate(step.batches):
            seed_everything(micro_seed(step.seed, number))
            each = losses(model, pad([data[index] for index in batch.examples]), run.circumstances.autocast)
            loss = (each * weights[list(batch.examples)]).sum() / batch.normaliser
            if weights.all():
                assert loss.item() == pytest.approx(batch.loss, rel=1e-5)
            loss.backward()
        if step.clipping:
            norm = nn.utils.clip_grad_norm_(parameters.values(), step.clipping.limit)
            if weights.all():
                assert norm.item() == pytest.approx(step.gradient_norm, rel=1e-4)
        for group, settings in zip(optimiser.param_groups, step.groups, strict=True):
            group.update(settings)
        optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def losses(model: Any, batch: dict[str, Tensor], autocast: str | None = None) -> Tensor:
    """Return the sum of the losses of each row's tokens, (rows,)."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return each.sum(-1)


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, tensor in right.items():
        torch.testing.assert_close(left[name], tensor, rtol=0, atol=tolerance, msg=f"{name} differs")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_examples_losses_norms_and_rates_are_those_of_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []
    model = gpt2().float()
    handle = watch(model, seen)
    trainer, run = record(model, tmp_path, **options)
    handle.remove()
    batches = [batch for step in run.steps for batch in step.batches]
    assert len(batches) == len(seen)
    for batch, given in zip(batches, seen, strict=True):
        assert torch.equal(pad([rows()[index] for index in batch.examples])["input_ids"], given["input_ids"])
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(run.steps) == trainer.state.global_step == len(logged)
    for step, entry in zip(run.steps, logged, strict=True):
        assert sum(batch.loss or 0 for batch in step.batches) == pytest.approx(entry["loss"], rel=1e-3)
        assert step.gradient_norm == pytest.approx(entry["grad_norm"], rel=1e-5)
        assert all(settings["lr"] == entry["learning_rate"] for settings in step.groups)
    end = run.state(len(run.steps))
    assert all(torch.equal(end[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_repeating_the_steps_by_hand_leads_to_the_recorded_end(options: dict[str, Any], tmp_path: Path) -> None:
    _, run = record(gpt2().float(), tmp_path, **options)
    assert_close(repeat(run, gpt2().float()), run.state(len(run.steps)))


def test_a_recorded_training_is_the_training_without_recording(tmp_path: Path) -> None:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    plain, recorded = gpt2(**quiet).float(), gpt2(**quiet).float()
    options = {"num_train_epochs": 2, "max_steps": -1, "train_sampling_strategy": "group_by_length"}
    make_trainer(plain, tmp_path / "plain", **options).train()
    trainer, _ = record(recorded, tmp_path / "recorded", **options)
    assert all(torch.equal(tensor, recorded.state_dict()[name]) for name, tensor in plain.state_dict().items())
    assert trainer.train_dataset[0] == rows()[0]
    assert trainer.data_collator is pad


class _Weighted(Trainer):  # type: ignore[misc]
    """Gives example 2, the only one with its tokens, weight 0."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        left_out = torch.tensor([row.tolist()[:3] == rows()[2]["input_ids"][:3] for row in inputs["input_ids"]])
        return (losses(model, inputs) * ~left_out).sum() / given["num_items_in_batch"]


def test_a_training_with_an_example_at_weight_0_is_the_repeated_run_without_it(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_steps": -1}
    _, run = record(gpt2().float(), tmp_path / "with", **options)
    without = gpt2().float()
    record(without, tmp_path / "without", kind=_Weighted, **options)
    weights = torch.ones(ROWS)
    weights[2] = 0
    end = repeat(run, gpt2().float(), weights)
    assert_close(end, dict(without.named_parameters()))
    assert (run.state(len(run.steps))["transformer.wte.weight"] - end["transformer.wte.weight"]).abs().max() > 1e-3


class StopsAt(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


class _TakesNoItems(GPT2LMHeadModel):  # type: ignore[misc]
    """Divides its loss by the tokens of the micro-batch, as models without loss arguments do."""

    accepts_loss_kwargs = False


def test_models_that_do_not_count_the_items_of_a_step_divide_by_those_of_a_micro_batch(tmp_path: Path) -> None:
    model = _TakesNoItems(gpt2().config)
    start = deepcopy(model)
    _, run = record(model, tmp_path, gradient_accumulation_steps=4, num_train_epochs=1, max_steps=-1)
    assert [len(step.batches) for step in run.steps] == [4, 2]
    for step in run.steps:
        for batch in step.batches:
            tokens = sum(len(rows()[index]["input_ids"]) - 1 for index in batch.examples)
            assert batch.normaliser == tokens * len(step.batches)
    assert_close(repeat(run, start), run.state(len(run.steps)))


def test_a_resumed_training_is_one_recording(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "max_steps": -1}
    _, whole = record(gpt2().float(), tmp_path / "whole", **options)
    cut = make_trainer(gpt2().float(), tmp_path / "cut", **options)
    recording.attach(cut, tmp_path / "cut" / "run")
    cut.add_callback(StopsAt(5))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = make_trainer(gpt2().float(), tmp_path / "cut", **options)
    attached = recording.attach(resumed, tmp_path / "cut" / "run")
    resumed.train(resume_from_checkpoint=True)
    run = attached.finish()
    assert run.steps == whole.steps
    assert_close(run.state(len(run.steps)), whole.state(len(whole.steps)), 0)


def test_a_resumed_training_needs_the_steps_before_and_their_model(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(gpt2().float(), tmp_path, **options).train()
    resumed = make_trainer(gpt2().float(), tmp_path, **options)
    recording.attach(resumed, tmp_path / "run")
    with pytest.raises(StoreError, match="has no recording: steps 1 to 4 are missing"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    cut = make_trainer(gpt2().float(), tmp_path)
    recording.attach(cut, tmp_path / "run")
    cut.add_callback(StopsAt(3))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    other = make_trainer(GPT2LMHeadModel(gpt2().config), tmp_path)
    recording.attach(other, tmp_path / "run")
    with pytest.raises(StoreError, match=r"whose model had another 'transformer\.wte\.weight' after 0 steps"):
        other.train()


def test_a_resumed_training_needs_the_memory_of_its_optimiser(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    record(gpt2().float(), tmp_path, **options)
    resumed = make_trainer(gpt2().float(), tmp_path, **options)
    recording.attach(resumed, tmp_path / "again")
    with pytest.raises(PlanError, match="resumes at step 4 without what its optimiser remembered"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))


def test_of_a_fine_tune_the_adapter_is_recorded(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    model = get_peft_model(gpt2().float(), config)
    start = deepcopy(model)
    _, run = record(model, tmp_path, gradient_accumulation_steps=2)
    assert all("lora_" in name for group in run.groups for name in group)
    assert_close(repeat(run, start), run.state(len(run.steps)))


class _Images(torch.utils.data.Dataset[Any]):
    """Samples that are no dicts, read several at a time."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return rows()[index]["input_ids"]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def pad_lists(samples: list[list[int]]) -> dict[str, Tensor]:
    return pad([{"input_ids": sample} for sample in samples])


def test_samples_may_be_anything_that_the_collator_takes(tmp_path: Path) -> None:
    trainer, run = record(gpt2().float(), tmp_path, data=_Images(), collate=pad_lists)
    assert_close(repeat(run, gpt2().float()), run.state(len(run.steps)))
    assert trainer.data_collator is pad_lists


def test_a_training_that_is_stopped_within_an_accumulation_ends_with_its_last_whole_step(tmp_path: Path) -> None:
    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = state.global_step == 2

    model = gpt2().float()
    trainer = make_trainer(model, tmp_path, gradient_accumulation_steps=2)
    run = recording.attach(trainer, tmp_path / "run")
    trainer.add_callback(Stops())
    trainer.train()
    assert len(run.finish().steps) == 2
    assert_close(repeat(run.finish(), gpt2().float()), dict(model.named_parameters()))


def test_the_recording_ends_with_the_last_step_not_with_the_best(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the worst, which is not the last
        "eval_dataset": rows(4),
    }
    model = gpt2().float()
    with pytest.warns(ReliabilityWarning, match=r"ends with step 5, the last one, .* best checkpoint, checkpoint-1:"):
        _, run = record(model, tmp_path, **options)
    end = run.state(5)
    assert_close(repeat(run, gpt2().float()), end)
    assert any(not torch.equal(end[name], parameter) for name, parameter in model.named_parameters())


class _Halves(TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        if state.global_step == 2:
            model.transformer.wte.weight.grad.mul_(0.5)


def test_gradients_that_a_callback_changes_are_refused_in_that_step(tmp_path: Path) -> None:
    trainer = make_trainer(gpt2().float(), tmp_path)
    trainer.add_callback(_Halves())
    recording.attach(trainer, tmp_path / "run")
    with pytest.raises(
        PlanError, match=r"the gradient of 'transformer\.wte\.weight' was changed .* step 3: .* callback"
    ):
        trainer.train()


def test_an_optimiser_that_is_not_of_torch_is_replayed_from_what_was_attached(tmp_path: Path) -> None:
    model = gpt2().float()
    trainer = make_trainer(model, tmp_path, optim="adafactor")
    run = recording.attach(trainer, tmp_path / "run")
    trainer.train()
    sources = Sources.by_label([index % 3 for index in range(ROWS)])
    store = simulate(task(model), rows(), sources, run=run, collate_fn=run.collate_fn, progress=False)
    assert store.manifest.request.recording == run.finish().sha256
    with pytest.raises(StoreError, match=r"optimiser transformers\.optimization\.Adafactor, .* give its class"):
        Recording(run.folder)


def test_a_second_training_is_refused_until_another_recording_is_attached(tmp_path: Path) -> None:
    trainer, _ = record(gpt2().float(), tmp_path)
    with pytest.raises(StoreError, match="holds a finished recording"):
        trainer.train()
    run = recording.attach(trainer, tmp_path / "second")
    assert repr(run) == f"TrainerRecorder({str(tmp_path / 'second')!r}, not begun)"
    with pytest.raises(PlanError, match=r"nothing is recorded in .*second yet: call trainer\.train\(\) first"):
        run.finish()
    trainer.train()
    assert len(run.finish().steps) == 5
    assert [path.name for path in run.paths] == ["checkpoint-000005.safetensors"]
    run.detach()
    trainer.train()  # as before it was attached


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"label_smoothing_factor": 0.1}, "it smooths labels"),
        ({"neftune_noise_alpha": 5.0}, "NEFTune adds noise"),
        ({"auto_find_batch_size": True}, "may start again after some steps"),
        ({"torch_compile": True}, "draws its dropout in another way"),
    ],
)
def test_settings_that_cannot_be_repeated_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    trainer = make_trainer(gpt2().float(), tmp_path, **options)
    with pytest.raises(PlanError, match=f"the run of this Trainer cannot be recorded: .*{reason}"):
        recording.attach(trainer, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("world_size", "several processes train together"),
        ("n_gpu", "split over several GPUs"),
        ("fp16", "scales losses, and skips steps that overflow: use bf16=True"),
    ],
)
def test_machines_that_cannot_be_repeated_are_refused(setting: str, reason: str, tmp_path: Path) -> None:
    trainer = make_trainer(gpt2().float(), tmp_path)
    trainer.args = type("Arguments", (), {**vars(trainer.args), "world_size": 1, "n_gpu": 1, setting: 2})()
    with pytest.raises(PlanError, match=reason):
        recording.attach(trainer, tmp_path / "run")


@pytest.mark.parametrize("setting", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_sharded_trainings_are_refused(setting: str, tmp_path: Path) -> None:
    trainer = make_trainer(gpt2().float(), tmp_path)
    setattr(trainer, setting, True)
    with pytest.raises(PlanError, match=r"(DeepSpeed trains|FSDP shards) the model: train without it"):
        recording.attach(trainer, tmp_path / "run")


def masked(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad(samples)
    return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.5, -100)}


def test_data_that_change_or_have_no_indices_are_refused(tmp_path: Path) -> None:
    changing = make_trainer(gpt2().float(), tmp_path, collate=masked)
    state = torch.get_rng_state()
    with pytest.raises(DataError, match=r"example \d+ of the train_dataset changes each time it is read"):
        recording.attach(changing, tmp_path / "run")
    assert torch.equal(state, torch.get_rng_state())

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows())

    with pytest.raises(DataError, match="a Stream, has no length, and its examples no indices"):
        recording.attach(make_trainer(gpt2().float(), tmp_path, data=Stream()), tmp_path / "run")
    with pytest.raises(PlanError, match="attach takes a Trainer of transformers, got a str"):
        recording.attach("trainer", tmp_path / "run")


def test_a_loader_of_other_data_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(rows(), batch_size=2, collate_fn=pad)  # type: ignore[arg-type]

    trainer = make_trainer(gpt2().float(), tmp_path, kind=Own)
    recording.attach(trainer, tmp_path / "run")
    with pytest.raises(DataError, match=r"has no indices.*build the loader of get_train_dataloader from self\.train_"):
        trainer.train()
