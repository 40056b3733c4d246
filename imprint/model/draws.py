"""Captures the random numbers that a forward pass draws, and gives another pass the same ones.

`vmap` draws in other shapes and by other kernels than a plain forward pass, so that the same seed gives other dropout
masks. What a plain pass has drawn, in order, is therefore handed to the stacked one, where nothing is drawn any more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from imprint.compat import TorchDispatchMode, argument_of

# operations whose numbers depend on the shape of what they are given, but not on its values
_BY_SHAPE = frozenset(
    {
        "bernoulli",
        "bernoulli_",
        "uniform_",
        "normal_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "random_",
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
    }
)
_BY_VALUE = frozenset({"aten.bernoulli.default", "aten.bernoulli_.Tensor"})
_DROPOUT = "native_dropout"


class UncapturableDraws(RuntimeError):
    """A forward pass draws random numbers in a way that they cannot be taken out of it."""


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _name(operation: Any) -> str:
    return str(operation.overloadpacket).rpartition(".")[2]


def _draws_nothing(operation: Any, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Tell whether a fused kernel, such as attention, has no dropout in this call."""
    return bool(argument_of(operation, "dropout_p", given, named) == 0.0)


class _Capture(TorchDispatchMode):
    """Keeps what random operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func) and not _draws_nothing(func, args, kwargs or {}):
            name = _name(func)
            if name == _DROPOUT:
                self.drawn.append(result[1].detach())
            elif name in _BY_SHAPE and str(func) not in _BY_VALUE:
                self.drawn.append(result.detach().clone())  # which the caller may change in place
            else:
                raise UncapturableDraws(f"{name} draws random numbers inside its own kernel")
        return result


class _Substitute(TorchDispatchMode):
    """Returns the numbers that were drawn before, instead of drawing.

    kept: of a batch of `count` examples, those that the forward pass sees; None for all.
    """

    def __init__(self, drawn: Sequence[Tensor], kept: Tensor | None, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left, self._kept, self._count = iter(drawn), kept, count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func) or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        name = _name(func)
        if name == _DROPOUT:
            given, p = args[0], args[1]
            mask = self._next(given.shape)
            return given * mask.to(given.dtype) * (1 / (1 - p) if p < 1 else 0.0), mask
        if name not in _BY_SHAPE:
            raise UncapturableDraws(f"{name} draws random numbers inside its own kernel")
        if name.endswith("_"):
            return args[0].copy_(self._next(args[0].shape))
        result = func(*args, **kwargs)
        return self._next(result.shape).to(result.dtype)

    def _next(self, shape: torch.Size) -> Tensor:
        found = next(self._left, None)
        if found is None:
            raise UncapturableDraws("a pass with other parameters draws more random numbers")
        found = self._select(found, shape)
        if found.shape != shape:
            raise UncapturableDraws(f"a pass draws numbers of shape {tuple(shape)} where {tuple(found.shape)} were")
        return found

    def _select(self, found: Tensor, shape: torch.Size) -> Tensor:
        """Take the numbers of the examples that are kept, along the dimension that runs over them."""
        if self._kept is None or found.shape == shape or found.dim() != len(shape):
            return found
        kept = self._kept
        for place, (there, wanted) in enumerate(zip(found.shape, shape, strict=True)):
            if there != wanted and there % self._count == 0 and wanted * self._count == there * len(kept):
                if not (found.is_floating_point() or found.dtype == torch.bool):
                    raise UncapturableDraws("a pass draws whole numbers for each example, such as whom to mix it with")
                split: Tensor = found.unflatten(place, (self._count, there // self._count))
                return split.index_select(place, kept.to(found.device)).flatten(place, place + 1)
        return found


@contextmanager
def capture_draws() -> Iterator[list[Tensor]]:
    """Yield a list that receives, in order, the random numbers that operations draw meanwhile."""
    mode = _Capture()
    with mode:
        yield mode.drawn


def substitute_draws(drawn: Sequence[Tensor], kept: Tensor | None = None, count: int = 0) -> TorchDispatchMode:
    """Make operations take these random numbers, in order, instead of drawing them.

    kept: positions of the examples that the pass sees, where it sees only some of the `count` that numbers are for.
    """
    return _Substitute(drawn, kept, count)
