"""Measures a classifier's outputs by name, such as the margin of the right class, and checks what measurements return.

`Task` offers these under `measure="margin"` and so on.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from imprint.batches import Batch
from imprint.errors import TaskError

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def logit(outputs: Tensor, classes: Tensor) -> Tensor:
    """Return the output of the right class."""
    return outputs.gather(-1, classes.unsqueeze(-1)).squeeze(-1)


def logprob(outputs: Tensor, classes: Tensor) -> Tensor:
    """Return log p of the right class."""
    return logit(outputs.log_softmax(-1), classes)


def margin(outputs: Tensor, classes: Tensor) -> Tensor:
    """Return log p − log(1 − p) of the right class, without forming p."""
    right = torch.arange(outputs.shape[-1], device=outputs.device) == classes.unsqueeze(-1)
    return logit(outputs, classes) - outputs.masked_fill(right, -torch.inf).logsumexp(-1)


MEASURES = {"margin": margin, "logprob": logprob, "logit": logit}


def find_targets(batch: Batch) -> Tensor | None:
    """Return the second element of a batch, or its `labels`; None where it has neither."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in _TARGET_KEYS if isinstance(batch.get(key), Tensor)), None)
    if isinstance(batch, Sequence) and len(batch) > 1 and isinstance(batch[1], Tensor):
        return batch[1]
    return None


def require_targets(batch: Batch) -> Tensor:
    """Return the targets of a batch, or say where they are looked for."""
    if (found := find_targets(batch)) is not None:
        return found
    raise TaskError(
        "a measure by name needs the right class of each query, as the second element of a batch or under one of "
        f"the keys {', '.join(_TARGET_KEYS)}. For other batches give measure=f(model, batch)."
    )


def require_one_each(values: Tensor, count: int, what: str, unit: str) -> Tensor:
    """Refuse anything but one real number for each example or query."""
    if isinstance(values, Tensor) and tuple(values.shape) == (count,):
        if not values.is_floating_point():
            raise TaskError(f"{what} must return real numbers, one per {unit}; it returned {values.dtype}.")
        return values
    got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
    hint = ' (is reduction="none" missing?)' if isinstance(values, Tensor) and values.dim() == 0 else ""
    raise TaskError(f"{what} must return one value per {unit}, shape ({count},); it returned {got}{hint}.")
