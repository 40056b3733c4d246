"""Measures how well wrong labels are found by self-influence, always compared with the plain loss of each example."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from imprint.data import Collate, Data
from imprint.errors import DataError
from imprint.evaluation.matching import rounding_of
from imprint.evaluation.metrics import Metric
from imprint.plan import State
from imprint.simulation.states import States
from imprint.statistics import Array, Estimate, Flags, area_difference, area_estimate, is_constant
from imprint.task import Better, Task

_NAN = float("nan")


@dataclass(frozen=True)
class MislabelDetection:
    """Areas under the ROC curve of self-influence and of the plain loss, on the same examples.

    ahead: how much larger the area of self-influence is; negative if plain loss finds wrong labels better.
    """

    influence: Metric
    loss: Metric
    ahead: Estimate

    @property
    def better(self) -> str:
        """Which finds wrong labels better, "self-influence" or "plain loss"; "neither" within the noise."""
        if np.isnan(self.ahead.low) or self.ahead.low <= 0 <= self.ahead.high:
            return "neither"
        return "self-influence" if self.ahead.value > 0 else "plain loss"

    def __str__(self) -> str:
        verdict = {"neither": "neither is better beyond the noise"}.get(self.better, f"{self.better} is better")
        return (
            f"{self.influence}\n{self.loss}\n{verdict}: self-influence minus plain loss {self.ahead.format(3)}\n"
            "plain loss costs one forward pass per example and no simulation"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, None for what is undefined."""
        ahead = {
            key: None if np.isnan(getattr(self.ahead, key)) else getattr(self.ahead, key)
            for key in ("value", "low", "high")
        }
        return {
            "influence": self.influence.to_json(),
            "loss": self.loss.to_json(),
            "ahead": ahead,
            "better": self.better,
        }


class Suspect(NamedTuple):
    """A training example: its influence on itself and its loss, ranked by each; 1 is the most suspect."""

    example: int
    rank: int
    self_influence: float
    loss: float
    rank_by_loss: int


@dataclass(frozen=True)
class Suspects:
    """Training examples in the order of suspicion by self-influence, beside their plain loss.

    self_influence: s(b, b) of each, as `imprint.self_influence` returns it, divided by N: what the example changes in
        its own measurement by being there.
    """

    rows: tuple[Suspect, ...]
    mean_loss: float

    @classmethod
    def rank(cls, self_influence: Tensor, losses: Tensor, better: Better, n: int) -> "Suspects":
        """Rank examples: those that lower their own loss most come first, or raise their own margin most."""
        if better is None:
            raise DataError(
                "it is unknown whether high or low values of this measurement are good, so that nothing can be "
                'suspected by them: use the loss, or a measurement by name, such as "margin".'
            )
        if self_influence.dim() != 1 or losses.shape != self_influence.shape:
            shapes = f"{tuple(self_influence.shape)} and {tuple(losses.shape)}"
            raise DataError(f"expected one self-influence and one loss per example, got {shapes}.")
        own, loss = self_influence.double() / n, losses.double()
        if not bool((own.isfinite() & loss.isfinite()).all()):
            raise DataError("self-influence and losses must be finite.")
        order = (own if better == "higher" else -own).argsort(descending=True, stable=True)
        place = loss.argsort(descending=True, stable=True).argsort()
        rows = (
            Suspect(int(example), rank, float(own[example]), float(loss[example]), int(place[example]) + 1)
            for rank, example in enumerate(order, 1)
        )
        return cls(tuple(rows), float(loss.mean()))

    @property
    def by_loss(self) -> list[Suspect]:
        """The same examples, those with the largest loss first."""
        return sorted(self.rows, key=lambda row: row.rank_by_loss)

    def count_common(self, most: int) -> int:
        """Count the examples that are among the first by both."""
        return sum(row.rank_by_loss <= most for row in self.rows[:most])

    def to_json(self, most: int) -> dict[str, Any]:
        """Return plain JSON values: the first examples by each order."""
        return {
            "suspects": [row._asdict() for row in self.rows[:most]],
            "by_loss": [row.example for row in self.by_loss[:most]],
            "common": self.count_common(most),
            "mean_loss": self.mean_loss,
        }


def mislabel_auc(
    self_influence: Tensor | Array, mislabelled: Tensor | Array, losses: Tensor | Array, better: Better = "lower"
) -> MislabelDetection:
    """Measure how well self-influence finds wrong labels, and how well the plain loss of each example does.

    mislabelled: a boolean for each example.
    losses: the losses of the training examples under the trained model, as `example_losses` returns them. This baseline
        costs one forward pass, and is often the better detector.
    better: whether lower or higher values of the measurement are better. Wrong labels lower their own loss most, and
        raise their own margin ("higher") most.
    """
    if better not in ("lower", "higher"):
        raise DataError(f'better must be "lower" or "higher", whichever the measurement is; got {better!r}.')
    influence, loss = (torch.as_tensor(given).detach().cpu() for given in (self_influence, losses))
    if better == "lower":
        influence = -influence
    first = detection_auc(influence, mislabelled, "mislabel detection AUC, self-influence")
    second = detection_auc(loss, mislabelled, "mislabel detection AUC, plain loss")
    ahead = Estimate(_NAN, _NAN, _NAN)
    if not (first.undefined or second.undefined):
        flagged = torch.as_tensor(mislabelled).cpu().bool().numpy()
        ahead = area_difference(influence.double().numpy(), loss.double().numpy(), flagged)
    return MislabelDetection(first, second, ahead)


def detection_auc(
    suspicion: Tensor | Array, mislabelled: Tensor | Array, name: str = "mislabel detection AUC"
) -> Metric:
    """Compute the area under the ROC curve of any suspicion, which is larger where a label is more suspect."""
    given, labels = torch.as_tensor(suspicion).detach().cpu(), torch.as_tensor(mislabelled).cpu()
    if given.dim() != 1 or labels.shape != given.shape:
        shapes = f"{tuple(given.shape)} and {tuple(labels.shape)}"
        raise DataError(f"expected one value and one label per example, got {shapes}.")
    flagged: Flags = labels.bool().numpy()
    values = given.double().numpy()
    if not np.isfinite(values).all():
        raise DataError("self-influence and losses must be finite.")
    if flagged.all() or not flagged.any():
        raise DataError("the area under the curve needs some mislabelled and some correctly labelled examples.")
    if bool(is_constant(values, rounding_of(given))):
        return Metric(name, Estimate(_NAN, _NAN, _NAN), undefined=len(flagged))
    return Metric(name, area_estimate(values, flagged))


@torch.inference_mode(False)
def example_losses(
    task: Task,
    data: Any,
    *,
    checkpoint: State | None = None,
    batch_size: int = 1024,
    collate_fn: Collate | None = None,
) -> Tensor:
    """Compute the training loss of each example under a trained model, shape (examples,).

    The largest losses are the suspects by plain loss.

    checkpoint: the trained weights, in any form that `simulate` accepts; None if the task's model is trained.
    """
    examples = Data(data, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    functional, theta = task.at(States(task, None if checkpoint is None else [checkpoint])[0])
    with torch.no_grad(), task.evaluating():
        parts = [functional.losses(theta, batch, len(indices)).cpu() for indices, batch in examples.batches()]
    return torch.cat(parts)
