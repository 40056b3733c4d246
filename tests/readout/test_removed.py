"""Removals that were really made are read out by plain evaluations, at the deployed model and at the one without."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Reader, ReadoutError, Store, Task, attribute, simulate
from imprint.readout.kernels import removed_scores
from tests.simulation.removals import (
    SOURCES,
    HandMadeRun,
    N,
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


def replay(model: nn.Module, out: Path | None = None, task: Task | None = None, **options: Any) -> Store:
    options = {"run": HandMadeRun.of(model), "progress": False, **options}
    return simulate(task or make_task(model), make_data(), SOURCES, make_plan(), out=out, **options)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, _removing: None) -> Store:
    return replay(make_model(), tmp_path_factory.mktemp("removed") / "store")


def evaluate(model: nn.Module, state: dict[str, Tensor]) -> Tensor:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    with torch.no_grad():
        return nn.functional.cross_entropy(model.eval()(QUERIES[0]), QUERIES[1], reduction="none")


def expected(model: nn.Module) -> Tensor:
    """N·(F(θ) − F(θ₋b)) from models that were really trained without each source."""
    start = copy_state(model)
    deployed = evaluate(model, train(model, start))
    without = [evaluate(model, train(model, start, tuple(members))) for members in SOURCES.members]
    return torch.stack([N * (deployed - each) for each in without], 1)


def test_scores_are_the_differences_to_models_trained_without_each_source(store: Store) -> None:
    reader = Reader(make_task(), store)
    assert reader.readout == "removed" and reader.details == {}
    torch.testing.assert_close(reader.scores(QUERIES), expected(make_model()), rtol=1e-10, atol=1e-12)
    result = attribute(make_task(), store, QUERIES, progress=False)
    torch.testing.assert_close(torch.as_tensor(result.scores), expected(make_model()), rtol=1e-10, atol=1e-12)


def test_leaving_the_buffers_out_would_be_wrong(store: Store) -> None:
    base, rows = store.base(0, torch.device("cpu")), store.imprints(0, 0, 1, torch.device("cpu"))
    model, first = make_model(), expected(make_model())[:, 0]
    without = {n: t - rows[n][0] / N if n in rows and "running" not in n else t for n, t in base.items()}
    found = N * (evaluate(model, base) - evaluate(model, without))
    assert float((found - first).norm() / first.norm()) > 0.02


@pytest.mark.parametrize("chunked", [{"memory": "6kB"}, {"memory": "1GB"}], ids=["one by one", "at once"])
def test_chunks_do_not_change_scores(store: Store, chunked: dict[str, str]) -> None:
    reader = Reader(make_task(), store, memory=chunked["memory"])
    assert (len(reader.chunks(QUERIES, 7)) == 1) == (chunked["memory"] == "1GB")
    torch.testing.assert_close(reader.scores(QUERIES), expected(make_model()), rtol=1e-10, atol=1e-12)


def test_a_model_that_vmap_refuses_is_read_source_by_source() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 2, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.linear(x)
            return z * (2.0 if z.mean().item() > 1e9 else 1.0)

    store = replay(Stubborn())
    reader = Reader(make_task(Stubborn()), store)
    torch.testing.assert_close(reader.scores(QUERIES), expected(Stubborn()), rtol=1e-10, atol=1e-12)
    assert "one_by_one" in reader.details


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient", "literal"])
def test_derivatives_along_finite_removals_are_refused_with_the_reason(store: Store, readout: Any) -> None:
    says = f'along a finite removal a derivative is 55 to 130% off: it is read out by "removed", not by "{readout}"'
    with pytest.raises(ReadoutError, match=says):
        Reader(make_task(), store, readout=readout)


def test_derivatives_are_not_read_out_as_removals() -> None:
    path = simulate(make_task(), make_data(), SOURCES, Plan(steps=1, lr=0.1), progress=False)
    with pytest.raises(ReadoutError, match=r'"removed" is for stores of a repeated run, .* read it out by "jvp"'):
        Reader(make_task(), path, readout="removed")
    assert Reader(make_task(), path).readout == "jvp"
    assert Reader(make_task(), path).noise_changes(QUERIES) is None


def test_the_noise_of_each_query_is_its_change_by_perturbed_starts(store: Store) -> None:
    noise, base = store.noise(0, torch.device("cpu")), store.base(0, torch.device("cpu"))
    assert noise is not None
    moved = [{n: t - noise[n][i] / N if n in noise else t for n, t in base.items()} for i in range(2)]
    changes = torch.stack([evaluate(make_model(), state) - evaluate(make_model(), base) for state in moved])
    found = Reader(make_task(), store).noise_changes(QUERIES)
    assert found is not None
    torch.testing.assert_close(found, changes, rtol=1e-9, atol=1e-12)


def test_each_source_is_read_on_a_query_of_its_own(store: Store) -> None:
    own = QUERIES[0][: len(SOURCES)], QUERIES[1][: len(SOURCES)]
    found = Reader(make_task(), store).diagonal(own, 0, len(SOURCES))
    torch.testing.assert_close(found, expected(make_model())[: len(SOURCES)].diagonal(), rtol=1e-10, atol=1e-12)


def test_half_precision_keeps_effects_within_a_percent() -> None:
    store = replay(make_model(), dtype=torch.bfloat16)
    found, exact = Reader(make_task(), store).scores(QUERIES), expected(make_model())
    assert float((found - exact).norm() / exact.norm()) < 0.01


def test_rounding_cancels_where_a_removal_changes_nothing() -> None:
    theta = {"w": torch.randn(64, 64), "b": torch.randn(64)}
    x = torch.randn(100, 64)

    def measure(theta: dict[str, Tensor]) -> Tensor:
        return (x @ theta["w"] + theta["b"]).logsumexp(1)

    removals = {"w": torch.stack([torch.zeros(64, 64), torch.randn(64, 64)]), "b": torch.zeros(2, 64)}
    for vectorise in (True, False):
        scores = removed_scores(measure, theta, removals, 10**6, vectorise=vectorise)
        assert bool((scores[0] == 0).all()) and bool((scores[1] != 0).any())
        nothing = {name: torch.zeros_like(rows) for name, rows in removals.items()}
        assert not bool(removed_scores(measure, theta, nothing, 5, vectorise=vectorise).any())


@pytest.mark.parametrize("changed", ["trunk", "head"])
def test_what_lies_before_the_first_changed_layer_is_computed_once(changed: str) -> None:
    stacked: list[bool] = []
    theta = {"trunk": torch.randn(8, 8), "head": torch.randn(8)}
    x = torch.randn(5, 8)

    def measure(theta: dict[str, Tensor]) -> Tensor:
        hidden = x @ theta["trunk"]
        stacked.append("BatchedTensor" in repr(hidden))
        return hidden.tanh() @ theta["head"]

    removals = {
        name: torch.randn(3, *t.shape) if name == changed else torch.zeros(3, *t.shape) for name, t in theta.items()
    }
    removed_scores(measure, theta, removals, 10, vectorise=True)
    assert stacked == [changed == "trunk"]


def test_one_evaluation_per_source_and_one_of_the_deployed_model() -> None:
    calls: list[int] = []
    removals = {"w": torch.randn(5, 3)}

    def measure(theta: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        return theta["w"].square()

    theta = {"w": torch.randn(3)}
    scores = removed_scores(measure, theta, removals, 10, vectorise=False)
    assert len(calls) == 6
    torch.testing.assert_close(removed_scores(measure, theta, removals, 10, vectorise=True), scores)
    assert len(calls) == 7  # all rows at once


def test_large_effects_of_real_removals_are_no_reason_to_doubt(store: Store) -> None:
    reader = Reader(make_task(), store, measure=lambda model, batch: 1e-9 * model(batch[0])[:, 0])
    reader.scores(QUERIES)
    reader.observed.largest = 1e9
    assert reader.warnings == store.warnings


def test_a_model_in_half_precision_is_moved_by_exact_differences() -> None:
    theta: dict[str, Tensor] = {"w": torch.randn(50).bfloat16()}
    other = {"w": (theta["w"].float() * 1.01).bfloat16()}
    rows = {"w": 1000 * (theta["w"].float() - other["w"].float())[None]}

    def measure(theta: dict[str, Tensor]) -> Tensor:
        assert theta["w"].dtype == torch.bfloat16
        return theta["w"].float()

    for vectorise in (True, False):
        scores = removed_scores(measure, theta, rows, 1000, vectorise=vectorise)
        torch.testing.assert_close(scores, rows["w"])


@pytest.mark.parametrize("kernel", [removed_scores])
def test_many_sources_are_shifted_in_blocks(kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    theta, removals = {"w": torch.randn(9, dtype=torch.float64)}, {"w": torch.randn(11, 9, dtype=torch.float64)}

    def measure(theta: dict[str, Tensor]) -> Tensor:
        return theta["w"].tanh()

    whole = kernel(measure, theta, removals, 10, vectorise=True)
    monkeypatch.setattr("imprint.readout.kernels._SHIFTED_BYTES", 3 * 72)
    torch.testing.assert_close(kernel(measure, theta, removals, 10, vectorise=True), whole)
