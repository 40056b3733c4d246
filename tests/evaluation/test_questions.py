"""Scores and ground truth say which question they answer, and are compared across only on request."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from imprint import DataError, StoreError
from imprint.evaluation.metrics import evaluate, lds, loo, predicted_lds, slope
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.store.values import sealed
from tests.evaluation.planted import HALVES, LOO, REMOVALS, UNIONS, attribution, every_kind, planted, scores_for
from tests.evaluation.truths import ask, train


def test_models_trained_anew_never_answer_for_one_run() -> None:
    assert ask(runs=1, seed=0).question == ask(how=train, runs=1, seed=0).question == "expected"


@every_kind
def test_scores_are_refused_against_the_other_question_unless_asked_for(subsets: Subsets) -> None:
    result = attribution(scores_for(subsets), subsets)
    truth = replace(planted(scores_for(subsets), subsets), question="this_run")
    with pytest.raises(DataError, match=r"question 'expected' .*, the ground truth 'this_run' .*across=True"):
        evaluate(result, truth)
    for metric in evaluate(result, truth, across=True):
        assert "(scores of expected against ground truth of this_run)" in str(metric)
        assert (metric.to_json()["question"], metric.to_json()["scores_question"]) == ("this_run", "expected")


def test_every_metric_refuses_the_other_question() -> None:
    for measure, subsets in ((lds, HALVES), (loo, LOO), (slope, UNIONS)):
        truth = replace(planted(scores_for(subsets), subsets), question="this_run")
        result = attribution(scores_for(subsets), subsets)
        with pytest.raises(DataError, match="across=True"):
            measure(result, truth)
        assert measure(result, truth, across=True).scores_question == "expected"
        with pytest.raises(DataError, match="use ground truth of the same question"):
            result.calibrate(truth)


def test_bare_scores_answer_no_question() -> None:
    truth = replace(planted(scores_for(REMOVALS), REMOVALS), question="this_run")
    for metric in evaluate(scores_for(REMOVALS), truth):
        assert metric.scores_question is None and str(metric).endswith("(this_run)")
    halves = planted(scores_for(HALVES), HALVES)
    assert predicted_lds(scores_for(HALVES) @ HALVES.membership().double().T, halves).question == "expected"


def test_replayed_removals_keep_the_weight_of_what_is_left() -> None:
    """F of a replay is F₀ − Σ s/N over what is removed: exact scores then have the slope 1."""
    scores = scores_for(UNIONS)
    values = 3 - ((~UNIONS.membership()).double() @ scores.T)[None] / UNIONS.n
    replayed = Truth(UNIONS, values, "loss", question="this_run", replayed=True)
    assert slope(scores, replayed).estimate.value == pytest.approx(1, abs=1e-12)
    assert slope(scores, replace(replayed, replayed=False)).estimate.value != pytest.approx(1, abs=0.05)


def test_an_unknown_question_is_refused() -> None:
    with pytest.raises(DataError, match="question must be one of this_run, expected, got 'both'"):
        Truth(REMOVALS, planted(scores_for(REMOVALS), REMOVALS).values, "loss", question="both")  # type: ignore[arg-type]


def write_schema_3(folder: Path) -> None:
    """Make a folder as the version before the question wrote it."""
    file = folder / "truth.json"
    about = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("sha256", "question")}
    about["schema"] = 3
    file.write_text(json.dumps(sealed(about), indent=1))
    seal = sealed({name: value for name, value in about.items() if name != "runs"})["sha256"]
    for part in folder.glob("values-*.safetensors"):
        with safe_open(part, framework="pt") as opened:
            values, recorded = opened.get_tensor("values"), opened.metadata()
        save_file({"values": values}, part, {**recorded, "truth": seal})


def test_a_folder_without_a_question_is_read_as_expected_and_continued(tmp_path: Path) -> None:
    first = ask(tmp_path)
    write_schema_3(tmp_path)
    assert Truth.load(tmp_path).question == "expected"
    assert torch.equal(Truth.load(tmp_path).values, first.values)
    (tmp_path / "values-000004.safetensors").unlink()
    assert torch.equal(ask(tmp_path).values, first.values)
    more = ask(tmp_path, runs=3)
    torch.testing.assert_close(more.values, ask(runs=3).values, rtol=1e-10, atol=1e-13)
    assert torch.equal(Truth.load(tmp_path).values, more.values)


@pytest.mark.parametrize(("name", "value"), [("question", "both"), ("question", 1), ("replayed", "yes")])
def test_a_damaged_question_is_named(tmp_path: Path, name: str, value: object) -> None:
    ask(tmp_path, runs=1)
    file = tmp_path / "truth.json"
    about = {key: kept for key, kept in json.loads(file.read_text()).items() if key != "sha256"}
    file.write_text(json.dumps(sealed({**about, name: value})))
    with pytest.raises(StoreError, match=name):
        Truth.load(tmp_path)
