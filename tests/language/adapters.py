"""A model that was fine-tuned by an adapter, and queries for it."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from imprint.language import Completions
from tests.language.models import MODELS, tokenizer

QUERIES = Completions(["the cat"], [" sat on the mat"], tokenizer()).columns


def fine_tuned(kind: str = "gpt2") -> Any:
    """A model with a LoRA adapter that has been trained, which is to say that B is not 0."""
    targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "up_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.3, target_modules=targets, fan_in_fan_out=kind == "gpt2")
        model = get_peft_model(MODELS[kind](), config).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model
