"""Runs the demo's experiment: record a training run and replay it without each contributor, then retrain to check.

The replay of one run answers what each contributor did to this very model. The mean over the replays of a few seeds
answers what it does to models like this one, which retraining shows too.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from imprint.attribution.combining import combine
from imprint.attribution.result import Attribution
from imprint.attribution.scoring import attribute
from imprint.benchmarking.settings import digits
from imprint.data import Data
from imprint.errors import ReliabilityWarning
from imprint.evaluation.metrics import removal
from imprint.evaluation.mislabels import example_losses
from imprint.evaluation.removal import RemovalCheck
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together
from imprint.evaluation.training import measure_stack, train_together
from imprint.evaluation.truth import Truth
from imprint.evaluation.validating import Comparison, validate
from imprint.recording.reading import Recording
from imprint.runtime.progress import Progress
from imprint.simulation.runner import simulate
from imprint.sources import Sources

SEEDS = 4
"""How many runs the expected effects are averaged over."""
SIMULATING, ATTRIBUTING = "replaying without each contributor", "attributing queries"
_BASELINES = 4


@dataclass(frozen=True)
class Outcome:
    """What the demo found: predictions, the ground truth, and the seconds that each part took.

    attribution: of effects expected over seeds, from the replays of a few runs.
    this_run: of effects on the model of the first of these runs, and `comparison` their validation.
    losses: the mean training loss of each contributor's examples under the attributed model.
    """

    split: int
    setting: digits.Digits
    sources: Sources
    attribution: Attribution
    this_run: Attribution
    comparison: Comparison
    truth: Truth
    accuracy: float
    losses: tuple[float, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def check(self) -> RemovalCheck:
        """The predicted effects beside the actual ones."""
        return removal(self.attribution, self.truth)

    @property
    def by_size(self) -> RemovalCheck:
        """The ground truth compared with a guess from the size of each contribution alone."""
        return self.check.with_guess(torch.tensor(self.sources.sizes, dtype=torch.float64).numpy())

    @property
    def retrained(self) -> int:
        """How many models were trained for the ground truth."""
        return self.truth.runs * len(self.truth.subsets)

    @property
    def most_harmful(self) -> int:
        """The contributor whose removal is predicted to lower the loss most."""
        return int(self.check.predicted.mean(0).argmin())

    @property
    def highest_loss(self) -> int:
        """The contributor whose labels the model fits worst, and whom plain loss would suspect."""
        return max(range(len(self.losses)), key=self.losses.__getitem__)


def run(
    split: int = 0, retrainings: int = 24, *, progress: bool = True, log: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Run the experiment on one split, with this many retrainings without each contributor."""
    seconds: dict[str, float] = {}
    setting = digits.load(split)
    sources = setting.sources
    data = Data(setting.train, device=torch.device("cpu"))

    how, replays = Together(digits.model, digits.task, setting.train, digits.TRAINING), []
    with tempfile.TemporaryDirectory(prefix="imprint-demo-") as folder:
        with _timed("training", seconds, log):
            recording = how.record(split, Path(folder) / "run-0")
            model = digits.model()
            model.load_state_dict(recording.state(len(recording.steps)))
            accuracy = float((model(setting.queries[0]).argmax(1) == setting.queries[1]).float().mean())
        task = digits.task(model)
        with _timed(SIMULATING, seconds, log):
            store = simulate(task, setting.train, sources, run=recording, progress=progress)
        with _timed("validating", seconds, log):
            comparison = validate(store, setting.queries, progress=progress)
        with _timed(ATTRIBUTING, seconds, log):
            replays.append(attribute(task, store, setting.queries, progress=progress))
        with _timed(f"replaying {SEEDS - 1} more seeds", seconds, log):
            for place in range(1, SEEDS):
                other = how.record(100 * SEEDS * (split + 1) + place, Path(folder) / f"run-{place}")
                replays.append(_replay(how, other, setting, sources, progress))
    with _timed("retraining for ground truth", seconds, log):
        truth = _remove_each(setting, sources, data, split, retrainings, progress)

    losses = example_losses(task, setting.train)
    each = tuple(float(losses[setting.owners == owner].mean()) for owner in range(len(sources)))
    return Outcome(split, setting, sources, combine(replays), replays[0], comparison, truth, accuracy, each, seconds)


def _replay(how: Together, run: Recording, setting: digits.Digits, sources: Sources, progress: bool) -> Attribution:
    """Replay a run without each contributor, and score the queries."""
    model = how.build()
    model.load_state_dict(run.state(len(run.steps)))
    task = how.task_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReliabilityWarning)  # a chaotic seed is what the others are for
        store = simulate(task, setting.train, sources, run=run, progress=progress)
        return attribute(task, store, setting.queries, progress=progress)


def _remove_each(
    setting: digits.Digits, sources: Sources, data: Data, split: int, retrainings: int, progress: bool
) -> Truth:
    """Retrain without each contributor, and measure the loss of each query.

    Each run compares models of one initialisation: one without each contributor, and several with all of them. Their
    mean is the common baseline, which must be less noisy than the rest.
    """
    rounds = Subsets.without(sources, [[]] * _BASELINES + [[place] for place in range(len(sources))], n=len(data))
    subsets = [rounds.examples(place) for place in range(len(rounds)) for _ in range(retrainings)]
    seeds = [1000 * (split + 1) + run for _ in range(len(rounds)) for run in range(retrainings)]
    orders = [10_000_000 * (split + 1) + index for index in range(len(seeds))]
    bar = Progress("retraining", len(seeds) * digits.TRAINING.epochs, "model-epochs", progress)
    models = train_together(
        digits.model, digits.task, data, subsets, seeds, digits.TRAINING, orders=orders, on_epoch=bar.advance
    )
    bar.close()
    task = digits.task(digits.model())
    losses = measure_stack(task, models[digits.TRAINING.epochs], setting.queries, len(setting.queries[1]))
    return Truth(rounds, losses.reshape(len(rounds), retrainings, -1).transpose(0, 1), task.measure_name)


@contextmanager
def _timed(what: str, seconds: dict[str, float], log: Callable[[str], None]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - start
    log(f"{what}: {seconds[what]:.1f} s")
