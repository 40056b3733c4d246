"""Scores of every method, and how well they predict real removals: the tables of benchmarks/publishers.py.

A rival comes in variants: checkpoints, dampings, ways to join passages. The variant is chosen on sets of presidents
that are not compared on; for *expected*, where there are no such sets, on the ground truth itself, which favours the
rival.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from publishers_case import Case
from publishers_sets import Sets, find_removed
from safetensors.torch import load_file
from torch import Tensor

from imprint.benchmarking.gradients import multiply_gradients, sum_by_source
from imprint.benchmarking.settings import minilm
from imprint.evaluation import Truth
from imprint.evaluation.lexical import bm25, characters, size_only, tf_idf
from imprint.evaluation.similarity import source_similarity
from imprint.store.files import write, write_tensors

DAMPINGS = (0.01, 0.1, 1.0, 10.0, 100.0)
EXACT = "replayed removals"


@dataclass
class Results:
    """Figures as JSON, and the scores of each method, (queries, sources), in the folder of a case."""

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self._figures.is_file():
            self.found = json.loads(self._figures.read_text())

    @property
    def _figures(self) -> Path:
        return self.folder / "results.json"

    @contextmanager
    def timed(self, what: str, *, resumes: bool = False) -> Iterator[None]:
        """Keep how many seconds something took in its longest call, or in all calls if each `resumes` the last."""
        begin, before = time.monotonic(), self.found.get("seconds", {}).get(what, 0.0)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = time.monotonic() - begin
        seconds = round(before + taken if resumes else max(before, taken), 1)
        self.found.setdefault("seconds", {})[what] = seconds
        print(f"{what}: {taken:.1f} s", flush=True)
        self.keep()

    def keep(self, **figures: Any) -> None:
        """Keep figures."""
        self.found.update(figures)
        write(self._figures, lambda path: path.write_text(json.dumps(self.found, indent=1)))

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores of each method, or of each variant as "method | variant"."""
        place = self.folder / "scores.safetensors"
        return load_file(place) if place.is_file() else {}

    def add_scores(self, scores: Mapping[str, Tensor]) -> None:
        """Keep scores beside those that are there."""
        found = {name: each.detach().double().cpu().contiguous() for name, each in scores.items()}
        write_tensors(self.folder / "scores.safetensors", {**self.scores, **found})


def score_rivals(case: Case, results: Results) -> None:
    """Score by words, by embeddings, by size, and by gradients at every checkpoint."""
    members = case.sources.members
    texts = [" ".join(case.documents.texts[index] for index in each.tolist()) for each in members]
    asked, five = case.queries.texts, characters(5)
    with results.timed("words"):
        results.add_scores(
            {
                "BM25 | words": bm25(asked, texts),
                "BM25 | 5 characters": bm25(asked, texts, five),
                "TF-IDF | words": tf_idf(asked, texts),
                "TF-IDF | 5 characters": tf_idf(asked, texts, five),
                "size": size_only(asked, texts),
            }
        )
    tuned, run = case.recorded()
    kept: list[dict[str, Tensor]] = []
    for step in run.checkpoints[1:]:
        with results.timed(f"gradients at step {step}"):
            found = multiply_gradients(tuned, run.state(step), case.documents.columns, case.queries.columns)
            each = {"gradient product": found.dot, "gradient cosine": found.cosine}
            each |= {f"TRAK, damping {damping:g}": found.trak(damping) for damping in DAMPINGS}
            kept.append({name: sum_by_source(scores, members).double().cpu() for name, scores in each.items()})
    results.add_scores(
        {
            **_name_variants(run.checkpoints[1:], kept),
            **_name_variants(["all checkpoints"], [{name: sum(each[name] for each in kept) for name in kept[0]}]),  # type: ignore[misc]
        }
    )


