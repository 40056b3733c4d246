"""The demo from scratch: which contributor of handwritten digits moved which prediction, and is it true?

Trains a small network on scikit-learn's digits, delivered by four contributors of whom one mislabels, simulates their
imprints, attributes the held-out digits, and retrains without each contributor to compare. Takes some seconds.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import imprint

CONTRIBUTORS = ("Alder", "Birch", "Cedar", "Elm")
EPOCHS, CHECKPOINTS = 12, (1, 3)


def train(x: Tensor, y: Tensor, seed: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """An ordinary training loop that keeps two early checkpoints."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoints = []
    for epoch in range(1, EPOCHS + 1):
        for batch in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
        if epoch in CHECKPOINTS:
            checkpoints.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return model, checkpoints


def mean_loss(model: nn.Module, queries: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(queries[0]), queries[1]))


def main() -> None:
    pictures, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pictures, dtype=torch.float32) / 16 - 0.3, torch.tensor(labels)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    train_set, queries = (x[order[:640]], y[order[:640]].clone()), (x[order[640:]], y[order[640:]])
    owners = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.1]), 640, replacement=True)
    careless = (owners == 2) & (torch.rand(640) < 1 / 3)
    train_set[1][careless] = (train_set[1][careless] + 3) % 10

    model, checkpoints = train(*train_set, seed=0)
    task = imprint.Task.classifier(model)
    sources = imprint.Sources.by_label(owners, names=dict(enumerate(CONTRIBUTORS)))
    store = imprint.simulate(task, train_set, sources, imprint.Plan(steps=150), checkpoints=checkpoints)
    result = imprint.attribute(task, store, queries)
    predicted = result.removal_effect.mean(0)

    seeds = range(1, 4)
    full = [mean_loss(train(*train_set, seed=seed)[0], queries) for seed in seeds]
    print("change of the mean held-out loss if the contributor were removed")
    for index, name in enumerate(CONTRIBUTORS):
        rest = owners != index
        without = [mean_loss(train(train_set[0][rest], train_set[1][rest], seed=seed)[0], queries) for seed in seeds]
        actual = sum(without) / len(without) - sum(full) / len(full)
        print(f"  {name:6} {int((~rest).sum()):4} examples: predicted {predicted[index]:+.4f}, actual {actual:+.4f}")


if __name__ == "__main__":
    main()
