"""A task that computes something else than the store's is refused, and rounding alone is not taken for that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan, Sources, Store, StoreError, Task, attribute, simulate
from imprint.data import Data
from imprint.errors import ConcurrencyError
from imprint.store.comparison import compare_gradients, compare_losses, compare_modules
from imprint.store.probe_examples import PROBES, choose_probes
from imprint.store.probing import ProbeValues, describe_modules, evaluate_probes
from imprint.task import Functional, Parameters

N, CLASSES = 600, 20
CPU = torch.device("cpu")
PLAN = Plan(steps=2, lr=0.05)
Loss = Callable[[nn.Module, Any], Tensor]


def data() -> tuple[Tensor, Tensor]:
    """The last class has one example, in the middle."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(N) % (CLASSES - 1)
    y[N // 2 + 7] = CLASSES - 1
    return torch.randn(N, 6, generator=generator), y


def model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *more, nn.Linear(16, CLASSES))


def cross_entropy(**options: Any) -> Loss:
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none", **options)


def run(task: Task, out: Path, plan: Plan = PLAN, **options: Any) -> Store:
    sources = Sources.by_label([i % 3 for i in range(N)])
    return simulate(task, options.pop("data", data()), sources, plan, out=out, progress=False, **options)


def refused(before: Task, now: Task, out: Path, match: str, plan: Plan = PLAN, **options: Any) -> None:
    """Neither a finished store is taken for one of the other task, nor a readout given to it."""
    store = run(before, out, plan, **options)
    with pytest.raises(StoreError, match=match):
        run(now, out, plan, **options)
    with pytest.raises(StoreError, match=match):
        attribute(now, store, tuple(column[:2] for column in options.get("data", data())), progress=False)


def test_a_weight_on_a_rare_class_is_another_loss(tmp_path: Path) -> None:
    weight = torch.ones(CLASSES)
    weight[-1] = 20.0
    before, now = (Task(model(), loss) for loss in (cross_entropy(), cross_entropy(weight=weight)))
    refused(before, now, tmp_path / "store", "the loss function changed")


@pytest.mark.parametrize("size", [1e-5, 1e-12])
def test_a_tiny_loss_times_five_is_another_loss(size: float, tmp_path: Path) -> None:
    def loss(factor: float) -> Loss:
        return lambda model, batch: factor * (model(batch[0])[:, 0] - batch[1] / CLASSES).square()

    refused(Task(model(), loss(size)), Task(model(), loss(5 * size)), tmp_path / "store", "the loss function changed")


