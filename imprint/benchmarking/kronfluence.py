"""Runs EK-FAC influence functions by kronfluence (`ekfac.py`), at the trained model and at early checkpoints.

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

from imprint.benchmarking import ekfac
from imprint.benchmarking.bench import Bench, Method, Runs
from imprint.benchmarking.comparison import MethodScores
from imprint.benchmarking.variants import EPOCHS, at_epoch, early_epochs, try_epochs
from imprint.errors import DataError
from imprint.model.measures import MEASURES
from imprint.task import Parameters, Task

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


class Classification(ekfac.Task):  # type: ignore[misc]  # kronfluence has no types
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
    """The factors of one model of a benchmark."""

    def __init__(self, bench: Bench, state: Parameters, folder: Path) -> None:
        protocol, data = bench.protocol, bench.protocol.train.examples
        model = protocol.train.build().to(data.device)
        model.load_state_dict(state)
        task = Classification(protocol.train.task_of(model))
        train = TensorDataset(*data.gather(torch.arange(len(data))))
        self._queries, self._device = TensorDataset(*protocol.queries), data.device
        begin = self._now()
        self._factors = ekfac.Factors(model, task, train, folder, data.device, _BATCH)
        self.took = self._now() - begin

    def score(self, damping: float | None) -> MethodScores:
        """Score all examples on all queries with one damping."""
        begin = self._now()
        scores = self._factors.score(self._queries, len(self._queries), damping)
        note = "λ by its rule" if damping is None else f"λ={damping:g}"
        return MethodScores(scores.float(), self.took, self._now() - begin, note=note)

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
