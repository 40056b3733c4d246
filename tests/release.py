"""Tries what would be published: `python tests/release.py dist` (`make release-check` builds it first).

Looks into the sdist and the wheel in a folder, then installs the wheel into an empty environment, with the core's
dependencies alone, and uses it there. What stands after `--` goes to pip, such as constraints and another index.
"""

import argparse
import os
import re
import subprocess
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parent.parent
PAGES = [
    *(f"imprint/evaluation/reports/{name}" for name in ("report.html.j2", "parts.html.j2", "report.css")),
    "imprint/credit/statement.html.j2",
]
COMMANDS = ("demo", "check", "simulate", "attribute", "inspect", "verify", "export", "retrain", "evaluate", "bench")
EXTRAS = {"report", "language", "bench", "serve", "cluster", "all"}
MODEL = """
import torch, imprint
torch.manual_seed(0)
data = (torch.randn(20, 4), torch.arange(20) % 3)
queries = (data[0][:5], data[1][:5])
sources = imprint.Sources.by_label([f"publisher {i % 4}" for i in range(20)])
plan = imprint.Plan(steps=5, lr=0.1)
task = imprint.Task.classifier(torch.nn.Linear(4, 3))
"""
USE = """
import importlib.metadata, importlib.util
from model import imprint, task, data, sources, plan, queries
store = imprint.simulate(task, data, sources, plan, out="store", progress=False)
result = imprint.attribute(task, store, queries, progress=False)
assert result.scores.shape == (5, 4) and result.scores.isfinite().all()
assert "site-packages" in imprint.__file__, imprint.__file__
assert importlib.metadata.version("imprint-attribution") == imprint.__version__
assert not any(map(importlib.util.find_spec, ("matplotlib", "pandas", "sklearn", "transformers", "pytest")))
"""


def tracked() -> set[str]:
    """List the files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(listed.split("\0")) - {""}


def check_sdist(path: Path) -> None:
    """Check that the source distribution is the repository, so that `make test` runs in it."""
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    different = (files ^ tracked()) - {"PKG-INFO"}
    assert not different, f"{path.name} and the repository differ by {sorted(different)[:8]}"


def check_wheel(path: Path, version: str) -> None:
    """Check that the wheel holds the package with all of its data, and that its metadata is valid."""
    with zipfile.ZipFile(path) as archive:
        files = set(archive.namelist())
        (about,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(about), validate=True)
    package = {name for name in tracked() if name.startswith("imprint/")}
    different = {name for name in files if ".dist-info/" not in name} ^ package
    assert not different, f"{path.name} and imprint/ differ by {sorted(different)[:8]}"
    assert {"imprint/py.typed", *PAGES} <= files
    assert str(metadata.version) == version and set(metadata.provides_extra or ()) == EXTRAS
    assert metadata.description_content_type == "text/markdown" and metadata.license_files == ["LICENSE"]
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text(), f"CHANGELOG.md has no section {version}"


def use(wheel: Path, options: list[str], version: str) -> None:
    """Install the wheel into an empty environment and use it, by Python and by command."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        programs = Path(folder) / "venv" / "bin"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(program: str, *words: str, code: int = 0) -> str:
            command = [str(programs / program), *words]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == code, (
                f"{program} {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
            return done.stdout + done.stderr

        run("python", "-m", "pip", "install", "--quiet", *options, "torch")  # as the Makefile does, first and alone
        run("python", "-m", "pip", "install", "--quiet", *options, str(wheel))
        run("python", "-m", "pip", "check")
        (Path(folder) / "model.py").write_text(MODEL)
        run("python", "-c", USE)
        assert run("imprint", "--version").strip() == f"imprint {version}"
        shown = run("imprint", "--help")
        assert all(command in shown for command in COMMANDS), shown
        assert "works" in run("imprint", "check", "model.py:task")
        assert "match their checksums" in run("imprint", "verify", "store")
        run("imprint", "attribute", "store", "--task", "model.py:task")
        assert "imprint-attribution[report]" in run("imprint", "demo", code=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("options", nargs="*", help="for pip, after --")
    given = parser.parse_args()
    (sdist,), (wheel,) = given.folder.glob("*.tar.gz"), given.folder.glob("*.whl")
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "imprint/__init__.py").read_text())[0]
    assert sdist.name == f"imprint_attribution-{version}.tar.gz", sdist.name
    check_sdist(sdist)
    check_wheel(wheel, version)
    options = [str(Path(word).resolve()) if Path(word).is_file() else word for word in given.options]
    use(wheel.resolve(), options, version)
    print(f"{sdist.name} and {wheel.name} can be released.")


if __name__ == "__main__":
    main()
