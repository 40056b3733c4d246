"""The uses shown in docs/gallery.md, with their outcomes: wrong labels, a harmful source, brittleness, near-duplicates.

    python benchmarks/gallery.py --out docs/images

All on scikit-learn's digits, a 64-32-10 perceptron and one training run; retrainings are many models at once. Takes
some minutes on two cores.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import imprint
from imprint.benchmarking.settings import digits
from imprint.data import Data
from imprint.evaluation.brittleness import brittleness
from imprint.evaluation.mislabels import detection_auc, example_losses, mislabel_auc
from imprint.evaluation.retraining import retrain
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together
from imprint.evaluation.training import train_together
from imprint.task import Parameters

PLAN = imprint.Plan(steps=30)
EPOCHS = (4, 8)
Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """A model trained once on some data, with the checkpoints that were kept, and the imprints of every example."""

    data: Pairs
    states: dict[int, Parameters]

    @classmethod
    def on(cls, data: Pairs, seed: int = 0) -> "Trained":
        columns = Data(data, device=torch.device("cpu"))
        everyone = torch.arange(len(columns))
        kept = train_together(
            digits.model, digits.task, columns, [everyone], [seed], digits.TRAINING, record=(*EPOCHS, 20)
        )
        return cls(data, {epoch: {n: t[0] for n, t in stack.items()} for epoch, stack in kept.items()})

    @property
    def checkpoints(self) -> list[Parameters]:
        return [self.states[epoch] for epoch in EPOCHS]

    def imprints(self) -> imprint.Store:
        sources = imprint.Sources.per_example(len(self.data[1]))
        return imprint.simulate(digits.task(digits.model()), self.data, sources, PLAN, checkpoints=self.checkpoints)


def split(seed: int, train: int = 800) -> tuple[Pairs, Pairs]:
    """Training data and queries of one division of the digits, with right labels."""
    setting = digits.load(seed)
    pictures = torch.cat([setting.train[0], setting.queries[0]])
    right = setting.train[1].clone()
    right[setting.mislabelled] = -1  # unknown here: those examples are left out
    labels = torch.cat([right, setting.queries[1]])
    known = labels >= 0
    return (pictures[known][:train], labels[known][:train]), setting.queries


def wrong_labels(out: Path, seed: int = 0) -> None:
    """Flip a tenth of the labels; self-influence finds them."""
    (x, y), _ = split(seed)
    draw = np.random.default_rng(seed)
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.from_numpy(draw.choice(len(y), len(y) // 10, replace=False))] = True
    given = y.clone()
    given[wrong] = (y[wrong] + torch.from_numpy(draw.integers(1, 10, int(wrong.sum())))) % 10
    trained = Trained.on((x, given), seed)
    task = digits.task(digits.model())
    influence = imprint.self_influence(task, trained.imprints(), (x, given))
    losses = example_losses(task, (x, given), checkpoint=trained.states[20])
    print("wrong labels: ", mislabel_auc(influence, wrong, losses))
    for name, epochs in (("Grad-Dot, last epoch", (20,)), ("TracIn, the same checkpoints", EPOCHS)):
        suspicion = sum(each_gradient(trained.states[epoch], x, given).square().sum(1) for epoch in epochs)
        print(f"  {name}: ", detection_auc(torch.as_tensor(suspicion), wrong))
    first = influence.argsort()[:40]
    by_loss = int(wrong[losses.argsort(descending=True)[:40]].sum())
    print(
        f"  of the 40 most suspicious, {int(wrong[first].sum())} are wrong (by plain loss {by_loss}), of {wrong.sum()}"
    )
    figure, axes = plt.subplots(4, 10, figsize=(9, 4.4), layout="constrained")
    for axis, index in zip(axes.flat, first.tolist(), strict=True):
        axis.imshow(x[index].reshape(8, 8), cmap="gray_r")
        axis.set_title(str(int(given[index])), color="#c8553d" if wrong[index] else "0.4", fontsize=11)
        axis.axis("off")
    figure.suptitle(
        "The 40 training examples that pull hardest on themselves, with the label they came with (red: wrong)"
    )
    figure.savefig(out / "gallery-labels.png", dpi=110)


def each_gradient(theta: Parameters, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the loss of each example, shape (examples, parameters)."""
    model = digits.model()

    def loss(theta: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, theta, (x[None],)), y[None])

    gradients = vmap(grad(loss), (None, 0, 0))(theta, x, y)
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1)


