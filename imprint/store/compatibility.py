"""Tells whether a store can be read with a task: it must have the store's parameters, base model and loss."""

from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from imprint.batches import is_columnar, map_tensors
from imprint.errors import ConcurrencyError, StoreError, first_line
from imprint.store.comparison import compare_losses
from imprint.store.fingerprint import of_each, sum_of_bits
from imprint.store.layouts import base_layout
from imprint.store.manifest import Manifest
from imprint.store.opening import Files
from imprint.store.probe_examples import SPREAD
from imprint.store.probing import ProbeValues, evaluate_losses, evaluate_probes
from imprint.store.request import specify
from imprint.store.structure import rebuild
from imprint.task import Functional, Parameters, Task


class Compatibility:
    """Recognises the tasks that a store can be read with."""

    def __init__(self, manifest: Manifest, files: Files) -> None:
        self._manifest, self._files = manifest, files
        self._recognised: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
        self._known_losses: WeakSet[Task] = WeakSet()  # of these tasks

    def check_task(self, task: Task) -> None:
        """Refuse a task whose parameters are not those of the store, selected or not."""
        self._check_selected(task)
        self._check_fixed(task)
        persistent = task.model.state_dict().keys()
        own = {name: p.shape for name, p in task.model.named_parameters()}
        own |= {name: b.shape for name, b in task.model.named_buffers() if name in persistent}
        expected = {name: shape for name, shape in own.items() if name not in self._manifest.fixed}
        for index, checkpoint in enumerate(self._manifest.checkpoints):
            if checkpoint.base is None:
                continue
            with self._files.open(checkpoint.base, base_layout(self._manifest)) as tensors:
                stored = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            for name in {**expected, **stored}:
                if (mine := expected.get(name)) != (theirs := stored.get(name)):
                    had, has = (f"shape {tuple(s)}" if s is not None else "no such tensor" for s in (theirs, mine))
                    raise StoreError(
                        f"the store was made with another model: at checkpoint {index} it has {had} for {name!r}, the "
                        f"task's model has {has}."
                    )

    def _check_selected(self, task: Task) -> None:
        mine, theirs = self._manifest.parameters, specify(task)
        if extra := [name for name in theirs if name not in mine]:
            raise StoreError(
                "this task is of another model than the store's, or selects other parameters: it selects "
                f"{extra[0]!r}, of which the store has no imprints."
            )
        if missing := [name for name in mine if name not in theirs]:
            raise StoreError(f"the store has imprints of parameter {missing[0]!r}, which the task does not select.")
        for name, was in mine.items():
            if (now := theirs[name]) != was:
                raise StoreError(f"parameter {name!r} was {was} in the store, the task's is {now}.")

    def _check_fixed(self, task: Task) -> None:
        """Refuse a model whose parameters that the store does not keep are others.

        Once they are recognised, sums tell whether they have changed.
        """
        own, fixed = dict(task.model.named_parameters()), self._manifest.fixed
        for name in fixed:
            if name not in own:
                raise StoreError(f"the store was made with another base model: this one has no parameter {name!r}.")
        now = task.own(fixed)
        sums = {name: sum_of_bits(tensor) for name, tensor in now.items()}
        if self._recognised.get(task.model) == sums:
            return
        found = of_each(now)  # all of them, before the first is compared: other models are rare
        for name, known in fixed.items():
            if found[name] != known:
                raise StoreError(
                    f"the store was made with another base model: {name!r} has other values, or another precision, "
                    "than the parameter that was left alone in training."
                )
        self._recognised[task.model] = sums

    def check_loss(self, functional: Functional, theta: Parameters) -> None:
        """Refuse a task whose loss on the probe examples, at and around the first base, is not what it was.

        All of them are evaluated once for each task; after that the first few, at the base alone.
        """
        probes = self._manifest.probes
        if probes is None:
            return
        task, before, count = functional.task, probes.values, len(probes.values.losses)
        with self._files.open(probes.file) as tensors:
            batch = rebuild(probes.structure, lambda name: tensors.get_tensor(name).to(task.device))
        known = task in self._known_losses and bool(before.moved)  # which says how exactly losses can be compared
        if known and is_columnar(batch, count):
            count = min(SPREAD, count)
            batch = map_tensors(lambda t: t[:count], batch)
        try:
            with task.evaluating():
                if known:
                    now = ProbeValues(evaluate_losses(functional, theta, batch, count), [], None, before.precision)
                else:
                    now = evaluate_probes(functional, theta, batch, count)
        except (MemoryError, torch.OutOfMemoryError, ConcurrencyError):  # which say nothing about the loss
            raise
        except Exception as error:
            raise StoreError(
                f"the loss function fails on the store's probe examples ({first_line(error)}): it is not the one the "
                "store was made with."
            ) from error
        if different := compare_losses(replace(before, losses=before.losses[:count]), now):
            raise StoreError(f"{different}: the loss function changed since the store was made.")
        self._known_losses.add(task)
