"""Stores of simulations that nothing has ended, and snapshots that are kept at every step."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint import Plan
from imprint.simulation import snapshot
from tests.simulation.killing import PLANS, Made, run


@pytest.fixture(scope="module")
def snapshots_at_every_step() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of a plan's store, simulated once for all tests: to read and to copy."""
    folders: list[tuple[Plan, Path]] = []

    def make(plan: Plan) -> Path:
        for other, folder in folders:
            if other == plan:
                return folder
        folders.append((plan, run(tmp_path_factory.mktemp("made") / "store", plan).path))
        return folders[-1][1]

    return make


@pytest.fixture
def finished(made: Made, tmp_path: Path) -> Path:
    """A folder with all of a store."""
    return Path(shutil.copytree(made(PLANS["tangent"]), tmp_path / "store"))
