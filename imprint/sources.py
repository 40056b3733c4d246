"""Defines sources, the units of credit: named and possibly overlapping sets of training examples."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.display import name_some
from imprint.errors import SourcesError

Members = np.ndarray[Any, np.dtype[np.int64]]


def require_sources(sources: object) -> None:
    """Refuse anything but sources, such as a list of labels."""
    if not isinstance(sources, Sources):
        raise SourcesError(
            f"sources must be an imprint.Sources, got a {type(sources).__name__}: Sources.by_label takes one label "
            "per training example, Sources.groups named lists of indices, Sources.per_example their number."
        )


@dataclass(frozen=True)
class Sources:
    """Sets of training examples, in order, each with a unique id and a display name.

    >>> sources = Sources.by_label(["times", "post", "times"])
    >>> sources
    Sources(2: 'post' (1), 'times' (2))
    >>> sources.members[1]
    array([0, 2])
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    members: tuple[Members, ...]
    length: int | None = None  # how many training examples there are, where that is known

    def __post_init__(self) -> None:
        if not self.ids:
            raise SourcesError("there are no sources: give at least one.")
        if not len(self.ids) == len(self.names) == len(self.members):
            counts = f"{len(self.ids)} ids, {len(self.names)} names, {len(self.members)} member lists"
            raise SourcesError(f"each source needs an id, a name and a list of members, got {counts}.")
        if len(set(self.ids)) < len(self.ids):
            seen: set[str] = set()
            twice = next(i for i in self.ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
            raise SourcesError(f"source id {twice!r} appears more than once: ids must be unique.")
        for text in (*self.ids, *self.names):
            if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
                raise SourcesError(f"ids and names must be valid Unicode strings, got {text!r}.")
        for identity, members in zip(self.ids, self.members, strict=True):
            if len(members) == 0:
                raise SourcesError(f"source {identity!r} has no members: leave it out, or give it examples.")
            if len(members) > 1 and len(np.unique(members)) < len(members):
                raise SourcesError(f"source {identity!r} lists an example more than once.")

    @classmethod
    def per_example(cls, n: int) -> "Sources":
        """Make each of `n` training examples a source of its own."""
        ids = tuple(map(str, range(n)))
        return cls(ids, ids, tuple(np.arange(n).reshape(n, 1)), n)

    @classmethod
    def by_label(cls, labels: Sequence[Hashable] | Tensor, names: Mapping[Any, str] | None = None) -> "Sources":
        """Make one source for each distinct label, sorted; `labels[i]` is the label of training example i."""
        if isinstance(labels, Tensor | np.ndarray) and labels.ndim != 1:
            raise SourcesError(f"expected one label per training example, got labels of shape {tuple(labels.shape)}.")
        values = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else list(labels)
        groups: dict[Hashable, list[int]] = {}
        for index, label in enumerate(values):
            groups.setdefault(label, []).append(index)
        try:
            ordered = sorted(groups)  # type: ignore[type-var]
        except TypeError:
            ordered = sorted(groups, key=str)
        return replace(cls.groups({label: groups[label] for label in ordered}, names), length=len(values))

    @classmethod
    def groups(cls, groups: Mapping[Any, Any], names: Mapping[Any, str] | None = None) -> "Sources":
        """Make sources from named sets of example indices, or boolean masks over the data; they may overlap."""
        if not isinstance(groups, Mapping):
            raise SourcesError(
                f"groups must map names to lists of indices, got a {type(groups).__name__}: Sources.by_label takes one "
                "label per training example."
            )
        unknown = [str(key) for key in (names or {}) if key not in groups]
        if unknown:
            raise SourcesError(f"names= has names for sources that do not exist: {name_some(unknown, 5)}.")
        masks = {len(mask) for mask in groups.values() if _is_mask(mask)}
        if len(masks) > 1:
            raise SourcesError(f"masks over the same data must have the same length, got {sorted(masks)}.")
        return cls(
            length=next(iter(masks), None),
            ids=tuple(map(str, groups)),
            names=tuple(str((names or {}).get(key, key)) for key in groups),
            members=tuple(_indices(key, values) for key, values in groups.items()),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        shown = [f"{i!r} ({len(m)})" for i, m in zip(self.ids[:4], self.members, strict=False)]
        return f"Sources({len(self)}: {', '.join(shown)}{', …' if len(self) > 4 else ''})"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of examples of each source."""
        return tuple(len(members) for members in self.members)

    def rows(self, start: int, stop: int) -> "Sources":
        """Select the sources from `start` up to, and without, `stop`."""
        return self.select(range(start, min(stop, len(self))))

    def smallest(self, count: int) -> "Sources":
        """Select the `count` sources with the fewest examples."""
        return self.select(sorted(range(len(self)), key=lambda i: len(self.members[i]))[:count])

    def largest(self, count: int) -> "Sources":
        """Select the `count` sources with the most examples."""
        return self.select(sorted(range(len(self)), key=lambda i: -len(self.members[i]))[:count])

    def spread(self, count: int) -> "Sources":
        """Select up to `count` sources, evenly spread."""
        return self.select(sorted({int(i) for i in np.linspace(0, len(self) - 1, count)}))

    def select(self, chosen: Sequence[int]) -> "Sources":
        """Select the sources at these positions, in this order."""
        return replace(
            self,
            ids=tuple(self.ids[i] for i in chosen),
            names=tuple(self.names[i] for i in chosen),
            members=tuple(self.members[i] for i in chosen),
        )

    def check(self, n: int) -> None:
        """Refuse members that are not examples of a training set of length `n`."""
        if self.length is not None and self.length != n:
            raise SourcesError(
                f"the sources are made for {self.length} training examples, the data has {n}: is this another split?"
            )
        for identity, members in zip(self.ids, self.members, strict=True):
            if members.min() < 0 or members.max() >= n:
                outside = members[(members < 0) | (members >= n)][0]
                raise SourcesError(
                    f"source {identity!r} has member {outside}, but the training data has examples 0 to {n - 1}."
                )

    def owner(self, example: int) -> str:
        """Name the first source of an example, in brackets, for messages; an empty string if there is none."""
        found = (i for i, members in zip(self.ids, self.members, strict=True) if example in members)
        return next((f" (source {identity!r})" for identity in found), "")

    def indicator(self, examples: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1_b(i), which is 1 where example i belongs to source b, shape (sources, len(examples))."""
        wanted = examples.cpu().numpy()
        members = np.concatenate(self.members)
        rows = np.repeat(np.arange(len(self)), self.sizes)
        position = np.full(max(members.max(), wanted.max(initial=0)) + 1, -1)
        position[wanted] = np.arange(len(wanted))
        columns = position[members]
        out = np.zeros((len(self), len(wanted)), dtype=bool)
        out[rows[columns >= 0], columns[columns >= 0]] = True
        return torch.from_numpy(out).to(examples.device, dtype)


def _is_mask(values: Any) -> bool:
    return isinstance(values, Tensor | np.ndarray) and values.dtype in (bool, torch.bool)


def _indices(key: object, values: Any) -> Members:
    if isinstance(values, Tensor):
        values = values.cpu().numpy()
    try:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except TypeError as error:
        raise SourcesError(f"members of source {str(key)!r} must be a list of example indices: {error}.") from error
    if array.ndim != 1:
        raise SourcesError(
            f"the members of source {str(key)!r} must be a flat list of indices, got shape {array.shape}."
        )
    if array.dtype == bool:
        return np.flatnonzero(array)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise SourcesError(f"the members of source {str(key)!r} must be example indices, got values of {array.dtype}.")
    return array.astype(np.int64)
