"""What an imprint must not depend on: chunks, batches, order, company, vectorisation."""

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Reader, Sources, Store, Task, attribute, simulate
from imprint.data import Data
from imprint.plan import Settings
from imprint.readout.kernels import ReadoutName
from imprint.simulation import engines
from imprint.simulation.descent import Descent
from imprint.simulation.engines import Work
from imprint.simulation.path import Hooks
from tests.problems import Problem, Rebuilt, TanhWithoutVmap, base, flattened, imprints, midpoints, unconverged_mlp

EXACT = 1e-10
PLANS = {
    "tangent": Plan(steps=6, lr=0.5, damping=0.1),
    "tangent, mini-batches": Plan(steps=6, lr=0.5, batch_size=10),
    "tangent, samples": Plan(steps=6, lr=0.5, batch_size=10, source_sample=3),
    "two-sided": Plan(engine="trajectories", steps=6, lr=0.5, keep_pair=True),
    "two-sided, mini-batches": Plan(engine="trajectories", steps=6, lr=0.5, batch_size=10, keep_pair=True),
    "one-sided, samples": Plan(
        engine="trajectories", variant="one_sided", steps=6, lr=0.5, batch_size=10, source_sample=3
    ),
    "mirrored": Plan(engine="trajectories", variant="mirrored", steps=6, lr=0.5, accept_drift=True),
}
under_every_plan = pytest.mark.parametrize("name", PLANS)
under_some_plans = pytest.mark.parametrize("name", ["tangent", "tangent, mini-batches", "two-sided, mini-batches"])


def problem() -> Problem:
    return unconverged_mlp(48)


SOURCES = Sources.groups(
    {"one": [5], "pair": [5, 40], "few": range(3, 9), "half": range(0, 48, 2), "three": [1, 2, 47], "some": range(20)}
)


def picked(sources: Sources, rows: list[int]) -> Sources:
    ids, names = (tuple(column[row] for row in rows) for column in (sources.ids, sources.names))
    return Sources(ids, names, tuple(sources.members[row] for row in rows))


def joined(left: Sources, right: Sources) -> Sources:
    return Sources(left.ids + right.ids, left.names + right.names, left.members + right.members)


def run(name: str, sources: Sources = SOURCES, **options: Any) -> Store:
    given = {"memory": "1GiB", "progress": False, **options}
    return simulate(problem().task, problem().data, sources, PLANS[name], **given)


@cache
def reference(name: str) -> Store:
    store = run(name)
    assert len(store.checkpoints[0].imprints) == 1
    return store


