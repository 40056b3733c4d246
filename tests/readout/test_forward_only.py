"""A readout runs forward passes only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, ReadoutError, Sources, Store, Task, self_influence, simulate
from imprint.readout.kernels import ReadoutName
from imprint.task import Batch
from tests.readout.reading import FORWARD_ONLY, PLAN, N, columns, new_model, scored, simulated


@contextmanager
def _no_backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Every way into the backward pass raises; what a graph would save is listed."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a backward pass was run")

    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with monkeypatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for owner, name in ((torch.autograd, "backward"), (torch.autograd, "grad"), (torch.Tensor, "backward")):
            patch.setattr(owner, name, refuse)
        yield saved


@pytest.mark.parametrize("readout", FORWARD_ONLY)
def test_a_readout_builds_no_graph_and_runs_no_backward(
    readout: ReadoutName, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def measure(model: nn.Module, batch: Batch) -> Tensor:
        values: Tensor = model(batch[0])[:, 0]
        seen.append((torch.is_grad_enabled(), values.requires_grad))
        return values

    task = Task.classifier(new_model(), measure=measure)
    with torch.enable_grad(), _no_backward(monkeypatch) as saved:
        scores = scored(task, store, readout=readout)
    assert not saved
    assert not any(requires for _, requires in seen)
    assert sum(enabled for enabled, _ in seen) == 1  # when it is looked for other references to the model
    assert not scores.requires_grad


def test_self_influence_builds_no_graph_and_runs_no_backward(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    each = simulate(task, columns(N, 1), Sources.per_example(N), PLAN, progress=False)
    with torch.enable_grad(), _no_backward(monkeypatch) as saved:
        found = self_influence(task, each, columns(N, 1), progress=False)
    assert not saved
    assert not found.requires_grad


def test_the_proof_of_no_backward_would_notice_one(task: Task, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"backward pass was run|saved tensor hooks"), _no_backward(monkeypatch):
        scored(task, store, readout="gradient")
    with _no_backward(monkeypatch) as saved:
        task.loss(task.model, columns(5, 2))
    assert saved


class _OneWay(torch.autograd.Function):
    """tanh, whose backward can be taken away after training."""

    generate_vmap_rule = True
    has_backward = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if not _OneWay.has_backward:
            raise AssertionError("a backward pass was run")
        (y,) = ctx.saved_tensors
        return gradients[0] * (1 - y**2)  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return tangents[0] * (1 - y**2)  # type: ignore[no-any-return]


class _OneWayModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_OneWay.apply(self.first(x)))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("readout", FORWARD_ONLY)
def test_a_model_without_a_backward_is_read_out(readout: ReadoutName, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    task = Task.classifier(_OneWayModel().double())
    plan = Plan(engine="trajectories", steps=3, lr=0.2, epsilon=0.01, keep_pair=True)
    store, queries = simulated(task, plan), columns(5, 2, torch.float64)
    expected = scored(task, store, queries, readout="gradient")
    monkeypatch.setattr(_OneWay, "has_backward", False)
    with pytest.raises(ReadoutError, match="a backward pass was run"):
        scored(task, store, queries, readout="gradient")
    found = scored(task, store, queries, readout=readout)
    tolerance = {"jvp": 1e-12, "central": 1e-6, "literal": 1e-5}[readout]
    assert float((found - expected).norm()) < tolerance * float(expected.norm())
