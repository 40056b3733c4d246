"""The truth is what a plain loop would measure; it survives being killed, and is never taken for another."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from imprint import DataError, Sources, StoreError, Task, TaskError
from imprint.data import Data
from imprint.evaluation.retraining import Together, Train, retrain
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.training import Training
from imprint.evaluation.truth import Truth
from imprint.files import LOCK
from imprint.progress import Advance
from tests.test_recording import Tied

N, QUERIES, RUNS = 24, 5, 2
TRAINING = Training(epochs=2, lr=0.2, batch_size=8, momentum=0.9)
HALVES = Subsets.halves(N, 5)
REMOVALS = Subsets.without_each(Sources.by_label([i % 4 for i in range(N)]), baselines=2)
every_kind = pytest.mark.parametrize("subsets", [HALVES, REMOVALS], ids=["halves", "removals"])


class Killed(BaseException):
    """Stands for whatever ends a process."""


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def task(**options: Any) -> Task:
    return Task.classifier(build(), **options)


def together(at_once: int | None = 2, **changes: Any) -> Together:
    """Two at a time: several files to die between."""
    given = {"data": points(N, 0), "training": TRAINING, "build": build, **changes}
    data = Data(given["data"], device=torch.device("cpu"))
    return Together(given["build"], Task.classifier, data, given["training"], at_once)


def train(subset: Tensor, seed: int) -> nn.Module:
    """What `together` does, as a plain loop."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
    x, y = points(N, 0)
    optimiser = torch.optim.SGD(model.parameters(), TRAINING.lr, TRAINING.momentum)
    order = torch.Generator().manual_seed(seed)
    for _ in range(TRAINING.epochs):
        for batch in subset[torch.randperm(len(subset), generator=order)].split(TRAINING.batch_size):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return model


class Counting:
    """`train` that keeps count of the models it has made, and dies after so many."""

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.made = most, 0

    def __call__(self, subset: Tensor, seed: int) -> nn.Module:
        if self.made == self.most:
            raise Killed
        self.made += 1
        return train(subset, seed)


def dies_after(calls: int) -> Advance:
    """Progress that ends the run it is told of, at the call after so many."""
    left = iter(range(calls))

    def die(done: int, total: int, /) -> None:
        if next(left, None) is None:
            raise Killed

    return die


def ask(out: Path | None = None, how: Train | Together | None = None, **changes: Any) -> Truth:
    given: dict[str, Any] = {"queries": points(QUERIES, 1), "subsets": HALVES, "runs": RUNS, "progress": False}
    given |= {"task": task(), **changes} if "task" not in changes else changes
    return retrain(how or together(), out=out, **given)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@every_kind
def test_models_trained_together_and_in_a_loop_give_the_same_truth(subsets: Subsets) -> None:
    ours, loop = ask(subsets=subsets), ask(how=train, subsets=subsets)
    assert ours.values.shape == (RUNS, len(subsets), QUERIES)
    torch.testing.assert_close(ours.values, loop.values, rtol=1e-9, atol=1e-12)
    assert float(ours.values.std(1).min()) > 1e-3  # subsets matter
    assert float(ours.values.std(0).min()) > 1e-4  # and so do seeds


@every_kind
def test_values_are_those_of_the_models_measured_one_by_one(subsets: Subsets) -> None:
    truth, (x, y) = ask(subsets=subsets), points(QUERIES, 1)
    for run in range(RUNS):
        for index, seed in enumerate(subsets.seeds(run, RUNS, 0)):
            losses = nn.functional.cross_entropy(train(subsets.examples(index), seed)(x), y, reduction="none")
            torch.testing.assert_close(truth.values[run, index], losses.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 3, None])
def test_how_many_models_train_at_once_does_not_matter(at_once: int | None) -> None:
    torch.testing.assert_close(ask(how=together(at_once)).values, ask().values, rtol=1e-10, atol=1e-13)


def test_neither_the_tasks_own_model_nor_the_random_state_is_touched() -> None:
    own = task()
    before, state = own.state(), torch.get_rng_state()
    ask(task=own)
    together()(torch.arange(N), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state().items())


def test_one_model_of_those_trained_together_can_be_had_alone() -> None:
    how = together(build=lambda: Tied().double())
    tied = Task.classifier(Tied().double())
    stack, alone = (ask(how=each, task=tied) for each in (how, lambda subset, seed: how(subset, seed)))
    torch.testing.assert_close(stack.values, alone.values, rtol=1e-10, atol=1e-13)
    model = how(torch.arange(N), 0)
    assert not model.training
    assert model.get_parameter("second.weight") is model.get_parameter("first.weight")


