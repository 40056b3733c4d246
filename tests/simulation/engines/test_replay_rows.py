"""The run without a source is the training that one would write by hand with that source at weight 0."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from imprint.recording.records import Clipping, Step
from imprint.simulation.engines.replay.stack import Rows, Stack
from imprint.simulation.engines.replay.training import Training as Plain
from imprint.simulation.engines.replay.training import as_recorded, find_regularised
from imprint.simulation.engines.replay.ways import find_way
from imprint.task import Parameters
from imprint.tensors.vectors import repeated
from tests.simulation.engines.trainings import Adapting, Decaying, MemoryRun, Training, classification, mlp

SOURCES: tuple[list[int], ...] = ([], [0, 1, 2, 3, 4, 5], [7, 11, 30], [39])


def replay_stacked(training: Training, run: MemoryRun) -> list[Parameters]:
    repetition = training.repetition(run)
    rows = Rows(tuple(np.array(s, dtype=np.int64) for s in SOURCES), tuple(map(str, range(len(SOURCES)))))
    with as_recorded(run.circumstances):
        stack = Stack(repetition, rows, repeated(repetition.start(), len(rows)))
        for number in repetition.steps:
            stack.step(number)
    return [{name: p.detach()[row] for name, p in stack.parameters.items()} for row in range(len(rows))]


def replay_plainly(training: Training, run: MemoryRun, leaves_out: bool = False) -> list[Parameters]:
    repetition = training.repetition(run)
    ends = []
    for source in SOURCES:
        excluded = np.zeros(training.n, dtype=bool)
        excluded[source] = True
        with as_recorded(run.circumstances):
            plain = Plain(repetition, excluded, leaves_out=leaves_out)
            for number in repetition.steps:
                plain.step(number)
        ends.append(plain.state())
    return ends


def check(ends: list[Parameters], training: Training) -> None:
    for source, end in zip(SOURCES, ends, strict=True):
        by_hand, _ = training.run(source)
        for name, tensor in end.items():
            torch.testing.assert_close(tensor, by_hand[name], rtol=1e-12, atol=1e-12, msg=f"{name} without {source}")


class Sometimes(nn.Module):
    """A layer that is left out at random, as LayerDrop does: its parameters then have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) if torch.rand([]) < 0.5 else x


