"""A zoo of tiny tasks, one for each kind of model or data that something in the library could trip over.

Each member is a function of (device, dtype); it returns the task, its training data, sources and queries, and the
collate function where the data needs one. `ZOO` has them all by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Sources, Task
from imprint.data import Collate
from imprint.task import Batch
from tests.zoo_models import (
    Attention,
    Branching,
    Encoder,
    MeanOfTokens,
    Noisy,
    Preallocating,
    Residual,
    Tempered,
    Tied,
    WithoutForwardMode,
)


class Member(NamedTuple):
    """A task with what it takes to simulate and to query it."""

    task: Task
    data: Any
    sources: Sources
    queries: Any
    collate_fn: Collate | None = None


Make = Callable[[torch.device, torch.dtype], Member]


@dataclass(frozen=True)
class Entry:
    """A member's function and what may be claimed of it.

    smooth: its loss is twice differentiable, so that derivatives and differences agree.
    vectorises: `vmap` takes it over parameters; elsewhere trajectories and differences run in a loop.
    vectorises_tangents: `vmap` takes it over directions at shared parameters; elsewhere tangents run in a loop.
    forward_mode: it has forward-mode rules; elsewhere there is no tangent engine, and differences are read out.
    columnar: its batches are tensors with one row per example, as a diagonal readout needs.
    """

    make: Make
    smooth: bool = True
    vectorises: bool = True
    vectorises_tangents: bool = True
    forward_mode: bool = True
    columnar: bool = True


ZOO: dict[str, Entry] = {}

EXAMPLES, QUERIES = 12, 3
_GROUPS = [index % 4 for index in range(EXAMPLES)]


def _member(**claims: bool) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        ZOO[make.__name__] = Entry(make, **claims)
        return make

    return register


def _normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def _whole(below: int, *shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _built(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A model whose weights do not depend on device, dtype or what was built before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().to(device, dtype)


def _labelled(rows: int, shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Columns (x, y) of three classes."""
    return _normal(rows, *shape, seed=seed, device=device, dtype=dtype), _whole(3, rows, seed=seed + 1, device=device)


def _classifier(
    make: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, **options: Any
) -> Member:
    data, queries = (_labelled(rows, shape, seed, device, dtype) for seed, rows in ((1, EXAMPLES), (3, QUERIES)))
    task = Task.classifier(_built(make, device, dtype), **options)
    return Member(task, data, Sources.by_label(_GROUPS), queries)


@_member()
def mlp_tanh(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (4,), device, dtype, measure="margin"
    )


@_member(smooth=False)
def mlp_relu(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,), device, dtype)


@_member(smooth=False)
def in_place_relu(device: torch.device, dtype: torch.dtype) -> Member:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)
        )

    return _classifier(make, (4,), device, dtype)


@_member()
def batch_norm(device: torch.device, dtype: torch.dtype) -> Member:
    """Convolutions with batch norm, whose running statistics come from some batches in training mode."""

    def make() -> nn.Module:
        norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.AvgPool2d(2)
        return nn.Sequential(*norm, nn.Flatten(), nn.Linear(12, 3))

    member = _classifier(make, (2, 4, 4), device, dtype, measure="logprob")
    model = member.task.model
    model.train()
    with torch.no_grad():
        for scale in (0.5, 2.0, 3.0):
            model(scale * member.data[0] + 1)
    return member


@_member(smooth=False)
def biases_before_batch_norm(device: torch.device, dtype: torch.dtype) -> Member:
    """Biases that batch norm takes out again in training mode, and that count in evaluation mode."""

    def make() -> nn.Module:
        first = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()
        second = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.ReLU()
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(12, 3))

    member = _classifier(make, (1, 4, 4), device, dtype)
    member.task.model.train()
    with torch.no_grad():
        for _ in range(20):
            member.task.model(member.data[0])
    return member


