"""What carries the imprint of a language model: its last blocks, an adapter it has, or an adapter made for it.

An adapter made here has a frozen A and B = 0, and the imprint lives in B alone: W + B A moves linearly with B, so that
equal steps up and down are exact mirror images. The rows of A are orthonormal and its scale is 1, so that a gradient
step in B moves the weights by −η G AᵀA, the plain step projected on the rows of A: step sizes and curvatures that suit
the weights suit B.

It sits where a block leads out of its wide inside: on the layers with more inputs than the model is wide. There most of
what tells sources apart is found for the numbers that it takes, and a query moves nothing else. "lora:R" keeps R
numbers of a source for each input of such a layer, which is a rank of R · inputs / outputs.
"""

import copy
import hashlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imprint.errors import MissingExtra, TaskError, first_line

logger = logging.getLogger(__name__)

ADAPTER = "imprint"
"""The name of adapters made here."""


@dataclass(frozen=True)
class Preset:
    """A short name of a choice of parameters, read: "last:2", "lora:16" or "lora:16:last:2"."""

    per_input: int | None
    last: int | None

    @classmethod
    def read(cls, text: str) -> "Preset | None":
        """The preset of this name; None for a text that is a glob.

        >>> Preset.read("lora:16:last:2")
        Preset(per_input=16, last=2)
        """
        if text.split(":")[0] not in ("last", "lora"):
            return None
        match = re.fullmatch(r"(?:lora:([1-9]\d*))?:?(?:last:([1-9]\d*))?", text)
        if match is None or text.endswith(":") or (match[1] is None) == text.startswith("lora:"):
            raise TaskError(
                f'parameters={text!r} is not understood: "last:K" are the last K blocks, "lora:R" is an adapter on '
                'all blocks and "lora:R:last:K" on the last K, where R and K are whole numbers from 1.'
            )
        return cls(*(int(found) if found else None for found in match.groups()))


def blocks(model: nn.Module, last: int | None = None) -> list[tuple[str, nn.Module]]:
    """Return the transformer blocks of a model with their names, or the last of them."""
    layers = getattr(text_config(model), "num_hidden_layers", None)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = next(((name, module) for name, module in lists if layers and len(module) == layers), None)
    if found is None:
        raise TaskError(
            f"{type(model).__name__} has no blocks that could be recognised: a list of modules as long as the "
            f"num_hidden_layers of its configuration ({layers}) was looked for. Give parameters= as globs of names."
        )
    name, module = found
    every = [(f"{name}.{index}", block) for index, block in enumerate(module)]
    if last is not None and last > len(every):
        raise TaskError(f"the last {last} blocks are asked for, and the model has {len(every)}.")
    return every if last is None else every[-last:]


