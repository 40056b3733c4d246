"""Loads MNIST as benchmarks use it: 5,000 training images, 500 queries, an MLP with dropout or a linear model.

Data, models and training are those of the dattri benchmark: the first 5,000 and 500 images, pixels normalised by mean
0.1307 and standard deviation 0.3081; the MLP 784-128-64-10 with ReLU and dropout 0.1, SGD with momentum 0.9 for 50
epochs; logistic regression with plain SGD for 20.
"""

import gzip
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from imprint.benchmarking.settings.download import fetch
from imprint.data import Data
from imprint.errors import DataError
from imprint.evaluation.together import Together
from imprint.evaluation.training import Training
from imprint.plan import Plan
from imprint.task import Task

_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FILES = {  # SHA-256 of the download, and of its content: a local file may be compressed differently
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte.gz": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte.gz": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
PLAN = Plan(engine="spectral", steps="infinite", damping=0.02)  # about what Plan.auto chooses, at every checkpoint
Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained.

    checkpoints: the epochs after which checkpoints are kept.
    path: a plan for the path from the first checkpoint, tuned on seeds that no benchmark uses.
    """

    build: Callable[[], nn.Module]
    training: Training
    checkpoints: tuple[int, ...]
    path: Plan | None = None

    def together(self, train: Pairs, device: torch.device | str = "cpu", at_once: int | None = None) -> Together:
        """Return what trains many of these models at once, on subsets of the training data."""
        return Together(self.build, Task.classifier, Data(train, device=torch.device(device)), self.training, at_once)


def mlp() -> nn.Module:
    """Build 784-128-64-10 with ReLU and dropout 0.1: 109,386 parameters."""
    return nn.Sequential(
        *(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(64, 10),
    )


def logistic() -> nn.Module:
    """Build 784-10: 7,850 parameters."""
    return nn.Sequential(nn.Linear(784, 10))


RECIPES = {
    "mlp": Recipe(
        mlp,
        Training(epochs=50, lr=0.01, batch_size=64, momentum=0.9),
        (1, 2, 3, 4, 5, 6, 8, 10),
        Plan(steps=400, lr=0.1, curvature="gauss-newton", dropout=True),
    ),
    "lr": Recipe(logistic, Training(epochs=20, lr=0.01, batch_size=32), (2, 5, 10, 20)),
}


def load(train: int = 5000, queries: int = 500) -> tuple[Pairs, Pairs]:
    """Load the first training images with their labels, and the first test images: (n, 784) and (n,)."""
    return _load_pairs("train", train), _load_pairs("t10k", queries)


def _load_pairs(part: Literal["train", "t10k"], count: int) -> Pairs:
    pixels = _read_idx(f"{part}-images-idx3-ubyte.gz", 16)
    labels = _read_idx(f"{part}-labels-idx1-ubyte.gz", 8)
    if not 0 < count <= len(labels):
        raise DataError(f"MNIST has {len(labels):,} images in this part, got a request for {count:,}.")
    images = torch.from_numpy(pixels.reshape(-1, 784)[:count].copy()).float() / 255
    return (images - 0.1307) / 0.3081, torch.from_numpy(labels[:count].astype(np.int64))


def _read_idx(name: str, header: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    download, content = _FILES[name]
    place = fetch(f"mnist/{name}", _URL + name, download)
    try:
        values = gzip.decompress(place.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{place} cannot be read: {error}") from error
    if hashlib.sha256(values).hexdigest() != content:
        raise DataError(f"{place} does not hold MNIST's {name.removesuffix('.gz')}: its checksum differs.")
    return np.frombuffer(values, dtype=np.uint8, offset=header)
