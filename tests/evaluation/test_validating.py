"""Validation: predicted effects are compared with removals that are really made, and results say the outcome."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imprint import (
    Attribution,
    Comparison,
    DataError,
    Plan,
    PlanError,
    ReadoutError,
    Sources,
    Store,
    StoreError,
    attribute,
    drop,
    simulate,
    validate,
)
from imprint.evaluation.replaying import replay_run
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.witnessing import draw_sets, draw_strata
from imprint.recording.reading import Recording
from imprint.store.folder import write_sealed
from imprint.validation.record import VALIDATION, find_outdated, read_validation
from imprint.validation.witnesses import verify_witnesses
from tests.evaluation.truths import TRAINING, N, points, task, together

SOURCES = Sources.by_label([i % 6 for i in range(N)])
DATA, ASKED = points(N, 0), points(40, 1)
QUIET: dict[str, Any] = {"progress": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return together().record(3, tmp_path_factory.mktemp("runs") / "run", every=2)


@pytest.fixture(scope="module")
def replayed(run: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of replays, validated."""
    out = tmp_path_factory.mktemp("stores") / "replayed"
    simulate(task(), DATA, SOURCES, run=run, out=out, validate=ASKED, **QUIET)
    return out


@pytest.fixture(scope="module")
def estimated(run: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of path imprints, validated over three seeds."""
    out, plan = tmp_path_factory.mktemp("stores") / "estimated", Plan(steps=20, lr=0.1)
    store = simulate(task(), DATA, SOURCES, plan, checkpoints=run.paths[:1], out=out, **QUIET)
    validate(store, ASKED, record=together(), **QUIET)
    return out


def copied(store: Path, folder: Path) -> Store:
    shutil.copytree(store, folder / "copy")
    return Store(folder / "copy")


def test_sets_that_a_replay_is_validated_by_are_really_removed(run: Recording, tmp_path: Path) -> None:
    store = simulate(task(), DATA, SOURCES, run=run, **QUIET)
    found = validate(store, ASKED, **QUIET)
    removals = found.validation.removals
    assert len(removals) == 8 and {len(removal) for removal in removals} <= {2, 3, 4}
    truth = replay_run(run, task(), DATA, ASKED, Subsets.without(SOURCES, [(), *removals]), **QUIET)
    np.testing.assert_allclose(found.actual, truth.effects.numpy(), rtol=1e-9, atol=1e-12)
    result = attribute(task(), store, ASKED, **QUIET)
    sums = torch.stack([result.removal_effect[:, list(removal)].sum(1) for removal in removals], dim=1)
    np.testing.assert_allclose(found.predicted, sums.numpy(), rtol=1e-12)


def test_single_sources_are_removed_from_other_seeds_where_the_expectation_is_estimated(estimated: Path) -> None:
    validation = read_validation(Store(estimated))
    assert validation is not None and validation.question == "expected"
    assert [len(removal) for removal in validation.removals] == [1] * 6  # all there are
    assert validation.verdict.figures.runs == len(validation.witnesses) == 3
    assert validation.verdict.figures.ceiling is not None
    assert not list((estimated / "witnesses").glob("recording-*"))


def test_one_source_is_drawn_from_each_stratum_of_predicted_size() -> None:
    effects = torch.arange(1.0, 25).expand(30, 24)
    drawn = draw_strata(effects, 8, np.random.default_rng(0))
    assert [source // 3 for (source,) in drawn] == list(range(8))


@pytest.mark.parametrize(("sources", "sizes", "count"), [(12, {2, 3, 4}, 8), (4, {2, 3}, 8), (3, {2}, 3), (2, {1}, 2)])
def test_sets_of_two_to_four_sources_leave_some_and_differ(sources: int, sizes: set[int], count: int) -> None:
    drawn = draw_sets(sources, 8, np.random.default_rng(0))
    assert {len(removal) for removal in drawn} == sizes
    assert len(set(drawn)) == len(drawn) == count


def test_results_are_judged_on_their_own_queries_if_these_are_enough(replayed: Path) -> None:
    store = Store(replayed)
    many = attribute(task(), store, points(30, 5), **QUIET)
    few = attribute(task(), store, points(5, 5), **QUIET)
    kept = read_validation(store)
    assert kept is not None and many.labels.validation is not None
    assert many.labels.validation.own and many.labels.validation.figures.queries == 30
    assert few.labels.validation == kept.verdict and not kept.verdict.own
    assert "on these 30 queries" in repr(many) and "on 40 queries" in repr(few)
    assert "on 40 queries" in repr(attribute(task(), store, points(30, 5), top=2, **QUIET))


def test_every_form_of_a_result_says_whether_it_was_validated(replayed: Path, run: Recording) -> None:
    result = attribute(task(), replayed, ASKED, **QUIET)
    outcome = result.labels.validation and result.labels.validation.outcome
    top = result.top(2)
    assert result.labels.standing in repr(result) and result.labels.standing in repr(top)
    assert "real removals" in result._repr_html_()
    assert top.to_json()["validation"]["outcome"] == outcome
    assert result.to_pandas().attrs["validation"]["outcome"] == outcome
    plain = attribute(task(), simulate(task(), DATA, SOURCES, run=run, **QUIET), ASKED, **QUIET)
    assert "not validated" in repr(plain) and "not validated" in plain._repr_html_()
    assert plain.top(2).to_json()["validation"] == {"outcome": "not validated"}


def test_a_verdict_stays_with_what_it_was_made_for(replayed: Path, tmp_path: Path) -> None:
    result = attribute(task(), replayed, ASKED, **QUIET)
    assert result.labels.validation is not None and result.labels.validation.own
    for part in (result[:3], result.mean(), result.group({"a": ["0", "1"], "b": ["2", "3", "4", "5"]})):
        assert part.labels.validation is not None
    assert result[:3].labels.validation is not None and not result[:3].labels.validation.own
    assert result.group({"most": ["0", "1", "2", "3", "4"]}).labels.validation is None  # five were never removed
    assert (result - result).labels.validation is None
    result.save(tmp_path / "result.safetensors")
    assert Attribution.load(tmp_path / "result.safetensors").labels == result.labels


def test_unions_of_estimates_were_not_compared(estimated: Path) -> None:
    result = attribute(task(), estimated, ASKED, **QUIET)
    assert result.labels.validation is not None
    assert result.group({"both": ["0", "1"]}).labels.validation is None


def test_a_validation_calibrates_sizes_within_its_interval(estimated: Path) -> None:
    result = attribute(task(), estimated, ASKED, **QUIET)
    verdict = result.labels.validation
    assert verdict is not None
    if not verdict.calibrates:
        with pytest.raises(ReadoutError, match="sets no scale"):
            result.calibrate()
        return
    scaled = result.calibrate()
    torch.testing.assert_close(scaled.scores, (verdict.figures.slope or 0) * result.scores)
    assert scaled.labels.validation is not None and scaled.labels.validation.figures.slope == pytest.approx(1)


def test_calibrating_without_a_validation_is_refused(run: Recording) -> None:
    store = simulate(task(), DATA, SOURCES, run=run, **QUIET)
    with pytest.raises(ReadoutError, match=r"no validation to calibrate by: make one with imprint\.validate"):
        attribute(task(), store, ASKED, **QUIET).calibrate()


def test_training_examples_of_removed_sources_are_left_out(run: Recording) -> None:
    store = simulate(task(), DATA, SOURCES, run=run, **QUIET)
    asked = tuple(torch.cat([known[:10], query]) for known, query in zip(DATA, ASKED, strict=True))
    found = validate(store, asked, **QUIET)
    assert found.validation.left_out == 10 and len(found.predicted) == 40
    assert "10 queries left out" in repr(found)
    with pytest.raises(DataError, match="every query is a training example of a removed source"):
        validate(store, tuple(column[:25] for column in DATA), **QUIET)


def test_repeated_queries_count_once(run: Recording) -> None:
    store = simulate(task(), DATA, SOURCES, run=run, **QUIET)
    found = validate(store, tuple(column.repeat(*(3, *[1] * (column.dim() - 1))) for column in points(15, 1)), **QUIET)
    assert found.validation.verdict.figures.queries == 15 and found.outcome == "undecided"


def test_a_store_remembers_how_earlier_validations_ended(run: Recording) -> None:
    store = simulate(task(), DATA, SOURCES, run=run, **QUIET)
    first = validate(store, points(10, 1), **QUIET)
    second = validate(store, ASKED, seed=1, **QUIET)
    assert first.validation.earlier == () and second.validation.earlier == ("undecided",)
    assert "earlier validations of this store: undecided" in repr(second)


def test_a_store_that_was_copied_without_its_witnesses_keeps_its_verdict(replayed: Path, tmp_path: Path) -> None:
    store = copied(replayed, tmp_path)
    shutil.rmtree(store.path / "witnesses")
    verdict = attribute(task(), store, ASKED, **QUIET).labels.validation
    assert verdict is not None and not verdict.own


def test_an_interrupted_validation_takes_over_finished_witnesses(
    run: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(steps=5, lr=0.1)
    store = simulate(task(), DATA, SOURCES, plan, checkpoints=run.paths[:1], out=tmp_path / "store", **QUIET)
    recorded: list[int] = []

    def record(seed: int, folder: Path) -> Recording:
        recorded.append(seed)
        if len(recorded) == 2:
            raise KeyboardInterrupt
        return together().record(seed, folder)

    with pytest.raises(KeyboardInterrupt):
        validate(store, ASKED, record=record, **QUIET)
    assert read_validation(store) is None
    found = validate(store, ASKED, record=record, **QUIET)
    assert recorded == [recorded[0], recorded[1], recorded[0], recorded[1], recorded[4]]  # each run is recorded again
    whole = simulate(task(), DATA, SOURCES, plan, checkpoints=run.paths[:1], **QUIET)
    again = validate(whole, ASKED, record=together(), **QUIET)
    np.testing.assert_array_equal(found.actual, again.actual)


def test_a_record_that_ignores_its_seed_is_refused_and_leaves_no_witness(run: Recording, tmp_path: Path) -> None:
    plan, out = Plan(steps=5, lr=0.1), tmp_path / "store"
    store = simulate(task(), DATA, SOURCES, plan, checkpoints=run.paths[:1], out=out, **QUIET)
    with pytest.raises(DataError, match=r"records the same run for two seeds \(runs 0 and 1\)"):
        validate(store, ASKED, record=lambda seed, folder: together().record(3, folder), **QUIET)
    assert not list(out.rglob("witnesses/*/*.safetensors"))


def test_witnesses_of_another_training_make_way(run: Recording, tmp_path: Path) -> None:
    plan = Plan(steps=5, lr=0.1)
    store = simulate(task(), DATA, SOURCES, plan, checkpoints=run.paths[:1], out=tmp_path / "store", **QUIET)
    before = validate(store, ASKED, record=together(), **QUIET)
    slower = replace(TRAINING, lr=TRAINING.lr / 10)
    after = validate(store, ASKED, record=together(training=slower), **QUIET)
    assert np.abs(after.actual).mean() < 0.5 * np.abs(before.actual).mean()
    again = validate(store, ASKED, record=together(training=slower), **QUIET)
    np.testing.assert_array_equal(after.actual, again.actual)


def test_an_interrupted_validation_leaves_the_store_without_a_verdict(
    replayed: Path, run: Recording, tmp_path: Path
) -> None:
    store = copied(replayed, tmp_path)
    given: dict[str, Any] = {"task": task(), "data": DATA, "sources": SOURCES, "run": run, **QUIET}

    class Stop(KeyboardInterrupt):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(KeyboardInterrupt):
        validate(store, ASKED, seed=1, **{**given, "progress": stop})
    assert attribute(task(), store, ASKED, **QUIET).labels.validation is None
    assert validate(store, ASKED, seed=1, **given).validation.seed == 1


@pytest.mark.parametrize("place", ["witnesses", "witnesses/000", "witnesses/recording-000"])
def test_nothing_is_written_or_removed_through_a_link(
    place: str, replayed: Path, run: Recording, tmp_path: Path
) -> None:
    store, elsewhere = copied(replayed, tmp_path), tmp_path / "elsewhere"
    for name in ("000", "recording-000"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "precious").write_text("mine")
    link = store.path / place
    if link.exists():
        shutil.rmtree(link)
    link.symlink_to(elsewhere if place == "witnesses" else elsewhere / "000")
    with pytest.raises(StoreError, match="is a link"):
        validate(store, ASKED, task=task(), data=DATA, sources=SOURCES, run=run, **QUIET)
    assert all((elsewhere / name / "precious").exists() for name in ("000", "recording-000"))


def test_a_replay_of_the_last_steps_is_validated_by_removals_from_these(run: Recording) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = simulate(task(), DATA, SOURCES, Plan(engine="replay", start=4), run=run, **QUIET)
        found = validate(store, ASKED, **QUIET)
    witness = Store(store.path / "witnesses" / "000")
    assert witness.checkpoints[0].steps == store.checkpoints[0].steps == 2
    assert found.validation.question == "this_run"


def test_training_examples_of_removed_sources_count_nowhere(replayed: Path) -> None:
    asked = tuple(torch.cat([known, query]) for known, query in zip(DATA, ASKED, strict=True))
    verdict = attribute(task(), replayed, asked, **QUIET).labels.validation
    assert verdict is not None and verdict.own and verdict.figures.queries == len(ASKED[0])
    only = attribute(task(), replayed, DATA, **QUIET).labels.validation
    assert only is not None and not only.own  # the verdict of `validate` remains


def test_other_training_data_are_refused(estimated: Path) -> None:
    x, y = DATA
    with pytest.raises(DataError, match="was made from different training data"):
        validate(estimated, ASKED, task=task(), data=(x, y.flip(0)), sources=SOURCES, record=together(), **QUIET)


def test_a_function_of_the_users_has_no_verdict_by_its_name(replayed: Path, tmp_path: Path) -> None:
    def surprise(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    store = copied(replayed, tmp_path)
    edit(store, {"measure": "surprise"})  # of another function, for all that is known
    found = read_validation(store)
    assert found is not None and found.measure == "surprise"
    assert attribute(task(measure=surprise), store, points(3, 5), **QUIET).labels.validation is None


def test_a_reopened_store_asks_for_what_it_was_made_from(replayed: Path, run: Recording, tmp_path: Path) -> None:
    store = copied(replayed, tmp_path)
    with pytest.raises(DataError, match="does not know its task and data and sources: give task=, data=, sources="):
        validate(store, ASKED, **QUIET)
    given: dict[str, Any] = {"task": task(), "data": DATA, "sources": SOURCES}
    with pytest.raises(DataError, match=r"give that run \(run=, --run FOLDER\)"):
        validate(store, ASKED, **given, **QUIET)
    found = validate(store, ASKED, **given, run=run, **QUIET)
    assert isinstance(found, Comparison) and found.outcome in repr(found).replace("ranks and ", "")
    with pytest.raises(DataError, match="not the sources of the store"):
        validate(store, ASKED, **{**given, "sources": Sources.by_label([i % 5 for i in range(N)])}, run=run, **QUIET)


def test_trainings_of_the_other_question_are_refused(replayed: Path, estimated: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"task": task(), "data": DATA, "sources": SOURCES, **QUIET}
    with pytest.raises(DataError, match=r"record=, a function of \(seed, folder\)"):
        validate(Store(estimated), ASKED, **given)
    with pytest.raises(DataError, match="leave record= out"):
        validate(Store(replayed), ASKED, record=together(), **given)
    other = together().record(8, tmp_path / "other")
    with pytest.raises(DataError, match="another one than the store was made from"):
        validate(Store(replayed), ASKED, run=other, **given)


def test_record_without_queries_is_refused(run: Recording) -> None:
    with pytest.raises(PlanError, match="record is for a validation"):
        simulate(task(), DATA, SOURCES, run=run, record=together(), **QUIET)


def edit(store: Store, changes: dict[str, Any]) -> None:
    """Change a validation, with a checksum that fits."""
    content = json.loads((store.path / VALIDATION).read_text())
    content.pop("sha256")
    content["validation"] |= changes
    write_sealed(store.path / VALIDATION, content)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store": "0" * 64}, "is the validation of another store"),
        ({"removals": [[0], [99]]}, "its removals must be sets of the 6 sources"),
        ({"removals": [[0], []]}, "its removals must be sets of the 6 sources"),
        ({"removals": [[0, 0]]}, "its removals must be sets of the 6 sources"),
        ({"removals": [[0]]}, "not as many as its verdict says"),
        ({"witnesses": ["0" * 64]}, "does not hold the witnesses"),
        ({"witnesses": ["x"]}, "must be a SHA-256"),
        ({"verdict": {"outcome": "sizes validated"}}, "is missing"),
    ],
)
def test_a_validation_that_does_not_fit_its_store_is_refused(
    changes: dict[str, Any], words: str, replayed: Path, tmp_path: Path
) -> None:
    store = copied(replayed, tmp_path)
    edit(store, changes)
    with pytest.raises(StoreError, match=words):
        attribute(task(), store, ASKED, **QUIET)


def test_a_changed_validation_and_damaged_witnesses_are_named(replayed: Path, tmp_path: Path) -> None:
    store = copied(replayed, tmp_path)
    verify_witnesses(store)
    shard = next((store.path / "witnesses/000/checkpoint-000").glob("imprints-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00\x00")
    with pytest.raises(StoreError, match=r"witnesses/000/checkpoint-000/imprints-00000\.safetensors is damaged"):
        verify_witnesses(store)
    with pytest.raises(StoreError, match="is damaged"):
        attribute(task(), store, ASKED, **QUIET)
    text = (store.path / VALIDATION).read_text()
    (store.path / VALIDATION).write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(StoreError, match="was changed after it was written"):
        read_validation(store)


def test_a_validation_counts_until_the_store_is_changed(
    run: Recording, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = simulate(task(), DATA, SOURCES, run=run, out=tmp_path / "store", **QUIET)
    validate(store, points(10, 1), **QUIET)
    left = drop(store, store.source_ids[0], **QUIET)
    assert "was validated before it was changed: validate it again" in caplog.text
    assert read_validation(left) is None and find_outdated(left) is not None
    assert attribute(task(), left, ASKED, **QUIET).labels.validation is None
    again = validate(left, points(10, 1), seed=1, **QUIET)
    assert again.validation.earlier == ("undecided",), "what was tried before still counts as tried"
    assert read_validation(left) == again.validation and find_outdated(left) is None