class Tempered(nn.Module):
    """A layer whose one parameter is a number, such as a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.temperature


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(8, 3)
        self.first = options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.flip(1), x * 2], 1)
        x = x if self.first else x.transpose(0, 1)
        logits: Tensor = self.leave(self.encoder(self.enter(x)).mean(1 if self.first else 0))
        return logits


def words(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Words(**options).double()


def decay(model: nn.Module) -> Tensor:
    return 0.01 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()).double())


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
CASES: dict[str, Callable[[], Training]] = {
    "SGD": lambda: Training(mlp(), classification()),
    "momentum": lambda: Training(mlp(), classification(), settings={"lr": 0.2, "momentum": 0.9}),
    "Nesterov": lambda: Training(
        mlp(), classification(), settings={"lr": 0.2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
    ),
    "Adam": lambda: Training(mlp(), classification(), ADAM, {"lr": 0.02, "weight_decay": 0.01}),
    "AdamW": lambda: Training(mlp(), classification(), ADAMW, {"lr": 0.02, "betas": (0.8, 0.9)}),
    "amsgrad": lambda: Training(mlp(), classification(), ADAM, {"lr": 0.02, "amsgrad": True}),
    "RMSprop": lambda: Training(mlp(), classification(), torch.optim.RMSprop, {"lr": 0.02}),
    "clipping": lambda: Training(mlp(), classification(), clipping=Clipping("norm", 0.3)),
    "clipping by the largest": lambda: Training(mlp(), classification(), clipping=Clipping("norm", 0.1, float("inf"))),
    "clipping with a single number": lambda: Training(
        mlp(Tempered()), classification(), clipping=Clipping("norm", 0.3)
    ),
    "clipping by value": lambda: Training(mlp(), classification(), clipping=Clipping("value", 0.05)),
    "accumulation": lambda: Training(mlp(nn.Dropout(0.3)), classification(), ADAM, {"lr": 0.02}, accumulate=3),
    "schedule": lambda: Training(mlp(), classification(), ADAMW, {"lr": 0.02}, schedule=lambda t: (t + 1) / 6),
    "settings that the optimiser changes": lambda: Training(
        mlp(), classification(), Decaying, {"lr": 0.3}, schedule=lambda t: (t + 1) / 6
    ),
    "regulariser": lambda: Training(mlp(), classification(), regulariser=decay, accumulate=2),
    "dropout": lambda: Training(mlp(nn.Dropout(0.5), nn.AlphaDropout(0.2)), classification(), ADAM, {"lr": 0.02}),
    "no gradients": lambda: Training(
        mlp(Sometimes(), Sometimes()), classification(), settings={"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}
    ),
    # with Adam, biases of keys, whose gradient is 0, would follow rounding
    "transformer": lambda: Training(words(dropout=0.3), classification(), settings={"lr": 0.1, "momentum": 0.9}),
    "transformer, batch first": lambda: Training(
        words(dropout=0.3, batch_first=True, norm_first=True), classification(), settings={"lr": 0.1, "momentum": 0.9}
    ),
}


PLAIN = ("Adam", "accumulation", "clipping", "no gradients")


@pytest.mark.parametrize("case", CASES)
def test_stacked_rows_are_the_trainings_at_weight_0(case: str) -> None:
    training = CASES[case]()
    _, run = training.run()
    check(replay_stacked(training, run), training)


@pytest.mark.parametrize("case", ["dropout", "no gradients", "transformer", "transformer, batch first"])
def test_leaving_out_is_weight_0_where_examples_do_not_see_each_other(case: str) -> None:
    """The examples that stay keep their own dropout masks, wherever examples are in a tensor."""
    training = CASES[case]()
    _, run = training.run()
    check(replay_plainly(training, run, leaves_out=True), training)


@pytest.mark.parametrize(
    "case", [case if case in PLAIN else pytest.param(case, marks=pytest.mark.wide) for case in CASES]
)
def test_plain_rows_are_the_trainings_at_weight_0(case: str) -> None:
    training = CASES[case]()
    _, run = training.run()
    check(replay_plainly(training, run), training)


def test_what_an_optimiser_changes_of_its_own_settings_each_run_has_for_itself() -> None:
    """A row that had the step sizes of the recorded run would end elsewhere."""
    schedule = {"schedule": lambda t: 1.0 if t < 3 else 0.5}
    training = Training(mlp(), classification(), Adapting, {"lr": 0.3}, steps=12, **schedule)  # type: ignore[arg-type]
    _, run = training.run()
    check(replay_plainly(training, run), training)
    reset = replace(run, steps=tuple(replace(step, left=None) for step in run.steps))
    held = replay_plainly(training, reset)[1]["0.weight"]
    assert not torch.allclose(held, training.run(SOURCES[1])[0]["0.weight"], rtol=1e-3)


@pytest.mark.parametrize("in_loss", [True, False])
def test_a_regulariser_is_replayed_only_if_the_loss_of_the_run_contained_it(in_loss: bool) -> None:
    """The other way to train with it is the optimiser's own weight decay, which a replay has anyway."""
    trained = Training(mlp(), classification(), settings={"lr": 0.2, "weight_decay": 0.0 if in_loss else 0.02})
    training = replace(trained, regulariser=decay if in_loss else None)
    _, run = training.run()
    described = replace(training, regulariser=decay).repetition(run)
    assert find_regularised(described) == in_loss
    unknown = replace(described, run=replace(run, steps=tuple(map(forget_figures, run.steps))))
    assert find_regularised(unknown) == in_loss


def forget_figures(step: Step) -> Step:
    batches = tuple(replace(micro, loss=None) for micro in step.batches)
    return replace(step, batches=batches, gradient_norm=None)


def test_what_an_optimiser_remembers_of_a_single_number_is_stacked_too() -> None:
    """Adam's moments of a number are numbers, and yet each row has its own."""
    training = Training(mlp(Tempered()), classification(), torch.optim.Adam, {"lr": 0.02}, steps=6, keep=(3,))
    end, run = training.run()
    repetition = training.repetition(run, 3)
    with as_recorded(run.circumstances):
        assert find_way(repetition).one_by_one is None
        nothing = np.zeros(0, dtype=np.int64)
        stack = Stack(repetition, Rows((nothing, nothing), ("one", "two")), repeated(repetition.start(), 2))
        for number in repetition.steps:
            stack.step(number)
    for name, p in stack.parameters.items():
        torch.testing.assert_close(p.detach(), torch.stack([end[name], end[name]]), rtol=1e-12, atol=1e-12, msg=name)
