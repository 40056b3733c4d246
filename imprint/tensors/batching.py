"""Try a computation for many rows at once by `vmap`, and fall back to a loop on models that do not support it.

Some model code does not run under `vmap` or forward mode: data-dependent control flow, `.item()`, kernels without a
batching rule. Torch reports this with many exception types, so any exception counts as "not supported", except the ones
that trying another way would only hide.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from imprint.errors import ImprintError, first_line

Result = TypeVar("Result")
_PROPAGATED = (ImprintError, torch.OutOfMemoryError, MemoryError)  # written for the user, or a lack of memory


def attempt(compute: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Return what `compute` gives and None; or None and the reason, if torch cannot run this model that way."""
    try:
        return compute(), None
    except _PROPAGATED:
        raise
    except Exception as error:
        return None, first_line(error)


def vectorise_or_loop(compute: Callable[[bool], Result]) -> tuple[Result, str | None]:
    """Return `compute(True)` and None; on models without `vmap`, `compute(False)` and the reason.

    compute: takes whether to vectorise. An error of the loop is the model's own, and propagates.
    """
    found, reason = attempt(lambda: compute(True))
    return (cast(Result, found) if reason is None else compute(False)), reason
