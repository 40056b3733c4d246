"""Every test here may draw: pictures open no window, and are closed afterwards."""

from collections.abc import Iterator

import matplotlib
import pytest
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    plt.close("all")
