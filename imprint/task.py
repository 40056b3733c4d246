"""Describes what is attributed: a model, its training loss per example, and the measurement F of a query.

Users write ordinary model code. The rest of the library sees a task as pure functions of the selected parameters
(`Functional`), which simulations and readouts differentiate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from imprint.batches import Batch as Batch
from imprint.batches import own_containers
from imprint.compat import is_same_memory, math_attention
from imprint.display import name_some
from imprint.errors import TaskError
from imprint.forms import Form
from imprint.model.dropout import apply_dropout
from imprint.model.measures import MEASURES, require_one_each, require_targets
from imprint.model.replica import Host, Replica
from imprint.model.supported import refuse_unsupported
from imprint.runtime.threads import warn_of_threads
from imprint.runtime.turns import one_at_a_time

Parameters = dict[str, Tensor]
"""Tensors by the name they have in the model."""

PerExample = Callable[[nn.Module, Batch], Tensor]
Better = Literal["lower", "higher"] | None


def require_task(task: object) -> None:
    """Refuse anything but a task, such as a bare model."""
    if not isinstance(task, Task):
        raise TaskError(f"task must be an imprint.Task, got a {type(task).__name__}: imprint.Task(model, loss=...).")


class Task:
    """A model, its loss per example, and what is measured of a query.

    Give either `loss(model, batch) -> (n,)`, or `outputs(model, batch) -> z` with `output_loss(z, batch) -> (n,)`.

    measure: None for the loss itself; "margin", "logprob" or "logit" of the right class (these need `outputs`);
        or any function of (model, batch) with one value per query.
    regulariser: r(model) -> scalar, such as the weight decay used in training; it enters the objective once.
    parameters: glob, or globs, over `model.named_parameters()`. Frozen parameters (`requires_grad=False`) are left out.
    form: how JSON becomes a query, for `imprint serve`.

    >>> task = Task.classifier(nn.Linear(3, 2), measure="margin")
    >>> task
    Task(Linear, measure='margin', parameters=2 tensors, 8 values)
    """

    fixed: Sequence[str] = ()
    """Parameters that training does not change. A store leaves out those that checkpoints share with the model."""
    repeating: PerExample | None = None
    """The measurement, if it is known to depend on tensors and on plain settings of the model's modules alone."""

    def __init__(
        self,
        model: nn.Module,
        loss: PerExample | None = None,
        *,
        outputs: PerExample | None = None,
        output_loss: Callable[[Tensor, Batch], Tensor] | None = None,
        measure: str | PerExample | None = None,
        regulariser: Callable[[nn.Module], Tensor] | None = None,
        parameters: str | Sequence[str] = "*",
        form: Form | None = None,
    ) -> None:
        if (outputs is None) != (output_loss is None):
            raise TaskError("outputs= and output_loss= belong together: give both, or give loss= alone.")
        if (loss is None) == (outputs is None):
            raise TaskError("give either loss=, or outputs= with output_loss=.")
        refuse_unsupported(model)
        self.model = model
        self.outputs = outputs
        self.output_loss = output_loss
        self.regulariser = regulariser
        self.form = form
        self.parameter_globs = (parameters,) if isinstance(parameters, str) else tuple(parameters)
        if loss is None:
            assert outputs is not None and output_loss is not None
            output_of, loss_of = outputs, output_loss
            loss = lambda model, batch: loss_of(output_of(model, own_containers(batch)), batch)  # noqa: E731
        self.loss = loss
        self._set_measure(measure)
        self.names = self._select(self.parameter_globs)
        self._replica = Replica(model)
        self._host: Host | None = None
        self._evaluates = False
        self._turn: object = None
        self.derivatives: dict[Any, tuple[str, ...]] = {}  # warnings about those of each measurement

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what only serves computations of this process, so that a task can be copied and sent."""
        return {**vars(self), "_replica": None, "_host": None, "_turn": None, "_evaluates": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._replica = Replica(self.model)

    @classmethod
    def classifier(cls, model: nn.Module, **options: Any) -> "Task":
        """Build a task for a classifier on (x, y) batches, trained with cross-entropy on `model(x)`."""
        task = cls(
            model,
            outputs=lambda model, batch: model(batch[0]),
            output_loss=lambda z, batch: F.cross_entropy(z, batch[1], reduction="none"),
            **options,
        )
        task.repeating = None if callable(options.get("measure")) else task.measure
        return task

    @classmethod
    def regression(cls, model: nn.Module, **options: Any) -> "Task":
        """Build the task of a regression on (x, y) batches, trained with half the summed squared error."""

        def half_squared_error(z: Tensor, batch: Batch) -> Tensor:
            error: Tensor = z - batch[1].reshape(z.shape)
            return 0.5 * error.square().flatten(1).sum(1)

        task = cls(
            model,
            outputs=lambda model, batch: model(batch[0]).reshape(len(batch[0]), -1),
            output_loss=half_squared_error,
            **options,
        )
        task.repeating = None if callable(options.get("measure")) else task.measure
        return task

    def _set_measure(self, measure: str | PerExample | None) -> None:
        self.better: Better = None
        if measure is None:
            self.measure_name, self.measure, self.better = "loss", self.loss, "lower"
        elif callable(measure):
            name = getattr(measure, "__name__", "<>")
            self.measure_name, self.measure = name if name.isidentifier() else "the measurement", measure
        elif measure not in MEASURES:
            raise TaskError(f"measure {measure!r} is unknown: use None, a function, or one of {', '.join(MEASURES)}.")
        elif self.outputs is None:
            raise TaskError(
                f"measure {measure!r} needs the model's outputs: give outputs= and output_loss= instead of "
                "loss= (Task.classifier does), or measure=f(model, batch)."
            )
        else:
            of_outputs, outputs = MEASURES[measure], self.outputs
            self.measure_name, self.better = measure, "higher"
            self.measure = lambda model, batch: of_outputs(
                outputs(model, own_containers(batch)), require_targets(batch)
            )

    def _select(self, globs: Sequence[str]) -> tuple[str, ...]:
        """Name the trainable floating-point parameters that match, tied weights once."""
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad and p.is_floating_point()}
        if not globs:
            raise TaskError('parameters is empty: give globs of parameter names, or leave it out for "*".')
        if not trainable:
            raise TaskError("the model has no trainable parameters (all have requires_grad=False).")
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in trainable):
                known = ", ".join(get_close_matches(glob, trainable, n=6, cutoff=0.4) or list(trainable)[:6])
                known += ", …" if len(trainable) > 6 else ""
                raise TaskError(f"parameters={glob!r} matches no trainable parameter; the model has {known}.")
        return tuple(name for name in trainable if any(fnmatchcase(name, glob) for glob in globs))

    def refuse_changes(self) -> None:
        """Refuse a model whose trainable parameters have changed since the task was built."""
        now = self._select(self.parameter_globs)
        if now != self.names:
            changed = name_some(sorted(set(now) ^ set(self.names)))
            raise TaskError(
                f"the model's trainable parameters changed after the task was built ({changed}): build a new task "
                "after adding, freezing or unfreezing layers."
            )

    def __repr__(self) -> str:
        selected = [self.model.get_parameter(name) for name in self.names]
        size = sum(p.numel() for p in selected)
        return (
            f"Task({type(self.model).__name__}, measure={self.measure_name!r}, "
            f"parameters={len(selected)} tensors, {size:,} values)"
        )

    @property
    def device(self) -> torch.device:
        """The device that holds all parameters of the model."""
        devices = {p.device for p in self.model.parameters()}
        if len(devices) > 1:
            spread = ", ".join(sorted(map(str, devices)))
            raise TaskError(f"the model is spread over several devices ({spread}): move it to one device.")
        (device,) = devices
        if device.type == "meta":
            raise TaskError("the model is on the meta device and has no values: load its weights first.")
        return device

    def tensors(self) -> Parameters:
        """Return every parameter and persistent buffer of the model, tied tensors once, detached and not copied."""
        persistent = self.model.state_dict().keys()
        buffers = {name: b for name, b in self.model.named_buffers() if name in persistent}
        return {name: t.detach() for name, t in {**dict(self.model.named_parameters()), **buffers}.items()}

    def state(self) -> Parameters:
        """Copy every parameter and persistent buffer of the model, tied tensors once."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def own(self, names: Iterable[str]) -> Parameters:
        """Return the named parameters of the model, detached."""
        return {name: self.model.get_parameter(name).detach() for name in names}

    def _aliases(self) -> dict[str, list[str]]:
        """Map the first name of each tied parameter or buffer to its other names."""
        first: dict[int, str] = {}
        others: dict[str, list[str]] = {}
        everything = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in everything:
            if first.setdefault(id(tensor), name) != name:
                others.setdefault(first[id(tensor)], []).append(name)
        return others

    def complete(self, state: Mapping[str, Tensor]) -> Parameters:
        """Check a user's state dict against the model and copy it to its device, each tied weight once.

        A frozen parameter of the model itself is not copied: nothing trains it, and it may fill half of the memory.
        """
        own = self.tensors()
        for first, others in self._aliases().items():  # a file keeps a tied weight under one of its names
            found = [state[name] for name in others if name in state]
            state = {first: found[0], **state} if found else state
        unknown = set(state) - set(own) - set(self.model.state_dict())
        missing = set(own) - set(state)
        if unknown or missing:
            parts = [f"it lacks {name_some(sorted(missing))}"] * bool(missing)
            parts += [f"it has unknown {name_some(sorted(unknown))}"] * bool(unknown)
            adapted = any(".lora_" in name for name in unknown)
            hint = " This is an adapter's checkpoint. Build the task from the model that carries the adapter." * adapted
            raise TaskError(f"a checkpoint does not fit the model: {'; '.join(parts)}.{hint}")
        for name, mine in own.items():
            if not isinstance(state[name], Tensor):
                raise TaskError(f"checkpoint value {name!r} is a {type(state[name]).__name__}, not a tensor.")
            if state[name].shape != mine.shape:
                theirs = tuple(state[name].shape)
                raise TaskError(f"checkpoint tensor {name!r} has shape {theirs}, the model's is {tuple(mine.shape)}.")
        frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        copied = {name for name in own if name not in frozen or not is_same_memory(own[name], state[name])}
        return {n: state[n].detach().to(t.device, t.dtype, copy=True) if n in copied else t for n, t in own.items()}

    def at(self, state: Mapping[str, Tensor], measure: PerExample | None = None) -> tuple["Functional", Parameters]:
        """Return the task as pure functions around `state`, and the selected parameters at `state`.

        measure: what to measure of a query instead of the task's own measurement.
        """
        fixed = {name: tensor for name, tensor in state.items() if name not in self.names}
        return Functional(self, fixed, measure=measure), {name: state[name] for name in self.names}

    def call(self, function: PerExample, state: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Call `function(model, batch)` with the tensors of `state` swapped into a copy of the model."""
        given = (function, own_containers(batch))
        return functional_call(self._require_host(), {f"model.{name}": t for name, t in state.items()}, given)  # type: ignore[no-any-return]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Take a turn with an up-to-date copy of the model, in evaluation mode and with differentiable attention.

        Fused attention and the encoder's fast path have no forward-mode derivative, so plain attention replaces them.
        """
        with one_at_a_time() as turn:
            if self._turn is turn and self._evaluates:  # an outer call has prepared everything
                yield
                return
            warn_of_threads(self.model)
            if self._turn is not turn:  # a forked child may find the copy in the middle of a call
                self._turn, self._replica = turn, Replica(self.model)
            current = self._replica.current(self.prepare)
            if self._host is None or self._host.model is not current:
                self._host = Host(current)
            try:
                self._evaluates = True
                with math_attention(), self._evaluate_in_place():
                    yield
            finally:
                self._evaluates = False

    @property
    def replica(self) -> nn.Module:
        """The copy of the model that is passed to `loss` and `measure`; it shares the model's tensors."""
        return self._require_host().model

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Switch to a copy of the model that nothing was computed with yet."""
        before = self._host
        if self._replica.shared:  # the model cannot be copied
            yield
            return
        fresh = Replica(self.model)
        self._host = Host(fresh.current(self.prepare))
        try:
            yield
        finally:
            self._host = before

    def _require_host(self) -> Host:
        if self._host is None:
            self._host = Host(self._replica.current(self.prepare))
        return self._host

    def prepare(self, model: nn.Module) -> AbstractContextManager[None]:
        """Prepare a model for computations, beyond evaluation mode; subclasses override this."""
        return nullcontext()

    def check_batch(self, batch: Batch) -> None:
        """Refuse a batch whose values do not fit the model; subclasses override this. A CUDA graph looks at none."""

    def count_terms(self, batch: Batch) -> float | None:
        """Count the terms, such as tokens, that the losses of a batch add up; None: unknown. Subclasses override it."""

    def pad_batch(self, batch: Batch) -> Batch:
        """Pad a batch to a common size where only rounding changes, for CUDA graphs; subclasses override this."""
        return batch

    @property
    def repeats(self) -> bool:
        """Whether measuring again does the same again, unless modules of the model have changed."""
        return self.measure is self.repeating and not self._replica.shared

    @contextmanager
    def _evaluate_in_place(self) -> Iterator[None]:
        """Put a model that cannot be copied into evaluation mode, and restore its modes afterwards."""
        if not self._replica.shared:
            yield
            return
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with self.prepare(self.model):
                yield
        finally:
            for module, mode in modes:
                module.training = mode


@dataclass(frozen=True)
class Functional:
    """A task as pure functions of its selected parameters; all other tensors of the model are `fixed`.

    noise: seeds of the dropout in losses and outputs, which is the same on every call; None for no dropout.
    measure: F, if it differs from the task's own.
    """

    task: Task
    fixed: Parameters
    noise: tuple[int, ...] | None = None
    measure: PerExample | None = None

    def losses(self, parameters: Mapping[str, Tensor], batch: Batch, count: int) -> Tensor:
        """Compute ℓ(θ; i) for the `count` examples of a batch, shape (count,)."""
        with apply_dropout(self.task.replica, self.noise):
            values = self.task.call(self.task.loss, {**self.fixed, **parameters}, batch)
        return require_one_each(values, count, "loss", "example")

    def outputs(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Compute the outputs z of a batch, which `output_losses` takes."""
        outputs = self.task.outputs
        assert outputs is not None
        with apply_dropout(self.task.replica, self.noise):
            return self.task.call(outputs, {**self.fixed, **parameters}, batch)

    def output_losses(self, z: Tensor, batch: Batch, count: int) -> Tensor:
        """Compute the losses ℓ of a batch of `count` examples from their outputs, shape (count,)."""
        output_loss = self.task.output_loss
        assert output_loss is not None
        return require_one_each(output_loss(z, own_containers(batch)), count, "loss", "example")

    def measures(self, parameters: Mapping[str, Tensor], batch: Batch, count: int) -> Tensor:
        """Compute F(q; θ) for the `count` queries of a batch, shape (count,)."""
        values = self.task.call(self.measure or self.task.measure, {**self.fixed, **parameters}, batch)
        return require_one_each(values, count, "measure", "query")

    def regulariser(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Compute r(θ), a scalar."""
        regulariser = self.task.regulariser
        assert regulariser is not None
        value = self.task.call(lambda model, _: regulariser(model), {**self.fixed, **parameters}, None)
        if value.dim() != 0:
            raise TaskError(f"regulariser must return a scalar, got shape {tuple(value.shape)}.")
        return value