def fitted() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model that is so sure of its data that all losses are close to 0."""
    x = 10 * torch.eye(3).repeat(N // 3, 1)
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.copy_(2 * torch.eye(3))
        linear.bias.zero_()
    return linear, (x, x.argmax(1))


def test_hinge_is_not_cross_entropy_where_both_are_zero(tmp_path: Path) -> None:
    linear, columns = fitted()

    def hinge(model: nn.Module, batch: Any) -> Tensor:
        return F.multi_margin_loss(model(batch[0]), batch[1], reduction="none")

    with torch.no_grad():
        assert float(cross_entropy()(linear, columns).max()) < 1e-7 and float(hinge(linear, columns).max()) == 0.0
    before, now = Task(linear, cross_entropy()), Task(linear, hinge)
    refused(before, now, tmp_path / "store", r"(away|of another example): the loss function changed", data=columns)


def test_a_small_change_of_a_loss_that_is_fitted_is_noticed(tmp_path: Path) -> None:
    linear, columns = fitted()
    before, now = Task(linear, cross_entropy()), Task(linear, cross_entropy(label_smoothing=1e-3))
    refused(before, now, tmp_path / "store", "the loss function changed", data=columns)


def test_other_outputs_of_the_same_loss_are_refused_where_curvature_comes_from_them(tmp_path: Path) -> None:
    def of(outputs: Loss) -> Task:
        def loss(z: Tensor, batch: Any) -> Tensor:
            return F.cross_entropy(z, batch[1], reduction="none")

        return Task(model(), outputs=outputs, output_loss=loss)

    logits = of(lambda model, batch: model(batch[0]))
    log_probabilities = of(lambda model, batch: model(batch[0]).log_softmax(-1))
    spectral = Plan(engine="spectral", steps=5, damping=0.1, directions=4)
    run(logits, tmp_path / "spectral", spectral)
    with pytest.raises(StoreError, match=r"output on probe example 0 .*outputs changed"):
        run(log_probabilities, tmp_path / "spectral", spectral)
    run(logits, tmp_path / "path")
    run(log_probabilities, tmp_path / "path")  # along a path of the loss alone they do not matter


def test_another_rate_of_dropout_is_refused_where_it_is_drawn(tmp_path: Path) -> None:
    few, many = (Task.classifier(model(nn.Dropout(rate))) for rate in (0.1, 0.4))
    drawn = Plan(steps=2, lr=0.05, dropout=True)
    run(few, tmp_path / "drawn", drawn)
    with pytest.raises(StoreError, match=r"module '2' of the model has changed: Dropout\.p was 0\.1, is 0\.4"):
        run(many, tmp_path / "drawn", drawn)
    run(few, tmp_path / "without")
    run(many, tmp_path / "without")  # a simulation without dropout is the same whatever its rate


def test_the_loss_is_seen_in_full_once_and_in_part_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[1]))
        return cross_entropy()(model, batch)

    task, queries = Task(model(), loss), tuple(column[:2] for column in data())
    store = run(task, tmp_path / "store")
    costs = []
    for _ in range(3):
        before = sum(calls)
        attribute(task, store, queries, progress=False)
        costs.append(sum(calls) - before)
    kept = len(store.manifest.request.probes.examples)
    compared = 3 * len(queries[0])  # the derivative of the measurement with differences of it, once
    assert costs[1] == costs[2] and costs[0] - costs[1] == 4 * kept - 8 + compared


def probes_of(columns: tuple[Tensor, ...], task: Task | None = None) -> list[int]:
    functional, theta = _at(task or Task(model(), cross_entropy()))
    return choose_probes(functional, theta, Data(columns, device=CPU))


def _at(task: Task) -> tuple[Functional, Parameters]:
    return task.at(task.state())


def test_probes_have_every_class_and_the_extremes_of_the_loss() -> None:
    x, y = data()
    chosen = probes_of((x, y))
    assert set(y[chosen].tolist()) == set(range(CLASSES))
    assert len(chosen) == len(set(chosen)) <= PROBES
    x, y = x[:100], y[:100]  # all of which are looked at
    task = Task(model(), cross_entropy())
    losses = task.loss(task.model, (x, y))
    assert {int(losses.argmin()), int(losses.argmax())} <= set(probes_of((x, y)))


def test_probes_are_few_where_there_are_no_classes_or_examples_are_large() -> None:
    x, _ = data()
    task = Task(nn.Linear(6, 1), lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square())
    assert len(probes_of((x, x[:, 0]), task)) <= 26
    large = torch.zeros(40, 1 << 20), torch.arange(40) % 20
    sums = Task(nn.Linear(1, 1), lambda model, batch: model(batch[0].mean(1, keepdim=True))[:, 0] * batch[1])
    assert len(probes_of(large, sums)) == 8


def test_probes_have_one_example_for_each_column_of_several_labels() -> None:
    x, y = data()
    labels = F.one_hot(y, CLASSES).float()
    task = Task(model(), lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1], reduction="none").sum(1))
    assert bool(labels[probes_of((x, labels), task)].any(0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rounding_is_not_taken_for_another_loss(dtype: torch.dtype) -> None:
    """Another order of sums, and parameters that are off by the rounding of their precision."""
    x, y = data()
    task = Task(model().to(dtype), cross_entropy())
    functional, theta = task.at(task.state())
    batch = (x[:24].to(dtype), y[:24])
    generator = torch.Generator().manual_seed(1)
    before = evaluate_probes(functional, theta, batch, 24)
    for _ in range(10):
        unit = torch.finfo(dtype).eps / 2
        off = {
            name: (p.double() * (1 + unit * torch.randn(p.shape, generator=generator, dtype=torch.float64))).to(dtype)
            for name, p in theta.items()
        }
        assert compare_losses(before, evaluate_probes(functional, off, batch, 24)) is None


def test_a_loss_that_is_not_defined_elsewhere_is_known_where_it_is() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        if float(model.weight.detach()[0, 0]) != 1.0:
            raise ValueError("not here")
        values: Tensor = model(batch[0])[:, 0]
        return values

    linear = nn.Linear(1, 1)
    nn.init.ones_(linear.weight)
    functional, theta = _at(Task(linear, loss))
    seen = evaluate_probes(functional, theta, (torch.ones(3, 1),), 3)
    assert seen.moved[:2] == [[None] * 3] * 2
    assert compare_losses(seen, seen) is None
    assert compare_losses(seen, ProbeValues([2 * v for v in seen.losses], seen.moved, None, seen.precision)) is not None


def test_settings_of_modules_do_not_tell_the_mode_or_what_a_model_counts() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.norm = 0, nn.LayerNorm(3)

    counting = Counting()
    before = describe_modules(counting)
    counting.calls = 5
    assert describe_modules(counting.eval()) == before
    counting.norm.eps = 0.1
    difference = compare_modules(before, describe_modules(counting), dropout=False)
    assert difference == "module 'norm' of the model has changed: LayerNorm.eps was 1e-05, is 0.1"


class _Reversed(torch.autograd.Function):
    """Leaves values as they are, and turns gradients around."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return -slopes[0]


@pytest.mark.parametrize("change", [lambda z: torch.cat([z[:, :1].detach(), z[:, 1:]], 1), _Reversed.apply])
def test_equal_losses_with_other_gradients_are_told_apart(change: Any) -> None:
    x, y = data()
    losses = (cross_entropy(), lambda m, batch: F.cross_entropy(change(m(batch[0])), batch[1], reduction="none"))
    before, again, now = (
        evaluate_probes(*task.at(task.state()), (x[:30], y[:30]), 30, gradients=True)
        for task in (Task(model(), losses[0]), Task(model(), losses[0]), Task(model(), losses[1]))
    )
    assert compare_losses(before, now) is None
    assert compare_gradients(before, again) is None
    assert "the gradient of the loss on probe examples is off by" in str(compare_gradients(before, now))


def test_probes_have_the_largest_and_the_smallest_inputs() -> None:
    x, y = data()
    task = Task(model(), cross_entropy())
    chosen = choose_probes(*task.at(task.state()), Data((x, y), device=CPU))
    assert set(x.argmax(0).tolist()) | set(x.argmin(0).tolist()) <= set(chosen)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, ConcurrencyError])
def test_an_error_that_says_nothing_about_the_loss_is_no_changed_loss(error: type[Exception], tmp_path: Path) -> None:
    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise error("not now")

    store = run(Task(model(), cross_entropy()), tmp_path / "store")
    task = Task(model(), failing)
    with pytest.raises(error, match="not now"):
        store.check_loss(*task.at(task.state()))
