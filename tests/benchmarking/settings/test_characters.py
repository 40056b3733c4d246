"""Shakespeare's text as characters: every window is the text itself, and a small GPT sees only what came before."""

import os
from pathlib import Path

import torch

from imprint.benchmarking.settings import characters
from imprint.benchmarking.settings.characters import LENGTH, PASSAGES, VOCABULARY, Shape
from imprint.benchmarking.settings.shakespeare import SEGMENTS, make_columns, read_speeches
from tests.conftest import require

SMALL = Shape(layers=2, width=16, heads=2)


def draw_windows(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return make_columns(torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator))


def test_a_character_is_predicted_from_those_before_it_alone() -> None:
    model = SMALL.build().double().eval()
    ids = draw_windows(2)["input_ids"]
    changed = ids.clone()
    changed[:, 50:] = (changed[:, 50:] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :50], after[:, :50], rtol=0, atol=1e-12)
    assert float((before[:, 50:] - after[:, 50:]).abs().min(2).values.max()) > 0


def test_the_loss_of_a_window_is_the_mean_over_its_characters() -> None:
    columns = draw_windows(3)
    task = characters.task(SMALL.build())
    logits = task.model(columns["input_ids"]).log_softmax(-1)[:, :-1]
    expected = -logits.gather(2, columns["input_ids"][:, 1:, None])[:, :, 0].mean(1)
    torch.testing.assert_close(task.loss(task.model, columns), expected)


def test_the_model_has_about_eight_hundred_thousand_parameters() -> None:
    assert 7.5e5 < sum(p.numel() for p in Shape().build().parameters()) < 9e5


def test_windows_are_the_text_and_passages_are_held_out() -> None:
    place = Path(os.environ.get("IMPRINT_DATA") or "nowhere", "shakespeare", "tinyshakespeare.txt")
    require("data", place.is_file(), "tiny Shakespeare is not in the folder that IMPRINT_DATA names")
    text = characters.load(windows=20)
    assert len(text.passages) == len(text.queries["input_ids"]) == SEGMENTS * PASSAGES
    assert text.train["input_ids"].shape == (SEGMENTS * (20 - PASSAGES), LENGTH)
    assert int(text.train["input_ids"].max()) < VOCABULARY
    whole = read_speeches()
    assert all(passage in whole for passage in text.passages)
    assert not any(passage in part for passage in text.passages for part in text.texts)
