"""Parts of a ground truth, merged, hold what one retraining measures."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Part, PartsError, PlanError, StoreError, merge
from imprint.evaluation import Truth, merge_truth
from imprint.evaluation.together import Together, Train
from imprint.simulation.executors import InProcess
from imprint.store.files import Lock
from imprint.store.parts import PartsFolder
from tests.evaluation.truths import (
    HALVES,
    RUNS,
    Killed,
    N,
    ask,
    ask_part,
    contents,
    dies_after,
    every_kind,
    nudged,
    points,
    together,
    train,
)
from tests.simulation.killing import PLANS, run_part


def part(out: Path, text: str, how: Train | Together | None = None, **changes: Any) -> Part:
    return ask_part(out, text, how, **changes)


def all_parts(out: Path, of: int, how: Train | Together | None = None, **changes: Any) -> list[Part]:
    """Make all parts, the last one first."""
    return [part(out, f"{number}/{of}", how, **changes) for number in range(of, 0, -1)]


@every_kind
@pytest.mark.parametrize("of", [1, 3, 8])
@pytest.mark.parametrize("how", [together(), train], ids=["together", "one by one"])
def test_merged_parts_are_the_values_of_one_retraining(how: Any, of: int, subsets: Any, tmp_path: Path) -> None:
    made = all_parts(tmp_path / "truth", of, how, subsets=subsets)
    assert sum(each.count for each in made) == made[0].total == RUNS * len(subsets)
    truth = merge_truth(tmp_path / "truth")
    at_once = min(2, truth.about["at_once"])
    whole = ask(how=together(at_once) if isinstance(how, Together) else how, subsets=subsets)
    assert torch.equal(truth.values, whole.values)
    assert not (tmp_path / "truth" / "parts").exists()


def test_models_that_fit_one_batch_are_shared_out_all_the_same(tmp_path: Path) -> None:
    """Fewer are then trained together, which changes the last digits at most."""
    made = all_parts(tmp_path / "truth", 4, together(10))
    assert [each.count for each in made] == [1, 3, 3, 3]
    torch.testing.assert_close(
        merge_truth(tmp_path / "truth").values, ask(how=together(10)).values, rtol=1e-10, atol=1e-10
    )


def test_parts_that_die_train_nothing_twice(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        part(tmp_path / "truth", "1/2", progress=dies_after(5))
    told: list[int] = []
    part(tmp_path / "truth", "1/2", progress=lambda done, total: told.append(done))
    assert told[0] >= 4  # the epochs of the two models that were there
    part(tmp_path / "truth", "2/2")
    assert torch.equal(merge_truth(tmp_path / "truth").values, ask().values)


def test_a_finished_part_does_nothing_and_a_lost_file_is_made_again(tmp_path: Path) -> None:
    first = part(tmp_path / "truth", "1/2", train)
    assert part(tmp_path / "truth", "1/2", train) == first
    next(first.path.glob("values-*")).unlink()
    part(tmp_path / "truth", "2/2", train)
    with pytest.raises(StoreError, match=r"1-of-2 has no values of model \d+: make part 1/2 again"):
        merge_truth(tmp_path / "truth")
    part(tmp_path / "truth", "1/2", train)
    assert torch.equal(merge_truth(tmp_path / "truth").values, ask(how=train).values)
    merged = part(tmp_path / "truth", "1/2", train)
    assert merged.path == tmp_path / "truth" and merged.finished == 2


def test_parts_that_begin_at_the_same_time_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, raced = PartsFolder.publish, list[str]()

    def race(self: PartsFolder, name: str, fill: Any) -> bool:
        raced.append(name)
        if len(raced) == 1:
            part(tmp_path / "truth", "2/2", together(3))  # which would train others together
        return publish(self, name, fill)

    monkeypatch.setattr(PartsFolder, "publish", race)
    part(tmp_path / "truth", "1/2", together(2))
    assert torch.equal(merge_truth(tmp_path / "truth").values, ask(how=together(3)).values)


def test_merging_again_changes_nothing(tmp_path: Path) -> None:
    all_parts(tmp_path / "truth", 2)
    merge_truth(tmp_path / "truth")
    before = contents(tmp_path / "truth")
    merge_truth(tmp_path / "truth")
    assert contents(tmp_path / "truth") == before


def test_parts_in_other_folders_are_copied_and_stay(tmp_path: Path) -> None:
    part(tmp_path / "a", "1/2")
    shutil.copytree(tmp_path / "a" / "parts" / "shared", tmp_path / "b" / "parts" / "shared")
    part(tmp_path / "b", "2/2")
    truth = merge_truth([tmp_path / "a", tmp_path / "b"], tmp_path / "truth")
    assert torch.equal(truth.values, ask().values)
    assert (tmp_path / "a" / "parts" / "1-of-2").is_dir()
    part(tmp_path / "c", "2/2", together(1))
    with pytest.raises(StoreError, match="or were begun apart"):
        merge_truth([tmp_path / "a", tmp_path / "c"], tmp_path / "other")


def test_what_is_no_part_of_it_is_refused(tmp_path: Path) -> None:
    for text in ("0/2", "3/2", "a/b"):
        with pytest.raises(PlanError, match="part"):
            part(tmp_path / "truth", text)
    part(tmp_path / "truth", "1/2")
    with pytest.raises(StoreError, match="holds another ground truth: seed was 0, is 1"):
        part(tmp_path / "truth", "2/2", seed=1)
    with pytest.raises(StoreError, match="is being made with runs=2, not 3"):
        part(tmp_path / "truth", "2/2", runs=3)
    with pytest.raises(StoreError, match=r"is divided into 2 parts, not 3"):
        part(tmp_path / "truth", "2/3")
    with pytest.raises(StoreError, match=r"of its 2 parts, these are missing: 2/2"):
        merge_truth(tmp_path / "truth")
    with pytest.raises(StoreError, match=r"there is no truth.json\. Merge its parts first: imprint merge"):
        Truth.load(tmp_path / "truth")
    ask(tmp_path / "whole")
    with pytest.raises(StoreError, match="nothing holds no parts"):
        merge_truth(tmp_path / "nothing", tmp_path / "whole")
    with pytest.raises(StoreError, match="holds an unfinished simulation or retraining in parts"):
        ask(tmp_path / "truth")


def test_a_part_in_a_folder_that_was_begun_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        ask(tmp_path / "truth", progress=dies_after(6))
    with pytest.raises(StoreError, match=r"already holds ground truth \(6 of 10 models are there\)"):
        part(tmp_path / "truth", "1/2")
    ask(tmp_path / "truth")
    assert part(tmp_path / "truth", "1/2").finished == 2


def test_runs_are_added_to_merged_parts_without_parts(tmp_path: Path) -> None:
    all_parts(tmp_path / "truth", 2)
    before = merge_truth(tmp_path / "truth")
    with pytest.raises(StoreError, match="the others are trained without parts, by retrain"):
        part(tmp_path / "truth", "1/2", runs=before.runs + 1)
    more = ask(tmp_path / "truth", runs=before.runs + 1)
    assert more.runs == before.runs + 1 and torch.equal(more.values[: before.runs], before.values)


def test_a_changed_training_is_refused_where_a_part_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        part(tmp_path / "truth", "2/2", nudged(0.0), progress=dies_after(6))
    with pytest.raises(StoreError, match="holds models of another train"):
        part(tmp_path / "truth", "2/2", nudged(3.0))


@pytest.mark.parametrize("of", [2, 8])  # with a model that was tried, and without
@pytest.mark.parametrize("order", [1, -1])
def test_another_function_of_the_same_name_makes_no_part(of: int, order: int, tmp_path: Path) -> None:
    first, *others = range(1, of + 1)[::order]
    part(tmp_path / "truth", f"{first}/{of}", nudged(0.0))
    with pytest.raises(StoreError, match=r"parts holds models of another train\(subset, seed\): .* trained again"):
        part(tmp_path / "truth", f"{others[0]}/{of}", nudged(3.0))
    for number in others:
        part(tmp_path / "truth", f"{number}/{of}", nudged(0.0))
    assert torch.equal(merge_truth(tmp_path / "truth").values, ask(how=train).values)


def test_parts_with_and_without_data_do_not_mix(tmp_path: Path) -> None:
    part(tmp_path / "truth", "1/2", train, data=points(N, 0))
    with pytest.raises(StoreError, match="was begun with data=, and this part is made without"):
        part(tmp_path / "truth", "2/2", train)
    with pytest.raises(StoreError, match="the data changed"):
        part(tmp_path / "truth", "2/2", train, data=points(N, 3))


def test_a_failed_part_leaves_nothing(tmp_path: Path) -> None:
    def fails(subset: torch.Tensor, seed: int) -> torch.nn.Module:
        raise ValueError("as a training may")

    with pytest.raises(ValueError, match="as a training may"):
        part(tmp_path / "truth", "1/2", fails)
    assert not (tmp_path / "truth").exists()


@pytest.mark.parametrize("how", [together(), train], ids=["together", "one by one"])
def test_an_executor_makes_the_values_of_one_retraining(
    how: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"out": tmp_path / "truth", "how": how, "executor": InProcess(parts=3)}
    truth = ask(**given)
    assert torch.equal(truth.values, ask(how=how).values)
    assert torch.equal(ask(**given).values, truth.values)  # which are there
    with pytest.raises(PlanError, match="give it as out="):
        ask(**{**given, "out": None})
    with pytest.raises(StoreError, match="the others are trained without parts"):
        ask(**given, runs=RUNS + 1)


def test_models_that_fail_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seeds = HALVES.seeds(1, 0)

    def fails(subset: torch.Tensor, seed: int) -> Any:
        if seed == seeds[-1]:
            raise OSError("no such machine")
        return train(subset, seed)

    with pytest.raises(PartsError, match=r"1 of 2 parts could not be made \(2/2: OSError: no such machine\)"):
        ask(tmp_path / "truth", fails, executor=InProcess(parts=2))
    assert "part 2/2 (models 5, 6, 7, 8, 9) failed, after 1 attempt: OSError" in caplog.text


def test_parts_of_a_store_and_of_a_ground_truth_are_told_apart(tmp_path: Path) -> None:
    all_parts(tmp_path / "truth", 2)
    run_part(tmp_path / "store", "1/1", PLANS["tangent"])
    with pytest.raises(StoreError, match=r"has parts of a ground truth, which imprint\.evaluation\.merge_truth merges"):
        merge(tmp_path / "truth")
    with pytest.raises(StoreError, match=r"has parts of a store: imprint\.merge merges them"):
        merge_truth(tmp_path / "store")
    merge(tmp_path / "store", progress=False)
    merge_truth(tmp_path / "truth")


def test_what_parts_share_is_written_anew_by_any_of_them(tmp_path: Path) -> None:
    all_parts(tmp_path / "truth", 2)
    shared = tmp_path / "truth" / "parts" / "shared" / "request"
    (shared / "truth.json").write_text("{")
    for call in (lambda: merge_truth(tmp_path / "truth"), lambda: part(tmp_path / "truth", "1/2")):
        with pytest.raises(StoreError, match=r"Delete .*/shared/request, make any part again, which writes it anew"):
            call()
    shutil.rmtree(shared)
    part(tmp_path / "truth", "1/2")
    (tmp_path / "truth" / "parts" / "2-of-2" / "truth.json").write_text("{")
    with pytest.raises(StoreError, match=r"Delete .*2-of-2, and make the part again\."):
        merge_truth(tmp_path / "truth")
    shutil.rmtree(tmp_path / "truth" / "parts" / "2-of-2")
    part(tmp_path / "truth", "2/2")
    assert torch.equal(merge_truth(tmp_path / "truth").values, ask().values)


def test_nothing_is_read_while_another_process_merges(tmp_path: Path) -> None:
    all_parts(tmp_path / "truth", 2)
    lock = Lock(tmp_path / "truth")
    shutil.rmtree(tmp_path / "truth" / "parts" / "shared")
    with pytest.raises(StoreError, match="is writing to"):
        merge_truth(tmp_path / "truth")
    lock.release()
