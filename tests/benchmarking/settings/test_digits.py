"""The digits are divided as the setting says, and the same way every time."""

import pytest
import torch

from imprint.benchmarking.settings import digits


@pytest.mark.parametrize("split", digits.SPLITS)
def test_a_third_of_one_contributor_is_mislabelled_and_nobody_else(split: int) -> None:
    setting = digits.load(split)
    delivered = (setting.owners == setting.mislabeller).sum()
    assert len(setting.mislabelled) == delivered // 3
    assert (setting.owners[setting.mislabelled] == setting.mislabeller).all()


def test_wrong_labels_are_really_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    _, labels = load_digits(return_X_y=True)
    setting = digits.load(0)
    kept = torch.ones(len(setting.owners), dtype=torch.bool)
    kept[setting.mislabelled] = False
    counts = torch.bincount(torch.cat([setting.train[1][kept], setting.queries[1]]), minlength=10)
    everything = torch.bincount(torch.from_numpy(labels), minlength=10)
    assert (counts <= everything).all()  # what is left is right, so the wrong ones came from somewhere else
    assert int((everything - counts).sum()) == len(setting.mislabelled)


def test_splits_are_reproducible_and_differ() -> None:
    first, again, other = digits.load(0), digits.load(0), digits.load(1)
    assert torch.equal(first.train[0], again.train[0])
    assert torch.equal(first.train[1], again.train[1])
    assert not torch.equal(first.train[0], other.train[0])


def test_training_and_queries_do_not_overlap() -> None:
    setting = digits.load(0)
    pictures = {tuple(row.tolist()) for row in setting.train[0]}
    assert not any(tuple(row.tolist()) in pictures for row in setting.queries[0])


def test_there_are_twelve_contributors_of_different_size() -> None:
    sources = digits.load(0).sources
    assert sources.names == digits.CONTRIBUTORS
    assert len(set(sources.sizes)) > 8
    assert sum(sources.sizes) == digits.TRAINING_EXAMPLES


def test_the_regulariser_is_the_weight_decay_of_the_training() -> None:
    model = digits.model()
    task = digits.task(model)
    functional, theta = task.at(task.state())
    gradient = torch.func.grad(functional.regulariser)(theta)
    torch.testing.assert_close(gradient["0.weight"], digits.TRAINING.weight_decay * theta["0.weight"])
