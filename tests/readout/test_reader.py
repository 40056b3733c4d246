"""What each readout is, and the same scores however they are cut up."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Reader, Sources, Store, Task, attribute, self_influence, simulate
from imprint.attribution.top import Order
from imprint.task import Batch
from imprint.tensors.vectors import norm, scale
from tests.problems import TanhInReverse
from tests.readout.reading import PLAN, N, columns, new_model, scored, simulated


@pytest.mark.parametrize("nudge", [0.0, 1e-7], ids=["zero", "next to zero"])
@pytest.mark.parametrize("model", [nn.Linear(3, 2), new_model()], ids=["all of them", "the last layer"])
def test_parameters_near_zero_are_read_by_differences_as_by_forward_mode(model: nn.Module, nudge: float) -> None:
    """Steps relative to their own length would be 0, or vanish in the rounding of everything else."""
    chosen = "3.*" if isinstance(model, nn.Sequential) else "*"
    task = Task.classifier(model, measure="margin", parameters=chosen)
    with torch.no_grad():
        for name in task.names:
            model.get_parameter(name).fill_(nudge)
    store = simulated(task, Plan(engine="spectral", steps=5, lr=0.1, form="dense"))  # which is read where it starts
    exact, differences = (scored(task, store, readout=readout) for readout in ("jvp", "central"))
    torch.testing.assert_close(differences, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("chosen", ["*", "0.*", "3.*"])
def test_parameters_of_a_usual_size_are_their_own_scale(chosen: str) -> None:
    task = Task.classifier(new_model(), parameters=chosen)
    functional, theta = task.at(task.state())
    assert scale(theta, functional) == norm(theta)


def test_how_far_zero_parameters_drift_is_told_by_the_size_of_the_others() -> None:
    model = new_model()
    nn.init.zeros_(model.get_parameter("3.weight"))
    task = Task.classifier(model, parameters="3.weight")
    store = simulated(task, Plan(steps=3, lr=0.1))
    moved = store.base(0, task.device)["3.weight"].norm()
    others = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name != "3.weight"])
    expected = moved / (others.norm() * (8 / len(others)) ** 0.5)
    assert store.checkpoints[0].measured.drift == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("by", ["magnitude", "raises", "lowers"])
@pytest.mark.parametrize("k", [1, 4, 99])
def test_streamed_top_is_the_top_of_all_scores(by: Order, k: int, task: Task, store: Store) -> None:
    queries = columns(5, 2)
    reader = Reader(task, store, memory="1B")
    assert len(reader.chunks(queries, 5)) == len(store)
    streamed = attribute(task, store, queries, top=k, by=by, memory="1B", batch_size=2, progress=False)
    full = attribute(task, store, queries, progress=False)
    scores = full.scores.gather(1, streamed.indices)
    torch.testing.assert_close(streamed.scores, scores)
    key = {"magnitude": scores.abs(), "raises": -scores, "lowers": scores}[by]
    assert bool((key.diff(dim=1) <= 0).all())
    assert torch.equal(streamed.indices, full.top(k, by=by).indices)
    assert streamed.indices.shape == (5, min(k, len(store)))


def test_a_source_whose_removal_raises_the_measure_comes_first_by_raises(task: Task, store: Store) -> None:
    result = attribute(task, store, columns(5, 2), progress=False)
    for query, credits in enumerate(result.top(1, by="raises")):
        assert credits[0].removal_effect == pytest.approx(float(result.removal_effect[query].max()))
    for query, credits in enumerate(result.top(1, by="lowers")):
        assert credits[0].removal_effect == pytest.approx(float(result.removal_effect[query].min()))


def test_a_reader_answers_for_any_block_in_any_order(task: Task, store: Store) -> None:
    queries = columns(5, 2)
    reader = Reader(task, store)
    everything = reader.scores(queries, 5)
    for start, stop in ((0, 2), (0, 6), (2, 3), (2, 5)):
        torch.testing.assert_close(reader.block(start, stop, queries, 5), everything[:, start:stop])


def test_a_reader_gives_the_same_for_the_same_queries(task: Task, store: Store) -> None:
    reader = Reader(task, store)
    first, other, again = (reader.scores(columns(5, seed), 5) for seed in (2, 3, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_batches_of_different_lengths_are_scored_in_order(task: Task, store: Store) -> None:
    x, y = columns(5, 2)
    batches = iter([(x[:2], y[:2]), (x[2:2], y[2:2]), (x[2:], y[2:])])
    torch.testing.assert_close(scored(task, store, batches), scored(task, store))


def test_checkpoints_combine_by_their_weighted_mean(task: Task) -> None:
    early = {name: 0.5 * tensor for name, tensor in task.state().items()}
    states = [early, task.state(), early]
    plan = Plan(steps=2, lr=0.1, weight=(1.0, 3.0, 0.0))
    both = scored(task, simulated(task, plan, checkpoints=states))
    alone = [scored(task, simulated(task, Plan(steps=2, lr=0.1), checkpoints=[state])) for state in states]
    torch.testing.assert_close(both, 0.25 * alone[0] + 0.75 * alone[1])


def test_imprints_in_bfloat16_take_half_the_space_and_give_nearly_the_same_scores(task: Task, store: Store) -> None:
    half = simulated(task, dtype=torch.bfloat16)
    sizes = [made.checkpoints[0].imprints[0].bytes for made in (half, store)]
    assert sizes[0] < 0.75 * sizes[1]
    found, exact = scored(task, half), scored(task, store)
    assert 0 < float((found - exact).norm()) < 0.01 * float(exact.norm())


def test_a_float64_model_keeps_its_precision() -> None:
    task = Task.classifier(new_model(torch.float64))
    store = simulated(task)
    assert store.manifest.dtype == "float64"
    imprints = store.imprints(0, 0, len(store), torch.device("cpu"))
    assert {tensor.dtype for tensor in imprints.values()} == {torch.float64}
    queries = columns(5, 2, torch.float64)
    jvp, gradient = (scored(task, store, queries, readout=readout) for readout in ("jvp", "gradient"))
    torch.testing.assert_close(jvp, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_central_is_not_fooled_by_rounding_in_half_precision(dtype: torch.dtype) -> None:
    """The smallest steps move nothing there: their scores agree with each other, and are all 0."""
    task = Task.classifier(new_model(dtype))
    store, queries = simulated(task), columns(5, 2, dtype)
    exact, found = (scored(task, store, queries, readout=readout) for readout in ("gradient", "central"))
    assert float((found - exact).norm()) < 0.3 * float(exact.norm())


def test_central_is_exact_where_the_measure_is_linear() -> None:
    model = nn.Linear(3, 2).double()
    task = Task.classifier(model, measure="logit")
    store, queries = simulated(task), columns(5, 2, torch.float64)
    exact = scored(task, store, queries, readout="gradient")
    for step in (1e-4, 1e-1, 10.0):
        torch.testing.assert_close(scored(task, store, queries, readout="central", step=step), exact)


@pytest.mark.parametrize(("variant", "sides"), [("two_sided", (1, -1)), ("one_sided", (1, 0)), ("mirrored", (1, -1))])
def test_literal_is_the_difference_between_the_end_points(variant: Any, sides: tuple[int, int], task: Task) -> None:
    """Off the base by ±(ε/N)·u around the pair's midpoint, and evaluated on a model of its own."""
    plan = Plan(
        engine="trajectories",
        variant=variant,
        steps=3,
        lr=0.2,
        epsilon=4.0,
        keep_pair=variant == "two_sided",
        accept_drift=variant == "mirrored",
    )
    store, cpu = simulated(task, plan), torch.device("cpu")
    base, imprints = store.base(0, cpu), store.imprints(0, 0, len(store), cpu)
    middle = store.midpoints(0, 0, len(store), cpu) or {name: torch.zeros_like(u) for name, u in imprints.items()}
    twin, queries, step = new_model().eval(), columns(5, 2), 4.0 / N
    expected = torch.empty(5, len(store), dtype=torch.float64)
    for source in range(len(store)):
        values = []
        for side in sides:
            twin.load_state_dict(
                {name: base[name] + middle[name][source] + side * step * imprints[name][source] for name in base}
            )
            with torch.no_grad():
                values.append(task.measure(twin, queries))
        expected[:, source] = (values[0] - values[1]) / (step * (sides[0] - sides[1]))
    torch.testing.assert_close(scored(task, store, queries, readout="literal"), expected, rtol=1e-4, atol=1e-4)


