"""What the random numbers of a simulation depend on beside its plan, so that a folder is not continued with others."""

from dataclasses import dataclass

from imprint.errors import StoreError
from imprint.store.records import Count


@dataclass(frozen=True)
class Draws:
    """What dropout along the path depends on beside the plan: how many examples are evaluated at once, and where."""

    batch_size: Count
    device: str

    def describe_difference(self, now: "Draws", n: int) -> str | None:
        """Describe what draws other numbers for n examples; None if nothing does."""
        if self.device != now.device:
            return f"device was {self.device}, is {now.device}, which draws other random numbers"
        if min(self.batch_size, n) != min(now.batch_size, n):
            return f"batch_size was {self.batch_size}, is {now.batch_size}: give batch_size={self.batch_size}"
        return None


def refuse_other_draws(before: Draws | None, now: Draws | None, n: int, content: str, otherwise: str) -> None:
    """Refuse to go on with other draws for n examples than what is there was begun with; None draws nothing.

    content: what is there, and `otherwise`: what to do about it if it is to stay, in words.
    """
    if before and now and (different := before.describe_difference(now, n)):
        raise StoreError(f"{content} whose dropout is drawn otherwise: {different}. Otherwise {otherwise}.")
