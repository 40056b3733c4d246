"""What words alone say about where a text comes from: guesses without a model, which any attribution should beat.

Each gives scores (queries, sources) from the texts of the queries and of the sources, larger for what is more alike.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from imprint.errors import DataError
from imprint.evaluation.statistics import Array

Terms = Callable[[str], Iterable[str]]


def words(text: str) -> list[str]:
    """Its words in small letters.

    >>> words("Speak, speak: is't done?")
    ['speak', 'speak', "is't", 'done']
    """
    return re.findall(r"\w+(?:'\w+)*", text.lower())


def characters(length: int) -> Terms:
    """A function that gives all stretches of so many characters, across words.

    >>> characters(3)("To be")
    ['to ', 'o b', ' be']
    """

    def stretches(text: str) -> list[str]:
        flat = " ".join(text.lower().split())
        return [flat[start : start + length] for start in range(max(1, len(flat) - length + 1))]

    return stretches


def bm25(
    queries: Sequence[str], sources: Sequence[str], terms: Terms = words, k1: float = 1.5, b: float = 0.75
) -> Tensor:
    """Okapi BM25: Σ over the query's terms of idf · f·(k₁ + 1)/(f + k₁(1 − b + b·length/mean length)), f of the source.

    idf = log(1 + (S − n + ½)/(n + ½)) for a term that n of S sources have.
    """
    asked, had = _counts(queries, sources, terms)
    found = (had > 0).sum(0)
    idf = np.log1p((len(had) - found + 0.5) / (found + 0.5))
    lengths = had.sum(1, keepdims=True)
    saturated = had * (k1 + 1) / (had + k1 * (1 - b + b * lengths / lengths.mean()))
    return torch.from_numpy(asked @ (idf * saturated).T)


def tf_idf(queries: Sequence[str], sources: Sequence[str], terms: Terms = words) -> Tensor:
    """The cosine between (1 + log f)·idf of query and source, idf = 1 + log((1 + S)/(1 + n)) as of scikit-learn."""
    asked, had = _counts(queries, sources, terms)
    idf = 1 + np.log((1 + len(had)) / (1 + (had > 0).sum(0)))
    return torch.from_numpy(_directions(asked, idf) @ _directions(had, idf).T)


def size_only(queries: Sequence[str], sources: Sequence[str]) -> Tensor:
    """The length of each source, whatever the query is."""
    lengths = torch.tensor([len(text) for text in sources], dtype=torch.float64)
    return lengths.repeat(len(queries), 1)


def _counts(queries: Sequence[str], sources: Sequence[str], terms: Terms) -> tuple[Array, Array]:
    """How often each term that a source has occurs in queries and in sources, shapes (queries or sources, terms)."""
    for name, given in (("queries", queries), ("sources", sources)):
        if isinstance(given, str) or not len(given) or not all(isinstance(text, str) for text in given):
            raise DataError(f"{name} must be a list of at least one text.")
    had = [Counter(terms(text)) for text in sources]
    places = {term: place for place, term in enumerate(dict.fromkeys(term for count in had for term in count))}
    if not places:
        raise DataError("the sources have no terms at all: are their texts empty?")

    def table(counters: Iterable[Counter[str]]) -> Array:
        rows = []
        for counter in counters:
            row = np.zeros(len(places))
            for term, count in counter.items():
                if term in places:
                    row[places[term]] = count
            rows.append(row)
        return np.stack(rows)

    return table(Counter(terms(text)) for text in queries), table(had)


def _directions(counts: Array, idf: Array) -> Array:
    """(1 + log f)·idf at length 1; zero where there is no known term."""
    weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * idf
    lengths = np.sqrt(np.square(weights).sum(1, keepdims=True))
    return np.asarray(weights / np.where(lengths > 0, lengths, 1))
