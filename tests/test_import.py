"""What importing costs, and which way the modules depend on each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import imprint

PACKAGE = Path(imprint.__file__).parent
LAYERS = {
    "errors": ("display",),
    "progress": (),
    "display": (),
    "memory": ("errors",),
    "dropout": (),
    "turns": ("errors",),
    "notices": (
        "display",
        "errors",
    ),
    "replica": ("errors",),
    "supported": ("errors",),
    "task": ("errors", "dropout", "replica", "supported", "turns"),
    "sources": ("errors",),
    "data": ("values", "errors", "task"),
    "vectors": ("task",),
    "agreement": ("turns", "memory", "task", "data"),
    "soundness": ("errors", "notices", "replica", "task", "data"),
    "rows": ("turns", "errors", "task", "data"),
    "files": ("errors",),
    "recording": ("errors", "files", "tensorfile"),
    "fingerprint": ("errors", "values", "data", "sources", "task"),
    "simulation": (
        "manifest",
        "probing",
        *("errors", "notices", "progress", "memory", "dropout", "turns", "task", "sources", "data", "vectors", "rows"),
        *("agreement", "soundness", "files", "recording", "fingerprint", "tensorfile", "values", "store", "writer"),
    ),
    "probing": ("errors", "task", "data", "dropout", "fingerprint", "vectors", "values"),
    "readout_guards": ("errors",),
    "values": (
        "files",
        "errors",
    ),
    "manifest": ("fingerprint", "probing", "errors", "values", "simulation.plan"),
    "store": ("probing", "errors", "data", "files", "fingerprint", "manifest", "rows", "task", "values"),
    "writer": (
        "simulation.choices",
        "probing",
        *("errors", "data", "files", "fingerprint", "sources", "task"),
        *("manifest", "store", "tensorfile", "values", "simulation.snapshot"),
    ),
    "linear": (),
    "tensorfile": (),
    "factored": ("turns", "errors", "task", "rows", "vectors", "store"),
    "measuring": ("errors", "task", "data", "agreement", "soundness"),
    "readout": (
        *("errors", "linear", "memory", "turns", "task", "data", "vectors"),
        *("measuring", "store", "factored", "readout_guards"),
    ),
    "checking": (
        "fingerprint",
        "errors",
        "files",
        "progress",
        "turns",
        "task",
        "sources",
        "data",
        "simulation",
        "store",
        "readout",
    ),
    "saved": ("errors", "files", "fingerprint", "values"),
    "attribution": (
        "notices",
        *("errors", "display", "fingerprint", "progress", "turns", "task", "sources", "data"),
        *("store", "readout", "saved"),
    ),
    "inspection": ("vectors", "store"),
    "evaluation": (
        "probing",
        *(
            "errors",
            "display",
            "progress",
            "memory",
            "task",
            "sources",
            "data",
            "rows",
            "files",
            "fingerprint",
            "values",
        ),
        *("manifest", "simulation", "store", "readout", "attribution"),
    ),
    "language": (
        "notices",
        *("errors", "progress", "dropout", "task", "sources", "data"),
        *("recording", "simulation.states", "store", "readout", "attribution"),
    ),
    "settings": ("errors", "progress", "task", "sources", "data", "simulation.plan", "evaluation", "language"),
    "export": (
        *("errors", "display", "files", "values", "manifest", "task", "data", "tensorfile", "store", "readout"),
        *("language.presets",),
    ),
    "experiment": ("errors", "store"),
    "loading": ("errors", "task", "sources", "data", "simulation.plan", "store", "experiment", "settings.catalogue"),
    "terminal": (
        *("display", "progress", "values", "checking", "attribution", "experiment"),
        *("demo.report", "evaluation.metrics", "evaluation.truth"),
    ),
    "commands": (
        *("imprint", "errors", "data", "files", "manifest", "store", "inspection", "experiment", "loading", "terminal"),
        *("display", "demo.experiment", "demo.report", "evaluation", "export", "settings.catalogue"),
    ),
    "cli": ("imprint", "display", "errors", "loading", "commands", "terminal"),
}
"""What each module may import. Only `simulation.run`, and `simulation.frozen` for it, write stores."""
SHELL = (
    *("attribution", "inspection", "evaluation", "settings", "language", "export"),
    *("experiment", "loading", "terminal", "commands", "cli"),
)
CORE = tuple(module for module in LAYERS if module not in SHELL)


def _loaded(statement: str) -> set[str]:
    """Names of the top-level modules that are loaded after a statement, in an interpreter of its own."""
    show = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", f"{statement}\n{show}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_needs_torch_numpy_and_safetensors_only() -> None:
    given = _loaded("import torch, numpy, safetensors.torch")
    assert {"torch", "numpy", "safetensors"} <= given
    added = _loaded("import imprint") - given - set(sys.stdlib_module_names)
    assert added == {"imprint"}


def _imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, relative to the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name.removeprefix("imprint.") for name in found if name.startswith("imprint")}


def _files(module: str) -> list[Path]:
    folder = PACKAGE / module
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{module}.py"]


@pytest.mark.parametrize("module", LAYERS)
def test_dependencies_point_along_the_data_flow(module: str) -> None:
    allowed = (module, *LAYERS[module])
    for path in _files(module):
        for name in _imports(path):
            assert name.startswith(tuple(allowed)), f"{path.relative_to(PACKAGE)} imports imprint.{name}"


def test_only_the_runs_write_stores() -> None:
    writers = {path.name for path in _files("simulation") if "writer" in _imports(path)}
    assert writers == {"run.py", "frozen.py"}


def test_the_core_knows_nothing_of_what_is_built_on_it() -> None:
    for module in CORE:
        for path in _files(module):
            later = {name for name in _imports(path) if name.split(".")[0] not in CORE}
            assert not later, f"{path.relative_to(PACKAGE)} imports {later}"


def test_everything_public_is_there() -> None:
    assert sorted(imprint.__all__) == list(imprint.__all__)
    assert all(hasattr(imprint, name) for name in imprint.__all__)
    assert imprint.__version__.count(".") == 2
