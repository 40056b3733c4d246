"""How well replayed removals predict a model: of this very run, and of runs like it on average.

    python benchmarks/this_run.py digits
    python benchmarks/this_run.py mnist --epochs 10
    python benchmarks/this_run.py shakespeare --device cuda
    python benchmarks/this_run.py expected --case mnist --device cuda

A training run is recorded and replayed without each source; the sums of these removals are compared with replays of the
same run without 100 random sets of sources. Figures are rank correlations over the sets, per query, with 95% intervals
over queries; each table names the question of scores and ground truth, and the chaos figure of the run. `shakespeare`
first measures chaos for several learning rates and lengths, relative to the removal of a few sources, and then compares
with path imprints, products of gradients and TF-IDF on the calmest and the most chaotic of them. `expected` compares
path imprints, and the mean of replays over some seeds, with replays of other seeds. With --out, whatever is finished is
kept in the folder and not done again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imprint import Attribution, Plan, Sources, Task, attribute, simulate
from imprint.attribution.combining import weigh
from imprint.benchmarking.gradients import gradient_products
from imprint.benchmarking.settings import characters, digits, mnist
from imprint.evaluation import Subsets, Together, Training, Truth, evaluate, replay_run, replay_seeds
from imprint.evaluation.lexical import characters as stretches
from imprint.evaluation.lexical import tf_idf
from imprint.evaluation.subsets import derive_seed
from imprint.recording.reading import Recording
from imprint.runtime.threads import set_threads
from imprint.task import Batch

SETS = 100
GLANCED = 6  # sources whose removal a first measure of chaos is relative to
CALM = 0.3  # a chaos figure below it; see docs/concepts.md
SOURCES = {"digits": 24, "mnist": 25}
PATHS = {  # the plan of path imprints, and the shares of the training at which they start
    "digits": (digits.PLAN, tuple(epoch / digits.TRAINING.epochs for epoch in digits.CHECKPOINTS)),
    "mnist": (mnist.RECIPES["mlp"].path or Plan(), (0.1,)),
    "shakespeare": (
        Plan(preconditioner="adam", steps=40, lr=5e-5, curvature="gauss-newton", batch_size=256, source_sample=64),
        (0.25,),
    ),
}


@dataclass(frozen=True)
class Case:
    """What is trained, from which sources, and which queries are asked."""

    name: str
    how: Together
    queries: Batch
    sources: Sources

    @cached_property
    def columns(self) -> Any:
        return self.how.examples.gather(torch.arange(len(self.how.examples)))

    @cached_property
    def task(self) -> Task:
        return self.how.task_of(self.how.build().to(self.how.examples.device))

    @property
    def steps(self) -> int:
        return self.how.training.epochs * self.how.training.steps(len(self.how.examples))


def _move(batch: Any, device: str) -> Any:
    parts = {name: t.to(device) for name, t in batch.items()} if isinstance(batch, dict) else None
    return parts or tuple(part.to(device) for part in batch)


def _divide(n: int, count: int) -> Sources:
    """Divide the examples at random into sources of equal size."""
    return Sources.by_label((torch.randperm(n, generator=torch.Generator().manual_seed(0)) % count).tolist())


def load_digits(device: str) -> Case:
    """Load the demo's own data and training, divided into 24 sources."""
    split = digits.load(0)
    how = Together(digits.model, digits.task, _move(split.train, device), digits.TRAINING)
    return Case("digits", how, _move(split.queries, device), _divide(len(split.owners), SOURCES["digits"]))


def load_mnist(device: str, epochs: int) -> Case:
    train, queries = mnist.load()
    how = mnist.RECIPES["mlp"].together(train, device)
    how = replace(how, training=replace(how.training, epochs=epochs))
    return Case(f"mnist, {epochs} epochs", how, _move(queries, device), _divide(len(train[1]), SOURCES["mnist"]))


def load_shakespeare(device: str, training: Training, small: bool) -> tuple[Case, Callable[[], Tensor]]:
    """Load the segments of Shakespeare, and TF-IDF as scores of them."""
    text = characters.load(windows=12 if small else None)
    how = characters.together(text.train, training, device, characters.Shape(1, 16, 2) if small else None)
    name = f"shakespeare, lr {training.lr:g}, {training.epochs} epochs"
    case = Case(name, how, _move(text.queries, device), text.sources)
    return case, lambda: -tf_idf(text.passages, text.texts, stretches(5))  # F is a loss: what is similar lowers it


