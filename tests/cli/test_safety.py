"""What a store, a file of scores or a name must not do to a machine, whoever made it."""

import csv
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import imprint
from imprint import Attribution, Plan, Sources, Store, StoreError, Task, attribute, simulate
from imprint.attribution.labels import Labels
from imprint.cli.app import app
from imprint.cli.inspection import inspect_store
from imprint.cli.terminal import console, render_store, render_top
from imprint.display import for_csv, for_html, for_picture, for_terminal
from imprint.readout.reader import Reader
from imprint.store.files import sha256
from imprint.store.values import sealed

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r\nrm -rf\u2028\x7f"
NAMES = [HOSTILE, "=1+1", "@sum(A1)"]
DATA = (torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 2)
MODEL = """
import torch
from torch import nn
import imprint

torch.manual_seed(0)
data = queries = (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
sources = imprint.Sources.per_example(4)
plan = imprint.Plan(steps=2, lr=0.1)
task = imprint.Task.classifier(nn.Linear(2, 2))
"""
EVIL = MODEL + "\nfrom pathlib import Path\nPath(__file__).with_name('ran').touch()\nx = test = task\n"


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Linear(2, 2))


def made(out: Path | None = None, note: Any = None, names: list[str] | None = None) -> Store:
    named = dict(zip("abc", names or ["a", "b", "c"], strict=True))
    sources = Sources.by_label(["a", "b", "c"] * 3, named)
    return simulate(task(), DATA, sources, Plan(steps=2, lr=0.1), out=out, note=note, progress=False)