def causal(model: nn.Module) -> Any:
    """Return the transformers model itself, where peft has wrapped it."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a transformers model, or that of its text part; None where it has none."""
    config: Any = getattr(causal(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def with_adapter(model: nn.Module, per_input: int, last: int | None) -> tuple[nn.Module, Any]:
    """Make a twin of the model that shares its tensors and has an adapter "lora:R"; return it and its configuration.

    The model itself stays as it is. Where no layer is wider than the model, all linear ones are adapted.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise MissingExtra('parameters="lora:R"', "language") from error
    if adapter_names(model):
        raise TaskError(
            "the model has an adapter of its own, and lora:R would add a second: leave parameters= out to attribute "
            "through the one it has, or merge it first (model.merge_and_unload())."
        )
    layers = {
        f"{prefix}.{name}": module
        for prefix, block in blocks(model, last)
        for name, module in block.named_modules()
        if type(module) in (nn.Linear, Conv1D)
    }
    if not layers:
        raise TaskError("the model's blocks have no linear layer to put an adapter on: give parameters= as globs.")
    shapes = {
        name: module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
        for name, module in layers.items()
    }
    ranks = _ranks(shapes, causal(model).get_input_embeddings().weight.shape[1], per_input)
    highest = max(ranks.values())
    others = {re.escape(name): rank for name, rank in ranks.items() if rank != highest}
    config = LoraConfig(
        r=highest,
        lora_alpha=highest,  # the scale is alpha / r
        rank_pattern=others,
        alpha_pattern=others,
        lora_dropout=0.0,
        target_modules=list(ranks),
    )
    twin = _twin(model)
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reports how Conv1D stores its weight
        try:
            inject_adapter_in_model(config, twin, adapter_name=ADAPTER)
        except ValueError as error:
            raise TaskError(f"peft puts no adapter on a {type(causal(model)).__name__}: {first_line(error)}") from error
        finally:
            for parameter, was in trained.items():  # peft freezes what it adapts, which is the model's own
                parameter.requires_grad_(was)
    if missed := [name for name in ranks if ADAPTER not in getattr(twin.get_submodule(name), "lora_A", {})]:
        raise TaskError(
            f"peft puts no adapter on {len(missed)} layers of a {type(causal(model)).__name__}, such as {missed[0]}: "
            "give parameters= as globs, or a model with an adapter of its own."
        )
    for name in ranks:
        layer = layers[name]
        adapted: Any = twin.get_submodule(name)
        a, b = adapted.lora_A[ADAPTER], adapted.lora_B[ADAPTER]
        held = torch.float32 if layer.weight.dtype.itemsize < 4 else layer.weight.dtype
        a.to(held).weight.data.copy_(orthonormal_rows(a.out_features, a.in_features, name))
        b.to(held).weight.data.zero_()
        a.requires_grad_(False)
        b.requires_grad_(True)
    return twin, config


def _ranks(shapes: dict[str, torch.Size], width: int, per_input: int) -> dict[str, int]:
    """Return the ranks of the layers that are adapted, from the shapes (outputs, inputs) of all linear ones."""
    wide = {name: shape for name, shape in shapes.items() if shape[1] > width}
    if not wide:
        logger.warning("no linear layer of the blocks is wider than the model: the adapter sits on all %d", len(shapes))
    return {name: rank_of_layer(per_input, inputs, outputs) for name, (outputs, inputs) in (wide or shapes).items()}


def rank_of_layer(per_input: int, inputs: int, outputs: int) -> int:
    """Return the rank that "lora:R" gives to a layer, from 1 to the number of its inputs.

    >>> [rank_of_layer(16, *shape) for shape in ((1024, 256), (704, 256), (40, 32))]
    [64, 44, 20]
    """
    return min(inputs, max(1, round(per_input * inputs / outputs)))


def orthonormal_rows(rows: int, width: int, seed: str) -> Tensor:
    """Return a random matrix with A Aᵀ = I that depends on its seed alone, in float64."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big")
    drawn = torch.randn(width, rows, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(drawn).Q
    return basis.T


def _twin(model: nn.Module) -> nn.Module:
    """Copy a model's modules around the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def adapter_names(model: nn.Module) -> dict[str, str]:
    """Return the parameters of the active adapters, each with the name under which peft writes it."""
    return dict(_adapter_parameters(model))


def _adapter_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper
    except ImportError:  # without peft a model has no adapters of it
        return
    for prefix, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            if module.merged:
                raise TaskError(
                    f"the adapter of {prefix} is merged into the weights and no longer moves them: "
                    "model.unmerge_adapter() takes it out again."
                )
            if module.disable_adapters:
                raise TaskError(
                    f"the adapter of {prefix} is disabled and does not move the outputs: "
                    "model.enable_adapter_layers() turns it on again."
                )
            kinds = {kind: f".{kind}" for kind in module.adapter_layer_names}
        elif isinstance(module, ModulesToSaveWrapper):
            kinds = {"modules_to_save": ""}
        else:
            continue
        for name, _ in module.named_parameters():
            for kind, written in kinds.items():
                for adapter in module.active_adapters:
                    held = f"{kind}.{adapter}"
                    if name == held or name.startswith(f"{held}."):
                        # DoRA's magnitudes were once a bare parameter, and are written as one still
                        rest = "" if kind == "lora_magnitude_vector" else name.removeprefix(held)
                        yield f"{prefix}.{name}", f"{prefix}{written}{rest}"
