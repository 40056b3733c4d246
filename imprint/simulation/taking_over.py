"""Checks what an earlier run has decided about a checkpoint, before a simulation takes it over.

The choices come from the journal of an unfinished simulation, or from the manifest of a store that is repeated. Both
are files that anybody may have written: what a simulation cannot have chosen is refused.
"""

import math
from operator import attrgetter

from imprint.simulation import engines
from imprint.store.checkpoint import Checkpoint
from imprint.store.manifest import check_planned
from imprint.store.request import Request
from imprint.store.values import Value
from imprint.tensors.rows import parameters_of

_LARGEST = 1e100  # of steps and curvatures: their products are numbers still
_EPSILONS = 1e-6, 1e6  # far beyond all that are tried


def check_choices(checkpoint: Checkpoint, index: int, request: Request, value: Value) -> None:
    """Refuse choices for checkpoint number `index` of a request that no simulation of it would have made."""
    count = len(request.states)
    if index >= count:
        value.fail(f"there are {count} checkpoints, and {value.field} is of one more")
    plan = request.plan
    check_planned(checkpoint, index, plan, count, value)
    if checkpoint.weight == 0:
        value.fail(f"{value.field} has weight 0, so it is not simulated")
    decided, curvature = checkpoint.choices, checkpoint.measured.curvature
    found = value.mapping()["decided"].mapping()
    values = sum(math.prod(about.shape) for about in request.parameters.values())
    if decided.directions is not None and decided.directions > min(plan.directions, values):
        found["directions"].refuse("at most as many as the plan and the parameters have")
    engine = engines.get(plan)
    for path in engine.requires:
        if attrgetter(path)(checkpoint) is None:
            value.fail(f"{value.field}.{path} is missing")
    has_step = decided.lr > 0 or engine.rules.removes  # a recorded run may have had no other rate than 0
    if not has_step or not decided.lr <= _LARGEST:
        found["lr"].refuse("the size of a step")
    if curvature is not None and max(map(abs, curvature)) > _LARGEST:
        value.mapping()["measured"].mapping()["curvature"].refuse("curvatures that a loss can have")
    low, high = _EPSILONS
    if decided.epsilon is not None and plan.epsilon == "auto" and not low <= decided.epsilon <= high:
        found["epsilon"].refuse("an ε that is tried")
    if decided.layers and plan.form != "factored":
        found["layers"].refuse("empty where imprints are not factored")
    for layer in found["layers"].items():
        about = request.parameters.get(parameters_of(layer.text())[0])
        if about is None or len(about.shape) != 2:
            layer.refuse("a linear layer of the selected parameters")
