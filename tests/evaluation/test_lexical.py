"""Guesses by words alone find the text a passage comes from, for the reasons they are known for."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from imprint import DataError
from imprint.evaluation.lexical import Terms, bm25, characters, size_only, tf_idf, words

SOURCES = [
    "The cat sat on the mat. The cat purred, and the mat was warm.",
    "A ship sailed the sea; the sea was rough and the ship was lost.",
    "The king spoke and the court was silent, for the king was angry.",
]
QUERIES = ["A cat on a mat?", "Rough was the sea.", "The angry court"]
GUESSES: dict[str, Callable[[list[str], list[str]], Tensor]] = {
    "bm25": bm25,
    "bm25 of characters": lambda queries, sources: bm25(queries, sources, characters(4)),
    "tf-idf": tf_idf,
    "tf-idf of characters": lambda queries, sources: tf_idf(queries, sources, characters(4)),
}


@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES.keys())
def test_a_query_is_most_like_the_source_that_shares_its_words(guess: Callable[..., Tensor]) -> None:
    scores = guess(QUERIES, SOURCES)
    assert scores.shape == (3, 3) and scores.dtype == torch.float64
    assert scores.argmax(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES.keys())
def test_neither_order_of_sources_nor_other_queries_change_a_score(guess: Callable[..., Tensor]) -> None:
    scores = guess(QUERIES, SOURCES)
    torch.testing.assert_close(guess(QUERIES, SOURCES[::-1]), scores.flip(1))
    torch.testing.assert_close(guess(QUERIES[1:2], SOURCES), scores[1:2])


@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES.keys())
def test_a_query_with_no_known_term_scores_zero_everywhere(guess: Callable[..., Tensor]) -> None:
    assert guess(["Zyzzyva"], SOURCES).abs().max() == 0


def test_bm25_is_its_formula() -> None:
    """Of a word that one of two sources of lengths 2 and 4 has twice; the query asks for it once and for another."""
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 2 * 2.5 / (2 + 1.5 * (1 - 0.75 + 0.75 * 4 / 3))
    assert bm25(["apple unknown"], ["pear plum", "apple apple fig fig"])[0].tolist() == pytest.approx([0, expected])


def test_bm25_saturates_and_prefers_the_shorter_source() -> None:
    often, seldom, long = bm25(
        ["apple"], ["apple " * 8 + "fig " * 2, "apple " * 2 + "fig " * 8, "apple " * 2 + "fig " * 20]
    )[0]
    assert often > seldom > long
    assert often < 4 * seldom


def test_tf_idf_is_its_formula() -> None:
    """Of two sources that share a word, of which the second has it twice; the query has it and an unknown one."""
    common, rare = 1.0, 1 + math.log(3 / 2)
    twice = (1 + math.log(2)) * common
    expected = [common / math.hypot(common, rare), twice / math.hypot(twice, rare)]
    assert tf_idf(["apple unknown"], ["apple pear", "apple apple fig"])[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("terms", [words, characters(4)])
def test_tf_idf_is_that_of_scikit_learn(terms: Terms) -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text", reason="scikit-learn is not installed")
    vectorizer = text.TfidfVectorizer(analyzer=terms, sublinear_tf=True)
    had = vectorizer.fit_transform(SOURCES)
    expected = torch.from_numpy((vectorizer.transform(QUERIES) @ had.T).toarray())
    torch.testing.assert_close(tf_idf(QUERIES, SOURCES, terms), expected)


def test_a_size_is_the_same_guess_for_every_query() -> None:
    assert size_only(["a", "b"], ["one", "three"]).tolist() == [[3, 5], [3, 5]]


def test_texts_shorter_than_a_stretch_are_one() -> None:
    assert characters(5)("Ay") == ["ay"]


@pytest.mark.parametrize(
    ("queries", "sources", "message"),
    [
        ([], SOURCES, "queries must be a list of at least one text"),
        (QUERIES, "The cat", "sources must be a list of at least one text"),
        (QUERIES, [1, 2], "sources must be a list"),
        (QUERIES, ["", "..."], "have no terms at all"),
    ],
)
@pytest.mark.parametrize("guess", [bm25, tf_idf])
def test_what_is_no_text_is_refused(
    guess: Callable[..., Tensor], queries: list[str], sources: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        guess(queries, sources)
