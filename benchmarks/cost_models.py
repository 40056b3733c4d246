"""Makes the small language models whose costs are measured, their data, and trainings that are recorded."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import imprint
from imprint import language
from imprint.advice.shapes import Shape
from imprint.data import Data

Columns = dict[str, Tensor]


def build(shape: Shape, device: torch.device) -> Any:
    """A GPT-2 of a shape, with random weights and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    head_width = 64 if shape.width >= 512 else 32
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.length,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=max(1, shape.width // head_width),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = GPT2LMHeadModel(config)
    return model.to(device)


def tokens(shape: Shape, count: int, device: torch.device) -> Columns:
    """Random windows, in the columns that `language.task` takes."""
    ids = torch.randint(0, shape.vocabulary, (count, shape.length), generator=torch.Generator().manual_seed(1))
    weights = torch.ones(ids.shape)
    weights[:, 0] = 0
    return {"input_ids": ids.to(device), "weights": weights.to(device)}


@dataclass(frozen=True)
class Trial:
    """A small training: its shape, examples, batch, steps and device."""

    shape: Shape
    examples: int
    batch: int
    steps: int
    device: torch.device

    def batches(self) -> list[Tensor]:
        """The same examples in every training, epoch after epoch in order."""
        order = torch.arange(self.steps * self.batch) % self.examples
        return list(order.split(self.batch))

    def train(self, task: imprint.Task, model: nn.Module, folder: Path | None = None) -> imprint.Recording | None:
        """Train a model with Adam, with a recorder if there is a folder for it."""
        data = Data(tokens(self.shape, self.examples, self.device), device=self.device)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(trained, lr=1e-4)
        run = None if folder is None else imprint.RunRecorder(folder, model, optimiser, n=self.examples)
        model.train()
        for indices in self.batches():
            if run is None:
                optimiser.zero_grad()
                task.loss(model, data.gather(indices)).mean().backward()
                optimiser.step()
                continue
            with run.step(indices) as step:
                optimiser.zero_grad()
                step.backward(task.loss(model, data.gather(indices)).mean())
                optimiser.step()
        return None if run is None else run.finish()


def private_task(model: Any, parameters: str | None = None) -> imprint.Task:
    """The task of a copy of a model, so that trials do not meet."""
    return language.task(copy.deepcopy(model), parameters=parameters)
