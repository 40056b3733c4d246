"""Tiny language models with adapters, their stores, and queries, built by hand in float32."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, Task, simulate
from imprint.export import Export, to_onnx
from imprint.export.likelihood import log_likelihood

VOCABULARY, LENGTH, SOURCES = 30, 12, 3


def gpt2(**changes: Any) -> Any:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2, **changes}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return _drawn(transformers.GPT2LMHeadModel, config)


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return _drawn(transformers.LlamaForCausalLM, config)


MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "gpt2": (gpt2, ["c_attn", "c_fc"]),
    "llama": (llama, ["q_proj", "down_proj"]),
}


def _drawn(kind: Any, config: Any) -> Any:
    """Weights large enough for the layers to matter, as they are after training."""
    model = kind(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def adapted(kind: str, *, blocks: list[int] | None = None, alpha: int = 4, moved: bool = False) -> Any:
    """A model with adapters of rank 4; `moved` draws their B, as a fine-tune would."""
    import peft

    build, targets = MODELS[kind]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=alpha,
        target_modules=targets,
        layers_to_transform=blocks,
        fan_in_fan_out=kind == "gpt2",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(2)
    model = peft.get_peft_model(build(), config)
    if moved:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model.eval()


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return -log_likelihood(model, batch)


def task(model: Any, parameters: str | list[str] = "*lora_B*") -> Task:
    return Task(model, loss=loss, measure=log_likelihood, parameters=parameters)


def columns(rows: int, seed: int) -> dict[str, Tensor]:
    """Random tokens, the first third of them a prompt."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(rows, LENGTH)
    weights[:, : LENGTH // 3] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator), "weights": weights}


def data() -> dict[str, Tensor]:
    rows = columns(9, seed=3)
    rows["weights"] = rows["weights"] / rows["weights"].sum(1, keepdim=True)
    return rows


def queries() -> dict[str, Tensor]:
    return columns(4, seed=4)


def sources() -> Sources:
    return Sources.by_label([f"site/{row % SOURCES}" for row in range(9)])


PLAN = Plan(engine="tangent", steps=3, lr=0.5)


@cache
def prepared(kind: str, parameters: str = "*lora_B*", alpha: int = 4, moved: bool = False) -> tuple[Task, Store]:
    """A task all of whose blocks but the first are adapted, and its store."""
    found = task(adapted(kind, blocks=[1, 2] if kind == "gpt2" else [1], alpha=alpha, moved=moved), parameters)
    return found, simulate(found, data(), sources(), PLAN, progress=False)


@cache
def graph(kind: str, parameters: str, alpha: int, moved: bool) -> tuple[Task, Store, Export]:
    """The same, and its export to ONNX, which takes a dozen seconds: for all tests of a process, to read only."""
    task, store = prepared(kind, parameters, alpha, moved)
    _FOLDERS.append(tempfile.TemporaryDirectory())
    return task, store, to_onnx(task, store, Path(_FOLDERS[-1].name) / "x", queries())


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def central(task: Task, store: Store, export: Export, asked: dict[str, Tensor] | None = None) -> Tensor:
    """[F(θ + c·u) − F(θ − c·u)]/2c at the gains of an export, by swapping parameters of the task's own model."""
    state = store.state(export.checkpoint, task)
    asked = queries() if asked is None else asked
    columns = []
    for source in export.sources:
        row = store.source_ids.index(source.id)
        u = store.imprints(export.checkpoint, row, row + 1, torch.device("cpu"))
        ends = []
        for gain in (source.gain, -source.gain):
            moved = {name: state[name] + gain * u[name][0] for name in task.names}
            with torch.no_grad(), task.evaluating():
                ends.append(task.call(log_likelihood, {**state, **moved}, asked).double())
        columns.append((ends[0] - ends[1]) / (2 * source.gain))
    return torch.stack(columns, 1)


def deviation(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm())
