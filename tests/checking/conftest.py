"""What every test of a check starts from: a disk that is not measured."""

import pytest

from imprint.simulation import estimate


@pytest.fixture(autouse=True)
def _a_quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nobody wants to know how fast the disk really is."""
    monkeypatch.setattr(estimate, "_WRITTEN", 1 << 12)
