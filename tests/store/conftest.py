"""A store that nothing has happened to, and a copy to which something may."""

import shutil
from pathlib import Path

import pytest
from torch import Tensor

from imprint import Store
from tests.store.making import both, make


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nothing has happened to; not to be changed."""
    return make(tmp_path_factory.mktemp("sound") / "store").path


@pytest.fixture(scope="module")
def right(sound: Path) -> Tensor:
    return both(Store(sound))


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))
