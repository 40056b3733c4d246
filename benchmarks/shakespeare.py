"""A language model's sources: how well scores predict models trained on random halves of tiny Shakespeare's segments.

    python benchmarks/shakespeare.py --device cuda --out runs/shakespeare
    python benchmarks/shakespeare.py --small --out /tmp/shakespeare

Trains the truth: models on halves of the 24 segments, and models that lack one of them. Trains one more run and keeps
its checkpoints with Adam's moments; scores the held-out passages by Imprint and its rivals; prints a table and writes
results.json. Whatever is finished is kept in the folder and not done again. `--parameters` compares what may carry the
imprints, at one checkpoint. `--small` is minutes on a CPU, to see that it runs. `--look` only shows the held-out
log-likelihood after every epoch. Settings are chosen with `--tuning`, which has its own halves, seeds and passages.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import grad, vmap

from imprint import Plan, Task, attribute, language, simulate
from imprint.benchmarking.settings import shakespeare
from imprint.benchmarking.settings.shakespeare import Shakespeare, Size
from imprint.data import Data
from imprint.evaluation import Metric, Subsets, Truth, lds, retrain
from imprint.evaluation.lexical import bm25, characters, size_only, tf_idf
from imprint.evaluation.metrics import removal
from imprint.evaluation.training import measure_stack, record_together, train_together
from imprint.runtime.progress import Progress
from imprint.statistics import Array, Estimate, ceiling, correlations, mean_estimate, ranks
from imprint.store.files import write
from imprint.task import Parameters

PLAN = {
    **{"preconditioner": "adam", "momentum": 0.9, "steps": 80, "lr": 5e-4, "curvature": "gauss-newton"},
    **{"dropout": True, "batch_size": 64, "source_sample": 32},
}
PLAN_FOR = {"last": {"lr": 1e-3}, "lora": {"lr": 8e-3}}  # how it differs where blocks or an adapter carry the imprints
AIMED: dict[str, Any] = {"sample": 128, "batch_size": 64}
SMALL_PLAN = {**PLAN, "steps": 3, "batch_size": 32, "source_sample": 8}
DAMPINGS = (0.01, 0.1, 1.0, 10.0)  # of TRAK, relative to the mean variance; the best against the truth is shown
RESAMPLES = 300
STAGES = ("halves", "removals", "checkpoints")
TUNING = 1000  # seeds from here on are for choosing settings
Pair = tuple[Parameters, Parameters]


@dataclass(frozen=True)
class Bench:
    """An experiment of some size in its folder."""

    arguments: argparse.Namespace
    size: Size

    @cached_property
    def text(self) -> Shakespeare:
        return shakespeare.load(self.size, where=0.25 if self.arguments.tuning else 0.5)

    @property
    def device(self) -> torch.device:
        return torch.device(self.arguments.device)

    @property
    def seed(self) -> int:
        return TUNING if self.arguments.tuning else 0

    @cached_property
    def task(self) -> Task:
        return self.task_of(None)

    def task_of(self, parameters: str | None) -> language.LanguageTask:
        """Attribution through some of a model's parameters, or all of them."""
        return language.task(self.size.build().to(self.device), parameters=parameters)

    @cached_property
    def queries(self) -> dict[str, Tensor]:
        return {name: column.to(self.device) for name, column in self.text.queries.items()}

    @cached_property
    def folder(self) -> Path:
        """Other settings of the training have another folder."""
        told = [asdict(self.size), self.arguments.compute, self.arguments.matmul, str(self.device)]
        kind = "tuning" if self.arguments.tuning else "evaluation"
        place: Path = self.arguments.out / f"{kind}-{_digest(told)}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "settings.json").write_text(json.dumps(told))
        return place

    @cached_property
    def together(self) -> Any:
        compute = None if self.arguments.compute == "float32" else self.arguments.compute
        return self.size.together(self.text.train, self.device, at_once=self.arguments.at_once, compute=compute)

    def truth(self, subsets: Subsets, runs: int) -> Truth:
        where = self.folder / f"truth-{subsets.kind}-{len(subsets)}"
        return retrain(
            self.together, self.task, self.queries, subsets, runs=runs, seed=self.seed, out=where, batch_size=60
        )

    @cached_property
    def halves(self) -> Truth:
        count = self.arguments.halves
        return self.truth(Subsets.halves(self.text.sources, count, seed=self.seed), self.arguments.runs)

    @cached_property
    def removals(self) -> Truth | None:
        runs = self.arguments.removal_runs
        return self.truth(Subsets.without_each(self.text.sources), runs) if runs else None

    @property
    def final(self) -> int:
        """The last step of a run."""
        training = self.together.training
        return int(training.epochs * training.steps(len(self.text.owners)))

    @cached_property
    def recorded(self) -> list[int]:
        """Steps that are kept: more than are scored, so that others can be chosen without another training."""
        usual = {step for step in self.size.steps if step <= self.final}
        return sorted({*usual, *self.arguments.checkpoints, self.final})

    @cached_property
    def run_folder(self) -> Path:
        """Of the trained runs and all scores made with them: models trained beside others draw other dropout."""
        return self.folder / f"runs-{self.arguments.models}-{_digest(self.recorded)}"

    @cached_property
    def checkpoints(self) -> dict[tuple[int, int], Pair]:
        """States with Adam's moments of each run on everything, by (run, step)."""
        how, runs = self.together, self.arguments.models
        names = {
            (run, step): self.run_folder / f"run-{run}-step-{step:05}.safetensors"
            for run in range(runs)
            for step in self.recorded
        }
        if not all(file.is_file() for file in names.values()):
            if (self.run_folder / "scores").exists():
                raise SystemExit(f"{self.run_folder} has scores of checkpoints that are gone: remove it.")
            everything = [torch.arange(len(self.text.owners))] * runs
            seeds = [self.seed + 500 + run for run in range(runs)]  # none that a model of the truth has
            with closing(Progress("training", runs * how.training.epochs, "model-epochs")) as bar:
                kept = record_together(
                    *(how.build, how.task_of, how.examples, everything, seeds, how.training, self.recorded),
                    on_epoch=bar.advance,
                )
            for (run, step), file in names.items():
                write(file, partial(_save, kept[step].pair(run)))
        return {key: _load(file, self.device) for key, file in names.items()}

    def kept(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Scores by method, from the folder or made now."""
        file = self.run_folder / "scores" / f"{name}.safetensors"
        if not file.is_file():
            begin = time.monotonic()
            made = {method: scores.detach().double().cpu().contiguous() for method, scores in make().items()}
            file.parent.mkdir(exist_ok=True)
            write(file, lambda path: save_file(made, path))
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        return load_file(file)


def _save(pair: Pair, path: Path) -> None:
    parts = {
        f"{kind}:{name}": t.cpu().contiguous()
        for kind, part in zip("sm", pair, strict=True)
        for name, t in part.items()
    }
    save_file(parts, path)


def _load(file: Path, device: torch.device) -> Pair:
    tensors = load_file(file, str(device))
    state, moments = ({n[2:]: t for n, t in tensors.items() if n.startswith(kind)} for kind in ("s:", "m:"))
    return state, moments


def look(bench: Bench) -> None:
    """Held-out log-likelihood after each epoch, of models trained on everything and on halves."""
    how, sources = bench.together, bench.text.sources
    halves = Subsets.halves(sources, 3, seed=TUNING)
    subsets = [torch.arange(len(bench.text.owners)), *(halves.examples(index) for index in range(3))]
    begin, epochs = time.monotonic(), range(1, how.training.epochs + 1)
    kept = train_together(how.build, how.task_of, how.examples, subsets, [0, 1, 2, 3], how.training, record=epochs)
    print(f"{time.monotonic() - begin:.0f} s; log-likelihood per token, held out: everything, mean of three halves")
    for epoch, stack in kept.items():
        values = _measured(bench, stack)
        print(f"epoch {epoch:3}  {float(values[0].mean()):.4f}  {float(values[1:].mean()):.4f}")


def _measured(bench: Bench, stack: Parameters) -> Tensor:
    """F of the passages under each of some models, (models, queries)."""
    parts = torch.arange(len(bench.text.passages)).split(bench.arguments.chunk)
    asked = Data(bench.queries, device=bench.device)
    return torch.cat([measure_stack(bench.task, stack, asked.gather(part), len(part)) for part in parts], 1)


def lexical(bench: Bench) -> dict[str, Tensor]:
    asked, texts = bench.text.passages, bench.text.texts
    five = characters(5)
    return {
        "BM25, words": bm25(asked, texts),
        "BM25, 5 characters": bm25(asked, texts, five),
        "TF-IDF, words": tf_idf(asked, texts),
        "TF-IDF, 5 characters": tf_idf(asked, texts, five),
        "size only": size_only(asked, texts),
    }


def imprints(bench: Bench, plan: Plan, run: int, step: int, parameters: str | None = None) -> dict[str, Tensor]:
    """Our scores at one checkpoint. An adapter made for it has no moments of Adam, which are estimated then."""
    state, moments = bench.checkpoints[run, step]
    preset, _, aimed = (parameters or "").partition("+")
    task, adapted = bench.task_of(preset or None), preset.startswith("lora")
    if aimed:
        language.aim(task, bench.text.train, bench.text.sources, checkpoint=state, **AIMED)
    plan = replace(plan, **bench.arguments.plan_for.get(preset.partition(":")[0], {}))
    adam = plan.preconditioner == "adam" and not adapted
    store = simulate(
        task,
        bench.text.train,
        bench.text.sources,
        plan,
        checkpoints=[(state, moments) if adam else state],
        out=bench.run_folder / "stores" / f"{_digest([plan.to_json(), parameters])}-run-{run}-step-{step:05}",
        batch_size=bench.arguments.chunk,
        memory=bench.arguments.memory,
    )
    result = attribute(task, store, bench.queries, readout="gradient", batch_size=bench.arguments.chunk)
    return {"imprint": result.scores}


def carried(bench: Bench, plan: Plan) -> dict[str, Tensor]:
    """Our scores at one checkpoint with imprints in some parameters alone."""
    step, digest = bench.arguments.parameters_at, _digest([plan.to_json(), bench.arguments.plan_for, AIMED])
    made = {
        each: bench.kept(
            f"imprint-{digest}-{each.replace(':', '-')}-run-0-step-{step:05}",
            partial(imprints, bench, plan, 0, step, each),
        )
        for each in bench.arguments.parameters
    }
    return {_carried_by(bench, each): scores["imprint"] for each, scores in made.items()}


def _carried_by(bench: Bench, parameters: str) -> str:
    return f"Imprint in {parameters}, step {bench.arguments.parameters_at}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


def gradients(bench: Bench, run: int, step: int) -> dict[str, Tensor]:
    """Products of plain gradients, and of TRAK's: projected at random, with the inverse of their covariance.

    A gradient is that of the log-likelihood of a window or passage, whose sum over a source is what up-weighting adds.
    """
    task, dimension = bench.task, bench.arguments.projection
    functional, theta = task.at(task.complete(bench.checkpoints[run, step][0]))
    parameters = sum(t.numel() for t in theta.values())
    draw = torch.Generator(bench.device).manual_seed(0)
    projection = torch.randn(parameters, dimension, generator=draw, device=bench.device) / dimension**0.5

    def one(theta: Parameters, row: dict[str, Tensor]) -> Tensor:
        return functional.measures(theta, {name: part[None] for name, part in row.items()}, 1)[0]

    def flat(data: Data, chosen: Tensor) -> Tensor:
        found = vmap(grad(one), in_dims=(None, 0))(theta, data.gather(chosen))
        return torch.cat([found[name].flatten(1) for name in theta], 1)

    train, asked = (Data(columns, device=bench.device) for columns in (bench.text.train, bench.queries))
    owners = bench.text.owners.to(bench.device)
    sums = torch.zeros(shakespeare.SEGMENTS, parameters, device=bench.device)
    features = []
    with task.evaluating():
        for chosen in torch.arange(len(train)).split(bench.arguments.chunk):
            rows = flat(train, chosen)
            sums.index_add_(0, owners[chosen.to(bench.device)], rows)
            features.append(rows @ projection)
        passages = torch.cat([flat(asked, chosen) for chosen in torch.arange(len(asked)).split(bench.arguments.chunk)])
    phi = torch.cat(features).double()
    covariance = phi.T @ phi
    level = covariance.diagonal().mean() * torch.eye(dimension, device=bench.device, dtype=torch.float64)
    towards = (passages @ projection).double(), (sums @ projection).double()
    trak = {
        f"TRAK {damping}": towards[0] @ torch.linalg.solve(covariance + damping * level, towards[1].T)
        for damping in DAMPINGS
    }
    return {"gradient": passages @ sums.T, **trak}


def scored(bench: Bench, plans: list[Plan]) -> dict[str, Tensor]:
    """Scores of every method, (queries, sources)."""
    found = bench.kept("lexical", lambda: lexical(bench))
    runs = range(bench.arguments.models)
    steps, prefix = sorted({*bench.arguments.checkpoints, bench.final}), f"gradients-{bench.arguments.projection}"
    kept = {
        (run, step): bench.kept(f"{prefix}-run-{run}-step-{step:05}", partial(gradients, bench, run, step))
        for run in runs
        for step in steps
    }
    for name, used in (("final model", [bench.final]), ("all checkpoints", steps)):
        chosen = [kept[run, step] for run in runs for step in used]
        found[f"gradient dot product, {name}"] = _mean([scores["gradient"] for scores in chosen])
        options = {damping: _mean([scores[f"TRAK {damping}"] for scores in chosen]) for damping in DAMPINGS}
        best = max(options, key=lambda damping: lds(options[damping], bench.halves).estimate.value)
        found[f"TRAK, {name}, damping {best}"] = options[best]
    for plan in plans:
        name, digest, each = f"Imprint, {_told(plan)}", _digest(plan.to_json()), dict[int, Tensor]()
        for step in bench.arguments.checkpoints:
            every = [
                bench.kept(f"imprint-{digest}-run-{run}-step-{step:05}", partial(imprints, bench, plan, run, step))
                for run in runs
            ]
            each[step] = found[f"{name}, step {step}"] = _mean([scores["imprint"] for scores in every])
        found[f"{name}, all steps"] = _mean(list(each.values()))
    return {**found, **carried(bench, plans[0])}


def _mean(scores: list[Tensor]) -> Tensor:
    return torch.stack(scores).mean(0)


def _told(plan: Plan) -> str:
    plain = Plan().to_json()
    return ", ".join(f"{key} {value}" for key, value in plan.to_json().items() if value != plain.get(key))


class Against:
    """Rank correlations with a truth (queries, things), per query, with intervals over both.

    What a half does to all passages alike is one draw, not one for each passage: intervals over passages alone would
    take the luck of the halves for certain.
    """

    def __init__(self, actual: Array) -> None:
        draw, (queries, things) = np.random.default_rng(0), actual.shape
        self.actual, everyone = actual, (np.arange(queries), np.arange(things))
        drawn = [(draw.integers(0, queries, queries), draw.integers(0, things, things)) for _ in range(RESAMPLES)]
        self.chosen = [everyone, *drawn]
        self.ranks = [ranks(actual[np.ix_(*chosen)]) for chosen in self.chosen]

    def draws(self, predicted: Array) -> Array:
        """The mean correlation, first as it is and then on each resample."""
        pairs = zip(self.chosen, self.ranks, strict=True)
        found = [correlations(ranks(predicted[np.ix_(*chosen)]), known) for chosen, known in pairs]
        return np.array([np.nanmean(each) if np.isfinite(each).any() else np.nan for each in found])


def _estimate(draws: Array) -> Estimate:
    low, high = np.nanquantile(draws[1:], [0.025, 0.975]) if np.isfinite(draws[1:]).any() else (np.nan, np.nan)
    return Estimate(float(draws[0]), float(low), float(high))


def _beyond(values: Array) -> Array:
    """What is said of each passage beyond what is said of all."""
    return np.asarray(values - values.mean(0))


def effects_of(halves: Truth) -> Tensor:
    """What each source does to each passage, (queries, sources), by ridge regression on which sources a half has."""
    kept, values = halves.subsets.membership().double(), halves.values.double().mean(0)
    kept, values = kept - kept.mean(0), values - values.mean(0)
    found: Tensor = torch.linalg.solve(kept.T @ kept + torch.eye(kept.shape[1], dtype=kept.dtype), kept.T @ values)
    return found.T


def table(bench: Bench, scores: dict[str, Tensor]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Of each method: figures as estimates, and the LDS with an interval over passages alone as the library has it.

    And the LDS of imprints in some parameters relative to that of the first of them.
    """
    kept, actual = bench.halves.subsets.membership().double().T, bench.halves.values.mean(0).T.numpy()
    strongest = effects_of(bench.halves).argmax(1)
    halves, specific = Against(actual), Against(_beyond(actual))
    removed = Against(bench.removals.effects.mean(0).numpy()) if bench.removals else None
    predicted = {name: (each @ kept).numpy() for name, each in scores.items()}
    draws = {name: halves.draws(each) for name, each in predicted.items()}
    words = max((name for name in scores if name.startswith(("BM25", "TF-IDF"))), key=lambda name: draws[name][0])
    rows = {
        name: {
            "LDS": _estimate(draws[name]),
            "LDS beyond the mean passage": _estimate(specific.draws(_beyond(predicted[name]))),
            "own segment first": mean_estimate((each.argmax(1) == bench.text.origins).double().numpy()),
            "first as in the truth": mean_estimate((each.argmax(1) == strongest).double().numpy()),
            "removals": _estimate(removed.draws(-each.numpy())) if removed else None,
            "ahead of the best lexical": _estimate(draws[name] - draws[words]),
            "over passages alone": lds(each, bench.halves),
        }
        for name, each in scores.items()
    }
    some = [_carried_by(bench, each) for each in bench.arguments.parameters]
    shares = {
        f"{each}: LDS relative to {some[0]}": asdict(_estimate(draws[each] / draws[some[0]])) for each in some[1:]
    }
    return rows, shares


def about(bench: Bench) -> dict[str, Any]:
    """What the truth itself allows."""
    halves, origins = bench.halves, bench.text.origins.numpy()
    any_scores = torch.zeros(len(origins), shakespeare.SEGMENTS, dtype=torch.float64)
    limits, runs = lds(any_scores, halves), halves.values.transpose(1, 2).numpy()
    ends = [bench.checkpoints[run, bench.final][0] for run in range(bench.arguments.models)]
    final = {name: torch.stack([end[name] for end in ends]) for name in ends[0]}
    found: dict[str, Any] = {
        "log-likelihood per token, halves": float(halves.values.mean()),
        "log-likelihood per token, everything": float(_measured(bench, final).mean()),
        "own segment first in the truth": float((effects_of(halves).argmax(1).numpy() == origins).mean()),
        "ceiling of LDS": limits.ceiling,
        "one retraining against the other": limits.single_run,
        "ceiling of LDS beyond the mean passage": ceiling(ranks(runs - runs.mean(1, keepdims=True))),
    }
    for each in bench.arguments.parameters:
        task = bench.task_of(each.partition("+")[0])
        found[f"bytes of an imprint in {each}"] = 4 * sum(p.numel() for p in task.at(task.state())[1].values())
    if bench.removals is not None:
        effects = bench.removals.effects.numpy()
        check = removal(any_scores, bench.removals)
        noise = float(effects.std(0, ddof=1).mean()) if len(effects) > 1 else float("nan")  # one run does not tell
        own = np.take_along_axis(effects, origins[None, :, None], 2)[:, :, 0]
        found |= {
            "removals, ceiling of the rank correlation": check.rank_ceiling,
            "removals, mean effect on passages of the removed segment": asdict(mean_estimate(own.mean(0))),
            "removals, mean effect on other passages": float((effects.sum(2) - own).mean() / (effects.shape[2] - 1)),
            "removals, standard deviation between runs": noise,
            "removals, own segment's harms most": asdict(mean_estimate((effects.mean(0).argmin(1) == origins) * 1.0)),
        }
    return found


def shown(rows: dict[str, dict[str, Any]], facts: dict[str, Any]) -> str:
    columns = [name for name in next(iter(rows.values())) if name != "over passages alone"]
    lines = [f"| method | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for name, row in sorted(rows.items(), key=lambda item: -np.nan_to_num(item[1]["LDS"].value, nan=-1)):
        lines.append(f"| {name} | {' | '.join(str(row[column] or '') for column in columns)} |")
    told = (f"{key}: {value if not isinstance(value, dict) else Estimate(**value)}" for key, value in facts.items())
    return "\n".join([*lines, "", *told])


def _without_nan(value: Any) -> Any:
    """As JSON has it: None for what is undefined."""
    if isinstance(value, Metric):
        return value.to_json()
    if isinstance(value, Estimate):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="tiny models on little text, to see that it runs")
    parser.add_argument("--tuning", action="store_true", help="other halves and seeds, for choosing settings")
    parser.add_argument("--look", action="store_true", help="only show the held-out log-likelihood after every epoch")
    parser.add_argument("--only", choices=STAGES, help="train only this part; several may be trained at the same time")
    parser.add_argument("--halves", type=int, default=40)
    parser.add_argument("--runs", type=int, default=2, help="retrainings of each half")
    parser.add_argument("--removal-runs", type=int, default=2, help="retrainings without each segment; 0 for none")
    parser.add_argument("--models", type=int, default=1, help="runs whose checkpoints are scored and averaged")
    parser.add_argument("--checkpoints", type=int, nargs="+", help="steps of the run at which imprints are simulated")
    parser.add_argument("--plan", action="append", help="fields of a Plan as JSON; may be given several times")
    parser.add_argument(
        "--parameters",
        nargs="*",
        default=[],
        help='that alone carry imprints, such as "last:4", "lora:16", or "lora:16+aim" with an adapter that is aimed',
    )
    parser.add_argument(
        "--plan-for",
        type=json.loads,
        help=f"how the plan differs by what carries the imprints, as JSON; without --plan {json.dumps(PLAN_FOR)}",
    )
    parser.add_argument("--parameters-at", type=int, help="step of the run at which they are compared")
    parser.add_argument("--name", default="results", help="of the file with the results")
    parser.add_argument("--epochs", type=int, help="instead of the setting's own")
    parser.add_argument("--lr", type=float, help="of the training, instead of the setting's own")
    parser.add_argument("--at-once", type=int, default=80, help="models trained together")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), help="of the trainings; on CUDA bfloat16")
    parser.add_argument("--matmul", choices=("highest", "high"), default="high", help="of float32: high is TF32")
    parser.add_argument("--chunk", type=int, default=128, help="windows evaluated at once")
    parser.add_argument("--memory", help='that a simulation may use, such as "60GiB"')
    parser.add_argument("--projection", type=int, help="dimensions that TRAK projects gradients to")
    arguments = parser.parse_args()
    size = shakespeare.SMALL if arguments.small else shakespeare.FULL
    training = replace(
        size.training, epochs=arguments.epochs or size.training.epochs, lr=arguments.lr or size.training.lr
    )
    arguments.checkpoints = arguments.checkpoints or list(size.steps)
    arguments.parameters_at = arguments.parameters_at or arguments.checkpoints[len(arguments.checkpoints) // 2]
    arguments.compute = arguments.compute or ("bfloat16" if arguments.device.startswith("cuda") else "float32")
    if arguments.plan_for is None:
        arguments.plan_for = {} if arguments.plan else PLAN_FOR
    arguments.projection = arguments.projection or (64 if arguments.small else 1024)
    torch.set_float32_matmul_precision(arguments.matmul)
    bench = Bench(arguments, replace(size, training=training))
    if arguments.look:
        look(bench)
        return
    usual = SMALL_PLAN if arguments.small else PLAN
    plans = [Plan(**json.loads(each)) for each in arguments.plan or [json.dumps(usual)]]
    for stage in [arguments.only] if arguments.only else STAGES:
        begin = time.monotonic()
        getattr(bench, stage)
        print(f"{stage}: {time.monotonic() - begin:.0f} s", flush=True)
    if arguments.only:
        return
    rows, shares = table(bench, scored(bench, plans))
    facts = {**about(bench), **shares}
    print(shown(rows, facts))
    settings = {"arguments": {key: str(value) for key, value in vars(arguments).items()}, "size": asdict(bench.size)}
    results = {**settings, "facts": facts, "methods": rows}
    (bench.folder / f"{arguments.name}.json").write_text(json.dumps(_without_nan(results), indent=1))


if __name__ == "__main__":
    main()
