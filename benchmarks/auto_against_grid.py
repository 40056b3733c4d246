"""How near `Plan.auto` comes to the best of a grid that it does not know: LDS on draws that no benchmark uses.

    python benchmarks/auto_against_grid.py digits --out runs/auto
    python benchmarks/auto_against_grid.py mnist-mlp --device cuda --out runs/auto

The grid, fixed beforehand: λ in fourteen steps of two below the largest curvature of all checkpoints, the same at each
of them, for every contiguous set of checkpoints, scores summed; and T = ∞. Two training runs, one draw of halves.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from imprint.benchmarking.bench import Bench
from imprint.benchmarking.methods import imprints
from imprint.benchmarking.settings.catalogue import SETTINGS, load_protocol
from imprint.benchmarking.sweep import ScoreParts
from imprint.evaluation.metrics import lds
from imprint.plan import Settings

DRAW = 100  # and runs from this number on: the benchmark has draws 1 to 3 and runs below a hundred
STEPS = 14


def spearman(predicted: Tensor, actual: Tensor) -> float:
    """The mean over queries of rank correlations, (queries, halves); there are no ties, and the grid is large."""
    ranks = [t.argsort(1).argsort(1).double() - (t.shape[1] - 1) / 2 for t in (predicted, actual.to(predicted))]
    a, b = (rank / rank.norm(dim=1, keepdim=True) for rank in ranks)
    return float((a * b).sum(1).mean())


def best_of_grid(bench: Bench, run: int) -> tuple[float, dict[str, object]]:
    """The highest LDS of the grid from one run, and where it is."""
    epochs, truth = bench.protocol.epochs, bench.first_runs[0]
    found = [ScoreParts.at(bench, state, "margin", 300) for state in bench.states([run])[0]]
    kept = truth.subsets.membership().to(found[0].products)
    top = max(each.frozen.largest for each in found)
    best, where = -np.inf, {}
    for damping in top * 2.0 ** -np.arange(STEPS):
        settings = Settings("infinite", 1.0, float(damping), 1.0)
        halves = [each.scores(settings, 1.0) @ kept.T for each in found]  # predictions of halves, of each checkpoint
        for first in range(len(halves)):
            total = torch.zeros_like(halves[0])
            for last in range(first, len(halves)):
                total += halves[last]
                reached = spearman(total, truth.values[0].T)
                if reached > best:
                    best, where = reached, {"damping": float(damping), "epochs": epochs[first : last + 1]}
    return best, where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=tuple(SETTINGS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    made = replace(load_protocol(options.setting, options.device), draws=(DRAW,))
    bench = Bench(made, options.out / options.setting)
    ratios = []
    for run in range(DRAW, DRAW + options.runs):
        scored = bench.score(imprints(), run)
        chosen = lds(scored.scores.double().cpu(), bench.first_runs[0]).estimate.value
        best, where = best_of_grid(bench, run)
        ratios.append(chosen / best)
        print(json.dumps({"run": run, "auto": chosen, "plan": scored.note, "best": best, **where}), flush=True)
    print(f"{options.setting}: Plan.auto has {np.mean(ratios):.3f} of the best")


if __name__ == "__main__":
    main()
