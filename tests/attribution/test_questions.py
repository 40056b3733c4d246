"""Every form of a result says which question it answers: this very run, or the mean over trainings like it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Attribution, DataError, ReadoutError, StoreError
from imprint.plan import Question
from tests.attribution.results import make_replayed, make_result
from tests.evaluation.planted import REMOVALS, attribution, planted, scores_for

FILES = Path(__file__).parent / "files"
WORDS: dict[Question, str] = {
    "this_run": "this run: if this source had had weight 0 in the training run that produced this model",
    "expected": "expected: mean over trainings like this one",
}


@pytest.mark.parametrize("question", WORDS)
def test_every_form_of_a_result_says_which_question_it_answers(question: Question) -> None:
    result, words = make_result(question=question), WORDS[question]
    top = result.top(1)
    assert result.question == top.question == top[0][0].question == question
    assert f"\n{words}\n" in repr(result) and f"\n{words}\n" in repr(top)
    assert f"<br>{words}<br>not validated" in result._repr_html_()
    assert top.to_json()["question"] == question and top.to_json()["meaning"] == words
    assert result.plot().get_xlabel().replace("\n", " ").endswith(f" {words}")  # lines are broken to fit
    for frame in (result.to_pandas(), top.to_pandas()):
        assert (frame.attrs["question"], frame.attrs["meaning"]) == (question, words)
    assert result.to_pandas().columns.name == f"source, {question.replace('_', ' ')}"
    assert top.to_pandas()["question"].tolist() == [question] * 2


def test_what_is_derived_answers_the_same_question(tmp_path: Path) -> None:
    result = make_replayed()
    result.save(tmp_path / "result.safetensors")
    loaded = Attribution.load(tmp_path / "result.safetensors")
    for other in (result[0], result[:1], result.mean(), result.group([0, 0, 1]), result - result, loaded):
        assert other.question == "this_run" and other.labels.removes
    assert make_result().mean().question == "expected"


def test_a_file_of_the_version_before_answers_the_only_question_it_knew() -> None:
    loaded = Attribution.load(FILES / "schema-2.safetensors")
    assert (loaded.question, loaded.labels.removes, loaded.labels.summed) == ("expected", False, ())
    assert loaded.noise is None and loaded.distinguishable is None
    assert [round(effect, 3) for effect in loaded.removal_effect[0].tolist()] == [0.26, -0.044, -0.0]
    assert "expected: mean over trainings like this one" in repr(loaded)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"question": "both"}, "must be this_run or expected, got 'both'"),
        ({"removes": "yes"}, "must be true or false"),
        ({"summed": (1, 2)}, "labels.summed and labels.source_ids are not equally many"),
        ({"summed": (1, 2, 0)}, "at least 1"),
        ({"difference": 1}, "must be true or false"),
        ({"details": {"chaos": -1.0}}, "at least 0"),
    ],
)
def test_labels_that_cannot_be_are_not_saved(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=words):
        make_result(**change).save(tmp_path / "result.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_only_ground_truth_of_the_same_question_calibrates() -> None:
    scores = scores_for(REMOVALS)
    truth, asked = planted(scores, REMOVALS, size=2.0), attribution(scores, REMOVALS, question="this_run")
    result = asked.calibrate(replace(truth, question="this_run"))
    torch.testing.assert_close(result.scores, result.details["calibration"] * scores)
    assert result.question == "this_run" and result.details["calibration"] == pytest.approx(2.0, rel=0.3)
    for given, known in ((asked, truth), (attribution(scores, REMOVALS), replace(truth, question="this_run"))):
        with pytest.raises(DataError, match="use ground truth of the same question"):
            given.calibrate(known)


def test_a_difference_has_no_ground_truth() -> None:
    with pytest.raises(ReadoutError, match="calibrate both, then subtract"):
        (make_replayed() - make_replayed()).calibrate(planted(scores_for(REMOVALS), REMOVALS))
