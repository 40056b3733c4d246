"""The first sources of each query, and the order that puts them first."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from imprint.attribution.labels import Labels, Query, describe_query
from imprint.display import for_terminal
from imprint.errors import MissingExtra, ReadoutError

if TYPE_CHECKING:
    import pandas as pd

Order = Literal["magnitude", "raises", "lowers"]


class Credit(NamedTuple):
    """What one source does to one query; `removal_effect` is the predicted change of F without the source."""

    query: Query
    source: str
    name: str
    score: float
    removal_effect: float


@dataclass(frozen=True)
class Top:
    """The first sources of each query: `indices` and `scores` have shape (queries, k).

    Indexing and iterating give lists of `Credit`, one list for each query; `queries` are their numbers.
    """

    labels: Labels
    indices: Tensor
    scores: Tensor
    queries: tuple[Query, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing the scores."""
        return self.labels.warnings

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, query: int) -> list[Credit]:
        labels, number = self.labels, self.queries[query]
        return [
            Credit(number, labels.source_ids[i], labels.source_names[i], score, -score / labels.n)
            for i, score in zip(self.indices[query].tolist(), self.scores[query].tolist(), strict=True)
        ]

    def __iter__(self) -> Iterator[list[Credit]]:
        return (self[query] for query in range(len(self)))

    def __repr__(self) -> str:
        """Show as many sources of the first five queries as fit on lines of 120 characters."""
        lines = [for_terminal(self.labels.unit)]
        for credits in list(self)[:5]:
            head = f"  {for_terminal(describe_query(credits[0].query))}: "
            shown = [f"{for_terminal(credit.name)} {credit.removal_effect:+.3g}" for credit in credits]
            ends = accumulate(len(each) + len(", ") for each in shown)
            fit = max(1, sum(len(head) + end <= 120 for end in ends))
            lines.append(head + ", ".join(shown[:fit] + ["…"] * (fit < len(shown))))
        lines += ["  …"] * (len(self) > 5)
        return "\n".join([*lines, *(f"warning: {for_terminal(message)}" for message in self.warnings)])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: what was measured, and for each query its sources."""
        labels = self.labels
        queries = [[credit._asdict() for credit in credits] for credits in self]
        return {
            **{"n": labels.n, "measure": labels.measure, "better": labels.better, "unit": labels.unit},
            **{"details": labels.details, "warnings": list(labels.warnings), "queries": queries},
        }

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each query and source in the list."""
        frame: pd.DataFrame = import_pandas().DataFrame([credit._asdict() for credits in self for credit in credits])
        return frame


def rank_scores(scores: Tensor, by: Order) -> Tensor:
    """Return values that are largest for the sources that come first."""
    if by == "magnitude":
        return scores.abs()
    if by in ("raises", "lowers"):
        return -scores if by == "raises" else scores  # a removal's effect is −s/N
    raise ReadoutError(f'sources can be ordered by "magnitude", "raises" or "lowers", not by {by!r}.')


def merge_best(
    best: tuple[Tensor, Tensor] | None, block: Tensor, start: int, k: int, by: Order
) -> tuple[Tensor, Tensor]:
    """Return the indices and scores of the k first, of what was best so far and a new block of sources."""
    indices = torch.arange(start, start + block.shape[1]).expand_as(block)
    if best is not None:
        indices, block = torch.cat([best[0], indices], 1), torch.cat([best[1], block], 1)
    order = rank_scores(block, by).topk(min(k, block.shape[1]), dim=1).indices
    return indices.gather(1, order), block.gather(1, order)


def limit_top(k: int, sources: int) -> int:
    """Return how many sources to list: k, or all if there are fewer."""
    if k < 1:
        raise ReadoutError(f"top needs at least 1 source, got {k}.")
    return min(k, sources)


def import_pandas() -> Any:
    """Import pandas, or say how to install it."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("to_pandas", "report") from error
    return pandas
