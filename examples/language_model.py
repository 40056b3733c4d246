"""A language model to work on from the terminal: `imprint check examples/language_model.py:task` and so on.

Three publishers wrote what a tiny GPT-2 was trained on; imprints live in a LoRA adapter made for them, so that they can
be exported. Needs the extra `language`.
"""

from itertools import product

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import imprint
from imprint import language

publishers: list[str] = []
texts: list[str] = []
for publisher, who, does, where in (
    ("almanac", ["the early apple", "the old pear tree"], ["ripens", "blooms"], ["in the orchard", "behind the wall"]),
    ("gazette", ["the new mayor", "the old council"], ["meets", "debates"], ["in the hall", "until the evening"]),
    ("logbook", ["the new schooner", "the early ferry"], ["anchors", "departs"], ["in the bay", "with the tide"]),
):
    for sentence in product(who, does, where):
        publishers.append(publisher)
        texts.append(" ".join(sentence))

words = Tokenizer(models.WordLevel(unk_token="?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["?"], show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")

documents = language.Documents(texts, tokenizer)
data = documents.columns
sources = documents.sources(publishers)
completions = language.Completions(
    ["the old pear tree", "the old council", "the early ferry"],
    [" ripens in the orchard", " debates in the hall", " departs with the tide"],
    tokenizer,
)
queries = completions.columns
query_texts, example_texts = completions.texts, documents.texts  # what reports show, and guess from
plan = imprint.Plan(steps=30, lr=1e-3, preconditioner="adam")

torch.manual_seed(0)
sizes = {"vocab_size": words.get_vocab_size(), "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
checkpoints: list[dict[str, Tensor]] = []


def task() -> language.LanguageTask:
    """Train, keeping an early checkpoint, and aim the adapter. In practice: load the model, and what training kept."""
    found = language.task(model, tokenizer, parameters="lora:4")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        optimiser.zero_grad()
        found.loss(model, data).mean().backward()
        optimiser.step()
        if step == 20:
            checkpoints.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    language.aim(found, data, sources, checkpoint=checkpoints[-1], progress=False)
    return found
