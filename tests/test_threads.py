"""Readouts from several threads take turns: right scores, and the user's model as it was."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from imprint import Plan, Reader, Sources, Task, simulate


def test_threads_get_right_scores_and_leave_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    task = Task.classifier(model)
    data = (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    store = simulate(task, data, Sources.by_label([i % 5 for i in range(20)]), Plan(steps=3, lr=0.1), progress=False)
    readers = [Reader(task, store), Reader(task, store)]
    expected = readers[0].scores(data)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: readers[i % 2].scores(data), range(60)))
    assert all(torch.equal(scores, expected) for scores in found)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert Task.classifier(model).names == task.names
