"""Forwards warnings and log records of a worker to whoever started it, in place of a file that nobody reads."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Message = tuple[str, str, str] | tuple[str, int, str, str]
"""("warning", category, text), or ("log", level, logger, text)."""
Send = Callable[[Message], Any]
_MOST = 1000  # messages of one part


@contextmanager
def forward(send: Send) -> Iterator[None]:
    """Send all warnings, and what is logged as a warning or an error, instead of printing them.

    Each message is sent once, and after a thousand of them no more.
    """
    sent: set[Message] = set()

    def send_once(message: Message) -> None:
        if message not in sent and len(sent) < _MOST:
            sent.add(message)
            send(message)

    with _redirected(send_once):
        yield


@contextmanager
def _redirected(send: Send) -> Iterator[None]:
    root, handler = logging.getLogger(), _Sender(send)
    others, root.handlers = root.handlers, [handler]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _send_warnings(send)
            yield
    finally:
        root.handlers = others


class _Sender(logging.Handler):
    """Sends log records of this library and of the user's code, not those of Ray."""

    def __init__(self, send: Send) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] != "ray":
            self._send(("log", record.levelno, record.name, record.getMessage()))


def _send_warnings(send: Send) -> Callable[..., None]:
    """Return what takes the place of `warnings.showwarning`."""

    def show(message: Warning | str, category: type[Warning], *origin: Any, **more: Any) -> None:
        send(("warning", category.__name__, str(message)))

    return show
