"""Guesses without a model, as scores that are evaluated like any others: by size, and by common words.

Both guess that a source is of use: the more examples it has, or the more its words are those of the query, the more.
"""

import torch
from torch import Tensor

from imprint.errors import DataError
from imprint.evaluation.lexical import tf_idf, words
from imprint.sources import Sources

_LARGEST = 30_000_000  # cells of a table of sources and terms


def guess_by_size(sources: Sources, queries: int) -> Tensor:
    """Return the number of examples of each source, for every query: shape (queries, sources)."""
    return torch.tensor(sources.sizes, dtype=torch.float64).repeat(queries, 1)


def guess_by_text(sources: Sources, queries: list[str], examples: list[str]) -> Tensor | None:
    """Return the TF-IDF cosine of queries and sources, shape (queries, sources); None if the table would be too large.

    examples: the text of every training example. The text of a source is that of all its examples.
    """
    joined = ["\n".join(examples[index] for index in members.tolist()) for members in sources.members]
    terms = {word for text in joined for word in words(text)}
    if not terms:
        raise DataError("the texts of the training examples have no words: are they empty?")
    if len(terms) * (len(joined) + len(queries)) > _LARGEST:
        return None
    return tf_idf(queries, joined)
