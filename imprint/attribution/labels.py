"""What scores are about: sources, queries, and the measurement with its unit."""

from dataclasses import dataclass, field
from typing import Any, Literal

from imprint.task import Better

Query = int | Literal["mean"]
"""The number of a query, or the mean over queries."""


@dataclass(frozen=True)
class Labels:
    """What scores are about: the sources, N, and the measurement F with its direction.

    fingerprints: hashes of the "store", of the training "data", of the "sources", and of the "queries" where the scores
        are of all of them in their order; and the "parameters" by name, with their shapes.
    warnings: what to know before believing the scores: those of the store, and what the readout has found.
    """

    n: int
    source_ids: tuple[str, ...]
    source_names: tuple[str, ...]
    source_sizes: tuple[int, ...]
    measure: str
    better: Better
    details: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What a removal effect is measured in, with the meaning of its sign."""
        meaning = {"lower": ": + means the source helps", "higher": ": − means the source helps", None: ""}
        return f"change of {self.measure} if the source were removed{meaning[self.better]}"


def describe_query(query: Query) -> str:
    """Name a query in words."""
    return "mean over queries" if query == "mean" else f"query {query}"