@_member()
def in_place_residual(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(Residual, (4,), device, dtype)


@_member()
def tied_weights(device: torch.device, dtype: torch.dtype) -> Member:
    data = _whole(5, EXAMPLES, seed=1, device=device), _whole(5, EXAMPLES, seed=2, device=device)
    queries = _whole(5, QUERIES, seed=3, device=device), _whole(5, QUERIES, seed=4, device=device)
    task = Task.classifier(_built(Tied, device, dtype), measure="logprob")
    return Member(task, data, Sources.by_label(_GROUPS), queries)


@_member()
def transformer_layer(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(Encoder, (3, 4), device, dtype)


@_member()
def causal_attention(device: torch.device, dtype: torch.dtype) -> Member:
    """A language model: each example is a text, its loss the sum over the tokens."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens, following = batch
        return (
            F.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="none").view_as(tokens).sum(1)
        )

    data = _whole(5, EXAMPLES, 3, seed=1, device=device), _whole(5, EXAMPLES, 3, seed=2, device=device)
    queries = _whole(5, QUERIES, 3, seed=3, device=device), _whole(5, QUERIES, 3, seed=4, device=device)
    return Member(Task(_built(Attention, device, dtype), loss), data, Sources.by_label(_GROUPS), queries)


@_member()
def regression(device: torch.device, dtype: torch.dtype) -> Member:
    """Regularised, with overlapping sources and one target per example in a flat column."""
    model = _built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)), device, dtype)
    task = Task.regression(model, regulariser=lambda model: 0.05 * sum(p.square().sum() for p in model.parameters()))
    data = tuple(_normal(EXAMPLES, *s, seed=i, device=device, dtype=dtype) for i, s in enumerate([(3,), ()]))
    queries = tuple(_normal(QUERIES, *s, seed=i + 2, device=device, dtype=dtype) for i, s in enumerate([(3,), ()]))
    sources = Sources.groups({"early": range(8), "late": range(4, EXAMPLES), "one": [5]})
    return Member(task, data, sources, queries)


@_member()
def always_float64(device: torch.device, dtype: torch.dtype) -> Member:
    """A model in double precision whatever the rest of the zoo is in."""
    return mlp_tanh(device, torch.float64)


@_member()
def frozen_trunk(device: torch.device, dtype: torch.dtype) -> Member:
    """Only the head is trained, in which the task is smooth though its trunk is not."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 3))

    return _classifier(make, (4,), device, dtype)


@_member()
def scalar_parameter(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(Tempered, (4,), device, dtype)


def _texts(count: int, first: int, device: torch.device) -> list[dict[str, Any]]:
    """Samples of different lengths, which no default collation takes."""
    return [
        {"tokens": _whole(6, 2 + i % 3, seed=first + i, device=device), "label": i % 3, "title": f"text {i}"}
        for i in range(count)
    ]


def _texts_member(device: torch.device, dtype: torch.dtype, *, titles: bool) -> Member:
    def padded(samples: list[Any]) -> Batch:
        batch: dict[str, Any] = {
            "tokens": nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True),
            "mask": nn.utils.rnn.pad_sequence([torch.ones(len(s["tokens"]), dtype=dtype) for s in samples], True),
            "labels": torch.tensor([s["label"] for s in samples]),
        }
        return {**batch, "titles": [s["title"] for s in samples]} if titles else batch

    task = Task(
        _built(MeanOfTokens, device, dtype),
        outputs=lambda model, batch: model(batch["tokens"], batch["mask"]),
        output_loss=lambda z, batch: F.cross_entropy(z, batch["labels"], reduction="none"),
        measure="margin",
    )
    data, queries = _texts(EXAMPLES, 0, device), _texts(QUERIES, 100, device)
    return Member(task, data, Sources.by_label(_GROUPS), queries, padded)


@_member()
def dict_batch(device: torch.device, dtype: torch.dtype) -> Member:
    """Dictionaries of padded tensors, made by a collate function."""
    return _texts_member(device, dtype, titles=False)


@_member(columnar=False)
def dict_batch_with_titles(device: torch.device, dtype: torch.dtype) -> Member:
    """The same with a list of strings in each batch, which cannot be sliced with the tensors."""
    return _texts_member(device, dtype, titles=True)


@_member(vectorises=False)
def data_dependent_branch(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(Branching, (4,), device, dtype)


@_member(vectorises=False)
def preallocated_output(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(Preallocating, (4,), device, dtype)


@_member(vectorises=False, vectorises_tangents=False)
def seeded_noise(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(Noisy, (4,), device, dtype)


@_member(vectorises=False, forward_mode=False)
def custom_function(device: torch.device, dtype: torch.dtype) -> Member:
    return _classifier(WithoutForwardMode, (4,), device, dtype)
