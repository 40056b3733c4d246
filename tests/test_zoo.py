"""Every engine and every readout on every tiny task of the zoo; where the task is smooth, they agree."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from imprint import Plan, PlanError, ReadoutError, Sources, Store, Task, TaskError, attribute, self_influence, simulate
from imprint.data import Data
from imprint.readout.kernels import ReadoutName
from tests.zoo import EXAMPLES, QUERIES, ZOO, Member

STEPS, LR = 4, 0.1
SMALL = 1e-3  # an ε small enough for differences to be derivatives, in float64
PLANS = {
    "tangent": Plan(engine="tangent", steps=STEPS, lr=LR),
    "two_sided": Plan(engine="trajectories", variant="two_sided", steps=STEPS, lr=LR, epsilon=SMALL, keep_pair=True),
    "one_sided": Plan(engine="trajectories", variant="one_sided", steps=STEPS, lr=LR, epsilon=SMALL),
    "mirrored": Plan(engine="trajectories", variant="mirrored", steps=STEPS, lr=LR, epsilon=1.0, accept_drift=True),
    "gauss_newton": Plan(engine="tangent", curvature="gauss-newton", steps=STEPS, lr=LR),
    "spectral": Plan(engine="spectral", steps=STEPS, lr="auto", directions=6),
}
ON_OUTPUTS = ("gauss_newton", "spectral")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SMOOTH = [name for name, entry in ZOO.items() if entry.smooth]
FORWARD_MODE = [name for name, entry in ZOO.items() if entry.forward_mode]

pytestmark = pytest.mark.parametrize("device", DEVICES)

Simulate = Callable[[str, str, str, torch.dtype], tuple[Member, Store]]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    """A member and its store by (name, plan, device, dtype), each made once."""
    made: dict[tuple[str, str, str, torch.dtype], tuple[Member, Store]] = {}

    def get(name: str, plan: str, device: str, dtype: torch.dtype) -> tuple[Member, Store]:
        key = name, plan, device, dtype
        if key not in made:
            member = ZOO[name].make(torch.device(device), dtype)
            out = tmp_path_factory.mktemp("stores") / "store"
            made[key] = member, _simulate(member, PLANS[plan], out=out)
        return made[key]

    return get


def _simulate(member: Member, plan: Plan, **options: Any) -> Store:
    return simulate(
        member.task, member.data, member.sources, plan, collate_fn=member.collate_fn, progress=False, **options
    )


def _scores(member: Member, store: Store, readout: ReadoutName = "jvp") -> Tensor:
    result = attribute(
        member.task, store, member.queries, readout=readout, collate_fn=member.collate_fn, progress=False
    )
    return result.scores


def _relative(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def _batch(member: Member, dataset: Any) -> Any:
    """All of a dataset in one batch."""
    data = Data(dataset, device=member.task.device, batch_size=1000, collate_fn=member.collate_fn)
    return next(iter(data.batches()))[1]


def _readout_for(name: str) -> ReadoutName:
    return "jvp" if ZOO[name].forward_mode else "central"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ZOO)
def test_every_engine_simulates_every_member(name: str, plan: str, device: str, simulated: Simulate) -> None:
    if PLANS[plan].engine == "tangent" and not ZOO[name].forward_mode:
        pytest.skip("tells so instead, see below")
    if plan in ON_OUTPUTS and ZOO[name].make(torch.device(device), torch.float32).task.outputs is None:
        pytest.skip("tells so instead, see below")
    member, store = simulated(name, plan, device, torch.float32)
    assert store.warnings == ()  # ordinary models give no reason for any
    (checkpoint,) = store.checkpoints
    takes_vmap = ZOO[name].vectorises_tangents if plan == "tangent" else ZOO[name].vectorises
    if plan not in ON_OUTPUTS:
        assert checkpoint.choices.vectorised == takes_vmap
    imprints = store.imprints(0, 0, len(store), torch.device(device))
    assert list(imprints) == list(member.task.names)
    for parameter, stack in imprints.items():
        assert stack.shape == (len(member.sources), *member.task.model.get_parameter(parameter).shape)
        assert bool(stack.isfinite().all())
    assert all(float(sum(t[row].abs().sum() for t in imprints.values())) > 0 for row in range(len(store)))


@pytest.mark.parametrize("name", [name for name in ZOO if name not in FORWARD_MODE])
def test_the_tangent_engine_says_what_to_use_where_forward_mode_is_missing(name: str, device: str) -> None:
    member = ZOO[name].make(torch.device(device), torch.float32)
    with pytest.raises(TaskError, match=r'tangent.*cannot differentiate.*engine="trajectories"'):
        _simulate(member, PLANS["tangent"])


@pytest.mark.parametrize("plan", ON_OUTPUTS)
def test_a_task_without_outputs_is_told_what_gauss_newton_needs(plan: str, device: str) -> None:
    members = [entry.make(torch.device(device), torch.float32) for entry in ZOO.values()]
    without = [member for member in members if member.task.outputs is None]
    assert without
    for member in without:
        with pytest.raises(PlanError, match="give the task outputs= and output_loss="):
            _simulate(member, PLANS[plan])


@pytest.mark.parametrize("readout", ["jvp", "central", "literal", "gradient"])
@pytest.mark.parametrize("name", ZOO)
def test_every_readout_scores_every_member(name: str, readout: ReadoutName, device: str, simulated: Simulate) -> None:
    member, store = simulated(name, "two_sided", device, torch.float32)
    result = attribute(
        member.task, store, member.queries, readout=readout, collate_fn=member.collate_fn, progress=False
    )
    assert result.scores.shape == (QUERIES, len(member.sources))
    assert result.scores.device.type == "cpu"
    assert not result.scores.requires_grad
    assert bool(result.scores.isfinite().all()) and bool((result.scores != 0).any())
    falls_back = readout == "jvp" and not ZOO[name].forward_mode
    assert result.labels.details["readout"] == ("central" if falls_back else readout)
    assert ("fallback" in result.labels.details) == falls_back


@pytest.mark.parametrize("plan", ["one_sided", "mirrored"])
@pytest.mark.parametrize("name", ZOO)
def test_literal_needs_no_pair_where_there_is_one_trajectory(
    name: str, plan: str, device: str, simulated: Simulate
) -> None:
    member, store = simulated(name, plan, device, torch.float32)
    assert bool(_scores(member, store, "literal").isfinite().all())


@pytest.mark.parametrize("name", ZOO)
def test_one_step_moves_a_source_by_its_own_gradient(name: str, device: str) -> None:
    """u_b = −η g_b after one step, with g_b from plain autograd on the user's own model."""
    entry = ZOO[name]
    member = entry.make(torch.device(device), torch.float64)
    plan = Plan(steps=1, lr=LR) if entry.forward_mode else Plan(engine="trajectories", steps=1, lr=LR)
    store = _simulate(member, plan)
    model = copy.deepcopy(member.task.model).eval()
    losses = member.task.loss(model, _batch(member, member.data))
    imprints = store.imprints(0, 0, len(store), torch.device(device))
    selected = [model.get_parameter(parameter) for parameter in member.task.names]
    for row, members in enumerate(member.sources.members):
        gradients = torch.autograd.grad(losses[members.tolist()].sum(), selected, retain_graph=True)
        for parameter, gradient in zip(member.task.names, gradients, strict=True):
            torch.testing.assert_close(imprints[parameter][row], -LR * gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ZOO)
