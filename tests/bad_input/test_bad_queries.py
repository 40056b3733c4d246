"""What is wrong with queries, or with the store they are asked of, is refused with an error that names it."""

from typing import Any

import pytest
import torch

from imprint import DataError, Plan, Reader, ReadoutError, Sources, Store, StoreError, Task, attribute, self_influence
from tests.bad_input.inputs import N, columns, simulated, small_model


@pytest.mark.parametrize(
    "queries",
    [[], (), (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)), iter(())],
    ids=["list", "tuple", "columns", "generator"],
)
def test_there_must_be_queries(queries: Any, task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="no queries"):
        attribute(task, store, queries, progress=False)


def test_queries_must_be_iterable(task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="map-style dataset or an iterable of batches, got int"):
        attribute(task, store, 3, progress=False)


def test_a_batch_without_tensors_is_refused(task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="at least one tensor"):
        attribute(task, store, iter([("text", 3)]), progress=False)


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient"])
def test_nan_in_a_query_is_named(readout: Any, task: Task, store: Store) -> None:
    x, y = columns(4)
    x[2] = torch.nan
    with pytest.raises(ReadoutError, match="query 2"):
        attribute(task, store, (x, y), readout=readout, progress=False)


def test_nan_in_a_later_batch_of_queries_is_named(task: Task, store: Store) -> None:
    x, y = columns(6)
    x[5] = torch.nan
    with pytest.raises(ReadoutError, match=r"query 1 of its batch|query 5"):
        attribute(task, store, (x, y), batch_size=2, progress=False)


def test_nan_in_self_influence_is_named(task: Task) -> None:
    most = simulated(task, sources=Sources.groups({f"example {i}": [i] for i in range(N - 1)}))
    x, y = columns()
    x[7] = torch.nan
    with pytest.raises(ReadoutError, match="7"):
        self_influence(task, most, (x[:-1], y[:-1]), batch_size=5, progress=False)


def test_self_influence_needs_an_example_for_each_source(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match="3 sources, 12 examples"):
        self_influence(task, store, columns(), progress=False)


def test_an_unknown_readout_is_shown_the_known_ones(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match=r"'backward' is unknown.*jvp, central, literal, removed, gradient"):
        Reader(task, store, readout="backward")  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, -1])
def test_top_needs_at_least_one_source(k: int, task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match=f"at least 1 source, got {k}"):
        attribute(task, store, columns(3), top=k, progress=False)
    with pytest.raises(ReadoutError, match=f"at least 1 source, got {k}"):
        attribute(task, store, columns(3), progress=False).top(k)


def test_an_unknown_order_is_refused(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match='"magnitude", "raises" or "lowers", not by \'size\''):
        attribute(task, store, columns(3), top=1, by="size", progress=False)  # type: ignore[call-overload]


@pytest.mark.parametrize("step", [0.0, -1e-3, float("nan")])
def test_the_step_of_central_must_be_positive(step: float, task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match="step"):
        attribute(task, store, columns(3), readout="central", step=step, progress=False)


def test_literal_is_refused_where_the_engine_makes_no_end_points(task: Task, store: Store) -> None:
    with pytest.raises(ReadoutError, match=r"literal readout needs both perturbed end points.*keep_pair=True"):
        attribute(task, store, columns(3), readout="literal", progress=False)


def test_literal_is_refused_where_the_pair_was_not_kept(task: Task) -> None:
    without = simulated(task, plan=Plan(engine="trajectories", steps=2, lr=0.1))
    with pytest.raises(ReadoutError, match=r"both perturbed end points.*keep_pair=True"):
        attribute(task, without, columns(3), readout="literal", progress=False)


# --- a store of another task


def test_a_store_is_refused_by_a_task_that_selects_less(store: Store) -> None:
    with pytest.raises(
        StoreError, match=r"store has imprints of parameter '0\.weight', which the task does not select"
    ):
        attribute(Task.classifier(small_model(), parameters="2.*"), store, columns(3), progress=False)


def test_a_store_is_refused_by_a_task_that_selects_more() -> None:
    less = simulated(Task.classifier(small_model(), parameters="2.*"))
    with pytest.raises(
        StoreError, match=r"of another model than the store's.*selects '0\.weight', of which the store has no imprints"
    ):
        attribute(Task.classifier(small_model()), less, columns(3), progress=False)


def test_a_store_is_refused_by_a_model_of_another_shape(store: Store) -> None:
    with pytest.raises(StoreError, match=r"'0\.weight' was \(4, 3\) of torch\.float32.*task's is \(4, 5\)"):
        attribute(Task.classifier(small_model(features=5)), store, columns(3), progress=False)


def test_a_store_is_refused_by_a_model_of_another_precision(store: Store) -> None:
    with pytest.raises(StoreError, match=r"torch\.float32.*torch\.float64"):
        attribute(Task.classifier(small_model().double()), store, columns(3), progress=False)
