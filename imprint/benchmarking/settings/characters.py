"""Loads tiny Shakespeare as characters, with a small GPT of plain torch: no tokenizer and no other library is needed.

Sources are the 24 segments of `settings.shakespeare`, queries are held-out passages, and F is the loss of a passage per
character.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint.benchmarking.settings.shakespeare import Columns, Windows, cut_windows, read_speeches
from imprint.data import Data
from imprint.evaluation.together import Together
from imprint.evaluation.training import Training
from imprint.task import Task

LENGTH, PASSAGES = 128, 5
VOCABULARY = 65
TRAINING = Training(
    epochs=3, lr=1e-3, batch_size=64, optimiser="adam", betas=(0.9, 0.99), warmup=20, schedule="cosine", drop_last=True
)


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT: 0.8 million parameters by default."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Build a freshly initialised model."""
        return CharacterGPT(self)


class CharacterGPT(nn.Module):
    """Predicts the next character at each position, as logits of shape (windows, length, characters)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(LENGTH, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(_Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                depth = 2 * shape.layers if name.endswith("out.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[-1], device=ids.device)
        hidden = self.dropout(self.characters(ids) + self.positions(places))
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class _Block(nn.Module):
    """Attention, then a perceptron, each added to the stream. Attention is written out: it has all derivatives."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.attend_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.widen_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attend_out(self._attention(self.first(hidden))))
        wide = F.gelu(self.widen(self.second(hidden)), approximate="tanh")
        after: Tensor = hidden + self.dropout(self.widen_out(wide))
        return after

    def _attention(self, hidden: Tensor) -> Tensor:
        windows, length, width = hidden.shape
        split = self.attend(hidden).view(windows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        asked, keys, values = split[0], split[1], split[2]
        weights = asked @ keys.transpose(-1, -2) / math.sqrt(keys.shape[-1])
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        mixed = weights.masked_fill(later, -math.inf).softmax(-1) @ values
        joined: Tensor = mixed.transpose(1, 2).reshape(windows, length, width)
        return joined


def task(model: nn.Module) -> Task:
    """Build the task: the loss of a window is the mean over its characters, and F the loss of a passage."""

    def outputs(model: nn.Module, batch: Columns) -> Tensor:
        logits: Tensor = model(batch["input_ids"])[:, :-1]
        return logits

    def output_loss(logits: Tensor, batch: Columns) -> Tensor:
        losses = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
        return (batch["weights"][:, 1:] * losses).sum(1)

    return Task(model, outputs=outputs, output_loss=output_loss)


def together(train: Columns, training: Training, device: torch.device | str, shape: Shape | None = None) -> Together:
    """Return what trains these models, many at once or one that is recorded."""
    return Together((shape or Shape()).build, task, Data(train, device=torch.device(device)), training)


def load(windows: int | None = None, where: float = 0.5) -> Windows:
    """Load the text as windows of characters.

    windows: how many windows of each segment are used; None for all.
    where: the position of a held-out window within its stretch, from 0 to 1; other values give other passages.
    """
    text = read_speeches()
    known = sorted(set(text))
    numbers = {character: number for number, character in enumerate(known)}

    def decode(rows: list[list[int]]) -> list[str]:
        return ["".join(known[number] for number in row) for row in rows]

    ids = torch.tensor([numbers[character] for character in text])
    return cut_windows(ids, decode, LENGTH, PASSAGES, where, windows=windows)
