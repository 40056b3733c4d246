"""A recorded run is repeated without each source: what is stored, what is refused, and what a store says of it."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from imprint import DataError, Plan, PlanError, SimulationError, Store, StoreError, Task, TaskError, simulate
from imprint.data import Data
from imprint.errors import ReliabilityWarning
from imprint.simulation.engines import Chunk
from imprint.store.fingerprint import of_data
from imprint.store.values import sealed
from tests.simulation.killing import Killed, contents, dies_after
from tests.simulation.removals import (
    SOURCES,
    STEPS,
    HandMadeRun,
    N,
    Removing,
    make_data,
    make_model,
    make_plan,
    make_task,
    removing_engine,
    train,
)


@pytest.fixture(autouse=True)
def _removing() -> Iterator[None]:
    with removing_engine():
        yield


def replay(out: Path | None = None, plan: Plan | None = None, **options: Any) -> Store:
    given = {"run": HandMadeRun.of(make_model()), "progress": False, **options}
    return simulate(make_task(), make_data(), SOURCES, plan or make_plan(), out=out, **given)


def test_rows_are_the_distance_of_each_removal_from_the_recorded_end_times_n() -> None:
    store, model = replay(), make_model()
    start = {name: t.clone() for name, t in model.state_dict().items()}
    end = train(model, start)
    rows = store.imprints(0, 0, len(SOURCES), torch.device("cpu"))
    assert {"1.running_mean", "1.running_var", "0.weight"} <= set(rows) and "1.num_batches_tracked" not in rows
    base = store.base(0, torch.device("cpu"))
    for index, members in enumerate(SOURCES.members):
        without = train(model, start, tuple(members))
        for name, row in rows.items():
            torch.testing.assert_close(base[name], end[name], rtol=0, atol=0)
            torch.testing.assert_close(row[index], N * (end[name] - without[name]), rtol=1e-12, atol=1e-12)


def test_a_store_says_which_question_it_answers_and_how_calm_the_run_is() -> None:
    store = replay()
    measured = store.checkpoints[0].measured
    assert store.question == "this_run" and store.removes
    assert store.manifest.request.recording == HandMadeRun.of(make_model()).sha256
    assert list(store.manifest.request.buffers) == ["1.running_mean", "1.running_var"]
    assert measured.chaos is not None and 0 < measured.chaos < 0.3
    assert measured.deviation == 0
    path = simulate(make_task(), make_data(), SOURCES, Plan(steps=1, lr=0.1), progress=False)
    assert path.question == "expected" and not path.removes
    assert path.checkpoints[0].measured.chaos is None and path.noise(0, torch.device("cpu")) is None


def test_a_model_that_was_trained_on_after_the_run_is_named_and_kept_as_a_warning() -> None:
    run, model = HandMadeRun.of(make_model()), make_model()
    model.load_state_dict(train(model, run.state(STEPS)))
    with pytest.warns(ReliabilityWarning, match=r"neither the start nor the end of the recorded run \('0.weight' diff"):
        store = simulate(make_task(model), make_data(), SOURCES, make_plan(), run=run, progress=False)
    assert any("describe the model at the recorded end, not this one" in warning for warning in store.warnings)


@pytest.mark.parametrize("step", [0, STEPS])
@pytest.mark.parametrize("saved_as", [torch.float64, torch.float32, torch.bfloat16])
def test_the_start_and_the_end_of_a_run_are_recognised_however_they_were_saved(
    step: int, saved_as: torch.dtype
) -> None:
    run, model = HandMadeRun.of(make_model()), make_model()
    model.load_state_dict({n: t.to(saved_as) if t.is_floating_point() else t for n, t in run.state(step).items()})
    store = simulate(make_task(model), make_data(), SOURCES, make_plan(), run=run, progress=False)
    assert not store.warnings


def test_rows_of_perturbed_starts_are_kept_and_verified(tmp_path: Path) -> None:
    store = replay(tmp_path / "store")
    noise = store.noise(0, torch.device("cpu"))
    assert noise is not None and {len(rows) for rows in noise.values()} == {2}
    file = tmp_path / "store" / "checkpoint-000" / "noise.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"noise\.safetensors is damaged: it differs from its checksum"):
        Store(tmp_path / "store").verify()


def test_a_killed_replay_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay(tmp_path / "whole", memory="1kB")  # a source at a time, each with a file of its own
    assert len(whole.checkpoints[0].imprints) == len(SOURCES)
    for files in (1, 2, 4):  # after the base, after the noise, between two sources
        with monkeypatch.context() as patch:
            patch.setattr("imprint.store.finished.append", dies_after(files))
            with pytest.raises(Killed):
                replay(tmp_path / f"killed-{files}", memory="1kB")
        assert contents(replay(tmp_path / f"killed-{files}", memory="1kB").path) == contents(whole.path)


@pytest.mark.wide
def test_a_damaged_file_of_noise_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay(tmp_path / "whole", memory="1kB")
    with monkeypatch.context() as patch:
        patch.setattr("imprint.store.finished.append", dies_after(4))
        with pytest.raises(Killed):
            replay(tmp_path / "killed", memory="1kB")
    (tmp_path / "killed" / "checkpoint-000" / "noise.safetensors").write_bytes(b"nothing")
    assert contents(replay(tmp_path / "killed", memory="1kB").path) == contents(whole.path)


def test_chunks_do_not_change_what_was_measured() -> None:
    one, all_at_once = replay(memory="1kB"), replay(memory="1GB")
    assert one.checkpoints[0].measured == all_at_once.checkpoints[0].measured


def test_without_a_plan_the_run_is_repeated() -> None:
    run: Any = HandMadeRun.of(make_model())
    store = simulate(make_task(), make_data(), SOURCES, run=run, progress=False)
    assert store.question == "this_run"


def test_an_engine_without_its_run_and_a_run_without_its_engine_are_refused() -> None:
    with pytest.raises(PlanError, match=r"removing engine repeats a recorded run: record the training"):
        replay(run=None)
    with pytest.raises(PlanError, match=r"tangent engine .* does not repeat a run: give checkpoints=run\.paths"):
        replay(plan=Plan(engine="tangent", steps=1))
    with pytest.raises(PlanError, match="give run= or checkpoints=, not both"):
        replay(checkpoints=[make_model().state_dict()])
    with pytest.raises(PlanError, match=r"run must be .* got int"):
        replay(run=7)


def test_settings_of_a_descent_are_refused() -> None:
    for setting in ({"steps": 3}, {"lr": 0.1}, {"damping": 0.1}):
        with pytest.raises(
            PlanError, match="is not for the removing engine, which repeats the steps of a recorded run"
        ):
            make_plan(**setting)
    with pytest.raises(PlanError, match="start belongs to engine="):
        Plan(engine="tangent", start=2)
    with pytest.raises(PlanError, match=f"start is {STEPS}, and the recorded run has {STEPS} steps"):
        replay(plan=make_plan(start=STEPS))


def test_a_run_of_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="the recorded run has 25 training examples, the data has 24"):
        replay(run=replace(HandMadeRun.of(make_model()), n=25))
    other = of_data(Data((make_data()[0] + 1, make_data()[1]), device=torch.device("cpu"), batch_size=N))
    with pytest.raises(DataError, match="the run was recorded with other training data"):
        replay(run=replace(HandMadeRun.of(make_model()), data=other))


def test_parameters_that_were_trained_but_are_not_selected_are_refused_by_name() -> None:
    task = make_task(parameters=["0.*", "1.*"])
    with pytest.raises(TaskError, match=r"the recorded run trained .*3\.bias.*3\.weight.* which the task does not"):
        simulate(task, make_data(), SOURCES, make_plan(), run=HandMadeRun.of(make_model()), progress=False)


def test_why_a_task_lacks_trained_parameters_is_said_where_it_can_be_told() -> None:
    left_frozen = make_model()
    left_frozen.get_submodule("0").requires_grad_(False)
    for model, words in (
        (left_frozen, r"select: 0\.bias, 0\.weight is frozen now. Call model\.requires_grad_\(True\) before building"),
        (torch.compile(make_model(), backend="eager"), r"is a compiled one.* Build the task from .* model\._orig_mod"),
    ):
        with pytest.raises(TaskError, match=words):
            simulate(
                Task.classifier(cast(nn.Module, model)),
                make_data(), SOURCES, make_plan(), run=HandMadeRun.of(make_model()), progress=False,
            )  # fmt: skip


def test_frozen_parameters_come_from_the_task() -> None:
    model = make_model()
    model.get_submodule("0").requires_grad_(False)
    run = HandMadeRun.of(model)
    for state in run.states.values():
        del state["0.weight"], state["0.bias"]
    task = make_task(model)
    store = simulate(task, make_data(), SOURCES, make_plan(), run=run, progress=False)
    torch.testing.assert_close(store.state(0, task)["0.weight"], model.get_parameter("0.weight"))


def test_another_run_is_not_resumed_into_a_folder(tmp_path: Path) -> None:
    replay(tmp_path / "store")
    other = make_model()
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with pytest.raises(StoreError, match=r"made otherwise: "):
        replay(tmp_path / "store", run=HandMadeRun.of(other))
    same_end = HandMadeRun.of(make_model())
    same_end.states[0] = {name: 2 * t for name, t in same_end.states[0].items()}
    with pytest.raises(StoreError, match=r"made otherwise: the recorded run is another"):
        replay(tmp_path / "store", run=same_end)


def test_a_store_is_repeated_with_its_run(tmp_path: Path) -> None:
    first = replay(tmp_path / "first", memory="1kB")
    again = replay(tmp_path / "again", repeat=first)
    assert contents(again.path) == contents(first.path)


def test_noise_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Removing.simulate

    def simulate_wrongly(self: Removing, *given: Any) -> Chunk:
        chunk = original(self, *given)
        noise = {name: rows * torch.nan for name, rows in (chunk.noise or {}).items()}
        return replace(chunk, noise=noise or None)

    monkeypatch.setattr(Removing, "simulate", simulate_wrongly)
    with pytest.raises(SimulationError, match="slightly perturbed start is not finite"):
        replay()


def test_a_model_without_buffers_has_rows_of_parameters_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    store = simulate(make_task(model), make_data(), SOURCES, make_plan(), run=HandMadeRun.of(model), progress=False)
    assert store.manifest.request.buffers == {}


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("question",), "expected", r"question must be 'this_run', which the engine of the plan answers"),
        (("question",), "both", r"question must be 'this_run' or 'expected'"),
        (("request", "recording"), None, r"request\.recording must be there for engines that repeat a recorded run"),
        (("request", "recording"), "abc", r"request\.recording must be a SHA-256"),
        (("request", "buffers", "0.weight"), {"shape": [4, 3], "dtype": "torch.float64"}, r"which is a parameter"),
        (("checkpoints", 0, "decided", "noise_rows"), 0, r"noise and .*noise_rows belong together"),
        (("checkpoints", 0, "noise"), None, r"noise and .*noise_rows belong together"),
        (("checkpoints", 0, "measured", "chaos"), -1.0, r"measured\.chaos must be"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    place: tuple[Any, ...], value: object, says: str, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "store")
    manifest = tmp_path / "store" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]
    inner = content
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    manifest.write_text(json.dumps(sealed(content)))
    with pytest.raises(StoreError, match=says):
        Store(tmp_path / "store")


def test_fewer_rows_of_noise_than_decided_are_found(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "store")
    manifest = tmp_path / "store" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]
    content["checkpoints"][0]["decided"]["noise_rows"] = 3
    manifest.write_text(json.dumps(sealed(content)))
    with pytest.raises(StoreError, match=r"noise\.safetensors does not fit the manifest: tensor .* is \(2, "):
        Store(tmp_path / "store").verify()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with removing_engine():
        return replay(tmp_path_factory.mktemp("finished") / "store").path
