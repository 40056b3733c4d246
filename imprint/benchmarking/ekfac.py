"""Fits EK-FAC's factors of a model's curvature with the package kronfluence, and scores queries with any damping.

kronfluence requires torchvision without ever importing it, and so is in no extra. It runs without:

    pip install accelerate einconv einops opt-einsum
    pip install --no-deps kronfluence
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from imprint.errors import ConfigurationError

try:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
    from kronfluence.utils.state import State
except ImportError as error:
    raise ConfigurationError(
        f"EK-FAC by kronfluence cannot be imported ({error}): pip install accelerate einconv einops opt-einsum, and "
        "then pip install --no-deps kronfluence (it requires torchvision, but runs without)."
    ) from error

__all__ = ["Factors", "Task"]
_NAME = "ekfac"  # of the factors and of the scores, in the folder


class Factors:
    """The factors of one model's curvature on its training examples, kept in a folder, which dampings share.

    model: it is changed by kronfluence: give a copy of one that is needed afterwards.
    batch_size: how many examples, or queries, go through the model at once; scores do not depend on it.
    folder: where kronfluence keeps factors and scores; those of an earlier call are overwritten.
    """

    def __init__(
        self, model: nn.Module, task: Task, train: Dataset[Any], folder: Path, device: torch.device, batch_size: int
    ) -> None:
        self._train, self._batch_size = train, batch_size
        State._reset_state()  # kronfluence keeps the first device of a process otherwise
        self._analyzer = Analyzer(
            analysis_name=_NAME,
            model=prepare_model(model.to(device), task),
            task=task,
            cpu=device.type == "cpu",
            disable_tqdm=True,
            output_dir=str(folder),
        )
        self._analyzer.fit_all_factors(
            factors_name=_NAME,
            dataset=train,
            per_device_batch_size=batch_size,
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

    def score(self, queries: Dataset[Any], count: int, damping: float | None = None) -> Tensor:
        """Return ∇f(query)ᵀ (G + damping)⁻¹ ∇loss(example), (queries, examples).

        f is the task's measurement of a query, and G the mean Gauss-Newton matrix of the examples' losses.

        count: of the queries, all of whose gradients are held at once, so that there is one pass over the examples.
        damping: what is added to every eigenvalue; None takes a tenth of the mean eigenvalue of each layer, as
            kronfluence advises.
        """
        self._analyzer.compute_pairwise_scores(
            scores_name=_NAME,
            factors_name=_NAME,
            query_dataset=queries,
            train_dataset=self._train,
            per_device_query_batch_size=self._batch_size,
            per_device_train_batch_size=self._batch_size,
            score_args=ScoreArguments(damping_factor=damping, query_gradient_accumulation_steps=count),
            overwrite_output_dir=True,
        )
        found: Tensor = self._analyzer.load_pairwise_scores(scores_name=_NAME)["all_modules"]
        return found.cpu()
