"""Products of gradients are those of the examples' own gradients, and TRAK's formula needs no projection."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Sources, Task
from imprint.benchmarking.gradients import multiply_gradients, sum_by_source


def make() -> tuple[Task, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(9, 4, generator=draw, dtype=torch.float64), torch.randint(0, 3, (9,), generator=draw)
    return Task.classifier(model, measure="logprob"), (x[:6], y[:6]), (x[6:], y[6:])


def gradients(task: Task, data: tuple[Tensor, Tensor]) -> Tensor:
    rows = []
    for x, y in zip(*data, strict=True):
        task.model.zero_grad()
        (-F.cross_entropy(task.model(x[None]), y[None])).backward()
        rows.append(torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None]))
    return torch.stack(rows)


def test_products_and_trak_agree_with_gradients_taken_one_by_one() -> None:
    task, train, queries = make()
    learnt, asked = gradients(task, train), gradients(task, queries)
    found = multiply_gradients(task, task.model.state_dict(), train, queries, batch_size=4)
    torch.testing.assert_close(found.dot, asked @ learnt.T)
    torch.testing.assert_close(found.cosine, F.cosine_similarity(asked[:, None], learnt[None], dim=2))
    level = 0.3 * learnt.square().sum(1).mean()
    inverse = torch.linalg.inv(learnt.T @ learnt + level * torch.eye(learnt.shape[1], dtype=torch.float64))
    torch.testing.assert_close(found.trak(0.3), asked @ inverse @ learnt.T)


def test_a_source_has_the_sum_of_its_examples() -> None:
    task, train, queries = make()
    found = multiply_gradients(task, task.model.state_dict(), train, queries).dot
    sources = Sources.by_label(["a", "b", "a", "a", "b", "b"])
    torch.testing.assert_close(
        sum_by_source(found, sources.members), torch.stack([found[:, [0, 2, 3]].sum(1), found[:, [1, 4, 5]].sum(1)], 1)
    )


def test_a_positive_product_means_that_a_step_on_the_example_raises_the_query() -> None:
    task, train, queries = make()
    found = multiply_gradients(task, task.model.state_dict(), train, queries).dot
    before = task.measure(task.model, queries).detach()
    steps = _steps(task, train, 2)
    with torch.no_grad():
        for p, part in zip(task.model.parameters(), steps, strict=True):
            p.add_(1e-5 * part)
    risen = task.measure(task.model, queries).detach() - before
    torch.testing.assert_close(risen / 1e-5, found[:, 2], rtol=1e-3, atol=1e-5)


def _steps(task: Task, train: tuple[Tensor, Tensor], example: int) -> list[Tensor]:
    loss = F.cross_entropy(task.model(train[0][example : example + 1]), train[1][example : example + 1])
    return [-g for g in torch.autograd.grad(loss, list(task.model.parameters()))]
