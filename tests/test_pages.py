"""The Python code of the README and the docs runs, each page from top to bottom in an empty folder of its own."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^(?:```python|<!-- invisible-code-block: python)\n(.*?)^(?:```|-->)", re.MULTILINE | re.DOTALL)
NEEDS = {"docs/export.md": ("transformers", "peft", "onnxruntime", "onnxscript")}
PAGES = [
    pytest.param(
        name, marks=pytest.mark.skipif(not all(map(find_spec, NEEDS.get(name, ()))), reason="an extra is missing")
    )
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(path.read_text(encoding="utf-8"))
    and (name := path.relative_to(ROOT).as_posix()) != "docs/language.md"  # tests/language/test_page.py looks closer
]


@pytest.mark.curvature  # as anywhere else
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, namespace = (ROOT / page).read_text(encoding="utf-8"), dict[str, Any]()
    for block in BLOCK.finditer(text):
        above = "\n" * text.count("\n", 0, block.start(1))  # so that an error names the line of the page
        exec(compile(above + block[1], str(ROOT / page), "exec"), namespace)
