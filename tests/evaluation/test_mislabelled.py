"""Examples with wrong labels are found where self-influence says, or plain loss."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from imprint import DataError, Task
from imprint.evaluation.mislabels import detection_auc, example_losses, mislabel_auc
from imprint.statistics import Estimate
from imprint.task import Better
from tests.evaluation.planted import draw


def test_wrong_labels_are_looked_for_where_the_measurement_says() -> None:
    wrong, losses = torch.arange(40) < 8, draw(40)
    influence = draw(40) - 10 * wrong.double()  # a wrong label lowers its own loss most

    def found(influence: torch.Tensor, better: Better = "lower") -> Estimate:
        return mislabel_auc(influence, wrong, losses, better).influence.estimate

    assert found(influence).value == found(-influence, "higher").value == 1.0
    assert found(influence, "higher").value == 0.0
    assert 0.8 < found(influence).low < 0.95  # eight examples of forty prove no perfect detector
    chance = detection_auc(draw(400), torch.arange(400) % 2 == 0).estimate
    assert chance.low < 0.5 < chance.high


def test_self_influence_stands_beside_plain_loss_and_the_better_one_is_named() -> None:
    wrong = torch.arange(200) % 10 == 0
    noisy, clear = draw(200) + 1.5 * wrong.double(), draw(200) + 5 * wrong.double()
    worse, better = mislabel_auc(-noisy, wrong, clear), mislabel_auc(-clear, wrong, noisy)
    assert worse.better == "plain loss"
    assert better.better == "self-influence"
    assert mislabel_auc(-noisy, wrong, noisy).better == "neither"
    assert f"plain loss {worse.loss.estimate.format(3)}" in str(worse)
    assert "plain loss is better" in str(worse)
    assert worse.ahead.value == pytest.approx(worse.influence.estimate.value - worse.loss.estimate.value)


def test_plain_losses_are_those_of_the_model_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    x, y = draw(7, 3).float(), torch.arange(7) % 2
    found = example_losses(Task.classifier(model), (x, y), batch_size=2)
    torch.testing.assert_close(found, F.cross_entropy(model.eval()(x), y, reduction="none").detach())
    trained = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    later = example_losses(Task.classifier(model), (x, y), checkpoint=trained)
    model.load_state_dict(trained)
    torch.testing.assert_close(later, F.cross_entropy(model(x), y, reduction="none").detach())


def test_the_area_is_refused_without_both_kinds_of_examples_or_with_values_that_do_not_fit() -> None:
    for wrong in (torch.ones(5), torch.zeros(5)):
        with pytest.raises(DataError, match="some mislabelled and some correctly labelled examples"):
            mislabel_auc(draw(5), wrong, draw(5))
    with pytest.raises(DataError, match="one value and one label per example"):
        mislabel_auc(draw(5), torch.arange(4) < 2, draw(5))
    with pytest.raises(DataError, match="one value and one label per example"):
        mislabel_auc(draw(5), torch.arange(5) < 2, draw(4))
    with pytest.raises(DataError, match="finite"):
        mislabel_auc(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([True, False, False]), draw(3))


def test_the_area_takes_arrays_and_lists_of_one_dimension_with_a_known_direction() -> None:
    influence, wrong, losses = draw(20), torch.arange(20) < 5, draw(20) ** 2
    found = mislabel_auc(influence, wrong, losses).ahead
    assert mislabel_auc(influence.numpy(), wrong.numpy(), losses.numpy()).ahead == found
    assert mislabel_auc(influence.tolist(), wrong.tolist(), losses.tolist()).ahead == found  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"one value and one label per example, got \(4, 5\) and \(4, 5\)"):
        mislabel_auc(influence.reshape(4, 5), wrong.reshape(4, 5), losses)
    for better in ("Higher", None):
        with pytest.raises(DataError, match=f'better must be "lower" or "higher", .* got {better!r}'):
            mislabel_auc(influence, wrong, losses, better=better)  # type: ignore[arg-type]


def test_constant_self_influence_has_no_area() -> None:
    found = mislabel_auc(torch.full((10,), 0.1), torch.arange(10) < 3, draw(10))
    assert np.isnan(found.influence.estimate.value)
    assert found.influence.undefined == 10
    assert "undefined" in str(found)
    assert found.better == "neither"
