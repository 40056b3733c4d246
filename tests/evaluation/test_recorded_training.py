"""A recorded training is that of `Together` with the same seed, step by step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from imprint.evaluation.training import Training
from tests.evaluation.truths import TRAINING, N, points, together

TRAININGS = {
    "momentum": TRAINING,
    "weight decay": replace(TRAINING, weight_decay=0.1, epochs=3),
    "schedule": replace(TRAINING, schedule="cosine", warmup=2),
    "short batches": replace(TRAINING, batch_size=7),
    "dropped batches": replace(TRAINING, batch_size=7, drop_last=True),
    "no shuffle": replace(TRAINING, shuffle=False),
    "adam": Training(epochs=2, lr=0.01, batch_size=8, optimiser="adam", weight_decay=0.1),
    "adamw": Training(epochs=2, lr=0.01, batch_size=8, optimiser="adamw", weight_decay=0.1, schedule="linear"),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS.keys())
def test_a_recorded_run_ends_with_the_model_of_together(training: Training, tmp_path: Path) -> None:
    how = together(training=training)
    run = how.record(3, tmp_path / "run")
    expected = how(torch.arange(N), 3).state_dict()
    end = run.state(len(run.steps))
    assert len(run.steps) == training.epochs * training.steps(N)
    for name, tensor in expected.items():
        torch.testing.assert_close(end[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_recorded_run_says_what_a_replay_needs(tmp_path: Path) -> None:
    training = replace(TRAINING, schedule="linear")
    run = together(training=training).record(0, tmp_path / "run")
    rates = [step.groups[0]["lr"] for step in run.steps]
    assert rates == sorted(rates, reverse=True) and rates[0] == TRAINING.lr > rates[-1]
    assert run.n == N and run.data is not None
    assert sorted(index for step in run.steps[:3] for index in step.batches[0].examples) == list(range(N))
    x, y = points(N, 0)
    first = run.steps[0].batches[0]
    model = together().build()
    model.load_state_dict(run.state(0))
    loss = torch.nn.functional.cross_entropy(model(x[list(first.examples)]), y[list(first.examples)])
    assert first.loss == pytest.approx(loss.item(), abs=1e-12) and first.normaliser == len(first.examples)
