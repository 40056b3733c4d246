"""Changes of stores refuse what would be wrong silently, and take away nothing that somebody still needs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from imprint import Sources, Store, StoreError, Task, attribute, drop, merge, simulate, simulate_part, update
from imprint.errors import ReliabilityWarning, SimulationError, SourcesError
from imprint.model.dropout import _Draw
from imprint.store.draws import Draws
from imprint.store.parts import PartsFolder
from imprint.store.supplement import UPDATE
from tests.simulation.engines.trainings import Training, classification, cross_entropy, mlp
from tests.simulation.killing import PLANS, Killed, data, dies_after, task
from tests.simulation.test_parts_agree import DROPPING
from tests.simulation.test_parts_agree import SOURCES as SIX
from tests.simulation.test_parts_agree import task as dropping_task
from tests.simulation.test_updating import STATES, bring, make

BATCHES = PLANS["mini-batches"]
QUERIES = (data()[0][:2], data()[1][:2])


# --- what an update is made with


@pytest.mark.parametrize("change", [{"seed": 7}, {"momentum": 0.9}, {"batch_size": 8}, {"source_sample": 2}])
def test_further_checkpoints_take_no_other_plan(change: dict[str, Any], tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1, plan=BATCHES)
    with pytest.raises(StoreError, match=f"cannot be updated: the plan's {next(iter(change))} was"):
        bring(store, 0, 1, like=BATCHES, checkpoints=STATES, plan=replace(BATCHES, **change))
    assert Store(store.path).sha256 == store.sha256


def test_further_checkpoints_take_settings_of_their_own(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1, plan=BATCHES)
    longer = bring(store, 0, 1, checkpoints=STATES, plan=replace(BATCHES, lr=(0.2, 0.2, 0.1)))
    assert [checkpoint.decided.lr for checkpoint in longer.checkpoints if checkpoint.decided] == [0.2, 0.2, 0.1]


def test_an_update_draws_the_dropout_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = _Draw.__init__

    def widen() -> Store:
        return update(tmp_path / "store", dropping_task(), data(), SIX, progress=False)

    given = (dropping_task(), data(), SIX.select([0, 1, 2]), DROPPING)
    simulate(*given, out=tmp_path / "store", batch_size=5, progress=False)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("imprint.simulation.inputs.Inputs.draws", Draws(5, "cuda"))
        with pytest.raises(StoreError, match="drawn otherwise: device was cpu, is cuda, which draws other random"):
            widen()
    with monkeypatch.context() as elsewhere:  # and if nothing else shows it, then where the path ends
        elsewhere.setattr(_Draw, "__init__", lambda self, noise: draw(self, (*noise, 1)))
        with pytest.raises(StoreError, match="at checkpoint 0 the path ends elsewhere"):
            widen()
    assert len(widen()) == len(SIX)


def test_a_replay_takes_no_task_that_was_trained_otherwise(tmp_path: Path) -> None:
    """Though it is the same in evaluation, where probes look."""
    training = Training(mlp(), classification(), steps=4)
    _, run = training.run()
    sources = Sources.by_label([example % 4 for example in range(training.n)])

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * (1.2 if model.training else 1.0)

    given: dict[str, Any] = {"run": run, "progress": False}
    other = Task(training.model, loss=mean)
    store = simulate(training.task(), training.data, sources.select([0, 1]), out=tmp_path / "store", **given)
    for wanted in (sources, sources.select([0, 1]), sources.select([1])):
        with pytest.raises(SimulationError, match="differs from the recording at step 1: the loss is"):
            update(store, other, training.data, wanted, drop=True, **given)
    assert len(update(store, training.task(), training.data, sources, **given)) == 4
    simulate_part("1/2", training.task(), training.data, sources, out=tmp_path / "parts", **given)
    with pytest.raises(SimulationError, match="differs from the recording at step 1: the loss is"):
        simulate_part("2/2", other, training.data, sources, out=tmp_path / "parts", **given)


# --- what changes leave


def test_files_of_the_version_before_stay_until_something_changes(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1, 2)
    drop(store, "1", progress=False)
    with pytest.raises(SourcesError, match="typo"):
        drop(store, "typo")
    bring(store.path, 0, 2)
    assert len(attribute(task(), store, QUERIES, progress=False)) == 2
    drop(store.path, "2", progress=False)
    with pytest.raises(StoreError, match="open the store again"):
        attribute(task(), store, QUERIES, progress=False)


def test_an_unfinished_update_outlives_another_with_nothing_to_simulate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(tmp_path / "store", 0, 1)
    with pytest.raises(Killed):
        bring(store, 0, 1, 2, 3, progress=dies_after(9))
    kept = set((store.path / UPDATE).rglob("*.safetensors"))
    assert kept
    bring(store, 0, 1)
    bring(store, 1, drop=True)
    assert kept == set((store.path / UPDATE).rglob("*.safetensors"))
    assert caplog.text.count("update is of another update, and is kept: finish that, or delete it") == 2
    assert bring(store, 1, 2, 3).source_ids == ("1", "2", "3")
    assert not (store.path / UPDATE).exists()


@pytest.mark.parametrize("added", [{"places": (0, 1, 2)}, {"places": (0, 1), "checkpoints": STATES}])
def test_what_a_killed_update_had_put_into_the_store_goes_with_the_next_call(
    added: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, options = make(tmp_path / "store", 0, 1), dict(added)
    places = options.pop("places")

    def die(place: Path) -> None:
        raise Killed

    with monkeypatch.context() as killed:
        killed.setattr("imprint.simulation.updating.remove_supplement", die)
        with pytest.raises(Killed):
            bring(store, *places, **options)
    assert (store.path / UPDATE).is_dir()
    bring(store.path, *places, **options)
    assert not (store.path / UPDATE).exists() and "is kept" not in caplog.text


def test_erased_imprints_are_in_no_unfinished_work_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make(tmp_path / "store", 0, 1, 2)
    with pytest.raises(Killed):
        bring(store, 0, 1, 2, 3, 4, progress=dies_after(9))
    left_by_a_merge = PartsFolder(store.path).path / "1-of-2" / "checkpoint-000"
    left_by_a_merge.mkdir(parents=True)
    (left_by_a_merge / "imprints-00000.safetensors").write_bytes(b"rows")
    drop(store, "1", progress=False)
    drop(store.path, "1", erase=True, progress=False)
    used = {file.path for file in Store(store.path).manifest.files()}
    there = {str(place.relative_to(store.path)) for place in store.path.rglob("*") if place.is_file()}
    assert there == {*used, "manifest.json"}
    assert "files of earlier versions erased now" in caplog.text


# --- what is merged


@pytest.mark.filterwarnings("ignore:the training data was not hashed")
def test_stores_of_other_data_that_was_not_hashed_are_not_merged(tmp_path: Path) -> None:
    (x, y), plan = data(), PLANS["spectral, projected"]
    first, same, other = (
        make(tmp_path / name, place, plan=plan, hash_data="none", data=(scale * x, y))
        for name, place, scale in (("a", 1, 1), ("b", 2, 1), ("c", 3, 2))
    )
    with pytest.raises(
        StoreError, match=r"c is not of the base of .*a: loss on probe example .* was not hashed: it is"
    ):
        merge([first.path, other.path], tmp_path / "merged")
    with pytest.warns(ReliabilityWarning, match="the training data is taken to be the same"):
        assert len(merge([first.path, same.path], tmp_path / "merged", progress=False)) == 2


def test_a_merged_store_says_that_its_stores_were_made_otherwise(tmp_path: Path) -> None:
    stores = [make(tmp_path / "a", 1).path, make(tmp_path / "b", 2, batch_size=5).path]
    merged = merge(stores, tmp_path / "merged", progress=False)
    (warning,) = merged.warnings
    assert "were made under different circumstances (batch_size was 1024, then 5)" in warning


def test_a_merged_store_that_was_changed_is_not_returned_as_the_merged_one(tmp_path: Path) -> None:
    stores = [make(tmp_path / "a", 1).path, make(tmp_path / "b", 2).path]
    merged = merge(stores, tmp_path / "merged", progress=False)
    drop(merged, "1", progress=False)
    with pytest.raises(StoreError, match="holds these stores merged, and was changed since"):
        merge(stores, tmp_path / "merged")
