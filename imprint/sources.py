"""Defines sources, the units of credit: named and possibly overlapping sets of training examples."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.about import NOTHING, About, read_about_values
from imprint.about import unite as unite_about
from imprint.display import name_some, suggest_names
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

    length: how many training examples there are, where that is known.
    about: each source's owner, licence and address, as `describe` sets them; empty where no source is described.

    >>> sources = Sources.by_label(["times", "post", "times"])
    >>> sources
    Sources(2: 'post' (1), 'times' (2))
    >>> sources.members[1]
    array([0, 2])
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    members: tuple[Members, ...]
    length: int | None = None
    about: tuple[About, ...] = ()

    def __post_init__(self) -> None:
        if not self.ids:
            raise SourcesError("there are no sources: give at least one.")
        if not len(self.ids) == len(self.names) == len(self.members):
            counts = f"{len(self.ids)} ids, {len(self.names)} names, {len(self.members)} member lists"
            raise SourcesError(f"each source needs an id, a name and a list of members, got {counts}.")
        if len(self.about) not in (0, len(self.ids)):
            raise SourcesError(f"there are {len(self.about)} descriptions of {len(self.ids)} sources.")
        if self.about and not any(self.about):
            object.__setattr__(self, "about", ())
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
            members=tuple(_indices(f"source {str(key)!r}", values) for key, values in groups.items()),
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

    @property
    def shared(self) -> int:
        """How many examples belong to more than one source.

        >>> Sources.groups({"times": [0, 1, 2], "press": [1, 2, 3]}).shared
        2
        """
        return int((np.unique(np.concatenate(self.members), return_counts=True)[1] > 1).sum())

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
            about=tuple(self.about[i] for i in chosen) if self.about else (),
        )

    def describe(self, about: Mapping[str, About | Mapping[str, str]]) -> "Sources":
        """Return the same sources with descriptions of some: owner, licence and address.

        about: descriptions by the id of a source, or by a name that only one has; `imprint.read_about` reads them from
            a file. An empty one removes what was known. Sources that are not named keep theirs.

        Imprints and scores do not depend on it: a store is never refused because an owner has changed.

        >>> sources = Sources.by_label(["times", "post"]).describe({"times": {"owner": "The Times", "licence": "CC0"}})
        >>> sources.about
        (About(owner='', licence='', url=''), About(owner='The Times', licence='CC0', url=''))
        """
        return replace(self, about=describe_sources(about, self.ids, self.names, self.about))

    def group(self, groups: Mapping[Any, Any] | Sequence[Hashable] | Tensor) -> "Sources":
        """Unite sources into larger ones, to simulate these; what is in no group is no source any more.

        groups: lists of the sources' ids, or of their places, by the group's name; or one label per source. Groups may
            overlap. The training data stays the same: sources that are left out are trained on, but get no credit.

        >>> sources = Sources.by_label(["times", "post", "times", "blog"])
        >>> sources.group({"press": ["times", "post"]})
        Sources(1: 'press' (3))
        """
        found = find_groups(groups, self.ids)
        united = tuple(np.unique(np.concatenate([self.members[i] for i in places])) for places in found.members)
        about = tuple(unite_about([self.about[i] for i in places]) for places in found.members) if self.about else ()
        return Sources(found.ids, found.names, united, self.length, about)

    def inside(self, source: str, documents: Sequence[Hashable] | Tensor | None, n: int) -> "Sources":
        """Make sources of the documents of one source, which is named by its id or name.

        documents: the document of each of the `n` training examples; None makes every example a document.

        >>> sources = Sources.by_label(["times", "post", "times", "times"])
        >>> sources.inside("times", ["monday", "monday", "monday", "tuesday"], 4)
        Sources(2: 'monday' (2), 'tuesday' (1))
        """
        place = find_source(source, self.ids, self.names)
        members = self.members[place]
        labels: Sequence[Hashable] = range(n) if documents is None else list(documents)
        if isinstance(documents, Tensor | np.ndarray):
            labels = documents.tolist()
        if len(labels) != n:
            raise SourcesError(f"expected the document of each of {n} training examples, got {len(labels)}.")
        found: dict[Hashable, list[int]] = {}
        for index in members.tolist():
            found.setdefault(labels[index], []).append(index)
        about = (self.about[place],) * len(found) if self.about else ()
        return replace(Sources.groups(found), length=n, about=about)

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


def find_source(wanted: str, ids: Sequence[str], names: Sequence[str] = ()) -> int:
    """Return the place of a source, by its id or by a name that only one has; suggest similar ones if it is unknown.

    >>> find_source("Dune", ["a", "b"], ["Ash", "Dune"])
    1
    >>> find_source("dun", ["a", "b"], ["Ash", "Dune"])
    Traceback (most recent call last):
    imprint.errors.SourcesError: there is no source 'dun'; did you mean Dune?
    """
    for known in (ids, names):
        if wanted in known:
            if known.count(wanted) > 1:
                own = [identity for identity, name in zip(ids, names, strict=True) if name == wanted]
                raise SourcesError(
                    f"{len(own)} sources are called {wanted!r}: name one by its id, such as {name_some(own)}."
                )
            return known.index(wanted)
    raise SourcesError(f"there is no source {wanted!r}{suggest_names(wanted, dict.fromkeys((*ids, *names)))}")


def describe_sources(
    about: Mapping[str, About | Mapping[str, str]],
    ids: Sequence[str],
    names: Sequence[str],
    known: Sequence[About] = (),
) -> tuple[About, ...]:
    """Return the descriptions of sources, of which some are new; empty where nothing is known of any.

    about: the new ones, by the id of a source or by a name that only one has.
    known: what was known before, of every source or of none.
    """
    if not isinstance(about, Mapping):
        raise SourcesError(
            "descriptions are given by source, such as {'times': imprint.About(owner='The Times')}; got a "
            f"{type(about).__name__}. imprint.read_about reads them from a file."
        )
    places, found = {identity: place for place, identity in enumerate(ids)}, list(known) or [NOTHING] * len(ids)
    counts = Counter(names)
    called = {name: place for place, name in enumerate(names) if counts[name] == 1}
    seen: dict[int, str] = {}
    for key, value in about.items():
        place = places.get(key, called.get(key))
        if place is None:
            place = find_source(str(key), ids, names)  # which says what is wrong with it
        if place in seen:
            raise SourcesError(f"source {ids[place]!r} is described twice, as {seen[place]!r} and as {key!r}.")
        seen[place], found[place] = key, read_about_values(value, f"source {key!r}")
    return tuple(found) if any(found) else ()


def find_groups(groups: Mapping[Any, Any] | Sequence[Hashable] | Tensor, ids: Sequence[str]) -> Sources:
    """Return groups of the sources with these ids, in which the members are the places of sources.

    groups: lists of ids or of places by the group's name, or one label per source.
    """
    if isinstance(groups, str) or not isinstance(groups, Iterable) or isinstance(groups, Sources):
        raise SourcesError(
            "groups are given by name, such as {'press': ['times', 'post']}, or as one label per source; got a "
            f"{type(groups).__name__}."
        )
    if not isinstance(groups, Mapping):
        found = Sources.by_label(groups)
        if found.length != len(ids):
            raise SourcesError(f"expected one label for each of the {len(ids)} sources, got {found.length} labels.")
        return found
    if not groups:
        raise SourcesError("there are no groups: give at least one.")
    places = {identity: place for place, identity in enumerate(ids)}
    names = tuple(map(str, groups))
    return Sources(names, names, tuple(_find_places(key, values, places) for key, values in groups.items()), len(ids))


def _find_places(key: object, values: Any, places: Mapping[str, int]) -> Members:
    """Return the places of a group's sources, which are given by their ids, by their places or as a mask."""
    given: Any = [values] if isinstance(values, str | int) else values
    if isinstance(given, Iterable) and not isinstance(given, Tensor) and any(isinstance(v, str) for v in given):
        if unknown := [repr(value) for value in given if value not in places]:
            first = next(str(value) for value in given if value not in places)
            raise SourcesError(
                f"group {str(key)!r} has sources that do not exist: {name_some(unknown, 5)}. Sources are named by "
                f"their ids{suggest_names(first, places)}"
            )
        given = [places[value] for value in given]
    if isinstance(given, list | tuple) and given and all(isinstance(value, bool) for value in given):
        given = np.array(given)
    found = _indices(f"group {str(key)!r}", given)
    if _is_mask(given) and len(given) != len(places):
        raise SourcesError(f"the mask of group {str(key)!r} has {len(given)} entries, there are {len(places)} sources.")
    if len(found) == 0:
        raise SourcesError(f"group {str(key)!r} has no sources: leave it out, or give it some.")
    if found.min() < 0 or found.max() >= len(places):
        outside = found[(found < 0) | (found >= len(places))][0]
        raise SourcesError(f"group {str(key)!r} has source number {outside}, there are 0 to {len(places) - 1}.")
    if len(np.unique(found)) < len(found):
        raise SourcesError(f"group {str(key)!r} lists a source more than once.")
    return found


def _is_mask(values: Any) -> bool:
    return isinstance(values, Tensor | np.ndarray) and values.dtype in (bool, torch.bool)


def _indices(whose: str, values: Any) -> Members:
    """Return a list of indices, or the places where a mask is true."""
    if isinstance(values, Tensor):
        values = values.cpu().numpy()
    try:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except TypeError as error:
        raise SourcesError(f"members of {whose} must be a list of example indices: {error}.") from error
    if array.ndim != 1:
        raise SourcesError(f"the members of {whose} must be a flat list of indices, got shape {array.shape}.")
    if array.dtype == bool:
        return np.flatnonzero(array)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise SourcesError(f"the members of {whose} must be indices, got values of {array.dtype}.")
    return array.astype(np.int64)
