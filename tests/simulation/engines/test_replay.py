"""The replay engine through `simulate`: its rows, its figures, and what it warns of."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from imprint import Attribution, Plan, ReadoutError, RunRecorder, Sources, Store, Task, attribute, simulate
from imprint.cli.inspection import inspect_store
from imprint.errors import ReliabilityWarning, SimulationError
from imprint.recording.seeding import seed_everything
from imprint.runtime.progress import Advance
from imprint.task import Parameters
from tests.simulation.engines.trainings import (
    Adapting,
    Counted,
    CountedByTensor,
    Decaying,
    MemoryRun,
    Training,
    classification,
    mlp,
)
from tests.simulation.killing import Killed, contents, dies_after, dies_at

SOURCES = Sources.groups({"ann": [0, 1, 2, 3, 4, 5, 6], "bob": [7, 11, 30], "cid": [39], "dan": [3, 30, 31]})
CPU = torch.device("cpu")
ADAM = torch.optim.Adam


def replay(training: Training, run: MemoryRun, plan: Plan | None = None, **options: Any) -> Store:
    trained = replace(training, model=copy.deepcopy(training.model))
    trained.model.load_state_dict(run.state(len(run.steps)))
    given = {"progress": False, **options}
    return simulate(trained.task(), training.data, SOURCES, plan, run=run, **given)


def check_rows(store: Store, training: Training, end: Parameters) -> None:
    """Rows are N(θ − θ₋b), with every training without a source written by hand."""
    found = store.imprints(0, 0, len(SOURCES), training.data[0].device)
    ends = [training.run(list(members))[0] for members in SOURCES.members]
    for name, tensor in found.items():
        expected = torch.stack([(end[name] - other[name]) * training.n for other in ends])
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12, msg=name)


class Unstackable(nn.Module):
    """A layer whose code depends on values, which vmap refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 if float(x.detach().abs().mean()) > 1e-3 else x


class Centred(nn.Module):
    """A layer without a state that lets examples of a batch see each other in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


TRAININGS = {
    "stacked": lambda: Training(mlp(nn.Dropout(0.3)), classification(), ADAM, {"lr": 0.02}, steps=12),
    "without vmap": lambda: Training(mlp(nn.Dropout(0.3), Unstackable()), classification(), steps=12),
    "a closure": lambda: Training(mlp(), classification(), torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}, steps=4),
    "Adafactor": lambda: Training(mlp(), classification(), torch.optim.Adafactor, {"lr": 0.1}, steps=6),
    "an adapted step size": lambda: Training(mlp(), classification(), Adapting, {"lr": 0.3}, steps=12),
    "counted steps": lambda: Training(mlp(), classification(), Decaying, {"lr": 0.3}, steps=12),
    "steps counted by itself": lambda: Training(mlp(), classification(), Counted, {"lr": 0.3}, steps=12),
    "without vmap, steps counted": lambda: Training(
        mlp(Unstackable()), classification(), Counted, {"lr": 0.3}, steps=12
    ),
    "steps counted by a tensor": lambda: Training(mlp(), classification(), CountedByTensor, {"lr": 0.3}, steps=12),
    "without vmap, counted by a tensor": lambda: Training(
        mlp(Unstackable()), classification(), CountedByTensor, {"lr": 0.3}, steps=12
    ),
    "batch norm": lambda: Training(
        mlp(nn.BatchNorm1d(6)), classification(), steps=12, leaves_out=True, accumulate=2, batch=6
    ),
    "batch norm and Adam": lambda: Training(
        mlp(nn.BatchNorm1d(6), nn.Tanh()), classification(), ADAM, {"lr": 0.02}, steps=8, leaves_out=True
    ),
    "losses that see each other": lambda: Training(mlp(Centred()), classification(), steps=8, leaves_out=True),
}
REASONS = {
    "without vmap": "vmap does not support this model",
    "without vmap, steps counted": "vmap does not support this model",
    "without vmap, counted by a tensor": "vmap does not support this model",
    "a closure": "LBFGS evaluates the loss itself",
    "Adafactor": "Adafactor moves a stack of rows in another way",
    "an adapted step size": "Adapting moves a stack of rows in another way",
    "batch norm": "batch normalisation lets examples of a batch see each other",
    "batch norm and Adam": "batch normalisation lets examples of a batch see each other",
    "losses that see each other": "the loss of an example depends on the others",
}


@pytest.mark.parametrize("kind", TRAININGS)
def test_rows_are_where_a_training_without_the_source_ends(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    training = TRAININGS[kind]()
    end, run = training.run()
    store = replay(training, run)
    check_rows(store, training, end)
    reason = store.checkpoints[0].measured.one_by_one
    assert (reason or "").startswith(REASONS.get(kind, ""))
    assert (reason is None) == (kind not in REASONS)
    assert reason is None or f"runs are replayed one by one: {reason}" in caplog.text
    assert store.question == "this_run" and store.checkpoints[0].steps == training.steps
    measured = store.checkpoints[0].measured
    assert measured.deviation is not None and measured.deviation < 1e-9
    assert measured.chaos is not None and 0 < measured.chaos < 0.3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", ["stacked", "without vmap", "batch norm and Adam"])
def test_rows_on_cuda_are_where_a_training_there_ends(kind: str) -> None:
    training = TRAININGS[kind]()
    training = replace(training, model=training.model.cuda(), data=tuple(t.cuda() for t in training.data))
    end, run = training.run()
    check_rows(replay(training, run), training, end)


class Mixed(nn.Module):
    """A layer that mixes each example with another one of its batch, drawn at random, in training."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.8 * x + 0.2 * x[torch.randperm(len(x))] if self.training else x


