"""The demo's experiment: train, simulate, attribute, and then really retrain without each contributor."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from imprint.attribution.result import Attribution
from imprint.attribution.scoring import attribute
from imprint.benchmarking.settings import digits
from imprint.data import Data
from imprint.evaluation.mislabels import example_losses
from imprint.evaluation.removal import RemovalCheck
from imprint.evaluation.training import measured, train_together
from imprint.runtime.progress import Progress
from imprint.simulation.runner import simulate
from imprint.sources import Sources

_BASELINES = 4


@dataclass(frozen=True)
class Outcome:
    """What the demo found: predictions, the truth beside them, and how long each part took in seconds.

    losses: the mean training loss of each contributor's examples under the attributed model.
    """

    split: int
    setting: digits.Digits
    sources: Sources
    attribution: Attribution
    check: RemovalCheck
    accuracy: float
    losses: tuple[float, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def by_size(self) -> RemovalCheck:
        """The same truth against a guess that knows only how much each contributor delivered."""
        return self.check.guessed(torch.tensor(self.sources.sizes, dtype=torch.float64).numpy())

    @property
    def retrained(self) -> int:
        """How many models were trained for the truth."""
        return len(self.check.actual) * (len(self.sources) + _BASELINES)

    @property
    def most_harmful(self) -> int:
        """The contributor whose removal is predicted to lower the loss most."""
        return int(self.check.predicted.mean(0).argmin())

    @property
    def highest_loss(self) -> int:
        """The contributor whom plain loss would suspect: the model fits its labels worst."""
        return max(range(len(self.losses)), key=self.losses.__getitem__)


def run(
    split: int = 0, retrainings: int = 24, *, progress: bool = True, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Run the experiment on one split, with this many retrainings without each contributor."""
    seconds: dict[str, float] = {}
    setting = digits.load(split)
    sources = setting.sources
    data = Data(setting.train, device=torch.device("cpu"))
    everyone = torch.arange(len(data))

    with _timed("training", seconds, say):
        kept = train_together(
            digits.model, digits.task, data, [everyone], [split], digits.TRAINING, record=digits.CHECKPOINTS
        )
        states = {epoch: {name: tensor[0] for name, tensor in stack.items()} for epoch, stack in kept.items()}
        model = digits.model()
        model.load_state_dict(states[digits.TRAINING.epochs])
        accuracy = float((model(setting.queries[0]).argmax(1) == setting.queries[1]).float().mean())

    task = digits.task(model)
    with _timed("simulating imprints", seconds, say):
        checkpoints = [states[epoch] for epoch in digits.CHECKPOINTS]
        store = simulate(task, setting.train, sources, digits.PLAN, checkpoints=checkpoints, progress=progress)
    with _timed("attributing queries", seconds, say):
        attribution = attribute(task, store, setting.queries, progress=progress)

    with _timed("retraining for the truth", seconds, say):
        actual = _removed(setting, sources, data, split, retrainings, progress)

    check = RemovalCheck.of(attribution.removal_effect, actual)
    losses = example_losses(task, setting.train)
    each = tuple(float(losses[setting.owners == owner].mean()) for owner in range(len(sources)))
    return Outcome(split, setting, sources, attribution, check, accuracy, each, seconds)


def _removed(
    setting: digits.Digits, sources: Sources, data: Data, split: int, retrainings: int, progress: bool
) -> Tensor:
    """The change of every query's loss when a contributor is removed, shape (runs, queries, contributors).

    Each run compares models of one initialisation: one without each contributor, and several with all of them, whose
    mean is the common baseline and so must be less noisy than the rest.
    """
    everyone = torch.arange(len(data))
    others = [everyone[setting.owners != contributor] for contributor in range(len(sources))]
    rounds = [everyone] * _BASELINES + others
    subsets = [subset for subset in rounds for _ in range(retrainings)]
    seeds = [1000 * (split + 1) + run for _ in rounds for run in range(retrainings)]
    orders = [10_000_000 * (split + 1) + index for index in range(len(seeds))]
    bar = Progress("retraining", len(seeds) * digits.TRAINING.epochs, "model-epochs", progress)
    models = train_together(
        digits.model, digits.task, data, subsets, seeds, digits.TRAINING, orders=orders, on_epoch=bar.advance
    )
    bar.close()
    task = digits.task(digits.model())
    losses = measured(task, models[digits.TRAINING.epochs], setting.queries, len(setting.queries[1]))
    losses = losses.reshape(len(rounds), retrainings, -1)
    return (losses[_BASELINES:] - losses[:_BASELINES].mean(0)).permute(1, 2, 0)


@contextmanager
def _timed(what: str, seconds: dict[str, float], say: Callable[[str], None]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - start
    say(f"{what}: {seconds[what]:.1f} s")
