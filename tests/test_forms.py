"""How JSON becomes a query: whatever is none is refused with a sentence for whoever sent it."""

from typing import Any

import pytest
import torch
from torch import nn

from imprint.errors import DataError
from imprint.forms import NumbersForm, PictureForm

FORM = PictureForm((2, 2), classes=("cat", "dog"), mean=8, scale=4, low=0, high=16)


def test_numbers_are_standardised_and_shaped() -> None:
    inputs, labels = FORM.read({"pixels": [0, 4, 8, 16], "label": 1})
    assert inputs.tolist() == [[[-2.0, -1.0], [0.0, 2.0]]] and labels.tolist() == [1]
    assert FORM.answer((inputs, labels), 0) == "dog"


@pytest.mark.parametrize(
    "query",
    [
        None,
        7,
        [],
        {},
        {"pixels": None},
        {"pixels": [1, 2, 3]},
        {"pixels": [1, 2, 3, "4"]},
        {"pixels": [1, 2, 3, True]},
        {"pixels": [1, 2, 3, 17]},
        {"pixels": [1, 2, 3, -0.5]},
        {"pixels": [[1, 2], [3, 4]]},
        {"pixels": [1, 2, 3, 4], "label": 2},
        {"pixels": [1, 2, 3, 4], "label": -1},
        {"pixels": [1, 2, 3, 4], "label": "dog"},
        {"pixels": [1, 2, 3, 4], "label": True},
        {"pixels": [1, 2, 3, 4], "label": 1.0},
        {"pixels": [1, 2, 3, 4], "more": 1},
        {"pixels": {"0": 1}},
    ],
)
def test_what_is_no_query_is_refused(query: Any) -> None:
    with pytest.raises(DataError, match=r"query|list of 4 numbers|place 4 of|class"):
        FORM.read(query)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([1, 2, 3], "is a list of 4 numbers; this one has 3"),
        ([1, "2", 3, 4], 'what is in place 2 of "pixels" is not a number'),
        ([1, 2, float("nan"), 4], 'what is in place 3 of "pixels" is not a number'),
        ([1, 2, 3, 1e40], 'in place 4 of "pixels" is too large: beyond 1e'),
        ([float("-inf"), 2, 3, 4], 'in place 1 of "pixels" is too large'),
        ([1, 10**400, 3, 4], 'in place 2 of "pixels" is too large'),
        ([1, 2, -0.5, 4], 'in place 3 of "pixels" is below 0'),
        ([1, 2, 3, 16.5], 'in place 4 of "pixels" is above 16'),
    ],
)
def test_a_number_that_is_none_is_named_by_its_place(numbers: list[Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        FORM.read({"pixels": numbers})


def test_numbers_without_limits_may_not_be_too_large_for_the_model() -> None:
    form = NumbersForm((1,), classes=2, scale=1e-20)
    with pytest.raises(DataError):
        form.read({"values": [1e300]})
    with pytest.raises(DataError, match='place 1 of "values" is too large for the model'):
        form.read({"values": [1e25]})


def test_the_example_is_a_query_and_the_schema_says_so() -> None:
    inputs, labels = FORM.read(FORM.example)
    assert inputs.shape == (1, 2, 2) and labels.tolist() == [-1]
    assert FORM.schema["properties"]["pixels"]["maxItems"] == 4


def test_open_labels_are_filled_by_the_model_and_others_stay() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    ask = torch.no_grad()(model)
    batch = FORM.join([FORM.read({"pixels": [1, 2, 3, place], "label": label}) for place, label in ((4, None), (5, 0))])
    filled = FORM.fill(ask, batch)
    with torch.no_grad():
        assert filled[1].tolist() == [int(model(batch[0])[0].argmax()), 0]
    assert FORM.fill(ask, filled) is filled
