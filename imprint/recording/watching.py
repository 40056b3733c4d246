"""Watches a model and its optimiser in training: their gradients, their changes, and how forward passes run."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imprint.compat import is_scripted, version_of
from imprint.display import name_some
from imprint.errors import PlanError, ReliabilityWarning
from imprint.recording.records import Circumstances
from imprint.store.fingerprint import sum_of_bits
from imprint.tensors.vectors import total_norm

Stamp = tuple[int, int]
"""Where a tensor lies, and how often it was written to."""


def stamp(tensor: Tensor) -> Stamp:
    """Return what changes if a tensor is written to or replaced."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0, version_of(tensor)


def name_groups(model: nn.Module, optimiser: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters that each group trains; refuse an optimiser of other models' parameters.

    What is frozen is left out: an optimiser passes over a parameter without a gradient, its weight decay too.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[tuple[str, ...]] = []
    for index, group in enumerate(optimiser.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise PlanError(
                    f"the optimiser's parameter group {index} has a tensor of shape {tuple(parameter.shape)} that is "
                    "no parameter of the model: record the module that has all of them (an nn.ModuleList of several "
                    "will do), and build the optimiser after moving the model to its device."
                )
        groups.append(tuple(names[id(parameter)] for parameter in group["params"] if parameter.requires_grad))
    trained = {name for group in groups for name in group}
    if not trained:
        raise PlanError("the optimiser has no parameters to train: none of those it was given requires gradients.")
    if isinstance(optimiser, torch.optim.LBFGS) and len(trained) < len(optimiser.param_groups[0]["params"]):
        raise PlanError(
            "LBFGS moves all its parameters as one, and some of them are frozen: give it those alone that require "
            "gradients."
        )
    refuse_untrained(model, trained)
    return tuple(groups)


def refuse_untrained(model: nn.Module, trained: Set[str]) -> None:
    """Refuse parameters that get gradients, which count in clipping, and are not the optimiser's."""
    outside = [name for name, p in model.named_parameters() if p.requires_grad and name not in trained]
    if outside:
        raise PlanError(
            f"parameters that require gradients are not in the optimiser: {name_some(outside)}. Freeze them with "
            "requires_grad_(False), or train them with the same optimiser: a recording has one."
        )


class Gradients:
    """Knows the gradients that backward passes have made, and notices changes that it was not told of.

    expected: whether backward passes belong to a step.
    thorough: whether values are compared too. Unlike clipping, a GradScaler changes gradients without torch counting it
        as a change, and does so in every step: comparing the values of the first few is enough.
    passes: how many gradients were accumulated so far.
    stray: the first parameter that got a gradient while nobody expected one, if any.
    accumulates: whether the training loop leaves gradients to add up from step to step, which `clear` prevents; None as
        long as that is not known.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._known: dict[str, tuple[Stamp, int]] = {}
        self._handles: dict[str, Any] = {}
        self.expected = False
        self.thorough = False
        self.passes = 0
        self.stray: str | None = None
        self.accumulates: bool | None = None
        self._left: tuple[str, Tensor, int] | None = None  # a gradient that shows whether the loop clears gradients
        self._added = 0  # how often backward passes added to it

    def clear(self) -> None:
        """Forget all gradients, as before the first backward pass of a step; watch what requires one."""
        self._known.clear()
        self._left, self._added = self._leave_one() if self.accumulates is None else None, 0
        for name, parameter in self._parameters.items():
            if self._left is None or name != self._left[0]:
                parameter.grad = None
            if parameter.requires_grad and name not in self._handles:
                hook = _AfterGradient(self, name)
                self._handles[name] = parameter.register_post_accumulate_grad_hook(hook)

    def _leave_one(self) -> tuple[str, Tensor, int] | None:
        """Return a gradient of the step before, set to 0, with its name and version; None if there is none."""
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and bool(gradient.any()):
                gradient.zero_()
                return name, gradient, version_of(gradient)
        if self.passes:  # so that there were gradients
            self.accumulates = False
        return None

    def drop_left(self) -> None:
        """Take note whether the loop cleared the gradient that was left; drop it where no backward pass added to it."""
        if self._left is None:
            return
        (name, gradient, version), self._left = self._left, None
        if self._parameters[name].grad is not gradient:
            self.accumulates = False
        elif self._added:
            self.accumulates = version_of(gradient) == version + self._added  # nothing but the passes wrote to it
        else:
            self._parameters[name].grad = None

    def _is_left(self, name: str) -> bool:
        """Tell whether the gradient of a parameter is the one that was left, and nothing was added to it."""
        left = self._left
        return left is not None and name == left[0] and self._parameters[name].grad is left[1] and not self._added

    def notice(self, name: str, parameter: Tensor) -> None:
        """Take note of a gradient that a backward pass has just accumulated."""
        self.passes += 1
        self._added += self._left is not None and name == self._left[0]
        if self.expected and parameter.grad is not None:
            self._known[name] = self._look(parameter.grad)
        elif self.stray is None:
            self.stray = name

    def accept(self) -> None:
        """Take all gradients as they are now, after a change that is known."""
        self._known = {name: self._look(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def _look(self, gradient: Tensor) -> tuple[Stamp, int]:
        known = self.thorough and gradient.layout is torch.strided and not gradient.is_complex()
        return stamp(gradient), sum_of_bits(gradient) if known else 0

    def find_changed(self) -> str | None:
        """Return the first parameter whose gradient is not what backward passes have left, if any."""
        for name, parameter in self._parameters.items():
            now = None if parameter.grad is None or self._is_left(name) else self._look(parameter.grad)
            if self._known.get(name) != now:
                return name
        return None

    @property
    def missing(self) -> frozenset[str]:
        """The parameters without a gradient."""
        return frozenset(name for name, parameter in self._parameters.items() if parameter.grad is None)

    def norm(self) -> Tensor:
        """Return the Euclidean norm of all gradients together."""
        found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for name, gradient in found.items():
            if gradient.layout is not torch.strided:
                raise PlanError(f"the gradient of {name!r} is sparse, which a recording cannot keep: use sparse=False.")
        return total_norm(list(found.values()))

    def release(self) -> None:
        """Stop watching."""
        for handle in self._handles.values():
            handle.remove()


class _AfterGradient:
    """Called after each accumulation of a gradient; does not keep its owner alive."""

    def __init__(self, owner: Gradients, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __call__(self, parameter: Tensor) -> None:
        if owner := self._owner():
            owner.notice(self._name, parameter)


class ForwardHook:
    """Called before forward passes of a module, but not of copies of it; models stay copyable and picklable."""

    def __init__(self, notice: Callable[[], None] | None = None) -> None:
        self._notice = notice

    def __call__(self, module: nn.Module, given: Any) -> None:
        if not torch.compiler.is_compiling() and self._notice is not None:
            self._notice()

    def __reduce__(self) -> tuple[type["ForwardHook"], tuple[()]]:
        return ForwardHook, ()


class Watcher(Protocol):
    """What is told of forward passes and of the optimiser's steps; a `RunRecorder` is one."""

    def observe_forward(self) -> None: ...
    def before_optimiser(self, closure: bool) -> None: ...
    def after_optimiser(self) -> None: ...


def watch(model: nn.Module, optimiser: Optimizer, watcher: Watcher) -> list[Any]:
    """Have a watcher told of everything, also where a loss calls the model's children alone; return the hooks.

    They do not keep the watcher alive.
    """
    weak = weakref.ref(watcher)

    def forward() -> None:
        if found := weak():
            found.observe_forward()

    def before(optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if found := weak():
            found.before_optimiser(kwargs.get("closure", args[1] if len(args) > 1 else None) is not None)

    def after(optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if found := weak():
            found.after_optimiser()

    hook = ForwardHook(forward)
    modules = [model, *(child for child in model.children() if not is_scripted(child))]
    hooks: list[Any] = [module.register_forward_pre_hook(hook) for module in modules]
    return [*hooks, optimiser.register_step_pre_hook(before), optimiser.register_step_post_hook(after)]


class ForwardPasses:
    """Knows how forward passes of a run are made, and refuses a step that makes them otherwise.

    circumstances: those of all steps; None before the first forward pass.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, Tensor]) -> None:
        self._model, self._trained = model, trained
        self._seen = False  # whether the present micro-batch has had one
        self.circumstances: Circumstances | None = None

    def begin_batch(self) -> None:
        """Expect the forward passes of another micro-batch."""
        self._seen = False

    def notice(self, step: int) -> None:
        """Take note how the first forward pass of a micro-batch runs, at this moment."""
        if self._seen:
            return
        self._seen = True
        now = _observe(self._model, next(iter(self._trained.values())).device)
        if self.circumstances is not None:
            _refuse_other(self.circumstances, now, step)
        self.circumstances = now

    def notice_late(self, step: int) -> None:
        """Take note how forward passes ran if none was seen: modes are as they are now, autocast may be over."""
        if not self._seen and self.circumstances is None:
            warnings.warn(
                "no forward pass of the model was seen in the first step, so that the recorder cannot tell whether it "
                "ran under torch.autocast. Give the recorder the module that the loss calls; of a compiled model, the "
                "compiled one.",
                ReliabilityWarning,
                stacklevel=2,
            )
        self.notice(step)


def _observe(model: nn.Module, device: torch.device) -> Circumstances:
    """Return how a forward pass of a model runs at this moment."""
    kind = device.type
    autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None
    return Circumstances(
        device=str(device),
        evaluating=frozenset(name for name, module in model.named_modules() if not module.training),
        autocast=autocast,
        matmul_precision=torch.get_float32_matmul_precision(),
    )


def _refuse_other(before: Circumstances, now: Circumstances, step: int) -> None:
    """Refuse circumstances that differ from those of earlier steps, by name."""
    for name in sorted(before.evaluating ^ now.evaluating):
        was, mode = ("evaluation", "training") if name in before.evaluating else ("training", "evaluation")
        raise PlanError(
            f"{f'module {name!r}' if name else 'the model'} is in {mode} mode in step {step}, and was in {was} mode "
            "before: a recording has one mode for the whole run. Set it with model.train() or model.eval() before each "
            "step, such as after an evaluation."
        )
    for what, old, new in (
        ("the device", before.device, now.device),
        ("the dtype of autocast", before.autocast, now.autocast),
        ("the float32 matmul precision", before.matmul_precision, now.matmul_precision),
    ):
        if old != new:
            raise PlanError(f"{what} is {new} in step {step}, and was {old} before: keep it for the whole run.")
