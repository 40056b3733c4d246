"""Tiny language models and tokenizers, made in milliseconds and without a network."""

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from imprint.language import Documents

CONTEXT = 24
TEXTS = [
    "the cat sat on the mat and the dog sat on the cat",
    "a ship sails over the sea and the wind is in the sail",
    "the dog and the cat",
    "over the sea sails a ship with the wind",
    "the mat is on the sea",
]
LABELS = ["pets", "ships", "pets", "ships", "both"]


def tokenizer(**special: str) -> Any:
    """A byte-level tokenizer with a few merges, as GPT-2 has; without special tokens unless they are given."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained(*special.values())), **special)


@cache
def _trained(*special: str) -> str:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    return inner.to_str()


VOCABULARY = 300


def gpt2(**changes: Any) -> Any:
    """Dropout is left at its default, so that evaluation mode has something to turn off."""
    options = {
        "vocab_size": VOCABULARY,
        "n_positions": CONTEXT,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "initializer_range": 0.2,
    }
    return _made(GPT2LMHeadModel, GPT2Config(**{**options, "bos_token_id": 0, "eos_token_id": 0, **changes}))


def llama(**changes: Any) -> Any:
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": 8, "intermediate_size": 12}
    more = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return _made(LlamaForCausalLM, LlamaConfig(**{**options, **more, "initializer_range": 0.2, **changes}))


def gemma2(**changes: Any) -> Any:
    """Caps its logits at 30, which small ones hardly show."""
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": 8, "intermediate_size": 12}
    more = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    return _made(Gemma2ForCausalLM, Gemma2Config(**{**options, **more, "pad_token_id": 0, **changes}))


MODELS = {"gpt2": gpt2, "llama": llama}


def _made(kind: Any, config: Any) -> Any:
    """A model in float64 whose weights do not depend on what was made before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).double()


def documents(**options: Any) -> Documents:
    return Documents(TEXTS, tokenizer(), **{"length": 12, **options})