def test_examples_that_are_mixed_get_other_partners_and_the_store_says_so() -> None:
    training = Training(mlp(Mixed()), classification(), steps=4, leaves_out=True)
    end, run = training.run()
    with pytest.warns(ReliabilityWarning, match="the other examples get other random numbers than in training"):
        store = replay(training, run)
    check_rows(store, training, end)  # by hand, too, the others are drawn afresh from the step's seed
    assert any("whom to mix it with" in warning for warning in store.warnings)


def test_rows_of_batch_norm_hold_the_running_statistics() -> None:
    training = TRAININGS["batch norm"]()
    _, run = training.run()
    found = replay(training, run).imprints(0, 0, 1, CPU)
    assert {"2.running_mean", "2.running_var"} <= found.keys()
    assert "2.num_batches_tracked" not in found
    assert float(found["2.running_mean"].abs().max()) > 0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stacked", "this run: if this source had had weight 0 in the training run"),
        ("batch norm", "this run: if this source had been left out of every batch of the training run"),
    ],
)
def test_results_say_whether_a_source_had_weight_0_or_was_left_out_of_batches(
    kind: str, words: str, tmp_path: Path
) -> None:
    training = TRAININGS[kind]()
    end, run = training.run()
    store = replay(training, run)
    training.model.load_state_dict(end)
    queries = tuple(column[:3] for column in training.data)
    result = attribute(training.task(), store, queries, progress=False)
    result.save(tmp_path / "scores.safetensors")
    assert result.labels.meaning.startswith(words) and words in repr(result)
    assert Attribution.load(tmp_path / "scores.safetensors").labels.meaning == result.labels.meaning
    assert (result - result).labels.meaning == result.labels.meaning
    assert inspect_store(store)["meaning"] == result.labels.meaning


