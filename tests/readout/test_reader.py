"""The readout: forward passes only, the caller's state untouched, the same scores however they are cut up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan, Reader, ReadoutError, Sources, Store, Task, attribute, self_influence, simulate
from imprint.attribution.top import Order
from imprint.readout.kernels import ReadoutName
from imprint.task import Batch
from imprint.tensors.vectors import norm, scale
from tests.problems import TanhInReverse

N, SOURCES = 12, Sources.by_label([index % 6 for index in range(12)])
PLAN = Plan(engine="trajectories", steps=3, lr=0.2, keep_pair=True)
FORWARD_ONLY: list[ReadoutName] = ["jvp", "central", "literal"]


def _columns(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator, dtype=dtype), torch.randint(2, (rows,), generator=generator)


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).to(dtype)


def _simulate(task: Task, plan: Plan = PLAN, **options: Any) -> Store:
    data = _columns(N, 1, next(task.model.parameters()).dtype)
    return simulate(task, data, SOURCES, plan, progress=False, **options)


def _scores(task: Task, store: Store, queries: Any = None, **options: Any) -> Tensor:
    result = attribute(task, store, queries or _columns(5, 2), progress=False, **options)
    scores: Tensor = result.scores
    return scores


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.classifier(_model(), measure="margin")


@pytest.fixture(scope="module")
def store(task: Task) -> Store:
    return _simulate(task)


# --- forward only


@contextmanager
def _no_backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Every way into the backward pass raises; what a graph would save is listed."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a backward pass was run")

    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with monkeypatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for owner, name in ((torch.autograd, "backward"), (torch.autograd, "grad"), (torch.Tensor, "backward")):
            patch.setattr(owner, name, refuse)
        yield saved


@pytest.mark.parametrize("readout", FORWARD_ONLY)
def test_a_readout_builds_no_graph_and_runs_no_backward(
    readout: ReadoutName, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def measure(model: nn.Module, batch: Batch) -> Tensor:
        values: Tensor = model(batch[0])[:, 0]
        seen.append((torch.is_grad_enabled(), values.requires_grad))
        return values

    task = Task.classifier(_model(), measure=measure)
    with torch.enable_grad(), _no_backward(monkeypatch) as saved:
        scores = _scores(task, store, readout=readout)
    assert not saved
    assert not any(requires for _, requires in seen)
    assert sum(enabled for enabled, _ in seen) == 1  # when it is looked for other references to the model
    assert not scores.requires_grad


def test_self_influence_builds_no_graph_and_runs_no_backward(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    each = simulate(task, _columns(N, 1), Sources.per_example(N), PLAN, progress=False)
    with torch.enable_grad(), _no_backward(monkeypatch) as saved:
        found = self_influence(task, each, _columns(N, 1), progress=False)
    assert not saved
    assert not found.requires_grad


def test_the_proof_of_no_backward_would_notice_one(task: Task, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"backward pass was run|saved tensor hooks"), _no_backward(monkeypatch):
        _scores(task, store, readout="gradient")
    with _no_backward(monkeypatch) as saved:
        task.loss(task.model, _columns(5, 2))
    assert saved


class _OneWay(torch.autograd.Function):
    """tanh, whose backward can be taken away after training."""

    generate_vmap_rule = True
    has_backward = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if not _OneWay.has_backward:
            raise AssertionError("a backward pass was run")
        (y,) = ctx.saved_tensors
        return gradients[0] * (1 - y**2)  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return tangents[0] * (1 - y**2)  # type: ignore[no-any-return]


class _OneWayModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_OneWay.apply(self.first(x)))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("readout", FORWARD_ONLY)
def test_a_model_without_a_backward_is_read_out(readout: ReadoutName, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    task = Task.classifier(_OneWayModel().double())
    plan = Plan(engine="trajectories", steps=3, lr=0.2, epsilon=0.01, keep_pair=True)
    store, queries = _simulate(task, plan), _columns(5, 2, torch.float64)
    expected = _scores(task, store, queries, readout="gradient")
    monkeypatch.setattr(_OneWay, "has_backward", False)
    with pytest.raises(ReadoutError, match="a backward pass was run"):
        _scores(task, store, queries, readout="gradient")
    found = _scores(task, store, queries, readout=readout)
    tolerance = {"jvp": 1e-12, "central": 1e-6, "literal": 1e-5}[readout]
    assert float((found - expected).norm()) < tolerance * float(expected.norm())


# --- inference mode


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_scores_are_the_same_inside_inference_mode(readout: ReadoutName, task: Task, store: Store) -> None:
    outside = _scores(task, store, readout=readout)
    assert float(outside.abs().min()) > 0
    with torch.inference_mode():
        inside = _scores(task, store, readout=readout)
    torch.testing.assert_close(inside, outside)


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_queries_made_inside_inference_mode_are_scored_the_same(readout: ReadoutName, task: Task, store: Store) -> None:
    with torch.inference_mode():
        queries = _columns(5, 2)
        assert queries[0].is_inference()
        inside = _scores(task, store, queries, readout=readout)
        batches = _scores(task, store, iter([queries]), readout=readout)
    expected = _scores(task, store, readout=readout)
    torch.testing.assert_close(inside, expected)
    torch.testing.assert_close(batches, expected)
    torch.testing.assert_close(_scores(task, store, queries, readout=readout), expected)


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_a_model_made_inside_inference_mode_is_scored_the_same(readout: ReadoutName, task: Task, store: Store) -> None:
    with torch.inference_mode():
        twin = Task.classifier(_model(), measure="margin")
        assert twin.model.get_parameter("0.weight").is_inference()
        inside = _scores(twin, store, readout=readout)
    expected = _scores(task, store, readout=readout)
    torch.testing.assert_close(inside, expected)
    torch.testing.assert_close(_scores(twin, store, readout=readout), expected)


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_a_readout_leaves_inference_mode_and_comes_back_to_it(readout: ReadoutName, store: Store) -> None:
    """Inside it, forward mode returns zeros in some versions of torch."""
    seen: set[bool] = set()

    def measure(model: nn.Module, batch: Batch) -> Tensor:
        seen.add(torch.is_inference_mode_enabled())
        return model(batch[0])[:, 0]  # type: ignore[no-any-return]

    with torch.inference_mode():
        _scores(Task.classifier(_model(), measure=measure), store, readout=readout)
        assert torch.is_inference_mode_enabled()
    assert seen == {False}


def test_scores_made_inside_inference_mode_can_be_used_outside(task: Task, store: Store) -> None:
    with torch.inference_mode():
        result = attribute(task, store, _columns(5, 2), progress=False)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    (weight @ result.removal_effect).sum().backward()
    assert weight.grad is not None


# --- the caller's state


def _flags() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        torch.backends.mha.get_fastpath_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _mixed_modes(model: nn.Module) -> list[bool]:
    """Training mode with two submodules left in evaluation mode, as for frozen batch norm."""
    model.train()
    model.get_submodule("0").eval()
    model.get_submodule("2").eval()
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_modes_and_attention_settings_come_back_after_a_readout(
    readout: ReadoutName, fails: bool, store: Store
) -> None:
    def measure(model: nn.Module, batch: Batch) -> Tensor:
        assert not any(module.training for module in model.modules())
        assert _flags()[:3] == (False, False, False)
        if fails:
            raise RuntimeError("nothing to see")
        return model(batch[0])[:, 0]  # type: ignore[no-any-return]

    task = Task.classifier(_model(), measure=measure)
    modes, flags = _mixed_modes(task.model), _flags()
    assert flags[0] and any(flags[1:3])
    if fails:
        with pytest.raises(Exception, match="nothing to see"):
            _scores(task, store, readout=readout)
    else:
        _scores(task, store, readout=readout)
    assert [module.training for module in task.model.modules()] == modes
    assert _flags() == flags


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
def test_modes_and_attention_settings_come_back_after_a_simulation(fails: bool) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if fails:
            raise RuntimeError("nothing to see")
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    task = Task(_model(), loss)
    modes, flags = _mixed_modes(task.model), _flags()
    if fails:
        with pytest.raises(Exception, match="nothing to see"):
            _simulate(task)
    else:
        _simulate(task)
    assert [module.training for module in task.model.modules()] == modes
    assert _flags() == flags


def test_a_disabled_fast_path_stays_disabled(task: Task, store: Store) -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        _scores(task, store)
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_neither_weights_nor_queries_are_touched(task: Task, store: Store) -> None:
    before, queries = task.state(), _columns(5, 2)
    for readout in (*FORWARD_ONLY, "gradient"):
        _scores(task, store, queries, readout=readout)
    for name, tensor in task.state().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in task.model.parameters())
    assert all(torch.equal(*pair) for pair in zip(queries, _columns(5, 2), strict=True))


# --- differences of parameters that are hardly there


@pytest.mark.parametrize("nudge", [0.0, 1e-7], ids=["zero", "next to zero"])
@pytest.mark.parametrize("model", [nn.Linear(3, 2), _model()], ids=["all of them", "the last layer"])
def test_parameters_near_zero_are_read_by_differences_as_by_forward_mode(model: nn.Module, nudge: float) -> None:
    """Steps relative to their own length would be 0, or vanish in the rounding of everything else."""
    chosen = "3.*" if isinstance(model, nn.Sequential) else "*"
    task = Task.classifier(model, measure="margin", parameters=chosen)
    with torch.no_grad():
        for name in task.names:
            model.get_parameter(name).fill_(nudge)
    store = _simulate(task, Plan(engine="spectral", steps=5, lr=0.1, form="dense"))  # which is read where it starts
    exact, differences = (_scores(task, store, readout=readout) for readout in ("jvp", "central"))
    torch.testing.assert_close(differences, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("chosen", ["*", "0.*", "3.*"])
def test_parameters_of_a_usual_size_are_their_own_scale(chosen: str) -> None:
    task = Task.classifier(_model(), parameters=chosen)
    functional, theta = task.at(task.state())
    assert scale(theta, functional) == norm(theta)


def test_how_far_zero_parameters_drift_is_told_by_the_size_of_the_others() -> None:
    model = _model()
    nn.init.zeros_(model.get_parameter("3.weight"))
    task = Task.classifier(model, parameters="3.weight")
    store = _simulate(task, Plan(steps=3, lr=0.1))
    moved = store.base(0, task.device)["3.weight"].norm()
    others = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name != "3.weight"])
    expected = moved / (others.norm() * (8 / len(others)) ** 0.5)
    assert store.checkpoints[0].measured.drift == pytest.approx(float(expected), rel=1e-4)


# --- the same scores however they are cut up


@pytest.mark.parametrize("by", ["magnitude", "raises", "lowers"])
@pytest.mark.parametrize("k", [1, 4, 99])
def test_streamed_top_is_the_top_of_all_scores(by: Order, k: int, task: Task, store: Store) -> None:
    queries = _columns(5, 2)
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
    result = attribute(task, store, _columns(5, 2), progress=False)
    for query, credits in enumerate(result.top(1, by="raises")):
        assert credits[0].removal_effect == pytest.approx(float(result.removal_effect[query].max()))
    for query, credits in enumerate(result.top(1, by="lowers")):
        assert credits[0].removal_effect == pytest.approx(float(result.removal_effect[query].min()))


def test_a_reader_answers_for_any_block_in_any_order(task: Task, store: Store) -> None:
    queries = _columns(5, 2)
    reader = Reader(task, store)
    everything = reader.scores(queries, 5)
    for start, stop in ((0, 2), (0, 6), (2, 3), (2, 5)):
        torch.testing.assert_close(reader.block(start, stop, queries, 5), everything[:, start:stop])


def test_a_reader_gives_the_same_for_the_same_queries(task: Task, store: Store) -> None:
    reader = Reader(task, store)
    first, other, again = (reader.scores(_columns(5, seed), 5) for seed in (2, 3, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_batches_of_different_lengths_are_scored_in_order(task: Task, store: Store) -> None:
    x, y = _columns(5, 2)
    batches = iter([(x[:2], y[:2]), (x[2:2], y[2:2]), (x[2:], y[2:])])
    torch.testing.assert_close(_scores(task, store, batches), _scores(task, store))


def test_checkpoints_combine_by_their_weighted_mean(task: Task) -> None:
    early = {name: 0.5 * tensor for name, tensor in task.state().items()}
    states = [early, task.state(), early]
    plan = Plan(steps=2, lr=0.1, weight=(1.0, 3.0, 0.0))
    both = _scores(task, _simulate(task, plan, checkpoints=states))
    alone = [_scores(task, _simulate(task, Plan(steps=2, lr=0.1), checkpoints=[state])) for state in states]
    torch.testing.assert_close(both, 0.25 * alone[0] + 0.75 * alone[1])


# --- precision


def test_imprints_in_bfloat16_take_half_the_space_and_give_nearly_the_same_scores(task: Task, store: Store) -> None:
    half = _simulate(task, dtype=torch.bfloat16)
    sizes = [made.checkpoints[0].imprints[0].bytes for made in (half, store)]
    assert sizes[0] < 0.75 * sizes[1]
    found, exact = _scores(task, half), _scores(task, store)
    assert 0 < float((found - exact).norm()) < 0.01 * float(exact.norm())


def test_a_float64_model_keeps_its_precision() -> None:
    task = Task.classifier(_model(torch.float64))
    store = _simulate(task)
    assert store.manifest.dtype == "float64"
    imprints = store.imprints(0, 0, len(store), torch.device("cpu"))
    assert {tensor.dtype for tensor in imprints.values()} == {torch.float64}
    queries = _columns(5, 2, torch.float64)
    jvp, gradient = (_scores(task, store, queries, readout=readout) for readout in ("jvp", "gradient"))
    torch.testing.assert_close(jvp, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_central_is_not_fooled_by_rounding_in_half_precision(dtype: torch.dtype) -> None:
    """The smallest steps move nothing there: their scores agree with each other, and are all 0."""
    task = Task.classifier(_model(dtype))
    store, queries = _simulate(task), _columns(5, 2, dtype)
    exact, found = (_scores(task, store, queries, readout=readout) for readout in ("gradient", "central"))
    assert float((found - exact).norm()) < 0.3 * float(exact.norm())


# --- what each readout is


def test_central_is_exact_where_the_measure_is_linear() -> None:
    model = nn.Linear(3, 2).double()
    task = Task.classifier(model, measure="logit")
    store, queries = _simulate(task), _columns(5, 2, torch.float64)
    exact = _scores(task, store, queries, readout="gradient")
    for step in (1e-4, 1e-1, 10.0):
        torch.testing.assert_close(_scores(task, store, queries, readout="central", step=step), exact)


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
    store, cpu = _simulate(task, plan), torch.device("cpu")
    base, imprints = store.base(0, cpu), store.imprints(0, 0, len(store), cpu)
    middle = store.midpoints(0, 0, len(store), cpu) or {name: torch.zeros_like(u) for name, u in imprints.items()}
    twin, queries, step = _model().eval(), _columns(5, 2), 4.0 / N
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
    torch.testing.assert_close(_scores(task, store, queries, readout="literal"), expected, rtol=1e-4, atol=1e-4)


def test_the_step_of_central_is_recorded(task: Task, store: Store) -> None:
    details = attribute(task, store, _columns(5, 2), readout="central", progress=False).labels.details
    assert details["readout"] == "central"
    assert 0 < details["central_step"] < 1
    assert "fallback" not in details
    given = attribute(task, store, _columns(5, 2), readout="central", step=0.01, progress=False).labels.details
    assert given["central_step"] == 0.01


def test_jvp_needs_no_step(task: Task, store: Store) -> None:
    assert attribute(task, store, _columns(5, 2), progress=False).labels.details == {"readout": "jvp"}


def test_a_fallback_is_logged_and_recorded_with_its_reason(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def measure(model: nn.Module, batch: Batch) -> Tensor:
        return TanhInReverse.apply(model(batch[0]))[:, 0]  # type: ignore[no-any-return, no-untyped-call]

    task = Task.classifier(_model(), measure=measure)
    result = attribute(task, store, _columns(5, 2), progress=False)
    assert result.labels.details["readout"] == "central"
    assert "jvp" in result.labels.details["fallback"]
    assert result.labels.details["central_step"] > 0
    assert "central differences" in caplog.text and "jvp function" in caplog.text
    exact = attribute(task, store, _columns(5, 2), readout="gradient", progress=False).scores
    torch.testing.assert_close(result.scores, exact, rtol=1e-2, atol=1e-3)


def test_a_loop_instead_of_vmap_is_logged_with_its_reason(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def measure(model: nn.Module, batch: Batch) -> Tensor:
        values: Tensor = model(batch[0])[:, 0]
        return values if values.detach().abs().max().item() < 1e6 else 2 * values

    _scores(Task.classifier(_model(), measure=measure), store, readout="central")
    assert "one by one" in caplog.text and ".item()" in caplog.text


def test_self_influence_pairs_each_example_with_its_own_source(task: Task) -> None:
    each = simulate(task, _columns(N, 1), Sources.per_example(N), PLAN, progress=False)
    found = self_influence(task, each, _columns(N, 1), batch_size=5, progress=False)
    torch.testing.assert_close(found, _scores(task, each, _columns(N, 1)).diagonal())


def test_progress_counts_every_score(task: Task, store: Store) -> None:
    told: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        told.append((done, total))

    attribute(task, store, _columns(5, 2), batch_size=2, memory="1B", progress=report)
    assert told[-1] == (5 * len(store), 5 * len(store))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
