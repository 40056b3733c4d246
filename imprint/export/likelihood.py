"""The log-likelihood of completions, as every export measures it: Σ_t weights · log p(token_t | those before it).

Queries are the columns `input_ids` and `weights`, both (queries, tokens), as `imprint.language.Completions` makes them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from imprint.data import query_batches
from imprint.errors import DataError
from imprint.task import Batch, Task

COLUMNS = ("input_ids", "weights")


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least; `imprint.language` has this too, but imports transformers."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


def of_logits(logits: Tensor, input_ids: Tensor, weights: Tensor) -> Tensor:
    """Return the log-likelihood of each row from its logits (rows, tokens, vocabulary), in float32 at least."""
    found = widened(logits[:, :-1]).log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (found * weights[:, 1:]).sum(-1)


def log_likelihood(model: Any, batch: Batch) -> Tensor:
    """Return the log-likelihood of the completions of a batch, shape (queries,)."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return of_logits(logits, batch["input_ids"], batch["weights"])


def as_batches(queries: Any, task_device: Any, batch_size: int = 16) -> list[tuple[int, Batch]]:
    """Return queries as (count, batch) pairs whose batches have the two columns."""
    batches = query_batches(queries, device=task_device, batch_size=batch_size, collate_fn=None)
    for _, batch in batches:
        if not isinstance(batch, Mapping) or any(not isinstance(batch.get(name), Tensor) for name in COLUMNS):
            raise DataError(
                "an export reads queries with the columns input_ids and weights, both (queries, tokens): "
                "language.Completions(prompts, completions, tokenizer).columns has them."
            )
        if batch["input_ids"].shape != batch["weights"].shape or batch["input_ids"].dim() != 2:
            shapes = " and ".join(str(tuple(batch[name].shape)) for name in COLUMNS)
            raise DataError(f"input_ids and weights must both be (queries, tokens), got {shapes}.")
    return batches


def refuse_tokens(queries: list[tuple[int, Batch]], context: int | None, vocabulary: int) -> None:
    """Refuse queries that are too long for the exported model, or hold tokens it does not know."""
    for ids in (batch["input_ids"] for _, batch in queries):
        length = ids.shape[1]
        if context is not None and length > context:
            raise DataError(
                f"queries of {length} tokens are {length - context} more than the context of the exported model, "
                f"{context}: give length={context} to Completions."
            )
        if not ids.numel():
            continue
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < vocabulary:
                raise DataError(
                    f"there is a token {token}, and the exported model knows tokens from 0 to {vocabulary - 1}: the "
                    "queries were made with another tokenizer than the model's?"
                )


def is_log_likelihood(values: Tensor, task: Task, state: Mapping[str, Tensor], batch: Batch) -> bool:
    """Return whether what the task measured of a batch is its log-likelihood, up to rounding."""
    expected = task.call(log_likelihood, state, batch)
    return bool(((values - expected).abs() <= 1e-3 * (1 + expected.abs())).all())
