"""Keeps the checkpoints that imprints want from a transformers Trainer."""

import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from imprint.errors import MissingExtra, PlanError
from imprint.language.presets import adapter_names
from imprint.recorder import Recorder

try:
    from transformers import TrainerCallback
except ImportError:  # reported when one is made
    TrainerCallback = object


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """A callback for `Trainer(callbacks=[CheckpointCallback("checkpoints", at=(100, 250, 500))])`.

    Writes the model after these steps, and the optimiser's second moments beside it, with an `imprint.Recorder`; of a
    model with an adapter, the adapter and what else is trainable. An optimiser whose second moments cannot be read is
    warned of, and checkpoints are kept without them.

    at: which steps, early ones above all; None keeps every one.
    """

    def __init__(self, folder: str | os.PathLike[str], at: Collection[int] | None = None) -> None:
        if TrainerCallback is object:
            raise MissingExtra("language.CheckpointCallback", "language")
        self._folder, self._at = folder, at
        self._recorder = Recorder(folder, at)

    @property
    def paths(self) -> list[Path]:
        """The files of the checkpoints, in order, as `simulate` takes them."""
        return self._recorder.paths

    def __repr__(self) -> str:
        return repr(self._recorder).replace("Recorder", "CheckpointCallback", 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the Trainer when its optimiser is there."""
        optimiser = given.get("optimizer")
        keeps_moments = optimiser is not None and all("betas" in group for group in optimiser.param_groups)
        self._recorder = Recorder(self._folder, self._at, optimiser=optimiser if keeps_moments else None)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the Trainer when it is done."""
        missed = [step for step in self._at or () if not 1 <= step <= state.global_step]
        if missed and state.is_world_process_zero:
            steps = ", ".join(map(str, sorted(missed)))
            warnings.warn(
                f"no checkpoint was kept at step {steps}: the training had steps 1 to {state.global_step}.",
                stacklevel=2,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the Trainer after every step of its optimiser."""
        if not state.is_world_process_zero:
            return
        kept = _to_save(given["model"])
        try:
            self._recorder(kept, state.global_step)
        except PlanError as error:  # of the optimiser; a training is not to end for it
            warnings.warn(f"checkpoints are kept without second moments: {error}", stacklevel=2)
            self._recorder = Recorder(self._folder, self._at)
            self._recorder(kept, state.global_step)


def _to_save(model: nn.Module) -> nn.Module:
    """Return what is written of a model: all of it, or with an adapter, the adapter and what else is trainable."""
    adapter, tree = adapter_names(model), nn.Module()
    if not adapter:
        return model
    for name, parameter in model.named_parameters():
        if name not in adapter and not parameter.requires_grad:
            continue
        *path, last = name.split(".")
        place = tree
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, parameter)
    return tree
