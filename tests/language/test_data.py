"""Every token but a document's first is predicted once, and a completion is what follows its prompt."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, default_data_collator

from imprint import DataError, Plan, SourcesError, attribute, simulate
from imprint.errors import ReliabilityWarning
from imprint.language import Completions, Documents, task
from tests.language.models import LABELS, TEXTS, gpt2, tokenizer


def real(columns: dict[str, Any], row: int) -> list[int]:
    """The tokens of a row without its padding, which begins after the last token that counts."""
    weights = columns["weights"][row]
    return columns["input_ids"][row][: int(weights.nonzero().max()) + 1].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [2, 3, 5, 12, 100])
def test_every_token_but_the_first_is_predicted_exactly_once(length: int) -> None:
    tokens = tokenizer()
    documents = Documents(TEXTS, tokens, length=length, loss="sum")
    for index, text in enumerate(TEXTS):
        windows = (documents.documents == index).nonzero().flatten().tolist()
        rows = [real(documents.columns, window) for window in windows]
        assert all(before[-1] == after[0] for before, after in pairwise(rows))
        assert rows[0][:1] + [token for row in rows for token in row[1:]] == tokens(text)["input_ids"]
    assert documents.columns["input_ids"].shape[1] <= length
    assert set(documents.columns["weights"].unique().tolist()) <= {0.0, 1.0}
    assert not documents.columns["weights"][:, 0].any()


@pytest.mark.parametrize("length", [3, 100])
def test_the_texts_of_windows_follow_one_another(length: int) -> None:
    tokens = tokenizer()
    documents = Documents(TEXTS, tokens, length=length)
    assert len(documents.texts) == len(documents)
    for index, text in enumerate(TEXTS):
        windows = (documents.documents == index).nonzero().flatten().tolist()
        whole = tokens.decode(tokens(text)["input_ids"])
        assert "".join(documents.texts[window] for window in windows).split() == whole.split()


def test_the_texts_of_completions_are_prompts_with_what_follows() -> None:
    asked = Completions(["one two", "three"], [" three", " four"], tokenizer())
    assert asked.texts == ["one two three", "three four"]


def test_mean_and_sum_differ_by_the_number_of_predicted_tokens() -> None:
    mean, total = (Documents(TEXTS, tokenizer(), length=7, loss=loss) for loss in ("mean", "sum"))
    assert torch.equal(mean.columns["input_ids"], total.columns["input_ids"])
    for index, text in enumerate(TEXTS):
        own = mean.documents == index
        count = len(tokenizer()(text)["input_ids"]) - 1
        torch.testing.assert_close(mean.columns["weights"][own] * count, total.columns["weights"][own])
        assert mean.columns["weights"][own].sum() == pytest.approx(1)
        assert total.columns["weights"][own].sum() == count


def test_windows_are_as_long_as_the_tokenizer_says_but_not_without_end() -> None:
    long = "the cat and " * 800
    told = tokenizer()
    told.model_max_length = 16
    assert Documents([long], told).columns["input_ids"].shape[1] == 16
    assert Documents([long], tokenizer()).columns["input_ids"].shape[1] == 1024


def test_a_trainer_is_given_the_same_loss_without_the_padding() -> None:
    documents, model = Documents(TEXTS, tokenizer(), length=10, loss="sum"), gpt2().eval()
    rows = default_data_collator(documents.rows)
    tokens = int((documents.columns["weights"] > 0).sum())
    assert int((rows["labels"] != -100).sum()) == tokens < rows["labels"].numel() - len(documents)
    total = task(model).loss(model, documents.columns).sum().float()
    torch.testing.assert_close(model(**rows).loss * tokens, total)


def test_documents_and_completions_are_taken_as_they_are() -> None:
    language, documents = task(gpt2().double(), parameters="last:1"), Documents(TEXTS, tokenizer())
    completions, plan = Completions(["the cat"], [" sat"], tokenizer()), Plan(steps=2, lr=0.1)
    whole = simulate(language, documents, documents.sources(LABELS), plan, progress=False)
    columns = simulate(language, documents.columns, documents.sources(LABELS), plan, progress=False)
    left = attribute(language, whole, completions, progress=False)
    right = attribute(language, columns, completions.columns, progress=False)
    assert torch.equal(left.scores, right.scores)


def test_sources_are_a_column_of_the_dataset() -> None:
    documents = Documents(TEXTS, tokenizer(), length=6)
    sources = documents.sources(LABELS, names={"pets": "Pets weekly"})
    assert sources.ids == ("both", "pets", "ships")
    assert sources.names[1] == "Pets weekly"
    for identity, members in zip(sources.ids, sources.members, strict=True):
        assert {LABELS[document] for document in documents.documents[members].tolist()} == {identity}
    assert sum(sources.sizes) == len(documents)
    assert documents.sources(torch.tensor([0, 1, 0, 1, 2])).sizes == documents.sources([0, 1, 0, 1, 2]).sizes
    with pytest.raises(DataError, match="one label per document: 5 documents, 2 labels"):
        documents.sources(LABELS[:2])
    with pytest.raises(SourcesError, match="names= has names for sources that do not exist"):
        documents.sources(LABELS, names={"horses": "Horses"})


def test_a_completion_is_what_follows_its_prompt() -> None:
    tokens = tokenizer()
    completions = Completions(["the cat", "a"], [" sat on the mat", " ship"], tokens)
    for row, (prompt, whole) in enumerate([("the cat", "the cat sat on the mat"), ("a", "a ship")]):
        ids = tokens(whole)["input_ids"]
        before = len(tokens(prompt)["input_ids"])
        assert real(completions.columns, row) == ids
        assert completions.columns["weights"][row].tolist()[: len(ids)] == [0] * before + [1] * (len(ids) - before)
    assert repr(completions) == f"Completions(2, {int(completions.columns['weights'].sum())} tokens)"


def test_a_token_across_the_border_counts_to_the_completion() -> None:
    tokens = tokenizer()
    whole = tokens("on the cat")["input_ids"]
    before = len(tokens("on")["input_ids"])
    assert tokens("on th")["input_ids"][before] != whole[before]
    with pytest.warns(ReliabilityWarning, match="no space"):
        completions = Completions(["on th"], ["e cat"], tokens)
    assert real(completions.columns, 0) == whole
    assert completions.columns["weights"][0].tolist() == [0] * before + [1] * (len(whole) - before)


def test_a_completion_without_a_prompt_begins_after_the_beginning_of_text() -> None:
    tokens = tokenizer(bos_token="<s>")
    completions = Completions([""], ["the cat"], tokens)
    assert real(completions.columns, 0) == [tokens.bos_token_id, *tokens("the cat")["input_ids"]]
    assert completions.columns["weights"][0].tolist() == [0, *[1] * len(tokens("the cat")["input_ids"])]
    with pytest.raises(DataError, match="query 0 has no token before its completion, and the tokenizer has no begin"):
        Completions([""], ["the cat"], tokenizer())
    with pytest.raises(DataError, match=r"first token spans the prompt 't' and the completion\. Give a longer prompt"):
        Completions(["t"], ["he cat"], tokenizer())


def test_special_tokens_that_a_tokenizer_puts_around_texts_stand_at_their_ends_only() -> None:
    tokens = tokenizer(bos_token="<s>", eos_token="</s>")
    tokens.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokens.bos_token_id), ("</s>", tokens.eos_token_id)]
    )
    bare = tokenizer(bos_token="<s>", eos_token="</s>")
    for prompt in ("the cat", ""):
        completions = Completions([prompt], [" sat"], tokens)
        assert real(completions.columns, 0) == [tokens.bos_token_id, *bare(f"{prompt} sat")["input_ids"]]
        assert int(completions.columns["weights"].sum()) == len(bare(" sat")["input_ids"])
    closed = real(Documents(["the cat"], tokens).columns, 0)
    assert closed == [tokens.bos_token_id, *bare("the cat")["input_ids"], tokens.eos_token_id]


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["the cat", ""], {}, "document 1 is empty: leave it out"),
        (["the cat", "a"], {}, "document 1 has a single token, and nothing to predict it from: leave it out"),
        ([], {}, "there are no documents: the list is empty"),
        ("the cat", {}, "documents must be a list of texts, got a single text: give a list of one"),
        (["the cat", 3], {}, "documents must be texts; number 1 is a int"),
        (["the cat"], {"length": 1}, "a window needs at least 2 tokens, .* got 1"),
        (["the cat"], {"loss": "max"}, 'is the "mean" or the "sum" over its tokens, got \'max\''),
    ],
)
def test_documents_that_cannot_be_are_refused(texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Documents(texts, tokenizer(), **options)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        (["the cat"], [""], "the completion of query 0 is empty: there is nothing to attribute"),
        (["a", "b"], ["c"], "every prompt needs its completion: 2 prompts, 1 completions"),
        (["a"], "b", "completions must be a list of texts"),
        ([], [], "there are no prompts: the list is empty"),
    ],
)
def test_completions_that_cannot_be_are_refused(prompts: Any, completions: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Completions(prompts, completions, tokenizer())


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(DataError, match="a tokenizer of transformers is needed, got a NoneType"):
        Documents(TEXTS, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="a tokenizer of transformers is needed, got a str"):
        Completions(["the cat"], [" sat"], "gpt2")  # type: ignore[arg-type]


def test_a_query_longer_than_the_context_says_by_how_much() -> None:
    tokens = tokenizer()
    before, after = len(tokens("the cat")["input_ids"]), len(tokens(" sat on the mat")["input_ids"])
    message = (
        f"query 0 has {before} tokens of prompt and {after} of completion, 2 more than the {before + after - 2} that"
    )
    with pytest.raises(DataError, match=message):
        Completions(["the cat"], [" sat on the mat"], tokens, length=before + after - 2)
    Completions(["the cat"], [" sat on the mat"], tokens, length=before + after)
    tokens.model_max_length = 3
    with pytest.raises(DataError, match="more than the 3 that fit"):
        Completions(["the cat"], [" sat on the mat"], tokens)


def word_tokenizer() -> Any:
    """One token for each word, whatever stands between words."""
    inner = Tokenizer(WordLevel({"?": 0, "the": 1, "cat": 2, "sat": 3, ":": 4}, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("prompt", ["the cat", "who sails?", "the ship:", "le café"])
def test_a_completion_without_the_space_at_its_start_is_warned_of(prompt: str) -> None:
    with pytest.warns(ReliabilityWarning, match=r"1 of 2 completions .* as query 1: .* begin .* ' sat on'"):
        found = Completions(["the cat", prompt], [" sat", "sat on"], tokenizer())
    assert len(found.warnings) == 1


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("the cat", " sat"),
        ("the cat ", "sat"),
        ("the cat\n", "sat"),
        ("the cat", ", sat"),
        ("the (", "cat)"),
        ("作者は", "漱石"),
        ("ผู้เขียน", "คือ"),
        ("", "the cat"),
    ],
)
def test_completions_that_need_no_space_are_not_warned_of(prompt: str, completion: str) -> None:
    assert Completions([prompt], [completion], tokenizer(bos_token="<s>")).warnings == ()


def test_a_tokenizer_that_parts_words_itself_needs_no_space_after_punctuation() -> None:
    assert Completions(["the:"], ["cat"], word_tokenizer()).warnings == ()
    with pytest.warns(ReliabilityWarning, match="no space"):
        Completions(["the cat"], ["sat"], word_tokenizer())
