"""Predicted against actual removal effects of contributors, over the five splits of `settings.digits`.

    python benchmarks/digits_removal.py

Prints the statistics of each split and their mean with a bootstrap interval over splits. The settings (steps, step
size, checkpoints) were chosen on other splits, from 100 on.
"""

import argparse

from imprint.benchmarking.demo.experiment import Outcome, run
from imprint.benchmarking.settings import digits
from imprint.statistics import mean_estimate


def figures(outcome: Outcome) -> dict[str, float]:
    bad = outcome.setting.mislabeller
    ours, sizes = outcome.check, outcome.by_size
    return {
        "correlation, imprint": ours.correlation.value,
        "correlation, guess by size": sizes.correlation.value,
        "correlation, ceiling": ours.ceiling,
        "without the mislabeller, imprint": ours.without(bad).correlation.value,
        "without the mislabeller, guess by size": sizes.without(bad).correlation.value,
        "without the mislabeller, ceiling": ours.without(bad).ceiling,
        "rank correlation per query, imprint": ours.rank_correlation.value,
        "rank correlation per query, guess by size": sizes.rank_correlation.value,
        "rank correlation per query, ceiling": ours.rank_ceiling,
        "slope of actual on predicted": ours.mean_slope.value,
        "mislabeller ranked most harmful": float(outcome.most_harmful == bad),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, nargs="+", default=list(digits.SPLITS))
    parser.add_argument("--retrainings", type=int, default=24)
    arguments = parser.parse_args()
    results = [figures(run(split, arguments.retrainings)) for split in arguments.splits]
    width = max(map(len, results[0]))
    print(" " * width, *(f"split {split}" for split in arguments.splits), "mean [95% over splits]", sep="  ")
    for name in results[0]:
        values = [result[name] for result in results]
        print(f"{name:{width}}", *(f"{value:7.2f}" for value in values), mean_estimate(values), sep="  ")


if __name__ == "__main__":
    main()
