"""Peers at early checkpoints are the peers themselves, given those checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from imprint.benchmarking.bench import Bench, Method
from imprint.benchmarking.comparison import MethodScores
from imprint.benchmarking.variants import early_epochs, try_epochs
from tests.benches import little_digits

pytest.importorskip("dattri", reason="dattri is not installed: the extra `bench` has it")

from imprint.benchmarking import peers as trained
from imprint.benchmarking.early import early_peers
from imprint.benchmarking.peers import DattriTask, make_loaders, peers

NAMES = (
    *("TRAK-1, early", "TRAK-10, early", "TRAK-50, early", "TRAK, one run, early"),
    *("IF-CG, early", "TracIn, one run, early", "Grad-Dot, early", "Grad-Cos, early"),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    protocol = replace(little_digits(), checkpoints=(1, 2, 3))
    return Bench(protocol, tmp_path_factory.mktemp("digits"), progress=False)


@pytest.fixture(autouse=True)
def one_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "DAMPINGS", (0.1,))


def score_all(bench: Bench, method: Method) -> dict[str, MethodScores]:
    runs = bench.states(range(method.runs), method.halves)
    return {each.note: each for each in method.score(bench, runs)}


def score_one(bench: Bench, name: str, epoch: int) -> MethodScores:
    """Score with a method of the trained model, as if training had ended after this epoch."""
    method = peers(bench)[name]
    last = bench.protocol.epochs.index(epoch)
    runs = [kept[: last + 1] for kept in bench.states(range(method.runs), method.halves)]
    (found,) = method.score(bench, runs)
    return found


def test_epochs_are_those_that_are_kept_before_the_last(bench: Bench) -> None:
    assert bench.protocol.epochs == [1, 2, 3, 6]
    assert early_epochs(bench.protocol) == (2, 3)
    assert early_epochs(bench.protocol, (6, 3, 4)) == (3,)
    assert early_peers(bench, (4, 6)) == {}
    assert tuple(early_peers(bench)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_scores_every_example(name: str, bench: Bench) -> None:
    found = bench.score(early_peers(bench)[name], 0)
    assert found.scores.shape == (10, 60) and found.scores.isfinite().all()
    assert (found.scores.std(dim=1) > 0).all() and found.query > 0


@pytest.mark.parametrize("name", ["TRAK-1", "TRAK-10", "IF-CG", "Grad-Dot", "Grad-Cos"])
def test_an_early_epoch_is_scored_as_if_training_had_ended_there(name: str, bench: Bench) -> None:
    early = score_all(bench, early_peers(bench, (2,))[f"{name}, early"])
    (note,) = early
    assert note == ("epoch 2, λ=0.1" if name == "IF-CG" else "epoch 2")
    ended = score_one(bench, name, 2).scores
    torch.testing.assert_close(early[note].scores, ended, rtol=1e-4, atol=1e-5 * float(ended.abs().max()))
    later = score_one(bench, name, 6).scores
    assert float((later - ended).abs().max()) > 0.01 * float(ended.abs().max())


def test_trak_of_all_epochs_is_dattris_own_ensemble_of_these_models(bench: Bench) -> None:
    found = score_all(bench, early_peers(bench)["TRAK, one run, early"])
    assert list(found) == ["epoch 2", "epoch 3", "mean of epochs 2, 3"]
    ((_, second, third, _),) = bench.states([0])
    train, queries = make_loaders(bench)
    attributor = DattriTask(bench.protocol.build_task()).trak([second, third])
    attributor.cache(train)
    whole = attributor.attribute(queries).T
    together = found["mean of epochs 2, 3"]
    torch.testing.assert_close(together.scores, whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))
    assert together.prepare == pytest.approx(found["epoch 2"].prepare + found["epoch 3"].prepare)


def test_every_epoch_of_trak_has_projections_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[int] = []
    build = DattriTask.trak

    def seen(self: DattriTask, states: Any, first_model: int) -> Any:
        first.append(first_model)
        return build(self, states, first_model)

    monkeypatch.setattr(DattriTask, "trak", lambda self, states, first: seen(self, states, first))
    score_all(bench, early_peers(bench)["TRAK-10, early"])
    assert first == [0, 10]


def test_the_mean_of_epochs_is_tried_for_each_damping(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "DAMPINGS", (1.0, 0.1))
    found = score_all(bench, early_peers(bench)["IF-CG, early"])
    assert list(found) == [
        *("epoch 2, λ=1", "epoch 3, λ=1", "mean of epochs 2, 3, λ=1"),
        *("epoch 2, λ=0.1", "epoch 3, λ=0.1", "mean of epochs 2, 3, λ=0.1"),
    ]
    mean = (found["epoch 2, λ=1"].scores + found["epoch 3, λ=1"].scores) / 2
    torch.testing.assert_close(found["mean of epochs 2, 3, λ=1"].scores, mean)


def test_tracin_is_the_sum_of_gradient_products_over_checkpoints(bench: Bench) -> None:
    (together,) = score_all(bench, early_peers(bench)["TracIn, one run, early"]).values()
    each = score_all(bench, early_peers(bench)["Grad-Dot, early"])
    torch.testing.assert_close(together.scores, each["epoch 2"].scores + each["epoch 3"].scores)


def test_a_single_epoch_has_no_mean() -> None:
    score: Callable[[int], MethodScores] = lambda epoch: MethodScores(torch.ones(2, 3) * epoch, 1.0, 2.0, note="x")  # noqa: E731
    assert [each.note for each in try_epochs((3,), score)] == ["epoch 3, x"]
    *_, mean = try_epochs((1, 4), score)
    assert (mean.prepare, mean.query, float(mean.scores[0, 0])) == (2.0, 4.0, 2.5)


def test_methods_are_known_by_their_epochs(bench: Bench) -> None:
    few, more = early_peers(bench, (2,)), early_peers(bench)
    assert all(few[name].key_text() != more[name].key_text() for name in NAMES)
    assert len({more[name].key_text() for name in NAMES}) == len(NAMES)
    assert not {more[name].key_text() for name in NAMES} & {each.key_text() for each in peers(bench).values()}
