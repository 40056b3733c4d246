"""Costs that nobody measured."""

from dataclasses import replace
from typing import Any

from imprint import Plan
from imprint.advice.costs import Costs
from imprint.evaluation.training_cost import TrainingCost
from imprint.simulation.estimate import Estimate

UNKNOWN = "nothing says how long a training is"


def simulation(seconds: float, **changes: Any) -> Estimate:
    return replace(Estimate(seconds, 1000, 200, 300, 20, 4, None), **changes)


def training(seconds: float, **changes: Any) -> TrainingCost:
    return replace(TrainingCost(seconds, "of 300 steps", 500), **changes)


def costs(**changes: Any) -> Costs:
    """Twelve sources, a training of a second and a simulation of a minute, if nothing else is said."""
    return replace(Costs(12, training(1.0), None, 15, simulation(60.0), Plan()), **changes)
