"""What a simulation takes, against the number of sources and of steps: log–log slopes beside the O(|B|·T) of the paths.

    python benchmarks/simulation_cost.py

Digits, a 64-32-10 perceptron, one checkpoint, full batches. Every figure is the median of three; slopes are fits over
the upper half of each range, where what is shared by all sources no longer counts. Takes about five minutes on a core.
"""

import argparse
import json
from statistics import median

import numpy as np
import torch

import imprint
from imprint.benchmarking.settings import digits

SOURCES = (8, 16, 32, 64, 128)
STEPS = (12, 25, 50, 100, 200)
ENGINES = {
    "trajectories": imprint.Plan(engine="trajectories", lr=0.05),
    "tangent": imprint.Plan(lr=0.05),
    "tangent, Gauss–Newton": imprint.Plan(lr=0.05, curvature="gauss-newton"),
    "spectral": imprint.Plan(engine="spectral", lr=0.05, directions=100),
}


def seconds(plan: imprint.Plan, steps: int, sources: int, repeats: int) -> float:
    """The median time of a simulation of so many steps for so many sources of three examples each."""
    setting = digits.load(0)
    task = digits.task(digits.model())
    groups = imprint.Sources.groups({b: [3 * b, 3 * b + 1, 3 * b + 2] for b in range(sources)})
    settings = {**plan.to_json(), "steps": steps}
    found = [
        imprint.simulate(task, setting.train, groups, imprint.Plan.from_json(settings), progress=False)
        for _ in range(repeats)
    ]
    return float(median(store.manifest.cost.seconds for store in found))


def slope(x: tuple[int, ...], y: list[float]) -> float:
    """Of log y on log x over the upper half of the range."""
    half = len(x) // 2
    return float(np.polyfit(np.log(x[half:]), np.log(y[half:]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = {}
    print(f"{'engine':24s} {'against |B| at T = 50':>39s}  slope   {'against T at |B| = 32':>39s}  slope")
    for name, plan in ENGINES.items():
        across = [seconds(plan, 50, count, options.repeats) for count in SOURCES]
        along = [seconds(plan, steps, 32, options.repeats) for steps in STEPS]
        results[name] = {"sources": across, "steps": along}
        shown = [" ".join(f"{value:7.2f}" for value in row) for row in (across, along)]
        print(f"{name:24s} {shown[0]}  {slope(SOURCES, across):5.2f}   {shown[1]}  {slope(STEPS, along):5.2f}")
    if options.json:
        print(json.dumps({"sources": SOURCES, "steps": STEPS, "seconds": results}))


if __name__ == "__main__":
    main()
