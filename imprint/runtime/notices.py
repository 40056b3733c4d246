"""Collects what a person must know before believing a result.

Every check that does not refuse outright reports here: the message is shown once as a warning, kept in the store's
manifest, and repeated by `check`, `inspect` and every attribution.
"""

import warnings
from collections.abc import Iterable

from imprint.display import for_terminal
from imprint.errors import ReliabilityWarning


class Notices:
    """The messages of one simulation or readout, each once, in the order they came."""

    def __init__(self, earlier: Iterable[str] = ()) -> None:
        self._messages: list[str] = list(dict.fromkeys(earlier))

    def add(self, message: str) -> None:
        """Keep a message and show it as a warning, unless it is known already."""
        if message not in self._messages:
            self._messages.append(message)
            warnings.warn(for_terminal(message), ReliabilityWarning, stacklevel=2)

    @property
    def messages(self) -> tuple[str, ...]:
        return tuple(self._messages)
