"""Sums the scores of sources over unions of them: `Attribution.group`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imprint.about import About
from imprint.about import unite as unite_about
from imprint.attribution.labels import LEFT_OUT, SHARED, Labels
from imprint.errors import SourcesError
from imprint.runtime.notices import Notices
from imprint.sources import Sources, find_groups

JOINT = 4  # sources that a validation of removals removes together, at most: larger unions were not compared
Groups = Mapping[Any, Any] | Sequence[Any] | Tensor | Sources


def unite(labels: Labels, groups: Groups) -> tuple[Labels, list[Tensor]]:
    """Return the labels of unions of sources, and the places of the sources of each; `add_up` sums their scores."""
    if labels.details.get(SHARED):
        raise SourcesError(
            "these groups share sources, whose scores would be counted twice in a group of groups: group the result "
            "of the single sources instead."
        )
    found = _read_division(labels, groups) if isinstance(groups, Sources) else find_groups(groups, labels.source_ids)
    places = [torch.from_numpy(members) for members in found.members]
    sizes = tuple(sum(labels.source_sizes[i] for i in each.tolist()) for each in places)
    for name, size in zip(found.ids, sizes, strict=True):
        if size > labels.n:
            raise SourcesError(
                f"the sources of group {name!r} share examples: they have {size} in all, the training data has "
                f"{labels.n}. Scores that count an example twice do not add up: simulate the unions themselves, "
                "sources.group({...})."
            )
    notices = Notices(labels.warnings)
    if (total := sum(labels.source_sizes)) > labels.n and any(len(each) > 1 for each in places):
        notices.add(
            f"some of the sources share examples: they have {total} in all, the training data has {labels.n}. Groups "
            "that hold two such sources count the shared examples twice: simulate the unions themselves, "
            "sources.group({...})."
        )
    summed = tuple(int(labels.counts[each].sum()) for each in places)
    compared = labels.removes and max(summed) <= JOINT
    kept = all(
        len(each) == 1 and labels.source_ids[int(each)] == name for name, each in zip(found.ids, places, strict=True)
    )
    dropped = {"sources"} if kept else {"sources", "signer"}  # the signer has not said which group is whose
    united = replace(
        labels,
        warnings=notices.messages,
        validation=labels.validation if compared else None,
        store_validation=labels.store_validation if compared else None,
        source_ids=found.ids,
        source_names=found.names,
        source_sizes=sizes,
        source_about=_unite_about(labels, places),
        summed=summed,
        details={**labels.details, **_count_uneven(places, len(labels.source_ids))},
        fingerprints={name: value for name, value in labels.fingerprints.items() if name not in dropped},
    )
    return united, places


def add_up(scores: Tensor, places: list[Tensor]) -> Tensor:
    """Sum scores of shape (…, sources) over unions of sources: (…, groups)."""
    return torch.stack([scores[..., each].double().sum(-1) for each in places], dim=-1)


def _unite_about(labels: Labels, places: list[Tensor]) -> tuple[About, ...]:
    """Return what is known of each union: what its sources agree on."""
    found = tuple(unite_about([labels.about(i) for i in each.tolist()]) for each in places)
    return found if any(found) else ()


def _count_uneven(places: list[Tensor], sources: int) -> dict[str, int]:
    """Count the sources that are in no group, and those that are in several; what is 0 is left out."""
    often = torch.cat(places).bincount(minlength=sources)
    counts = {LEFT_OUT: int((often == 0).sum()), SHARED: int((often > 1).sum())}
    return {name: count for name, count in counts.items() if count}


def _read_division(labels: Labels, sources: Sources) -> Sources:
    """Return sources of training examples as groups of scores; refuse them where scores are not of single examples."""
    each = labels.source_ids == tuple(map(str, range(labels.n))) and max(labels.source_sizes) == 1
    if not each:
        raise SourcesError(
            "an imprint.Sources divides training examples, and these scores are not of single examples "
            "(Sources.per_example): give the groups by the ids of their sources, "
            f"such as {{'group': [{labels.source_ids[0]!r}]}}."
        )
    sources.check(labels.n)
    return sources
