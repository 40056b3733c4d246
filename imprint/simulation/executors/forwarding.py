"""Forwards warnings and log records of a worker to whoever started it, in place of a file that nobody reads."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Forwarded = tuple[str, str, str] | tuple[str, int, str, str]
"""("warning", category, message), or ("log", level, logger, message)."""
Tell = Callable[[Forwarded], Any]
_MOST = 1000  # messages of one part


@contextmanager
def forward(tell: Tell) -> Iterator[None]:
    """Tell of all warnings, and of what is logged as a warning or an error, instead of printing them.

    Each message is told once, and after a thousand of them no more.
    """
    said: set[Forwarded] = set()

    def tell_once(message: Forwarded) -> None:
        if message not in said and len(said) < _MOST:
            said.add(message)
            tell(message)

    with _redirected(tell_once):
        yield


@contextmanager
def _redirected(tell: Tell) -> Iterator[None]:
    root, handler = logging.getLogger(), _Teller(tell)
    others, root.handlers = root.handlers, [handler]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _tell_of_warning(tell)
            yield
    finally:
        root.handlers = others


class _Teller(logging.Handler):
    """Tells of log records of this library and of the user's, not of those of the machinery around them."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] != "ray":
            self._tell(("log", record.levelno, record.name, record.getMessage()))


def _tell_of_warning(tell: Tell) -> Callable[..., None]:
    def show(message: Warning | str, category: type[Warning], *origin: Any, **more: Any) -> None:
        tell(("warning", category.__name__, str(message)))

    return show
