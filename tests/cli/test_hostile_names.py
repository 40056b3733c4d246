"""What a name must not do, wherever it is shown."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from imprint import Attribution, Store, StoreError, attribute
from imprint.attribution.labels import Labels
from imprint.cli.app import app
from imprint.cli.inspection import inspect_store
from imprint.cli.terminal import console, render_attribution, render_store
from imprint.display import for_csv, for_html, for_picture, for_terminal
from tests.cli.forging import DATA, HOSTILE, MODEL, forge, harmless, made, task

NAMES = [HOSTILE, "=1+1", "@sum(A1)"]


def test_a_terminal_is_shown_control_characters_and_obeys_none() -> None:
    assert harmless(for_terminal(HOSTILE)) and "\n" not in for_terminal(HOSTILE)
    assert for_terminal("\x1b[31m\u202e\n\x9b") == "\\x1b[31m\\u202e\\n\\x9b"
    assert for_terminal("Übersee 漢字 👩‍🔬 [bold] a\u00a0b") == "Übersee 漢字 👩‍🔬 [bold] a\u00a0b"


def test_a_page_has_no_tags_of_others() -> None:
    assert for_html("<img src=x onerror='a()'>\"\x1b") == "&lt;img src=x onerror=&#x27;a()&#x27;&gt;&quot;\\x1b"


@pytest.mark.parametrize("cell", ["=1+1", "+1+cmd", "-1+cmd", "@sum", "\t=1", "\r=1", " =1", "＝1+1", "-", "\n=1"])
def test_a_spreadsheet_finds_no_formula(cell: str) -> None:
    assert for_csv(cell).startswith("'") and harmless(for_csv(cell))


@pytest.mark.parametrize("cell", [-1.5, 3, "-1.5", "+2", "-1e-05", "times", "", "a=b", "12"])
def test_numbers_stay_numbers_and_names_stay_names(cell: Any) -> None:
    assert for_csv(cell) == cell and type(for_csv(cell)) is type(cell)


def test_whatever_a_result_prints_is_clean() -> None:
    store = made(names=NAMES)
    result = attribute(task(), store, DATA, progress=False)
    labels = Labels(9, *(result.labels.source_ids,) * 2, (3, 3, 3), HOSTILE, None)
    for shown in (result, result.top(2), store, Attribution(labels, result.scores), result.top(2).labels):
        assert harmless(repr(shown)), repr(shown)
    with console.capture() as captured:
        console.print(render_attribution(result.mean().top(3), result.top(3)))
    assert harmless(captured.get()) and "\\x1b]0;owned\\x07" in captured.get()


def test_a_query_is_escaped_in_a_notebook() -> None:
    labels = Labels(9, ("a",), ("<i>",), (3,), "<b>loss</b>", "lower")
    page = Attribution(labels, torch.ones(1, 1), ("<script>alert(1)</script>",))._repr_html_()  # type: ignore[arg-type]
    assert "<script" not in page and "<i>" not in page and "<b>loss" not in page
    assert "&lt;script&gt;" in page


def test_a_picture_of_names_with_dollars_can_be_drawn() -> None:
    import matplotlib

    matplotlib.use("Agg")
    labels = Labels(9, ("a",), (r"$\frac{a$ and $$",), (3,), "$\\loss{$ in $", "lower")
    axes = Attribution(labels, torch.ones(1, 1)).plot()
    axes.figure.canvas.draw()
    assert for_picture("$5") == r"\$5"


def test_everything_of_a_forged_manifest_is_shown_clean(tmp_path: Path) -> None:
    store = made(tmp_path / "store", names=NAMES)

    def change(values: dict[str, Any]) -> None:
        values["created"] = HOSTILE
        values["versions"]["torch"] = HOSTILE
        values["checkpoints"][0]["measured"]["one_by_one"] = HOSTILE

    forge(store.path, change)
    result = CliRunner().invoke(app, ["inspect", str(store.path)], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.exception
    assert harmless(result.stdout) and result.stdout.count("owned") >= 2
    assert harmless(json.dumps(CliRunner().invoke(app, ["inspect", str(store.path), "--json"]).stdout))
    with console.capture() as captured:
        console.print(render_store(inspect_store(Store(store.path))))
    assert harmless(captured.get())


def test_scores_for_a_spreadsheet_are_no_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    listed = ["=cmd|'/C calc'!A0", "-3", HOSTILE, "times"]
    Path("model.py").write_text(
        MODEL + f"sources = imprint.Sources.groups({{i: [n] for n, i in enumerate({listed!r})}})\n"
    )
    for words in ("simulate model.py:task -o a --no-check", "attribute a --task model.py:task -o scores.csv"):
        assert CliRunner().invoke(app, words.split()).exit_code == 0
    with Path("scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {"'=cmd|'/C calc'!A0", "-3", for_terminal(HOSTILE), "times"}
    assert all(float(row["score"]) == float(row["score"]) for row in rows)


def test_errors_are_clean_wherever_they_are_printed(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as refused:
        Store(tmp_path / f"x{HOSTILE}".replace("\r\n", ""))
    assert harmless(str(refused.value)) and "\\x1b]0;owned" in str(refused.value)
