"""A Trainer's recorded run, replayed without a source, ends where training with that source at weight 0 ends."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DataCollatorForLanguageModeling

from imprint import DataError, Sources, Store, attribute, simulate
from imprint.language import Completions, recording, task
from tests.language.models import CONTEXT, LABELS, TEXTS, gpt2, tokenizer
from tests.language.test_recording import OPTIONS, StopsAt, assert_close, record, repeat
from tests.language.trainings import ROWS, make_trainer, rows

SOURCES = Sources.by_label(["ann", "ben", "cid"] * 3 + ["ann", "ben"])


def replay(model: Any, trainer: Any, run: Any, **options: Any) -> Store:
    """Replay with the Trainer's own data and collator."""
    return simulate(
        task(model),
        trainer.train_dataset,
        SOURCES,
        run=run,
        collate_fn=trainer.data_collator,
        progress=False,
        **options,
    )


def end_without(store: Store, end: dict[str, Tensor], source: int) -> dict[str, Tensor]:
    """The parameters that the row of a source stands for: θ₋b = θ − u_b/N."""
    rows = store.imprints(0, source, source + 1, torch.device("cpu"))
    return {name: end[name] - row[0] / ROWS for name, row in rows.items()}


def weights_without(source: int) -> Tensor:
    weights = torch.ones(ROWS)
    weights[SOURCES.members[source]] = 0
    return weights


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The Euclidean distance of trained parameters."""
    names = left.keys() & right.keys()
    return float(torch.cat([(left[name] - right[name]).flatten() for name in sorted(names)]).norm())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_replays_end_where_the_run_without_a_source_ends(options: dict[str, Any], tmp_path: Path) -> None:
    model = gpt2().float()
    trainer, run = record(model, tmp_path, **options)
    store, end = replay(model, trainer, run), run.state(len(run.steps))
    for source in (0, 2):
        without, found = repeat(run, gpt2().float(), weights_without(source)), end_without(store, end, source)
        effect, error = distance(without, end), distance(found, without)
        assert effect > 0.005
        assert error < (0.1 if "bf16" in options else 1e-5) * effect  # products of a stack round otherwise in half
    deviation = store.checkpoints[0].measured.deviation  # in F, over the effect of a removal
    assert deviation is not None and deviation < (0.1 if "bf16" in options else 1e-4)


@pytest.mark.wide
def test_a_training_that_was_resumed_from_a_checkpoint_is_replayed_as_one(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "max_steps": -1}
    cut = make_trainer(gpt2().float(), tmp_path, **options)
    recording.attach(cut, tmp_path / "run")
    cut.add_callback(StopsAt(5))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    model = gpt2().float()
    trainer = make_trainer(model, tmp_path, **options)
    attached = recording.attach(trainer, tmp_path / "run")
    trainer.train(resume_from_checkpoint=True)
    run = attached.finish()
    assert len(run.steps) > 5
    store, end = replay(model, trainer, run), run.state(len(run.steps))
    for source in range(len(SOURCES)):
        without = repeat(run, gpt2().float(), weights_without(source))
        assert distance(end_without(store, end, source), without) < 1e-5 * distance(without, end)
    assert store.checkpoints[0].measured.deviation == pytest.approx(0, abs=1e-4)
    assert not any("neither the start nor the end" in warning for warning in store.warnings)


def test_a_fine_tune_is_replayed_in_its_adapter(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    torch.manual_seed(0)
    model = get_peft_model(gpt2().float(), config)
    start = deepcopy(model)
    trainer, run = record(model, tmp_path, gradient_accumulation_steps=2)
    end, without = run.state(len(run.steps)), repeat(run, start, weights_without(1))
    store = replay(model, trainer, run)
    assert_close(end_without(store, end, 1), {name: without[name] for name in end})


def test_tokenised_texts_are_replayed_with_the_collator_of_transformers(tmp_path: Path) -> None:
    words, model = tokenizer(pad_token="<pad>"), gpt2().float()
    data = [{"input_ids": words(text)["input_ids"][:CONTEXT]} for text in TEXTS]
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    _, run = record(model, tmp_path, data=data, collate=collate, gradient_accumulation_steps=2)
    sources = Sources.by_label(LABELS)
    store = simulate(task(model), data, sources, run=run, collate_fn=collate, progress=False)
    result = attribute(task(model), store, Completions(["the"], [" cat"], words).columns)
    assert result.question == "this_run"
    assert result.scores.abs().min() > 0
    assert store.checkpoints[0].measured.deviation == pytest.approx(0, abs=1e-4)


def test_a_run_on_other_data_is_refused(tmp_path: Path) -> None:
    model = gpt2().float()
    trainer, run = record(model, tmp_path)
    trainer.train_dataset = rows()[::-1]
    with pytest.raises(DataError):
        replay(model, trainer, run)


def test_the_recorder_itself_is_taken_as_the_run(tmp_path: Path) -> None:
    model = gpt2().float()
    trainer = make_trainer(model, tmp_path)
    run = recording.attach(trainer, tmp_path / "run")
    trainer.train()
    store = simulate(task(model), trainer.train_dataset, SOURCES, run=run, collate_fn=run.collate_fn, progress=False)
    assert store.question == "this_run"
    again, end = replay(model, trainer, run.finish()), run.finish().state(5)
    assert_close(end_without(store, end, 0), end_without(again, end, 0), 0)
