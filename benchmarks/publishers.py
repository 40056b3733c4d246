"""Who moved which answer of a fine-tuned language model: State of the Union addresses as sources, SmolLM2 as the model.

    python benchmarks/publishers.py prepare --out runs/publishers
    python benchmarks/publishers.py run --out runs/publishers --device cuda

`prepare` downloads and expands the model. `run` fine-tunes it with LoRA on addresses of 16 presidents, records that
run and replays it without each president. It compares the sums of these removals, and every rival, with replays
without sets of two, three and four presidents (*this run*), and with replays of other seeds (*expected*). What is
finished is kept in the folder and not done again. `glance` shows how calm the fine-tune is at some learning rates.
`report` makes tables and pictures again. `--small` runs everything on a tiny random model, in seconds.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from publishers_case import Case, Settings
from publishers_figures import draw
from publishers_results import Results, evaluate_methods, score_bergson, score_ekfac, score_embeddings, score_rivals
from publishers_served import serve
from publishers_story import check_removals, tell, validate_store
from torch import Tensor

from imprint import Attribution, Plan, Sources, attribute, simulate
from imprint.evaluation import Subsets, Truth, replay_run, replay_seeds
from imprint.tensors.vectors import root_mean_square

MAIN = ("tune", "removals", "story", "validation", "sets", "retrained")
RIVALS = ("rivals", "ekfac", "embeddings", "derivative")
STAGES = (*MAIN, *RIVALS, "expected", "path", "bergson", "served")


def tune(case: Case, results: Results) -> None:
    """Fine-tune the model, measure what it and its base know, and have it answer questions."""
    with results.timed("fine-tuning"):
        tuned, run = case.recorded()
    with results.timed("what the base knew, and answers"):
        results.keep(knowledge=case.measure_knowledge(tuned.model), recited=case.recite())
        results.keep(answers=case.answer(tuned.model))
    results.keep(steps=len(run.steps), training_seconds=run.seconds)


def remove_each(case: Case, results: Results) -> Attribution:
    """Replay the run without each president."""
    tuned, run = case.recorded()
    with results.timed(f"replaying without each of {len(case.sources)}", resumes=True):
        store = simulate(
            tuned, case.documents.columns, case.sources, run=run, out=case.folder / "store", memory=case.memory
        )
    with results.timed(f"scoring {len(case.queries)} queries"):
        result = attribute(tuned, store, case.queries)
    results.keep(chaos=result.details.get("chaos"), store_bytes=store.bytes, warnings=list(result.warnings))
    return result


def remove_sets(case: Case, results: Results) -> Truth:
    """Replay the same run without random sets of presidents: those to tune rivals on, and those to compare on."""
    tuned, run = case.recorded()
    subsets, _ = case.draw_sets()
    with results.timed(f"replaying without {len(subsets) - 1} sets", resumes=True):
        known = (run, tuned, case.documents.columns, case.queries, subsets)
        return replay_run(*known, out=case.folder / "sets", memory=case.memory)


def expect(case: Case, results: Results) -> Truth:
    """Replay runs of other seeds without each president, and without sets of them."""
    s, tuned = case.settings, case.recorded()[0]
    drop = min(s.drops[-1], len(case.sources) - 1)
    sets = Subsets.without_some(case.sources, s.expected_sets, drop=drop, seed=1).removed if s.expected_sets else ()
    singles = [(index,) for index in range(len(case.sources))]
    subsets = Subsets.without(case.sources, [(), *singles, *filter(None, sets)], n=len(case.documents.documents))
    known = (case.tune, tuned, case.documents.columns, case.queries, subsets)
    with results.timed(f"replaying {s.seeds} other seeds without {len(subsets) - 1} sets each", resumes=True):
        return replay_seeds(*known, runs=s.seeds, seed=7, out=case.folder / "expected", memory=case.memory)


def follow_path(case: Case, results: Results) -> Attribution:
    """Score by imprints along the path of training, from checkpoints of the run."""
    tuned, run = case.recorded()
    rate = max(group["lr"] for step in run.steps for group in step.groups)
    plan = Plan(preconditioner="adam", steps=case.settings.path_steps, lr=rate / 2, curvature="gauss-newton")
    if not case.small:
        plan = replace(plan, batch_size=case.settings.path_batch, source_sample=16)
    with results.timed("path imprints from two checkpoints", resumes=True):
        known = (tuned, case.documents.columns, case.sources, plan)
        store = simulate(*known, checkpoints=run.paths[1:3], out=case.folder / "path", memory=case.memory)
        return attribute(tuned, store, case.queries, readout="gradient")


def differentiate(case: Case, results: Results, weight: float = 0.9) -> Tensor:
    """Score by the derivative of the run in the weight of each president: the quantity of MAGIC, by differences.

    The run is made again by plain training with the president at a weight slightly below 1.
    """
    tuned, _ = case.recorded()
    with results.timed(f"the derivative of the run, by {len(case.sources)} runs"):
        plain = case.measure(tuned, case.train_again({}))
        rows = [
            plain - case.measure(tuned, case.train_again(dict.fromkeys(members.tolist(), weight)))
            for members in case.sources.members
        ]
    return len(case.documents.documents) * torch.stack(rows, 1) / (1 - weight)


def glance(case: Case, results: Results, rates: Sequence[float], few: int = 4) -> None:
    """Show at some learning rates what is learnt, how chaotic the run is, and how long a replay takes."""
    known = (case.device, case.small, case.models, case.memory)
    for rate in rates:
        at = Case(case.folder / f"lr-{rate:g}", replace(case.settings, lr=rate), *known)
        at.folder.mkdir(parents=True, exist_ok=True)
        with results.timed(f"lr {rate:g}: fine-tuning"):
            tuned, run = at.recorded()
        some = at.sources.members[:: max(1, len(at.sources) // few)][:few]
        groups = Sources.groups({str(index): members for index, members in enumerate(some)})
        with results.timed(f"lr {rate:g}: replaying without {few}"):
            store = simulate(tuned, at.documents.columns, groups, run=run, out=at.folder / "glance", memory=case.memory)
        result = attribute(tuned, store, at.passages)
        figures = {
            "chaos": result.details.get("chaos"),
            "effect": root_mean_square(result.removal_effect),
            "nats": {key: _mean(each) for key, each in at.measure_knowledge(tuned.model).items()},
            "warnings": list(result.warnings),
        }
        results.keep(**{f"glance {rate:g}": figures})
        print(rate, figures, flush=True)


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


def run(case: Case, results: Results, stages: Sequence[str], bergson: str = "", vllm: str = "") -> None:
    """Do the stages that are asked for, and keep the scores of every method; then make the tables."""
    results.keep(settings=asdict(case.settings), examples=len(case.documents.documents))
    if "tune" in stages:
        results.keep(device=_describe(case.device), versions={"torch": torch.__version__})
        tune(case, results)
    if "removals" in stages:
        results.add_scores({"replayed removals": remove_each(case, results).scores})
    if "story" in stages:
        tell(case, results)
    if "validation" in stages:
        validate_store(case, results)
    if "sets" in stages:
        remove_sets(case, results)
    if "retrained" in stages:
        check_removals(case, results)
    if "rivals" in stages:
        score_rivals(case, results)
    if "ekfac" in stages:
        score_ekfac(case, results)
    if "embeddings" in stages:
        score_embeddings(case, results)
    if "expected" in stages:
        expect(case, results)
    if "path" in stages:
        results.add_scores({"path imprints": follow_path(case, results).scores})
    if "derivative" in stages:
        results.add_scores({"derivative of the run": differentiate(case, results)})
    if "bergson" in stages:
        score_bergson(case, results, bergson)
    if "served" in stages:
        serve(case, results, vllm)
    evaluate_methods(case, results)
    draw(case, results)


def _describe(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "glance", "run", "report"))
    parser.add_argument("--out", type=Path, required=True, help="the folder to keep everything in")
    parser.add_argument("--models", type=Path, help="the folder with the expanded model; by default in --out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", help="what replays may use, such as 12GiB; by default a share of what is there")
    parser.add_argument("--small", action="store_true", help="a tiny random model, to see that it runs")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES[:-3])
    parser.add_argument("--bergson", help="the Python that has bergson, for the stage of that name")
    parser.add_argument(
        "--vllm", default=".venv-vllm/bin/python", help="the Python that has vLLM, for the stage served"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-4, 5e-4, 1e-3], help="learning rates of a glance")
    plain: dict[str, Any] = asdict(Settings())
    for name, value in plain.items():
        several = isinstance(value, tuple)
        kind, values = type(value[0] if several else value), "+" if several else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, nargs=values)
    given = parser.parse_args()
    named: dict[str, Any] = {name: getattr(given, name) for name in plain}
    settings = Settings(**{**named, "drops": tuple(given.drops)})
    given.out.mkdir(parents=True, exist_ok=True)
    case = Case(given.out, settings, given.device, given.small, given.models or given.out / "smollm2", given.memory)
    results = Results(given.out)
    if given.command == "prepare":
        print(f"{len(case.addresses.train)} passages; {type(case.base).__name__}")
    elif given.command == "glance":
        glance(case, results, given.rates)
    else:
        run(case, results, given.stages if given.command == "run" else [], given.bergson or sys.executable, given.vllm)


if __name__ == "__main__":
    main()