def test_an_emptied_batch_contributes_nothing_and_the_optimiser_still_steps() -> None:
    """Source "ann" is all of some micro-batches; momentum and weight decay go on there."""
    sources = list(range(7))
    training = Training(
        mlp(nn.BatchNorm1d(6)),
        classification(),
        settings={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        leaves_out=True,
        fixed_batches=((sources,), (list(range(10, 18)),), (sources, list(range(20, 27))), (list(range(10, 18)),)),
    )
    end, run = training.run()
    check_rows(replay(training, run), training, end)


def test_rows_do_not_depend_on_how_many_are_stacked() -> None:
    training = TRAININGS["stacked"]()
    _, run = training.run()
    whole, parts = replay(training, run), replay(training, run, memory="1B")
    assert parts.checkpoints[0].choices.rows_at_once == 1
    for name, tensor in whole.imprints(0, 0, 4, CPU).items():
        torch.testing.assert_close(tensor, parts.imprints(0, 0, 4, CPU)[name], rtol=1e-10, atol=1e-10)
    assert whole.checkpoints[0].measured.chaos == pytest.approx(parts.checkpoints[0].measured.chaos, rel=1e-4)


@pytest.mark.usefixtures("snapshots_at_every_step")
@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("stacked", None),
        ("batch norm", None),
        pytest.param("an adapted step size", None, marks=pytest.mark.wide),
        ("counted steps", None),
        ("steps counted by itself", None),
        pytest.param("steps counted by a tensor", None, marks=pytest.mark.wide),
        pytest.param("without vmap, steps counted", None, marks=pytest.mark.wide),
        pytest.param("without vmap, counted by a tensor", None, marks=pytest.mark.wide),
        pytest.param("stacked", "1B", marks=pytest.mark.wide),
        pytest.param("a closure", None, marks=pytest.mark.wide),
        pytest.param("without vmap", None, marks=pytest.mark.wide),
    ],
)
def test_a_killed_replay_resumes_to_the_bit(kind: str, memory: str | None, tmp_path: Path) -> None:
    training = TRAININGS[kind]()
    _, run = training.run()
    whole = replay(training, run, out=tmp_path / "whole", memory=memory)
    for progress in (dies_after(training.steps // 2), dies_at(0.3), dies_at(0.8)):
        with pytest.raises(Killed):
            replay(training, run, out=tmp_path / "killed", memory=memory, progress=progress)
    replay(training, run, out=tmp_path / "killed", memory=memory)
    assert contents(tmp_path / "killed") == contents(whole.path)


def count_calls(calls: list[int]) -> Advance:
    return lambda done, total, /: calls.append(done)


class Listener:
    """Hears what a replay does before and beside its rows."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def __call__(self, done: int, total: int, /) -> None: ...

    def announce(self, phase: str, /) -> None:
        self.phases.append(phase)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_replay_names_what_it_does_while_no_source_makes_a_step(stacked: bool, tmp_path: Path) -> None:
    training, heard = replace(TRAININGS["stacked"](), steps=8), Listener()
    _, run = training.run()
    replay(training, run, Plan(engine="replay", stacked=stacked), progress=heard)
    tried = "runs can be replayed together" if stacked else "examples of a batch see each other"
    assert heard.phases[0] == f"trying whether {tried}"
    assert sum(phase.startswith("trying ") for phase in heard.phases) == 1
    repeated = [phase for phase in heard.phases if phase.startswith("repeating the run as it was")]
    assert repeated == [f"repeating the run as it was, step {step} of 8" for step in range(1, 9)]
    assert heard.phases.count("measuring how many sources fit into memory") == stacked
    perturbed = "replaying the run from a slightly perturbed start, step 8 of 8"
    assert heard.phases.count(perturbed) == (0 if stacked else 2)
    assert any(phase.startswith("beginning ") for phase in heard.phases) == stacked


@pytest.mark.usefixtures("snapshots_at_every_step")
@pytest.mark.parametrize(
    ("start", "killed"), [(0, [7]), pytest.param(25, [7, 8, 20], marks=pytest.mark.wide)], ids=["whole", "late"]
)
def test_a_replay_killed_before_its_rows_goes_on_where_it_was(start: int, killed: list[int], tmp_path: Path) -> None:
    """In the unperturbed replay, and in the replays that measure what a later start loses."""
    training = replace(TRAININGS["stacked"](), steps=30, keep=(10, 20))
    _, run = training.run()
    plan, whole, rest = Plan(engine="replay", start=start), list[int](), list[int]()
    replay(training, run, plan, out=tmp_path / "whole", progress=count_calls(whole))
    for calls in killed:
        with pytest.raises(Killed):
            replay(training, run, plan, out=tmp_path / "killed", progress=dies_after(calls))
    replay(training, run, plan, out=tmp_path / "killed", progress=count_calls(rest))
    assert len(rest) == len(whole) - sum(killed)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("snapshots_at_every_step")
def test_a_replay_that_is_refused_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    training = TRAININGS["stacked"]()
    _, run = training.run()
    wrong = replace(run.steps[9], batches=run.steps[0].batches)
    with pytest.raises(SimulationError, match="at step 10"):
        replay(training, replace(run, steps=(*run.steps[:9], wrong, *run.steps[10:])), out=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_noise_rows_begin_a_thousandth_away() -> None:
    training = replace(TRAININGS["stacked"](), settings={"lr": 1e-12})
    end, run = training.run()
    noise = replay(training, run).noise(0, CPU)
    assert noise is not None
    for name, tensor in noise.items():
        assert tensor.shape == (2, *end[name].shape)
        z = tensor / training.n / end[name] * 1e3
        assert 0.3 < float(z.square().mean().sqrt()) < 2
        assert not torch.equal(tensor[0], tensor[1])


def test_a_chaotic_run_is_called_so() -> None:
    training = Training(mlp(), classification(), ADAM, {"lr": 1.0}, steps=60)
    _, run = training.run()
    with pytest.warns(ReliabilityWarning, match="this run is chaotic: a start that differs by a thousandth"):
        store = replay(training, run)
    chaos = store.checkpoints[0].measured.chaos
    assert chaos is not None and chaos > 0.3
    assert any("this run is chaotic" in warning for warning in store.warnings)


def test_a_later_start_follows_the_recorded_state_and_says_what_it_loses() -> None:
    training = replace(TRAININGS["stacked"](), steps=30, keep=(10, 20))
    end, run = training.run()
    with pytest.warns(ReliabilityWarning, match="a replay that begins after 20 steps differs from one of the whole"):
        store = replay(training, run, Plan(engine="replay", start=25))
    measured = store.checkpoints[0].measured
    assert store.checkpoints[0].steps == 10
    assert measured.deviation is not None and measured.deviation < 1e-9
    assert measured.start_lost is not None and 0.3 < measured.start_lost < 1.5
    task, (x, y) = training.task(), training.data
    partial = attribute(task, store, (x[:3], y[:3]), progress=False)
    assert partial.labels.meaning.endswith("in the training run that produced this model, in its last 10 steps only")
    exact = replay(training, run, Plan(engine="replay", start=5))
    check_rows(exact, training, end)
    assert exact.checkpoints[0].measured.start_lost is None
    whole = attribute(task, exact, (x[:3], y[:3]), progress=False)
    assert whole.labels.meaning.endswith("in the training run that produced this model")
    with pytest.raises(ReadoutError, match=r"different questions.*in its last 10 steps only"):
        _ = whole - partial


def test_a_recorded_run_is_replayed_from_its_folder(tmp_path: Path) -> None:
    """A user's loop with dropout, clipping, accumulation and a schedule; the batch sizes differ."""
    (x, y), model = classification(), mlp(nn.Dropout(0.3))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 20)
    run = RunRecorder(tmp_path / "run", model, optimiser, data=(x, y), scheduler=scheduler)
    for indices in run.batches(len(x), 12, epochs=3):
        with run.step() as step:
            for half in indices.split(len(indices) // 2):
                step.batch(half, normaliser=len(indices))
                step.backward(nn.functional.cross_entropy(model(x[half]), y[half], reduction="sum") / len(indices))
            step.clip_grad_norm_(0.5)
            optimiser.step()
        scheduler.step()
    run.finish()
    store = simulate(Task.classifier(model), (x, y), SOURCES, run=tmp_path / "run", progress=False)
    measured = store.checkpoints[0].measured
    assert measured.one_by_one is None
    assert measured.deviation is not None and measured.deviation < 1e-9


@pytest.mark.parametrize("kind", ["stacked", "without vmap"])
def test_a_repeated_store_has_the_figures_of_the_first_one(kind: str, tmp_path: Path) -> None:
    """The deviation is measured in units of F, and relative to effects only once these are known."""
    training = TRAININGS[kind]()
    _, run = training.run()
    missed = {name: t + 1e-3 if t.is_floating_point() else t for name, t in run.state(training.steps).items()}
    off = replace(run, states={**run.states, training.steps: missed})
    first = replay(training, off, out=tmp_path / "first")
    again = replay(training, off, out=tmp_path / "again", repeat=first)
    assert (first.checkpoints[0].measured.deviation or 0) > 1e-3
    assert again.checkpoints[0].measured == first.checkpoints[0].measured
    assert contents(again.path) == contents(first.path)


def test_a_replay_leaves_the_users_random_numbers_alone() -> None:
    training = Training(mlp(nn.Dropout(0.3)), classification(), steps=2)
    _, run = training.run()
    seed_everything(3)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    seed_everything(3)
    replay(training, run)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected
