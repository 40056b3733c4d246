"""A fine-tune in a plain PyTorch loop: an adapter, the loss of transformers, and an optimiser of all parameters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import default_data_collator

from imprint import Recording, RunRecorder, SimulationError, Store, simulate
from imprint.language import task
from imprint.recording.records import MicroBatch
from tests.language.models import LABELS, documents, gpt2
from tests.recording.runs import assert_same, contents

LORA = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)


def count_tokens(batch: Any) -> Any:
    return (batch["labels"][:, 1:] != -100).sum()


def train(
    folder: Path, *, everything: bool = True, counts: bool = True, told: bool = True, parts: int = 1
) -> tuple[Any, Recording]:
    """Train an adapter by the mean loss of transformers over the tokens of a batch, or of each of its parts.

    everything: whether the optimiser has the frozen parameters too; `counts` whether the recorder learns how many
        tokens a loss is the mean of, and `told` the loss itself.
    """
    torch.manual_seed(0)
    model = get_peft_model(gpt2().float(), LORA).train()
    trained = [p for p in model.parameters() if everything or p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
    data: Any = documents().rows
    loader = DataLoader(data, batch_size=3, shuffle=True, collate_fn=default_data_collator)
    run = RunRecorder(folder, model, optimiser)
    batches = list(run.loader(loader, epochs=2))
    for number in range(0, len(batches) // parts * parts, parts):
        with run.step() as step:
            optimiser.zero_grad()
            for indices, batch in batches[number : number + parts]:
                step.batch(indices, parts * count_tokens(batch) if counts else None)
                loss = model(**batch).loss / parts
                step.backward(loss) if told else loss.backward()
            step.clip_grad_norm_(1.0)
            optimiser.step()
    return model, run.finish()


def replay(model: Any, run: Recording) -> Store:
    given, sources = documents(), documents().sources(LABELS)
    return simulate(task(model), given.rows, sources, run=run, collate_fn=default_data_collator, progress=False)


def test_an_optimiser_of_all_parameters_trains_records_and_replays_the_adapter_alone(tmp_path: Path) -> None:
    model, run = train(tmp_path / "all")
    few, _ = train(tmp_path / "few", everything=False)
    assert_same(model, few)
    assert contents(tmp_path / "all") == contents(tmp_path / "few")
    assert all("lora_" in name for name in run.state(0))
    assert max(path.stat().st_size for path in run.paths) < 3000
    measured = replay(model, run).checkpoints[0].measured
    assert measured.deviation == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, r"run\.step\(indices, normaliser=\(labels\[:, 1:\] != -100\)\.sum\(\)\)"),
        ({"told": False}, r"run\.step\(indices, normaliser=\(labels"),
        ({"parts": 2}, r"step\.batch\(indices, normaliser=2 \* \(labels\[:, 1:\] != -100\)\.sum\(\)\)"),
    ],
    ids=["loss", "gradient norm", "micro-batches"],
)
def test_a_mean_over_tokens_that_was_not_told_is_named(options: dict[str, Any], advice: str, tmp_path: Path) -> None:
    model, run = train(tmp_path / "run", counts=False, **options)
    examples = sum(len(batch.examples) for batch in run.steps[0].batches)
    with pytest.raises(
        SimulationError,
        match=rf"like a mean over them, as transformers computes it: the {examples} examples of this step have \d+ "
        rf"predicted tokens, [\d.]+ each\. Record what the loss was divided by: {advice}",
    ):
        replay(model, run)


def double(batch: MicroBatch) -> MicroBatch:
    assert batch.loss is not None
    return replace(batch, loss=2 * batch.loss)


def test_another_factor_is_not_taken_for_a_mean_over_tokens(tmp_path: Path) -> None:
    model, run = train(tmp_path / "run")
    run._steps = tuple(replace(step, batches=tuple(map(double, step.batches))) for step in run.steps)
    with pytest.raises(SimulationError, match=r"It is 0\.5 times the recorded one") as error:
        replay(model, run)
    assert "transformers" not in str(error.value)
