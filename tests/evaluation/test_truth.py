"""The truth is what a plain loop would measure; it survives being killed, and is never taken for another."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from imprint import DataError, Plan, Sources, StoreError, Task, TaskError, attribute, simulate
from imprint.data import Data
from imprint.evaluation.metrics import evaluate
from imprint.evaluation.retraining import retrain
from imprint.evaluation.subsets import ORDER, Subsets, derive_seed
from imprint.evaluation.together import Together, Train
from imprint.evaluation.training import Training
from imprint.evaluation.trials import describe_function, spread
from imprint.evaluation.truth import Truth
from imprint.runtime.progress import Advance
from imprint.store.files import LOCK
from imprint.store.values import sealed
from tests.test_recorder import Tied

N, QUERIES, RUNS = 24, 5, 2
TRIALS, EXTRA = 4, 2  # of halves: how many trainings see whether subset and seed are heard, and how many only that
TRAINING = Training(epochs=2, lr=0.2, batch_size=8, momentum=0.9)
HALVES = Subsets.halves(N, 5)
REMOVALS = Subsets.without_each(Sources.by_label([i % 4 for i in range(N)]))
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
    given = {"data": points(N, 0), "training": TRAINING, "build": build, "task_of": Task.classifier, **changes}
    data = Data(given["data"], device=torch.device("cpu"))
    return Together(given["build"], given["task_of"], data, given["training"], at_once)


def train(subset: Tensor, seed: int) -> nn.Module:
    """What `together` does, as a plain loop."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
    x, y = points(N, 0)
    optimiser = torch.optim.SGD(model.parameters(), TRAINING.lr, TRAINING.momentum)
    order = torch.Generator().manual_seed(derive_seed(seed, ORDER))
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
        for index, seed in enumerate(subsets.seeds(run, 0)):
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
    def wrapped(model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Dropout(0.5), nn.BatchNorm1d(3).double()).train()

    own = Task.classifier(wrapped(build()))
    first, again = (ask(how=lambda *given: wrapped(train(*given)), task=own).values for _ in range(2))
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
    assert torch.equal(kept.subsets.membership(), subsets.membership())
    assert {file.suffix for file in contents(tmp_path)} == {".safetensors", ".json"}


@pytest.mark.parametrize("models", [3, 4, 6, 9])
def test_a_loop_that_dies_goes_on_without_training_again_what_is_there(models: int, tmp_path: Path) -> None:
    expected = ask(how=train).values
    with pytest.raises(Killed):
        ask(tmp_path / "truth", Counting(models))
    again = Counting()
    assert torch.equal(ask(tmp_path / "truth", again).values, expected)
    kept = models - EXTRA if models >= TRIALS else 0
    assert again.made == RUNS * len(HALVES) - kept + (1 if kept else EXTRA)
    assert torch.equal(Truth.load(tmp_path / "truth").values, expected)
    finished = Counting()
    assert torch.equal(ask(tmp_path / "truth", finished).values, expected)
    assert finished.made == 1  # to see that it is the same function


def test_training_together_that_dies_again_and_again_ends_in_the_same_truth(tmp_path: Path) -> None:
    expected = ask(tmp_path / "whole").values
    for calls in (1, 4, 6, 100):
        try:
            ask(tmp_path / "broken", progress=dies_after(calls))
        except Killed:
            continue
    assert torch.equal(Truth.load(tmp_path / "broken").values, expected)
    whole, broken = ([path.name for path in contents(tmp_path / name)] for name in ("whole", "broken"))
    assert whole == broken


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


@pytest.mark.system
def test_a_killed_process_leaves_its_models_and_lets_others_in(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLABLE, str(tmp_path / "truth")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent.parent,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    for _ in range(EXTRA + 5):
        assert process.stdout.readline() == "training\n"
        process.stdin.write("\n")
        process.stdin.flush()
    process.stdout.readline()  # it has begun the sixth
    with pytest.raises(StoreError, match=f"another process .*{process.pid}.* is writing"):
        ask(tmp_path / "truth", Counting())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = Counting()

    def slow(subset: Tensor, seed: int) -> nn.Module:
        return again(subset, seed)

    slow.__qualname__ = "slow"
    assert torch.equal(ask(tmp_path / "truth", slow).values, ask(how=train).values)
    assert again.made == RUNS * len(HALVES) - 5 + 1  # to see that it is the same function
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
    (tmp_path / LOCK).write_text("process 1")
    (tmp_path / ".imprint-0123456789abcdef.tmp").mkdir()
    assert torch.equal(ask(tmp_path).values, ask().values)
    assert not any(path.name.endswith(".tmp") for path in tmp_path.iterdir())


def test_a_list_of_subsets_that_is_missing_is_written_again(tmp_path: Path) -> None:
    expected = ask(tmp_path).values
    (tmp_path / "subsets.safetensors").unlink()
    with pytest.raises(StoreError, match=r"subsets\.safetensors is damaged"):
        Truth.load(tmp_path)
    ask(tmp_path)
    assert torch.equal(Truth.load(tmp_path).values, expected)


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=0.1)


