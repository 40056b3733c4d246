"""What `check` and `simulate` do with what they are given."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from imprint import Store, simulate
from imprint.store.request import DataHashes
from tests.cli.commands import MODEL, Command, imprints, loaded


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
    assert [c["run"] for c in values["checkpoints"]] == [0, 0]

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
    assert command("simulate", "--repeat", "runs/digits", "--no-check", "--out", "runs/again").code == 0
    assert imprints("runs/again") == imprints("runs/digits")
