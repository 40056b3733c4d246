"""How well the documents inside a source are ordered: `drill_down` beside products of gradients.

    OMP_NUM_THREADS=1 python benchmarks/inside.py

The demo's digits, with the examples of each contributor cut into documents of six. Every contributor with at least ten
documents is looked into. The ground truth is made by replays without each document: of the run that is looked into, and
averaged over other runs. Figures are rank correlations over the documents, per query, means over queries and
contributors, with 95% intervals over contributors.
"""

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint import Plan, Sources, attribute, drill_down, simulate
from imprint.benchmarking.gradients import gradient_products
from imprint.benchmarking.settings import digits
from imprint.errors import ReliabilityWarning
from imprint.evaluation import Together
from imprint.recording.reading import Recording
from imprint.statistics import mean_estimate, ranks

EACH, FEWEST = 6, 10
Scores = np.ndarray[Any, np.dtype[np.float64]]


def correlate(scores: Tensor, truth: Tensor) -> Scores:
    """Return the rank correlation over documents of every query."""
    first, second = (ranks(each.double().numpy()) for each in (scores, truth))
    first, second = (each - each.mean(1, keepdims=True) for each in (first, second))
    return np.asarray((first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="the first is looked into, the others are averaged")
    parser.add_argument("--queries", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ReliabilityWarning)
    split = digits.load(0)
    how = Together(digits.model, digits.task, split.train, digits.TRAINING)
    task, data = how.task_of(how.build()), how.examples
    owners, documents = Sources.by_label(split.owners.tolist()), [0] * len(data)
    for members in owners.members:
        for place, example in enumerate(members.tolist()):
            documents[example] = place // EACH
    queries = tuple(column[: options.queries] for column in split.queries)
    found: dict[str, list[list[Scores]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = [how.record(seed, Path(folder) / str(seed), every=30) for seed in range(options.runs)]
        for source, size in zip(owners.ids, owners.sizes, strict=True):
            if size < EACH * FEWEST:
                continue
            inside = owners.inside(source, documents, len(data))
            helps = []  # of every run: what each document does to each query, with the sign of scores
            for run in runs:
                load(task, run)
                store = simulate(task, split.train, inside, run=run, progress=False)
                helps.append(attribute(task, store, queries, progress=False).scores)
            truths = helps[0], torch.stack(helps[1:]).mean(0)
            load(task, runs[0])
            given: dict[str, Any] = {"documents": documents, "checkpoints": runs[0].paths, "progress": False}
            looked = drill_down(task, split.train, owners, source, queries, **given)
            path = Plan.auto(task, split.train, inside, runs[0].paths, progress=False)
            walked = drill_down(task, split.train, owners, source, queries, plan=path, **given)
            end = runs[0].state(len(runs[0].steps))
            early = runs[0].state(runs[0].checkpoints[1])
            methods = {
                "`drill_down`": looked.result.scores,
                "path of `tangent`, plan chosen": walked.result.scores,
                "products of gradients, trained model": gradient_products(task, end, data, inside, queries),
                "products of gradients, a tenth of the training": gradient_products(task, early, data, inside, queries),
                "replay of another run": helps[1],
            }
            for name, scores in methods.items():
                others = truths[0], torch.stack(helps[2:]).mean(0) if name == "replay of another run" else truths[1]
                found.setdefault(name, []).append([correlate(scores, truth) for truth in others])
            print(f"{source}: {len(inside)} documents", flush=True)
    print("| scores | this run | mean of other runs |\n|---|---|---|")
    for name, each in found.items():
        cells = []
        for place in (0, 1):
            means = [float(np.nanmean(one[place])) for one in each]
            estimate = mean_estimate(means, (-1, 1))
            cells.append(f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]")
        print(f"| {name} | {' | '.join(cells)} |")


def load(task: Any, run: Recording) -> None:
    task.model.load_state_dict(run.state(len(run.steps)))


if __name__ == "__main__":
    main()
