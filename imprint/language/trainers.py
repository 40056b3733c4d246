"""Reads the settings of a Trainer of transformers: whether its run can be recorded, and what its losses divide by."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from imprint.batches import length
from imprint.compat import uncompiled
from imprint.data import Data
from imprint.errors import DataError, PlanError
from imprint.language.data import IGNORED
from imprint.language.presets import causal
from imprint.recording.seeding import keep_random_state


def refuse_settings(trainer: Any) -> None:
    """Refuse a Trainer whose run cannot be repeated step by step; say what to change."""
    args = trainer.args
    for given, why in (
        (args.world_size > 1, "several processes train together (args.world_size > 1): train in one"),
        (args.n_gpu > 1, "batches are split over several GPUs: make one visible (CUDA_VISIBLE_DEVICES=0)"),
        (getattr(trainer, "is_deepspeed_enabled", False), "DeepSpeed trains the model: train without it"),
        (getattr(trainer, "is_fsdp_enabled", False), "FSDP shards the model: train without it"),
        (
            args.fp16 or getattr(trainer.accelerator, "scaler", None) is not None,
            "fp16=True scales losses, and skips steps that overflow: use bf16=True, or float32",
        ),
        (args.label_smoothing_factor, "it smooths labels: set label_smoothing_factor=0"),
        (
            trainer.neftune_noise_alpha is not None,
            "NEFTune adds noise that the trained model no longer has: leave out neftune_noise_alpha",
        ),
        (
            args.torch_compile or uncompiled(trainer.model) is not trainer.model,
            "a compiled model draws its dropout in another way: leave out torch_compile",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size may start again after some steps: set per_device_train_batch_size",
        ),
    ):
        if given:
            raise PlanError(f"the run of this Trainer cannot be recorded: {why}.")


def refuse_data(dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
    """Refuse training data whose examples have no indices, or change each time they are read."""
    if dataset is None:
        raise DataError("the Trainer has no train_dataset: there is nothing to record.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"the Trainer's train_dataset, a {type(dataset).__name__}, has no length, and its examples no indices: "
            "give a map-style dataset (with len and [index]), such as the list of its samples."
        )
    with keep_random_state():
        changing = Data(dataset, device="cpu", collate_fn=collate).changing_example()
    if changing is not None:
        raise DataError(
            f"example {changing} of the train_dataset changes each time it is read, so that the run cannot be "
            "repeated: draw random augmentations and masks once, before training."
        )


def count_normaliser(trainer: Any, batch: Any, items: Any) -> float:
    """Return what the sum of the losses in a micro-batch is divided by.

    items: how many tokens (or labels) all micro-batches of the step have, where the Trainer has counted them. Models
        that take it divide by it; of others the Trainer divides the mean of a micro-batch by their number.
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        takes_items = trainer.model_accepts_loss_kwargs and items is not None
        scaled = takes_items or trainer.compute_loss_func is not None
    if scaled and items is None:
        raise PlanError(
            "what the Trainer's loss is divided by is not known: it is told how many items a step has only if batches "
            'have the column "labels".'
        )
    if scaled:
        return float(items)
    accumulated = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
    return float(_count_items(trainer.model, batch) * accumulated)


def _count_items(model: nn.Module, batch: Any) -> int:
    """Count what a model takes the mean over: the labels to learn, or the rows where labels are no classes."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return length(batch)
    return int((_predicted(model, labels) != IGNORED).sum())


def _predicted(model: nn.Module, labels: Tensor) -> Tensor:
    """Return the labels that are predicted: a causal language model does not predict the first token of a row."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_causal = any(kind.__name__ in names for kind in type(causal(model)).__mro__)
    return labels[..., 1:] if is_causal and labels.dim() > 1 else labels