def test_the_step_of_central_is_recorded(task: Task, store: Store) -> None:
    details = attribute(task, store, columns(5, 2), readout="central", progress=False).labels.details
    assert details["readout"] == "central"
    assert 0 < details["central_step"] < 1
    assert "fallback" not in details
    given = attribute(task, store, columns(5, 2), readout="central", step=0.01, progress=False).labels.details
    assert given["central_step"] == 0.01


def test_jvp_needs_no_step(task: Task, store: Store) -> None:
    details = attribute(task, store, columns(5, 2), progress=False).labels.details
    assert details["readout"] == "jvp" and "central_step" not in details


def test_a_fallback_is_logged_and_recorded_with_its_reason(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def measure(model: nn.Module, batch: Batch) -> Tensor:
        return TanhInReverse.apply(model(batch[0]))[:, 0]  # type: ignore[no-any-return, no-untyped-call]

    task = Task.classifier(new_model(), measure=measure)
    result = attribute(task, store, columns(5, 2), progress=False)
    assert result.labels.details["readout"] == "central"
    assert "jvp" in result.labels.details["fallback"]
    assert result.labels.details["central_step"] > 0
    assert "central differences" in caplog.text and "jvp function" in caplog.text
    exact = attribute(task, store, columns(5, 2), readout="gradient", progress=False).scores
    torch.testing.assert_close(result.scores, exact, rtol=1e-2, atol=1e-3)


def test_a_loop_instead_of_vmap_is_logged_with_its_reason(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def measure(model: nn.Module, batch: Batch) -> Tensor:
        values: Tensor = model(batch[0])[:, 0]
        return values if values.detach().abs().max().item() < 1e6 else 2 * values

    scored(Task.classifier(new_model(), measure=measure), store, readout="central")
    assert "one by one" in caplog.text and ".item()" in caplog.text


def test_self_influence_pairs_each_example_with_its_own_source(task: Task) -> None:
    each = simulate(task, columns(N, 1), Sources.per_example(N), PLAN, progress=False)
    found = self_influence(task, each, columns(N, 1), batch_size=5, progress=False)
    torch.testing.assert_close(found, scored(task, each, columns(N, 1)).diagonal())


def test_progress_counts_every_score(task: Task, store: Store) -> None:
    told: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        told.append((done, total))

    attribute(task, store, columns(5, 2), batch_size=2, memory="1B", progress=report)
    assert told[-1] == (5 * len(store), 5 * len(store))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
