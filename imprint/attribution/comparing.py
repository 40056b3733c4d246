"""Subtracts one result from another: what a source does to one model more than to the other."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imprint.attribution.labels import LAST_STEPS, LEFT_OUT, OUT_OF_BATCHES, SHARED, Labels, Query, describe_query
from imprint.display import name_some
from imprint.errors import ReadoutError

CARRIED = (LEFT_OUT, SHARED, LAST_STEPS, OUT_OF_BATCHES)
"""Details about sources and question that hold for whatever is made of a result."""


def check_comparable(first: Labels, second: Labels, queries: tuple[tuple[Query, ...], tuple[Query, ...]]) -> None:
    """Refuse two results whose effects cannot be subtracted, and name the difference."""
    if first.difference or second.difference:
        raise ReadoutError("one of the results is a difference already: subtract the results of two stores or models.")
    check_same_part(first, second)
    check_same_subject(first, second, queries)


def check_same_part(first: Labels, second: Labels) -> None:
    """Refuse two results that answer different questions, or of different parts of a run."""
    if first.question != second.question or first.details.get(LAST_STEPS) != second.details.get(LAST_STEPS):
        raise ReadoutError(
            f"the results answer different questions, {first.question!r} ({first.meaning}) and {second.question!r} "
            f"({second.meaning}): use results that answer the same one."
        )


def check_same_subject(first: Labels, second: Labels, queries: tuple[tuple[Query, ...], tuple[Query, ...]]) -> None:
    """Refuse two results of different measurements, sources or queries, and name the difference."""
    if (first.measure, first.better) != (second.measure, second.better):
        raise ReadoutError(
            f"the results are of different measurements, {_describe_measure(first)} and {_describe_measure(second)}: "
            "attribute both with the same one."
        )
    _check_sources(first.source_ids, second.source_ids)
    _check_queries(*queries)
    prints = [labels.fingerprints.get("queries") for labels in (first, second)]
    if all(prints) and prints[0] != prints[1]:
        raise ReadoutError("the results are of different queries, or of the same in another order.")


def _describe_measure(labels: Labels) -> str:
    return f"{labels.measure!r} ({labels.better} is better)" if labels.better else repr(labels.measure)


def _check_sources(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    known = set(first), set(second)
    for mine, other, place in ((first, known[1], "first"), (second, known[0], "second")):
        if alone := [identity for identity in mine if identity not in other]:
            raise ReadoutError(
                f"the results are of different sources: only the {place} one has "
                f"{name_some(list(map(repr, alone)), 3)}. Use result.group to bring both to the same sources."
            )


def _check_queries(first: tuple[Query, ...], second: tuple[Query, ...]) -> None:
    if len(first) != len(second):
        raise ReadoutError(f"the results are of different queries: {len(first)} in the first, {len(second)} there.")
    if first != second:
        row = next(i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
        raise ReadoutError(
            f"the results are of different queries: row {row} is {describe_query(first[row])} in the first and "
            f"{describe_query(second[row])} in the second."
        )


def order_sources(first: Labels, second: Labels) -> list[int]:
    """Return the places of the first result's sources in the second."""
    places = {identity: place for place, identity in enumerate(second.source_ids)}
    return [places[identity] for identity in first.source_ids]


def subtract(first: Labels, second: Labels, effects: tuple[Tensor, Tensor]) -> tuple[Labels, Tensor]:
    """Return the labels of a difference, and its scores: those whose removal effects are the difference of both.

    Sources keep the order, names and sizes of the first result; N is that of the first.
    """
    order = order_sources(first, second)
    scores = -first.n * (effects[0].double() - effects[1].double()[:, order])
    counts = torch.maximum(first.counts, second.counts[order])
    summed = tuple(counts.tolist()) if first.summed or second.summed else ()
    both = first.fingerprints.keys() & second.fingerprints.keys()
    labels = replace(
        first,
        details={"first": _describe_origin(first), "second": _describe_origin(second), **_carry_over(first, second)},
        fingerprints={name: first.fingerprints[name] for name in both if _agree(first, second, name)},
        warnings=(*(f"first: {text}" for text in first.warnings), *(f"second: {text}" for text in second.warnings)),
        removes=first.removes or second.removes,
        summed=summed,
        difference=True,
        validation=None,
        store_validation=None,
    )
    return labels, scores


def _agree(first: Labels, second: Labels, name: str) -> bool:
    return bool(first.fingerprints[name] == second.fingerprints[name])


def _carry_over(first: Labels, second: Labels) -> dict[str, int]:
    """Return what a difference says of its groups and its steps as each of its sides does; of counts, the larger."""
    counts = {name: max(labels.details.get(name, 0) for labels in (first, second)) for name in CARRIED}
    return {name: count for name, count in counts.items() if count}


def _describe_origin(labels: Labels) -> dict[str, Any]:
    """Return where one side of a difference comes from: its store, N, and how it was read out."""
    return {"store": labels.fingerprints.get("store"), "n": labels.n, **labels.details}
