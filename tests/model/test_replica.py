"""The user's module is copied, never touched; the copy follows it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from imprint import Task
from imprint.errors import ReliabilityWarning
from imprint.model.replica import Replica


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_a_copy_shares_parameters_and_buffers_but_no_module() -> None:
    mine = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    copied = Task.classifier(mine).replica
    assert all(a is b for a, b in zip(mine.parameters(), copied.parameters(), strict=True))
    assert all(a is b for a, b in zip(mine.buffers(), copied.buffers(), strict=True))
    assert not set(map(id, mine.modules())) & set(map(id, copied.modules()))


def test_a_copy_is_in_evaluation_mode_and_the_model_stays_in_its_own() -> None:
    mine = model()
    task = Task.classifier(mine)
    with task.evaluating():
        assert all(module.training for module in mine.modules())
        assert not any(module.training for module in task.replica.modules())


def change_dropout(model: nn.Sequential) -> None:
    model[1].p = 0.1  # type: ignore[assignment]


def change_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 2)


def assign(model: nn.Sequential) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


def add_hook(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, given, output: 2 * output)


@pytest.mark.parametrize("change", [change_dropout, change_layer, assign, add_hook])
def test_a_copy_is_made_again_once_the_model_has_changed(change: object) -> None:
    mine = model()
    task = Task.classifier(mine)
    with task.evaluating():
        before = task.replica
    with task.evaluating():
        assert task.replica is before
    assert callable(change)
    change(mine)
    x = torch.randn(5, 3)
    with task.evaluating():
        assert task.replica is not before
        torch.testing.assert_close(task.replica(x), mine.eval()(x))


def test_a_copy_follows_training_without_being_made_again() -> None:
    mine = model()
    task = Task.classifier(mine)
    with task.evaluating():
        before = task.replica
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(1)
    with task.evaluating():
        assert task.replica is before
        x = torch.randn(5, 3)
        assert torch.equal(task.replica(x), mine.eval()(x))


class Counting(nn.Module):
    """Changes a buffer that is not saved, in place, whenever it is called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)  # type: ignore[no-any-return]


def test_what_a_call_changes_in_place_is_not_changed_in_the_model() -> None:
    mine = Counting()
    task = Task.classifier(mine)
    with task.evaluating():
        task.replica(torch.randn(2, 3))
    assert float(mine.calls) == 0


def test_modules_that_refer_to_each_other_refer_to_copies() -> None:
    class Helper:
        def __init__(self, layer: nn.Module) -> None:
            self.layer = layer

    mine = model()
    mine.helper = Helper(mine[0])  # type: ignore[assignment]
    copied = Task.classifier(mine).replica
    assert copied.helper.layer is copied.get_submodule("0")  # type: ignore[union-attr]


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("handles cannot be copied")


def test_a_model_that_cannot_be_copied_is_warned_of_and_put_back() -> None:
    mine = nn.Sequential(Uncopied(3, 2), nn.Dropout())
    task = Task.classifier(mine)
    warned = pytest.warns(ReliabilityWarning, match="cannot be copied .*handles cannot be copied.*other threads")
    with warned, task.evaluating():
        assert task.replica is mine and not mine.training
    assert all(module.training for module in mine.modules())


def test_what_prepares_a_copy_lasts_as_long_as_the_copy() -> None:
    left: list[str] = []

    @contextmanager
    def prepare(model: nn.Module) -> Iterator[None]:
        model.prepared = True  # type: ignore[assignment]
        yield
        left.append("left")

    replica = Replica(model())
    assert replica.current(prepare) is replica.current(prepare)
    assert replica.current(prepare).prepared and not left


def test_other_threads_see_their_own_model_throughout() -> None:
    mine = model().eval()
    task = Task.classifier(mine)
    x = torch.randn(5, 3)
    with torch.no_grad():
        expected = mine(x)
    functional, theta = task.at(task.state())
    other = {name: p + 1 for name, p in theta.items()}
    seen: list[bool] = []
    inside, done = threading.Event(), threading.Event()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        inside.set()
        assert done.wait(30)
        return model(batch)[:, 0]  # type: ignore[no-any-return]

    def look() -> None:
        assert inside.wait(30)
        with torch.no_grad():
            seen.append(torch.equal(mine(x), expected))
        seen.append(all(torch.equal(t, theta[name]) for name, t in mine.state_dict().items()))
        done.set()

    thread = threading.Thread(target=look)
    thread.start()
    with task.evaluating():
        task.call(loss, {**functional.fixed, **other}, x)
    thread.join()
    assert seen == [True, True]


class Merging(nn.Linear):
    """Merges something into its weight, in place, whenever it goes to evaluation mode."""

    def train(self, mode: bool = True) -> "Merging":
        if not mode:
            self.weight.data += 1
        return super().train(mode)


def test_a_module_that_merges_weights_in_evaluation_mode_keeps_its_weights() -> None:
    mine = nn.Sequential(Merging(3, 2))
    before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    with Task.classifier(mine).evaluating():
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())
