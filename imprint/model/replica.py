"""Copies a model's structure, so that the user's own module is never touched.

Simulations and readouts swap parameters, set evaluation mode and attach hooks. They do so on a copy that shares the
tensors of the user's model, so that other threads may use, train or save the model meanwhile. `Task` keeps one copy and
asks for it before each computation; the model is copied again after its modules, tensors or settings have changed.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from imprint.compat import (
    forward_hooks,
    forward_pre_hooks,
    own_buffers,
    own_parameters,
    unsaved_buffers,
    version_of,
)
from imprint.errors import ReliabilityWarning, TaskError, first_line

logger = logging.getLogger(__name__)
_TRIES = 3  # another thread may add an attribute while the model is copied
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN = frozenset({"training", "_parameters", "_buffers", "_modules"})  # compared in another way, or not at all


class Host(nn.Module):
    """Holds the model one level down, so that `functional_call` can swap its parameters around any function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
        return function(self.model, batch)


class Replica:
    """The copy of one model, made on first use and again after the model has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copy: nn.Module | None = None
        self._seen: list[Any] = []
        self._prepared = ExitStack()  # preparations last as long as the copy

    @property
    def shared(self) -> bool:
        """Whether the model could not be copied, so that computations use the user's own module."""
        return self._copy is self._model

    def current(self, prepare: Callable[[nn.Module], AbstractContextManager[None]]) -> nn.Module:
        """Return the copy, in evaluation mode, with the model's present structure and settings.

        prepare: a context that is entered with each new copy and stays open as long as the copy lives.
        """
        seen = _structure(self._model)
        if self._copy is None or not _same(seen, self._seen):
            self._copy = self._make_copy(prepare)
            self._seen = seen
        return self._copy

    def _make_copy(self, prepare: Callable[[nn.Module], AbstractContextManager[None]]) -> nn.Module:
        try:
            made = _copy_structure(self._model)
        except Exception as error:
            warnings.warn(
                f"{type(self._model).__name__} cannot be copied ({first_line(error)}): Imprint works on the module "
                "itself. Do not use, train or save it in other threads while a simulation or readout runs.",
                ReliabilityWarning,
                stacklevel=4,
            )
            return self._model
        for module in made.modules():  # not made.eval(), which may merge weights and so change the shared tensors
            module.training = False
        self._prepared = ExitStack()
        self._prepared.enter_context(prepare(made))
        return made


def _copy_structure(model: nn.Module) -> nn.Module:
    """Copy the modules of a model around the same tensors; non-persistent buffers are copied too."""
    made = copy_modules(model, lambda: tensors_of(model))
    theirs = dict(model.named_parameters(remove_duplicate=False))
    mine = dict(made.named_parameters(remove_duplicate=False))
    if mine.keys() != theirs.keys() or any(mine[name] is not theirs[name] for name in theirs):
        raise TypeError("its copy has parameters of its own")
    for module in made.modules():
        buffers = own_buffers(module)
        for name in unsaved_buffers(module):  # no checkpoint replaces them
            if (buffer := buffers.get(name)) is not None:
                buffers[name] = buffer.detach().clone()
    return made


def copy_modules(model: nn.Module, shared: Callable[[], Iterable[Tensor]]) -> nn.Module:
    """Copy a model but for the tensors that it is to share with its copy."""
    for attempt in range(_TRIES):
        try:
            made = copy.deepcopy(model, {id(tensor): tensor for tensor in shared()})
            break
        except RuntimeError as error:
            if "changed size during iteration" not in str(error) or attempt == _TRIES - 1:
                raise
    if {id(module) for module in model.modules()} & {id(module) for module in made.modules()}:
        raise TypeError("its copy is made of the same modules")
    return made


def make_private(model: nn.Module) -> nn.Module:
    """Copy a model that is to be trained: trainable parameters and buffers are its own, frozen parameters shared."""

    def shared() -> Iterator[Tensor]:
        for tensor in tensors_of(model):
            if tensor.grad_fn is not None or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad):
                yield tensor

    try:
        return copy_modules(model, shared)
    except Exception as error:
        raise TaskError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}), and its training can only be repeated on "
            "a copy: make copy.deepcopy(model) work."
        ) from error


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor in a model's modules: parameters, buffers, and those in attributes, lists and dicts."""
    for module in list(model.modules()):
        yield from _tensors_in(vars(module), set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        if value.grad_fn is None and value.grad is not None:
            yield value.grad
    elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
        seen.add(id(value))
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors_in(item, seen)


def _structure(model: nn.Module) -> list[Any]:
    """List what a copy depends on: modules, tensors, plain settings and hooks.

    The list keeps them alive, so that no new object can take the identity of an old one.
    """
    found: list[Any] = []
    for module in model.modules():
        found.append(module)
        own = vars(module)
        found += own_parameters(module).values()
        for name, buffer in own_buffers(module).items():
            found.append(buffer)
            if name in unsaved_buffers(module) and buffer is not None and not buffer.is_inference():
                found.append(version_of(buffer))
        found += [value for name, value in own.items() if name not in _OWN and isinstance(value, _PLAIN)]
        for hooks in (forward_hooks(module), forward_pre_hooks(module)):
            found += hooks.values()
        config = own.get("config")
        if config is not None and hasattr(config, "__dict__"):
            found += [value for value in vars(config).values() if isinstance(value, _PLAIN)]
    return found


def _same(left: list[Any], right: list[Any]) -> bool:
    """Tell whether two structures hold the same objects; plain settings are compared by value and type."""
    if len(left) != len(right):
        return False
    return all(
        one is two or (isinstance(one, _PLAIN) and type(one) is type(two) and (one == two or one != one))
        for one, two in zip(left, right, strict=True)
    )
