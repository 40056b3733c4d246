"""Ground truth by replays is F under trainings in which the removed examples had weight 0, and nothing else changed."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Attribution, DataError, RunRecorder, Sources, StoreError, attribute, simulate
from imprint.errors import ReliabilityWarning
from imprint.evaluation import replaying
from imprint.evaluation.metrics import evaluate
from imprint.evaluation.replaying import replay_run, replay_seeds
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.recording.reading import Recording
from tests.evaluation.truths import HALVES, QUERIES, TRAINING, Killed, N, build, points, task, together

SOURCES = Sources.by_label([i % 4 for i in range(N)])
PAIRS = Subsets.without_some(SOURCES, 4, drop=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return together().record(3, tmp_path_factory.mktemp("runs") / "run")


def train_again(run: Recording, kept: Tensor) -> nn.Module:
    """Repeat a run by hand; examples that are not kept have weight 0."""
    model = build()
    model.load_state_dict(run.state(0))
    optimiser = torch.optim.SGD(model.parameters(), TRAINING.lr, TRAINING.momentum)
    x, y = points(N, 0)
    weights = torch.zeros(N, dtype=torch.float64).index_fill(0, kept, 1)
    for step in run.steps:
        (batch,) = step.batches
        chosen = list(batch.examples)
        optimiser.zero_grad()
        losses = nn.functional.cross_entropy(model(x[chosen]), y[chosen], reduction="none")
        ((weights[chosen] * losses).sum() / batch.normaliser).backward()
        optimiser.step()
    return model


def measure_again(run: Recording, subsets: Subsets) -> Tensor:
    """F of the queries under every such training, (subsets, queries)."""
    x, y = points(QUERIES, 1)
    models = [train_again(run, subsets.examples(index)) for index in range(len(subsets))]
    with torch.no_grad():
        return torch.stack([nn.functional.cross_entropy(model(x), y, reduction="none") for model in models])


def replay(run: Any, subsets: Subsets = PAIRS, out: Path | None = None, **changes: Any) -> Truth:
    given: dict[str, Any] = {"task": task(), "data": points(N, 0), "queries": points(QUERIES, 1), **changes}
    return replay_run(run, subsets=subsets, out=out, progress=False, **given)


def replay_each_seed(record: Any, out: Path | None = None, **changes: Any) -> Truth:
    given: dict[str, Any] = {"queries": points(QUERIES, 1), "subsets": PAIRS, "runs": 2, "progress": False, **changes}
    return replay_seeds(record, task(), points(N, 0), out=out, **given)


def test_replayed_sets_are_trainings_in_which_they_had_weight_0(run: Recording) -> None:
    truth = replay(run)
    torch.testing.assert_close(truth.values[0], measure_again(run, PAIRS), rtol=1e-9, atol=1e-11)
    assert (truth.question, truth.replayed, truth.runs) == ("this_run", True, 1)


def test_single_removals_predict_themselves(run: Recording) -> None:
    store = simulate(task(), points(N, 0), SOURCES, run=run, progress=False)
    result = attribute(task(), store, points(QUERIES, 1), progress=False)
    for metric in evaluate(result, replay(run, Subsets.without_each(SOURCES))):
        assert metric.estimate.value == pytest.approx(1, abs=1e-6)
        assert metric.question == metric.scores_question == "this_run"


def test_scores_and_ground_truth_of_two_recordings_are_not_compared(run: Recording, tmp_path: Path) -> None:
    other = together().record(4, tmp_path / "other")
    store = simulate(task(), points(N, 0), SOURCES, run=other, progress=False)
    result = attribute(task(), store, points(QUERIES, 1), progress=False)
    truth = replay(run, Subsets.without_each(SOURCES))
    named = rf"another recorded run \(recording {other.sha256[:8]}…\) than the .* \(recording {run.sha256[:8]}…\)"
    for compare in (lambda: evaluate(result, truth), lambda: result.calibrate(truth)):
        with pytest.raises(DataError, match=named):
            compare()
    result.save(tmp_path / "scores.safetensors")
    with pytest.raises(DataError, match=named):
        evaluate(Attribution.load(tmp_path / "scores.safetensors"), truth)
    unnamed = {name: value for name, value in result.labels.fingerprints.items() if name != "recording"}
    evaluate(replace(result, labels=replace(result.labels, fingerprints=unnamed)), truth)  # of an earlier version


def test_a_folder_keeps_the_values_alone_and_recognises_its_run(run: Recording, tmp_path: Path) -> None:
    first = replay(run, out=tmp_path / "truth")
    kept = Truth.load(tmp_path / "truth")
    assert torch.equal(kept.values, first.values)
    assert (kept.question, kept.replayed) == ("this_run", True)
    assert all(path.is_file() for path in (tmp_path / "truth").iterdir())
    assert torch.equal(replay(run, out=tmp_path / "truth").values, first.values)
    other = together().record(4, tmp_path / "other")
    with pytest.raises(StoreError, match="holds another ground truth: the training's recording was"):
        replay(other, out=tmp_path / "truth")


def test_an_interrupted_replay_resumes(run: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*given: Any, **options: Any) -> Any:
        raise Killed

    monkeypatch.setattr(replaying, "attribute", die)
    with pytest.raises(Killed):
        replay(run, out=tmp_path)
    with pytest.raises(StoreError, match="unfinished: 0 of 5 models"):
        Truth.load(tmp_path)
    finished = (tmp_path / "replay-000" / "manifest.json").stat().st_mtime_ns
    seen: list[int] = []

    def look(*given: Any, **options: Any) -> Any:
        seen.append((tmp_path / "replay-000" / "manifest.json").stat().st_mtime_ns)
        return attribute(*given, **options)

    monkeypatch.setattr(replaying, "attribute", look)
    resumed = replay(run, out=tmp_path)
    assert seen == [finished]  # nothing was replayed again
    monkeypatch.undo()
    assert torch.equal(resumed.values, replay(run).values)


def test_seeds_are_recorded_and_replayed_one_by_one(tmp_path: Path) -> None:
    truth = replay_each_seed(together(), out=tmp_path / "truth")
    assert (truth.question, truth.replayed, truth.runs) == ("expected", True, 2)
    for index in range(2):
        recorded = together().record(PAIRS.seeds(index, 0)[0], tmp_path / f"run-{index}")
        torch.testing.assert_close(truth.values[index], replay(recorded).values[0], rtol=1e-9, atol=1e-11)
    assert all(path.is_file() for path in (tmp_path / "truth").iterdir())
    more = replay_each_seed(together(), out=tmp_path / "truth", runs=3)
    assert more.runs == 3 and torch.equal(more.values[:2], truth.values)
    assert torch.equal(Truth.load(tmp_path / "truth").values, more.values)


def test_a_function_that_records_is_checked_before_runs_are_added(tmp_path: Path) -> None:
    def record(seed: int, folder: Path) -> None:
        together().record(seed, folder)

    first = replay_each_seed(record, tmp_path, runs=1)
    assert torch.equal(replay_each_seed(record, tmp_path, runs=2).values[:1], first.values)
    faster = together(training=replace(TRAINING, lr=2 * TRAINING.lr))

    def other(seed: int, folder: Path) -> Recording:
        return faster.record(seed, folder)

    other.__qualname__ = record.__qualname__
    with pytest.raises(StoreError, match=r"holds runs of another record\(seed, folder\): F under run 0"):
        replay_each_seed(other, tmp_path, runs=3)


def record_own(folder: Path, init: int, order: int) -> Recording:
    """Train as a user's `record` does, from a seed for the initialisation and one for the recorder."""
    x, y = points(N, 0)
    torch.manual_seed(init)
    model = build()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with RunRecorder(folder, model, optimiser, data=(x, y), seed=order) as run:
        for indices in run.batches(N, 6):
            with run.step(indices) as step:
                step.backward(nn.functional.cross_entropy(model(x[indices]), y[indices]))
                optimiser.step()
    return Recording(folder)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            lambda seed, folder: record_own(folder, 0, 0),
            r"records the same run for two seeds \(runs 0 and 1\).*seed=seed",
        ),
        (
            lambda seed, folder: record_own(folder, seed, 7),
            r"the same seed of the recorder, 7: .* Give the recorder the",
        ),
    ],
    ids=["ignores its seed", "seeds the initialisation alone"],
)
@pytest.mark.parametrize("earlier", [0, 1])
def test_runs_that_are_not_of_several_seeds_are_refused(record: Any, says: str, earlier: int, tmp_path: Path) -> None:
    """Before anything is replayed, and also where an earlier call has made the first of them."""
    if earlier:
        replay_each_seed(record, tmp_path, runs=1)
    for _ in range(2):  # nothing of them is left to be taken again
        with pytest.raises(DataError, match=says):
            replay_each_seed(record, tmp_path, runs=3)
    assert all(path.is_file() for path in tmp_path.iterdir())


