"""The similarity of a query to a source is that of its passages."""

import pytest
import torch

from imprint import ImprintError, Sources
from imprint.evaluation.similarity import source_similarity


def test_a_source_is_as_similar_as_its_passages_are_on_average_or_as_the_nearest_of_them() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, passages = (torch.randn(count, 5, generator=draw, dtype=torch.float64) for count in (3, 7))
    owners = [2, 0, 1, 1, 0, 2, 2]
    sources = Sources.groups({str(source): [i for i in range(7) if owners[i] == source] for source in range(3)})
    for join, combine in (("mean", lambda values: sum(values) / len(values)), ("max", max)):
        found = source_similarity(queries, passages, sources, join)  # type: ignore[arg-type]
        for query in range(3):
            for source in range(3):
                own = [float(queries[query] @ passages[i]) for i, owner in enumerate(owners) if owner == source]
                assert float(found[query, source]) == pytest.approx(combine(own))


def test_sources_of_other_passages_are_refused() -> None:
    with pytest.raises(ImprintError, match="3"):
        source_similarity(torch.eye(2), torch.eye(2), Sources.by_label(["a", "b", "c"]))