def test_models_are_measured_in_evaluation_mode() -> None:
    def careless(subset: Tensor, seed: int) -> nn.Module:
        return nn.Sequential(train(subset, seed), nn.Dropout(0.5), nn.BatchNorm1d(3).double()).train()

    first, again = (ask(how=careless).values for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("how", [together(), train], ids=["together", "loop"])
@every_kind
def test_a_kept_truth_is_what_was_returned(how: Train | Together, subsets: Subsets, tmp_path: Path) -> None:
    truth = ask(tmp_path / "truth", how, subsets=subsets)
    assert torch.equal(truth.values, ask(how=how, subsets=subsets).values)
    kept = Truth.load(tmp_path / "truth")
    assert torch.equal(kept.values, truth.values)
    assert (kept.measure, kept.subsets.kind, kept.subsets.n) == (truth.measure, subsets.kind, N)
    assert kept.subsets.removed == subsets.removed
    assert kept.subsets.sources.ids == subsets.sources.ids
    assert torch.equal(kept.subsets.kept(), subsets.kept())
    assert {file.suffix for file in contents(tmp_path)} == {".safetensors", ".json"}


@pytest.mark.parametrize("models", [3, 5, 9])
def test_a_loop_that_dies_goes_on_without_training_again_what_is_there(models: int, tmp_path: Path) -> None:
    expected = ask(how=train).values
    checks = 3  # is the subset heard, is the seed
    with pytest.raises(Killed):
        ask(tmp_path / "truth", Counting(models))
    again = Counting()
    assert torch.equal(ask(tmp_path / "truth", again).values, expected)
    left = RUNS * len(HALVES) - (models - checks)
    assert again.made == left + (checks if models == checks else 0)
    assert torch.equal(Truth.load(tmp_path / "truth").values, expected)
    finished = Counting()
    assert torch.equal(ask(tmp_path / "truth", finished).values, expected)
    assert finished.made == 0


def test_training_together_that_dies_again_and_again_ends_in_the_same_truth(tmp_path: Path) -> None:
    expected = ask(tmp_path / "whole").values
    for calls in (1, 4, 6, 100):
        try:
            ask(tmp_path / "broken", progress=dies_after(calls))
        except Killed:
            continue
    assert torch.equal(Truth.load(tmp_path / "broken").values, expected)
    whole, broken = (
        {path.relative_to(tmp_path / name): content for path, content in contents(tmp_path / name).items()}
        for name in ("whole", "broken")
    )
    assert {**whole, Path("truth.json"): b""} == {**broken, Path("truth.json"): b""}


def test_how_many_were_trained_at_once_is_kept_by_what_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        ask(tmp_path / "truth", progress=dies_after(5))
    assert torch.equal(ask(tmp_path / "truth", together(3)).values, ask(how=together(2)).values)


KILLABLE = """
import sys, torch
from pathlib import Path
from tests.evaluation.test_truth import ask, train
torch.set_num_threads(1)
def slow(subset, seed):
    print("training", flush=True)
    sys.stdin.readline()
    return train(subset, seed)
ask(Path(sys.argv[1]), slow)
"""


def test_a_killed_process_leaves_its_models_and_lets_others_in(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLABLE, str(tmp_path / "truth")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent.parent,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    for _ in range(3 + 4):  # three to see that subset and seed are heard, then four to keep
        assert process.stdout.readline() == "training\n"
        process.stdin.write("\n")
        process.stdin.flush()
    process.stdout.readline()  # it has begun the fifth
    with pytest.raises(StoreError, match=f"another process .*{process.pid}.* is writing"):
        ask(tmp_path / "truth", Counting())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = Counting()

    def slow(subset: Tensor, seed: int) -> nn.Module:
        return again(subset, seed)

    slow.__qualname__ = "slow"
    assert torch.equal(ask(tmp_path / "truth", slow).values, ask(how=train).values)
    assert again.made == RUNS * len(HALVES) - 4
    assert {file.suffix for file in contents(tmp_path)} == {".safetensors", ".json"}


def test_a_second_process_is_told_and_changes_nothing(tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(StoreError, match=f"another process .*{os.getpid()}.* is writing") as error:
                ask(tmp_path / "truth")
            refused.append(str(error.value))

    truth = ask(tmp_path / "truth", progress=intrude)
    assert refused
    assert torch.equal(truth.values, ask().values)


def test_a_call_killed_as_it_began_is_begun_anew(tmp_path: Path) -> None:
    for name in (LOCK, ".truth.json.tmp"):
        (tmp_path / name).write_text("{")
    assert torch.equal(ask(tmp_path).values, ask().values)


def test_a_list_of_subsets_that_is_missing_is_written_again(tmp_path: Path) -> None:
    expected = ask(tmp_path).values
    (tmp_path / "subsets.safetensors").unlink()
    with pytest.raises(StoreError, match=r"subsets\.safetensors is damaged"):
        Truth.load(tmp_path)
    ask(tmp_path)
    assert torch.equal(Truth.load(tmp_path).values, expected)


OTHER = points(QUERIES, 1)[0] + torch.eye(QUERIES, 4), points(QUERIES, 1)[1]
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "queries": ({"queries": OTHER}, "the queries changed"),
    "number of queries": ({"queries": points(4, 1)}, "queries was 5, is 4"),
    "data": ({"how": together(data=points(N, 2))}, "the data changed"),
    "seed": ({"seed": 1}, "seed was 0, is 1"),
    "runs": ({"runs": 3}, "runs was 2, is 3"),
    "training": ({"how": together(training=replace(TRAINING, lr=0.1))}, "the training's lr was 0.2, is 0.1"),
    "other halves": ({"subsets": Subsets.halves(N, 5, seed=1)}, "the subsets changed"),
    "number of halves": ({"subsets": Subsets.halves(N, 6)}, "subsets was 5, is 6"),
    "sources": ({"subsets": Subsets.halves(Sources.by_label([i // 2 for i in range(N)]), 5)}, "the sources changed"),
    "kind": ({"subsets": REMOVALS}, "kind was halves, is removal"),
    "measurement": ({"task": task(measure="margin")}, "measure was loss, is margin"),
    "model": ({"task": Task.classifier(nn.Linear(4, 3).double())}, "the parameters changed"),
    "loop": ({"how": train}, "training was .*, is train"),
}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize(("change", "difference"), CHANGES.values(), ids=CHANGES.keys())
def test_another_request_is_refused_and_the_difference_named(
    change: dict[str, Any], difference: str, finished: bool, tmp_path: Path
) -> None:
    try:
        ask(tmp_path, progress=dies_after(10**6 if finished else 5))
    except Killed:
        assert not finished
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match=f"holds another ground truth: {difference}"):
        ask(tmp_path, **change)
    assert contents(tmp_path) == kept


def test_the_same_queries_may_come_in_other_batches(tmp_path: Path) -> None:
    first = ask(tmp_path)
    assert torch.equal(ask(tmp_path, batch_size=2).values, first.values)
    loader = DataLoader(TensorDataset(*points(QUERIES, 1)), batch_size=3)
    assert torch.equal(ask(tmp_path, queries=iter(loader)).values, first.values)
    with pytest.raises(StoreError, match="the queries changed"):
        ask(tmp_path, queries=iter(DataLoader(TensorDataset(*OTHER), batch_size=3)))


def spoil_end(content: bytes) -> bytes:
    return content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]


@pytest.mark.parametrize("spoil", [lambda content: content[:30], spoil_end], ids=["cut off", "changed"])
def test_damaged_values_are_named_and_made_again_once_deleted(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    expected = ask(tmp_path).values
    part = tmp_path / "values-000006.safetensors"
    part.write_bytes(spoil(part.read_bytes()))
    for read in (ask, Truth.load):
        with pytest.raises(StoreError, match=r"values-000006\.safetensors is damaged.*Delete it"):
            read(tmp_path)
    part.unlink()
    assert torch.equal(ask(tmp_path).values, expected)


def test_a_list_of_subsets_is_known_to_be_damaged_wherever_it_is(tmp_path: Path) -> None:
    ask(tmp_path)
    file = tmp_path / "subsets.safetensors"
    whole = file.read_bytes()
    numbers = range(8 + int.from_bytes(whole[:8], "little"), len(whole), 8)
    assert len(numbers) > 100
    for place in numbers:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StoreError, match=r"subsets\.safetensors is damaged"):
            Truth.load(tmp_path)
    file.write_bytes(whole[:30])
    with pytest.raises(StoreError, match=r"subsets\.safetensors is damaged"):
        Truth.load(tmp_path)


def without(name: str) -> Callable[[str], str]:
    return lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != name})


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "cut off": (lambda text: text[: len(text) // 2], "cannot be read"),
    "no object": (lambda text: "[]", "must be an object"),
    "lacking": (without("runs"), "was changed after it was written"),
    "later": (lambda text: text.replace('"schema": 1', '"schema": 2'), "has schema 2, this version reads up to 1"),
}


@pytest.mark.parametrize(("spoil", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_description_is_refused(spoil: Callable[[str], str], message: str, tmp_path: Path) -> None:
    ask(tmp_path)
    file = tmp_path / "truth.json"
    file.write_text(spoil(file.read_text()))
    kept = contents(tmp_path)
    for read in (ask, Truth.load):
        with pytest.raises(StoreError, match=rf"truth\.json.*{message}"):
            read(tmp_path)
    assert contents(tmp_path) == kept


def test_runs_that_are_not_complete_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = ask(tmp_path / "truth", how=train)
    (tmp_path / "truth" / "values-000004.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        part = Truth.load(tmp_path / "truth")
    assert "1 of 2 runs are complete" in caplog.text
    assert torch.equal(part.values, whole.values[1:])


def test_a_truth_without_a_complete_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        ask(tmp_path, Counting(3 + 4))
    with pytest.raises(StoreError, match=r"is unfinished: 4 of 10 models .* Make the same call again"):
        Truth.load(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "subsets.safetensors"])
def test_a_folder_with_something_else_is_refused_untouched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match="holds something else"):
        ask(tmp_path)
    with pytest.raises(StoreError, match=r"no truth\.json"):
        Truth.load(tmp_path)
    assert contents(tmp_path) == {tmp_path / name: b"mine"}
    with pytest.raises(StoreError, match="holds something else"):
        ask(tmp_path / name)


def heedless(subset: Tensor, seed: int) -> nn.Module:
    return train(torch.arange(N), seed)


def stubborn(subset: Tensor, seed: int) -> nn.Module:
    return train(subset, 0)


def forgetful(subset: Tensor, seed: int) -> Any:
    train(subset, seed)


def diverging(subset: Tensor, seed: int) -> nn.Module:
    model = train(subset, seed)
    model.get_parameter("0.weight").data.fill_(torch.nan if seed == 7 else seed)
    return model


@every_kind
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (heedless, "ignores its subset"),
        (stubborn, "ignores its seed"),
        (forgetful, "must return the trained model, got a NoneType"),
    ],
)
def test_a_function_that_does_not_train_as_asked_is_refused(how: Train, message: str, subsets: Subsets) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=how, subsets=subsets)


def test_a_seed_may_be_ignored_where_there_is_one_run() -> None:
    assert ask(how=stubborn, runs=1).values.isfinite().all()


def test_a_training_that_diverges_is_named_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="query 0 is nan under the model retrained with seed 7: the training diverged"):
        ask(tmp_path, diverging)
    assert Truth.load(tmp_path).runs == 1  # whose seeds are even
    explosive = together(training=replace(TRAINING, lr=1e308))
    with pytest.raises(DataError, match="the training diverged"):
        ask(how=explosive)


def test_a_measurement_with_other_than_one_value_per_query_is_refused() -> None:
    def column(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs[:, :1]

    for how in (train, together()):
        with pytest.raises(TaskError, match=r"one value per query, shape \(5,\).*\(5, 1\)"):
            ask(how=how, task=task(measure=column))


def test_requests_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(DataError, match="runs must be at least 1, got 0"):
        ask(runs=0)
    with pytest.raises(DataError, match="subsets are of 20 training examples, the data has 24"):
        ask(subsets=Subsets.halves(20))
    elsewhere = replace(together(), data=Data(points(N, 0), device=torch.device("meta")))
    with pytest.raises(DataError, match="trained on meta and measured on cpu"):
        ask(how=elsewhere)


def test_effects_are_changes_against_the_models_that_lack_nothing() -> None:
    truth = ask(subsets=REMOVALS)
    assert truth.lacking == [(0,), (1,), (2,), (3,)]
    assert truth.effects.shape == (RUNS, QUERIES, 4)
    expected = truth.values[1, 2 + 3] - truth.values[1, :2].mean(0)
    torch.testing.assert_close(truth.effects[1, :, 3], expected)
    with pytest.raises(DataError, match="these are halves"):
        _ = ask().effects
    with pytest.raises(DataError, match="ask for a baseline"):
        _ = ask(subsets=Subsets.without(N, [[0], [1, 2]])).effects


def test_a_truth_says_what_it_is() -> None:
    assert repr(ask()) == "Truth(halves: 5 subsets × 2 runs, loss of 5 queries)"