def test_runs_from_one_start_or_in_one_order_are_named(caplog: pytest.LogCaptureFixture) -> None:
    replay_each_seed(lambda seed, folder: record_own(folder, 0, seed))
    assert "start from the same parameters" in caplog.text and "fine-tunes of one pretrained model" in caplog.text
    assert "in the same order" not in caplog.text
    caplog.clear()
    ordered = together(training=replace(TRAINING, shuffle=False))
    replay_each_seed(lambda seed, folder: ordered.record(seed, folder))
    assert "take the examples in the same order" in caplog.text and "same parameters" not in caplog.text
    caplog.clear()
    replay_each_seed(lambda seed, folder: record_own(folder, seed, seed), runs=3)
    assert "runs from different seeds" not in caplog.text


def test_only_the_run_that_is_asked_about_must_end_in_the_model_of_the_task(run: Recording) -> None:
    with pytest.warns(ReliabilityWarning, match="neither the start nor the end of the recorded run"):
        replay(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReliabilityWarning)
        replay_each_seed(together())


def test_a_killed_recording_starts_over(tmp_path: Path) -> None:
    died: list[int] = []

    def record(seed: int, folder: Path) -> Recording:
        if not died:
            died.append(seed)
            folder.mkdir(parents=True)
            (folder / "leftover").write_text("")
            raise Killed
        return together().record(seed, folder)

    with pytest.raises(Killed):
        replay_each_seed(record, tmp_path)
    assert torch.equal(replay_each_seed(record, tmp_path).values, replay_each_seed(together()).values)


def test_what_cannot_be_replayed_is_refused(run: Recording) -> None:
    with pytest.raises(DataError, match="replays leave sources out of a run on all data, got halves"):
        replay(run, HALVES)
    with pytest.raises(DataError, match="add an empty list, the baseline"):
        replay(run, Subsets("removal", N, SOURCES, ((0,), (1,))))
    with pytest.raises(DataError, match="made for 24 training examples, the data has 23"):
        replay(run, data=points(23, 0))
    with pytest.raises(DataError, match="there is no run to replay"):
        replay(None)
    with pytest.raises(DataError, match=r"record must be a function of \(seed, folder\) or a Together, got a str"):
        replay_each_seed("record")


def test_a_regulariser_has_no_part_in_runs_whose_optimiser_decays_weights() -> None:
    """A task for path engines has the weight decay as a regulariser; `Together` takes it from its training."""
    decayed = task(regulariser=lambda model: sum(p.square().sum() for p in model.parameters()))
    given: dict[str, Any] = {"subsets": PAIRS, "runs": 1, "progress": False}
    found = replay_seeds(together(), decayed, points(N, 0), points(QUERIES, 1), **given)
    assert torch.equal(found.values, replay_each_seed(together(), runs=1).values)
    assert decayed.regulariser is not None
