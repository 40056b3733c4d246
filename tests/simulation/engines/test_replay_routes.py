"""Gradients that are missing: a run without a source finds its own routes, and goes without what the loop withheld."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint.recording.records import Circumstances, Step
from imprint.simulation.engines.replay.routes import Names, Routes, find_routes
from imprint.simulation.engines.replay.stack import OwnRouteError
from imprint.simulation.engines.replay.unperturbed import replay_unperturbed
from tests.simulation.engines.test_replay import check_rows, replay
from tests.simulation.engines.test_replay_rows import check, replay_plainly, replay_stacked
from tests.simulation.engines.trainings import MemoryRun, Training, classification, mlp
from tests.simulation.killing import contents, die_until_done

SETTINGS = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}


class Experts(nn.Module):
    """Sends each example to one of two layers; one that gets no example gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        with torch.no_grad():
            self.gate.bias.copy_(torch.tensor([1.5, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(1)
        chosen = gates.argmax(1)
        out = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().flatten()
            if len(mine):
                out = out.index_add(0, mine, gates[mine, index, None] * expert(x[mine]))
        return out


def experts() -> nn.Module:
    torch.manual_seed(3)
    return Experts().double()


class _Routing(Training):
    """A training whose replays find their own routes, as those of the engine do."""

    def repetition(self, run: Any, begin: int = 0) -> Any:
        repetition = super().repetition(run, begin)
        return replace(repetition, routes=replay_unperturbed(repetition, lambda phase: None, lambda end: 0.0).routes)


def test_a_run_without_a_source_finds_its_own_missing_gradients() -> None:
    """An expert that rests in the recorded step may be chosen without the source, and must move then."""
    training = _Routing(experts(), classification(), settings=SETTINGS, batch=2, steps=12)
    _, run = training.run()
    assert any(step.missing for step in run.steps), "some expert rests in some step"
    ends = replay_plainly(training, run)
    check(ends, training)
    held = replay_plainly(Training(**vars(training)), run)
    assert any(not torch.equal(one[name], other[name]) for one, other in zip(ends, held, strict=True) for name in one)


@pytest.mark.parametrize("steps", [(5, 11), (0, 4), (4, 6)], ids=["from some step on", "at first", "for a while"])
def test_what_the_loop_froze_is_frozen_without_a_source_too(steps: tuple[int, int]) -> None:
    training = _Routing(mlp(), classification(), settings=SETTINGS, steps=12, frozen={"0.weight": steps})
    _, run = training.run()
    check(replay_plainly(training, run), training)
    check(replay_stacked(training, run), training)


def test_an_expert_that_was_frozen_midway_rests_wherever_examples_are_sent() -> None:
    """It rests in some steps of its own accord, before and after it was frozen."""
    frozen = {f"experts.1.{name}": (6, 11) for name in ("weight", "bias")}
    training = _Routing(experts(), classification(), settings=SETTINGS, batch=2, steps=12, frozen=frozen)
    _, run = training.run()
    check(replay_plainly(training, run), training)


def test_the_engine_replays_a_run_that_was_frozen_midway(tmp_path: Path, snapshots_at_every_step: None) -> None:
    frozen = {"0.weight": (5, 11)}
    training = Training(mlp(), classification(), torch.optim.Adam, {"lr": 0.02}, steps=12, frozen=frozen)
    end, run = training.run()
    store = replay(training, run, out=tmp_path / "whole")
    check_rows(store, training, end)
    assert store.checkpoints[0].measured.one_by_one is None, "freezing is no reason to leave the stack"
    killed = tmp_path / "killed"
    die_until_done(lambda progress: replay(training, run, out=killed, progress=progress), 3 * training.steps)
    assert contents(killed) == contents(store.path)


def test_a_gradient_of_zeros_that_the_loss_does_not_have_stays_one() -> None:
    """As of loss + 0 * parameter.sum(), with which some loops keep every parameter in the graph."""
    training = Training(experts(), classification(), settings=SETTINGS, batch=2, steps=12)
    _, run = training.run()
    run = replace(run, steps=tuple(replace(step, missing=frozenset()) for step in run.steps))
    resting = [frozenset({"gate.bias"}) if number == 3 else frozenset() for number in range(12)]
    routes = find_routes(run, 0, resting)
    assert routes.filled == (frozenset({"gate.bias"}),) * 12, "it may rest in any step"
    assert routes.withheld == (frozenset(),) * 12


def routes_of(*steps: tuple[Names, Names]) -> Routes:
    """Return the routes of steps with some gradients missing in training, and some in the replay."""
    parts = [Step((), 0, (), missing=recorded) for recorded, _ in steps]
    run = MemoryRun(1, tuple(parts), torch.optim.SGD, (("a", "b"),), Circumstances("cpu"), {}, {})
    return find_routes(run, 0, [own for _, own in steps])


def test_what_was_withheld_once_was_withheld_in_all_steps_around_that_lack_it() -> None:
    none, a = frozenset[str](), frozenset({"a"})
    routes = routes_of((a, a), (none, none), (a, a), (a, none), (a, a), (none, none), (a, a))
    assert routes.withheld == (none, none, a, a, a, none, none)
    assert routes.filled == (none,) * 7
    assert routes.at(3) == (a, none)
    assert replace(routes, begin=2).at(1) is None


def test_a_stack_that_moves_what_rested_in_training_names_the_step() -> None:
    training = Training(mlp(), classification(), steps=6)
    _, run = training.run()
    resting = replace(run.steps[3], missing=frozenset({"0.weight"}))
    run = replace(run, steps=(*run.steps[:3], resting, *run.steps[4:]))
    routes = Routes(0, (frozenset(),) * 6, (frozenset(),) * 6)
    with pytest.raises(OwnRouteError, match=r"0\.weight has a gradient without a source at step 4, and had none"):
        replay_stacked(_Given(**vars(training), routes=routes), run)


@dataclass(frozen=True)
class _Given(Training):
    """A training whose replays follow given routes."""

    routes: Routes | None = None

    def repetition(self, run: Any, begin: int = 0) -> Any:
        return replace(super().repetition(run, begin), routes=self.routes)
