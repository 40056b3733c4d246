"""What is wrong with a plan is refused with an error that names it."""

import re
from typing import Any

import pytest
import torch

from imprint import Plan, PlanError, Store, Task, attribute
from tests.bad_input.inputs import columns, simulated


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "magic"),
        ("steps", 0),
        ("steps", 1.5),
        ("steps", (3, 0)),
        ("steps", True),
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("lr", (0.1, "slow")),
        ("damping", -0.1),
        ("damping", float("inf")),
        ("weight", -1.0),
        ("weight", 0.0),
        ("weight", (0.0, 0.0)),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("source_sample", 0),
        ("seed", 0.5),
        ("variant", "three_sided"),
        ("epsilon", 0.0),
        ("epsilon", "big"),
    ],
)
def test_a_setting_out_of_its_range_is_named_with_its_value(field: str, value: Any) -> None:
    shown = (
        value if isinstance(value, tuple) and field == "weight" else value[-1] if isinstance(value, tuple) else value
    )
    with pytest.raises(PlanError, match=rf"^{field} .*{re.escape(repr(shown))}"):
        Plan(**{field: value})


@pytest.mark.parametrize(
    "given", [{"variant": "one_sided"}, {"epsilon": 2.0}, {"accept_drift": True}, {"keep_pair": True}]
)
def test_settings_of_trajectories_are_refused_by_the_tangent_engine(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f'{next(iter(given))} belongs to engine="trajectories"'):
        Plan(engine="tangent", **given)


def test_a_sample_of_a_source_needs_mini_batches() -> None:
    with pytest.raises(PlanError, match="source_sample belongs to mini-batches"):
        Plan(source_sample=3)


def test_settings_per_checkpoint_must_be_equally_many() -> None:
    with pytest.raises(PlanError, match=r"equally many.*'steps': 2.*'lr': 3"):
        Plan(steps=(1, 2), lr=(0.1, 0.1, 0.1))


def test_settings_per_checkpoint_must_be_as_many_as_checkpoints(task: Task) -> None:
    with pytest.raises(PlanError, match="steps has 2 values, but there are 1 checkpoints"):
        simulated(task, plan=Plan(steps=(1, 2), lr=0.1))


def test_an_unknown_field_of_a_plan_is_named() -> None:
    with pytest.raises(PlanError, match="no field 'temperature'"):
        Plan.from_json({"steps": 3, "temperature": 0.9})


@pytest.mark.parametrize("memory", ["lots", "2 parsecs", "", "1.2.3 GiB", "-1GB", "0", 0, -5])
def test_nonsense_for_memory_is_refused(memory: Any, task: Task, store: Store) -> None:
    with pytest.raises(PlanError, match="memory must be"):
        simulated(task, memory=memory)
    with pytest.raises(PlanError, match="memory must be"):
        attribute(task, store, columns(3), memory=memory, progress=False)


def test_a_precision_that_cannot_be_stored_is_refused(task: Task) -> None:
    with pytest.raises(PlanError, match=r"float32, bfloat16, float64, not as torch\.float16"):
        simulated(task, dtype=torch.float16)
