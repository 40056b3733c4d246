"""The model and the optimiser of a run that is recorded: what is known of them, and whether they were changed."""

import platform
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imprint.compat import uncompiled, version_of
from imprint.display import name_some
from imprint.errors import PlanError, StoreError
from imprint.recording.checkpoints import (
    load_state,
    persistent_buffers,
    read_optimiser_state,
    read_state,
)
from imprint.recording.header import SCHEMA, Header, Kept, hash_frozen
from imprint.recording.memory import give_memory
from imprint.recording.settings import describe_groups, name_class, restore_groups
from imprint.recording.watching import Stamp, name_groups, refuse_untrained, stamp
from imprint.store.fingerprint import DataPrint


class Subject:
    """A model with the optimiser that trains it, and perhaps a scheduler of the learning rate.

    groups: the names of the parameters that each group of the optimiser trains: those that are not frozen at first.
    parameters: these by name, in the model's order, in which norms are summed.
    """

    def __init__(self, model: nn.Module, optimiser: Optimizer, scheduler: Any) -> None:
        if not isinstance(model, nn.Module):
            raise PlanError(f"model must be an nn.Module, got {type(model).__name__}.")
        if not isinstance(optimiser, Optimizer):
            raise PlanError(f"optimiser must be a torch.optim.Optimizer, got {type(optimiser).__name__}.")
        if scheduler is not None and not hasattr(scheduler, "load_state_dict"):
            raise PlanError(f"scheduler must have state_dict() and load_state_dict(), got {type(scheduler).__name__}.")
        refuse_several_processes()
        model = uncompiled(model)
        self.model, self.optimiser, self.scheduler = model, optimiser, scheduler
        self.groups = name_groups(model, optimiser)
        describe_groups(optimiser)  # refuses at once what cannot be kept
        own = dict(model.named_parameters())
        trained = {name for group in self.groups for name in group}
        self.parameters = {name: parameter for name, parameter in own.items() if name in trained}
        self._frozen = {name: parameter for name, parameter in own.items() if name not in self.parameters}
        self._division = _list_groups(optimiser)
        optimised = set(chain.from_iterable(self._division))
        self._resting = {name: p for name, p in self._frozen.items() if id(p) in optimised}
        self._persistent = persistent_buffers(model).keys()
        self._stamps: dict[str, Stamp] | None = None
        self._versions: dict[str, int] | None = None  # of the frozen parameters before the first step

    # --- changes

    def mark(self) -> None:
        """Remember the trained parameters and the buffers as unchanged up to now."""
        if self._versions is None:
            self._versions = {name: version_of(parameter) for name, parameter in self._frozen.items()}
        self._stamps = {name: stamp(tensor) for name, tensor in self._kept().items()}

    def mark_parameters(self) -> None:
        """Remember the trained parameters alone, after the optimiser has moved them."""
        if self._stamps is not None:
            self._stamps.update({name: stamp(parameter) for name, parameter in self.parameters.items()})

    def mark_buffers(self) -> None:
        """Remember the buffers alone, after forward passes."""
        if self._stamps is not None:
            self._stamps.update({name: stamp(buffer) for name, buffer in self._buffers().items()})

    def find_change(self, *, buffers: bool = True) -> str | None:
        """Return the first parameter or buffer that was written to or replaced since it was marked."""
        now = self._kept() if buffers else self.parameters
        before = self._stamps or {name: stamp(tensor) for name, tensor in now.items()}
        return next((name for name, tensor in now.items() if before.get(name) != stamp(tensor)), None)

    def refuse_changes(self, when: str, *, buffers: bool = True) -> None:
        """Refuse changes that neither a forward pass nor the optimiser has made in a step."""
        if changed := self.find_change(buffers=buffers):
            raise PlanError(
                f"{changed!r} was changed {when}, other than by the recorded optimiser, which a recording cannot keep. "
                "Evaluate in evaluation mode (model.eval()), load weights before the first step, and leave the model "
                "on its device."
            )

    def refuse_changed_frozen(self) -> None:
        """Refuse a frozen parameter that was written to since the first step."""
        for name, before in (self._versions or {}).items():
            if version_of(self._frozen[name]) != before:
                raise PlanError(
                    f"the frozen parameter {name!r} was changed during training without the optimiser, as that of a "
                    "teacher is which follows the model: a recording cannot keep that. Train without it, or record "
                    "the model without the teacher if the loss does not use it."
                )

    def refuse_regrouping(self) -> None:
        """Refuse an optimiser that trains other parameters than when the recording began."""
        if _list_groups(self.optimiser) != self._division:
            raise PlanError("the optimiser's parameter groups changed during the run: a recording has one division.")

    def refuse_untrained(self) -> None:
        """Refuse parameters that require gradients and are not the optimiser's."""
        if any(parameter.requires_grad for parameter in self._frozen.values()):
            refuse_untrained(self.model, self.parameters.keys() | self._resting.keys())

    def clear_frozen(self) -> None:
        """Clear what gradients frozen parameters have left from before, as a step clears those of trained ones."""
        for parameter in self._resting.values():
            parameter.grad = None

    def refuse_unfrozen(self, step: int) -> None:
        """Refuse to train what was frozen when the recorder was made: the recording has nothing but a hash of it."""
        moved = [name for name, p in self._resting.items() if p.requires_grad or p.grad is not None]
        if moved:
            raise PlanError(
                f"step {step} trains {name_some(moved)}, which the recording leaves out because requires_grad was "
                "False when the recorder was made. Record in a new folder, with a RunRecorder that is made while "
                "everything that the run ever trains requires gradients, and freeze parts of it after that."
            )

    def _kept(self) -> dict[str, Tensor]:
        return {**self.parameters, **self._buffers()}

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self._persistent}

    # --- what a recording says of them

    def describe(self, n: int, seed: int, every: int | None, data: DataPrint | None) -> Header:
        """Return what is known of a run before its first step."""
        return Header(
            schema=SCHEMA,
            finished=False,
            n=n,
            seed=seed,
            every=every,
            optimiser=name_class(type(self.optimiser)),
            groups=self.groups,
            buffers=tuple(self._persistent),
            frozen=tuple(self._frozen),
            frozen_sha256=hash_frozen(self._frozen),
            data=data,
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )

    def refuse_other(self, header: Header, n: int | None, seed: int, data: DataPrint | None, folder: Path) -> None:
        """Refuse to resume a recording of another model or optimiser, or with other data or another seed."""
        advice = "resume it with what it was begun with, or give a new folder"
        for what, before, now in (
            ("the optimiser", header.optimiser, name_class(type(self.optimiser))),
            ("the number of training examples", header.n, n or header.n),
            ("the seed", header.seed, seed),
        ):
            if before != now:
                raise StoreError(f"{folder} is an unfinished recording, where {what} is {before}, not {now}: {advice}.")
        for what, same in (
            ("trained parameters", header.groups == self.groups),
            ("buffers", header.buffers == tuple(self._persistent)),
            ("frozen parameters", self._has_frozen(header)),
            ("data", None in (header.data, data) or header.data == data),
        ):
            if not same:
                raise StoreError(f"{folder} is an unfinished recording with other {what}: {advice}.")

    def load(self, folder: Path, kept: Kept, header: Header) -> None:
        """Set model, optimiser and scheduler to a checkpoint of a recording."""
        load_state(self._kept(), read_state(folder, kept, header))
        give_memory(self.optimiser, self.parameters, read_optimiser_state(folder, kept, header))
        if header.settings:  # otherwise nothing but the start was kept
            restore_groups(self.optimiser, header.settings)
        if self.scheduler is not None and header.schedule is not None:
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **header.schedule})

    def refuse_other_state(self, folder: Path, kept: Kept, header: Header) -> None:
        """Refuse a model that is not what a checkpoint of the recording has."""
        state = read_state(folder, kept, header)
        for name, tensor in self._kept().items():
            if not torch.equal(tensor.detach().cpu(), state[name]):
                raise StoreError(
                    f"{folder} is an unfinished recording whose model had another {name!r} after {kept.step} steps: "
                    f"load your checkpoint of step {kept.step} before the first step, or call run.resume() in place of "
                    f"step={kept.step}."
                )

    def _has_frozen(self, header: Header) -> bool:
        """Tell whether the parameters that are not trained are those that a recording was begun with."""
        return header.frozen == tuple(self._frozen) and hash_frozen(self._frozen, header.schema) == header.frozen_sha256


def _list_groups(optimiser: Optimizer) -> list[list[int]]:
    """Return which parameters an optimiser has in each group."""
    return [[id(parameter) for parameter in group["params"]] for group in optimiser.param_groups]


def refuse_several_processes() -> None:
    """Refuse a training that is spread over processes: each sees the examples of its own, and the gradients of all."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and (processes := torch.distributed.get_world_size()) > 1:
        raise PlanError(
            f"the training runs in {processes} processes, whose gradients are combined, and a recorder sees the "
            "examples of one: record a training in one process."
        )
