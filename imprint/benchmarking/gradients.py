"""Scores sources by products of gradients at one model, the plainest method that looks into the model at all."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from imprint.data import Data, query_batches
from imprint.readout.kernels import gradient_scores, query_gradients
from imprint.simulation.derivatives import gradient
from imprint.sources import Sources
from imprint.task import Parameters, Task
from imprint.tensors.vectors import add_scaled_


def gradient_products(
    task: Task, state: Mapping[str, Tensor], data: Data, sources: Sources, queries: Any, *, batch_size: int = 64
) -> Tensor:
    """Return −∇F(q)·Σ ∇ℓ(i) over the examples of each source, shape (queries, sources).

    It is the change of F by one step of gradient descent on the source alone, per unit of its length.
    """
    functional, theta = task.at(task.complete(dict(state)))
    dtype = next(iter(theta.values())).dtype
    with task.evaluating():
        rows = [_sum_gradients(functional, theta, data, members, dtype) for members in sources.members]
        pulls = {name: torch.stack([row[name] for row in rows]) for name in theta}
        batches = query_batches(queries, device=task.device, batch_size=batch_size, collate_fn=None)
        parts = [
            gradient_scores(pulls, query_gradients(functional, theta, batch, count, vectorise=True))
            for count, batch in batches
        ]
    return -torch.cat(parts, dim=1).T.detach().double().cpu()


def _sum_gradients(functional: Any, theta: Parameters, data: Data, members: Any, dtype: torch.dtype) -> Parameters:
    total = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for piece in torch.from_numpy(members).split(data.batch_size):
        weights = torch.ones(len(piece), dtype=dtype, device=data.device)
        add_scaled_(total, gradient(functional, theta, weights, data.gather(piece), plain=True)[0], 1.0)
    return total
