"""The examples run as they stand and show what they promise."""

import json
import re
import runpy
import shlex
import sqlite3
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from imprint.cli.app import app
from tests import tuned_on_files
from tests.serve.fake_service import Reply, refuse, serving

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.curvature  # as anywhere else


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def run(example: str) -> str:
    """What an example prints when it is run as a program."""
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return printed.getvalue()


def test_the_careless_publisher_of_the_own_model_example_harms_every_query() -> None:
    lines = [line for line in run("own_model.py").splitlines() if line.startswith("  query")]
    assert len(lines) == 3
    assert all("blog -" in line for line in lines)


def test_the_camera_with_wrong_labels_harms_every_query_of_the_dict_example() -> None:
    lines = [line for line in run("dict_batches.py").splitlines() if line.startswith("  query")]
    assert len(lines) == 4
    assert all("camera 3 +" in line for line in lines)  # of a margin, where more is better


def test_the_digits_example_predicts_the_sign_of_every_effect() -> None:
    output = run("digits.py")
    rows = [line for line in output.splitlines() if "predicted" in line]
    assert len(rows) == 4
    for row in rows:
        predicted, actual = (float(part.split()[1].rstrip(",")) for part in row.split(": ")[1].split(", "))
        assert predicted * actual > 0, row


def test_the_careless_blog_of_the_command_line_example_harms_every_query() -> None:
    assert run("command_line.py") == ""  # it is for the commands
    for arguments in (
        ["simulate", f"{EXAMPLES}/command_line.py:task", "-o", "store", "--no-check"],
        ["attribute", "store", "--task", f"{EXAMPLES}/command_line.py:task"],
    ):
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
    queries = json.loads(result.stdout)["queries"]
    assert len(queries) == 3
    for credits in queries:
        assert {credit["name"] for credit in credits if credit["removal_effect"] < 0} == {"blog"}


