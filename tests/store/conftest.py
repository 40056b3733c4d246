"""Stores that nothing has happened to, a copy to which something may, and the address of a folder in a bucket."""

import shutil
from pathlib import Path

import pytest
from torch import Tensor

from imprint import Store
from tests.store.bucketed import Cache
from tests.store.making import both, make
from tests.store.sharded import new_task, simulated


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of five sources in shards of one, at two checkpoints; not to be changed."""
    return simulated(new_task(), tmp_path_factory.mktemp("made") / "store", memory="1B", batch_size=5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(tmp_path, monkeypatch)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/news"