def score_embeddings(case: Case, results: Results) -> None:
    """Score by the similarity of embeddings."""
    with results.timed("embeddings"):
        embed = minilm.load()
        asked, passages = embed(case.queries.texts), embed(case.documents.texts)
        results.add_scores(
            {
                "embeddings | mean": source_similarity(asked, passages, case.sources, "mean"),
                "embeddings | nearest": source_similarity(asked, passages, case.sources, "max"),
            }
        )


def score_ekfac(case: Case, results: Results) -> None:
    """Score by EK-FAC influence functions at an early, a middling and the last checkpoint, with several dampings."""
    from rivals_ekfac import EkFac

    _, run = case.recorded()
    for step in sorted({*run.checkpoints[1::2], run.checkpoints[-1]}):
        model = case.wrap(0).eval()
        model.load_state_dict(run.state(step), strict=False)
        with results.timed(f"EK-FAC at step {step}"):
            folder = case.folder / "ekfac"
            factors = EkFac(model, case.documents.columns, folder=folder, device=case.device, batch=32)
            for damping in DAMPINGS[1:]:
                scores = factors.score(case.queries.columns, damping * factors.mean_eigenvalue)
                name = f"EK-FAC | step {step}, damping {damping:g}"
                results.add_scores({name: sum_by_source(scores.cpu(), case.sources.members)})
            shutil.rmtree(folder)


def score_bergson(case: Case, results: Results, python: str) -> None:
    """Score by SOURCE along the run, in the environment of bergson's own that `python` is the interpreter of."""
    from rivals_bergson import Checkpoint, source

    _, run = case.recorded()
    checkpoints = []
    for step in run.checkpoints[2::2] if len(run.checkpoints) > 3 else run.checkpoints[1:]:
        model = case.wrap(0).eval()
        model.load_state_dict(run.state(step), strict=False)
        moments = {name: kept["exp_avg_sq"] for name, kept in run.optimiser_state(step).tensors.items()}
        checkpoints.append(Checkpoint(model, step, moments))
    rate = sum(step.groups[0]["lr"] for step in run.steps) / len(run.steps)
    for damping in DAMPINGS[1:3]:
        with results.timed(f"SOURCE with damping {damping:g}"):
            known = (checkpoints, case.documents.columns, case.queries.columns, damping)
            scores = source(*known, lr=rate, folder=case.folder / "bergson", python=python)
            results.add_scores({f"SOURCE | damping {damping:g}": sum_by_source(scores, case.sources.members)})


