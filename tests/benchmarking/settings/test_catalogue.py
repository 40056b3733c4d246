"""Ready-made settings are found by name, and what they train fits what they measure."""

import os
from pathlib import Path

import pytest
import torch

from imprint import ConfigurationError, Plan, attribute, simulate
from imprint.benchmarking.settings import SETTINGS, digits, load_setting
from imprint.evaluation.retraining import retrain
from imprint.evaluation.subsets import Subsets
from tests.conftest import require


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_put_together(name: str) -> None:
    if name.startswith("mnist"):
        place = Path(os.environ.get("IMPRINT_DATA") or "nowhere", "mnist")
        require("data", place.is_dir(), "MNIST is not in the folder that IMPRINT_DATA names")
    found = load_setting(name)
    assert found.sources.length == len(found.train.examples)
    assert len(found.data[1]) == len(found.train.examples)
    assert max(found.epochs) <= found.train.training.epochs
    model = found.train.build()
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in found.task.model.named_parameters()
    }
    assert found.task.measure(found.task.model, found.queries).shape == (len(found.queries[1]),)


def test_a_setting_can_be_retrained() -> None:
    found = load_setting("digits")
    truth = retrain(found.train, found.task, found.queries, Subsets.halves(found.sources, 2), progress=False)
    assert truth.values.shape == (1, 2, len(found.queries[1]))
    assert float(truth.values.mean()) < 1  # far better than guessing among ten


def test_a_setting_has_the_checkpoints_of_one_training_whatever_the_random_state() -> None:
    first = load_setting("digits").checkpoints
    torch.manual_seed(1)
    again = load_setting("digits").checkpoints
    assert len(first) == len(digits.CHECKPOINTS)
    for state, same in zip(first, again, strict=True):
        assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())
    assert not torch.equal(first[0]["0.weight"], first[1]["0.weight"])


def test_a_setting_is_simulated_and_finds_its_mislabeller() -> None:
    found = load_setting("digits")
    plan = Plan(steps=20, lr=0.1)
    store = simulate(found.task, found.data, found.sources, plan, checkpoints=found.checkpoints[-2:], progress=False)
    effects = attribute(found.task, store, found.queries, progress=False).mean()
    assert effects.top(1, "lowers")[0][0].name == digits.CONTRIBUTORS[digits.load(0).mislabeller]


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(ConfigurationError, match="setting 'cifar' is unknown: use one of digits, mnist-mlp"):
        load_setting("cifar")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="cannot be used here"):
            load_setting("digits", "cuda")
