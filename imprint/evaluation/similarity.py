"""Guesses where a text comes from by the similarity of passages: a baseline that any attribution should beat."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from imprint.errors import DataError

Join = Literal["mean", "max"]


def source_similarity(queries: Tensor, passages: Tensor, sources: Sequence[int], join: Join = "mean") -> Tensor:
    """Return the similarity of each query to each source, (queries, sources).

    queries, passages: embeddings, (queries, dimensions) and (passages, dimensions), of unit length for a cosine.
    sources: the source of each passage, numbered from 0.
    join: a source is as similar as its passages are on average, or as the most similar of them.

    >>> source_similarity(torch.eye(2), torch.eye(2)[[0, 1, 1]], [0, 0, 1])
    tensor([[0.5000, 0.0000],
            [0.5000, 1.0000]])
    """
    owners = torch.as_tensor(sources)
    if len(owners) != len(passages) or not len(passages):
        raise DataError(f"there are {len(passages)} passages and {len(owners)} numbers of their sources.")
    of_each = [queries @ passages[owners == source].T for source in range(int(owners.max()) + 1)]
    return torch.stack([each.mean(1) if join == "mean" else each.amax(1) for each in of_each], 1)
