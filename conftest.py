"""Leaves out modules that lack a package, and runs a part of the tests if asked to.

`--slice 1/4` runs every fourth or so, always the same ones; `--minutes 10` what is started in that time.
"""

import os
import re
import time
import zlib
from importlib.util import find_spec

import pytest

collect_ignore = []
if not find_spec("dattri"):
    collect_ignore += [f"imprint/benchmarking/{name}.py" for name in ("dattri", "peers", "early")]
if not find_spec("kronfluence"):
    collect_ignore += ["imprint/benchmarking/kronfluence.py"]

if not (find_spec("sqlalchemy") and find_spec("cryptography")):
    collect_ignore += ["imprint/credit", "tests/credit", "tests/cli/test_credit.py", "tests/test_keys.py"]
    collect_ignore += ["tests/store/test_signing.py"]

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist have it, and a console would keep what it was made with

_BEGAN = time.monotonic()
# What `make test` leaves to `make test-system`: most tests of the packages that need extras (language models, exports,
# benchmarks), and cases that repeat a claim on more members of the zoo, along more plans or on every page of the docs.
_WIDE = re.compile(
    "|".join(
        (
            r"tests/(language|export|benchmarking)/(?!test_data|test_tokens|test_chats|test_packed|demo)",
            r"tests/language/.*\[.*llama",
            r"tests/evaluation/test_brittleness\.py",
            r"tests/test_pages\.py::.*\[docs/(?!quickstart)",
            r"tests/cli/test_page\.py::test_every_command_of_the_page_works",
            r"tests/cli/test_processes\.py::test_no_traceback_reaches_the_terminal",
            r"tests/checking/test_outcome\.py::test_check_says.*\[(?!mlp_tanh|batch_norm|transformer_layer|dict_batch\])",
            r"tests/(test_zoo|readout/test_factored)\.py::.*\[(mlp_relu|in_place|dict_batch_with|seeded|preallocated)",
            r"tests/(test_zoo|readout/test_factored)\.py::.*\[(always_float64|scalar|custom|biases|causal)",
            r"tests/simulation/test_((spectral_)?resume|processes)\.py::.*(automatic|mini-batches|in full|projected)",
            r"tests/simulation/test_(mom\w+|preconditioner)\.py::.*(automatic|mini-batches|in full|projected)",
            r"tests/simulation/test_(mom\w+|preconditioner)\.py::.*(one_sided|two_sided|mirrored|trajectories|many_steps)",
            r"tests/simulation/test_resume\.py::.*, with a snapshot",
            r"tests/simulation/test_auto\w*\.py::.*(dtype1|plentiful|unit_of_the_targets|probed|the_trace_is)",
        )
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run a part of the tests."""
    parser.addoption("--slice", default="0/1", metavar="K/N", help="run part K of N, K from 0: always the same tests")
    parser.addoption("--minutes", type=float, help="skip the tests that are not started within so many minutes")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the wide tests, and keep those of the part that was asked for."""
    for item in items:
        if _WIDE.search(item.nodeid):
            item.add_marker(pytest.mark.wide)
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
