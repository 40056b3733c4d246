"""A tiny Llama from a configuration, with exports of it for vLLM: of a path, and of a replayed fine-tune."""

from pathlib import Path
from typing import Any

import peft
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from imprint import Plan, RunRecorder, Sources, Store, Task, language, simulate
from imprint.export import Export, to_vllm
from imprint.export.likelihood import log_likelihood

VOCABULARY, LENGTH, N = 60, 24, 9


def tokenizer() -> Any:
    words = Tokenizer(tokenizer_models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w0")


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def columns(rows: int, seed: int) -> dict[str, Tensor]:
    """Random tokens; a third of each row is the prompt, and rows end at different tokens, padded with weight 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(rows, LENGTH)
    weights[:, : LENGTH // 3] = 0
    for row in range(rows):
        weights[row, LENGTH - row % 4 :] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator), "weights": weights}


def queries() -> dict[str, Tensor]:
    return columns(6, seed=4)


def _data() -> dict[str, Tensor]:
    rows = columns(N, seed=3)
    return {**rows, "weights": rows["weights"] / rows["weights"].sum(1, keepdim=True)}


def _sources() -> Sources:
    return Sources.by_label([f"site/{row % 3}" for row in range(N)])


def path_export(folder: Path, parameters: str = "lora:4", **options: Any) -> tuple[Task, Store, Export]:
    """The ± pairs of a simulated path, in adapters of a rank that vLLM does not have."""
    task = language.task(llama(), tokenizer(), parameters=parameters)
    plan = Plan(engine="tangent", steps=4, lr=0.2)
    store = simulate(task, _data(), _sources(), plan, out=folder / "store", progress=False)
    return task, store, to_vllm(task, store, folder / "path", queries(), **options)


def removal_export(folder: Path) -> tuple[Task, Store, Export]:
    """The adapters without each source, of a replayed fine-tune of attention and MLP."""
    torch.manual_seed(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run, data = RunRecorder(folder / "train", model, torch.optim.AdamW(trained, lr=0.01)), _data()
    for indices in run.batches(N, 3, epochs=4):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(-log_likelihood(model, {name: c[indices] for name, c in data.items()}).mean())
            run.optimiser.step()
    task = Task(
        model,
        loss=lambda model, batch: -log_likelihood(model, batch),
        measure=log_likelihood,
        parameters="*lora_*",
    )
    store = simulate(task, data, _sources(), run=run.finish(), out=folder / "replay", progress=False)
    return task, store, to_vllm(task, store, folder / "removals", queries(), tokenizer=tokenizer())


def plain(export: Export) -> Any:
    return LlamaForCausalLM.from_pretrained(export.folder / "model")


@torch.no_grad()
def values(export: Export, adapter: str, asked: dict[str, Tensor]) -> Tensor:
    """Log-likelihoods under an adapter, by PEFT."""
    adapted: Any = peft.PeftModel.from_pretrained(plain(export), export.folder / adapter)
    return log_likelihood(adapted.eval(), asked).double()
