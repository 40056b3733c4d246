"""Shakespeare's text is cut so that nothing of a held-out passage is trained on, and small models learn from it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from imprint import DataError, MissingExtra, Plan, attribute, language, simulate
from imprint.benchmarking.settings import shakespeare
from imprint.benchmarking.settings.shakespeare import FULL, SEGMENTS, SMALL, Shakespeare
from imprint.evaluation import Subsets, retrain
from imprint.evaluation.training import measure_stack
from tests.conftest import require

pytest.importorskip("transformers", reason="transformers is not installed: the extra `language` has it")


@pytest.fixture(scope="module")
def file() -> Path:
    """Where the text is; nothing is downloaded for a test."""
    place = Path(os.environ.get("IMPRINT_DATA") or "nowhere", "shakespeare", "tinyshakespeare.txt")
    require("data", place.is_file(), "tiny Shakespeare is not in the folder that IMPRINT_DATA names")
    return place


@pytest.fixture(scope="module")
def full(file: Path) -> Shakespeare:
    return shakespeare.load()


@pytest.fixture(scope="module")
def small(file: Path) -> Shakespeare:
    return shakespeare.load(SMALL)


def test_no_speaker_is_named_and_nothing_else_is_lost(file: Path) -> None:
    """What is left out are the lines that follow an empty one and end with a colon."""
    lines = [*file.read_text().splitlines(), ""]
    said = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if line and not (before == "" and line.endswith(":"))
    ]
    spoken = shakespeare.remove_speakers(file.read_text())
    assert [line for line in spoken.splitlines() if line] == said
    assert len(said) < len([line for line in lines if line]) - 7000


def test_segments_are_equal_and_in_the_order_of_the_text(full: Shakespeare, file: Path) -> None:
    assert set(full.sources.sizes) == {len(full.owners) // SEGMENTS} and len(full.sources) == SEGMENTS
    assert full.origins.tolist() == [index for index in range(SEGMENTS) for _ in range(FULL.passages)]
    spoken = shakespeare.remove_speakers(file.read_text())
    places = [spoken.index(passage.strip("\ufffd")) for passage in full.passages]
    assert places == sorted(places)
    assert full.texts[0].startswith("Before we proceed any further")
    covered = sum(map(len, full.texts)) + sum(map(len, full.passages))
    assert covered > 0.98 * len(spoken)


@pytest.mark.parametrize("form", ["full", "small"])
def test_passages_are_in_no_training_window(form: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(form)
    size = {"full": FULL, "small": SMALL}[form]
    assert found.queries["input_ids"].shape == (SEGMENTS * size.passages, size.length)
    trained = {tuple(window) for window in found.train["input_ids"].tolist()}
    assert not trained & {tuple(window) for window in found.queries["input_ids"].tolist()}
    if form == "full":
        assert not [p for p in found.passages if any(p in text for text in found.texts)]


def test_windows_and_passages_together_are_the_segment(small: Shakespeare) -> None:
    """Every token is in one window or passage: as many as were taken, cut without overlap."""
    tokens = small.tokenizer.encode(shakespeare.remove_speakers(shakespeare._read())).ids
    first = tokens[: SMALL.length * (SMALL.windows or 0)]
    mine = [small.train["input_ids"][small.owners == 0], small.queries["input_ids"][small.origins == 0]]
    assert sorted(torch.cat(mine).flatten().tolist()) == sorted(first)


def test_loss_and_log_likelihood_are_means_over_predicted_tokens(small: Shakespeare) -> None:
    model = SMALL.build().eval()
    task = language.task(model)
    batch = {name: column[:3] for name, column in small.queries.items()}
    ids = batch["input_ids"]
    right = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(task.measure(model, batch), right.mean(1))
    torch.testing.assert_close(task.loss(model, batch), -right.mean(1))
    assert (task.measure_name, task.better) == ("log-likelihood", "higher")


def test_half_precision_is_near_full_precision(small: Shakespeare) -> None:
    model = SMALL.build().eval()
    full, half = (language.task(model, compute=t).loss(model, small.queries).detach() for t in (None, "bfloat16"))
    assert half.dtype == torch.float32
    assert 0 < float((full - half).abs().max()) < 0.05


def test_the_full_model_has_more_than_three_million_parameters() -> None:
    assert sum(p.numel() for p in FULL.build().parameters()) > 3_000_000


def test_small_models_learn_together_and_are_attributed(small: Shakespeare) -> None:
    together = SMALL.together(small.train)
    task = language.task(SMALL.build())
    halves = Subsets.halves(small.sources, 3)
    truth = retrain(together, task, small.queries, halves, progress=False)
    assert truth.values.shape == (1, 3, len(small.passages))
    untrained = measure_stack(task, {n: t[None] for n, t in task.state().items()}, small.queries, len(small.passages))
    assert float(truth.values.mean()) > float(untrained.mean()) + 0.5  # nats per token
    plan = Plan(steps=2, lr=0.05, batch_size=32)
    store = simulate(task, small.train, small.sources, plan, progress=False)
    result = attribute(task, store, small.queries, progress=False)
    assert result.scores.shape == (len(small.passages), SEGMENTS)


def test_training_in_half_precision_is_near_that_in_full(small: Shakespeare) -> None:
    once = replace(SMALL, dropout=0.0, training=replace(SMALL.training, epochs=1))
    everything = torch.arange(len(small.owners))
    full, half = (
        once.together(small.train, compute=compute).train_stack([everything] * 2, [0, 1])
        for compute in (None, "bfloat16")
    )
    task = language.task(once.build())
    losses = [measure_stack(task, stack, small.queries, len(small.passages)).mean(1) for stack in (full, half)]
    assert half["transformer.wte.weight"].dtype == torch.float32
    assert 0 < float((losses[0] - losses[1]).abs().max()) < 0.05


def test_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "tinyshakespeare.txt").write_text("Marlowe")
    monkeypatch.setenv("IMPRINT_DATA", str(tmp_path))
    with pytest.raises(DataError, match="does not hold tiny Shakespeare"):
        shakespeare.load()


@pytest.mark.parametrize("module", ["transformers", "tokenizers"])
def test_what_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtra, match=r"imprint-attribution\[language\]"):
        SMALL.build() if module == "transformers" else shakespeare.load(SMALL)
