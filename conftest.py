"""Runs the Python code of the README and the docs as tests, each page in an empty folder of its own.

And runs a part of the tests: `--slice 1/4` every fourth or so, always the same ones; `--minutes 10` what is started in
that time.
"""

import os
import tempfile
import time
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def enter(page: dict[str, Any]) -> None:
    """What a page writes does not land in the working tree."""
    page["_before"], page["_folder"] = Path.cwd(), tempfile.TemporaryDirectory()
    os.chdir(page["_folder"].name)


def leave(page: dict[str, Any]) -> None:
    """… and is gone after it."""
    os.chdir(page["_before"])
    page["_folder"].cleanup()


if find_spec("sybil"):  # the core's tests also run where there is only torch and pytest
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser

    pytest_collect_file: Any = Sybil(
        parsers=[PythonCodeBlockParser()],
        patterns=["README.md", "docs/*.md"],
        excludes=["docs/language.md"],  # tests/language/test_page.py runs it, and looks at what comes out
        setup=enter,
        teardown=leave,
    ).pytest()

collect_ignore = []
if not find_spec("dattri"):
    collect_ignore += ["imprint/benchmarking/dattri.py", "imprint/benchmarking/peers.py"]
if not (find_spec("transformers") and find_spec("peft")):
    collect_ignore += ["docs/export.md", "examples/language_model.py"]
elif not (find_spec("onnxruntime") and find_spec("onnxscript")):
    collect_ignore += ["docs/export.md"]

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
