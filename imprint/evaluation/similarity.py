"""Guesses where a text comes from by the similarity of passages: a baseline that any attribution should beat."""

from typing import Literal

import torch
from torch import Tensor

from imprint.sources import Sources

Join = Literal["mean", "max"]


def source_similarity(queries: Tensor, passages: Tensor, sources: Sources, join: Join = "mean") -> Tensor:
    """Return the similarity of each query to each source, (queries, sources).

    queries, passages: embeddings, (queries, dimensions) and (passages, dimensions), of unit length for a cosine.
    sources: of the passages.
    join: a source is as similar as its passages are on average, or as the most similar of them.

    >>> source_similarity(torch.eye(2), torch.eye(2)[[0, 1, 1]], Sources.by_label(["a", "a", "b"]))
    tensor([[0.5000, 0.0000],
            [0.5000, 1.0000]])
    """
    sources.check(len(passages))
    of_each = [queries @ passages[torch.from_numpy(members)].T for members in sources.members]
    return torch.stack([each.mean(1) if join == "mean" else each.amax(1) for each in of_each], 1)
