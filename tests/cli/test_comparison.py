"""Retrain, replay or simulate, and what each source did, from a terminal."""

from pathlib import Path

import pytest
from rich.console import Console

from imprint.cli.effects import render_effects
from imprint.evaluation import Subsets, Truth
from tests.cli.commands import MODEL, Command
from tests.evaluation.planted import LOO, REMOVALS, UNIONS, random_truth


@pytest.fixture(autouse=True)
def _beside_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


def shown(renderable: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_check_compares_the_ways(command: Command) -> None:
    told = command("check", "model.py:task", "--training-steps", "20", "--training-batch", "4")
    assert told.code == 0 and "Retrain, replay or simulate?" in told.out
    for task in ("retrain from 3 seeds", "replay this run", "replay 3 recorded runs", "simulate"):
        assert task in told.out
    assert "each of 20 steps of 4 examples" in " ".join(told.out.split())
    values = command("check", "model.py:task", "--training-steps", "20", "--training-batch", "4", "--json").values
    assert values["advice"].startswith("To know what to expect of training without each source, ")
    assert [way["question"] for way in values["ways"]] == ["expected", "this_run", "expected", "expected"]
    assert all(way["seconds"] > 0 for way in values["ways"])


def test_a_check_that_does_not_know_how_long_training_is_says_so(command: Command) -> None:
    values = command("check", "model.py:task", "--json").values
    assert "nothing says how long a training is" in values["advice"]
    told = command("check", "model.py:task", "--training-steps", "20")
    assert told.code == 1 and "training_steps and training_batch belong together" in told.err


def test_the_length_of_a_training_may_be_in_the_file_of_settings(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('task = "model.py:task"\ntraining_steps = 20\ntraining_batch = 4\n')
    values = command("check", "--config", config, "--json").values
    assert values["ways"][0]["how"].endswith("each of 20 steps of 4 examples, one by one")
    config.write_text('task = "model.py:task"\ntraining_steps = "many"\n')
    assert "training_steps must be a whole number" in command("check", "--config", config).err


def test_a_function_beside_the_task_is_mentioned_and_a_simulation_is_not_compared(command: Command) -> None:
    with Path("model.py").open("a") as file:
        file.write("\n\ndef train(subset, seed):\n    raise AssertionError\n")
    assert "train(subset, seed) is a function" in command("check", "model.py:task", "--json").values["advice"]
    assert "Retrain, replay" not in command("simulate", "model.py:task", "--out", "store").err


@pytest.mark.wide
def test_a_built_in_setting_knows_how_long_it_trains(command: Command) -> None:
    values = command("check", "digits", "--json").values
    assert values["ways"][0]["how"].endswith("each of 20 epochs in batches of 64, 13 at once")
    assert all(way["seconds"] > 0 for way in values["ways"])


def test_effects_come_with_their_error_and_question() -> None:
    truth = random_truth(REMOVALS, runs=3)
    text = shown(render_effects(Truth(REMOVALS, truth.values, "loss", {"better": "lower"})))
    assert "Change of loss if the source is removed, mean over 8 queries: + means the source helps" in text
    assert text.count(" ± ") == 6 and "expected: mean over 3 runs ± its standard error" in text
    assert "~: not distinguishable from 0" in text


def test_effects_of_one_run_say_that_there_is_no_error() -> None:
    values = random_truth(REMOVALS, runs=1).values
    text = shown(render_effects(Truth(REMOVALS, values, "loss")))
    assert "from a single run, so the error is unknown" in text and "±" not in text and "helps" not in text
    text = shown(render_effects(Truth(REMOVALS, values, "margin", {"better": "higher"}, "this_run")))
    assert "this_run: the effect on the model of this very run" in text and "− means the source helps" in text


def test_many_sources_are_counted_and_unions_have_no_effects_of_their_own() -> None:
    every = Subsets.without_each(40)
    text = shown(render_effects(random_truth(every, runs=2)))
    assert "… and 16 more sources: --json lists all of them." in text
    assert "--kind sources" in shown(render_effects(random_truth(UNIONS)))
    assert len(LOO) == 21  # of which all twenty are shown
    assert "more sources" not in shown(render_effects(random_truth(LOO)))