@dataclass
class Results:
    """Rows of a table that is printed and kept as JSON, and the seconds that each part took."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[what] = round(time.monotonic() - begin, 1)
        print(f"{what}: {self.seconds[what]:.1f} s", flush=True)

    def add(self, case: str, method: str, scores: Attribution | Tensor, truth: Truth, **more: Any) -> None:
        """Compare scores with a ground truth of removals, also of the other question."""
        metrics = {metric.name: metric for metric in evaluate(scores, truth, across=True)}
        ranks = metrics["rank correlation of removals, per query"]
        slope = metrics["slope of actual on predicted effects"]
        dropped = sorted({len(removed) for removed in truth.lacking})
        self.rows.append(
            {
                **{"case": case, "method": method, "dropped": dropped[0], "sets": len(truth.lacking)},
                **{"question": truth.question, "scores_question": ranks.scores_question},
                **{"lds": ranks.to_json(), "slope": slope.to_json(), **more},
            }
        )

    def show(self, name: str) -> None:
        """Print the table, and write it with all that is behind it."""
        figures = ("rank correlation", "ceiling", "slope", "chaos")
        head = ("case", "method", "scores answer", "truth answers", "dropped", *figures)
        print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for row in self.rows:
            lds, slope, chaos = row["lds"], row["slope"], row.get("chaos")
            found = f"{lds['value']:.3f} [{lds['low']:.3f}, {lds['high']:.3f}]"
            cells = (row["case"], row["method"], row["scores_question"] or "–", row["question"], row["dropped"], found)
            more = ("–" if each is None else f"{each:.2f}" for each in (lds["ceiling"], slope["value"], chaos))
            print(f"| {' | '.join(map(str, (*cells, *more)))} |")
        print(f"\nOver {SETS} random sets at most, 95% intervals over queries; {sum(self.seconds.values()):.0f} s.")
        place = self.folder / f"{name}.json"
        place.write_text(json.dumps({"rows": self.rows, "seconds": self.seconds}, indent=1))
        print(f"Written to {place}.")


@dataclass(frozen=True)
class Replayed:
    """A recorded run, and the scores of its replays without each source."""

    run: Recording
    result: Attribution
    folder: Path

    @property
    def chaos(self) -> float | None:
        """The chaos figure on these queries."""
        return self.result.details.get("chaos")


def replay_each(case: Case, results: Results, seed: int = 0, few: int | None = None) -> Replayed:
    """Record a run, unless that is done, and replay it without each source, or each of a few."""
    folder = results.folder / case.name.replace(", ", "-").replace(" ", "-")
    sources = case.sources if few is None else case.sources.spread(few)
    set_threads(case.task.model)
    place = folder / "run"
    if not place.exists():
        with results.timed(f"{case.name}: recording {case.steps} steps"):
            case.how.record(seed, place, every=max(1, case.steps // 20))
    run = Recording(place)
    case.task.model.load_state_dict(run.state(len(run.steps)), strict=False)
    with results.timed(f"{case.name}: replaying without each of {len(sources)} sources"):
        store = simulate(case.task, case.columns, sources, run=run, out=folder / f"removals-{len(sources)}")
        result = attribute(case.task, store, case.queries)
    return Replayed(run, result, folder)


def drop_sets(case: Case, replayed: Replayed, drop: int, results: Results) -> Truth:
    """Replay the run without random sets of sources."""
    subsets = Subsets.without_some(case.sources, SETS, drop=drop, seed=1)
    with results.timed(f"{case.name}: replaying without {SETS} sets of {drop}"):
        out = replayed.folder / f"truth-{drop}"
        return replay_run(replayed.run, case.task, case.columns, case.queries, subsets, out=out)


def follow_path(kind: str, case: Case, run: Recording, folder: Path, results: Results) -> Attribution:
    """Score by imprints along the path of training, from checkpoints of the run."""
    plan, shares = PATHS[kind]
    if plan.batch_size and plan.batch_size >= len(case.how.examples):  # a small case takes all examples in every step
        plan, shares = replace(plan, batch_size=None, source_sample=None, steps=2), shares[:1]
    wanted = [share * case.steps for share in shares]
    chosen = [min(range(1, len(run.checkpoints)), key=lambda i: abs(run.checkpoints[i] - step)) for step in wanted]
    states = [run.paths[index - 1] for index in dict.fromkeys(chosen)]
    with results.timed(f"{case.name}: path imprints from {len(states)} checkpoints"):
        store = simulate(case.task, case.columns, case.sources, plan, checkpoints=states, out=folder / "path")
        return attribute(case.task, store, case.queries, readout="gradient")


def measure_run(case: Case, drops: list[int], results: Results) -> None:
    """Compare sums of removals with sets that were really dropped from the same run."""
    replayed = replay_each(case, results)
    for drop in drops:
        truth = drop_sets(case, replayed, drop, results)
        results.add(case.name, "replayed removals", replayed.result, truth, chaos=replayed.chaos)


def measure_chaos(case: Case, results: Results) -> float:
    """Measure the chaos of a training, relative to the removal of a few sources."""
    glance = replay_each(case, results, few=GLANCED)
    loss = float(glance.run.steps[-1].batches[0].loss or float("nan"))
    print(f"{case.name}: chaos {glance.chaos:.3f}, loss of the last batch {loss:.3f}", flush=True)
    return glance.chaos or 0.0


def measure_shakespeare(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the chaos of several trainings, then compare methods on a calm and on a chaotic one."""
    found = []
    for lr, epochs in product(arguments.lr, arguments.epochs):
        batch_size = 4 if arguments.small else characters.TRAINING.batch_size
        training = replace(characters.TRAINING, lr=lr, epochs=epochs, batch_size=batch_size)
        found.append(load_shakespeare(arguments.device, training, arguments.small))
    if len(found) > 1:
        found.sort(key=lambda each: measure_chaos(each[0], results))
    for case, lexical in found[:1] + found[1:][-1:]:
        similar, replayed = lexical(), replay_each(case, results)
        end = replayed.run.state(len(replayed.run.steps))
        data = case.how.examples
        scores: dict[str, Attribution | Tensor] = {
            "replayed removals": replayed.result,
            "path imprints": follow_path("shakespeare", case, replayed.run, replayed.folder, results),
            "gradient dot product": gradient_products(case.task, end, data, case.sources, case.queries),
            "TF-IDF, 5 characters": similar,
        }
        kind = "calm" if (replayed.chaos or 0.0) < CALM else "chaotic"
        for drop in arguments.drop:
            truth = drop_sets(case, replayed, drop, results)
            for method, each in scores.items():
                results.add(f"{case.name} ({kind})", method, each, truth, chaos=replayed.chaos)
        results.show("shakespeare")


