"""Queries are shown as pictures, texts or labels where that is what they are, and by their number elsewhere."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from imprint import DataError
from imprint.evaluation import Illustrations
from imprint.evaluation.reports.illustrations import encode_png, illustrate
from imprint.store.fingerprint import of_batches
from tests.evaluation.reports.pages import QUERIES, compared, pictures, reported

LABELS = torch.arange(QUERIES) % 7


def decoded(address: str | None) -> np.ndarray[Any, Any]:
    """The pixels of an embedded picture, read by a library that is not ours."""
    image = pytest.importorskip("PIL.Image")
    assert address is not None and address.startswith("data:image/png;base64,")
    return np.asarray(image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)], ids=["grey", "coloured"])
def test_a_picture_is_encoded_pixel_by_pixel(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    address = f"data:image/png;base64,{base64.b64encode(encode_png(pixels)).decode()}"
    np.testing.assert_array_equal(decoded(address), pixels)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (pictures(8, 8), (8, 8)),
        (pictures(1, 8, 12), (8, 12)),
        (pictures(3, 8, 8), (8, 8, 3)),
        (pictures(4, 8, 8), (8, 8, 3)),
        (pictures(64), (8, 8)),
        (pictures(700, 350), (234, 117)),
        (pictures(9).numpy(), (3, 3)),
    ],
    ids=["grey", "one channel", "colours", "transparent", "flat square", "large", "array"],
)
def test_declared_pictures_are_shown(given: Any, shape: tuple[int, ...]) -> None:
    shown = illustrate(None, pictures=given)
    shown.check(QUERIES, 1)
    pixels = decoded(shown.picture(3))
    assert pixels.shape == shape
    assert pixels.min() == 0 and pixels.max() == 255  # stretched over the whole range


def test_whole_numbers_are_shown_as_they_are() -> None:
    given = torch.full((QUERIES, 4, 4), 77, dtype=torch.uint8)
    assert (decoded(illustrate(None, pictures=given).picture(0)) == 77).all()


@pytest.mark.parametrize(
    "queries",
    [
        (pictures(8, 8), LABELS),
        {"image": pictures(3, 8, 8), "label": LABELS},
        TensorDataset(pictures(1, 8, 8), LABELS),
        [(image, int(label)) for image, label in zip(pictures(8, 8), LABELS, strict=True)],
    ],
    ids=["columns", "mapping", "dataset", "list"],
)
def test_images_and_their_labels_are_recognised(queries: Any) -> None:
    shown = illustrate(queries)
    shown.check(QUERIES, 1)
    assert shown.picture(2) is not None and shown.label(9) == "2"


@pytest.mark.parametrize(
    "queries",
    [
        (pictures(64), LABELS.double()),  # a flat vector may be anything
        (pictures(4, 200), LABELS.double()),  # a few long series
        {"input_ids": LABELS[:, None].repeat(1, 9), "weights": pictures(9)},
        (pictures(8, 8), pictures(8, 8)),  # which of the two?
        iter([(pictures(8, 8), LABELS)]),  # gone once it is read
    ],
    ids=["vectors", "series", "tokens", "two images", "an iterator"],
)
def test_what_is_not_clearly_an_image_is_shown_by_its_number(queries: Any, tmp_path: Path) -> None:
    shown = illustrate(queries)
    assert shown.picture(0) is None and shown.label(0) is None and shown.text(0) == []
    page = reported(tmp_path, *compared(), queries=queries)
    assert "Query " in page.text and not page.named("img")


def test_a_report_shows_queries_of_different_labels(tmp_path: Path) -> None:
    page = reported(tmp_path, *compared(), queries=(pictures(8, 8), torch.arange(QUERIES) % 3), most=3)
    assert len(page.named("img")) == 3
    assert {f"label {label}" in page.text for label in range(3)} == {True}


def test_the_queries_with_the_largest_predicted_effects_are_shown(tmp_path: Path) -> None:
    result, truth = compared()
    page = reported(tmp_path, result, truth, most=4)
    strongest = result.removal_effect.abs().amax(1).argsort(descending=True)[:4].tolist()
    assert [f"Query {query}" in page.text for query in strongest] == [True] * 4
    assert page.text.count("rank correlation ") - 4 == reported(tmp_path, result, truth, most=0).text.count(
        "rank correlation "
    )


def test_texts_are_shown_line_by_line_and_shortened(tmp_path: Path) -> None:
    texts = ["first line\nsecond line", *["word " * 400] * (QUERIES - 1)]
    shown = illustrate(None, texts=texts)
    assert shown.text(0) == ["first line", "second line"]
    assert len(shown.text(1)[0]) < 800 and shown.text(1)[0].endswith("…")
    page = reported(tmp_path, *compared(), illustrations=Illustrations(texts=texts))
    assert page.text.count("word word") > 0


def test_texts_of_the_queries_themselves_are_found() -> None:
    class Asked:
        columns = {"x": pictures(3)}  # noqa: RUF012
        texts = ["a question"] * QUERIES

    assert illustrate(Asked()).text(0) == ["a question"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"texts": ["a"] * 3}, "there are 3 texts of queries, and 24 queries"),
        ({"labels": [1]}, "there are 1 labels of queries, and 24 queries"),
        ({"pictures": pictures(8, 8)[:5]}, "there are 5 pictures of queries, and 24 queries"),
        ({"example_texts": ["a"] * 24}, "there are 24 texts of training examples, and 20 training examples"),
        ({"texts": "a text for all"}, "must be a list with one entry each, got a str"),
        ({"texts": [1] * 24}, "the texts of queries must be strings"),
        ({"pictures": pictures(2, 8, 8)}, r"a picture has the shape \(height, width\) or"),
        ({"pictures": pictures(10)}, "a row of n² numbers; got"),
    ],
)
def test_what_does_not_fit_the_queries_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        reported(tmp_path, *compared(), illustrations=Illustrations(**given))
    assert not (tmp_path / "report.html").exists()


def test_other_queries_than_those_of_the_scores_are_refused(tmp_path: Path) -> None:
    right = (pictures(8, 8), LABELS)
    wrong = (pictures(8, 8).flip(0), LABELS)
    result, truth = compared(fingerprints={"queries": of_batches([(QUERIES, right)])})
    assert reported(tmp_path, result, truth, queries=right).named("img")
    with pytest.raises(DataError, match="the queries to show are not those of the scores, or are in another order"):
        reported(tmp_path, result, truth, queries=wrong)


def test_a_missing_pixel_does_not_hide_the_others() -> None:
    image = pictures(8, 8).clone()
    image[0, 0, 0] = float("nan")
    assert decoded(illustrate(None, pictures=image).picture(0)).max() == 255
