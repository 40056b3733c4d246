"""Runs EK-FAC influence functions by the package kronfluence, at the trained model and at early checkpoints.

kronfluence requires torchvision without ever importing it, and so is in no extra. It runs without:

    pip install accelerate einconv einops opt-einsum
    pip install --no-deps kronfluence

Settings are its defaults. The best of several dampings counts, as for dattri's methods, and its own rule for one is
among them.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from imprint.benchmarking.bench import Bench, Method, Runs
from imprint.benchmarking.comparison import MethodScores
from imprint.benchmarking.variants import EPOCHS, at_epoch, early_epochs, try_epochs
from imprint.errors import ConfigurationError, DataError
from imprint.model.measures import MEASURES
from imprint.task import Parameters, Task

try:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task as KronfluenceTask
except ImportError as error:
    raise ConfigurationError(
        f"EK-FAC by kronfluence cannot be imported ({error}): pip install accelerate einconv einops opt-einsum, and "
        "then pip install --no-deps kronfluence (it requires torchvision, but runs without)."
    ) from error

DAMPINGS = (None, 1.0, 0.1, 0.01, 5e-3, 1e-3, 1e-4, 1e-5)  # None: a tenth of each layer's mean eigenvalue
_BATCH = 500  # examples; the scores do not depend on it


def kronfluence_peers(bench: Bench, epochs: Sequence[int] = EPOCHS) -> dict[str, Method]:
    """Return EK-FAC at the trained model and, if the benchmark keeps these epochs, at early checkpoints."""
    data = bench.protocol.train.examples
    for columns in (data.gather(torch.arange(2)), bench.protocol.queries):
        if not (isinstance(columns, tuple | list) and len(columns) == 2):
            raise DataError("kronfluence needs data of the form (x, y).")
    early = early_epochs(bench.protocol, epochs)
    found = {"EK-FAC (kronfluence)": _ekfac(bench.protocol.epochs[-1:])}
    return found | ({"EK-FAC (kronfluence), early": _ekfac(early)} if early else {})


class Classification(KronfluenceTask):  # type: ignore[misc]  # kronfluence has no types
    """A classifier in kronfluence's form: summed losses, and the margin as what is measured of a query."""

    def __init__(self, task: Task) -> None:
        assert task.outputs is not None and task.output_loss is not None
        self._outputs, self._output_loss = task.outputs, task.output_loss
        self._generator = torch.Generator(task.device).manual_seed(0)

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        """Return the summed loss; `sample` takes labels from the model's own predictions, for the Fisher matrix."""
        outputs = self._outputs(model, batch)
        if sample:
            probabilities = F.softmax(outputs.detach(), dim=-1)
            batch = batch[0], torch.multinomial(probabilities, 1, generator=self._generator).flatten()
        return self._output_loss(outputs, batch).sum()

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        """Return the negative margin, summed: what helps lowers it."""
        return -MEASURES["margin"](self._outputs(model, batch), batch[1]).sum()


class _Fitted:
    """The factors of one model, kept in a folder, which dampings share."""

    def __init__(self, bench: Bench, state: Parameters, folder: Path) -> None:
        protocol = bench.protocol
        device = protocol.train.examples.device
        model = protocol.train.build().to(device)
        model.load_state_dict(state)
        task = Classification(protocol.train.task_of(model))
        data = protocol.train.examples
        self._train = TensorDataset(*data.gather(torch.arange(len(data))))
        self._queries = TensorDataset(*protocol.queries)
        self._device = device
        self._analyzer = Analyzer(
            "ekfac",
            prepare_model(model, task),
            task,
            cpu=device.type == "cpu",
            disable_tqdm=True,
            log_level=40,
            output_dir=str(folder),
        )
        begin = self._now()
        self._analyzer.fit_all_factors(
            "factors", self._train, per_device_batch_size=_BATCH, factor_args=FactorArguments(strategy="ekfac")
        )
        self.took = self._now() - begin

    def score(self, damping: float | None) -> MethodScores:
        """Score all examples on all queries with one damping."""
        begin = self._now()
        self._analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            self._queries,
            self._train,
            per_device_query_batch_size=_BATCH,
            per_device_train_batch_size=_BATCH,
            score_args=ScoreArguments(damping_factor=damping),
            overwrite_output_dir=True,
        )
        scores = self._analyzer.load_pairwise_scores("scores")["all_modules"]
        note = "λ by its rule" if damping is None else f"λ={damping:g}"
        return MethodScores(scores.float().cpu(), self.took, self._now() - begin, note=note)

    def _now(self) -> float:
        """Return the time after the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()


def _ekfac(epochs: Sequence[int]) -> Method:
    dampings = DAMPINGS

    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        with TemporaryDirectory() as folder:
            fitted = {
                epoch: _Fitted(bench, at_epoch(bench.protocol, runs, epoch)[0], Path(folder, str(epoch)))
                for epoch in epochs
            }

            def score_at(damping: float | None, epoch: int) -> MethodScores:
                return fitted[epoch].score(damping)

            for damping in dampings:
                yield from try_epochs(epochs, partial(score_at, damping))

    return Method(score, {"dampings": dampings, "epochs": list(epochs)})
