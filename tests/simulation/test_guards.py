"""Guards of a simulation: each fires on a planted case, none on ordinary ones, and what they say stays in the store."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan, Sources, Task, attribute, check, simulate
from imprint.errors import ReliabilityWarning
from imprint.recorder import second_moments
from imprint.simulation.curvature import Spectrum
from imprint.simulation.guards import check_moments_scale, check_step, check_unfelt_moments, check_weights
from imprint.simulation.preconditioner import compare
from imprint.store.checkpoint import Spread
from imprint.store.reading import Store
from tests.problems import known

pytestmark = pytest.mark.curvature

Columns = tuple[Tensor, Tensor]
SOURCES = Sources.by_label([index % 4 for index in range(90)])


def blobs() -> Columns:
    """Six classes in sixteen dimensions."""
    generator = torch.Generator().manual_seed(0)
    centres, y = 1.5 * torch.randn(6, 16, generator=generator), torch.arange(90) % 6
    return centres[y] + torch.randn(90, 16, generator=generator), y


def trained(steps: int, lr: float = 3e-3) -> tuple[nn.Module, dict[str, Tensor]]:
    """An ordinary classifier with biases before batch norm after some steps of Adam, and its second moments."""
    x, y = blobs()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = ((nn.Linear(d, 24), nn.BatchNorm1d(24), nn.ReLU()) for d in (16, 24))
        model = nn.Sequential(*first, *second, nn.Linear(24, 6))
        optimiser = torch.optim.Adam(model.parameters(), lr=lr)
        for _ in range(steps):
            rows = torch.randperm(len(y))[:45]
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model.eval(), second_moments(model, optimiser)


def simulated(model: nn.Module, plan: Any, **options: Any) -> Store:
    return simulate(Task.classifier(model), blobs(), SOURCES, plan, progress=False, **options)


def largest_effect(model: nn.Module, store: Store) -> float:
    result = attribute(Task.classifier(model), store, blobs(), progress=False)
    return float(result.removal_effect.abs().max())


def test_auto_holds_where_curvature_rises_from_unsettled_statistics() -> None:
    x, y = blobs()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = ((nn.Linear(d, 24), nn.BatchNorm1d(24), nn.ReLU()) for d in (16, 24))
        model = nn.Sequential(*first, *second, nn.Linear(24, 6))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(6):  # the running statistics are half of what they start as
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    store = simulated(model.eval(), "auto")
    assert largest_effect(model, store) < 2  # nats; with the step of the start 10¹¹


def test_biases_that_training_does_not_feel_stay_where_they_are() -> None:
    model, moments = trained(60)
    biases = ("0.bias", "3.bias")
    assert all(float(moments[name].sqrt().max()) < 1e-6 for name in biases)  # rounding
    plan = Plan(preconditioner="adam", steps=3, lr=1e-3)
    with pytest.warns(ReliabilityWarning, match="48 values of 0.bias, 3.bias are left where they are"):
        store = simulated(model, plan, checkpoints=[(model.state_dict(), moments)])
    assert known(store.checkpoints[0].measured.curvature)[1] < 1e5  # of M⁻¹H; by rounding it would be above 10⁷
    imprints = store.imprints(0, 0, 4, torch.device("cpu"))
    assert all(not bool(imprints[name].any()) for name in biases)
    assert all(bool(imprints[name].any()) for name in ("0.weight", "1.bias", "6.bias"))
    assert len(store.warnings) == 1 and "Biases before batch norm" in store.warnings[0]


def some_moments() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Recorded moments as a healthy run has them, up to a hundred times the estimated ones, and these."""
    generator = torch.Generator().manual_seed(0)
    estimated = {name: torch.rand(size, generator=generator) for name, size in (("weight", 40), ("bias", 5))}
    recorded = {name: v * 10 ** (2 * torch.rand(v.shape, generator=generator)) for name, v in estimated.items()}
    return recorded, estimated


def test_ordinary_moments_are_believed() -> None:
    recorded, estimated = some_moments()
    found = compare(recorded, estimated)
    assert found.unfelt == {} and check_unfelt_moments(0, found, True) is None and check_moments_scale(0, found) is None
    assert all(torch.equal(found.moments[name], recorded[name]) for name in recorded)


def test_moments_that_are_rounding_are_not_believed_on_any_scale() -> None:
    for scale in (1.0, 1e-4):
        recorded, estimated = some_moments()
        recorded["bias"][:2] = 1e-16
        found = compare({name: scale * v for name, v in recorded.items()}, estimated)
        assert found.unfelt == {"bias": 2} and found.moments["bias"][:2].tolist() == [0, 0]
        assert bool((found.moments["bias"][2:] > 0).all())
        assert check_unfelt_moments(0, found, True) is None  # a few values may have had small gradients by chance
        recorded["bias"][:3] = 1e-16
        assert "3 values of bias are left" in str(check_unfelt_moments(0, compare(recorded, estimated), True))


