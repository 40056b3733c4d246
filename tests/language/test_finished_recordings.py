"""A training script that runs a second time is told at once how to go on from the recording that it finished."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import default_data_collator

import imprint
from imprint import Recording, StoreError
from imprint.language import Documents, recording, task
from tests.language.models import LABELS, TEXTS, gpt2, tokenizer
from tests.language.test_recording import record
from tests.language.trainings import make_trainer


def test_a_finished_recording_is_refused_when_it_is_attached(tmp_path: Path) -> None:
    record(gpt2().float(), tmp_path)
    again = make_trainer(gpt2().float(), tmp_path)
    train = again.train
    with pytest.raises(StoreError, match=r"holds a finished recording.*do not train.*imprint\.Recording\('.*run'\)"):
        recording.attach(again, tmp_path / "run")
    assert again.train == train  # nothing is attached
    again.train()


def test_the_other_recorder_of_a_trainer_stays_where_a_folder_is_refused(tmp_path: Path) -> None:
    record(gpt2().float(), tmp_path)
    trainer = make_trainer(gpt2().float(), tmp_path)
    kept = recording.attach(trainer, tmp_path / "other")
    with pytest.raises(StoreError, match="holds a finished recording"):
        recording.attach(trainer, tmp_path / "run")
    trainer.train()
    assert len(kept.finish().steps) == 5


def test_tomorrow_a_recording_is_replayed_from_its_folder(tmp_path: Path) -> None:
    documents = Documents(TEXTS, tokenizer(), length=12)
    sources, model = documents.sources(LABELS), gpt2().float()
    trainer = make_trainer(model, tmp_path, data=documents.rows, collate=default_data_collator)
    attached = recording.attach(trainer, tmp_path / "run")
    trainer.train()
    options: dict[str, Any] = {"out": tmp_path / "replayed", "progress": False}
    today = imprint.simulate(
        task(model), documents.rows, sources, run=attached, collate_fn=attached.collate_fn, **options
    )
    run, fresh = Recording(tmp_path / "run"), gpt2(initializer_range=0.1).float()
    fresh.load_state_dict(run.state(len(run.steps)), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    options["collate_fn"] = default_data_collator
    tomorrow = imprint.simulate(task(fresh), documents.rows, sources, run=run, **options)
    assert tomorrow.path == today.path and tomorrow.sha256 == today.sha256  # it is finished: nothing is repeated


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_the_rows_of_a_trainer_do_not_depend_on_the_loss_of_documents(kind: Any) -> None:
    plain, given = Documents(TEXTS, tokenizer(), length=12), Documents(TEXTS, tokenizer(), length=12, loss=kind)
    model = gpt2().eval()
    for one, other in zip(plain.rows, given.rows, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("input_ids", "labels"))
    summed = Documents(TEXTS, tokenizer(), length=12, loss="sum")
    batch = default_data_collator(given.rows)
    torch.testing.assert_close(task(model).loss(model, batch), task(model).loss(model, summed.columns))
