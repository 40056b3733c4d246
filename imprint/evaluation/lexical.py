"""Guesses from words alone where a text comes from, without a model: baselines that any attribution should beat.

Each function returns scores (queries, sources) from the texts of queries and sources, larger for more similar texts.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from imprint.errors import DataError
from imprint.statistics import Array

Terms = Callable[[str], Iterable[str]]


def words(text: str) -> list[str]:
    """Split a text into lower-case words.

    >>> words("Speak, speak: is't done?")
    ['speak', 'speak', "is't", 'done']
    """
    return re.findall(r"\w+(?:'\w+)*", text.lower())


def characters(length: int) -> Terms:
    """Return a function that lists all runs of this many characters, across words.

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
    """Compute Okapi BM25: Σ over the query's terms of idf · f·(k₁ + 1)/(f + k₁(1 − b + b·length/mean length)).

    f is the frequency of the term in the source, and idf = log(1 + (S − n + ½)/(n + ½)) for a term that n of S sources
    have.
    """
    asked, had = _counts(queries, sources, terms)
    found = (had > 0).sum(0)
    idf = np.log1p((len(had) - found + 0.5) / (found + 0.5))
    lengths = had.sum(1, keepdims=True)
    saturated = had * (k1 + 1) / (had + k1 * (1 - b + b * lengths / lengths.mean()))
    return torch.from_numpy(asked @ (idf * saturated).T)


def tf_idf(queries: Sequence[str], sources: Sequence[str], terms: Terms = words) -> Tensor:
    """Return the cosine between the weights (1 + log f)·idf of query and source, as scikit-learn computes them.

    idf = 1 + log((1 + S)/(1 + n)) for a term that n of S sources have.
    """
    asked, had = _counts(queries, sources, terms)
    idf = 1 + np.log((1 + len(had)) / (1 + (had > 0).sum(0)))

    def weigh(counts: Array) -> Array:
        weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * idf
        return np.asarray(weights / np.maximum(np.linalg.norm(weights, axis=1, keepdims=True), 1e-300))

    return torch.from_numpy(weigh(asked) @ weigh(had).T)


def size_only(queries: Sequence[str], sources: Sequence[str]) -> Tensor:
    """Score each source by its length, whatever the query is."""
    lengths = torch.tensor([len(text) for text in sources], dtype=torch.float64)
    return lengths.repeat(len(queries), 1)


def _refuse_no_terms(queries: Sequence[str], sources: Sequence[str], terms: Terms) -> None:
    for name, given in (("queries", queries), ("sources", sources)):
        if isinstance(given, str) or not len(given) or not all(isinstance(text, str) for text in given):
            raise DataError(f"{name} must be a list of at least one text.")
    if not any(any(True for _ in terms(text)) for text in sources):
        raise DataError("the sources have no terms at all: are their texts empty?")


def _counts(queries: Sequence[str], sources: Sequence[str], terms: Terms) -> tuple[Array, Array]:
    """Count each term of the sources in queries and in sources, shapes (queries or sources, terms)."""
    _refuse_no_terms(queries, sources, terms)
    had = [Counter(terms(text)) for text in sources]
    places = {term: place for place, term in enumerate(dict.fromkeys(term for count in had for term in count))}

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
