"""Scores by EK-FAC influence functions, computed by kronfluence 1.0, for a language model fine-tuned with LoRA.

The influence of an example goes through the adapter's Linear layers (lora_A and lora_B); each is a block of its own,
as always in kronfluence. Columns are those of `imprint.language`: `input_ids` and `weights`, both (rows, length), where
weights[i, t] is the weight of predicting token t of row i from the tokens before it.

`benchmarks/publishers.py` calls this. kronfluence asks for torchvision but never imports it, and installs without:

    pip install --no-deps kronfluence==1.0.1 einops opt_einsum einconv
"""

# mypy: disable-error-code="import-not-found,import-untyped", allow-subclassing-any

import copy
from pathlib import Path
from typing import Any

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from kronfluence.utils.state import State
from torch import Tensor, nn
from torch.nn import functional as F

Columns = dict[str, Tensor]
_NAME = "ekfac"  # of the factors and of the scores, in the folder


class EkFac:
    """Holds the factors of a model's curvature on its training examples, and scores queries with any damping.

    model: a PEFT model with a LoRA adapter; kronfluence works on a copy of it.
    batch: how many examples, or queries, go through the model at once.
    folder: where kronfluence keeps factors and scores; those of an earlier call are overwritten.
    """

    def __init__(
        self, model: Any, train: Columns, *, folder: str | Path, device: str = "cpu", batch: int = 16, seed: int = 0
    ) -> None:
        self._train, self._batch = train, batch
        task = _LanguageModelling(_adapter_layers(model), seed)
        State._reset_state()  # kronfluence keeps the first device of a process otherwise
        self._analyzer = Analyzer(
            analysis_name=_NAME,
            model=prepare_model(copy.deepcopy(model).to(device), task),
            task=task,
            cpu=torch.device(device).type == "cpu",
            disable_tqdm=True,
            output_dir=str(folder),
        )
        self._analyzer.fit_all_factors(
            factors_name=_NAME,
            dataset=_Rows(train),
            per_device_batch_size=batch,
            factor_args=FactorArguments(strategy="ekfac"),  # the true Fisher: labels are drawn from the model
            overwrite_output_dir=True,
        )

    @property
    def mean_eigenvalue(self) -> float:
        """The mean eigenvalue of the curvature of one example's loss, over all parameters: a unit for dampings."""
        found = self._analyzer.load_lambda_matrices(factors_name=_NAME)
        counts = found["num_lambda_processed"]
        values = torch.cat([(each.double() / counts[name]).flatten() for name, each in found["lambda_matrix"].items()])
        return float(values.mean())

    def score(self, queries: Columns, damping: float | None = None) -> Tensor:
        """Return ∇f(query)ᵀ (G + damping)⁻¹ ∇loss(example) / examples with its sign turned, (queries, examples).

        f is the query's log-likelihood, and G the mean Gauss-Newton matrix of the examples' losses. A score is thus
        the predicted rise of f when the example counts twice in the mean loss.
        damping: what is added to every eigenvalue; None takes a tenth of the mean eigenvalue of each layer, as
            kronfluence advises.
        """
        train = _Rows(self._train)
        self._analyzer.compute_pairwise_scores(
            scores_name=_NAME,
            factors_name=_NAME,
            query_dataset=_Rows(queries),
            train_dataset=train,
            per_device_query_batch_size=self._batch,
            per_device_train_batch_size=self._batch,
            score_args=ScoreArguments(
                damping_factor=damping,
                query_gradient_accumulation_steps=len(queries["input_ids"]),  # one pass over the training examples
            ),
            overwrite_output_dir=True,
        )
        found: Tensor = self._analyzer.load_pairwise_scores(scores_name=_NAME)["all_modules"]
        if not found.isfinite().all():
            raise ValueError(
                f"EK-FAC with damping {damping} gave scores that are not finite: a layer without any gradient has no "
                "eigenvalues to damp by. Give a positive damping, or a model whose adapter has been trained."
            )
        return -found.double() / len(train)


def ekfac(
    model: Any, train: Columns, queries: Columns, damping: float | None, device: str, folder: str | Path
) -> Tensor:
    """Return EK-FAC scores with one damping, (queries, examples): positive where more weight raises the likelihood."""
    return EkFac(model, train, folder=folder, device=device).score(queries, damping)


class _LanguageModelling(Task):
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
