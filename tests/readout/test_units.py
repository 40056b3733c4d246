"""Scores of several runs: the mean of all, and the spread of the runs or of the checkpoints of one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from imprint import Attribution, Plan, Store, Task, attribute
from imprint.readout.kernels import ReadoutName
from tests.readout.reading import columns, new_model, simulated

STEPS = Plan(steps=2, lr=0.1)
QUERIES = columns(5, 2, torch.float64)


def make_task() -> Task:
    return Task.classifier(new_model(torch.float64))


def make_state(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in make_task().state().items()
    }


A, B, C = [make_state(1), make_state(2)], [make_state(3), make_state(4)], [make_state(5)]


def read(store: Store, **options: Any) -> Attribution:
    result = attribute(make_task(), store, QUERIES, progress=False, **options)
    assert isinstance(result, Attribution)
    return result


@pytest.fixture(scope="module")
def runs() -> Store:
    return simulated(make_task(), STEPS, checkpoints=[A, B, C])


def effects(*checkpoints: dict[str, Tensor]) -> Tensor:
    """The effects that some checkpoints give by themselves."""
    return read(simulated(make_task(), STEPS, checkpoints=list(checkpoints))).removal_effect


def expected_error(each: list[Tensor], shares: list[float]) -> Tensor:
    weights = torch.tensor(shares, dtype=torch.float64)[:, None, None]
    stacked, squares = torch.stack(each), float(weights.square().sum())
    mean = (weights * stacked).sum(0)
    return (squares / (1 - squares) * (weights * (stacked - mean).square()).sum(0)).sqrt()


def test_the_error_is_the_spread_of_what_each_run_gives_alone(runs: Store) -> None:
    result, alone = read(runs), [effects(*A), effects(*B), effects(*C)]
    torch.testing.assert_close(result.standard_error, expected_error(alone, [0.4, 0.4, 0.2]))
    torch.testing.assert_close(result.removal_effect, 0.4 * alone[0] + 0.4 * alone[1] + 0.2 * alone[2])
    assert result.details["error"] == "standard errors over 3 runs"


def test_weights_count_and_what_has_none_is_left_out() -> None:
    plan = Plan(steps=2, lr=0.1, weight=(1.0, 3.0, 0.0, 2.0, 0.0))
    result = read(simulated(make_task(), plan, checkpoints=[A, B, C]))
    first = 0.25 * effects(A[0]) + 0.75 * effects(A[1])
    torch.testing.assert_close(result.standard_error, expected_error([first, effects(B[1])], [2 / 3, 1 / 3]))
    assert result.details["error"] == "standard errors over 2 runs"


def test_checkpoints_of_one_run_spread_too_and_it_is_called_a_lower_bound() -> None:
    for given in (A, [A]):
        result = read(simulated(make_task(), STEPS, checkpoints=given))
        torch.testing.assert_close(result.standard_error, expected_error([effects(state) for state in A], [0.5, 0.5]))
        assert result.details["error"].startswith("standard errors over 2 checkpoints of one run: a lower bound")


def test_one_checkpoint_says_nothing_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is computed for it."""
    monkeypatch.setattr("imprint.readout.units.Units.deviate", None)
    for given in (None, C, [C]):
        result = read(simulated(make_task(), STEPS, checkpoints=given))
        assert result.standard_error is None and result.replicates == ()
        assert "nothing about what another seed would change" in repr(result)


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient"])
def test_chunks_of_sources_and_batches_of_queries_change_no_error(readout: ReadoutName, runs: Store) -> None:
    whole = read(runs, readout=readout)
    for options in ({"batch_size": 2}, {"memory": "40kB"}, {"batch_size": 1, "memory": "30kB"}):
        chunked = read(runs, readout=readout, **options)
        torch.testing.assert_close(chunked.standard_error, whole.standard_error, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(whole.standard_error, read(runs).standard_error, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "memory": "30kB"}])
def test_the_first_sources_have_the_same_errors_without_the_rest_being_kept(options: Any, runs: Store) -> None:
    streamed = attribute(make_task(), runs, QUERIES, top=2, progress=False, **options)
    whole = read(runs).top(2)
    assert torch.equal(streamed.indices, whole.indices)
    torch.testing.assert_close(streamed.standard_error, whole.standard_error)
    assert streamed.distinguishable is not None and whole.distinguishable is not None
    assert torch.equal(streamed.distinguishable, whole.distinguishable)
    assert streamed.replicates[0].deviations.shape == (3, 5, 2)
    assert streamed.labels.details["error"] == "standard errors over 3 runs"


def test_spreads_that_do_not_fit_into_memory_are_left_out_and_said_to_be(runs: Store) -> None:
    result = read(runs, memory="600B")
    assert result.standard_error is None
    assert result.details["error"].startswith(
        "standard errors not kept: all scores of 3 runs take 7.2e-07 GB, more than"
    )
    torch.testing.assert_close(result.scores, read(runs).scores)
    assert attribute(make_task(), runs, QUERIES, top=2, memory="600B", progress=False).standard_error is not None


def test_differences_pair_runs_by_their_checkpoints(runs: Store) -> None:
    again = simulated(make_task(), Plan(steps=3, lr=0.1), checkpoints=[A, B, C])
    paired = read(runs) - read(again)
    alone = [one - other for one, other in zip(_each_run(STEPS), _each_run(Plan(steps=3, lr=0.1)), strict=True)]
    torch.testing.assert_close(paired.standard_error, expected_error(alone, [0.4, 0.4, 0.2]))
    others = simulated(make_task(), STEPS, checkpoints=[[make_state(8)], [make_state(9)]])
    apart = read(runs) - read(others)
    errors = [error for error in (read(runs).standard_error, read(others).standard_error) if error is not None]
    torch.testing.assert_close(apart.standard_error, (errors[0].square() + errors[1].square()).sqrt())


def _each_run(plan: Plan) -> list[Tensor]:
    return [read(simulated(make_task(), plan, checkpoints=run)).removal_effect for run in (A, B, C)]
