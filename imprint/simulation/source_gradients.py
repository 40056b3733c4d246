"""The gradient ∇ℓ_b of each source's own examples, of many sources at once where they are small."""

import zlib

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from imprint.batches import is_columnar, map_tensors
from imprint.simulation.derivatives import gradient
from imprint.simulation.descent import Descent
from imprint.sources import Sources
from imprint.task import Batch, Parameters
from imprint.tensors.vectors import add_scaled_, row

_OWN = 1 << 30  # in place of the number of a part: a source's own members
_STACKED_MEMBERS = 32  # sources up to this size are differentiated together; larger ones fill the machine alone


def source_gradients(descent: Descent, theta: Parameters, step: int, *, per_row: bool = False) -> Parameters:
    """Return ∇ℓ_b of each source's members (or an unbiased sample of them), one row per source.

    `theta` is shared by all sources, or has a row for each (`per_row`).
    """
    members = [_choose_members(descent, index, step) for index in range(len(descent.sources))]
    if per_row:  # the lighter side of a pair has the same sources, and the same samples of them, again
        members *= next(iter(theta.values())).shape[0] // len(members)
    if descent.vectorise and max(len(chosen) for chosen, _ in members) <= _STACKED_MEMBERS:
        stacked = _stacked_gradients(descent, theta, members, step, per_row)
        if stacked is not None:
            return stacked
    rows = []
    for index, (chosen, factor) in enumerate(members):
        at = row(theta, index) if per_row else theta
        total = {name: torch.zeros_like(p) for name, p in at.items()}
        for piece in torch.split(chosen, descent.data.batch_size):
            weights = torch.full((len(piece),), factor, dtype=descent.dtype, device=descent.data.device)
            piece_of = gradient(descent.at_part(step, _OWN), at, weights, descent.data.gather(piece), plain=True)[0]
            add_scaled_(total, piece_of, 1.0)
        rows.append(total)
    return {name: torch.stack([total[name] for total in rows]) for name in theta}


def choose_heaviest(descent: Descent, count: int) -> list[Sources]:
    """Choose sources that take the most memory: so many large ones, and so many of those done together."""
    sample = descent.plan.source_sample
    sizes = [size if sample is None else min(size, sample) for size in descent.sources.sizes]
    together = [index for index, size in enumerate(sizes) if size <= _STACKED_MEMBERS]
    choices = [descent.sources.largest(count)]
    if not descent.is_full_batch and 0 < len(together) < len(sizes):
        choices.append(descent.sources.select(together).largest(count))
    return choices


def _choose_members(descent: Descent, index: int, step: int) -> tuple[Tensor, float]:
    """Choose the members that stand for a source in a step; return them with the factor that makes their sum unbiased.

    Steps go through all members in turn, shuffled anew each time: what one step leaves out comes soon after, so
    that the noise of sampling hardly adds up over a path. What is drawn, here or as dropout, does not depend on the
    order in which members were given: a store does not keep it.
    """
    members, sample = np.sort(descent.sources.members[index]), descent.plan.source_sample  # draws follow the order
    if sample is None or len(members) <= sample:
        return torch.from_numpy(members), 1.0
    identity = zlib.crc32(descent.sources.ids[index].encode())  # not the row: the draw must not depend on the order
    first, start = divmod(step * sample, len(members))
    passes = range(first, first + 1 + (start + sample - 1) // len(members))
    order = [np.random.default_rng([descent.plan.seed, each, identity]).permutation(members) for each in passes]
    return torch.from_numpy(np.concatenate(order)[start : start + sample]), len(members) / sample


def _stacked_gradients(
    descent: Descent, theta: Parameters, members: list[tuple[Tensor, float]], step: int, per_row: bool
) -> Parameters | None:
    """Return the gradients of all sources at once, padded with weight 0; None where batches are not plain columns."""
    rows, width = len(members), max(len(chosen) for chosen, _ in members)
    examples = torch.zeros(rows, width, dtype=torch.int64)
    weights = torch.zeros(rows, width, dtype=descent.dtype)
    for index, (chosen, factor) in enumerate(members):
        examples[index, : len(chosen)], examples[index, len(chosen) :] = chosen, chosen[0]
        weights[index, : len(chosen)] = factor
    batch = descent.data.gather(examples.flatten())
    if not is_columnar(batch, rows * width):
        return None
    batch = map_tensors(lambda t: t.reshape(rows, width, *t.shape[1:]), batch)

    task = descent.at_part(step, _OWN)

    def one(theta: Parameters, weights: Tensor, batch: Batch) -> Parameters:
        return gradient(task, theta, weights, batch)[0]

    each = vmap(one, in_dims=(0 if per_row else None, 0, 0), randomness=descent.randomness)
    return each(theta, weights.to(descent.data.device), batch)
