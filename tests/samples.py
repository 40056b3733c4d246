"""The same few samples as columns and as a dataset."""

from collections import namedtuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

CPU = torch.device("cpu")
X, Y = torch.arange(21.0).reshape(7, 3), torch.arange(7)
Pair = namedtuple("Pair", ["x", "y"])


class Squares(Dataset[tuple[Tensor, int]]):
    """A map-style dataset that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return X[index], index
