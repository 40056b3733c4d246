"""A frozen base is in memory once: however many runs are repeated, none of them copies it or writes to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import imprint
from imprint import language
from imprint.compat import version_of
from imprint.data import Data
from imprint.recording.reading import Recording
from imprint.simulation.engines.replay.rows import Lineup
from imprint.simulation.engines.replay.stack import Stack
from imprint.simulation.engines.replay.training import Repetition, Training, as_recorded
from imprint.tensors.vectors import repeated
from tests.language.adapters import fine_tuned
from tests.language.models import documents, gpt2

SOURCES = imprint.Sources.by_label([0, 1, 0, 1])


class Base(nn.Module):
    """A frozen table in half precision, most of the model, under a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100_000, 8, dtype=torch.bfloat16) for _ in range(8))
        self.tables.requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = sum(table(x).float() for table in self.tables)
        out: Tensor = self.head(total)
        return out


def record(model: nn.Module, loss: Any, optimiser: torch.optim.Optimizer, folder: Path) -> Recording:
    run = imprint.RunRecorder(folder, model, optimiser, n=4)
    for indices in run.batches(4, 2, epochs=2):
        with run.step(indices) as step:
            optimiser.zero_grad()
            step.backward(loss(indices))
            optimiser.step()
    return run.finish()


def frozen(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


@contextmanager
def counting_copies(bases: list[Tensor]) -> Iterator[list[str]]:
    """List the copies that are made of tensors with the shape and the precision of a base."""
    copying, made = {"aten::clone", "aten::_to_copy", "aten::copy_"}, list[str]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if function.name() in copying and found.shape == bases[0].shape and found.dtype == bases[0].dtype:
                made.append(function.name())
            return found

    with Counting():  # type: ignore[no-untyped-call]
        yield made


@pytest.mark.parametrize("stacked", [True, False])
def test_a_replay_neither_copies_nor_writes_to_frozen_parameters(
    tmp_path: Path, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.checks.soundness._COPIED", 0)  # of small models, an independent copy is made
    model = Base()
    x, y = torch.tensor([5, 50, 500, 5000]), torch.tensor([0, 1, 2, 0])
    optimiser = torch.optim.AdamW(model.head.parameters(), lr=0.1)
    loss = lambda indices: nn.functional.cross_entropy(model(x[indices]), y[indices])  # noqa: E731
    run, task = record(model, loss, optimiser, tmp_path / "run"), imprint.Task.classifier(model)
    bases = list(frozen(model).values())
    before = [version_of(base) for base in bases]
    with counting_copies(bases) as made:
        plan = imprint.Plan(engine="replay", stacked=stacked)
        imprint.simulate(task, (x, y), SOURCES, plan, run=run, progress=False)
    assert [version_of(base) for base in bases] == before
    assert made == []


def test_a_checkpoint_shares_what_is_frozen_and_copies_the_rest() -> None:
    model = Base()
    task = imprint.Task.classifier(model)
    own, state = task.tensors(), task.complete(task.tensors())
    assert {name for name in own if own[name].data_ptr() == state[name].data_ptr()} == frozen(model).keys()
    other = {name: tensor.clone() for name, tensor in own.items()}
    completed = task.complete(other)
    assert not any(completed[name].data_ptr() == other[name].data_ptr() for name in own)


def test_an_adapter_made_for_imprints_begins_at_zero_and_leaves_the_one_in_use_alone() -> None:
    task = language.task(gpt2(), parameters="lora:1")
    with torch.no_grad():
        for name in task.names:
            task.model.get_parameter(name).fill_(1.0)
    plain = {name: t for name, t in task.tensors().items() if ".lora_" not in name}
    state = task.complete({name.replace(".base_layer.", "."): tensor for name, tensor in plain.items()})
    assert not any(state[name].any() for name in task.names)
    assert all(bool((task.model.get_parameter(name) == 1).all()) for name in task.names)


def checkpointed_run(folder: Path) -> Repetition:
    model: Any = fine_tuned()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    task, columns = language.task(model), documents().columns
    data = Data(columns, device=task.device)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run = record(model, lambda indices: task.loss(model, data.gather(indices)).mean(), optimiser, folder)
    return Repetition(task, data, run)


def test_replays_compute_blocks_again_where_training_did(tmp_path: Path) -> None:
    repetition = checkpointed_run(tmp_path / "run")
    training = Training(repetition)
    calls: list[int] = []
    block: Any = next(m for n, m in training.model.named_modules() if n.endswith("h.0.ln_1"))
    block.register_forward_pre_hook(lambda *given: calls.append(1))
    with as_recorded(repetition.run.circumstances):
        training.step(0)
    assert len(calls) == 2  # forwards, and again for the backward pass


def test_all_runs_of_a_replay_share_one_base(tmp_path: Path) -> None:
    repetition = checkpointed_run(tmp_path / "run")
    theirs = {p.data_ptr() for p in frozen(repetition.task.model).values()}
    rows = Lineup(imprint.Sources.by_label([0, 1])).rows
    stack = Stack(repetition, rows, repeated(repetition.start(), len(rows)))
    for model in (Training(repetition).model, Training(repetition).model, stack._model):
        assert {p.data_ptr() for p in frozen(model).values()} == theirs