def harmful_source(seed: int = 0, runs: int = 24) -> None:
    """Remove the contributor that is predicted to harm most, and retrain."""
    setting = digits.load(seed)
    trained = Trained.on(setting.train, seed)
    task = digits.task(digits.model())
    store = imprint.simulate(task, setting.train, setting.sources, digits.PLAN, checkpoints=trained.checkpoints)
    effect = imprint.attribute(task, store, setting.queries).removal_effect.mean(0)
    worst = int(effect.argmin())
    train = Together(digits.model, digits.task, Data(setting.train, device=torch.device("cpu")), digits.TRAINING)
    right = imprint.Task(digits.model(), loss=task.loss, measure=lambda m, b: (m(b[0]).argmax(1) == b[1]).float())
    subsets = Subsets.without_each(setting.sources, only=[worst])
    for what, measured in (("loss", task), ("share of right answers", right)):
        truth = retrain(train, measured, setting.queries, subsets, runs=runs, seed=seed)
        before, after = truth.values[:, 0].mean(1), truth.values[:, 1].mean(1)
        change = after - before
        error = 2 * float(change.std()) / runs**0.5
        print(
            f"harmful source: without {setting.sources.names[worst]} (mislabels: {worst == setting.mislabeller}) the "
            f"{what} goes from {float(before.mean()):.4f} to {float(after.mean()):.4f}, change "
            f"{float(change.mean()):+.4f} ± {error:.4f}"
        )


def brittle(seed: int = 0, queries: int = 40) -> None:
    """Remove what holds up a prediction most, and see whether it flips."""
    train, held_out = split(seed)
    trained = Trained.on(train, seed)
    margin = imprint.Task.classifier(
        digits.model(), measure="margin", regulariser=digits.task(digits.model()).regulariser
    )
    margin.model.load_state_dict(trained.states[20])
    values = margin.measure(margin.model, held_out)
    chosen = torch.nonzero(values > 0)[:, 0][:queries]
    asked = (held_out[0][chosen], held_out[1][chosen])
    store = trained.imprints()
    result = imprint.attribute(margin, store, asked)
    together = Together(digits.model, digits.task, Data(train, device=torch.device("cpu")), digits.TRAINING)
    sources = imprint.Sources.per_example(len(train[1]))
    print(
        "brittleness: ",
        brittleness(together, margin, asked, result, sources, removed=(5, 10, 20, 40), runs=3, seed=seed),
    )


def near_duplicates(out: Path, seed: int = 0, count: int = 20) -> None:
    """Hide a noisy copy of each query in the training data, and ask which example is nearest to it.

    Effects alone point at examples that pull hard on everything; relative to the root of an example's pull on itself,
    s(b, q)/√|s(b, b)|, they are a likeness.
    """
    train, held_out = split(seed)
    draw = torch.Generator().manual_seed(seed)
    asked = (held_out[0][:count], held_out[1][:count])
    copies = asked[0] + 0.3 * torch.randn(asked[0].shape, generator=draw)
    data = (torch.cat([train[0], copies]), torch.cat([train[1], asked[1]]))
    planted = (len(train[1]) + torch.arange(count))[:, None]
    trained, task = Trained.on(data, seed), digits.task(digits.model())
    store = trained.imprints()
    effect = imprint.attribute(task, store, asked).removal_effect
    likeness = effect / imprint.self_influence(task, store, data).abs().sqrt()
    gradients = each_gradient(trained.states[20], *data)
    dots = each_gradient(trained.states[20], *asked) @ gradients.T
    guesses = {
        "likeness": likeness,
        "effect alone": effect,
        "gradient cosine, last epoch": dots / gradients.norm(dim=1),
        "distance of pixels": -torch.cdist(asked[0], data[0]),
    }
    for name, guess in guesses.items():
        place = (guess.argsort(dim=1, descending=True) == planted).nonzero()[:, 1]
        first, among = int((place == 0).sum()), int((place < 5).sum())
        print(f"near-duplicates, {name}: first for {first} of {count}, among the first 5 for {among}")
    order = likeness.argsort(dim=1, descending=True)
    figure, axes = plt.subplots(4, 6, figsize=(6, 4.6), layout="constrained")
    for row, line in enumerate(axes):
        pictures = [asked[0][row], *data[0][order[row, :5]]]
        for column, (axis, picture) in enumerate(zip(line, pictures, strict=True)):
            axis.imshow(picture.reshape(8, 8), cmap="gray_r")
            axis.axis("off")
            copy = column and int(order[row, column - 1]) >= len(train[1])
            axis.set_title("query" if not column else "copy" if copy else "", fontsize=9, color="#2a6f97")
    figure.suptitle("Each query with the five training examples most like it to the model")
    figure.savefig(out / "gallery-duplicates.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    wrong_labels(out)
    harmful_source()
    brittle()
    near_duplicates(out)


if __name__ == "__main__":
    main()
