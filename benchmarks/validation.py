"""How often a validation errs: its verdicts on good and on deliberately bad scores, over many repetitions.

    python benchmarks/validation.py --out runs/validation

Digits with the twelve contributors of the demo, 100 queries, eight removals. For "this run", recorded runs are replayed
without each contributor and without random sets of 2 to 4 of them; the good scores are the replayed removals. For
"expected", runs of other seeds are replayed without each contributor, three runs to a validation; the good scores are
path imprints of one run, as the demo has them. Each repetition draws runs, queries and removals anew. The bad scores
have the same size as the good ones: random, permuted by source, sign-flipped, ten times too large, and by size only.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from imprint import Attribution, Recording, Sources, attribute, simulate
from imprint.benchmarking.settings import digits
from imprint.evaluation import Subsets, Together, Truth, replay_seeds
from imprint.evaluation.witnessing import draw_sets, draw_strata
from imprint.plan import Question
from imprint.statistics import Array
from imprint.validation.verdict import judge

QUERIES, REMOVALS, RUNS, DESIGNS = 100, 8, 3, 12
KINDS = ("good", "random", "permuted by source", "sign-flipped", "ten times too large", "size only")
OUTCOMES = ("sizes validated", "ranks validated", "failed", "undecided")


def make_scores(kind: str, effects: Array, sizes: Array, draw: np.random.Generator) -> Array:
    """Return predicted effects (queries, sources) of a kind, from good ones."""
    scale = float(np.sqrt(np.square(effects).mean()))
    if kind == "random":
        return np.asarray(scale * (draw.normal(size=len(sizes)) + draw.normal(size=effects.shape)) / 2**0.5)
    if kind == "permuted by source":
        return effects[:, draw.permutation(len(sizes))]
    if kind == "size only":
        return np.broadcast_to(scale * sizes / np.sqrt(np.square(sizes).mean()), effects.shape)
    return effects * {"good": 1.0, "sign-flipped": -1.0, "ten times too large": 10.0}[kind]


def repeat(
    question: Question,
    good: list[Array],
    actual: list[Array],
    sets: list[tuple[int, ...]],
    sizes: Array,
    repetitions: int,
) -> dict[str, Counter[str]]:
    """Judge each kind of scores in many validations.

    good: predicted effects (queries, sources): for each run of "this run", or one for all.
    actual: of each run, the effects (queries, sets) of the removals in `sets`.
    """
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for repetition in range(repetitions):
        draw = np.random.default_rng(repetition)
        chosen = draw.choice(len(actual), 1 if question == "this_run" else RUNS, replace=False)
        queries = draw.choice(len(good[0]), QUERIES, replace=False)
        effects = good[int(chosen[0]) % len(good)][queries]
        if question == "this_run":
            first = REMOVALS * int(draw.integers(len(sets) // REMOVALS))  # eight that were drawn together
            removed = list(range(first, first + REMOVALS))
        else:
            removed = [source for (source,) in draw_strata(torch.from_numpy(effects), REMOVALS, draw)]
        removals = [sets[place] for place in removed]
        truth = np.stack([actual[int(run)][queries][:, removed] for run in chosen])
        for kind in KINDS:
            scores = make_scores(kind, effects, sizes, draw)
            verdict = judge(scores, removals, truth, sizes, question)
            found[kind][verdict.outcome] += 1
    return found


def list_runs(truth: Truth, sizes: set[int]) -> tuple[list[Array], list[tuple[int, ...]]]:
    """Return the effects of each run (queries, removals), of the removals with so many sources, and these."""
    kept = [place for place, removed in enumerate(truth.lacking) if len(removed) in sizes]
    effects = truth.effects[:, :, kept].numpy()
    return list(effects), [truth.lacking[place] for place in kept]


def predict_by_path(how: Together, split: digits.Digits, sources: Sources, folder: Path) -> Attribution:
    """Score by path imprints from early checkpoints of one run."""
    steps = digits.TRAINING.epochs * digits.TRAINING.steps(len(how.examples))
    place = folder / "run"
    run = Recording(place) if place.exists() else how.record(12345, place, every=steps // digits.TRAINING.epochs)
    states = [run.paths[epoch - 1] for epoch in digits.CHECKPOINTS]
    task = how.task_of(how.build())
    store = simulate(task, split.train, sources, digits.PLAN, checkpoints=states, out=folder / "path")
    return attribute(task, store, split.queries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder to keep everything in")
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=12, help="recorded runs that repetitions draw from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    split = digits.load(0)
    how = Together(digits.model, digits.task, split.train, digits.TRAINING)
    sources, sizes = Sources.by_label(split.owners), np.array(Sources.by_label(split.owners).sizes, dtype=np.float64)
    sets = [each for seed in range(DESIGNS) for each in draw_sets(len(sources), REMOVALS, np.random.default_rng(seed))]
    every = Subsets.without(sources, [(), *((source,) for source in range(len(sources))), *sets])
    known = (how.task_of(how.build()), split.train, split.queries, every)
    truth = replay_seeds(how, *known, runs=options.seeds, seed=5, out=options.out / "truth")
    singles, joint = list_runs(truth, {1}), list_runs(truth, {2, 3, 4})
    path = predict_by_path(how, split, sources, options.out).removal_effect.double().numpy()
    results = {
        "this_run": repeat("this_run", singles[0], *joint, sizes, options.repetitions),
        "expected": repeat("expected", [path], *singles, sizes, options.repetitions),
    }
    print(f"| question | scores | {' | '.join(OUTCOMES)} |\n|---|---|{'---:|' * len(OUTCOMES)}")
    for question, kinds in results.items():
        for kind, counts in kinds.items():
            print(f"| {question} | {kind} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |")
    (options.out / "rates.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
