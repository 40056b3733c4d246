"""Provides Imprint as an attributor of dattri, for its metrics, benchmarks and example scripts.

    attributor = ImprintAttributor(task=attribution_task, plan=imprint.Plan(steps=100))
    attributor.cache(train_loader)
    scores = attributor.attribute(train_loader, test_loader)  # (training examples, queries)

By dattri's convention a positive score means that the training example helps, that is, lowers the target.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.data import DataLoader

from imprint.attribution.scoring import attribute
from imprint.batches import describe_batch
from imprint.data import Data
from imprint.errors import DataError, MissingExtra
from imprint.plan import Plan
from imprint.readout.kernels import ReadoutName
from imprint.simulation.runner import simulate
from imprint.sources import Sources
from imprint.store.fingerprint import DataPrint, of_data
from imprint.store.reading import Store
from imprint.task import Batch, Parameters, Task

try:
    from dattri.algorithm.base import BaseAttributor
    from dattri.task import AttributionTask
except ImportError as error:
    raise MissingExtra("the attributor for dattri", "bench") from error


class ImprintAttributor(BaseAttributor):  # type: ignore[misc]  # dattri has no types
    """Attributes to every training example, from dattri's own description of a task.

    task: its loss and target take (parameters, batch) and return the mean over a batch, as for dattri's influence
        functions; scores are averaged over its checkpoints.
    readout: how queries are read out. With every example a source, one backward pass per query is the cheapest way.
    """

    def __init__(
        self,
        task: AttributionTask,
        plan: Plan | None = None,
        *,
        device: str = "cpu",
        readout: ReadoutName = "gradient",
        memory: int | str | None = None,
    ) -> None:
        self.task, self.plan, self.device = task, plan, device
        self._readout, self._memory = readout, memory
        model = task.get_model().to(device)
        self._task = Task(
            model, loss=_per_example(task.original_loss_func), measure=_per_example(task.original_target_func)
        )
        self._store: Store | None = None
        self._cached: DataPrint = {}

    def cache(self, full_train_dataloader: DataLoader[Any]) -> None:
        """Simulate the imprints of all training examples of a loader."""
        columns = _read_columns(full_train_dataloader)
        self._cached = _fingerprint(columns)
        self._store = simulate(
            self._task,
            columns,
            Sources.per_example(len(columns[0])),
            self.plan,
            checkpoints=self._load_states(),
            memory=self._memory,
        )

    def attribute(self, train_dataloader: DataLoader[Any], test_dataloader: DataLoader[Any]) -> Tensor:
        """Return the scores of the cached training examples on every query, shape (training examples, queries)."""
        if self._store is None:
            self.cache(train_dataloader)
        assert self._store is not None
        given = _read_columns(train_dataloader)
        if len(given[0]) != len(self._store):
            raise DataError(f"{len(self._store)} training examples were cached, this loader has {len(given[0])}.")
        if _fingerprint(given) != self._cached:
            raise DataError(
                "this loader yields other training examples than the cached ones, or the same in another order: cache "
                "this loader, and turn shuffling off."
            )
        queries = _read_columns(test_dataloader)
        result = attribute(self._task, self._store, queries, readout=self._readout, memory=self._memory)
        return -result.scores.T.float()

    def _load_states(self) -> list[Parameters]:
        """Load the state of the model at each of the task's checkpoints."""
        states = []
        for index in range(len(self.task.get_checkpoints())):
            self.task.get_param(ckpt_idx=index)  # loads the checkpoint into the model
            state = self.task.get_model().state_dict()
            states.append({name: tensor.detach().clone() for name, tensor in state.items()})
        return states


def _per_example(of_batch: Any) -> Any:
    """Turn a function of (parameters, batch) that averages over its batch into one value per example."""

    def values(model: nn.Module, batch: Batch) -> Tensor:
        parameters = dict(model.named_parameters())
        alone = vmap(lambda *sample: of_batch(parameters, tuple(part.unsqueeze(0) for part in sample)))
        return alone(*batch)  # type: ignore[no-any-return]

    return values


def _read_columns(loader: DataLoader[Any]) -> tuple[Tensor, ...]:
    """Read all batches of a loader into columns, in its order."""
    batches = list(loader)
    if not batches:
        raise DataError("the loader yields no batch: is its dataset empty, or smaller than one batch with drop_last?")
    for batch in batches:
        if not (isinstance(batch, list | tuple) and batch and all(isinstance(part, Tensor) for part in batch)):
            raise DataError(
                f"a loader must yield lists or tuples of tensors, such as [x, y]; got {describe_batch(batch)}. Give it "
                "a collate_fn that returns these."
            )
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _fingerprint(columns: tuple[Tensor, ...]) -> DataPrint:
    return of_data(Data(columns, device=columns[0].device))
