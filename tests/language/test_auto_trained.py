"""Plans chosen for language models as people train them, against retraining: a Trainer, a summed loss, a fine-tune."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from imprint import attribute, simulate
from imprint.evaluation import Subsets, Truth, retrain
from imprint.evaluation.metrics import slope
from imprint.language import CheckpointCallback, Completions, Documents, LanguageTask, task
from tests.language.models import gpt2, tokenizer

pytestmark = [pytest.mark.curvature, pytest.mark.wide]
PLACES = {"cat": "mat", "dog": "wind", "sail": "ship", "ship": "sea"}  # each is taught by one source
SAID = ("is on the", "sat on the", "and a cat sat over the", "is in the", "with the dog sails over the")
QUERIES = Completions(
    [f"the {who} {said}" for who in PLACES for said in SAID[:3]],
    [f" {place}" for place in PLACES.values() for _ in SAID[:3]],
    tokenizer(),
).columns
OWN = torch.arange(len(PLACES)).repeat_interleave(3)
STEPS, BATCH = 40, 5


def documents(loss: Literal["mean", "sum"] = "mean") -> Documents:
    texts = [f"the {who} {said} {place}" for who, place in PLACES.items() for said in SAID]
    return Documents(texts, tokenizer(), length=24, loss=loss)


def untrained() -> Any:
    return gpt2(n_embd=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).float()


@cache
def pretrained() -> Any:
    """A model that knows the words, and nothing of who is where."""
    model = untrained()
    mixed = [f"the {who} {said} {place}" for who in PLACES for said in SAID for place in PLACES.values()]
    learn(model, Documents(mixed, tokenizer(), length=24), torch.arange(len(mixed)), seed=3, steps=60, lr=1e-2)
    return model


def adapted() -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(deepcopy(pretrained()), config)


def learn(model: Any, data: Documents, rows: Tensor, seed: int, steps: int, lr: float) -> None:
    """Train as a Trainer does, in a plain loop: the mean over the tokens of a batch."""
    language = task(model)
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    for step in range(steps):
        chosen = rows[torch.randperm(len(rows), generator=draw)[:BATCH]]
        optimiser.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimiser.zero_grad()
        batch = {name: column[chosen] for name, column in data.columns.items()}
        language.loss(model, batch).mean().backward()
        optimiser.step()


def trained_by_a_trainer(make: Callable[[], Any], folder: Path, lr: float) -> tuple[Any, list[Path]]:
    kept = CheckpointCallback(folder / "kept", at=(10, 20, 40))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=lr,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = make()
    Trainer(model=model, args=arguments, train_dataset=documents().rows, callbacks=[kept]).train()
    return model.eval(), kept.paths


def removed(make: Callable[[], Any], language: LanguageTask, lr: float, seed: int) -> Truth:
    """The log-likelihoods of the queries without each source, mean over three runs."""
    sources, data = documents().sources([who for who in PLACES for _ in SAID]), documents()

    def train(rows: Tensor, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make()
        learn(model, data, rows, seed, STEPS, lr)
        return model.eval()  # type: ignore[no-any-return]

    subsets = Subsets.without_each(sources, n=len(data.columns["input_ids"]))
    return retrain(train, language, QUERIES, subsets, runs=3, seed=seed, progress=False)


@pytest.mark.parametrize(
    ("make", "lr", "loss"),
    [(untrained, 1e-2, "mean"), (untrained, 1e-2, "sum"), (adapted, 2e-2, "mean")],
    ids=["trainer", "summed loss", "LoRA"],
)
@pytest.mark.filterwarnings("ignore:.*do not fit the task's loss", "ignore:.*a step multiplies some direction")
def test_who_taught_it_is_found_and_sizes_are_right(
    make: Callable[[], Any], lr: float, loss: Literal["mean", "sum"], tmp_path: Path
) -> None:
    model, paths = trained_by_a_trainer(make, tmp_path, lr)
    language, data = task(model), documents(loss)
    sources = data.sources([who for who in PLACES for _ in SAID])
    store = simulate(language, data.columns, sources, "auto", checkpoints=paths, progress=False)
    assert store.manifest.plan.preconditioner == "adam"
    result = attribute(language, store, QUERIES, progress=False)
    assert int((result.removal_effect.argmin(1) == OWN).sum()) >= 10  # of twelve log-likelihoods
    known, other = (removed(make, language, lr, seed) for seed in (0, 50))
    assert 0.5 < slope(result.calibrate(known), other).estimate.value < 2
