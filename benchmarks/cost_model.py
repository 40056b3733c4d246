"""A cost model of attribution: measure a device, check against points that were held out, predict a company.

    OMP_NUM_THREADS=1 python benchmarks/cost_model.py measure --device cpu --out benchmarks/profiles/cpu.json
    python benchmarks/cost_model.py measure --device cuda --out benchmarks/profiles/h200.json
    python benchmarks/cost_model.py check benchmarks/profiles/cpu.json
    python benchmarks/cost_model.py predict benchmarks/profiles/h200.json --parameters 7e9 --layers 32 --width 4096 ...

`measure` takes ten to twenty minutes on a core. It times calls by turns and keeps medians; on a CPU it counts the
processor's time of one thread, which other programs disturb little. `predict` needs no device, only its profile.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from cost_clock import Clock
from cost_constants import measure_constants
from cost_points import Point, cases, fit, measure, predict, small_cases
from cost_predictions import Question, predict_all, print_plans

from imprint.advice.devices import Device
from imprint.errors import ImprintError

WITHIN = 0.3


def run_measure(options: argparse.Namespace) -> None:
    """Measure constants and points, fit, and write everything to a file."""
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    clock = Clock(device, wall=options.wall)
    command = f"benchmarks/cost_model.py measure --device {options.device}" + " --small" * options.small
    found = measure_constants(clock, command, options.repeats, small=options.small)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    listed = small_cases() if options.small else cases(device.type)
    points = measure(clock, listed, options.repeats, say)
    fitted = fit(found, points, f"fitted to points of {command}, {found.rates_source.rsplit(', ', 1)[-1]}")
    content = {"profile": fitted.to_json(), "points": [point.to_json() for point in points]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print_check(fitted, points)


def run_check(options: argparse.Namespace) -> None:
    """Compare predictions with the points of a measured profile."""
    content = json.loads(options.profile.read_text(encoding="utf-8"))
    points = [Point.from_json(each) for each in content.get("points", [])]
    if not points:
        raise SystemExit(f"{options.profile} holds no measured points: it was put together from other measurements.")
    device = Device.load(options.profile)
    if options.refit:
        device = fit(device, points, device.rates_source)
    print_check(device, points)


def print_check(device: Device, points: Sequence[Point]) -> None:
    """Print predicted beside measured, held-out points first, and how many are within the aim."""
    print(f"{device.name}\n")
    print("| point | operation | in | sources | measured | predicted | ratio |\n|---|---|---|---:|---:|---:|---:|")
    within = {True: [0, 0], False: [0, 0]}
    for point in sorted(points, key=lambda point: point.case.fits):
        shape, guess = point.case.shape, predict(device, point)
        ratio = guess.seconds / point.seconds
        within[point.case.fits][0] += 1 / (1 + WITHIN) <= ratio <= 1 + WITHIN
        within[point.case.fits][1] += 1
        print(
            f"| {'fitted' if point.case.fits else 'held out'}, {shape.layers} × {shape.width} | {point.operation} "
            f"| {point.carrier} | {point.case.sources} | {1000 * point.seconds:.4g} ms | {1000 * guess.seconds:.4g} ms "
            f"| {ratio:.2f} |"
        )
    for fits, (close, count) in within.items():
        kind = "fitted" if fits else "held out"
        print(f"\n{kind}: {close} of {count} within {WITHIN:.0%}", end="")
    print("\n\n| store | measured | predicted | ratio |\n|---|---:|---:|---:|")
    for point in points:
        guess = predict(device, point)
        if point.stored and guess.stored and not point.case.fits:
            what = f"{point.operation}, {point.carrier}, {point.case.shape.layers} × {point.case.shape.width}"
            print(f"| {what} | {point.stored:,.0f} | {guess.stored:,.0f} | {guess.stored / point.stored:.2f} |")


def run_predict(options: argparse.Namespace) -> None:
    """Predict all stages and options for one company."""
    question = Question(
        parameters=options.parameters,
        layers=options.layers,
        width=options.width,
        vocabulary=options.vocabulary,
        length=options.length,
        tokens=options.tokens,
        batch=options.batch,
        sources=int(options.sources),
        queries=options.queries,
        rank=options.rank,
        gpus=options.gpus,
        days=options.days,
    )
    device = Device.load(options.profile)
    print_plans(device, question, predict_all(device, question))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure", help="measure the constants of a device, and points to check them by")
    measuring.add_argument("--device", default="cpu")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--repeats", type=int, default=3)
    measuring.add_argument("--wall", action="store_true", help="on a CPU: the wall clock, for a machine that is free")
    measuring.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    measuring.set_defaults(run=run_measure)
    checking = commands.add_parser("check", help="compare predictions with the measured points of a profile")
    checking.add_argument("profile", type=Path)
    checking.add_argument("--refit", action="store_true", help="fit the constants anew to the points that are fitted")
    checking.set_defaults(run=run_check)
    asking = commands.add_parser("predict", help="what every stage takes, and what brings it within reach")
    asking.add_argument("profile", type=Path)
    for name, kind, default, about in (
        ("parameters", float, None, "of the model"),
        ("layers", int, None, "of the model"),
        ("width", int, None, "of the model"),
        ("vocabulary", int, 32000, "tokens that the model knows"),
        ("length", int, 1024, "tokens of an example, and of a query with its answer"),
        ("tokens", float, None, "of the training run or fine-tune"),
        ("batch", float, 2**19, "tokens of a training step"),
        ("sources", float, None, "how many publishers"),
        ("queries", float, None, "per day"),
        ("rank", int, 16, "of the adapter"),
        ("gpus", int, 64, "that there are"),
        ("days", float, 30.0, "that a replay or a simulation may take"),
    ):
        asking.add_argument(f"--{name}", type=kind, default=default, required=default is None, help=about)
    asking.set_defaults(run=run_predict)
    options = parser.parse_args()
    try:
        options.run(options)
    except ImprintError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