@pytest.mark.skipif(not all(map(find_spec, ("transformers", "peft", "onnxscript", "onnxruntime"))), reason="no extras")
def test_every_completion_of_the_language_example_is_credited_to_the_publisher_who_writes_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the commands of the page, and a check, and an export to ONNX besides."""
    assert run("language_model.py") == ""  # it is for the commands
    Path("examples").symlink_to(EXAMPLES)
    task = "examples/language_model.py:task"
    page = (EXAMPLES.parent / "docs" / "command-line.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ imprint (.*language.*)", page, re.MULTILINE)
    simulating, attributing, asking, shading, exporting = (shlex.split(line, comments=True) for line in lines)

    def printed(*arguments: str) -> str:
        """By a command in a process of its own, in which the example trains anew."""
        for name in [name for name in sys.modules if name.startswith("imprint_experiment_")]:
            monkeypatch.delitem(sys.modules, name)
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        return result.stdout

    named = re.findall(r"│ (\w+) +│ ([^│]+?) +│\n", printed("check", task))
    assert [name for name, _ in named[:2]] == ["parameters", "store"]
    assert named[0][1].startswith("1,024 of ") and "4.1 kB per source" in named[1][1]
    printed(*simulating, "--no-check")
    queries = json.loads(printed(*attributing, "--json"))["queries"]
    for credits, publisher in zip(queries, ("almanac", "gazette", "logbook"), strict=True):
        effects = {credit["name"]: credit["removal_effect"] for credit in credits}
        own = effects.pop(publisher)
        assert own < 0 and min(effects.values()) > 0.1 * own
    (asked,) = json.loads(printed(*asking, "--json"))["queries"]
    assert min(asked, key=lambda credit: float(credit["removal_effect"]))["name"] == "logbook"
    assert "logbook makes this completion likelier" in printed(*shading) and Path("words.html").is_file()
    printed(*exporting)
    onnx = ("export", "runs/language", "--task", task, "-o", "graph", "--format", "onnx")
    exported = json.loads(printed(*onnx, "--json"))
    assert exported["sources"] == ["almanac", "gazette", "logbook"]
    assert exported["self_test"]["central"] <= 1e-4


@pytest.mark.wide
@pytest.mark.skipif(not all(map(find_spec, ("sqlalchemy", "cryptography", "pyarrow"))), reason="no extras")
def test_the_careless_publishers_of_the_credit_example_earn_least_and_every_proof_holds() -> None:
    output = run("credit.py")
    for text in (
        "validated (expected)",
        "credits nothing: True",
        "holds: Oak, 2026-11",
        "verified: 44 entries",
        "agrees",
    ):
        assert text in output, text
    pages = {path.stem: path.read_text(encoding="utf-8") for path in Path("credit-demo/statements").glob("*.html")}
    paid = {name: float(re.findall(r'class="sum">([\d.]+) EUR', page)[0]) for name, page in pages.items()}
    assert len(paid) == 10 and {"Elder", "Rowan"} == set(sorted(paid, key=paid.__getitem__)[:2])


def test_the_example_beside_a_model_server_credits_each_answer_once_even_if_the_service_is_away_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPRINT_KEY", "imprint_" + "k" * 43)
    monkeypatch.setattr("imprint.serve.client.time.sleep", lambda seconds: None)
    completion, refused = Reply(200, {"choices": [{"text": " sails on"}]}), refuse(422, "invalid")
    with serving(completion) as model, serving(Reply(0), refused, Reply(503), Reply()) as service:
        options = ["--model", "m", "--server", model.url, "--service", service.url]
        monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *options, "The old ship", "The new mayor", "The ferry"])
        assert run("beside_vllm.py").splitlines() == [" sails on"] * 3
        assert [asked.body["prompt"] for asked in model.asked] == ["The old ship", "The new mayor", "The ferry"]
        tried = [(asked.body["query"]["prompt"], asked.headers["idempotency-key"]) for asked in service.asked]
    assert [prompt for prompt, _ in tried] == ["The old ship"] * 2 + ["The new mayor"] * 2 + ["The ferry"]
    assert len({key for _, key in tried}) == 3
    with sqlite3.connect("answers.spool") as spool:
        ((query, why),) = spool.execute("SELECT query, refused FROM spool").fetchall()
    assert json.loads(query)["prompt"] == "The old ship" and "422" in why
    assert Path("answers.spool").stat().st_mode & 0o077 == 0


def test_what_the_example_beside_a_model_server_could_not_post_is_posted_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPRINT_KEY", "imprint_" + "k" * 43)
    with serving() as gone:
        pass  # an address where nobody answers
    with serving(Reply(200, {"choices": [{"text": " sails on"}]})) as model, serving() as service:
        options = ["--model", "m", "--server", model.url]
        monkeypatch.setattr(
            "imprint.serve.client.time", SimpleNamespace(monotonic=count().__next__, sleep=lambda seconds: None)
        )
        monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *options, "--service", gone.url, "The old ship"])
        assert run("beside_vllm.py") == " sails on\n"
        monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *options, "--service", service.url, "The ferry"])
        run("beside_vllm.py")
        assert [asked.body["query"]["prompt"] for asked in service.asked] == ["The old ship", "The ferry"]


@pytest.mark.parametrize("refusal", [refuse(409, "no_ledger"), refuse(400, "bad_host"), refuse(403, "forbidden")])
def test_a_service_that_is_set_up_wrong_costs_the_example_beside_a_model_server_no_answer(
    monkeypatch: pytest.MonkeyPatch, refusal: Reply
) -> None:
    monkeypatch.setenv("IMPRINT_KEY", "imprint_" + "k" * 43)
    with serving(Reply(200, {"choices": [{"text": " sails on"}]})) as model, serving(refusal) as service:
        options = ["--model", "m", "--server", model.url, "--service", service.url]
        monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *options, "The old ship", "The ferry"])
        assert run("beside_vllm.py").splitlines() == [" sails on"] * 2
        (tried,) = {asked.headers["idempotency-key"] for asked in service.asked}
        service.replies[:], service.asked[:] = [Reply()], []
        monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *options])
        monkeypatch.setattr(sys, "stdin", StringIO())
        run("beside_vllm.py")
        assert [asked.body["query"]["prompt"] for asked in service.asked] == ["The old ship", "The ferry"]
        assert service.asked[0].headers["idempotency-key"] == tried


def test_the_example_beside_a_model_server_posts_what_was_refused_again_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPRINT_KEY", "imprint_" + "k" * 43)
    replies = refuse(413, "too_large"), Reply()
    with serving(Reply(200, {"choices": [{"text": " sails on"}]})) as model, serving(*replies) as service:
        options = ["--model", "m", "--server", model.url, "--service", service.url]
        for more in (["The old ship"], [], ["--retry"]):
            monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *options, *more])
            monkeypatch.setattr(sys, "stdin", StringIO())
            run("beside_vllm.py")
        first, again = [asked.headers["idempotency-key"] for asked in service.asked]
        assert first == again
    with sqlite3.connect("answers.spool") as spool:
        assert spool.execute("SELECT count(*) FROM spool").fetchone() == (0,)


def test_the_notebook_finds_the_contributor_who_mislabels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    found: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), found)
    assert found["worst"] == "Elm"
    assert float(found["actual"].min()) < -0.02
    assert not any(cell.get("outputs") for cell in cells)  # outputs are made by those who run it


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_is_tested_here(example: str) -> None:
    assert f'run("{example}"' in Path(__file__).read_text()


@pytest.mark.wide
@pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")
def test_files_are_credited_with_the_answers_that_they_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tuned_on_files.write(Path("case"))
    monkeypatch.setattr(sys, "argv", ["credited_files.py", "case/texts", "case/model", *prompts.values()])
    shown = run("credited_files.py")
    for file in prompts:
        assert re.search(rf"{file} makes this completion likelier \(\+[0-9.]+ nats; its log-likelihood is", shown)
    page = Path("runs/files/answers.html").read_text()
    assert all(file in page for file in prompts)
    trained = Path("runs/files/training/recording.json").read_bytes()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:3], prompts["sails"]])
    again = run("credited_files.py")  # another prompt, and no training
    assert Path("runs/files/training/recording.json").read_bytes() == trained
    (line,) = (line for line in again.splitlines() if "makes this completion likelier" in line)
    assert line in shown
