"""How long a call takes."""

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def measure_seconds(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return how many seconds a call took, and what it returned."""
    begin = time.monotonic()
    result = call()
    return time.monotonic() - begin, result
