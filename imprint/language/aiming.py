"""Turns an adapter made for a task to where sources differ.

The imprint of a source in a linear layer is a matrix, of which an adapter keeps what lies on the rows of A: of random
rows, a random part. What separates sources are the differences of their gradients G_b, and the rows that see most of
them are the leading eigenvectors of Σ_b (G_b − Ḡ)ᵀ(G_b − Ḡ), at the cost of one gradient of every source.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.data import Data
from imprint.errors import TaskError
from imprint.language.causal import LanguageTask
from imprint.language.head import in_full_precision
from imprint.language.presets import ADAPTER
from imprint.plan import State
from imprint.runtime.progress import Advance, Progress
from imprint.simulation.states import States
from imprint.sources import Members, Sources, require_sources
from imprint.task import Parameters


def aim(
    task: LanguageTask,
    data: Any,
    sources: Sources,
    *,
    checkpoint: State | None = None,
    sample: int = 64,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool | Advance = True,
) -> None:
    """Choose the A of an adapter made by "lora:R" from the gradients of the sources, before a simulation.

    A store keeps it, so that a task which reads the store need not be aimed.

    data, sources: as they will be simulated.
    checkpoint: where gradients are taken, as one of those of `simulate`; None for the model as it is.
    sample: how many windows of a source stand for it.
    """
    if getattr(task, "adapter", None) is None:
        raise TaskError('only an adapter made for the task can be aimed: give language.task parameters="lora:R".')
    if sample < 1:
        raise TaskError(f"a source needs a sample of at least 1 window to be aimed at, got sample={sample}.")
    layers, windows = _adapters(task), Data(data, device=task.device, batch_size=batch_size)
    require_sources(sources)
    sources.check(len(windows))
    if isinstance(checkpoint, list):
        raise TaskError(f"checkpoint is a list of {len(checkpoint)}: give one state dict, or the path of one.")
    state = States(task, None if checkpoint is None else [checkpoint])[0]
    draw = np.random.default_rng(seed)
    spread: dict[str, Tensor] = {}
    mean: dict[str, Tensor] = {}
    with task.evaluating(), closing(Progress("aiming", len(sources), "sources", progress)) as bar:
        slopes = _slopes(task, layers, windows, state)
        for count, members in enumerate(sources.members, 1):
            chosen = members if len(members) <= sample else draw.choice(members, sample, replace=False)
            for name, slope in slopes(chosen).items():
                apart = slope - mean.get(name, 0)  # running, since what sources share may dwarf what they differ in
                mean[name] = mean.get(name, 0) + apart / count
                spread[name] = spread.get(name, 0) + (1 - 1 / count) * apart.T @ apart
            bar.advance()
    for name, layer in layers.items():
        differing = spread[name] if len(sources) > 1 else mean[name].T @ mean[name]
        if not bool(differing.isfinite().all()):
            raise TaskError(f"the gradients of layer {name!r} are not finite: look for NaN in the model or checkpoint.")
        a: Tensor = layer.lora_A[ADAPTER].weight
        a.data.copy_(_leading(differing, len(a)))


def _adapters(task: LanguageTask) -> dict[str, Any]:
    """Return the layers of a task's model that have its adapter, by name."""
    modules: Any = task.model.named_modules()
    return {name: module for name, module in modules if ADAPTER in getattr(module, "lora_A", {})}


def _slopes(
    task: LanguageTask, layers: dict[str, Any], windows: Data, state: Parameters
) -> Callable[[Members], dict[str, Tensor]]:
    """Return the mean gradient of some windows by the weight of every layer, (outputs, inputs)."""
    functional, theta = task.at(state)
    owners = {id(parameter): name for name, parameter in task.model.named_parameters()}  # layers may share a weight
    names = {name: owners[id(layer.base_layer.weight)] for name, layer in layers.items()}
    across = {name for name, layer in layers.items() if layer.fan_in_fan_out}  # as GPT-2 keeps its weights

    def slopes(chosen: Members) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for part in torch.from_numpy(chosen).split(windows.batch_size):
            with torch.enable_grad():
                weights = {kept: state[kept].detach().requires_grad_() for kept in dict.fromkeys(names.values())}
                loss = functional.losses({**theta, **weights}, windows.gather(part), len(part)).sum() / len(chosen)
                found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
            slope_of = dict(zip(weights, found, strict=True))
            for name, kept in names.items():
                slope = slope_of[kept].T if name in across else slope_of[kept]
                total[name] = total.get(name, 0) + in_full_precision(slope)
        return total

    return slopes


def _leading(matrix: Tensor, rows: int) -> Tensor:
    """Return the leading eigenvectors of a symmetric matrix as rows, each with a positive largest entry."""
    vectors: Tensor = torch.linalg.eigh(matrix.double()).eigenvectors[:, -rows:].T
    return vectors * vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
