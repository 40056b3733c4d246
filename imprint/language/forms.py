"""How JSON becomes a query of a language model: a prompt with its completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from imprint.batches import Batch
from imprint.errors import DataError
from imprint.forms import Ask, Kind
from imprint.language.data import Completions, context_of, explain_missing_space, lacks_space

LONGEST = 100_000
"""Characters of a prompt or a completion, before tokens are counted."""


@dataclass(frozen=True)
class CompletionForm:
    """Queries of a language model: `{"prompt": "The old ship", "completion": " sails on"}`.

    tokenizer: the model's own.
    length: the most tokens a prompt and its completion may have together; by default the tokenizer's context.
    """

    tokenizer: Any
    length: int | None = None
    kind: Kind = "completion"

    @property
    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "maxLength": LONGEST}
        return {
            "type": "object",
            "properties": {"prompt": text, "completion": {**text, "minLength": 1}},
            "required": ["prompt", "completion"],
            "additionalProperties": False,
        }

    @property
    def example(self) -> Any:
        return {"prompt": "The old ship", "completion": " sails on"}

    def read(self, query: Any) -> Batch:
        if not isinstance(query, dict) or query.keys() != {"prompt", "completion"}:
            raise DataError('a query is an object with "prompt" and "completion".')
        prompt, completion = query["prompt"], query["completion"]
        for name, text in query.items():
            if not isinstance(text, str) or len(text) > LONGEST:
                raise DataError(f'"{name}" is a text of at most {LONGEST:,} characters.')
            _refuse_surrogates(name, text)
        limit = self.length or context_of(self.tokenizer)
        return Completions([prompt], [completion], self.tokenizer, length=limit).columns

    def warnings(self, query: Any) -> tuple[str, ...]:
        prompt, completion = query["prompt"], query["completion"]
        if not lacks_space(prompt, completion, self.tokenizer):
            return ()
        return (f"the completion has no space between it and its prompt: {explain_missing_space(prompt, completion)}",)

    def join(self, batches: Sequence[Batch]) -> Batch:
        """Return batches of one as one batch; shorter rows are padded on the right, where tokens do not count."""
        width = max(batch["input_ids"].shape[1] for batch in batches)
        columns = batches[0].keys()
        return {name: _stack([batch[name] for batch in batches], width) for name in columns}

    def fill(self, ask: Ask, batch: Batch) -> Batch:
        return batch

    def answer(self, batch: Batch, row: int) -> str:
        ids, weights = batch["input_ids"][row], batch["weights"][row]
        return str(self.tokenizer.decode(ids[weights != 0].tolist()))


def _refuse_surrogates(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f'"{name}" has a character that is no text (a lone surrogate).') from error


def _stack(rows: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat([F.pad(row, (0, width - row.shape[1])) for row in rows])
