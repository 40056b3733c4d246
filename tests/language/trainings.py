"""Tiny runs of a Trainer: a few steps of GPT-2 on texts of different lengths."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from tests.language.models import VOCABULARY

ROWS = 11


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Token lists of 3 to 9 tokens, as a tokenizer gives them, with a column that no model takes."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
    ids = [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": each, "text": "not a column of the model"} for each in ids]


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collator that pads on the right, to the longest row of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
        mask[row, : len(sample["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_trainer(model: Any, folder: Path, kind: Any = Trainer, collate: Any = pad, **options: Any) -> Any:
    """A Trainer on the CPU: batches of 2, AdamW with weight decay, a falling learning rate, clipping at 1."""
    settings: dict[str, Any] = {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-4,  # or the biases of keys, whose gradients are 0, follow rounding errors
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    data, evaluated = options.pop("data", None) or rows(), options.pop("eval_dataset", None)
    optimisers = (options.pop("optimiser", None), None)
    arguments = TrainingArguments(output_dir=str(folder / "trainer"), **{**settings, **options})
    return kind(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=evaluated,
        data_collator=collate,
        optimizers=optimisers,
    )