def smaller(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data /= 2
    return model


OTHER = points(QUERIES, 1)[0] + torch.eye(QUERIES, 4), points(QUERIES, 1)[1]
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "queries": ({"queries": OTHER}, "the queries changed"),
    "number of queries": ({"queries": points(4, 1)}, "queries was 5, is 4"),
    "data": ({"how": together(data=points(N, 2))}, "the data changed"),
    "seed": ({"seed": 1}, "seed was 0, is 1"),
    "training": ({"how": together(training=replace(TRAINING, lr=0.1))}, "the training's lr was 0.2, is 0.1"),
    "other halves": ({"subsets": Subsets.halves(N, 5, seed=1)}, "the subsets changed"),
    "number of halves": ({"subsets": Subsets.halves(N, 6)}, "subsets was 5, is 6"),
    "sources": ({"subsets": Subsets.halves(Sources.by_label([i // 2 for i in range(N)]), 5)}, "the sources changed"),
    "kind": ({"subsets": REMOVALS}, "kind was halves, is removal"),
    "measurement": ({"task": task(measure="margin")}, "measure was loss, is margin"),
    "parameters": ({"task": task(parameters="0.*")}, "the parameters changed"),
    "loop": ({"how": train}, "training was .*, is train"),
    "dropout": (
        {"how": together(build=lambda: nn.Sequential(*build().children(), nn.Dropout(0.5)))},
        r"the model has \(3\): Dropout\(p=0.5, inplace=False\), had \)",
    ),
    "initialisation": ({"how": together(build=lambda: smaller(build()))}, "the initial model changed"),
    "loss": (
        {"how": together(task_of=lambda model: Task(model, smoothed))},
        "loss on probe example 0 is",
    ),
    "measurement of the same name": ({"task": Task(build(), smoothed)}, "F at random parameters of query 0 is"),
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
    "later": (lambda text: text.replace('"schema": 3', '"schema": 4'), "has schema 4, this version reads up to 3"),
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
        ask(tmp_path, Counting(EXTRA + 4))
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
    with pytest.raises(StoreError, match="is a file: give a folder for the ground truth"):
        ask(tmp_path / name)


def heedless(subset: Tensor, seed: int) -> nn.Module:
    return train(torch.arange(N), seed)


def stubborn(subset: Tensor, seed: int) -> nn.Module:
    return train(subset, 0)


def forgetful(subset: Tensor, seed: int) -> Any:
    train(subset, seed)


def diverging(subset: Tensor, seed: int) -> nn.Module:
    model = train(subset, seed)
    if seed == HALVES.seeds(1, 0)[3]:
        model.get_parameter("0.weight").data.fill_(torch.nan)
    return model


@every_kind
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (heedless, "same model for two different subsets"),
        (stubborn, "same model for two seeds"),
        (forgetful, "must return the trained model, got a NoneType"),
    ],
)
def test_a_function_that_does_not_train_as_asked_is_refused(how: Train, message: str, subsets: Subsets) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=how, subsets=subsets)


@every_kind
@pytest.mark.parametrize("how", [heedless, stubborn, forgetful])
def test_a_refused_function_leaves_the_folder_to_the_right_one(how: Train, subsets: Subsets, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        ask(tmp_path / "truth", how, subsets=subsets)
    ask(tmp_path / "truth", train, subsets=subsets)
    with pytest.raises(DataError, match="the training diverged"):
        ask(tmp_path / "together", together(training=replace(TRAINING, lr=1e308)), subsets=subsets)
    ask(tmp_path / "together", subsets=subsets)


def test_parameters_are_compared_and_not_only_what_is_measured() -> None:
    def coarse(model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(len(batch[0]), dtype=torch.float64)

    assert not ask(how=train, task=task(measure=coarse)).values.any()


@every_kind
def test_trials_are_counted_and_those_that_are_needed_are_not_made_twice(subsets: Subsets) -> None:
    counting, told = Counting(), []
    ask(how=counting, subsets=subsets, progress=lambda done, total: told.append((done, total)))
    extra = EXTRA if subsets is HALVES else 1
    assert counting.made == RUNS * len(subsets) + extra
    assert told[-1] == (counting.made, counting.made)
    assert [done for done, _ in told] == list(range(1, counting.made + 1))


def unseeded(subset: Tensor, seed: int) -> nn.Module:
    return train(subset, int(torch.randint(2**31, ())))


@every_kind
def test_a_function_without_a_seed_is_told_by_how_much_its_models_differ(
    subsets: Subsets, caplog: pytest.LogCaptureFixture
) -> None:
    ask(how=train, subsets=subsets)
    assert not caplog.text
    truth = ask(how=unseeded, subsets=subsets)
    assert "returns different models for the same subset and seed" in caplog.text
    assert ("differ by more than what was removed" in caplog.text) == (subsets is REMOVALS)
    assert truth.about["noise"] > 1e-3


def named(how: Train, name: str = "mine") -> Train:
    how.__qualname__ = name
    return how


def begun(folder: Path, how: Train, models: int, **given: Any) -> None:
    """A truth with so many models of a function."""
    calls = iter(range(models + EXTRA))

    def dying(subset: Tensor, seed: int) -> nn.Module:
        if next(calls, None) is None:
            raise Killed
        return how(subset, seed)

    with pytest.raises(Killed):
        ask(folder, named(dying), **given)


def nudged(size: float) -> Train:
    """`train`, with models that are so far away in one bias."""

    def how(subset: Tensor, seed: int) -> nn.Module:
        model = train(subset, seed)
        model.get_parameter("2.bias").data[0] += size
        return model

    return named(how)


@pytest.mark.parametrize("models", [2, 5, 9])
def test_a_folder_is_not_continued_by_another_function_of_the_same_name(models: int, tmp_path: Path) -> None:
    begun(tmp_path, train, models)
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match=r"of another train\(subset, seed\): F of model 0, trained again, differs"):
        ask(tmp_path, nudged(0.5))
    assert contents(tmp_path) == kept
    ask(tmp_path, nudged(0.0))
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match=r"of another train\(subset, seed\): F of model 0, trained again, differs"):
        ask(tmp_path, nudged(0.5))  # though nothing is left to train
    assert contents(tmp_path) == kept


def test_a_small_deviation_is_said_and_a_tiny_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for size in (1e-6, 1e-2):
        begun(tmp_path / str(size), train, 5)
        assert not caplog.text
        ask(tmp_path / str(size), nudged(size))
    assert "does not exactly reproduce the models in" in caplog.text


def test_a_function_that_never_repeats_itself_may_still_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    begun(tmp_path, unseeded, 5)
    assert ask(tmp_path, named(lambda subset, seed: unseeded(subset, seed))).runs == RUNS


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda subset: train(subset, 0), r"called as train\(subset, seed\), but takes \(subset\): too many"),
        (lambda subset, seed, lr: train(subset, seed), "missing a required argument: 'lr'"),
        ("train", "must be a function of .* or a Together, got a str"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(how: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=how)


def test_arguments_of_another_kind_are_refused_in_words() -> None:
    with pytest.raises(DataError, match=r"must be a Subsets, got a Sources: use Subsets\.halves\(sources\)"):
        ask(subsets=Sources.per_example(N))
    with pytest.raises(DataError, match="the task's model differs from those that are trained"):
        ask(task=Task.classifier(nn.Linear(4, 3).double()))
    with pytest.raises(TaskError, match=r"must be an imprint\.Task, got a Sequential"):
        ask(task=build())


def test_a_model_is_not_taken_for_the_function_that_trains_it() -> None:
    with pytest.raises(DataError, match="train is a model, a Sequential: give a function"):
        ask(how=build())


def test_queries_that_do_not_fit_are_told_before_anything_is_trained() -> None:
    counting, (x, y) = Counting(), points(QUERIES, 1)
    with pytest.raises(TaskError, match="the measurement failed on the queries: RuntimeError: mat1 and mat2"):
        ask(how=counting, queries=(x[:, :2], y))
    assert counting.made == 0


TOGETHER: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model": ({"build": build()}, TaskError, "build must be a function that builds a model, got a Sequential"),
    "task": ({"task_of": task()}, TaskError, "task_of must be a function .* got a Task"),
    "training": ({"training": {"lr": 0.1}}, TaskError, "training must be a Training, got a dict"),
    "dataset": ({"data": TensorDataset(*points(N, 0))}, DataError, "columns of tensors .*, got a TensorDataset"),
    "at once": ({"at_once": 0}, DataError, "at_once must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize(("change", "kind", "message"), TOGETHER.values(), ids=TOGETHER.keys())
def test_what_cannot_be_trained_together_is_refused(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        replace(together(), **change)


def test_columns_are_data_enough_to_train_together() -> None:
    plain = Together(build, Task.classifier, points(N, 0), TRAINING, 2)
    assert torch.equal(ask(how=plain).values, ask().values)
    arrays = tuple(column.numpy() for column in points(N, 0))
    assert torch.equal(ask(how=replace(plain, data=arrays)).values, ask().values)
    assert ask(how=plain).about["fingerprints"] == ask().about["fingerprints"]


def test_what_a_training_raises_says_which_it_was() -> None:
    def failing(subset: Tensor, seed: int) -> nn.Module:
        if len(subset) < N:
            raise ZeroDivisionError("of mine")
        return train(subset, seed)

    with pytest.raises(ZeroDivisionError, match="of mine") as error:
        ask(how=failing, subsets=REMOVALS)
    seed = REMOVALS.seeds(0, 0)[0]
    assert error.value.__notes__ == [f"while retraining on subset 1 (all but '0') in run 0 with seed {seed}"]
    with pytest.raises(DataError, match="is smaller than one batch") as raised:
        ask(how=together(training=replace(TRAINING, batch_size=20, drop_last=True)))
    assert "while retraining on subset 0" in raised.value.__notes__[0] and "and 1 more" in raised.value.__notes__[0]


def test_a_model_that_the_task_does_not_measure_is_refused() -> None:
    def other(subset: Tensor, seed: int) -> nn.Module:
        return nn.Linear(4, 3).double()

    def wider(subset: Tensor, seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def longer(subset: Tensor, seed: int) -> nn.Module:
        return nn.Sequential(*build().children(), nn.Linear(3, 3).double())

    for how, message in (
        (other, "it lacks '0.weight'"),
        (wider, r"'0.weight' has shape \(6, 4\), there \(5, 4\)"),
        (longer, "it has an extra '3.weight'"),
    ):
        with pytest.raises(DataError, match=f"returns another model than the task's: {message}"):
            ask(how=how)


def test_a_truth_knows_the_data_it_is_told_of(tmp_path: Path) -> None:
    own = task()
    store = simulate(own, points(N, 0), HALVES.sources, Plan(steps=2, lr=0.1), progress=False)
    result = attribute(own, store, points(QUERIES, 1), progress=False)
    same, other = (ask(how=train, task=own, data=points(N, seed)) for seed in (0, 2))
    mine = {name: value for name, value in result.labels.fingerprints.items() if name not in ("measures", "store")}
    assert same.about["fingerprints"] == {**mine, **same.about["fingerprints"]}
    assert len(evaluate(result, same)) == len(evaluate(result, ask(how=train, task=own))) == 1
    for truth in (other, ask(how=together(data=points(N, 2)), task=own)):
        with pytest.raises(DataError, match="scores are of other training data than the ground truth"):
            evaluate(result, truth)
    data = Data(TensorDataset(*points(N, 0)), device=torch.device("cpu"))
    assert ask(how=train, data=data).about["fingerprints"] == same.about["fingerprints"]
    with pytest.raises(DataError, match="subsets are made for 24 training examples, the data has 23"):
        ask(how=train, data=points(23, 0))
    with pytest.raises(DataError, match="differs from the data that the Together trains on"):
        ask(data=points(N, 2))
    assert ask(data=points(N, 0)).about["fingerprints"] == ask().about["fingerprints"]


def test_data_that_one_call_names_and_the_other_does_not_is_no_change(tmp_path: Path) -> None:
    first = ask(tmp_path, train, data=points(N, 0))
    assert torch.equal(ask(tmp_path, train).values, first.values)
    with pytest.raises(StoreError, match="the data changed"):
        ask(tmp_path, train, data=points(N, 2))


def test_scores_of_another_model_are_not_held_against_a_truth() -> None:
    small = Task.classifier(nn.Linear(4, 3).double())
    store = simulate(small, points(N, 0), HALVES.sources, Plan(steps=2, lr=0.1), progress=False)
    with pytest.raises(DataError, match="scores are of another model or measurement than the ground truth"):
        evaluate(attribute(small, store, points(QUERIES, 1), progress=False), ask())


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)),
    ],
)
def test_a_model_with_parameters_of_the_same_shapes_is_told_from_another(other: nn.Module) -> None:
    task = Task.classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    store = simulate(task, points(N, 0), HALVES.sources, Plan(steps=2, lr=0.1), progress=False)
    result = attribute(task, store, points(QUERIES, 1), progress=False)
    how = Together(lambda: deepcopy(other).double(), Task.classifier, points(N, 0), Training(epochs=1, lr=0.1))
    truth = retrain(how, Task.classifier(other.double()), points(QUERIES, 1), HALVES, progress=False)
    with pytest.raises(DataError, match="another model or measurement than the ground truth: F at random parameters"):
        evaluate(result, truth)


# A function that is not heard out, or not listening.


def trembling(how: Train, size: float = 1e-12) -> Train:
    """The same function on a device that does not repeat itself."""
    shaking = torch.Generator().manual_seed(0)

    def trained(subset: Tensor, seed: int) -> nn.Module:
        model = how(subset, seed)
        for parameter in model.parameters():
            parameter.data += size * torch.randn(parameter.shape, generator=shaking, dtype=torch.float64)
        return model

    return trained


@every_kind
@pytest.mark.parametrize(
    ("how", "message"), [(heedless, "same model for two different subsets"), (stubborn, "same model for two seeds")]
)
@pytest.mark.parametrize("size", [1e-12, 1e-6])
def test_rounding_does_not_pass_for_listening(how: Train, message: str, size: float, subsets: Subsets) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=trembling(how, size), subsets=subsets)
    ask(how=trembling(train, size), subsets=subsets)


def test_a_subset_that_changes_nothing_is_not_the_last_word() -> None:
    def picky(subset: Tensor, seed: int) -> nn.Module:
        return train(subset[subset != 3], seed)

    for removed in ([[], [3], [0, 1]], [[], [0, 1], [3]]):
        assert ask(how=picky, subsets=Subsets.without(N, removed)).values.isfinite().all()
    told: list[tuple[int, int]] = []
    ask(how=picky, subsets=Subsets.without(N, [[], [3], [0, 1]]), progress=lambda *now: told.append(now))
    assert told[-1] == (2 * 3 + 1, 2 * 3 + 1)
    with pytest.raises(DataError, match="same model for two different subsets"):
        ask(how=picky, subsets=Subsets.without(N, [[], [3]]))


def test_a_function_may_shuffle_its_subset_in_place() -> None:
    def shuffling(subset: Tensor, seed: int) -> nn.Module:
        subset[:] = subset[torch.randperm(len(subset), generator=torch.Generator().manual_seed(seed))]
        return train(subset, seed)

    truth = ask(how=shuffling, subsets=REMOVALS)
    assert truth.about["noise"] == 0
    for run in range(RUNS):
        alone = shuffling(REMOVALS.examples(0), REMOVALS.seeds(run, 0)[0])
        torch.testing.assert_close(task().measure(alone, points(QUERIES, 1)).detach(), truth.values[run, 0])


class Neighbours(nn.Module):
    """Learns nothing that its parameters would tell."""

    def __init__(self, subset: Tensor) -> None:
        super().__init__()
        x, y = points(N, 0)
        self.x, self.y = x[subset], y[subset]
        self.unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.stack([torch.cdist(x, self.x[self.y == label]).mean(1) for label in range(3)], 1)


def test_what_is_learned_outside_the_parameters_counts_too() -> None:
    own = Task.classifier(Neighbours(torch.arange(N)))
    truth = ask(how=lambda subset, seed: Neighbours(subset), task=own, runs=1)
    assert float(truth.values.std(1).min()) > 0
    with pytest.raises(DataError, match="same model for two seeds"):
        ask(how=lambda subset, seed: Neighbours(subset), task=own)
    with pytest.raises(DataError, match="same model for two different subsets"):
        ask(how=lambda subset, seed: Neighbours(torch.arange(N)), task=own, runs=1)


# More runs.


@every_kind
@pytest.mark.parametrize("how", [together(), together(3), together(None), train], ids=["two", "three", "all", "loop"])
def test_more_runs_add_to_a_folder_and_fewer_are_read(how: Train | Together, subsets: Subsets, tmp_path: Path) -> None:
    expected = ask(how=how, subsets=subsets, runs=4).values
    for runs in (1, 3, 2, 4, 4):
        truth = ask(tmp_path, how, subsets=subsets, runs=runs)
        torch.testing.assert_close(truth.values, expected[:runs], rtol=1e-10, atol=1e-13)
        assert truth.runs == truth.about["runs"] == runs
    assert torch.equal(Truth.load(tmp_path).values, truth.values)


def test_only_what_is_missing_is_trained_for_more_runs(tmp_path: Path) -> None:
    ask(tmp_path, Counting(), runs=2)
    kept = contents(tmp_path)
    more = Counting()
    ask(tmp_path, more, runs=3)
    assert more.made == len(HALVES) + 1
    assert {path: contents(tmp_path)[path] for path in kept if path.name != "truth.json"} == {
        path: content for path, content in kept.items() if path.name != "truth.json"
    }
    fewer = Counting()
    ask(tmp_path, fewer, runs=1)
    assert fewer.made == 1


def test_models_of_several_missing_runs_train_together(tmp_path: Path) -> None:
    ask(tmp_path, together(7), runs=1)
    ask(tmp_path, together(7), runs=4)
    sizes = [len(load_file(file)["values"]) for file in sorted(tmp_path.glob("values-*"))]
    assert sizes == [5, 7, 7, 1]
    ask(tmp_path / "removals", together(7), runs=2, subsets=REMOVALS)
    assert [len(load_file(file)["values"]) for file in sorted((tmp_path / "removals").glob("values-*"))] == [5, 5]


def test_more_runs_that_are_killed_leave_the_others_and_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = ask(tmp_path, runs=1)
    with pytest.raises(Killed):
        ask(tmp_path, runs=3, progress=dies_after(6))
    assert torch.equal(Truth.load(tmp_path).values, few.values)
    assert "1 of 3 runs are complete" in caplog.text
    assert torch.equal(ask(tmp_path, runs=1).values, few.values)
    torch.testing.assert_close(ask(tmp_path, runs=3).values, ask(runs=3).values, rtol=1e-10, atol=1e-13)


def test_more_runs_by_another_function_change_nothing(tmp_path: Path) -> None:
    ask(tmp_path, nudged(0.0), runs=1)
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match="of another train"):
        ask(tmp_path, nudged(0.5), runs=2)
    assert contents(tmp_path) == kept


