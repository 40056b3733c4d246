"""Scores by products of gradients at one model: the rivals that look into the model and need no solver.

`gradient_products` sums over sources first, which takes the memory of a gradient for each source. `multiply_gradients`
keeps a gradient for each example. With G the gradients of the examples' log-likelihoods, (examples, parameters), and g
that of a query's measurement, its `Products` are

    dot product   g Gᵀ
    cosine        the same of unit vectors
    TRAK          g Gᵀ (G Gᵀ + λI)⁻¹, which is g (GᵀG + λI)⁻¹ Gᵀ: TRAK's formula without the random projection that
                  approximates it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imprint.data import Data, query_batches
from imprint.readout.kernels import gradient_scores, query_gradients
from imprint.simulation.derivatives import gradient
from imprint.sources import Members, Sources
from imprint.task import Functional, Parameters, Task
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


@dataclass(frozen=True)
class Products:
    """Products of gradients: of the queries with the examples, (queries, examples), and of the examples, (n, n).

    lengths: of the queries' gradients.
    """

    dot: Tensor
    examples: Tensor
    lengths: Tensor

    @property
    def cosine(self) -> Tensor:
        """The cosine, (queries, examples); 0 where a gradient vanishes."""
        lengths = self.lengths[:, None] * self.examples.diagonal().clamp(min=0).sqrt()
        return torch.where(lengths > 0, self.dot / lengths, 0.0)

    def trak(self, damping: float) -> Tensor:
        """Compute TRAK's scores, (queries, examples), with λ relative to the mean squared length of a gradient."""
        level = damping * self.examples.diagonal().mean()
        eye = torch.eye(len(self.examples), dtype=torch.float64, device=self.examples.device)
        found: Tensor = torch.linalg.solve(self.examples.double() + level * eye, self.dot.double().T).T.to(self.dot)
        return found


def multiply_gradients(
    task: Task, state: Mapping[str, Tensor], data: Any, queries: Any, *, batch_size: int = 16
) -> Products:
    """Compute the products of gradients at one model: of minus the examples' losses, and of the queries' measurements.

    A score is positive where more weight of the example raises the measurement of the query. All gradients of the
    examples are held at once.
    """
    complete = task.complete(dict(state))
    with task.evaluating():
        asked = _gradients(*task.at(complete), Data(queries, device=task.device, batch_size=batch_size))
        learning = task.at(complete, measure=lambda model, batch: -task.loss(model, batch))
        learnt = _gradients(*learning, Data(data, device=task.device, batch_size=batch_size))
    return Products(asked @ learnt.T, learnt @ learnt.T, asked.norm(dim=1))


def _gradients(functional: Functional, theta: Parameters, data: Data) -> Tensor:
    """Compute the gradient of each measurement as a row, (examples, parameters)."""
    found = []
    for indices, batch in data.batches():
        rows = query_gradients(functional, theta, batch, len(indices), vectorise=True)
        found.append(torch.cat([rows[name].flatten(1).detach() for name in theta], 1))
    return torch.cat(found)


def sum_by_source(scores: Tensor, members: Sequence[Members]) -> Tensor:
    """Sum the scores of examples over each source, (queries, sources)."""
    return torch.stack([scores[:, torch.from_numpy(each)].sum(1) for each in members], 1)
