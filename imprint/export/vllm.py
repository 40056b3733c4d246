"""Adapters that vLLM serves, with the model, its tokenizer and `serve.sh`, which starts the server.

The same folder as `to_peft` writes, plus:

model/         the plain model with its tokenizer; if `base=` names the model, `tokenizer/` holds the tokenizer alone
serve.sh       starts vLLM's OpenAI-compatible server on 127.0.0.1 with every adapter; its arguments go to the server

Written for vLLM 0.32.0. `imprint.export.remote` reads scores from the running server.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imprint.errors import ReadoutError, TaskError
from imprint.export.lora import Adapted
from imprint.export.peft import adapter_name, export_adapters, head_layers
from imprint.export.record import MODEL, Export
from imprint.store.reading import Store
from imprint.task import Task

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""
SCRIPT, TOKENIZER = "serve.sh", "tokenizer"
_HERE = '"$here"/'  # the folder of the script, wherever it was moved
SERVED = "plain"  # the name of the model without adapters
_IN_A_BATCH = 8  # adapters: vLLM reserves memory on the device for each
_IN_MEMORY = 256  # adapters that the host keeps: others are read from their files when they are asked for


def to_vllm(
    task: Task,
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    queries: Any,
    *,
    tokenizer: Any = None,
    sources: Sequence[str] | None = None,
    checkpoint: int | None = None,
    dtype: str = "float32",
    base: str | os.PathLike[str] | None = None,
) -> Export:
    """Write the adapters of `to_peft` as vLLM takes them, with the tokenizer and `serve.sh`, which starts the server.

    Adapters are filled up with zeros to a rank that vLLM has. Layers that it does not serve faithfully are refused.

    tokenizer: by default the one that `language.task` was given; with `base=`, the one that belongs to that name.
    """
    tokenizer = getattr(task, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None and base is None:
        raise TaskError(
            "vLLM needs the model's tokenizer, and the task has none: give it here as tokenizer=, or to language.task."
        )
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise TaskError(f"tokenizer must be one of transformers, with save_pretrained, got {type(tokenizer).__name__}.")
    return export_adapters(task, store, folder, queries, sources, checkpoint, dtype, base, _Vllm(tokenizer, dtype))


@dataclass(frozen=True)
class _Vllm:
    """What vLLM needs of an export."""

    tokenizer: Any
    dtype: str

    def pad_rank(self, model: Any, layers: list[Adapted]) -> int:
        """Return the next rank that vLLM has; refuse layers it would leave out or does not know."""
        if ends := head_layers(model, layers):
            raise ReadoutError(
                f"{ends[0]!r} has an adapter, and it is the output head or the embedding: vLLM leaves adapters there "
                "out of the log-probabilities of prompts without saying so. Fine-tune without it, or export with "
                "to_peft and read with read_peft."
            )
        if transposed := [layer.path for layer in layers if layer.transposed]:
            raise ReadoutError(
                f"{transposed[0]!r} is a Conv1D, as in GPT-2, and vLLM serves no adapters for that architecture: "
                "export with to_peft or to_onnx."
            )
        rank = max(layer.rank for layer in layers)
        if rank > RANKS[-1]:
            raise ReadoutError(
                f"the adapters have rank {rank}, and vLLM serves at most {RANKS[-1]}: simulate with a smaller R in "
                '"lora:R" (the rank is R · inputs / outputs of a layer).'
            )
        return next(allowed for allowed in RANKS if allowed >= rank)

    def write(self, where: Path, model: str, adapters: list[str], layers: list[Adapted], rank: int) -> None:
        """Write the tokenizer, and the command that starts the server."""
        place = None
        if self.tokenizer is not None:
            place = MODEL if model == MODEL else TOKENIZER
            self.tokenizer.save_pretrained(str(where / place))
        script = where / SCRIPT
        script.write_text(_script(model, place, adapters, layers, rank, self.dtype), encoding="utf-8")
        script.chmod(0o755)


def _script(
    model: str, tokenizer: str | None, adapters: list[str], layers: list[Adapted], rank: int, dtype: str
) -> str:
    """Return a shell script that starts the server from wherever the folder is."""
    options = [
        ["--model", _HERE + MODEL if model == MODEL else shlex.quote(model)],
        ["--tokenizer", _HERE + tokenizer] if tokenizer else [],
        ["--served-model-name", SERVED],
        ["--host", "127.0.0.1"],
        ["--dtype", dtype],
        ["--no-enable-prefix-caching"],
        ["--enable-lora"],
        ["--max-lora-rank", str(rank)],
        ["--max-loras", str(min(len(adapters), _IN_A_BATCH))],
        ["--max-cpu-loras", str(min(len(adapters), _IN_MEMORY))],
        ["--lora-target-modules", *sorted({shlex.quote(layer.path.rsplit(".", 1)[-1]) for layer in layers})],
        ["--lora-modules", *(f"{adapter_name(path)}={_HERE}{path}" for path in adapters)],
    ]
    lines = [" ".join(option) for option in options if option]
    command = " \\\n  ".join(['exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server', *lines, '"$@"'])
    return (
        "#!/bin/sh\n"
        "# Serves the adapters of this export with vLLM. PYTHON is an interpreter that has vLLM; arguments are added\n"
        "# to those of the server, as in ./serve.sh --port 9000.\n"
        'here="$(cd "$(dirname "$0")" && pwd)" || exit 1\n'
        f"{command}\n"
    )
