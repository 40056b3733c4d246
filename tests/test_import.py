"""What importing costs, and that the packages depend on each other in one direction only."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import imprint

PACKAGE = Path(imprint.__file__).parent
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
# Packages that serve one use each: nothing else may import them.
EDGES = {"cli", "benchmarking", "export", "credit", "serve"}


def _loaded(*statements: str) -> list[set[str]]:
    """Names of the top-level modules that are loaded after each statement, in an interpreter of their own."""
    show = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", "\n".join(f"{statement}\n{show}" for statement in statements)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in shown.splitlines()]


def test_importing_needs_torch_numpy_and_safetensors_only() -> None:
    """Exports too: reading log-likelihoods that an engine found needs no transformers, and starts at once."""
    given, *then = _loaded("import torch, numpy, safetensors.torch", "import imprint", "import imprint.export")
    assert {"torch", "numpy", "safetensors"} <= given
    for loaded in then:
        assert loaded - given - set(sys.stdlib_module_names) == {"imprint"}


def _imports(tree: ast.AST) -> set[str]:
    """Modules of the library that some code imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith("imprint.")}


def _part(module: str) -> str:
    """The package a module belongs to; modules beside `__init__.py` are parts of their own."""
    return module.split(".")[1]


def _graph() -> dict[str, set[str]]:
    """Which parts each part of the library imports, read from the code."""
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if name in ("imprint.__init__", "imprint.__main__"):
            continue
        part = _part(name)
        graph.setdefault(part, set()).update(map(_part, _imports(ast.parse(path.read_text()))))
    return {part: used - {part} for part, used in graph.items()}


def test_packages_form_no_cycle() -> None:
    order = list(TopologicalSorter(_graph()).static_order())  # raises CycleError, which names the cycle
    assert order.index("task") < order.index("store") < order.index("simulation") < order.index("cli")
    assert order.index("store") < order.index("readout") < order.index("attribution") < order.index("evaluation")


def test_a_cycle_between_packages_would_be_found() -> None:
    tree = ast.parse("def late():\n    from imprint.simulation import runner\n")
    assert _imports(tree) == {"imprint.simulation.runner"}


def test_nothing_depends_on_the_edges_but_the_service_and_the_command_line() -> None:
    graph = _graph()
    for edge in EDGES:
        assert {part for part, used in graph.items() if edge in used} <= {"cli", "serve"}
    assert not any("serve" in used for part, used in graph.items() if part != "cli")
    assert "export" not in graph["serve"]


def test_simulation_and_readout_know_nothing_of_each_other() -> None:
    graph = _graph()
    assert "readout" not in graph["simulation"] and "simulation" not in graph["readout"]


def test_everything_public_is_there() -> None:
    assert sorted(imprint.__all__) == list(imprint.__all__)
    assert all(hasattr(imprint, name) for name in imprint.__all__)
    assert imprint.__version__.count(".") == 2
