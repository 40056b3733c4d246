"""How many runs fit into memory as one stack, and what is missing where too few do."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from imprint.display import format_size
from imprint.runtime.memory import most_that_fit

TOO_MANY = 2**63  # bytes, where memory ran out


@dataclass(frozen=True)
class Room:
    """The memory that a stack of runs may take.

    allowed: bytes. sources: how many there are, and `others`: the rows beside the first of them.
    measure: returns the bytes that so many rows take, or `TOO_MANY`.
    """

    allowed: int
    sources: int
    others: int
    measure: Callable[[int], int]

    @cached_property
    def together(self) -> int:
        """How many sources fit into one stack; below 1 if not even one does, beside the other rows."""
        return most_that_fit(self.measure, self.allowed, self.sources + self.others) - self.others

    def find_lack(self) -> str | None:
        """Return why there is no room for a stack, which only pays if it holds several sources; None if there is."""
        least = min(2, self.sources)
        if self.together >= least:
            return None
        rows = least + self.others
        needed = self.measure(rows)
        much = "more than the device has" if needed == TOO_MANY else f"about {format_size(needed)}"
        return f"together {rows} runs need {much}, and the memory budget is {format_size(self.allowed)}"
