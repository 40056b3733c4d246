"""Queries as bytes that can be kept, read again for a dispute, and erased."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from imprint.batches import is_columnar, map_tensors
from imprint.credit.canonical import decode, encode
from imprint.data import Collate, query_batches
from imprint.errors import CreditError, DataError
from imprint.store.fingerprint import of_batches
from imprint.store.structure import flatten, rebuild
from imprint.task import Batch

_MAGIC = b"imprint query 1\n"


class Payloads(list[bytes]):
    """Encoded queries, with the hash by which a result knows its own.

    fingerprint: of all queries in their order.
    """

    def __init__(self, payloads: Iterable[bytes], fingerprint: str) -> None:
        super().__init__(payloads)
        self.fingerprint = fingerprint


def encode_queries(queries: Any, *, batch_size: int = 64, collate_fn: Collate | None = None) -> Payloads:
    """Encode each query, in the form that `attribute` accepts, as a batch of one."""
    batches = query_batches(queries, device=torch.device("cpu"), batch_size=batch_size, collate_fn=collate_fn)
    encoded = [encode_query(each) for count, batch in batches for each in _split(batch, count)]
    return Payloads(encoded, of_batches(batches))


def encode_query(batch: Batch) -> bytes:
    """Return one query, as a batch, in bytes."""
    try:
        structure, tensors = flatten(batch)
    except DataError as error:
        raise CreditError(f"this query cannot be kept for disputes: {error}") from error
    about = encode(structure)
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return _MAGIC + len(about).to_bytes(8) + about + content


def decode_query(payload: bytes) -> Batch:
    """Return the batch that `encode_query` wrote."""
    at = len(_MAGIC) + 8
    if not payload.startswith(_MAGIC) or len(payload) < at:
        raise CreditError("this payload is not an encoded query, so it cannot be scored again.")
    end = at + int.from_bytes(payload[at - 8 : at])
    try:
        structure, tensors = decode(payload[at:end]), load(payload[end:])
        return rebuild(structure, tensors.__getitem__)
    except (SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise CreditError("a query is damaged, and cannot be read.") from error


def _split(batch: Batch, count: int) -> Sequence[Batch]:
    if not is_columnar(batch, count):
        raise CreditError(
            "these queries cannot be kept one by one, because not every value in a batch is a tensor with one row for "
            "each query: give payloads= yourself, one for each query."
        )
    return [map_tensors(lambda tensor, row=row: tensor[row : row + 1], batch) for row in range(count)]  # type: ignore[misc]