def furthest(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error of a column: no source hides behind a larger one."""
    return float(((actual - expected).norm(dim=0) / expected.norm(dim=0)).max())


def assert_same(store: Store, expected: Store, rows: list[int] | None = None) -> None:
    """The sources of `store` are the `rows` of `expected`, to rounding."""
    chosen = list(range(len(expected))) if rows is None else rows
    assert store.source_ids == tuple(expected.source_ids[row] for row in chosen)
    assert furthest(base(store)[:, None], base(expected)[:, None]) < EXACT
    assert furthest(imprints(store), imprints(expected)[:, chosen]) < EXACT
    if expected.checkpoints[0].midpoints:
        # a small difference of large numbers: what counts is its error beside the displacement it belongs to
        scale = imprints(expected)[:, chosen].norm(dim=0) / problem().n
        apart = (midpoints(store) - midpoints(expected)[:, chosen]).norm(dim=0)
        assert bool((apart < EXACT * scale).all())


@under_every_plan
def test_the_memory_budget_changes_nothing(name: str) -> None:
    scattered = [7 * place % 54 for place in range(54)]  # so that the six lie in different chunks
    crowd = picked(joined(SOURCES, Sources.per_example(48)), scattered)
    store = run(name, crowd, memory="300kB" if PLANS[name].batch_size is None else "100kB")
    shards = [file.rows for file in store.checkpoints[0].imprints if file.rows is not None]
    assert len(shards) > 3 and max(stop - start for start, stop in shards) > 1
    assert_same(reference(name), store, [scattered.index(row) for row in range(6)])


@under_every_plan
def test_the_order_of_the_sources_changes_nothing(name: str) -> None:
    order = [3, 0, 5, 1, 4, 2]
    assert_same(run(name, picked(SOURCES, order)), reference(name), order)


@under_every_plan
def test_the_batch_size_of_the_evaluation_changes_nothing(name: str) -> None:
    assert_same(run(name, batch_size=7), reference(name))


@under_every_plan
def test_sources_split_over_two_calls_get_the_same_imprints(name: str) -> None:
    for rows in ([0, 1, 2], [3, 4, 5]):
        assert_same(run(name, picked(SOURCES, rows)), reference(name), rows)


@under_every_plan
def test_an_unrelated_source_changes_nothing(name: str) -> None:
    large = Sources.groups({"large": range(4, 48)})  # too large to be differentiated together with the others
    assert_same(reference(name), run(name, joined(large, SOURCES)), list(range(1, 7)))


@under_every_plan
def test_single_examples_are_the_same_per_example_and_as_groups(name: str) -> None:
    wanted = [0, 17, 47]
    each = run(name, Sources.per_example(48))
    assert_same(run(name, Sources.groups({str(i): [i] for i in wanted})), each, wanted)


@under_every_plan
def test_a_loop_over_sources_gives_what_vmap_gives(name: str) -> None:
    functional, theta = problem().task.at(problem().task.state())
    data = Data(problem().data, device=torch.device("cpu"))
    plan = PLANS[name]
    descent = Descent(functional, theta, data, SOURCES, plan, 6, 0.5, damping=0.1, vectorise=False)
    engine = engines.get(plan)(Work(0, Settings(6, 0.5, 0.1, 1.0), descent, torch.float64))
    ends = [engine.simulate(d, Hooks()) for d in (descent, replace(descent, vectorise=True))]
    loop, together = (flattened(end.imprints) for end in ends)
    assert furthest(loop, together) < EXACT


@under_some_plans
def test_samples_collated_one_by_one_give_what_columns_give(name: str) -> None:
    x, y = problem().data

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        return {"x": torch.stack([s[0] for s in samples]), "y": torch.stack([s[1] for s in samples]), "note": "text"}

    task = Task(
        problem().task.model,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none"),
        regulariser=problem().task.regulariser,
    )
    samples = list(zip(x, y, strict=True))
    store = simulate(task, samples, SOURCES, PLANS[name], collate_fn=collate, batch_size=9, progress=False)
    assert_same(store, reference(name))


@under_some_plans
def test_a_model_that_vmap_refuses_gets_the_same_imprints_and_scores(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task.classifier(Rebuilt(problem().task.model, TanhWithoutVmap), regulariser=problem().task.regulariser)
    with caplog.at_level(logging.WARNING):
        store = simulate(task, problem().data, SOURCES, PLANS[name], progress=False)
        result = attribute(task, store, problem().queries, progress=False)
    assert "sources are simulated one by one" in caplog.text and "sources are read one by one" in caplog.text
    assert store.checkpoints[0].choices.vectorised is False
    assert furthest(imprints(store), imprints(reference(name))) < EXACT
    assert furthest(result.scores, problem().attribute(reference(name)).scores) < EXACT


@pytest.mark.parametrize("readout", ["jvp", "central", "literal", "gradient"])
def test_query_batches_and_chunks_of_sources_change_no_score(readout: ReadoutName) -> None:
    task, queries, store = problem().task, problem().queries, reference("two-sided")
    step = 1e-4 if readout == "central" else None

    def scores(batch_size: int, memory: str) -> Tensor:
        return attribute(
            task, store, queries, readout=readout, step=step, batch_size=batch_size, memory=memory, progress=False
        ).scores

    tight = Reader(task, store, readout=readout, step=step, memory="3kB")
    assert len(tight.chunks(queries, len(queries[0]))) > 1
    expected = scores(64, "1GiB")
    for batch_size in (1, 3):
        assert furthest(scores(batch_size, "1GiB"), expected) < EXACT
    assert furthest(scores(64, "3kB"), expected) < EXACT
    assert furthest(scores(1, "3kB"), expected) < EXACT
