"""Products of gradients are those of plain autograd."""

import torch
from torch import Tensor, nn

from imprint import Sources, Task
from imprint.benchmarking.gradients import gradient_products
from imprint.data import Data


def test_scores_are_products_of_summed_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    y = torch.arange(9) % 2
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    sources = Sources.groups({"a": [0, 1, 2, 3, 4], "b": [4, 5], "c": [8]})

    def flat_gradient(rows: list[int]) -> Tensor:
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum")
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    expected = [[-flat_gradient([q]) @ flat_gradient(b.tolist()) for b in sources.members] for q in (6, 7)]
    data = Data((x, y), device="cpu", batch_size=2)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    found = gradient_products(Task.classifier(other), state, data, sources, (x[6:8], y[6:8]))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-10, atol=1e-12)
