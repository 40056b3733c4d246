"""Answers a request that was credited before from its entries, without reading the queries again.

What a request asks is known by the JSON that was sent. What is made of it may differ when it is read again: a near-tie
between two labels, after a restart another policy or another store.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from imprint.about import NOTHING
from imprint.attribution.labels import Labels
from imprint.attribution.replicates import Replicates
from imprint.attribution.result import Attribution
from imprint.credit.leaves import Leaf
from imprint.credit.ledger import Ledger
from imprint.credit.log import translated_damage
from imprint.credit.payloads import decode_query
from imprint.forms import Form
from imprint.store.reading import Store
from imprint.validation.verdict import Figures, Verdict

_WARNING = (
    "this request was credited before: these are the numbers in the ledger, which does not keep the warnings of the "
    "first answer"
)
_PRINTS = ("store", "model", "sources", "recording", "signer")


def describe_asked(queries: Sequence[Any]) -> bytes:
    """Return what a request asks, by which its repetitions are known: its queries, in one way to write JSON."""
    return json.dumps(list(queries), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def recall_answers(ledger: Ledger, entries: Sequence[Leaf], form: Form) -> list[str | None]:
    """Return what was attributed, for people; None for queries that are erased, or that the form cannot show now."""
    return [_recall_answer(ledger.payload(entry.sequence), form) for entry in entries]


def _recall_answer(payload: bytes | None, form: Form) -> str | None:
    if payload is None:
        return None
    try:
        return form.answer(decode_query(payload), 0)
    except Exception:  # the form is the task's own, and may have been another when the query was credited
        return None


def recall_result(entries: Sequence[Leaf], store: Store) -> Attribution:
    """Return the result from which the entries of a request were made. store: knows the names of its own sources."""
    with translated_damage(f"entry {entries[0].sequence}"):
        about, ids = entries[0].about, _order_sources(entries[0], store)
        rows = [{row["source"]: row for row in entry.rows} for entry in entries]
        return Attribution(
            _recall_labels(about, [rows[0][id] for id in ids], store),
            torch.tensor([[each[id]["score"] for id in ids] for each in rows], dtype=torch.float64),
            noise_changes=_recall_noise([entry.about["noise"] for entry in entries]),
            replicates=_recall_replicates(about["runs"], [[each[id]["deviations"] for id in ids] for each in rows]),
        )


def _order_sources(entry: Leaf, store: Store) -> list[str]:
    """Return the sources of an entry in the order of the store; those that it does not know any more come last."""
    places = {id: place for place, id in enumerate(store.source_ids)}
    return sorted((row["source"] for row in entry.rows), key=lambda id: (places.get(id, len(places)), id))


def _recall_labels(about: dict[str, Any], rows: Sequence[dict[str, Any]], store: Store) -> Labels:
    names = dict(zip(store.source_ids, store.source_names, strict=True))
    known = dict(zip(store.source_ids, store.about or [NOTHING] * len(store), strict=True))
    verdict = None if about["validation"] is None else _read_verdict(about["validation"])
    ids = [row["source"] for row in rows]
    return Labels(
        about["n"],
        tuple(ids),
        tuple(names.get(id, id) for id in ids),
        tuple(row["size"] for row in rows),
        about["measure"],
        about["better"],
        dict(about["details"]),
        {name: about[name] for name in _PRINTS if about[name] is not None},
        (_WARNING,),
        about["question"],
        validation=verdict,
        store_validation=verdict,
        source_about=tuple(known.get(id, NOTHING) for id in ids),
    )


def _read_verdict(found: dict[str, Any]) -> Verdict:
    given = {name: value for name, value in found.items() if name != "outcome"}
    return Verdict(**{**given, "figures": Figures(**found["figures"])})


def _recall_noise(changes: Sequence[list[float] | None]) -> torch.Tensor | None:
    """Return the changes by noise, (runs, queries), from those of each query."""
    known = [each for each in changes if each is not None]
    return torch.tensor(known, dtype=torch.float64).T if known else None


def _recall_replicates(runs: dict[str, Any] | None, deviations: list[list[list[float]]]) -> tuple[Replicates, ...]:
    """Return how runs deviate, (runs, queries, sources), from the deviations of each query and source."""
    if runs is None:
        return ()
    values = torch.tensor(deviations, dtype=torch.float64).permute(2, 0, 1)
    names = tuple(str(place) for place in range(len(runs["shares"])))
    return (Replicates(values, tuple(runs["shares"]), names, runs["over"]),)
