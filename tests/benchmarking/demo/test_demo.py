"""The demo runs from the command line, checks itself, and writes a page a person can look at."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import imprint
from imprint.benchmarking.demo import experiment, report
from imprint.benchmarking.settings import digits
from imprint.cli.app import app


@pytest.fixture(scope="module")
def outcome() -> experiment.Outcome:
    return experiment.run(split=0, retrainings=4, progress=False)


def test_the_mislabeller_is_found(outcome: experiment.Outcome) -> None:
    assert outcome.most_harmful == outcome.setting.mislabeller


def test_this_run_is_replayed_and_validated_and_the_expectation_stands_beside_it(outcome: experiment.Outcome) -> None:
    assert (outcome.this_run.question, outcome.attribution.question) == ("this_run", "expected")
    assert outcome.comparison.outcome in ("ranks validated", "sizes validated")
    assert outcome.attribution.standard_error is not None
    assert outcome.attribution.details["combined_replays"] == experiment.SEEDS


def test_predictions_beat_a_guess_by_size(outcome: experiment.Outcome) -> None:
    assert outcome.check.correlation.low > outcome.by_size.correlation.high
    assert outcome.check.rank_correlation.low > outcome.by_size.rank_correlation.value  # four runs are few


def test_the_report_holds_every_contributor_and_single_digits(outcome: experiment.Outcome, tmp_path: Path) -> None:
    page = report.write(outcome, tmp_path / "report").read_text(encoding="utf-8")
    for name in digits.CONTRIBUTORS:
        assert name in page
    assert page.count("data:image/png;base64,") == 6  # one digit each
    assert sorted(file.name for file in (tmp_path / "report").glob("*.png")) == [
        "queries.png",
        "ranking.png",
        "scatter.png",
    ]
    assert not re.search(r"\bnan\b", re.sub(r"base64,[^\"]*", "", page))


def test_plain_loss_is_shown_beside_the_prediction(outcome: experiment.Outcome) -> None:
    text = report.compare_suspicion(outcome)
    assert f"Plain loss, by the mean training loss: {outcome.sources.names[outcome.highest_loss]}" in text
    assert {row.name: row.loss for row in report.make_rows(outcome)} == dict(
        zip(outcome.sources.names, outcome.losses, strict=True)
    )


def test_the_table_is_sorted_by_prediction_and_shows_the_truth(outcome: experiment.Outcome) -> None:
    table = report.make_rows(outcome)
    assert [row.predicted for row in table] == sorted((row.predicted for row in table), reverse=True)
    assert sum(row.mislabels for row in table) == 1
    by_name = {row.name: row.actual for row in table}
    np.testing.assert_allclose([by_name[n] for n in outcome.sources.names], outcome.check.truth.mean(0))


def test_the_command_writes_its_report(
    outcome: experiment.Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run", lambda *arguments, **options: outcome)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "report.html").is_file()
    assert "mislabels" in result.output
    for shown in (result.output, (tmp_path / "out" / "report.html").read_text(encoding="utf-8")):
        assert report.compare_suspicion(outcome) in " ".join(shown.split())
        assert f"{max(outcome.losses):.3f}" in shown
        assert outcome.attribution.labels.meaning in " ".join(shown.split())


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert imprint.__version__ in result.output