def test_scores_are_the_measures_gradient_at_the_base_times_the_imprint(
    name: str, device: str, simulated: Simulate
) -> None:
    """The gradient is from plain autograd on the user's own model with the base loaded into it."""
    member, store = simulated(name, "two_sided", device, torch.float64)
    model = copy.deepcopy(member.task.model)
    model.load_state_dict(store.base(0, torch.device(device)), strict=False)
    values = member.task.measure(model.eval(), _batch(member, member.queries))
    selected = [model.get_parameter(parameter) for parameter in member.task.names]
    imprints = store.imprints(0, 0, len(store), torch.device(device))
    expected = torch.zeros(QUERIES, len(store), dtype=torch.float64, device=device)
    for query in range(QUERIES):
        gradients = torch.autograd.grad(values[query], selected, retain_graph=True)
        for parameter, gradient in zip(member.task.names, gradients, strict=True):
            expected[query] += (imprints[parameter] * gradient).reshape(len(store), -1).sum(1)
    torch.testing.assert_close(_scores(member, store, "gradient"), expected.cpu(), rtol=1e-9, atol=1e-11)
    if ZOO[name].forward_mode:
        torch.testing.assert_close(_scores(member, store, "jvp"), expected.cpu(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_one_step_of_the_spectral_engine_is_one_step_of_the_path(name: str, device: str) -> None:
    """u_b = −η g_b, whatever the curvature and however few directions are told apart."""
    member = ZOO[name].make(torch.device(device), torch.float64)
    curvature: Any = "gauss-newton" if member.task.outputs is not None else "hessian"
    plan = Plan(engine="spectral", curvature=curvature, steps=1, lr=1e-3, directions=3)
    found, expected = _simulate(member, plan), _simulate(member, Plan(steps=1, lr=1e-3))
    for store in (found, expected):
        assert len(store) == len(member.sources)
    one, other = (s.imprints(0, 0, len(s), torch.device(device)) for s in (found, expected))
    for parameter, stack in other.items():
        torch.testing.assert_close(one[parameter], stack, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
def test_differences_agree_with_derivatives_where_the_task_is_smooth(
    name: str, device: str, simulated: Simulate
) -> None:
    member, store = simulated(name, "two_sided", device, torch.float64)
    exact = _scores(member, store, "gradient")
    assert _relative(_scores(member, store, "central"), exact) < 1e-6
    assert _relative(_scores(member, store, "literal"), exact) < 1e-6


@pytest.mark.parametrize("name", sorted(set(SMOOTH) & set(FORWARD_MODE)))
def test_trajectories_agree_with_the_tangent_where_the_task_is_smooth(
    name: str, device: str, simulated: Simulate
) -> None:
    member, store = simulated(name, "tangent", device, torch.float64)
    exact = _scores(member, store)
    for plan, tolerance in (("two_sided", 1e-6), ("one_sided", 1e-3)):
        assert _relative(_scores(*simulated(name, plan, device, torch.float64)), exact) < tolerance


@pytest.mark.parametrize("name", [name for name in ZOO if name not in SMOOTH])
def test_agreement_is_reported_where_the_task_has_kinks(
    name: str, device: str, simulated: Simulate, record_property: Callable[[str, object], None]
) -> None:
    member, store = simulated(name, "tangent", device, torch.float64)
    exact = _scores(member, store)
    assert bool(exact.isfinite().all())
    record_property("central against jvp", _relative(_scores(member, store, "central"), exact))
    for plan in ("two_sided", "one_sided"):
        found = _scores(*simulated(name, plan, device, torch.float64))
        record_property(f"{plan} against tangent", _relative(found, exact))


@pytest.mark.parametrize("name", ZOO)
def test_self_influence_is_the_diagonal_of_the_scores(name: str, device: str) -> None:
    entry = ZOO[name]
    member = entry.make(torch.device(device), torch.float64)._replace(sources=Sources.per_example(EXAMPLES))
    plan = Plan(steps=2, lr=LR) if entry.forward_mode else Plan(engine="trajectories", steps=2, lr=LR)
    store = _simulate(member, plan)
    options: dict[str, Any] = {"batch_size": 5, "collate_fn": member.collate_fn, "progress": False}
    if not entry.columnar:
        with pytest.raises(ReadoutError, match="one row per query"):
            self_influence(member.task, store, member.data, **options)
        return
    found = self_influence(member.task, store, member.data, **options)
    expected = attribute(member.task, store, member.data, readout="gradient", **options).scores.diagonal()
    torch.testing.assert_close(found, expected, rtol=1e-9 if entry.forward_mode else 1e-5, atol=1e-11)


@pytest.mark.parametrize("name", ZOO)
def test_batches_and_memory_do_not_change_the_scores(name: str, device: str, simulated: Simulate) -> None:
    member, store = simulated(name, "two_sided", device, torch.float64)
    readout = _readout_for(name)
    cut = attribute(
        member.task,
        store,
        member.queries,
        readout=readout,
        step=1e-4 if readout == "central" else None,
        collate_fn=member.collate_fn,
        batch_size=2,
        memory="1B",
        progress=False,
    )
    rtol = 1e-8 if readout == "jvp" else 1e-5
    torch.testing.assert_close(cut.scores, _scores(member, store, readout), rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp_tanh", "transformer_layer"])
def test_inference_mode_changes_neither_simulation_nor_scores(name: str, device: str, simulated: Simulate) -> None:
    member, store = simulated(name, "tangent", device, torch.float64)
    outside = _scores(member, store)
    with torch.inference_mode():
        scored_inside = _scores(member, store)
        simulated_inside = _simulate(member, PLANS["tangent"])
    torch.testing.assert_close(scored_inside, outside, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(_scores(member, simulated_inside), outside, rtol=1e-9, atol=1e-11)


class _OldStyleCubed(torch.autograd.Function):
    """x³ in the older form of a custom function, which `torch.func` refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2  # type: ignore[no-any-return]


class _Within(nn.Module):
    """A layer that is called through a function."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.call = nn.Linear(4, 5), nn.Linear(5, 3), call

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.first, x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: _OldStyleCubed.apply(layer(x)),  # type: ignore[no-untyped-call]
        lambda layer, x: recomputed(layer, x, use_reentrant=False) ** 3,
    ],
    ids=["old-style function", "recomputed activations"],
)
def test_trajectories_take_every_model_that_trains(
    call: Callable[[nn.Module, Tensor], Tensor], device: str, simulated: Simulate
) -> None:
    """Both models compute what the zoo's `custom_function` does."""
    same, store = simulated("custom_function", "two_sided", device, torch.float64)
    model = _Within(call).to(device, torch.float64)
    model.load_state_dict(same.task.model.state_dict())
    member = same._replace(task=Task.classifier(model))
    found = _scores(member, _simulate(member, PLANS["two_sided"]), "central")
    assert _relative(found, _scores(same, store, "central")) < 1e-6


def test_tied_weights_are_one_parameter(device: str, simulated: Simulate) -> None:
    member, store = simulated("tied_weights", "tangent", device, torch.float32)
    assert "embedding.weight" in member.task.names
    assert "head.weight" not in member.task.names
    assert "head.weight" not in store.base(0, torch.device(device))


def test_frozen_parameters_have_no_imprint(device: str, simulated: Simulate) -> None:
    member, store = simulated("frozen_trunk", "tangent", device, torch.float32)
    assert member.task.names == ("2.weight", "2.bias")
    base = store.base(0, torch.device(device))
    torch.testing.assert_close(base["0.weight"], member.task.model.get_parameter("0.weight").detach())


def test_running_statistics_decide_the_scores(device: str, simulated: Simulate) -> None:
    member, store = simulated("batch_norm", "tangent", device, torch.float64)
    state = member.task.state()
    fresh = {**state, "1.running_mean": torch.zeros_like(state["1.running_mean"])}
    other = _simulate(member, PLANS["tangent"], checkpoints=[fresh])
    assert _relative(_scores(member, other), _scores(member, store)) > 0.01
