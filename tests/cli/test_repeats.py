"""A store is made again with --repeat, to the bit or as a variation."""

from pathlib import Path

import pytest

from imprint import Store
from tests.cli.commands import MODEL, Command, imprints


@pytest.mark.parametrize("name", ["runs/news", "runs/news/manifest.json"])
def test_a_store_is_repeated_to_the_bit(name: str, command: Command, here: Path, tmp_path: Path) -> None:
    again = command("simulate", "model.py:task", "--repeat", name, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert imprints(tmp_path / "again") == imprints("runs/news")
    assert not Store(tmp_path / "again").manifest.cost.resumed
    assert "variation" not in again.err and "only checking that it matches" not in again.err


def test_a_repeat_takes_the_steps_and_the_chunks_that_were_settled(
    command: Command, here: Path, tmp_path: Path
) -> None:
    given = ("-p", "lr=auto", "-p", "engine=trajectories", "-p", "epsilon=auto", "--memory", "3kB", "--no-check")
    assert command("simulate", "model.py:task", *given, "-o", tmp_path / "first").code == 0
    assert len(imprints(tmp_path / "first")) > 1  # otherwise there are no chunks to take over
    again = ("simulate", "model.py:task", "--repeat", tmp_path / "first", "-o", tmp_path / "again", "--no-check")
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
def test_a_repeat_with_something_else_is_refused_and_the_difference_named(
    change: str, words: str, command: Command, here: Path, tmp_path: Path
) -> None:
    (tmp_path / "changed.py").write_text(f"{MODEL}\n{change}\n")
    again = command(
        "simulate", f"{tmp_path}/changed.py:task", "--repeat", "runs/news", "-o", tmp_path / "again", "--no-check"
    )
    assert again.code == 1
    assert "runs/news cannot be repeated: " in again.err and words in again.err
    assert not (tmp_path / "again").exists()


def test_a_repeat_with_another_plan_is_a_variation(command: Command, here: Path, tmp_path: Path) -> None:
    given = (
        "model.py:task",
        "--repeat",
        "runs/news",
        "-p",
        "steps=2",
        "-o",
        tmp_path / "other",
        "--no-check",
        "--json",
    )
    plan = command("simulate", *given).values["plan"]
    assert plan == {**Store("runs/news").manifest.plan.to_json(), "steps": 2}
    assert imprints(tmp_path / "other") != imprints("runs/news")


@pytest.mark.parametrize("given", [("-p", "steps=3"), ("--dtype", "float32")])
def test_a_variation_is_called_one(given: tuple[str, str], command: Command, here: Path, tmp_path: Path) -> None:
    varied = command(
        "simulate", "model.py:task", "--repeat", "runs/news", *given, "-o", tmp_path / "other", "--no-check"
    )
    assert varied.code == 0
    assert "plan or dtype differs from the store: this is a variation, not a repetition\n" in varied.err
