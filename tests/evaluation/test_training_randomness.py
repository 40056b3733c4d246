"""The order of examples and dropout are drawn from a model's seed, whatever is trained beside it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Task
from imprint.evaluation.training import Training, measure_stack, models_at_once
from tests.evaluation.trainings import EXAMPLES, PERCEPTRON, SEEDS, SUBSETS, TRAINING, Kind


def test_another_order_gives_another_model_of_the_same_initialisation() -> None:
    weight, again = (
        PERCEPTRON.together(SUBSETS[:1] * 2, [3, 3], TRAINING, orders=orders)["0.weight"] for orders in ([1, 2], [1, 1])
    )
    assert not torch.allclose(weight[0], weight[1])
    torch.testing.assert_close(again[0], again[1])


def test_the_same_seeds_give_the_same_models() -> None:
    first, again = (dropping().together(SUBSETS, SEEDS, TRAINING) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor)


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    dropping().together(SUBSETS, SEEDS, TRAINING)
    models_at_once(dropping().build, Task.classifier, dropping().inputs, TRAINING)
    assert torch.equal(torch.get_rng_state(), before)


def dropping(p: float = 0.5) -> Kind:
    """Models that start from the same weights whatever the seed, so that only their dropout can differ."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3)).double()
        for number, parameter in enumerate(model.parameters()):
            start = torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).sin()
            parameter.data = start.reshape(parameter.shape) / (number + 1)
        return model

    return Kind(build, PERCEPTRON.data)


def trained_weight(p: float, seeds: list[int]) -> Tensor:
    return dropping(p).together([torch.arange(30)] * 2, seeds, TRAINING, orders=[0, 0])["3.weight"]


def test_models_of_different_seeds_draw_different_dropout() -> None:
    dropped, whole = trained_weight(0.5, [1, 2]), trained_weight(0.0, [1, 2])
    torch.testing.assert_close(whole[0], whole[1])
    assert float((dropped[0] - dropped[1]).abs().max()) > 1e-3


def test_models_of_different_seeds_draw_different_dropout_also_in_different_groups() -> None:
    """As runs of a removal do, each of which is a group that shares its dropout."""

    def alone(seed: int) -> Tensor:
        return dropping().together([torch.arange(30)], [seed], TRAINING, orders=[0])["3.weight"]

    assert torch.equal(alone(1), alone(1))
    assert float((alone(1) - alone(2)).abs().max()) > 1e-3


def test_models_of_one_seed_share_their_dropout() -> None:
    dropped, whole = trained_weight(0.5, [1, 1]), trained_weight(0.0, [1, 1])
    torch.testing.assert_close(dropped[0], dropped[1])
    assert float((dropped[0] - whole[0]).abs().max()) > 1e-3  # and they do have some


def test_dropout_does_not_repeat_the_random_numbers_of_the_initialisation() -> None:
    """The first mask of a model is not the one that its seed would draw first."""

    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shown = nn.Parameter(torch.zeros(64, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (F.dropout(torch.ones_like(self.shown), 0.5) * self.shown).sum() + 0 * x[:, 0]

    def task(model: nn.Module) -> Task:
        return Task(model, loss=lambda m, batch: m(batch[0]))

    once = Training(epochs=1, lr=1.0, batch_size=EXAMPLES)
    first = Kind(Mask, PERCEPTRON.data, task).together([torch.arange(EXAMPLES)], [5], once)["shown"][0] != 0
    with torch.random.fork_rng():
        torch.manual_seed(5)
        own = F.dropout(torch.ones(64, dtype=torch.float64), 0.5) != 0
    assert 10 < int(first.sum()) < 54
    assert 10 < int((first ^ own).sum()) < 54


def test_dropout_of_models_trained_together_has_the_distribution_of_models_trained_alone() -> None:
    """Of 400 models each, that differ by their dropout only: means and variances of logits, in standard errors."""
    models, kind, everything = 400, dropping(), torch.arange(EXAMPLES)
    training = Training(epochs=2, lr=0.2, batch_size=8, momentum=0.9, shuffle=False)
    stack = kind.together([everything] * models, list(range(models)), training)
    queries = (kind.data[0][:2].repeat_interleave(3, 0), torch.arange(3).repeat(2))
    task = Task.classifier(kind.build(), measure="logit")
    together = measure_stack(task, stack, queries, 6)
    torch.manual_seed(12345)
    rows = []
    for _ in range(models):
        model = kind.build().train()
        optimiser = torch.optim.SGD(model.parameters(), training.lr, training.momentum)
        for _ in range(training.epochs):
            for batch in everything.split(training.batch_size):
                optimiser.zero_grad()
                F.cross_entropy(model(kind.data[0][batch]), kind.data[1][batch]).backward()
                optimiser.step()
        with torch.no_grad():
            rows.append(task.measure(model.eval(), queries))
    alone = torch.stack(rows)
    assert float(alone.var(0).min()) > 1e-4  # dropout matters here
    for power in (1, 2):  # means, then variances
        ours, theirs = ((values - (power - 1) * values.mean(0)) ** power for values in (together, alone))
        error = ((ours.var(0) + theirs.var(0)) / models).sqrt()
        assert float(((ours.mean(0) - theirs.mean(0)) / error).abs().max()) < 4