def _name_variants(steps: Any, kept: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    named = {}
    for step, scores in zip(steps, kept, strict=True):
        where = f"step {step}" if isinstance(step, int) else step
        for name, each in scores.items():
            method, _, damping = name.partition(", ")
            named[f"{method} | {where}{', ' * bool(damping)}{damping}"] = each
    return named


def evaluate_methods(case: Case, results: Results) -> None:
    """Compare every method with the ground truth that is there, and print tables."""
    scores = results.scores
    if (case.folder / "sets" / "truth.json").is_file():
        results.keep(this_run=_compare_this_run(case, Truth.load(case.folder / "sets"), scores))
        _show("this run: rank correlation over sets, per query", results.found["this_run"])
    if (case.folder / "expected" / "truth.json").is_file():
        results.keep(expected=_compare_expected(case, Truth.load(case.folder / "expected"), scores))
        _show("expected: rank correlation, per query", results.found["expected"])


def _compare_this_run(case: Case, truth: Truth, scores: Mapping[str, Tensor]) -> dict[str, Any]:
    _, tuning = case.draw_sets()
    passages, answers = slice(len(case.passages)), slice(len(case.passages), None)
    every = Sets(find_removed(truth.subsets.membership()), truth.effects.double().numpy(), truth.subsets.n)
    on_passages = {name: each[passages] for name, each in scores.items()}
    chosen = _choose(every.select(tuning, passages), on_passages)
    sizes = every.removed.sum(1)
    columns = {f"{drop} dropped": every.select((sizes == drop) & ~tuning, passages) for drop in case.settings.drops}
    columns["all sets"] = every.select(~tuning, passages)
    rows = _correlate(columns, chosen, on_passages)
    if len(case.queries) > len(case.passages):
        on_answers = {name: each[answers] for name, each in scores.items()}
        for name, found in _correlate({"answers": every.select(~tuning, answers)}, chosen, on_answers).items():
            rows[name] |= found
    _tell_behind(rows, columns["all sets"], chosen, on_passages, {"behind": EXACT})
    for name, row in rows.items():
        row["own first"] = _own_first(on_passages[chosen[name]], case)
    return rows


def _compare_expected(case: Case, truth: Truth, scores: Mapping[str, Tensor]) -> dict[str, Any]:
    compared = truth.runs - truth.runs // 2  # the other runs predict, together with the one of the trained model
    removed, actual = find_removed(truth.subsets.membership()), truth.effects.double().numpy()[:, : len(case.passages)]
    single = removed.sum(1) == 1
    runs, every = Sets(removed, actual, truth.subsets.n), Sets(removed, actual[:compared], truth.subsets.n)
    columns = {"without each": every.select(single)}
    if not bool(single.all()):
        columns["sets"] = every.select(~single)
    passages = {name: each[: len(case.passages)] for name, each in scores.items()}
    against = {"behind one run": EXACT}
    if EXACT in passages and compared < truth.runs:
        replays = -truth.subsets.n * torch.from_numpy(actual[compared:, :, single.numpy()])
        together = torch.cat([passages[EXACT][None], replays])
        against["behind"] = f"{EXACT}, mean of {len(together)} runs"
        passages[against["behind"]] = together.mean(0)
    chosen = _choose(columns["without each"], passages)
    rows = _correlate(columns, chosen, passages)
    _tell_behind(rows, columns["without each"], chosen, passages, against)
    own = [_own_first(torch.from_numpy(-run[:, single.numpy()]), case) for run in actual]
    rows["ground truth"] = {f"own first, run {number}": share for number, share in enumerate(own, 1)}
    rows["ceiling"] = {name: each.ceiling for name, each in columns.items()}
    rows["agreement of runs"] = {"without each": runs.select(single).agreement}
    return rows


def _choose(sets: Sets, scores: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the best variant of each method."""
    best: dict[str, tuple[float, str]] = {}
    for name, each in scores.items():
        method, value = name.partition(" | ")[0], float(np.nan_to_num(sets.value(each), nan=-1.0))
        best[method] = max(best.get(method, (-2.0, name)), (value, name))
    return {method: name for method, (_, name) in best.items()}


def _correlate(
    columns: Mapping[str, Sets], chosen: Mapping[str, str], scores: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Correlate the chosen variant of each method with each column."""
    return {
        method: {"variant": name.partition(" | ")[2]}
        | {column: sets.correlate(scores[name]) for column, sets in columns.items()}
        for method, name in chosen.items()
    }


def _tell_behind(
    rows: dict[str, dict[str, Any]],
    sets: Sets,
    chosen: Mapping[str, str],
    scores: Mapping[str, Tensor],
    against: Mapping[str, str],
) -> None:
    """Say in every other row by how much it is behind certain scores, each under its title."""
    for title, best in against.items():
        for method, name in chosen.items():
            if best in scores and name != best:
                rows[method][title] = sets.differ(scores[best], scores[name])


def _own_first(scores: Tensor, case: Case) -> float:
    """Return the share of held-out passages whose own president has the highest score."""
    return float((scores[: len(case.passages)].argmax(1) == case.own).double().mean())


def _show(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{title}")
    for method, row in rows.items():
        cells = [
            f"{column}: {found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
            + (f" slope {found['slope']:.2f}" if "slope" in found else "")
            if isinstance(found, dict)
            else f"{column}: {found if isinstance(found, str) else format(found, '.3f')}"
            for column, found in row.items()
        ]
        print(f"  {method:40} {'; '.join(cells)}", flush=True)
