"""MNIST is the data of the benchmarks, whole or not at all, and the models are theirs."""

import gzip
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from imprint import DataError, MissingExtra
from imprint.benchmarking.settings import mnist
from tests.conftest import require

Loaded = tuple[mnist.Pairs, mnist.Pairs]
FILES = tuple(f"{part}-{what}.gz" for part in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte"))


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the files are; nothing is downloaded for a test."""
    place = Path(os.environ.get("IMPRINT_DATA") or "nowhere", "mnist")
    there = all((place / name).is_file() for name in FILES)
    require("data", there, "MNIST is not in the folder that IMPRINT_DATA names")
    return place


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return mnist.load()


@pytest.fixture
def broken(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, to break a file in."""
    (tmp_path / "mnist").mkdir()
    for name in FILES:
        (tmp_path / "mnist" / name).symlink_to((folder / name).resolve())
    monkeypatch.setenv("IMPRINT_DATA", str(tmp_path))
    return tmp_path / "mnist"


def replaced(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def test_the_first_images_come_with_their_labels(loaded: Loaded) -> None:
    (x, y), (queries, answers) = loaded
    assert (x.shape, y.shape) == ((5000, 784), (5000,))
    assert (queries.shape, answers.shape) == ((500, 784), (500,))
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert y[:5].tolist() == [5, 0, 4, 1, 9]
    assert answers[:5].tolist() == [7, 2, 1, 0, 4]
    assert torch.bincount(y).tolist() == [479, 563, 488, 493, 535, 434, 501, 550, 462, 495]


def pixels(images: Tensor) -> Tensor:
    return (images * 0.3081 + 0.1307) * 255


def test_pixels_are_normalised_as_in_the_benchmarks(loaded: Loaded) -> None:
    (x, _), _ = loaded
    assert abs(float(x.mean())) < 0.01  # of all 60,000 images it would be zero
    assert float(x.std()) == pytest.approx(1, abs=0.01)
    assert float(pixels(x).min()) == pytest.approx(0, abs=1e-3)
    assert float(pixels(x).max()) == pytest.approx(255, abs=1e-3)
    first = pixels(x[0]).reshape(28, 28)
    assert first[5, 12:18].round().tolist() == [3, 18, 18, 18, 126, 136]  # the upper edge of the first five
    assert float(first[:5].abs().max()) < 1e-3  # nothing above it


def test_the_whole_test_set_has_its_known_statistics(folder: Path) -> None:
    _, (x, y) = mnist.load(1, 10_000)
    assert torch.bincount(y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert float(pixels(x).mean() / 255) == pytest.approx(0.1325, abs=1e-4)
    assert float(pixels(x).std() / 255) == pytest.approx(0.3105, abs=1e-4)


def test_fewer_images_are_the_first_of_them(loaded: Loaded) -> None:
    (x, y), (queries, _) = mnist.load(7, 3)
    assert torch.equal(x, loaded[0][0][:7]) and torch.equal(y, loaded[0][1][:7])
    assert torch.equal(queries, loaded[1][0][:3])


@pytest.mark.parametrize(("train", "queries", "message"), [(60_001, 1, "60,000 images"), (1, 0, "10,000 images")])
def test_images_that_do_not_exist_are_refused(folder: Path, train: int, queries: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        mnist.load(train, queries)


@pytest.mark.parametrize(("name", "count"), [("mlp", 109_386), ("lr", 7_850)])
def test_models_have_as_many_parameters_as_those_of_the_benchmarks(name: str, count: int) -> None:
    assert sum(p.numel() for p in mnist.RECIPES[name].build().parameters()) == count


@pytest.mark.parametrize(("name", "accuracy"), [("mlp", 0.7), ("lr", 0.8)])
def test_one_epoch_of_training_recognises_most_queries(loaded: Loaded, name: str, accuracy: float) -> None:
    train, (queries, answers) = loaded
    setting = mnist.RECIPES[name]
    short = replace(setting, training=replace(setting.training, epochs=1)).together(train)
    model = short(torch.arange(5000), 0)
    assert float((model(queries).argmax(1) == answers).float().mean()) > accuracy


def test_a_file_that_was_compressed_otherwise_is_as_good(broken: Path) -> None:
    labels = broken / "train-labels-idx1-ubyte.gz"
    replaced(labels, gzip.compress(gzip.decompress(labels.read_bytes()), 1))
    assert mnist.load(5, 1)[0][1].tolist() == [5, 0, 4, 1, 9]


@pytest.mark.parametrize("name", ["train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"])
def test_a_damaged_file_is_named(broken: Path, name: str) -> None:
    whole = (broken / name).read_bytes()
    middle = len(whole) // 2
    for content in (b"", b"not gzip", whole[:middle], whole[:middle] + b"x" + whole[middle + 1 :]):
        replaced(broken / name, content)
        with pytest.raises(DataError, match=rf"{name} (cannot be read|does not hold)"):
            mnist.load(5, 5)
    replaced(broken / name, gzip.compress(gzip.decompress(whole)[:-1] + b"x", 1))
    with pytest.raises(DataError, match=rf"{name} does not hold MNIST's .*its checksum differs"):
        mnist.load(5, 5)


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("another hash")])
def test_a_file_that_cannot_be_had_says_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pooch = pytest.importorskip("pooch", reason="pooch is not installed: the extra `bench` has it")

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(pooch, "retrieve", fail)
    monkeypatch.setenv("IMPRINT_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"train-images.*could not be downloaded from https://.*{error}.*IMPRINT_DATA"):
        mnist.load()


def test_a_download_is_checked_and_comes_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pooch = pytest.importorskip("pooch", reason="pooch is not installed: the extra `bench` has it")
    asked: list[tuple[str, str]] = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> str:
        asked.append((url, known_hash))
        (tmp_path / fname).write_bytes(b"")
        return str(tmp_path / fname)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    monkeypatch.delenv("IMPRINT_DATA", raising=False)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz"):
        mnist.load()
    ((url, known),) = asked
    assert url.startswith("https://") and url.endswith("/train-images-idx3-ubyte.gz")
    assert known == "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"


def test_downloading_needs_an_extra_and_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMPRINT_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingExtra, match=r"imprint-attribution\[bench\]"):
        mnist.load()


def test_tests_without_data_are_skipped_unless_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    require("data", True, "never said")
    monkeypatch.delenv("REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no data"):
        require("data", False, "no data")
    monkeypatch.setenv("REQUIRE", "gpu,data")
    with pytest.raises(pytest.fail.Exception, match="no data, and REQUIRE lists 'data'"):
        require("data", False, "no data")