def forge(store: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and give it the checksum it should have."""
    values = json.loads((store / "manifest.json").read_text())
    change(values)
    values.pop("sha256")
    (store / "manifest.json").write_text(json.dumps(sealed(values)))


def harmless(text: str) -> bool:
    """Whether a text has no control characters but the ends of its lines, and nothing that turns or hides others."""
    return all(line.isprintable() for line in text.split("\n"))


# --- a store never makes code run


NOTES: dict[str, dict[str, Any]] = {
    "a package": {"task": "gift.evil:task"},
    "a module in the folder": {"task": "evil:task"},
    "a file in the folder": {"task": "gift/evil.py:task"},
    "queries of the standard library": {"task": "digits", "queries": "gift.evil:test"},
    "an attribute of the user's file": {"task": "digits", "queries": "nuke"},
    "checkpoints": {"task": "digits", "checkpoints": ["gift/evil.py:x"]},
    "data": {"task": "digits", "data": "gift.evil:x", "collate_fn": "gift.evil:x"},
}


@pytest.mark.parametrize("kind", NOTES)
def test_nothing_that_a_store_names_is_loaded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "gift")])
    made(Path("gift"), {"imprint": {"command": NOTES[kind]}})
    Path("gift/evil.py").write_text(EVIL)
    lines = {
        "attribute": ["attribute", "gift"],
        "export": ["export", "gift", "-o", "exported"],
        "simulate": ["simulate", "--from", "gift", "-o", "again", "--no-check"],
    }
    wants = {"attribute": {"task", "queries", "collate_fn"}, "export": {"task", "queries"}}
    for name, words in lines.items():
        left = {"task": "", **NOTES[kind]}.keys() & wants.get(name, {*NOTES[kind]} - {"queries"})
        if left - {"task"} or NOTES[kind]["task"] != "digits":  # otherwise it is a setting, which is the library's own
            found = CliRunner().invoke(app, words)
            assert isinstance(found.exception, imprint.errors.ConfigurationError), name
            assert "that a store names are not loaded on their own" in str(found.exception)
    assert not list(tmp_path.rglob("ran"))
    assert not any(name in sys.modules for name in ("evil", "gift", "gift.evil"))


def test_the_command_to_copy_is_complete_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("my model.py").write_text(MODEL)
    run = CliRunner()
    given = ["my model.py:task", "--data", "data", "--sources", "per-example", "-o", "runs/a b", "--no-check"]
    assert run.invoke(app, ["simulate", *given]).exit_code == 0
    for words in (
        ["attribute", "runs/a b", "--top", "2", "--json"],
        ["simulate", "--from", "runs/a b", "--no-check", "-o", "again"],
    ):
        refused = run.invoke(app, words)
        assert refused.exit_code == 1
        copied = shlex.split(re.sub(r".*run: \S+ ", "", str(refused.exception)))
        assert {*words} <= {*copied, "-o"} and "my model.py:task" in copied
        assert run.invoke(app, copied).exit_code == 0, copied
    assert [f.sha256 for f in Store("again").checkpoints[0].imprints] == [
        f.sha256 for f in Store("runs/a b").checkpoints[0].imprints
    ]


def test_the_command_to_copy_is_clean_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path("gift"), {"imprint": {"command": {"task": f"$(touch ran); {HOSTILE}:x"}}})
    refused = CliRunner().invoke(app, ["attribute", "gift"])
    assert harmless(str(refused.exception))
    assert shlex.split(str(refused.exception).rsplit("--task ")[-1])[0].startswith("$(touch ran); \\x1b]0;owned")


def test_a_manifest_cannot_ask_for_a_billion_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    Path("model.py").write_text(MODEL)
    assert CliRunner().invoke(app, ["simulate", "model.py:task", "-o", "a", "--no-check"]).exit_code == 0
    for threads, expected in ((10**9, []), (2, [2])):
        asked.clear()
        forge(tmp_path / "a", lambda values, threads=threads: values["execution"].update(threads=threads))  # type: ignore[misc]
        again = ["simulate", "model.py:task", "--from", "a", "-o", f"again{threads}", "--no-check"]
        assert CliRunner().invoke(app, again).exit_code == 0
        assert asked == expected


# --- names are hostile


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
        console.print(render_top(result.top(3)))
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


# --- saved attributions


SCORES = torch.tensor([[3.0, -6.0], [-1.0, 2.0]], dtype=torch.float64)


def saved(place: Path, **changes: Any) -> Path:
    fields: dict[str, Any] = {
        **{"n": 10, "source_ids": ("a", "b"), "source_names": ("A", "B"), "source_sizes": (4, 5)},
        **{"measure": "loss", "better": "lower", "details": {"readout": "jvp"}, "fingerprints": {"store": "x"}},
    }
    Attribution(Labels(**{**fields, **changes}), SCORES).save(place)
    return place


def test_no_flipped_bit_changes_a_saved_attribution(tmp_path: Path) -> None:
    place = saved(tmp_path / "scores.safetensors")
    whole, content = Attribution.load(place), bytearray(place.read_bytes())
    header, refused = len(content) - SCORES.nbytes, 0
    flips = [*((byte, byte % 8) for byte in range(header)), *product(range(header, len(content)), range(8))]
    for byte, bit in flips:
        content[byte] ^= 1 << bit
        place.write_bytes(content)
        try:
            found = Attribution.load(place)
            assert found.labels == whole.labels and torch.equal(found.scores, whole.scores), (byte, bit)
        except StoreError:
            refused += 1
        content[byte] ^= 1 << bit
    assert refused > 0.99 * len(flips)  # a letter of an escape may be large or small


def forged(place: Path, change: Callable[[dict[str, Any]], Any], scores: torch.Tensor = SCORES) -> None:
    """A file whose checksums are right and whose content is not."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from imprint.store.fingerprint import of_tensors

    with safe_open(saved(place), framework="pt") as file:
        values = json.loads(file.metadata()["imprint"])
    change(values)
    values["scores"] = of_tensors({"scores": scores})
    values.pop("sha256", None)
    save_file({"scores": scores}, place, {"imprint": json.dumps(sealed(values))})


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "N is 0": (lambda v: v["labels"].update(n=0), r"labels\.n must be a whole number"),
    "N is a text": (lambda v: v["labels"].update(n="10"), r"labels\.n must be"),
    "an id twice": (lambda v: v["labels"].update(source_ids=["a", "a"]), "two sources have the same id"),
    "a name too many": (lambda v: v["labels"].update(source_names=["a"]), "are not equally many"),
    "a source too large": (lambda v: v["labels"].update(source_sizes=[4, 11]), "more than the training data"),
    "ids are no texts": (lambda v: v["labels"].update(source_ids=[1, 2]), r"source_ids\[0\] must be a text"),
    "better of something": (lambda v: v["labels"].update(better="best"), "lower, higher or null"),
    "a query is markup": (lambda v: v.update(queries=["<script>", 1]), r"queries\[0\] must be a whole number"),
    "a query too many": (lambda v: v.update(queries=[0, 1, 2]), r"shape \(2, 2\), and its labels are of \(3, 2\)"),
    "calibrated by 0": (lambda v: v["labels"]["details"].update(calibration=0), "must be a positive number"),
    "an unknown label": (lambda v: v["labels"].update(evil=1), "unknown field 'evil'"),
    "a label less": (lambda v: v["labels"].pop("measure"), "measure is missing"),
    "another schema": (lambda v: v.update(schema=99), "upgrade imprint"),
    "parameters that are none": (lambda v: v["labels"].update(fingerprints={"parameters": {"w": 1}}), "an object"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_saved_attribution_is_looked_at_field_by_field(kind: str, tmp_path: Path) -> None:
    change, words = FORGERIES[kind]
    forged(tmp_path / "scores.safetensors", change)
    with pytest.raises(StoreError, match=words):
        Attribution.load(tmp_path / "scores.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_neither_saved_nor_loaded(value: float, tmp_path: Path) -> None:
    scores = torch.tensor([[1.0, 2.0], [value, 0.0]], dtype=torch.float64)
    forged(tmp_path / "scores.safetensors", lambda values: None, scores)
    with pytest.raises(StoreError, match=f"row 1, column 0 is {value}"):
        Attribution.load(tmp_path / "scores.safetensors")
    labels = Labels(10, ("a", "b"), ("A", "B"), (4, 5), "loss", "lower")
    with pytest.raises(StoreError, match=f"row 1, column 0 is {value}"):
        Attribution(labels, scores).save(tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()


def test_a_saved_attribution_knows_its_store(tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    attribute(task(), store, DATA, progress=False).save(tmp_path / "scores.safetensors")
    assert Attribution.load(tmp_path / "scores.safetensors").labels.fingerprints["store"] == store.sha256
    forge(store.path, lambda values: values.update(note="another"))
    assert Store(store.path).sha256 != store.sha256


def test_what_is_loaded_does_not_change_with_its_file(tmp_path: Path) -> None:
    result = Attribution.load(saved(tmp_path / "scores.safetensors"))
    with (tmp_path / "scores.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x55" * 8)
    assert torch.equal(result.scores, SCORES)


def test_a_file_without_a_checksum_is_read_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import save_file

    labels = vars(Labels(10, ("a", "b"), ("A", "B"), (4, 5), "loss", "lower"))
    about = json.dumps({"labels": labels, "queries": [0, 1]})
    save_file({"scores": SCORES}, tmp_path / "old.safetensors", {"imprint": about})
    assert torch.equal(Attribution.load(tmp_path / "old.safetensors").scores, SCORES)
    assert "old.safetensors was saved without a checksum" in caplog.text


def test_scores_are_not_saved_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "scores.safetensors").symlink_to(tmp_path / "mine")
    with pytest.raises(StoreError, match=r"scores\.safetensors: it is a link"):
        saved(tmp_path / "scores.safetensors")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "scores.safetensors").is_symlink()


# --- stores that are used for long, and by several processes


@pytest.mark.parametrize("name", ["imprints-00000", "base"])
def test_a_reader_sees_that_a_file_was_damaged_after_it_was_read(name: str, tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    reader = Reader(task(), Store(store.path))
    before = reader.scores(DATA)
    place = store.path / "checkpoint-000" / f"{name}.safetensors"
    content = bytearray(place.read_bytes())
    content[-1] ^= 0x40
    with place.open("r+b") as file:  # in place: tensors are mapped from the file
        file.write(content)
    with pytest.raises(StoreError, match=f"{name}.safetensors is damaged: it differs from its checksum"):
        reader.scores(DATA)
    content[-1] ^= 0x40
    with place.open("r+b") as file:
        file.write(content)
    assert torch.equal(reader.scores(DATA), before)


def test_a_file_that_is_touched_is_hashed_again_and_not_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(made(tmp_path / "store").path)
    reader = Reader(task(), store)
    before, hashed = reader.scores(DATA), list[str]()

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    monkeypatch.setattr("imprint.store.opening.sha256", counted)
    reader.scores(DATA)
    assert not hashed
    (store.path / "checkpoint-000/imprints-00000.safetensors").touch()
    assert torch.equal(reader.scores(DATA), before)
    assert hashed == ["imprints-00000.safetensors"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_delete_a_temporary_store() -> None:
    store = made()
    child = os.fork()
    if child == 0:
        del store  # the last reference of this process: its store goes
        os._exit(0)
    os.waitpid(child, 0)
    store.verify()
    path = store.path
    del store
    assert not path.exists()


# --- JSON that is meant to mislead


def test_a_name_twice_in_an_object_is_refused(tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    text = (store.path / "manifest.json").read_text()
    (store.path / "manifest.json").write_text('{"created": "1000000",' + text.lstrip().removeprefix("{"))
    with pytest.raises(StoreError, match="the name 'created' appears more than once"):
        Store(store.path)


def test_a_manifest_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    os.truncate(store.path / "manifest.json", 6 << 30)  # sparse: it takes no room
    with pytest.raises(StoreError, match="it has 6,442,450,944 bytes, and at most 67,108,864 are expected"):
        Store(store.path)


def test_a_note_that_fits_no_manifest_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"note must be made of JSON values: .* fit a manifest"):
        made(tmp_path / "store", note="x" * (33 << 20))
    assert not (tmp_path / "store").exists()


def test_linearity_is_kept_to_six_digits_as_other_figures_are(tmp_path: Path) -> None:
    """The last digits depend on where tensors lie in memory, and a resumed store is the same to the bit."""
    plan = Plan(engine="trajectories", steps=2, lr=0.1, epsilon=1.0)
    sources = Sources.by_label([0, 1, 2] * 3)
    store = simulate(task(), DATA, sources, plan, out=tmp_path / "store", progress=False)
    measured = asdict(store.checkpoints[0].measured)
    values = [*measured["linearity"].values(), *measured["norms"].values(), measured["drift"]]
    assert all(value == float(f"{value:.6g}") for value in values)
