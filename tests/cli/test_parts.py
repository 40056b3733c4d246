"""Simulating and retraining in parts from a terminal."""

from pathlib import Path

import pytest

from imprint import Plan, Store
from imprint.evaluation import Truth
from imprint.simulation.executors import InProcess
from tests.cli.commands import MODEL, Command, Finished, imprints
from tests.cli.test_evaluation import INTERRUPTED
from tests.cli.test_evaluation import MODEL as TRAINED
from tests.clusters import cluster  # noqa: F401  (a fixture)


def test_parts_are_made_one_by_one_and_merged(command: Command, here: Path, tmp_path: Path) -> None:
    given = ("simulate", "model.py:task", "--out", tmp_path / "store")
    second = command(*given, "--part", "2/2")
    assert second.code == 0, second.err
    assert f"Part 2/2: 1 of 3 sources, in {tmp_path}/store/parts/2-of-2. 1 of 2 parts is finished." in second.out
    assert f"When all are, run: imprint merge {tmp_path}/store\n" in second.out
    missing = command("merge", tmp_path / "store")
    assert missing.code == 1 and "of its 2 parts, these are missing: 1/2" in missing.err
    assert f"Parts were made by: imprint simulate model.py:task --out {tmp_path}/store --part 1/2" in missing.err
    assert "Now run: imprint merge" in command(*given, "--part=1/2").out
    merged = command("merge", tmp_path / "store")
    assert merged.code == 0, merged.err
    assert f"Store {tmp_path}/store" in merged.out
    whole = command("simulate", "model.py:task", "--repeat", tmp_path / "store", "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    assert imprints(tmp_path / "store") == imprints(tmp_path / "whole")
    done = command(*given, "--part", "2/2")
    assert done.code == 0 and "is complete: there is nothing to do for part 2/2." in done.out
    assert command("merge", tmp_path / "store", "--json").values["sources"] == 3


def test_parts_tell_programs_where_they_are(command: Command, here: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    found = command("simulate", "model.py:task", "--out", out, "--part", "1/8", "--json").values
    assert found == {"part": "1/8", "path": f"{out}/parts/1-of-8", "count": 1, "total": 3, "finished": 1}


def test_wrong_parts_are_refused(command: Command, here: Path, tmp_path: Path) -> None:
    given = ("simulate", "model.py:task", "--out", tmp_path / "store")
    for text, words in (("0/8", "part 0/8 does not exist"), ("a/b", "the third of eight parts; got 'a/b'")):
        refused = command(*given, "--part", text)
        assert refused.code == 1 and words in refused.err
    nothing = command("merge", tmp_path)
    assert nothing.code == 1 and "holds no parts" in nothing.err


def test_an_automatic_plan_is_that_of_the_first_part(
    command: Command, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "model.py").write_text(MODEL)
    given = ("simulate", "model.py:task", "-p", "auto", "--out", "store", "--part")
    assert command(*given, "1/2").code == 0
    monkeypatch.setattr(Plan, "auto", lambda *_, **__: pytest.fail("the plan is known"))
    assert command(*given, "2/2").code == 0
    assert command("merge", "store").code == 0
    assert len(Store("store")) == 3


def test_a_field_that_another_part_was_not_given_is_refused(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    given = ("simulate", "model.py:task", "-p", "auto", "--out", "store", "--part")
    assert command(*given, "1/3").code == 0
    refused = command(*given, "2/3", "-p", "weight=0.5")
    assert refused.code == 1 and "the plan's weight was [1.0], is 0.5" in refused.err
    assert command(*given, "2/3").code == 0


def test_parts_of_a_ground_truth_are_merged(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(TRAINED)
    given = ("retrain", "model.py:train", "--kind", "sources", "--out", "truth")
    first = command(*given, "--part", "1/2")
    assert first.code == 0, first.err
    assert "Part 1/2: 2 of 4 models, in truth/parts/1-of-2. 1 of 2 parts is finished." in first.out
    refused = command(*given, "--part", "1/2", "--replay")
    assert refused.code == 1 and "--part divides models that are trained anew" in refused.err
    missing = command("merge", "truth")
    assert missing.code == 1 and 'with part "2/2" (`--part 2/2`)' in missing.err
    assert command(*given, "--part", "2/2").code == 0
    merged = command("merge", "truth")
    assert merged.code == 0 and "Ground truth truth" in merged.out
    assert Truth.load("truth").values.shape == (1, 4, 5)
    assert command("merge", "truth", "--json").values["kind"] == "removal"


def test_an_interrupted_part_of_a_ground_truth_tells_of_its_own_models(command: Command, empty: Path) -> None:
    (empty / "tired.py").write_text(INTERRUPTED)

    def make(part: str, patience: int) -> Finished:
        (empty / "patience").write_text(str(patience))
        return command("retrain", "tired.py:train", "--kind", "sources", "--out", "truth", "--part", part)

    assert make("1/2", 0).code == 0
    early = make("2/2", 1)
    assert early.code == 130 and early.err == (
        "stopped before the first models were finished: the same command will start over\n"
    )
    late = make("2/2", 4)  # one of them trains a model of the other part, to see that the function is the same
    assert "stopped: finished models are in truth/parts/2-of-2, the same command will resume from there" in late.err
    assert "1 model of part 2/2 is finished\n" in make("2/2", 0).err


def test_options_of_clusters_go_together(command: Command, here: Path, tmp_path: Path) -> None:
    simulating = ("simulate", "model.py:task", "--out", tmp_path / "store")
    for given, words in (
        (("--ray", "auto", "--part", "1/2"), "--part makes one part here, --ray makes all of them on a cluster"),
        (("--parts", "2"), "--parts is about parts on a cluster: add --ray auto, or an address"),
        (("--gpus", "0.5"), "--gpus is about parts on a cluster"),
        (("--cpus", "2"), "--cpus is about parts on a cluster"),
    ):
        refused = command(*simulating, *given)
        assert refused.code == 1 and words in refused.err
    replays = command("retrain", "digits", "--out", tmp_path / "truth", "--replay", "--ray", "auto")
    assert replays.code == 1 and "--ray divides models that are trained anew" in replays.err


def test_all_parts_run_on_an_executor(
    command: Command, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `--ray` gives the library; here the parts are made one after another."""
    given: list[tuple[object, ...]] = []

    def choose(*options: object) -> InProcess:
        given.append(options)
        return InProcess(parts=2)

    monkeypatch.setattr("imprint.cli.commands.options.RayExecutor", choose)
    out = tmp_path / "store"
    made = command("simulate", "model.py:task", "--out", out, "--ray", "local", "--parts", "2", "--gpus", "0.5")
    assert made.code == 0, made.err
    assert given == [("local", 2, 1, 0.5)] and f"Store {out}" in made.out
    assert imprints(out) == imprints(command_store(command, tmp_path / "whole", repeat=out))


def command_store(command: Command, out: Path, repeat: Path) -> Path:
    made = command("simulate", "model.py:task", "--repeat", repeat, "--out", out)
    assert made.code == 0, made.err
    return out


OWN = """
import torch
from torch import nn
import imprint
import beside

torch.manual_seed(0)
data = (torch.randn(12, 3), torch.randint(0, 3, (12,)))
sources = imprint.Sources.by_label(["times", "post", "blog"] * 4)
queries = (torch.randn(2, 3), torch.tensor([0, 1]))
plan = imprint.Plan(steps=3, lr=0.1)

class Mine(nn.Linear):
    pass

def loss(model, batch):
    return beside.cross_entropy(model, batch)

task = imprint.Task(Mine(3, 3), loss, measure=lambda model, batch: loss(model, batch))
"""
BESIDE = """
from torch.nn import functional as F

def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
"""


@pytest.mark.system
@pytest.mark.usefixtures("cluster")
@pytest.mark.curvature  # as in the workers
def test_a_file_of_the_users_own_runs_on_a_cluster(command: Command, empty: Path) -> None:
    """Code in the file and beside it, none of which the workers could import by its name."""
    (empty / "model.py").write_text(OWN)
    (empty / "beside.py").write_text(BESIDE)
    made = command("simulate", "model.py:task", "--out", "store", "--ray", "auto", "--parts", "2", "--json")
    assert made.values["sources"] == 3
    assert imprints("store") == imprints(command_store(command, Path("whole"), repeat=Path("store")))
    again = command("simulate", "model.py:task", "--out", "store", "--ray", "auto")
    assert again.code == 0 and "store is complete; only checking that it matches" in again.err


@pytest.mark.system
@pytest.mark.usefixtures("cluster")
def test_ground_truth_is_made_on_a_cluster(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(TRAINED)
    given = ("retrain", "model.py:train", "--kind", "sources")
    made = command(*given, "--out", "truth", "--ray", "auto", "--parts", "2")
    assert made.code == 0, made.err
    assert command(*given, "--out", "whole").code == 0
    assert Truth.load("truth").values.equal(Truth.load("whole").values)
