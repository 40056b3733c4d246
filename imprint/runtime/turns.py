"""Lets one computation at a time run, and makes a forked child able to run any.

Forward mode in torch has one level for the whole process, so readouts and simulations of all threads take turns. A
child that was forked in the middle of one inherits a lock nobody will release, an open level of forward mode, and a
pool of OpenMP threads that do not exist there: each is put right before the child computes anything.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from imprint.compat import is_in_forward_mode, jvp_depth, leave_forward_mode
from imprint.errors import ConcurrencyError, ImprintError

logger = logging.getLogger(__name__)


class _Turn:
    """The lock that computations take, and the process that is ready to compute."""

    def __init__(self, process: int) -> None:
        self.lock, self.process = threading.RLock(), process


_turn = _Turn(os.getpid())


def _renew() -> None:
    global _turn, _depth
    _turn = _Turn(_turn.process)  # the rest is done once the child wants to compute
    _depth = 0
    leave_forward_mode()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def settle_child() -> None:
    """In a forked child, go down to one thread: those of the parent's pool were not forked, and waiting would hang."""
    if _turn.process != os.getpid():
        _turn.process = os.getpid()
        if torch.get_num_threads() > 1:
            logger.warning("in a forked process Imprint computes with one thread: start processes by spawn for more")
            torch.set_num_threads(1)


def jvp(function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], **options: Any) -> Any:
    """`torch.func.jvp` that refuses to be disturbed by another thread's.

    All threads share one level of forward mode. If another thread opened it, its end clears our tangents, and the
    derivative would be 0 without a word.
    """
    global _depth

    def undisturbed(*given: Any) -> Any:
        _refuse_disturbance(entering=True)
        result = function(*given)
        _refuse_disturbance(entering=False)
        return result

    _depth += 1  # calls may nest; other threads of ours wait for their turn
    try:
        return torch.func.jvp(undisturbed, primals, tangents, **options)
    finally:
        _depth -= 1


_depth = 0


def _refuse_disturbance(*, entering: bool) -> None:
    if (entering and jvp_depth(_depth) > _depth) or not is_in_forward_mode():
        raise ConcurrencyError(_DISTURBED)


@contextmanager
def one_at_a_time() -> Iterator[object]:
    """Wait until no other thread computes; what is given is another object in a forked child."""
    settle_child()
    turn = _turn
    with turn.lock:
        try:
            yield turn
        except RuntimeError as error:
            if not isinstance(error, ImprintError) and _COLLISION.search(str(error)):
                raise ConcurrencyError(_DISTURBED) from error
            raise


_DISTURBED = (
    "another thread of this process took forward-mode derivatives (torch.func.jvp) meanwhile, of which torch allows "
    "one at a time: hold it back while Imprint computes, or use another process."
)
_COLLISION = re.compile("forward AD level|dual Tensor for forward AD|Nested forward mode AD")
