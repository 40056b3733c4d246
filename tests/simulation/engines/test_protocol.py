"""A new engine is one class: everything else works with it as it does with the others."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import imprint
from imprint import Plan, PlanError, SimulationError, Sources, Task, attribute, check, simulate
from imprint.plan import EngineRules
from imprint.simulation.descent import Descent
from imprint.simulation.engines import Chunk, Engine, register, registered, unregister
from imprint.simulation.path import Hooks
from imprint.simulation.source_gradients import source_gradients
from tests.simulation.killing import Killed, contents, dies_after


class Downhill(Engine):
    """u_b = −ηT ∇ℓ_b: the source's own pull, as if nothing answered it."""

    name = "downhill"

    def simulate(self, descent: Descent, hooks: Hooks) -> Chunk:
        slopes = source_gradients(descent, descent.start, 0)
        return Chunk(descent.start, {name: -descent.lr * descent.steps * slope for name, slope in slopes.items()})


@pytest.fixture(autouse=True)
def _downhill() -> Iterator[None]:
    register(Downhill)
    yield
    unregister(Downhill)


SOURCES = Sources.by_label([i % 5 for i in range(40)])


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double())


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (40,), generator=generator)


def run(out: Path | None, memory: str | None = None) -> imprint.Store:
    plan = Plan(engine="downhill", steps=3, lr=0.1)
    return simulate(task(), data(), SOURCES, plan, out=out, memory=memory, progress=False)


def test_its_imprints_are_stored_and_read_out() -> None:
    store, model = run(None), task()
    result = attribute(model, store, data(), progress=False)
    theta = model.state()
    slopes = torch.autograd.functional.jacobian(lambda flat: _losses(flat, theta), _flat(theta))
    own = torch.stack([slopes[list(members)].sum(0) for members in SOURCES.members])
    torch.testing.assert_close(torch.as_tensor(result.scores), slopes @ (-0.3 * own).T, rtol=1e-8, atol=1e-10)


def _flat(theta: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in theta.values()])


def _losses(flat: Tensor, theta: dict[str, Tensor]) -> Tensor:
    pieces = flat.split([tensor.numel() for tensor in theta.values()])
    values = {name: piece.reshape(theta[name].shape) for name, piece in zip(theta, pieces, strict=True)}
    outputs = torch.func.functional_call(task().model, values, (data()[0],))
    return nn.functional.cross_entropy(outputs, data()[1], reduction="none")


def test_a_killed_simulation_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", memory="1kB")  # a source at a time, each with a file of its own
    with monkeypatch.context() as patch:
        patch.setattr("imprint.store.finished.append", dies_after(3))
        with pytest.raises(Killed):
            run(tmp_path / "killed", memory="1kB")
    assert len(list((tmp_path / "killed").rglob("imprints-*"))) in (2, 3)
    assert contents(run(tmp_path / "killed", memory="1kB").path) == contents(whole.path)


def test_check_tries_and_estimates_it() -> None:
    found = check(task(), data(), SOURCES, Plan(engine="downhill", steps=3, lr=0.1))
    assert found.ok, found.problems
    assert found.estimate is not None and found.estimate.rows_at_once == 5
    assert found.estimate.store_bytes == pytest.approx(run(None).bytes, rel=0.25)
    assert "downhill" in [engine.name for engine in found.engines if engine.works]
    assert "downhill" in [engine.name for engine in check(task(), data(), SOURCES).engines]


def test_a_plan_refuses_for_it_what_belongs_to_other_engines() -> None:
    with pytest.raises(PlanError, match='momentum belongs to engine="tangent" or engine="trajectories"; the downhill'):
        Plan(engine="downhill", momentum=0.9)


def test_progress_is_counted_in_sources() -> None:
    told: list[tuple[int, int]] = []
    simulate(
        task(), data(), SOURCES, Plan(engine="downhill", steps=3, lr=0.1), progress=lambda *given: told.append(given)
    )
    assert told[-1] == (5, 5)


def test_an_automatic_step_is_refused_by_an_engine_that_has_no_rule_for_it() -> None:
    with pytest.raises(PlanError, match='the downhill engine has no rule for lr="auto": give lr a number'):
        simulate(task(), data(), SOURCES, Plan(engine="downhill", steps=3), progress=False)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda t: t * float("nan"), r"the imprint of source '0' by the downhill engine is not finite"),
        (lambda t: t[:, :1], r"must return one row per source for each selected parameter: 5 sources came as \{"),
    ],
    ids=["no numbers", "another shape"],
)
def test_rows_that_could_not_be_read_again_are_refused(
    wrong: Callable[[Tensor], Tensor], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Downhill.simulate

    def simulate_wrongly(self: Downhill, descent: Descent, hooks: Hooks) -> Chunk:
        chunk = original(self, descent, hooks)
        return replace(chunk, imprints={name: wrong(tensor) for name, tensor in chunk.imprints.items()})

    monkeypatch.setattr(Downhill, "simulate", simulate_wrongly)
    with pytest.raises(SimulationError, match=says):
        run(None)


def test_an_engine_takes_neither_another_ones_name_nor_what_belongs_to_all() -> None:
    class Greedy(Downhill):
        name = "greedy"
        rules = EngineRules(frozenset({"seed"}))

    with pytest.raises(PlanError, match="there is an engine 'downhill' already"):
        register(Downhill)
    with pytest.raises(PlanError, match="seed belongs to every engine, so that the greedy engine cannot have it"):
        register(Greedy)


def test_a_plan_of_an_engine_that_is_gone_says_so() -> None:
    plan = Plan(engine="downhill", steps=3, lr=0.1)
    unregister(Downhill)
    with pytest.raises(PlanError, match="'downhill' is unknown: use one of tangent, trajectories, spectral, replay"):
        simulate(task(), data(), SOURCES, plan, progress=False)
    register(Downhill)


def test_no_module_but_an_engines_own_names_an_engine() -> None:
    """Comments and docstrings may; a user's ready-made plans, which settings and doctests are, too."""
    package = Path(imprint.__file__).parent
    names = {engine.name for engine in registered()} - {"downhill"}
    assert names == {"tangent", "trajectories", "spectral", "replay"}
    for path in package.rglob("*.py"):
        inside = path.relative_to(package)
        if inside.parts[:2] in {("simulation", "engines"), ("benchmarking", "settings")}:
            continue
        tree = ast.parse(path.read_text())
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                assert node.value not in names, f"{inside}:{node.lineno} names the engine {node.value!r}"
                quoted = {name for name in names if f'"{name}"' in node.value}
                assert not quoted, f"{inside}:{node.lineno} names the engines {quoted}"