@every_kind
def test_a_second_run_needs_a_function_that_hears_its_seed(subsets: Subsets, tmp_path: Path) -> None:
    ask(tmp_path / "deaf", named(lambda *given: stubborn(*given)), subsets=subsets, runs=1)
    kept = contents(tmp_path)
    with pytest.raises(DataError, match="same model for two seeds"):
        ask(tmp_path / "deaf", named(lambda *given: stubborn(*given)), subsets=subsets, runs=2)
    assert contents(tmp_path) == kept
    ask(tmp_path / "fine", train, subsets=subsets, runs=1)
    told: list[tuple[int, int]] = []
    both = ask(tmp_path / "fine", train, subsets=subsets, progress=lambda *now: told.append(now))
    assert torch.equal(both.values, ask(how=train, subsets=subsets).values)
    assert told[-1][0] == told[-1][1] and all(done <= total for done, total in told)


def test_a_description_that_stays_the_same_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        ask(tmp_path, progress=dies_after(5))
    before = (tmp_path / "truth.json").stat()
    ask(tmp_path)
    ask(tmp_path, runs=1)
    after = (tmp_path / "truth.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_values_of_another_truth_or_of_other_models_are_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    expected = ask(mine).values
    ask(other, seed=1, subsets=HALVES)
    place = mine / "values-000002.safetensors"
    own = place.read_bytes()
    for wrong in (other / "values-000002.safetensors", mine / "values-000004.safetensors"):
        place.write_bytes(wrong.read_bytes())
        for read in (ask, Truth.load):
            with pytest.raises(
                StoreError, match=r"values-000002\.safetensors does not hold the models that this ground truth has"
            ):
                read(mine)
    place.write_bytes(own)
    (mine / "values-000010.safetensors").write_bytes((mine / "values-000008.safetensors").read_bytes())
    with pytest.raises(StoreError, match=r"values-000010\.safetensors does not hold the models"):
        Truth.load(mine)
    (mine / "values-000010.safetensors").unlink()
    assert torch.equal(Truth.load(mine).values, expected)


def as_schema_2(folder: Path) -> None:
    """A folder as the version before wrote it: files of values that say no more than their checksum."""
    file = folder / "truth.json"
    about = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"}
    file.write_text(json.dumps(sealed({**about, "schema": 2}), indent=1))
    for part in folder.glob("values-*.safetensors"):
        with safe_open(part, framework="pt") as opened:
            values, told = opened.get_tensor("values"), opened.metadata()
        save_file({"values": values}, part, {"sha256": told["sha256"]})


def test_a_truth_of_the_version_before_is_read_and_continued(tmp_path: Path) -> None:
    first = ask(tmp_path)
    as_schema_2(tmp_path)
    assert torch.equal(Truth.load(tmp_path).values, first.values)
    assert torch.equal(ask(tmp_path).values, first.values)
    (tmp_path / "values-000004.safetensors").unlink()
    assert torch.equal(ask(tmp_path).values, first.values)
    more = ask(tmp_path, runs=3)
    torch.testing.assert_close(more.values, ask(runs=3).values, rtol=1e-10, atol=1e-13)
    assert torch.equal(Truth.load(tmp_path).values, more.values)


# Whether a function is still the same.


def test_effects_are_compared_within_a_run() -> None:
    """Runs of a removal differ by much more than what is removed does."""
    rows = torch.tensor([[1.0], [1.1], [1.2], [9.0], [9.1], [9.2]])
    assert spread(dict(enumerate(rows)), 3) == pytest.approx(0.1)
    assert spread(dict(enumerate(rows)), 1) is None
    assert spread({0: rows[0], 3: rows[3]}, 3) is None
    assert spread({0: rows[0], 1: rows[1], 3: rows[3]}, 3) == pytest.approx(0.1 / 2**0.5)


def output(model: nn.Module, batch: Any) -> Tensor:
    """An F that is moved by exactly what `nudged` is given."""
    values: Tensor = model(batch[0])[:, 0]
    return values


def asked_again(folder: Path, how: Train, refused: bool, **given: Any) -> None:
    if refused:
        with pytest.raises(StoreError, match="of another train"):
            ask(folder, how, **given)
    else:
        ask(folder, how, **given)


@pytest.mark.parametrize(("size", "refused"), [(0.8, False), (1.2, True)])
@every_kind
def test_the_limit_is_a_tenth_of_what_the_subsets_of_a_run_differ_by(
    subsets: Subsets, size: float, refused: bool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"subsets": subsets, "task": task(measure=output)}
    truth = ask(tmp_path, nudged(0.0), **given)
    among = float(truth.values.var(1).mean().sqrt())
    asked_again(tmp_path, nudged(size * 0.1 * among), refused, **given)


@pytest.mark.parametrize(("size", "refused"), [(2.5, False), (3.5, True)])
def test_a_function_may_be_off_by_three_times_its_own_noise(size: float, refused: bool, tmp_path: Path) -> None:
    calls, own = iter(range(10**6)), task(measure=output)

    def restless(subset: Tensor, seed: int) -> nn.Module:
        return nudged(float(next(calls) == 1))(subset, seed)  # the second training is the first again

    assert ask(tmp_path, named(restless), task=own).about["noise"] == pytest.approx(1.0)
    asked_again(tmp_path, nudged(size), refused, task=own)


@pytest.mark.parametrize(("size", "refused"), [(1e-5, False), (0.05, True)])
def test_one_kept_model_must_be_the_same_to_a_thousandth(size: float, refused: bool, tmp_path: Path) -> None:
    begun(tmp_path, train, 1, runs=1)
    if refused:
        with pytest.raises(StoreError, match=r"trained again, differs by .*, where it is"):
            ask(tmp_path, nudged(size), runs=1)
    else:
        ask(tmp_path, nudged(size), runs=1)


def test_a_function_with_arguments_bound_is_known_by_them(tmp_path: Path) -> None:
    def scaled(factor: float, subset: Tensor, seed: int, *, shift: float = 0.0) -> nn.Module:
        model = train(subset, seed)
        model.get_parameter("2.bias").data.mul_(factor).add_(shift)
        return model

    ask(tmp_path, partial(scaled, 1.0, shift=0.0))
    name = re.escape(scaled.__qualname__)
    with pytest.raises(StoreError, match=rf"training was {name}\(1\.0, shift=0\.0\), is {name}\(1\.0, shift=0\.5\)"):
        ask(tmp_path, partial(scaled, 1.0, shift=0.5))
    assert describe_function(partial(describe_function, build)) == "describe_function(<function build>)"


def test_a_seed_may_be_ignored_where_there_is_one_run() -> None:
    assert ask(how=stubborn, runs=1).values.isfinite().all()


def test_a_training_that_diverges_is_named_and_not_kept(tmp_path: Path) -> None:
    which = r"subset 3 \(all but .* and \d+ more\) in run 1 with seed \d+"
    with pytest.raises(DataError, match=rf"query 0 is nan under the model retrained on {which}: the training diverged"):
        ask(tmp_path, diverging)
    assert Truth.load(tmp_path).runs == 1  # the second has it
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
    for wrong in (0, 2.5, "2", True):
        with pytest.raises(DataError, match=f"runs must be a whole number of at least 1, got {wrong!r}"):
            ask(runs=wrong)
    for wrong in (-1, 1.5, "a"):
        with pytest.raises(DataError, match=f"seed must be a whole number of at least 0, got {wrong!r}"):
            ask(seed=wrong)
    with pytest.raises(DataError, match="subsets are made for 20 training examples, the data has 24"):
        ask(subsets=Subsets.halves(20))
    elsewhere = replace(together(), data=Data(points(N, 0), device=torch.device("meta")))
    with pytest.raises(DataError, match="trained on meta and measured on cpu"):
        ask(how=elsewhere)


def test_effects_are_changes_against_the_models_that_lack_nothing() -> None:
    truth = ask(subsets=REMOVALS)
    assert truth.lacking == [(0,), (1,), (2,), (3,)]
    assert truth.effects.shape == (RUNS, QUERIES, 4)
    expected = truth.values[1, 1 + 3] - truth.values[1, 0]
    torch.testing.assert_close(truth.effects[1, :, 3], expected)
    with pytest.raises(DataError, match="these are trained on halves"):
        _ = ask().effects
    with pytest.raises(DataError, match="add a baseline"):
        _ = ask(subsets=Subsets("removal", N, Sources.per_example(N), ((0,), (1, 2)))).effects


def test_a_truth_says_what_it_is() -> None:
    assert repr(ask()) == "Truth(halves: 5 subsets × 2 runs, loss of 5 queries)"
    assert repr(ask(runs=1, queries=points(1, 1))) == "Truth(halves: 5 subsets × 1 run, loss of 1 query)"


def test_a_truth_tells_the_same_whether_it_is_kept_or_not(tmp_path: Path) -> None:
    kept, read, loose = ask(tmp_path).about, Truth.load(tmp_path).about, ask().about
    assert kept == read
    assert {**loose, "created": ""} == {**kept, "created": ""}
    assert loose["at_once"] == 2 and loose["device"] == "cpu" and "torch" in loose["versions"]


def test_a_truth_of_an_earlier_version_is_read_but_not_continued(tmp_path: Path) -> None:
    values = ask(tmp_path).values
    file = tmp_path / "truth.json"
    about = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"}
    file.write_text(json.dumps(sealed({**about, "schema": 1})))
    assert torch.equal(Truth.load(tmp_path).values, values)
    with pytest.raises(StoreError, match=r"made by an earlier version.*read but not continued"):
        ask(tmp_path)


def test_more_runs_and_more_halves_begin_with_the_same_models() -> None:
    few, more = ask(), ask(runs=3, subsets=Subsets.halves(N, 8))
    torch.testing.assert_close(more.values[:RUNS, :5], few.values, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("at_once", [1, 2, 3, None])
def test_models_of_a_removal_share_their_dropout_however_many_train_at_once(at_once: int | None) -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()

    given: dict[str, Any] = {"task": Task.classifier(dropping()), "subsets": REMOVALS}
    one, some = (ask(how=together(k, build=dropping), **given).values for k in (5, at_once))
    torch.testing.assert_close(some, one, rtol=1e-10, atol=1e-13)


def test_only_scores_of_the_same_queries_and_sources_are_held_against_a_truth() -> None:
    sources, own, queries = REMOVALS.sources, task(), points(QUERIES, 1)
    truth = ask(subsets=REMOVALS, task=own)
    store = simulate(own, points(N, 0), sources, Plan(steps=2, lr=0.1), progress=False)
    result = attribute(own, store, queries, batch_size=2, progress=False)
    assert len(evaluate(result, truth)) == 3
    x, y = queries
    for other in ((x.flip(0), y.flip(0)), OTHER):
        with pytest.raises(DataError, match="other queries than the ground truth"):
            evaluate(attribute(own, store, other, progress=False), truth)
    swapped = Sources.by_label([3 - i % 4 for i in range(N)])
    wrong = simulate(own, points(N, 0), swapped, Plan(steps=2, lr=0.1), progress=False)
    with pytest.raises(DataError, match="sources with other members"):
        evaluate(attribute(own, wrong, queries, progress=False), truth)
