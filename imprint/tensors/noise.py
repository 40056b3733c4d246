"""Draws fixed pseudo-random numbers, and moves parameters by them.

The numbers never change, in any version: stores keep what a task computes at parameters that were moved by them.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from imprint.task import Parameters

_LENGTH = 65_537  # a prime, so that the numbers do not repeat with the rows of a matrix


def draw_noise(sequence: int, count: int, start: int = 0) -> Tensor:
    """Return `count` numbers of a fixed sequence, between −√3 and √3 and of variance 1, beginning at `start`."""
    twice, start = _sequence(sequence), start % _LENGTH
    if count <= _LENGTH:
        return twice[start : start + count].clone()
    return twice[start : start + _LENGTH].repeat(-(-count // _LENGTH))[:count]


def move_parameters(theta: Parameters, distance: float, sequence: int) -> Parameters:
    """Move every parameter by noise.

    distance: relative to the root mean square of each tensor, or of all of them for a tensor of zeros.
    """
    norms = {name: float(torch.linalg.vector_norm(p, dtype=torch.float64)) for name, p in theta.items()}
    overall = math.sqrt(sum(norm**2 for norm in norms.values()) / sum(p.numel() for p in theta.values())) or 1.0
    moved = {}
    for index, (name, p) in enumerate(theta.items()):
        size = norms[name] / math.sqrt(max(1, p.numel())) or overall
        numbers = draw_noise(sequence, p.numel(), 7919 * index).to(p)
        moved[name] = numbers.mul_(distance * size).reshape(p.shape).add_(p)
    return moved


@cache
def _sequence(number: int) -> Tensor:
    """Return a sequence twice over, made of raw bits: NumPy promises to keep their stream, unlike distributions."""
    bits = np.random.PCG64(number).random_raw(_LENGTH)
    numbers = ((bits >> np.uint64(11)) * 2.0**-52 - 1.0) * math.sqrt(3)
    return torch.from_numpy(np.tile(numbers.astype(np.float32), 2))
