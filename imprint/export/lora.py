"""The LoRA layers of a task's model: which parameters they have, and what an adapter of the plain model holds.

An adapter adds s·B·A to the weight W of a linear layer. Exports carry the scale s inside B, so that every engine reads
them with a scale of 1.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imprint.errors import MissingExtra, TaskError
from imprint.task import Parameters, Task

_INSIDE_PEFT = "base_model.model."  # where a PeftModel has the plain model


@dataclass(frozen=True)
class Adapted:
    """A linear layer with an adapter: its path in the plain model, and its tensors by their names in the task's model.

    transposed: the weight is (in, out), as in the layers of GPT-2.
    """

    path: str
    weight: str
    down: str
    up: str
    scale: float
    rank: int
    transposed: bool


def adapted_layers(task: Task) -> list[Adapted]:
    """Return the adapted layers of a task's model, in its order; refuse a task that selects anything else."""
    peft = import_peft()
    aliases = {id(p): name for name, p in task.model.named_parameters()}  # a tied weight is known by its first name
    found = []
    for name, module in task.model.named_modules():
        _refuse_other_kinds(module, name)
        if not isinstance(module, peft.tuners.lora.LoraLayer) or not (active := _active(module)):
            continue
        if len(active) > 1:
            raise TaskError(f"{name!r} has {len(active)} active adapters ({', '.join(active)}): activate one of them.")
        (adapter,) = active
        if adapter not in module.lora_A or module.use_dora.get(adapter) or module.lora_bias.get(adapter):
            raise TaskError(
                f"the adapter of {name!r} is not a plain LoRA of a linear layer (an embedding, DoRA, or one with a "
                "bias): adapters of linear layers without extras can be exported."
            )
        linear, transposed = module.get_base_layer(), type(module.get_base_layer()).__name__ == "Conv1D"
        if not (isinstance(linear, nn.Linear) or transposed):
            raise TaskError(
                f"the adapter of {name!r} is on a {type(linear).__name__}: those of linear layers can be exported."
            )
        found.append(
            Adapted(
                path=plain_name(name),
                weight=aliases[id(linear.weight)],
                down=f"{name}.lora_A.{adapter}.weight",
                up=f"{name}.lora_B.{adapter}.weight",
                scale=float(module.scaling[adapter]),
                rank=int(module.r[adapter]),
                transposed=transposed,
            )
        )
    carried = {name for layer in found for name in (layer.down, layer.up)}
    if others := [name for name in task.names if name not in carried]:
        raise TaskError(
            f"parameter {others[0]!r} is no LoRA parameter, and an adapter cannot carry its imprint: simulate with "
            'language.task(model, parameters="lora:8"), or for a fine-tuned adapter with parameters="*lora_*".'
        )
    return found


def import_peft() -> Any:
    """Import peft, or say how to install it."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("an export", "language") from error
    return peft


def _active(module: Any) -> list[str]:
    """Return the active adapters that a LoRA layer has; PEFT lists those of other layers too."""
    return [] if module.disable_adapters else [name for name in module.active_adapters if name in module.r]


def _refuse_other_kinds(module: nn.Module, name: str) -> None:
    peft = import_peft()
    tuned = isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer | peft.utils.other.AuxiliaryTrainingWrapper)
    if tuned and not isinstance(module, peft.tuners.lora.LoraLayer):
        raise TaskError(
            f"{name!r} is a {type(module).__name__} of PEFT, which is no LoRA, and an adapter cannot carry it: merge "
            'the fine-tune into its model (merge_and_unload) and simulate with parameters="lora:8".'
        )


def plain_name(name: str) -> str:
    """Return the name that a module or tensor of an adapted model has in the plain one."""
    return name.removeprefix(_INSIDE_PEFT).replace(".base_layer.", ".")


def plain_model(task: Task, state: Mapping[str, Tensor]) -> Any:
    """Return a copy of the task's model at `state`, without its adapters, active or not."""
    inner = task.model
    if type(inner).__name__.startswith("Peft"):
        inner = inner.get_base_model()  # type: ignore[operator]
    model = deepcopy(inner)
    for path, module in list(model.named_modules()):
        if isinstance(module, import_peft().tuners.lora.LoraLayer):
            model.set_submodule(path, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    _load(model, {plain_name(name): tensor for name, tensor in state.items() if ".lora_" not in name})
    return model.eval().requires_grad_(False)


def _load(model: nn.Module, state: Parameters) -> None:
    """Load a state into the model, in which a tied weight has one of its names."""
    own = model.state_dict(keep_vars=True)
    missing, unknown = model.load_state_dict(state, strict=False)
    given = {id(own[name]) for name in state if name in own}
    if lost := [*unknown, *(name for name in missing if id(own[name]) not in given)]:
        raise TaskError(
            f"{lost[0]!r} is in the model or in its checkpoint, and not in both, once adapters are taken off: such a "
            "model cannot be exported."
        )


def adapter_tensors(layers: list[Adapted], parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and s·B for every adapted layer, keyed by its path in the plain model."""
    return {layer.path: (parameters[layer.down], layer.scale * parameters[layer.up]) for layer in layers}


def weight_moves(layers: list[Adapted], state: Mapping[str, Tensor], imprints: Parameters) -> Tensor:
    """Return how far each imprint moves the adapted weights per unit, ‖s(u_B A + B u_A)‖/‖W‖; shape (rows,).

    Relative to the weights, not to the adapter's own parameters, which are 0 where an adapter begins.
    """
    rows = len(next(iter(imprints.values())))
    squares, weights = torch.zeros(rows, dtype=torch.float64), 0.0
    for layer in layers:
        weights += float(state[layer.weight].double().square().sum())
        down, up = state[layer.down].double(), state[layer.up].double()
        moved_down, moved_up = imprints.get(layer.down), imprints.get(layer.up)
        for row in range(rows):
            left = [] if moved_up is None else [moved_up[row].double()]
            right = [] if moved_up is None else [down]
            if moved_down is not None:
                left, right = [*left, up], [*right, moved_down[row].double()]
            if left:  # ‖PQ‖² = ⟨PᵀP, QQᵀ⟩ is small matrices only
                p, q = torch.cat(left, 1), torch.cat(right, 0)
                squares[row] += layer.scale**2 * float(((p.T @ p) * (q @ q.T)).sum())
    relative: Tensor = squares.clamp(min=0).sqrt() / weights**0.5
    return relative
