"""Results of a store of finite removals: which question, how much noise, and what a chaotic run says."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from imprint import Attribution, Sources, Store, attribute, simulate
from imprint.errors import ReliabilityWarning
from tests.simulation.removals import (
    SOURCES,
    HandMadeRun,
    N,
    Removing,
    copy_state,
    make_data,
    make_model,
    make_plan,
    make_task,
    removing_engine,
    train,
)

QUERIES = torch.randn(7, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64), torch.arange(7) % 2


@pytest.fixture(autouse=True, scope="module")
def _removing() -> Iterator[None]:
    with removing_engine():
        yield


def replay(out: Path, sources: Sources = SOURCES) -> Store:
    run = HandMadeRun.of(make_model())
    return simulate(make_task(), make_data(), sources, make_plan(), run=run, out=out, progress=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, _removing: None) -> Store:
    return replay(tmp_path_factory.mktemp("removals") / "store")


@pytest.fixture(scope="module")
def result(store: Store) -> Attribution:
    return attribute(make_task(), store, QUERIES, batch_size=3, progress=False)


def test_a_result_of_removals_answers_for_this_run(result: Attribution) -> None:
    assert result.question == "this_run" and result.labels.removes
    assert "this run: if this source had had weight 0 in the training run that produced this model" in repr(result)


def test_noise_is_read_of_every_query(store: Store, result: Attribution) -> None:
    whole = attribute(make_task(), store, QUERIES, progress=False)
    for found in (result, whole):
        assert found.noise is not None and found.noise.shape == (7,) and bool((found.noise > 0).all())
    torch.testing.assert_close(result.noise, whole.noise)
    effect = float(result.removal_effect.square().mean().sqrt())
    assert result.noise is not None
    assert result.details["chaos"] == pytest.approx(float(result.noise.square().mean().sqrt()) / effect)


def test_the_first_sources_know_their_noise_even_if_the_rest_is_not_kept(store: Store, result: Attribution) -> None:
    streamed, whole = attribute(make_task(), store, QUERIES, top=2, progress=False), result.top(2)
    assert streamed.question == "this_run"
    torch.testing.assert_close(streamed.noise, whole.noise)
    assert streamed.distinguishable is not None and whole.distinguishable is not None
    assert torch.equal(streamed.distinguishable, whole.distinguishable)
    assert streamed.labels.details["chaos"] == pytest.approx(result.details["chaos"])


def test_a_calm_run_is_not_called_chaotic_and_a_chaotic_one_is(
    result: Attribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert result.details["chaos"] < 0.1 and not any("chaotic" in message for message in result.warnings)
    simulate_calmly = Removing.simulate

    def simulate_wildly(self: Removing, *given: object) -> object:
        chunk = simulate_calmly(self, *given)  # type: ignore[arg-type]
        assert chunk.noise is not None
        return replace(chunk, noise={name: 100 * rows for name, rows in chunk.noise.items()})

    monkeypatch.setattr(Removing, "simulate", simulate_wildly)
    wild = replay(tmp_path / "store")
    with pytest.warns(ReliabilityWarning, match=r"this run is chaotic: .* Ask instead for the expectation over seeds"):
        found = attribute(make_task(), wild, QUERIES, progress=False)
    assert found.details["chaos"] > 0.3
    assert any(message.startswith("this run is chaotic") for message in found.warnings)
    found.save(tmp_path / "found.safetensors")
    assert Attribution.load(tmp_path / "found.safetensors").warnings == found.warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        assert found[:2].warnings == found.mean().warnings == found.warnings


def test_the_exact_value_of_a_union_comes_from_the_union_itself(result: Attribution, tmp_path: Path) -> None:
    groups = {"two": ["ann", "dan"], "bob": ["bob"]}
    estimate = result.group(groups)
    exact = attribute(make_task(), replay(tmp_path / "store", SOURCES.group(groups)), QUERIES, progress=False)
    model = make_model()
    without = train(model, copy_state(model), (0, 1, 2, 3, 20, 21, 22, 23))
    trained = train(model, copy_state(model))

    def losses(state: dict[str, torch.Tensor]) -> torch.Tensor:
        model.load_state_dict(state)
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(model.eval()(QUERIES[0]), QUERIES[1], reduction="none")

    torch.testing.assert_close(exact.removal_effect[:, 0], losses(without) - losses(trained))
    torch.testing.assert_close(exact.scores[:, 1], estimate.scores[:, 1])
    assert exact.labels.source_sizes == estimate.labels.source_sizes == (8, 2)
    assert not exact.labels.is_estimate(0) and estimate.labels.is_estimate(0) and not estimate.labels.is_estimate(1)
    assert not torch.allclose(exact.scores[:, 0], estimate.scores[:, 0], rtol=1e-3)
    assert exact.labels.n == N
