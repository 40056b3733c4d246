"""The command line: what each command does, prints and leaves with; and the page about it runs as it stands."""

import csv
import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

import imprint
from imprint import Attribution, Plan, Store, attribute, simulate
from imprint.benchmarking.settings import digits
from imprint.benchmarking.sweep import GRID
from imprint.cli.app import app, main
from imprint.cli.terminal import show_progress
from imprint.simulation.engines.tangent import Tangent
from imprint.store.request import DataHashes
from tests.benches import little_digits

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
MODEL = """
import torch
from torch import nn
import imprint

torch.manual_seed(0)
data = (torch.randn(12, 3), torch.randint(0, 3, (12,)))
sources = imprint.Sources.by_label(["times", "post", "[blog]"] * 4)
queries = (torch.randn(2, 3), torch.tensor([0, 1]))
plan = imprint.Plan(steps=3, lr=0.1)
task = imprint.Task.classifier(nn.Linear(3, 3))
"""
TASK = ("--task", "model.py:task")


class Finished(NamedTuple):
    """A command that has left: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def values(self) -> Any:
        """Standard output, all of it, as strict JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        assert self.code == 0, self.err
        return json.loads(self.out, parse_constant=refuse)


Command = Callable[..., Finished]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line as a process of its own would: with nothing loaded yet, and all it changes put back."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # the program is imprint, not python -m pytest
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: object) -> Finished:
        for name in [name for name in sys.modules if name.startswith("imprint_experiment_")]:
            del sys.modules[name]
        monkeypatch.setattr(sys, "argv", ["imprint", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
        assert code is None or isinstance(code, int)
        return Finished(code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py and the store runs/news, which a command has made there."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        result = CliRunner().invoke(app, ["simulate", "model.py:task", "--out", "runs/news"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(file: Path) -> SimpleNamespace:
    """What a model's file defines, for the library to work on."""
    return SimpleNamespace(**runpy.run_path(str(file)))


def imprints(store: str | Path) -> dict[str, str]:
    """The checksums of a store's imprints by file."""
    files = (file for checkpoint in Store(store).checkpoints for file in checkpoint.imprints)
    return {file.path: file.sha256 for file in files}


# --- help, version, completion


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_and_an_example(name: str, command: Command) -> None:
    shown = command(name, "--help")
    assert shown.code == 0
    for parameter in COMMANDS[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert option in shown.out
    assert f"imprint {name} " in shown.out.split("For example")[1]


def test_help_lists_the_commands(command: Command) -> None:
    assert set(COMMANDS) == {
        *("demo", "check", "simulate", "attribute", "inspect", "verify"),
        *("export", "retrain", "evaluate", "bench", "sweep"),
    }
    for arguments in ((), ("--help",)):
        assert all(re.search(rf"^│ {name} ", command(*arguments).out, re.MULTILINE) for name in COMMANDS)


def test_the_version_is_that_of_the_library(command: Command) -> None:
    assert command("--version") == (0, f"imprint {imprint.__version__}\n", "")


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o"), ("zsh", "#compdef imprint"), ("fish", "complete")]
)
def test_shells_are_told_how_to_complete(
    shell: str, words: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # so that the shell is ours to name
    script = command("--show-completion", shell)
    assert script.code == 0
    assert words in script.out and "_IMPRINT_COMPLETE" in script.out


def test_commands_are_completed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_IMPRINT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "imprint sim")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert command() == (0, "simulate\n", "")


# --- what the commands do


def on_one_line(text: str) -> str:
    """What was shown, however the lines were wrapped."""
    return " ".join(text.split())


def test_check_says_what_it_takes_and_writes_nothing(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    found = command("check", "model.py:task", "--out", "runs/news")
    assert found.code == 0, found.err
    for words in (
        "12 of 12 values: weight, bias",
        "3 over 12 training examples",
        "48 bytes per source",
        "one step of the tangent engine ran on 12 examples and was read out by jvp, central",
    ):
        assert words in on_one_line(found.out)
    assert "will work" not in found.out
    assert [file.name for file in empty.iterdir() if file.name != "__pycache__"] == ["model.py"]


@pytest.mark.curvature
def test_check_shows_what_a_simulation_will_warn_of(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    found = command("check", "model.py:task", "-p", "lr=20", "-p", "steps=1")
    assert found.code == 0, found.err
    assert "(imprint evaluate). warning: checkpoint 0: a step multiplies some direction by" in on_one_line(found.out)


@pytest.mark.curvature
def test_a_simulation_warns_once_and_its_store_and_results_repeat_it(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    words = "warning: checkpoint 0: a step multiplies some direction by"
    for checking in ("--check", "--no-check"):
        folder = f"runs/{checking}"
        made = command("simulate", "model.py:task", "-p", "lr=20", "-p", "steps=1", "-o", folder, checking)
        assert made.code == 0, made.err
        assert on_one_line(made.out + made.err).count(words) == 1
    named = ("--task", "model.py:task", "--queries", "model.py:data")
    for arguments in (("inspect", folder), ("attribute", folder, *named)):
        shown = command(*arguments)
        assert on_one_line(shown.out + shown.err).count(words) == 1
        assert command(*arguments, "--json").values["warnings"][0] in on_one_line(shown.out)


def test_a_simulation_that_cannot_begin_leaves_with_1_and_says_why(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL + "data[0][7, 1] = torch.nan\n")
    words = "problem: the loss of training example 7"
    found = command("check", "model.py:task")
    assert found.code == 1 and words in found.out
    simulated = command("simulate", "model.py:task", "-o", "runs/news")
    assert simulated.code == 1 and words in simulated.err and not simulated.out
    assert not (empty / "runs").exists()


def test_simulating_makes_the_store_that_the_library_makes(command: Command, here: Path, tmp_path: Path) -> None:
    model = loaded(here / "model.py")
    simulate(model.task, model.data, model.sources, model.plan, out=tmp_path / "same", progress=False)
    assert imprints(tmp_path / "same") == imprints("runs/news")


def test_the_same_simulation_again_leaves_the_store_as_it_is(command: Command, here: Path) -> None:
    before = Path("runs/news/manifest.json").read_bytes()
    again = command("simulate", "model.py:task", "--out", "runs/news")
    assert again.code == 0 and "Store runs/news" in again.out
    assert "runs/news is complete; only checking that it matches\n" in again.err
    assert Path("runs/news/manifest.json").read_bytes() == before


def test_another_simulation_on_the_same_folder_is_refused(command: Command, here: Path) -> None:
    other = command("simulate", "model.py:task", "--out", "runs/news", "-p", "steps=4")
    assert other.code == 1
    assert "the plan's steps was 3, is 4" in other.err


@pytest.mark.parametrize("name", ["check", "simulate", "attribute", "inspect", "verify"])
def test_json_stands_on_standard_output_alone(name: str, command: Command, here: Path, tmp_path: Path) -> None:
    """Though the user's file prints something, and warns."""
    chatty = tmp_path / "chatty.py"
    chatty.write_text(f"import warnings\nprint('hello')\nwarnings.warn('a\\nb')\n{MODEL}")
    arguments: dict[str, tuple[object, ...]] = {
        "check": (f"{chatty}:task",),
        "simulate": (f"{chatty}:task", "-o", tmp_path / "store"),
        "attribute": ("runs/news", "--task", f"{chatty}:task"),
        "inspect": ("runs/news",),
        "verify": ("runs/news",),
    }
    found = command(name, *arguments[name], "--json")
    expected: dict[str, dict[str, object]] = {
        "check": {"ok": True, "sources": 3, "values": 12},
        "simulate": {"sources": 3, "n": 12, "path": str(tmp_path / "store")},
        "attribute": {"n": 12, "measure": "loss", "better": "lower"},
        "inspect": {"sources": 3, "n": 12, "path": "runs/news"},
        "verify": {"sound": True, "path": "runs/news"},
    }
    assert expected[name].items() <= found.values.items()
    if name in ("check", "simulate", "attribute"):
        assert "hello\n" in found.err and "warning: a b\n" in found.err
    if name == "simulate":
        assert "Nothing stands in the way" in found.err


def test_the_demo_has_json_too(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "CHECKPOINTS", (1,))
    monkeypatch.setattr(digits, "PLAN", Plan(steps=1, lr=0.1))
    monkeypatch.setattr("imprint.benchmarking.demo.report.draw", lambda outcome, folder: {})
    monkeypatch.setattr("imprint.benchmarking.demo.report.write", lambda outcome, folder: folder / "report.html")
    values = command("demo", "--retrainings", 2, "--out", tmp_path / "demo", "--json").values
    assert values["report"] == str(tmp_path / "demo" / "report.html")
    assert {row["name"] for row in values["contributors"]} == set(digits.CONTRIBUTORS)
    assert len(values["statistics"]) == 4


def test_attributions_as_csv_safetensors_and_json_are_those_of_the_library(
    command: Command, here: Path, tmp_path: Path
) -> None:
    model = loaded(here / "model.py")
    expected = attribute(model.task, "runs/news", model.queries, progress=False)
    values = command("attribute", "runs/news", *TASK, "--out", tmp_path / "scores.csv", "--json").values
    assert command("attribute", "runs/news", *TASK, "--out", tmp_path / "scores.safetensors").code == 0

    saved = Attribution.load(tmp_path / "scores.safetensors")
    assert torch.equal(saved.scores, expected.scores) and saved.labels == expected.labels

    rows = list(csv.DictReader((tmp_path / "scores.csv").open(newline="")))
    assert len(rows) == expected.scores.numel()
    for row in rows:
        column = expected.labels.source_ids.index(row["source"])
        assert float(row["score"]) == float(expected.scores[int(row["query"]), column])
        assert float(row["removal_effect"]) == float(expected.removal_effect[int(row["query"]), column])

    assert values == json.loads(json.dumps(expected.top(5).to_json()))


def test_the_first_sources_are_shown_in_the_order_that_is_asked_for(command: Command, here: Path) -> None:
    model = loaded(here / "model.py")
    for order in ("magnitude", "raises", "lowers"):
        expected = attribute(model.task, "runs/news", model.queries, top=2, by=order, progress=False)
        shown = command("attribute", "runs/news", *TASK, "--top", 2, "--by", order)
        assert shown.code == 0, shown.err
        assert "Change of loss if the source were removed: + means the source helps" in shown.out
        mean, each = shown.out.split("Change of loss")
        assert _names(each) == [credit.name for credits in expected for credit in credits]
        effects = attribute(model.task, "runs/news", model.queries, progress=False).mean()
        assert _names(mean) == [credit.name for credit in effects.top(2, order)[0]]


def _names(table: str) -> list[str]:
    return re.findall(r"│ (times|post|\[blog\]) +│", table)


def test_a_measurement_keeps_its_name(command: Command, here: Path, tmp_path: Path) -> None:
    measured = "def logP(model, batch):\n    return model(batch[0])[:, 0]\n"
    task = "task = imprint.Task(task.model, task.loss, measure=logP)\n"
    (tmp_path / "model.py").write_text(MODEL + measured + task)
    shown = command("attribute", "runs/news", "--task", f"{tmp_path}/model.py:task")
    assert "\nChange of logP if the source were removed\n" in shown.out


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient"])
def test_readouts_are_chosen_by_name(readout: str, command: Command, here: Path) -> None:
    found = command("attribute", "runs/news", *TASK, "--readout", readout, "--batch-size", 1, "--json").values
    assert found["details"]["readout"] == readout


def test_what_was_estimated_is_kept_and_shown_beside_what_it_took(command: Command, here: Path) -> None:
    note = Store("runs/news").manifest.note["imprint"]
    assert note["command"] == {"task": "model.py:task"}
    assert note["estimate"]["seconds"] > 0 and note["estimate"]["peak_bytes"] > 0
    assert re.search(
        r"took +│ 0:0\d \(estimated 0:0\d\); at most .* of memory \(estimated .*\)", command("inspect", "runs/news").out
    )


@pytest.mark.parametrize(
    "note",
    [
        "mine",
        {"command": "python train.py", "estimate": "an hour"},
        {"imprint": "yes"},
        {"imprint": {"command": "python train.py", "estimate": {"hours": 1}}},
        {"imprint": {"estimate": {"seconds": "many", "peak_bytes": None}}},
    ],
    ids=str,
)
def test_a_note_may_say_anything(note: Any, command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    model = loaded(empty / "model.py")
    simulate(model.task, model.data, model.sources, model.plan, out="store", note=note, progress=False)
    shown = command("inspect", "store")
    assert shown.code == 0 and "took" in shown.out and "estimated" not in shown.out
    assert command("attribute", "store", "--task", "model.py:task").code == 0
    assert command("simulate", "model.py:task", "--from", "store", "-o", "again", "--no-check").code == 0
    assert imprints("again") == imprints("store")


@pytest.mark.parametrize("name", ["check", "simulate", "attribute"])
def test_whatever_the_users_code_prints_is_no_result(name: str, command: Command, here: Path, tmp_path: Path) -> None:
    """When it is loaded, when it makes something, and when it computes."""
    chatty = (
        "print('loading')\nsilent = task\n"
        "def loss(model, batch):\n    print('computing')\n    return silent.loss(model, batch)\n"
        "def task():\n    print('making')\n    return imprint.Task(silent.model, loss)\n"
    )
    (tmp_path / "chatty.py").write_text(MODEL + chatty)
    given = ("runs/news", "--task") if name == "attribute" else ("--out", tmp_path / "store")
    found = command(name, *given, f"{tmp_path}/chatty.py:task", "--json")
    assert isinstance(found.values, dict)
    assert all(f"{word}\n" in found.err for word in ("loading", "making", "computing"))


def test_names_of_sources_are_shown_as_they_are(command: Command, empty: Path) -> None:
    named = MODEL.replace('"times"', '":fire:"').replace('"post"', '"[bold]b[/bold]"')
    (empty / "model.py").write_text(named)
    made = command("simulate", "model.py:task", "-o", "store")
    assert made.code == 0 and ":fire:" in made.out
    shown = command("attribute", "store", *TASK).out
    assert ":fire:" in shown and "[bold]b[/bold]" in shown


def test_scores_are_written_whole_or_not_at_all(
    command: Command, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scores.csv").write_text("of yesterday")
    calls: list[object] = []

    def sudden(self: Attribution, *arguments: Any) -> Any:
        calls.append(arguments)
        if arguments == (3,):  # all sources, for the file
            raise KeyboardInterrupt
        return original(self, *arguments)

    original = Attribution.top
    monkeypatch.setattr(Attribution, "top", sudden)
    assert command("attribute", "runs/news", *TASK, "--top", 2, "--out", tmp_path / "scores.csv").code == 130
    assert (3,) in calls
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("scores.csv", "of yesterday")]


def test_a_damaged_store_is_found(command: Command, here: Path, tmp_path: Path) -> None:
    assert command("verify", "runs/news").out.startswith("runs/news: all files match their checksums (")
    shutil.copytree("runs/news", tmp_path / "store")
    shard = tmp_path / "store" / "checkpoint-000" / "imprints-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    found = command("verify", tmp_path / "store", "--json")
    assert found.code == 1 and not found.out
    assert "imprints-00000.safetensors is damaged" in found.err


# --- what is named


def test_sources_can_be_every_example(command: Command, here: Path, tmp_path: Path) -> None:
    given = ("--sources", "per-example", "--no-check", "-o", tmp_path / "store", "--json")
    assert command("simulate", "model.py:task", *given).values["sources"] == 12


def test_checkpoints_are_files_or_a_name(command: Command, here: Path, tmp_path: Path) -> None:
    states = [{"weight": torch.full((3, 3), scale), "bias": torch.zeros(3)} for scale in (0.1, 0.2)]
    for index, state in enumerate(states):
        save_file(state, tmp_path / f"{index}.safetensors")
    files = ("-c", tmp_path / "0.safetensors", "-c", tmp_path / "1.safetensors")
    given = ("-p", "steps=2,3", "-p", "weight=1,2", "--no-check", "--json")
    values = command("simulate", "model.py:task", *files, *given, "-o", tmp_path / "files").values
    assert [(c["steps"], c["weight"]) for c in values["checkpoints"]] == [(2, 1.0), (3, 2.0)]

    (tmp_path / "other.py").write_text(
        MODEL + "early = [{'weight': torch.full((3, 3), s), 'bias': torch.zeros(3)} for s in (0.1, 0.2)]\n"
    )
    assert command("simulate", f"{tmp_path}/other.py:task", "-c", "early", *given, "-o", tmp_path / "named").code == 0
    assert imprints(tmp_path / "named") == imprints(tmp_path / "files")


def test_precision_and_batches_are_chosen(command: Command, here: Path, tmp_path: Path) -> None:
    given = ("--dtype", "bfloat16", "--batch-size", 5, "--memory", "1MB", "--device", "cpu", "--no-check")
    assert (
        command("simulate", "model.py:task", *given, "-o", tmp_path / "store", "--json").values["dtype"] == "bfloat16"
    )
    assert Store(tmp_path / "store").manifest.execution.batch_size == 5


def test_how_data_is_hashed_is_chosen_and_kept(command: Command, here: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    command("simulate", "model.py:task", "--no-check", "--hash-data", "none", "--out", out)
    assert Store(out).manifest.request.data == DataHashes(None, None)
    assert any('hash_data="none"' in warning for warning in Store(out).warnings)


def test_flags_go_over_a_configuration_file_whose_paths_are_relative_to_it(
    command: Command, here: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "news.toml").write_text(
        'task = "model.py:task"\nout = "store"\nsources = "per-example"\ndtype = "float64"\n\n[plan]\n'
        "steps = 5\nlr = 0.2\n"
    )
    found = command("simulate", "--config", tmp_path / "news.toml", "-p", "steps=2", "--dtype", "float32", "--json")
    values = found.values
    assert values["path"] == str(tmp_path / "store")
    assert values["sources"] == 12
    assert values["dtype"] == "float32"
    assert (values["plan"]["steps"], values["plan"]["lr"]) == (2, 0.2)


def test_queries_may_be_named_in_a_configuration_file(command: Command, here: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text("import torch\nasked = (torch.ones(15, 3), torch.zeros(15).long())\n")
    (tmp_path / "ask.toml").write_text('queries = "ask.py:asked"\n')
    given = ("attribute", "runs/news", *TASK, "--config", tmp_path / "ask.toml")
    assert len(command(*given, "--json").values["queries"]) == 15
    assert command(*given).out.endswith("… and 3 more queries: write all of them with --out.\n")


# --- replays


@pytest.mark.parametrize("name", ["runs/news", "runs/news/manifest.json"])
def test_a_store_is_replayed_to_the_bit(name: str, command: Command, here: Path, tmp_path: Path) -> None:
    again = command("simulate", "model.py:task", "--from", name, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert imprints(tmp_path / "again") == imprints("runs/news")
    assert not Store(tmp_path / "again").manifest.cost.resumed
    assert "variation" not in again.err and "only checking that it matches" not in again.err


def test_a_replay_takes_the_steps_and_the_chunks_that_were_settled(
    command: Command, here: Path, tmp_path: Path
) -> None:
    given = ("-p", "lr=auto", "-p", "engine=trajectories", "-p", "epsilon=auto", "--memory", "3kB", "--no-check")
    assert command("simulate", "model.py:task", *given, "-o", tmp_path / "first").code == 0
    assert len(imprints(tmp_path / "first")) > 1  # otherwise there are no chunks to take over
    again = ("simulate", "model.py:task", "--from", tmp_path / "first", "-o", tmp_path / "again", "--no-check")
    assert command(*again).code == 0
    assert imprints(tmp_path / "again") == imprints(tmp_path / "first")
    assert Store(tmp_path / "again").checkpoints[0].choices.lr == Store(tmp_path / "first").checkpoints[0].choices.lr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data = (data[0] + 1, data[1])", "the training data changed"),
        ("task.model.bias.data += 1", "the weights of checkpoint 0 changed"),
        ("sources = imprint.Sources.per_example(12)", "the sources changed"),
        (
            "data = tuple(column[:11] for column in data)\nsources = imprint.Sources.per_example(11)",
            "had 12 examples, has 11",
        ),
    ],
)
def test_a_replay_with_something_else_is_refused_and_the_difference_named(
    change: str, words: str, command: Command, here: Path, tmp_path: Path
) -> None:
    (tmp_path / "changed.py").write_text(f"{MODEL}\n{change}\n")
    again = command(
        "simulate", f"{tmp_path}/changed.py:task", "--from", "runs/news", "-o", tmp_path / "again", "--no-check"
    )
    assert again.code == 1
    assert "runs/news cannot be replayed: " in again.err and words in again.err
    assert not (tmp_path / "again").exists()


def test_a_replay_with_another_plan_is_a_variation(command: Command, here: Path, tmp_path: Path) -> None:
    given = ("model.py:task", "--from", "runs/news", "-p", "steps=2", "-o", tmp_path / "other", "--no-check", "--json")
    plan = command("simulate", *given).values["plan"]
    assert plan == {**Store("runs/news").manifest.plan.to_json(), "steps": 2}
    assert imprints(tmp_path / "other") != imprints("runs/news")


@pytest.mark.parametrize("given", [("-p", "steps=3"), ("--dtype", "float32")])
def test_a_variation_is_called_one(given: tuple[str, str], command: Command, here: Path, tmp_path: Path) -> None:
    varied = command("simulate", "model.py:task", "--from", "runs/news", *given, "-o", tmp_path / "other", "--no-check")
    assert varied.code == 0
    assert "plan or dtype differs from the store: this is a variation, not a repetition\n" in varied.err


# --- errors


def test_a_store_made_by_python_asks_for_the_task(command: Command, here: Path, tmp_path: Path) -> None:
    model = loaded(here / "model.py")
    simulate(model.task, model.data, model.sources, model.plan, out=tmp_path / "store", progress=False)
    for arguments in (
        ("attribute", tmp_path / "store"),
        ("simulate", "--from", tmp_path / "store", "-o", tmp_path / "b"),
    ):
        refused = command(*arguments)
        flag = "--task " if arguments[0] == "attribute" else ""
        assert refused.code == 1
        assert f"store was made from Python and names no task: give {flag}FILE.py:task." in refused.err
    assert command("attribute", tmp_path / "store", "--task", "model.py:task").code == 0


ERRORS = {
    "a store that is not there": ("inspect nowhere", "there is no folder nowhere"),
    "a manifest that is not there": ("simulate model.py:task --from nowhere -o x", "there is no folder nowhere"),
    "no task": ("check", "no task is named"),
    "no folder": ("simulate model.py:task", "--out runs/NAME"),
    "no colon": ("check model.py", "'model.py' is neither an import string"),
    "no file": ("check nothing.py:task", "there is no file nothing.py"),
    "no module": ("check nothing.at.all:task", "there is no module nothing.at.all"),
    "no such name": ("check model.py:tsk", "there is no 'tsk'; did you mean task?"),
    "another type": ("check model.py:plan", "model.py:plan is a Plan, not an imprint.Task"),
    "no sources": ("check model.py:task --sources queries", "queries is a tuple, not an imprint.Sources"),
    "no plan field": ("check model.py:task -p step=3", "a plan has no field 'step'"),
    "no value": ("check model.py:task -p steps", "expected NAME=VALUE"),
    "a bad value": ("check model.py:task -p steps=many", "steps must be a whole number of at least 1, got 'many'"),
    "values for other checkpoints": ("check model.py:task -p steps=1,2", "steps has 2 values, but there are 1"),
    "no such device": ("check model.py:task --device gpu", "the model cannot be moved to 'gpu'"),
    "no such dtype": ("check model.py:task --dtype int8", "dtype must be one of float32, bfloat16, float64"),
    "no configuration": ("check --config nothing.toml", "nothing.toml cannot be read"),
    "a checkpoint of torch.save": ("check model.py:task -c model.py -c b.pt", "Files of torch.save are not read"),
    "no checkpoint": ("check model.py:task -c nothing.safetensors", "nothing.safetensors does not exist"),
    "no such readout": ("attribute runs/news --task model.py:task --readout guess", "readout 'guess' is unknown"),
    "no such order": ("attribute runs/news --task model.py:task --by size", "sources can be ordered by"),
    "no end points": ("attribute runs/news --task model.py:task --readout literal", "a literal readout needs"),
    "another kind of file": ("attribute runs/news --out scores.xlsx", "must end in .csv or .safetensors"),
    "no folder for the scores": ("attribute runs/news --out nowhere/a.csv", "there is no folder nowhere"),
    "not so much memory": (
        "attribute runs/news --task model.py:task --memory lots",
        "memory must be a number of bytes",
    ),
}


@pytest.mark.parametrize(("line", "words"), ERRORS.values(), ids=ERRORS)
def test_errors_are_one_line_on_standard_error(line: str, words: str, command: Command, here: Path) -> None:
    failed = command(*shlex.split(line))
    assert failed.code == 1 and not failed.out
    told, newline, error = failed.err.removesuffix("\n").rpartition("\n")
    assert error.startswith("error: ") and words in error
    assert told == ("the task is model.py:task, by which the store was made" if newline else "")


def test_an_error_of_several_lines_is_told_in_one(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL + "def task():\n    raise imprint.TaskError('first\\n  second [red]')\n")
    assert command("check", "model.py:task") == (1, "", "error: first second [red]\n")


BROKEN = """
def queries():
    return Lazy()


class Lazy:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise OSError(f"no picture {index} [red]")
"""


def test_a_sample_that_cannot_be_read_is_told_in_one_line(command: Command, here: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(MODEL + BROKEN)
    failed = command("attribute", "runs/news", "--task", "model.py:task", "--queries", f"{file}:queries")
    assert failed.code == 1 and failed.out == ""
    assert failed.err.startswith("error: sample 0 of 2 could not be read (OSError: no picture 0 [red])")
    assert failed.err.count("\n") == 1


def test_a_training_that_fails_says_which(command: Command, here: Path, tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(MODEL + "\n\ndef train(subset, seed):\n    raise OSError('no disk')\n")
    failed = command("retrain", f"{file}:train", "--kind", "sources", "--out", str(tmp_path / "truth"))
    assert failed.code == 1
    assert "error: OSError: no disk" in failed.err
    assert re.search(r"run 0.*seed \d+", failed.err.replace("\n", " ")), failed.err


def test_an_error_of_the_library_has_a_traceback_if_one_is_asked_for(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("inspect", "nowhere").code == 1
    monkeypatch.setenv("IMPRINT_TRACEBACK", "1")
    with pytest.raises(imprint.StoreError):
        main()


def test_an_error_that_is_not_the_users_hides_nothing(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.cli.commands.stores.inspect_store", lambda store: dict[str, int]()["missing"])
    monkeypatch.setattr("imprint.cli.app.user_frames", lambda error: [])  # the line above is in a test, no user's file
    monkeypatch.setattr(sys, "argv", ["imprint", "inspect", "runs/news"])
    with pytest.raises(KeyError):
        main()


# --- ready-made settings


def test_a_ready_made_setting_is_checked_simulated_and_attributed_by_its_name(command: Command, empty: Path) -> None:
    small = ("-p", "steps=2", "-p", "lr=0.1")
    assert command("check", "digits", *small, "--json").values["checkpoints"] == 4
    made = command("simulate", "digits", *small, "--no-check", "--out", "runs/digits", "--json")
    assert made.values["sources"] == 12
    found = command("attribute", "runs/digits", "--json")
    assert len(found.values["queries"]) == 837
    assert "using the task that the store was made with: digits" in found.err
    again = command("simulate", "digits", *small, "--out", "runs/digits")
    assert again.code == 0 and "only checking that it matches" in again.err  # its model is the same every time
    assert command("simulate", "--from", "runs/digits", "--no-check", "--out", "runs/again").code == 0
    assert imprints("runs/again") == imprints("runs/digits")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_an_error_of_ours(command: Command, here: Path) -> None:
    failed = command("simulate", "model.py:task", "-o", "nowhere", "--device", "cuda")
    assert failed.code == 1
    assert failed.err.startswith("error: the model cannot be moved to 'cuda': ") and failed.err.count("\n") == 1


def test_scores_of_another_kind_are_refused_before_work_begins(command: Command, here: Path) -> None:
    failed = command("attribute", "nowhere", "--out", "scores.xlsx")  # the store is not even looked for
    assert failed.code == 1 and "scores.xlsx" in failed.err


@pytest.mark.parametrize("line", ["guess", "check --guess", "attribute", "attribute runs/news --top 0", "check a b"])
def test_a_wrong_command_line_leaves_with_2(line: str, command: Command, here: Path) -> None:
    failed = command(*shlex.split(line))
    assert failed.code == 2 and not failed.out
    assert "Usage: imprint" in failed.err and "Traceback" not in failed.err


def test_a_terminal_is_shown_a_bar_and_a_log_gets_lines() -> None:
    shown = StringIO()
    with show_progress(Console(file=shown, force_terminal=True, width=100), "simulating") as advance:
        assert callable(advance)
        advance(3, 12)
    assert "simulating" in shown.getvalue() and "3/12" in shown.getvalue()
    with show_progress(Console(file=StringIO()), "simulating") as advance:
        assert advance is True


# --- benchmarks


@pytest.fixture
def small_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of digits in a form that takes seconds."""
    monkeypatch.setattr("imprint.cli.commands.bench.load_protocol", lambda name, device: little_digits())


def test_a_benchmark_leaves_a_table_a_picture_and_json(command: Command, empty: Path, small_digits: None) -> None:
    found = command("bench", "digits", "--runs", 1, "--out", "bench/digits", "--json").values
    assert found == json.loads(Path("bench/digits/results.json").read_text())
    assert found["benchmark"] == "digits" and list(found["methods"]) == ["Imprint"]
    assert found["methods"]["Imprint"]["lds"]["low"] < found["methods"]["Imprint"]["lds"]["value"] < 1
    assert "| Imprint |" in Path("bench/digits/results.md").read_text()
    assert Path("bench/digits/results.png").read_bytes().startswith(b"\x89PNG")

    shown = command("bench", "digits", "--runs", 1, "-o", "bench/digits")  # all is there
    assert shown.code == 0 and "Imprint" in shown.out and "A perfect predictor would reach" in shown.out
    assert "Written to bench/digits: results.md, results.png, results.json." in shown.err

    swept = command("sweep", "digits", "--checkpoint", 1, "--directions", 5, "-o", "bench/digits", "--json").values
    assert len(swept) == len(GRID) and {point["steps"] for point in swept} >= {1, 3000, None}
    assert Path("bench/digits/sweep-1-5.png").read_bytes().startswith(b"\x89PNG")
    best = command("sweep", "digits", "--checkpoint", 1, "--directions", 5, "-o", "bench/digits")
    assert re.match(rf"The best of {len(GRID)} settings has an LDS of [\d.]+: ", best.out)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bench cifar -o new", "setting 'cifar' is unknown: use one of digits, mnist-mlp, mnist-lr."),
        ("sweep cifar -o new", "setting 'cifar' is unknown: use one of digits, mnist-mlp, mnist-lr."),
        ("sweep digits --checkpoint 9 -o new", "digits has checkpoints 0 to 4, not 9."),
        ("bench digits --path -o new", "digits has no plan for a path: omit --path."),
        ("bench digits -o other", "other holds another benchmark: its bench.json describes none. Give a new folder."),
        ("bench digits -o file", "file is a file: give a folder for the benchmark."),
    ],
)
def test_a_benchmark_that_cannot_be_made_is_refused_at_once(
    line: str, says: str, command: Command, empty: Path
) -> None:
    Path("other").mkdir()
    Path("other/bench.json").write_text("{}")
    Path("file").touch()
    failed = command(*shlex.split(line))
    assert (failed.code, failed.out, failed.err) == (1, "", f"error: {says}\n")


@pytest.mark.skipif(not find_spec("dattri"), reason="dattri is not installed")
def test_peers_are_asked_for(
    command: Command, empty: Path, small_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from imprint.benchmarking import peers

    cheap = ("TracIn", "Grad-Dot")
    every = peers.peers
    monkeypatch.setattr(peers, "peers", lambda bench: {name: every(bench)[name] for name in cheap})
    found = command("bench", "digits", "--runs", 1, "--peers", "-o", "bench/digits", "--json").values
    assert set(found["methods"]) == {"Imprint", *cheap}


# --- a plan that is chosen


@pytest.mark.parametrize("sources", ["sources", "per-example"])
def test_a_plan_is_chosen_where_auto_is_asked_for(command: Command, here: Path, tmp_path: Path, sources: str) -> None:
    given = ("simulate", "model.py:task", "--sources", sources, "-p", "auto", "--out", tmp_path / "store", "--json")
    assert command(*given).code == 0
    objects = loaded(here / "model.py")
    units = objects.sources if sources == "sources" else imprint.Sources.per_example(12)
    assert Store(tmp_path / "store").manifest.plan == Plan.auto(objects.task, objects.data, units, progress=False)
    again = command(*given)
    assert again.code == 0 and "only checking that it matches" in again.err
    assert command("check", "model.py:task", "--sources", sources, "-p", "auto", "--json").values["ok"]


def test_what_is_given_besides_goes_over_the_chosen_plan(command: Command, here: Path, tmp_path: Path) -> None:
    given = ("simulate", "model.py:task", "--no-check", "-p", "auto", "-p", "steps=7", "-o", tmp_path / "store")
    assert command(*given).code == 0
    plan = Store(tmp_path / "store").manifest.plan
    assert plan.steps == 7 and plan.curvature == "gauss-newton"


def test_auto_goes_over_the_plan_of_a_file_or_a_store(command: Command, here: Path, tmp_path: Path) -> None:
    config = tmp_path / "some.toml"
    config.write_text(f'task = "{here / "model.py"}:task"\n[plan]\nsteps = 2\nlr = 0.5\n')
    from_file = ("simulate", "--config", config, "--no-check", "-p", "auto", "-o", tmp_path / "one")
    from_store = (
        "simulate",
        "model.py:task",
        "--from",
        "runs/news",
        "--no-check",
        "-p",
        "auto",
        "-o",
        tmp_path / "two",
    )
    for given in (from_file, from_store):
        assert command(*given).code == 0
        plan = Store(given[-1]).manifest.plan
        assert plan.curvature == "gauss-newton" and plan.steps != 2 and plan.lr not in (0.5, 0.1)
    config.write_text(f'task = "{here / "model.py"}:task"\n[plan]\nauto = true\n')
    assert command("simulate", "--config", config, "--no-check", "-o", tmp_path / "three").code == 0
    assert Store(tmp_path / "three").manifest.plan == Store(tmp_path / "one").manifest.plan


def test_the_chosen_plan_is_shown(command: Command, here: Path, tmp_path: Path) -> None:
    checked = command("check", "model.py:task", "--sources", "per-example", "-p", "auto")
    assert re.search(r"plan +│ spectral, Gauss–Newton; steps infinite; lr auto; damping 0\.\d+; weight 1 ", checked.out)
    simulated = command("simulate", "model.py:task", "-p", "auto", "-o", tmp_path / "store")
    plan = Store(tmp_path / "store").manifest.plan
    assert isinstance(plan.steps, tuple) and f"tangent, Gauss–Newton; steps {plan.steps[0]}; lr " in simulated.err


def test_per_example_is_suggested_where_it_is_misspelt(command: Command, here: Path) -> None:
    found = command("check", "model.py:task", "--sources", "per_example")
    assert found.code == 1 and "there is no 'per_example'; did you mean per-example?" in found.err


# --- in a process of its own

PROCESS = (sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
           "from imprint.cli.app import main; main()")  # fmt: skip


def test_no_traceback_reaches_the_terminal(here: Path) -> None:
    found = subprocess.run([*PROCESS, "verify", "nowhere"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert re.fullmatch(r"error: there is no folder nowhere\.\n", found.stderr)


@pytest.mark.system
def test_ctrl_c_says_how_to_go_on_and_the_same_command_ends_in_the_same_imprints(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    given = ("simulate", "model.py:task", "-p", "steps=60", "--memory", "2kB", "--no-check", "--out")
    assert command(*given, "whole").code == 0
    assert len(imprints("whole")) == 3  # one source at a time, so that there is something between which to stop

    with subprocess.Popen(
        [*PROCESS, *given, "broken"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        while not Path("broken/checkpoint-000/imprints-00000.safetensors").exists() and run.poll() is None:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
    assert run.returncode == 130
    assert not out and "the same call again resumes the simulation in broken" in err
    assert "Traceback" not in err and "broken holds an unfinished simulation" in command("inspect", "broken").err

    assert command(*given, "broken").code == 0
    assert imprints("broken") == imprints("whole")
    assert Store("broken").manifest.cost.resumed
    assert "since it was resumed" in command("inspect", "broken").out


def test_ctrl_c_before_anything_is_finished_leaves_nothing(
    command: Command, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "model.py").write_text(MODEL)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tangent, "settle", interrupted)
    stopped = command("simulate", "model.py:task", "-o", "runs/news", "--no-check")
    assert stopped == (130, "", "stopped before the first part was finished: the same command will start over\n")
    assert not (empty / "runs/news").exists()


def test_ctrl_c_keeps_the_steps_that_were_chosen(
    command: Command, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "model.py").write_text(MODEL)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    given = ("simulate", "model.py:task", "-o", "runs/news", "-p", "lr=auto", "--no-check")
    with monkeypatch.context() as patch:
        patch.setattr("imprint.simulation.runner._Run._simulate", interrupted)
        stopped = command(*given)
    assert stopped.code == 130 and "starts over" not in stopped.err
    assert (empty / "runs/news/unfinished.json").is_file()
    monkeypatch.setattr(Tangent, "settle", interrupted)  # not to be chosen again
    assert command(*given).code == 0


# --- the page


PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")


def test_every_command_of_the_page_works(
    command: Command, empty: Path, small_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one folder, in order; a block is the file that its first line names, if it does."""
    monkeypatch.setattr(digits, "CHECKPOINTS", (1,))
    monkeypatch.setattr(digits, "PLAN", Plan(steps=300, lr=0.1))
    shutil.copytree(ROOT / "examples", empty / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    example, plan = empty / "examples" / "command_line.py", "Plan(steps=100)"
    assert plan in example.read_text()  # the numbers are not the subject, and tests of the examples look at them
    example.write_text(example.read_text().replace(plan, "Plan(steps=10, lr=0.1)"))
    for name, content in re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (empty / name).write_text(content)
    for name in set(re.findall(r"-c (\S+\.safetensors)", PAGE)):  # what the reader's training has kept
        save_file(loaded(empty / "my_model.py").task().model.state_dict(), empty / name)
    lines = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    commands = [
        shlex.split(line.removeprefix("$ imprint "), comments=True) for line in lines if line.startswith("$ imprint ")
    ]
    assert {words[0] for words in commands} >= set(COMMANDS) - {"demo"}
    commands = [words for words in commands if "language" not in " ".join(words)]  # tests/test_examples.py runs those
    for words in commands:
        done = command(*words)
        assert done.code == 0, f"imprint {' '.join(words)}\n{done.err}"


def test_the_page_names_every_option_and_every_setting(command: Command) -> None:
    from imprint.cli.experiment import Experiment

    options = {option for name in COMMANDS if name != "demo" for p in COMMANDS[name].params for option in p.opts}
    for option in options:
        if option.startswith("--") and option != "--help":
            assert f"`{option}" in PAGE, option
    for setting in vars(Experiment()):
        assert f"`{setting}`" in PAGE, setting
