"""Adam's second moments from the `optimizer.pt` that a Trainer of transformers keeps beside a checkpoint.

The file numbers parameters, and does not name them. The numbers follow the optimiser's groups: a Trainer puts the
parameters with weight decay first and those without (biases, normalisations) second, each in the model's own order.
Which names count as normalisations has changed with its versions, so every known rule is tried, and one is taken only
if all groups and all shapes fit.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from imprint.errors import TaskError
from imprint.simulation.state_files import load_pickled
from imprint.task import Task

logger = logging.getLogger(__name__)
OPTIMISER = "optimizer.pt"
_NORMALISES = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm(\.|$)")

Rule = Callable[[str, nn.Module], bool]
"""Whether a Trainer gives a parameter no weight decay, from its name and the module that has it."""
_RULES: tuple[Rule, ...] = (
    lambda name, owner: isinstance(owner, nn.LayerNorm) or _NORMALISES.search(name.lower()) is not None,
    lambda name, owner: isinstance(owner, nn.LayerNorm) or "RMSNorm" in type(owner).__name__ or "bias" in name,
    lambda name, owner: isinstance(owner, nn.LayerNorm) or "bias" in name,
)


def read_moments(folder: Path, task: Task) -> dict[str, Tensor] | None:
    """Return v̂ = v/(1 − β₂^t) of each trained parameter; None if the folder has no optimiser that keeps v."""
    place = folder / OPTIMISER
    if not place.is_file():
        return None
    found = load_pickled(place, "optimiser")
    try:
        groups, state = found["param_groups"], found["state"]
        numbers = [list(group["params"]) for group in groups]
        decays = [float(group["betas"][1]) if "betas" in group else None for group in groups]
    except (KeyError, TypeError, IndexError) as error:
        raise TaskError(f"{place} is no state of an optimiser: it lacks {error}. {_ALONE}") from error
    without_decay = {number for group, decay in zip(numbers, decays, strict=True) if decay is None for number in group}
    kept = {number: about for number, about in state.items() if about}
    readable = all(isinstance(about, Mapping) and "exp_avg_sq" in about for about in kept.values())
    if not kept or not readable or without_decay & kept.keys():  # some may be factored, as Adafactor's
        logger.warning("%s has no second moments that can be read: they are estimated", place)
        return None
    trained: Task = getattr(task, "plain", task)  # without an adapter that was made for this task
    names = _find_names(trained.model, groups, numbers, state, place)
    moments = {}
    for group, decay in zip(numbers, decays, strict=True):
        for number in group:
            about = state.get(number)
            if about and decay is not None and float(about.get("step", 0)):
                raw = about.get("max_exp_avg_sq", about["exp_avg_sq"])
                moments[names[number]] = raw / (1 - decay ** float(about["step"]))
    return moments


_ALONE = "Give the file of the weights instead of the folder to have second moments estimated."


def _find_names(
    model: nn.Module, groups: Sequence[Any], numbers: list[list[int]], state: Mapping[int, Any], place: Path
) -> dict[int, str]:
    """Return the name of each number; refuse an optimiser that fits the model in no way, or in several."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if all("param_names" in group for group in groups):
        orders = [[list(group["param_names"]) for group in groups]]
    else:
        orders = [[list(trainable)], *(_split(model, trainable, rule) for rule in _RULES)]
    fitting: list[dict[int, str]] = []
    for order in orders:
        named = _pair(order, numbers)
        if named is not None and named not in fitting and _fits(named, trainable, state):
            fitting.append(named)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise TaskError(f"{place} fits the model in {len(fitting)} ways that its shapes do not tell apart. {_ALONE}")
    sizes = " and ".join(str(len(group)) for group in numbers)
    raise TaskError(
        f"{place} does not fit the model: its groups have {sizes} parameters, the model has {len(trainable)} trainable "
        "ones, and no order of these that a Trainer uses has its shapes. Freeze what was frozen in training before you "
        f"build the task. {_ALONE}"
    )


def _split(model: nn.Module, trainable: Mapping[str, nn.Parameter], rule: Rule) -> list[list[str]]:
    """Return the names with weight decay and those without."""
    without = {name for name in trainable if rule(name, model.get_submodule(name.rpartition(".")[0]))}
    return [[name for name in trainable if name not in without], [name for name in trainable if name in without]]


def _pair(order: list[list[str]], numbers: list[list[int]]) -> dict[int, str] | None:
    """Give the numbers of each group the names of the same group; None where their counts differ."""
    if [len(names) for names in order] != [len(group) for group in numbers]:
        return None
    pairs = zip(order, numbers, strict=True)
    return {number: name for names, group in pairs for name, number in zip(names, group, strict=True)}


def _fits(named: Mapping[int, str], trainable: Mapping[str, nn.Parameter], state: Mapping[int, Any]) -> bool:
    """Tell whether all names are trainable parameters whose shapes are those of their moments."""
    if not all(name in trainable for name in named.values()) or not set(state) <= set(named):
        return False
    shapes = {number: getattr(about.get("exp_avg_sq"), "shape", None) for number, about in state.items() if about}
    return all(shape == trainable[named[number]].shape for number, shape in shapes.items())
