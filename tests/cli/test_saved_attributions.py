"""A file of scores is believed only as far as it can be checked."""

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Attribution, Store, StoreError, attribute
from imprint.attribution.labels import Labels
from imprint.store.values import sealed
from tests.cli.forging import DATA, forge, made, task

SCORES = torch.tensor([[3.0, -6.0], [-1.0, 2.0]], dtype=torch.float64)


def saved(place: Path, **changes: Any) -> Path:
    fields: dict[str, Any] = {
        **{"n": 10, "source_ids": ("a", "b"), "source_names": ("A", "B"), "source_sizes": (4, 5)},
        **{"measure": "loss", "better": "lower", "details": {"readout": "jvp"}, "fingerprints": {"store": "x"}},
    }
    Attribution(Labels(**{**fields, **changes}), SCORES).save(place)
    return place


def test_no_flipped_bit_changes_a_saved_attribution(tmp_path: Path) -> None:
    place = saved(tmp_path / "scores.safetensors")
    whole, content = Attribution.load(place), bytearray(place.read_bytes())
    header, refused = len(content) - SCORES.nbytes, 0
    flips = [*((byte, byte % 8) for byte in range(header)), *product(range(header, len(content)), range(8))]
    for byte, bit in flips:
        content[byte] ^= 1 << bit
        place.write_bytes(content)
        try:
            found = Attribution.load(place)
            assert found.labels == whole.labels and torch.equal(found.scores, whole.scores), (byte, bit)
        except StoreError:
            refused += 1
        content[byte] ^= 1 << bit
    assert refused > 0.99 * len(flips)  # a letter of an escape may be large or small


def forged(place: Path, change: Callable[[dict[str, Any]], Any], scores: torch.Tensor = SCORES) -> None:
    """A file whose checksums are right and whose content is not."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from imprint.store.fingerprint import of_tensors

    with safe_open(saved(place), framework="pt") as file:
        values = json.loads(file.metadata()["imprint"])
    change(values)
    values["scores"] = of_tensors({"scores": scores})
    values.pop("sha256", None)
    save_file({"scores": scores}, place, {"imprint": json.dumps(sealed(values))})


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "N is 0": (lambda v: v["labels"].update(n=0), r"labels\.n must be a whole number"),
    "N is a text": (lambda v: v["labels"].update(n="10"), r"labels\.n must be"),
    "an id twice": (lambda v: v["labels"].update(source_ids=["a", "a"]), "two sources have the same id"),
    "a name too many": (lambda v: v["labels"].update(source_names=["a"]), "are not equally many"),
    "a source too large": (lambda v: v["labels"].update(source_sizes=[4, 11]), "more than the training data"),
    "ids are no texts": (lambda v: v["labels"].update(source_ids=[1, 2]), r"source_ids\[0\] must be a text"),
    "better of something": (lambda v: v["labels"].update(better="best"), "lower, higher or null"),
    "a query is markup": (lambda v: v.update(queries=["<script>", 1]), r"queries\[0\] must be a whole number"),
    "a query too many": (lambda v: v.update(queries=[0, 1, 2]), r"shape \(2, 2\), and its labels are of \(3, 2\)"),
    "calibrated by 0": (lambda v: v["labels"]["details"].update(calibration=0), "must be a positive number"),
    "an unknown label": (lambda v: v["labels"].update(evil=1), "unknown field 'evil'"),
    "a label less": (lambda v: v["labels"].pop("measure"), "measure is missing"),
    "another schema": (lambda v: v.update(schema=99), "upgrade imprint"),
    "an address that is a script": (
        lambda v: v["labels"].update(source_about=[{"url": "javascript:alert(1)"}, {}]),
        r"source_about\[0\] cannot be used: a source's url must begin with http",
    ),
    "an owner too many": (
        lambda v: v["labels"].update(source_about=[{}] * 3),
        r"labels\.source_about and .* equally many",
    ),
    "an owner that is a list": (lambda v: v["labels"].update(source_about=[{"owner": []}, {}]), "valid Unicode string"),
    "a plan that is none": (
        lambda v: v["labels"].update(fingerprints={"plan": 5}),
        r"fingerprints\['plan'\] must be an object",
    ),
    "parameters that are none": (lambda v: v["labels"].update(fingerprints={"parameters": {"w": 1}}), "an object"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_saved_attribution_is_looked_at_field_by_field(kind: str, tmp_path: Path) -> None:
    change, words = FORGERIES[kind]
    forged(tmp_path / "scores.safetensors", change)
    with pytest.raises(StoreError, match=words):
        Attribution.load(tmp_path / "scores.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_neither_saved_nor_loaded(value: float, tmp_path: Path) -> None:
    scores = torch.tensor([[1.0, 2.0], [value, 0.0]], dtype=torch.float64)
    forged(tmp_path / "scores.safetensors", lambda values: None, scores)
    with pytest.raises(StoreError, match=f"row 1, column 0 is {value}"):
        Attribution.load(tmp_path / "scores.safetensors")
    labels = Labels(10, ("a", "b"), ("A", "B"), (4, 5), "loss", "lower")
    with pytest.raises(StoreError, match=f"row 1, column 0 is {value}"):
        Attribution(labels, scores).save(tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()


def test_a_saved_attribution_knows_its_store(tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    attribute(task(), store, DATA, progress=False).save(tmp_path / "scores.safetensors")
    assert Attribution.load(tmp_path / "scores.safetensors").labels.fingerprints["store"] == store.sha256
    forge(store.path, lambda values: values.update(note="another"))
    assert Store(store.path).sha256 != store.sha256


def test_what_is_loaded_does_not_change_with_its_file(tmp_path: Path) -> None:
    result = Attribution.load(saved(tmp_path / "scores.safetensors"))
    with (tmp_path / "scores.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x55" * 8)
    assert torch.equal(result.scores, SCORES)


def test_a_file_without_a_checksum_is_read_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import save_file

    labels = Labels(10, ("a", "b"), ("A", "B"), (4, 5), "loss", "lower").to_json()
    about = json.dumps({"labels": labels, "queries": [0, 1]})
    save_file({"scores": SCORES}, tmp_path / "old.safetensors", {"imprint": about})
    assert torch.equal(Attribution.load(tmp_path / "old.safetensors").scores, SCORES)
    assert "old.safetensors was saved without a checksum" in caplog.text


def test_scores_are_not_saved_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "scores.safetensors").symlink_to(tmp_path / "mine")
    with pytest.raises(StoreError, match=r"scores\.safetensors: it is a link"):
        saved(tmp_path / "scores.safetensors")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "scores.safetensors").is_symlink()
