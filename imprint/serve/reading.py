"""Reads queries of several requests: together with others of about their length, and as many at once as fit the memory.

What is found for a query does not depend on how they are divided.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from imprint.attribution.result import Attribution
from imprint.attribution.scoring import Scored, Scorer
from imprint.batches import Batch, leaves
from imprint.forms import Ask, Form
from imprint.readout.reader import repeat_if_stale
from imprint.readout.sizes import pick_rows

_WASTE = 1.5  # times the numbers in a batch that padding may add


def read_queries(
    scorer: Scorer, form: Form, ask: Ask, requests: Sequence[Sequence[Batch]], check: Callable[[], None]
) -> list[tuple[Attribution, tuple[Batch, ...]]]:
    """Return the attribution of the queries of each request, and the queries with what they left open.

    ask: calls the model that answers where queries leave that open.
    check: is called again and again, and may raise an error to end this.
    """
    queries = [query for request in requests for query in request]
    groups, batches = divide(queries), list[Batch]()
    for group in groups:
        check()
        joined = form.join([queries[place] for place in group])
        batches.append(filled := form.fill(ask, joined))
        if filled is not joined:
            for row, place in enumerate(group):
                queries[place] = pick_rows(filled, row, row + 1)

    def read() -> list[Scored]:
        return [scorer.read(batch, len(group), check) for batch, group in zip(batches, groups, strict=True)]

    parts, places = repeat_if_stale(scorer.reader, read), [place for group in groups for place in group]
    spans = list(pairwise(accumulate(map(len, requests), initial=0)))
    results = scorer.label(Scored.join(parts, places), spans)
    return [(result, tuple(queries[first:last])) for result, (first, last) in zip(results, spans, strict=True)]


def divide(queries: Sequence[Batch]) -> list[list[int]]:
    """Return the places of queries that are padded to one length: most of the work is never padding."""
    sizes = [measure(query) for query in queries]
    groups = list[list[int]]()
    for place in sorted(range(len(queries)), key=lambda place: -sizes[place]):
        if groups and _is_dense([sizes[each] for each in (*groups[-1], place)]):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [sorted(group) for group in groups]


def fit_together(batch: Sequence[Batch], more: Sequence[Batch]) -> bool:
    """Tell whether queries of different lengths may be read in one batch."""
    return _is_dense([measure(query) for query in (*batch, *more)])


def _is_dense(sizes: Sequence[int]) -> bool:
    return len(sizes) * max(sizes) <= _WASTE * sum(sizes)


def measure(query: Batch) -> int:
    """Return how many numbers a query has."""
    return sum(leaf.numel() for leaf in leaves(query) if isinstance(leaf, Tensor))
