"""Scores by EK-FAC influence functions, computed by kronfluence, for a language model that was fine-tuned with LoRA.

The adapter's Linear layers (lora_A and lora_B) are what the influence of an example goes through, and every layer is a
block of its own, as kronfluence does it. Columns are those of `imprint.language`: `input_ids` and `weights`, both
(rows, length), where weights[i, t] is the weight of predicting token t of row i from the tokens before it.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint.benchmarking.ekfac import Factors, Task

Columns = dict[str, Tensor]


class EkFac:
    """Scores queries at a PEFT model with a LoRA adapter, which stays as it is.

    batch: how many examples, or queries, go through the model at once.
    folder: where kronfluence keeps factors and scores; those of an earlier call are overwritten.
    """

    def __init__(
        self, model: Any, train: Columns, *, folder: str | Path, device: str = "cpu", batch: int = 16, seed: int = 0
    ) -> None:
        self._examples = len(train["input_ids"])
        task = _LanguageModelling(_adapter_layers(model), seed)
        known = (copy.deepcopy(model), task, _Rows(train), Path(folder), torch.device(device), batch)
        self._factors = Factors(*known)

    @property
    def mean_eigenvalue(self) -> float:
        """The mean eigenvalue of the curvature of one example's loss, over all parameters: a unit for dampings."""
        return self._factors.mean_eigenvalue

    def score(self, queries: Columns, damping: float | None = None) -> Tensor:
        """Return the predicted rise of each query's log-likelihood when an example counts twice, (queries, examples).

        damping: what is added to every eigenvalue; None takes a tenth of the mean eigenvalue of each layer.
        """
        found = -self._factors.score(_Rows(queries), len(queries["input_ids"]), damping).double() / self._examples
        if not bool(found.isfinite().all()):
            raise ValueError(
                "EK-FAC's scores are not finite: where no gradient reaches a layer, as with an adapter that is not "
                "trained yet, a share of its mean eigenvalue is 0. Give a positive damping."
            )
        return found


class _LanguageModelling(Task):  # type: ignore[misc]  # kronfluence has no types
    """Tells kronfluence what the loss of an example and the measurement of a query are."""

    def __init__(self, layers: list[str], seed: int) -> None:
        self._layers, self._seed = layers, seed
        self._generator: torch.Generator | None = None

    def compute_train_loss(self, batch: Columns, model: nn.Module, sample: bool = False) -> Tensor:
        """Return the sum of the examples' losses.

        sample: draw the labels from the model, for the true Fisher. Weights are then square roots, so that the mean of
            squared gradients is the Gauss-Newton matrix of the weighted loss, Σ_t weight_t · J_tᵀ H_t J_t.
        """
        logits, labels, weights = _predict(model, batch)
        if sample:
            labels, weights = self._draw(logits), weights.sqrt()
        return -_log_likelihood(logits, labels, weights)

    def compute_measurement(self, batch: Columns, model: nn.Module) -> Tensor:
        """Return the sum of the queries' log-likelihoods."""
        return _log_likelihood(*_predict(model, batch))

    def get_influence_tracked_modules(self) -> list[str]:
        return self._layers

    def get_attention_mask(self, batch: Columns) -> Tensor:
        """Return 1 where a position can matter to the loss: a later token counts."""
        later = batch["weights"].flip(1).cumsum(1).flip(1)
        return F.pad(later[:, 1:] > 0, (0, 1)).long()

    @torch.no_grad()
    def _draw(self, logits: Tensor) -> Tensor:
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self._seed)
        probabilities = logits.float().softmax(-1).flatten(0, 1)
        return torch.multinomial(probabilities, 1, generator=self._generator).view(logits.shape[:2])


class _Rows(torch.utils.data.Dataset[Columns]):
    """Columns as a dataset of rows."""

    def __init__(self, columns: Columns) -> None:
        self._columns = {name: columns[name].cpu() for name in ("input_ids", "weights")}

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def __getitem__(self, index: int) -> Columns:
        return {name: column[index] for name, column in self._columns.items()}


def _predict(model: nn.Module, batch: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, and the tokens that they predict and their weights."""
    logits: Tensor = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return logits, batch["input_ids"][:, 1:], batch["weights"][:, 1:]


def _log_likelihood(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return -(each * weights).sum()


def _adapter_layers(model: nn.Module) -> list[str]:
    """Return the names of the Linear layers of a LoRA adapter."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    adapters = [name for name in layers if {"lora_A", "lora_B"} & set(name.split("."))]
    if not adapters:
        raise ValueError("EK-FAC was given a model without a LoRA adapter: no Linear layer is named lora_A or lora_B.")
    return adapters