def measure_expected(arguments: argparse.Namespace, results: Results) -> None:
    """Compare path imprints, and the mean of replays over k seeds, with replays of other seeds."""
    kind = arguments.case
    case = load_digits(arguments.device) if kind == "digits" else load_mnist(arguments.device, arguments.epochs[0])
    singles, known = Subsets.without_each(case.sources), (case.task, case.columns, case.queries)
    with results.timed(f"{case.name}: replaying {arguments.seeds} seeds without each source"):
        ours = replay_seeds(
            case.how, *known, singles, runs=arguments.seeds, seed=1, out=results.folder / f"expected-{kind}-ours"
        )
    drawn = [Subsets.without_some(case.sources, SETS, drop=drop, seed=1).removed[1:] for drop in arguments.drop]
    every = Subsets.without(case.sources, [(), *singles.removed[1:], *(removed for sets in drawn for removed in sets)])
    with results.timed(f"{case.name}: replaying {arguments.seeds} other seeds without each source and each set"):
        others = replay_seeds(
            case.how, *known, every, runs=arguments.seeds, seed=2, out=results.folder / f"expected-{kind}-others"
        )
    with results.timed(f"{case.name}: recording a run for its checkpoints"):
        place = results.folder / f"expected-{kind}-run"
        seed = derive_seed(1, 0)
        run = Recording(place) if place.exists() else case.how.record(seed, place, every=max(1, case.steps // 20))
    path = follow_path(kind, case, run, results.folder / f"expected-{kind}", results)
    effects = ours.effects  # (seeds, queries, sources)
    for drop in (1, *arguments.drop):
        truth = select_sets(others, drop)
        results.add(case.name, "path imprints", path, truth)
        for k in sorted({1, 2, 4, arguments.seeds}):
            scores = -others.subsets.n * effects[:k].mean(0)
            results.add(case.name, f"mean of replays over {k} seed{'s' * (k > 1)}", scores, truth)
            together, *_ = weigh(path.removal_effect.double(), effects[:k])
            results.add(case.name, f"both combined, {k} seed{'s' * (k > 1)}", -others.subsets.n * together, truth)


def select_sets(truth: Truth, drop: int) -> Truth:
    """Return the ground truth of the sets with so many sources."""
    kept = [index for index, removed in enumerate(truth.subsets.removed) if len(removed) in (0, drop)]
    subsets = replace(truth.subsets, removed=tuple(truth.subsets.removed[index] for index in kept))
    return replace(truth, subsets=subsets, values=truth.values[:, kept])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    options: dict[str, dict[str, Any]] = {
        "digits": {"drop": [2, 6]},
        "mnist": {"drop": [3, 6, 12], "epochs": [10]},
        "shakespeare": {"drop": [2, 6], "epochs": [6], "lr": [5e-4, 2e-3]},
        "expected": {"drop": [2, 6], "epochs": [10]},
    }
    for name, given in options.items():
        command = commands.add_parser(name)
        command.add_argument("--device", default="cpu")
        command.add_argument("--out", type=Path, help="a folder to keep everything in; temporary by default")
        command.add_argument("--drop", type=int, nargs="+", default=given["drop"], help="sources in a set")
        if "epochs" in given:
            command.add_argument("--epochs", type=int, nargs="+", default=given["epochs"])
        if "lr" in given:
            command.add_argument("--lr", type=float, nargs="+", default=given["lr"])
        if name == "shakespeare":
            command.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
        if name == "expected":
            command.add_argument("--case", choices=("digits", "mnist"), default="digits")
            command.add_argument("--seeds", type=int, default=8, help="runs to average, and as many to compare with")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = Results(arguments.out or Path(temporary))
        results.folder.mkdir(parents=True, exist_ok=True)
        if arguments.command == "digits":
            measure_run(load_digits(arguments.device), arguments.drop, results)
        elif arguments.command == "mnist":
            for epochs in arguments.epochs:
                measure_run(load_mnist(arguments.device, epochs), arguments.drop, results)
        elif arguments.command == "shakespeare":
            measure_shakespeare(arguments, results)
        else:
            measure_expected(arguments, results)
        results.show(arguments.command)


if __name__ == "__main__":
    main()
