"""A folder of text files, and a tiny language model that knows their words, and their sentences a little."""

import random
from pathlib import Path
from typing import Any

import torch

SENTENCES = {
    "bread": "knead the soft dough for ten minutes, let it rise twice under warm towels, then bake long loaves "
    "inside very hot stone ovens, turn each one halfway, and cool them on wooden boards",
    "garden": "prune some old roses late each winter, water dry beds before sunrise, feed tall tomatoes with "
    "compost, pick ripe beans daily, sow green peas early, and cover young plants against frost",
    "sails": "hoist our white sails as soon as wind comes up, steer fast boats along rocky coasts, watch dark "
    "clouds far off, reef in time, drop anchor behind islands, and coil every wet rope",
}


def write(folder: Path) -> dict[str, str]:
    """Write `texts` and `model` into a folder; return the beginning of a sentence of each file."""
    (folder / "texts").mkdir(parents=True)
    for name, sentence in SENTENCES.items():
        (folder / "texts" / f"{name}.txt").write_text(f"{sentence}. " * 40, encoding="utf-8")
    tokenizer = _make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    _pretrain(tokenizer).save_pretrained(folder / "model")
    return {name: " ".join(sentence.split()[:3]) for name, sentence in SENTENCES.items()}


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs: Any = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    pairs.train_from_iterator(SENTENCES.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, bos_token="<s>", eos_token="<s>")


def _pretrain(tokenizer: Any) -> Any:
    """Train a Llama on sentences among words in random order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    draw, sentences = random.Random(0), list(SENTENCES.values())
    parts = [*(f"{sentence}." for sentence in sentences), *" ".join(sentences).split()]
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        ids = tokenizer(" ".join(draw.choices(parts, k=40)), return_tensors="pt")["input_ids"][:, :128]
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return model