@pytest.mark.parametrize("scale", [1 / 50, 5000.0])
def test_moments_of_a_loss_on_another_scale_are_named_and_rescaled(scale: float) -> None:
    recorded, estimated = some_moments()
    found = compare({name: scale**2 * v for name, v in recorded.items()}, estimated)
    warning = check_moments_scale(1, found)
    assert found.unfelt == {} and warning is not None
    assert "rescaled by that factor" in str(warning) and "to have them estimated" in str(warning)
    usual = compare(recorded, estimated)
    torch.testing.assert_close(
        found.fitted, {name: v / usual.ratio**2 for name, v in usual.moments.items()}, rtol=1e-4, atol=0
    )
    assert usual.fitted is usual.moments


@pytest.mark.filterwarnings("ignore:.*48 values")
def test_a_summed_loss_with_moments_of_a_mean_is_warned_of() -> None:
    model, moments = trained(10)
    task = Task(model, lambda model, batch: 50 * F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    plan, checkpoints = Plan(preconditioner="adam", steps=1, lr=1e-5), [(model.state_dict(), moments)]
    with pytest.warns(ReliabilityWarning, match="do not fit the task's loss"):
        store = simulate(task, blobs(), SOURCES, plan, checkpoints=checkpoints, progress=False)
    assert any("do not fit the task's loss" in warning for warning in store.warnings)
    found = check(task, blobs(), SOURCES, plan, checkpoints=checkpoints)
    assert set(found.warnings) == set(store.warnings)


def test_a_step_that_is_too_long_is_kept_in_the_store_and_survives_a_resumption(tmp_path: Path) -> None:
    model, _ = trained(30)
    plan = Plan(steps=1, lr=3.0)
    with pytest.warns(ReliabilityWarning, match="the descent may diverge"):
        store = simulated(model, plan, out=tmp_path / "store")
    assert len(store.warnings) == 1 and "would be safe" in store.warnings[0]
    assert Store(tmp_path / "store").warnings == store.warnings

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    options: Any = {"out": tmp_path / "again", "memory": "1B"}  # one source at a time
    with pytest.warns(ReliabilityWarning), pytest.raises(KeyboardInterrupt):
        simulate(Task.classifier(model), blobs(), SOURCES, plan, progress=stop, **options)
    with pytest.warns(ReliabilityWarning):
        assert simulated(model, plan, **options).warnings == store.warnings


def test_a_step_is_too_long_beyond_twice_the_inverse_curvature() -> None:
    curvature = Spectrum(-0.1, 4.0)
    assert check_step(0, 0.49, 0.0, 0.0, curvature) is None
    assert "lr=0.25 would be safe" in str(check_step(0, 0.51, 0.0, 0.0, curvature))
    assert check_step(0, 0.51, 0.0, 0.9, curvature) is None  # steps with momentum may be longer


def test_a_checkpoint_that_outweighs_the_others_is_named() -> None:
    ordinary = [Spread(size, size, size) for size in (300.0, 60.0, 20.0)]
    assert check_weights([1, 1, 1], ordinary) is None
    assert check_weights([1], ordinary[:1]) is None
    large = [*ordinary, Spread(1.0, 17_000.0, 1e6)]
    assert "checkpoint 3: its imprints are 283 times as large" in str(check_weights([1, 1, 1, 1], large))
    assert check_weights([1, 1, 1, 0.01], large) is None
    assert check_weights([1, 1, 1, 0], [*ordinary, None]) is None


def test_the_checkpoints_of_an_ordinary_run_do_not_outweigh_each_other() -> None:
    states = [{name: t.clone() for name, t in trained(steps)[0].state_dict().items()} for steps in (15, 60)]
    store = simulated(trained(60)[0], Plan(steps=5, lr=0.1), checkpoints=states)
    assert store.warnings == ()


class Valley(nn.Module):
    """w⁴/4 − xw: no curvature at 0, where a path begins, and 3 at its end for x = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w**4 / 4 - self.w * x


@pytest.mark.parametrize("looks", ["half-way and at the end", "before the loss leaps"])
def test_a_given_step_is_compared_with_the_curvature_along_its_path(
    looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "leaps" in looks:  # where curvature is less again afterwards
        monkeypatch.setattr("imprint.simulation.step_size.LOOKS", (1e-9, 1e-9))
    task, x = Task(Valley(), loss=lambda model, batch: model(batch)), torch.ones(6, dtype=torch.float64)
    sources, plan = Sources.by_label([0, 0, 0, 1, 1, 1]), Plan(steps=12, lr=0.8)
    with pytest.warns(ReliabilityWarning, match=r"multiplies some direction by .* at lr=0\.8, above 1"):
        simulate(task, x, sources, plan, progress=False)


def test_a_step_that_suits_the_end_of_its_path_gets_no_warning() -> None:
    task, x = Task(Valley(), loss=lambda model, batch: model(batch)), torch.ones(6, dtype=torch.float64)
    store = simulate(task, x, Sources.by_label([0, 0, 0, 1, 1, 1]), Plan(steps=40, lr=0.2), progress=False)
    assert not store.warnings
    assert known(store.checkpoints[0].measured.curvature)[1] == pytest.approx(3.0, rel=0.05)
