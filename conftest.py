"""Leaves out modules that lack a package, and runs a part of the tests if asked to.

`--slice 1/4` runs every fourth or so, always the same ones; `--minutes 10` what is started in that time.
"""

import os
import time
import zlib
from importlib.util import find_spec

import pytest

collect_ignore = []
if not find_spec("dattri"):
    collect_ignore += ["imprint/benchmarking/dattri.py", "imprint/benchmarking/peers.py"]

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist have it, and a console would keep what it was made with

_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run a part of the tests."""
    parser.addoption("--slice", default="0/1", metavar="K/N", help="run part K of N, K from 0: always the same tests")
    parser.addoption("--minutes", type=float, help="skip the tests that are not started within so many minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part that was asked for."""
    part, parts = map(int, config.getoption("slice").split("/"))
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if the time is up."""
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - _BEGAN > 60 * minutes:
        pytest.skip("its time was up")
