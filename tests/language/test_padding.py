"""One long text among many short ones is noticed, because all rows are as long as the longest."""

import logging

import pytest
import torch

from imprint.language import Documents, Instructions
from imprint.language.padding import pad_columns
from tests.language.models import tokenizer

SHORT, LONG = "the cat sat on the mat", "over the sea sails a ship with the wind " * 12


def test_a_long_text_among_short_ones_is_noticed_once_with_a_length(caplog: pytest.LogCaptureFixture) -> None:
    documents = Documents([SHORT] * 95 + [LONG] * 5, tokenizer(), length=1024)
    (record,) = caplog.records
    usual, longest = len(tokenizer()(SHORT)["input_ids"]), len(tokenizer()(LONG)["input_ids"])
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert f"the longest, which has {longest} tokens, and 90% of them have at most {usual}." in message
    assert f"A smaller length= cuts longer texts into windows: length={usual} makes all work about" in message
    caplog.clear()
    shorter = Documents([SHORT] * 95 + [LONG] * 5, tokenizer(), length=usual)
    assert not caplog.records
    told = float(message.rsplit("about ", 1)[1].split()[0])
    work = documents.columns["input_ids"].numel() / shorter.columns["input_ids"].numel()
    assert told == pytest.approx(work, rel=0.05)


def test_half_of_long_rows_is_named_where_no_row_is_an_outlier(caplog: pytest.LogCaptureFixture) -> None:
    Documents([SHORT] * 80 + [LONG] * 20, tokenizer(), length=1024)
    assert f"length={len(tokenizer()(SHORT)['input_ids'])} makes all work about" in caplog.text


@pytest.mark.parametrize("texts", [[SHORT] * 20 + [LONG], [SHORT] * 200, [LONG] * 60 + [SHORT] * 40])
def test_little_data_and_little_padding_are_not_worth_a_notice(
    texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    Documents(texts, tokenizer(), length=1024)
    assert not caplog.records


def test_pairs_are_not_cut_into_windows_and_the_notice_says_so(caplog: pytest.LogCaptureFixture) -> None:
    Instructions(["the dog"] * 100, [" sat"] * 95 + [LONG] * 5, tokenizer(), length=1024)
    assert "A smaller length= cuts off the ends of longer ones, so leave those out: length=" in caplog.text


def test_columns_are_padded_to_few_lengths_within_the_context() -> None:
    def pad(length: int, most: int | None = None, **more: torch.Tensor) -> int:
        columns = {"input_ids": torch.full((2, length), 7), "weights": torch.ones(2, length), **more}
        padded = pad_columns(columns, most)
        assert not padded["weights"][:, length:].any() and bool((padded["input_ids"][:, :length] == 7).all())
        assert padded["weights"].shape == padded["input_ids"].shape
        return int(padded["weights"].shape[1])

    common = {pad(length) for length in range(1, 1025)}
    assert common == {16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024}
    assert [pad(length, 100) for length in (90, 97, 100, 120)] == [96, 100, 100, 120]
    assert pad(9, attention_mask=torch.ones(2, 9)) == 9
    assert pad_columns(torch.ones(2, 9), None).shape == (2, 9)
