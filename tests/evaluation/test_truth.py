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

from imprint import DataError, Plan, Sources, StoreError, Task, TaskError, attribute, simulate
from imprint.data import Data
from imprint.evaluation.metrics import evaluate
from imprint.evaluation.retraining import Together, Train, retrain
from imprint.evaluation.subsets import ORDER, Subsets, derived
from imprint.evaluation.training import Training
from imprint.evaluation.truth import Truth
from imprint.files import LOCK
from imprint.progress import Advance
from imprint.values import sealed
from tests.test_recording import Tied

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
    order = torch.Generator().manual_seed(derived(seed, ORDER))
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
    "runs": ({"runs": 3}, "runs was 2, is 3"),
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
    "later": (lambda text: text.replace('"schema": 2', '"schema": 3'), "has schema 3, this version reads up to 2"),
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
    if seed == HALVES.seeds(1, 0)[3]:
        model.get_parameter("0.weight").data.fill_(torch.nan)
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
    assert "gives two models for one subset and seed, which are" in caplog.text
    assert ("differ by more than what they lack" in caplog.text) == (subsets is REMOVALS)
    assert truth.about["noise"] > 1e-3


def named(how: Train, name: str = "mine") -> Train:
    how.__qualname__ = name
    return how


def begun(folder: Path, how: Train, models: int) -> None:
    """A truth with so many models of a function."""
    calls = iter(range(models + EXTRA))

    def dying(subset: Tensor, seed: int) -> nn.Module:
        if next(calls, None) is None:
            raise Killed
        return how(subset, seed)

    with pytest.raises(Killed):
        ask(folder, named(dying))


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
    with pytest.raises(StoreError, match=r"of another train\(subset, seed\): trained again, model 0 has an F that"):
        ask(tmp_path, nudged(0.5))
    assert contents(tmp_path) == kept
    ask(tmp_path, nudged(0.0))
    ask(tmp_path, nudged(0.5))  # nothing is left to train


def test_a_small_deviation_is_said_and_a_tiny_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for size in (1e-6, 1e-2):
        begun(tmp_path / str(size), train, 5)
        assert not caplog.text
        ask(tmp_path / str(size), nudged(size))
    assert "does not quite give the models in" in caplog.text


def test_a_function_that_never_repeats_itself_may_still_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    begun(tmp_path, unseeded, 5)
    assert ask(tmp_path, named(lambda subset, seed: unseeded(subset, seed))).runs == RUNS


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda subset: train(subset, 0), r"called as train\(subset, seed\), this one takes \(subset\): too many"),
        (lambda subset, seed, lr: train(subset, seed), "missing a required argument: 'lr'"),
        ("train", "must be a function of .* or a Together, got a str"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(how: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=how)


def test_arguments_of_another_kind_are_refused_in_words() -> None:
    with pytest.raises(DataError, match=r"must be made by Subsets, got a Sources: Subsets\.halves\(sources\)"):
        ask(subsets=Sources.per_example(N))
    with pytest.raises(DataError, match="the task measures another model than those that are trained"):
        ask(task=Task.classifier(nn.Linear(4, 3).double()))
    with pytest.raises(TaskError, match=r"must be an imprint\.Task, got a Sequential"):
        ask(task=build())


def test_a_seed_may_be_ignored_where_there_is_one_run() -> None:
    assert ask(how=stubborn, runs=1).values.isfinite().all()


def test_a_training_that_diverges_is_named_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"query 0 is nan under the model retrained with seed \d+: the training"):
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
    expected = truth.values[1, 1 + 3] - truth.values[1, 0]
    torch.testing.assert_close(truth.effects[1, :, 3], expected)
    with pytest.raises(DataError, match="these are halves"):
        _ = ask().effects
    with pytest.raises(DataError, match="ask for a baseline"):
        _ = ask(subsets=Subsets.without(N, [[0], [1, 2]])).effects


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
        with pytest.raises(DataError, match="other queries than the truth"):
            evaluate(attribute(own, store, other, progress=False), truth)
    swapped = Sources.by_label([3 - i % 4 for i in range(N)])
    wrong = simulate(own, points(N, 0), swapped, Plan(steps=2, lr=0.1), progress=False)
    with pytest.raises(DataError, match="sources with other members"):
        evaluate(attribute(own, wrong, queries, progress=False), truth)
