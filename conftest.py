"""Runs the Python code of the README and the docs as tests, each page in an empty folder of its own."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page writes does not land in the working tree."""
    monkeypatch.chdir(tmp_path)


if find_spec("sybil"):  # the core's tests also run where there is only torch and pytest
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser

    pytest_collect_file: Any = Sybil(
        parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"], fixtures=["empty_folder"]
    ).pytest()

os.environ.setdefault("MPLBACKEND", "Agg")
