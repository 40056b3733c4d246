"""Runs the Python code of the README and the docs as tests, each page in an empty folder of its own."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any


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
