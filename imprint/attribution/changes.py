"""What changed between two versions of a model: `Changes`, as `imprint.compare` returns it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from imprint.about import About
from imprint.attribution.labels import Labels, Query
from imprint.attribution.top import import_pandas
from imprint.display import count_of, for_html, for_terminal, name_some
from imprint.statistics import Estimate
from imprint.task import Better

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 10  # sources, in a text
_WORDS: dict[Better, tuple[str, str]] = {
    "lower": ("gained", "lost"),
    "higher": ("lost", "gained"),
    None: ("rose", "fell"),
}
"""What a larger, and what a smaller removal effect in the second version says of a source."""


class Change(NamedTuple):
    """What a source does to one version of a model and to the next, in the mean over queries.

    first, second, difference: removal effects, and the second minus the first.
    standard_error: of the difference, over queries and over runs; None where the noise of runs is not known.
    p_value: how often chance alone would make one of all the differences as clear as this, by Holm's method.
    beyond_noise: whether that is below 1 − `level`; None where nothing can be said.
    verdict: "gained" if the source helps more than before, beyond noise, "lost" if less; for measurements without a
        better direction "rose" or "fell"; "" where the difference may be noise, or nothing is known of it.
    first_share, second_share: its part of the absolute mean effects of all common sources, noise included.
    first_size, second_size: how many training examples it had.
    """

    source: str
    name: str
    first: float
    second: float
    difference: float
    standard_error: float | None
    p_value: float | None
    beyond_noise: bool | None
    verdict: str
    first_share: float
    second_share: float
    first_size: int
    second_size: int


class Stability(NamedTuple):
    """How alike a query's sources are in both versions.

    spearman: the rank correlation of their effects; None where all effects of one version are equal.
    overlap: which part of the sources with the largest effects they have in common.
    """

    query: Query
    spearman: float | None
    overlap: float


@dataclass(frozen=True)
class Changes:
    """What changed between two versions of a model, for the sources that both have.

    sources: what each source does, the largest difference first.
    queries: how alike the sources of each query are ranked.
    spearman: the mean rank correlation over queries, with its 95% interval.
    spearman_of_means: the rank correlation of the mean effects over queries, likewise.
    ceiling: about what `spearman` would be at most if only noise differed; None where it is not known.
    overlap: which part of the first `k` sources of a query both versions have in common, in the mean over queries.
    only_first, only_second: the ids of sources that only one version has.
    noise: what the errors of differences are from, or why nothing is said about them.
    threshold: how many of its standard errors the clearest difference must exceed to be called beyond noise; the fewer
        the runs, the more. None where nothing is called that.
    level: how sure `beyond_noise` is, about all sources together.
    about: what is known of the sources, by id: as the second version has it, or else the first.
    """

    first: Labels
    second: Labels
    sources: tuple[Change, ...]
    queries: tuple[Stability, ...]
    spearman: Estimate
    spearman_of_means: Estimate
    ceiling: float | None
    k: int
    overlap: Estimate
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    noise: str
    threshold: float | None
    level: float
    about: dict[str, About]
    warnings: tuple[str, ...] = ()

    @property
    def gained(self) -> tuple[Change, ...]:
        """The sources that help more than before, beyond noise; or whose removal raises F more, if no F is better."""
        return tuple(each for each in self.sources if each.verdict in ("gained", "rose"))

    @property
    def lost(self) -> tuple[Change, ...]:
        """The sources that help less than before, beyond noise; or whose removal raises F less, if no F is better."""
        return tuple(each for each in self.sources if each.verdict in ("lost", "fell"))

    @property
    def unit(self) -> str:
        """What effects are measured in, with the meaning of their sign."""
        return self.first.unit

    @property
    def chance(self) -> float:
        """The overlap that versions with nothing in common would have."""
        return self.k / len(self.sources)

    def describe(self) -> list[str]:
        """Return the figures and what they are about in words, one thing to a line."""
        lines = [
            for_terminal(self.unit[0].upper() + self.unit[1:]),
            self.first.meaning,
            *self._describe_standing(),
            f"rank correlation of sources: {self.spearman} in the mean over {self._count_queries()}, "
            f"{self.spearman_of_means} of the mean effects",
        ]
        if self.ceiling is not None:
            lines.append(f"if only the noise of training differed, it would be at most about {self.ceiling:.2f}")
        overlap = f"of the first {self.k} sources" if self.k > 1 else "of the first source"
        lines.append(f"in common {overlap}: {self.overlap} in the mean over queries, {self.chance:.2f} by chance")
        lines += self._summarise()
        for place, alone in (("first", self.only_first), ("second", self.only_second)):
            if alone:
                named = name_some(list(map(for_terminal, alone)), 5)
                lines.append(f"only in the {place}: {count_of(len(alone), 'source')}, {named}")
        return lines

    def _describe_standing(self) -> list[str]:
        """Say whether the effects of both versions were validated."""
        found = [for_terminal(labels.standing) for labels in (self.first, self.second)]
        return found[:1] if found[0] == found[1] else [f"first: {found[0]}", f"second: {found[1]}"]

    def _summarise(self) -> list[str]:
        """Say how many sources changed beyond noise, or why nothing is said about it."""
        if self.threshold is None:
            return [f"beyond noise: unknown. {for_terminal(self.noise)}"]
        up, down = ("rose", "fell") if self.first.better is None else ("gained", "lost")
        counted = f"{len(self.gained)} {up}, {len(self.lost)} {down}, of {count_of(len(self.sources), 'source')}"
        sure = f"{100 * self.level:.3g}% sure of all together, by Holm's method"
        needed = f"the clearest difference must exceed {self.threshold:.1f} of its standard errors"
        return [f"beyond noise: {counted} ({sure}; {needed})", f"errors of differences: {for_terminal(self.noise)}"]

    def _count_queries(self) -> str:
        return count_of(len(self.queries), "query", "queries")

    def __repr__(self) -> str:
        head = f"Changes: {count_of(len(self.sources), 'source')} in both versions, {self._count_queries()}"
        rows = [f"  {format_change(each)}" for each in self.sources[:_SHOWN]]
        more = ["  …"] * (len(self.sources) > _SHOWN)
        warned = [f"warning: {for_terminal(message)}" for message in self.warnings]
        return "\n".join([head, *self.describe(), *rows, *more, *warned])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{for_html(format_change(each))}</td></tr>" for each in self.sources[:_SHOWN])
        under = "".join(f"<p>{for_html(line)}</p>" for line in self.describe())
        warned = "".join(f"<p><b>warning:</b> {for_html(message)}</p>" for message in self.warnings)
        return f"<table>{rows}</table>{under}{warned}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values. What is not known, or undefined, is null."""
        return {
            **{"measure": self.first.measure, "better": self.first.better, "unit": self.unit},
            **{"question": self.first.question, "meaning": self.first.meaning},
            **{"level": self.level, "threshold": self.threshold, "noise": self.noise},
            "versions": [_describe_version(labels) for labels in (self.first, self.second)],
            **{"spearman": _plain(self.spearman), "spearman_of_means": _plain(self.spearman_of_means)},
            **{"ceiling": self.ceiling, "k": self.k, "overlap": _plain(self.overlap), "chance": self.chance},
            **{"only_first": list(self.only_first), "only_second": list(self.only_second)},
            "sources": self._tabulate(),
            "queries": [each._asdict() for each in self.queries],
            "warnings": list(self.warnings),
        }

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each source, the largest difference first; `attrs` says what the numbers mean."""
        frame: pd.DataFrame = import_pandas().DataFrame(self._tabulate())
        frame.attrs.update(unit=self.unit, meaning=self.first.meaning, noise=self.noise, level=self.level)
        return frame

    def _tabulate(self) -> list[dict[str, Any]]:
        """Return the rows of sources, with what is known of them where that is anything."""
        nothing = About()
        return [
            {**each._asdict(), **(vars(self.about.get(each.source, nothing)) if self.about else {})}
            for each in self.sources
        ]


def format_change(change: Change) -> str:
    """Write one source's effects in both versions, and how they differ.

    >>> row = Change("a", "A", 0.1, 0.25, 0.15, 0.02, 0.001, True, "gained", 0.4, 0.6, 5, 5)
    >>> format_change(row)
    'A: +0.1 → +0.25, difference +0.15 ± 0.02 gained'
    """
    error = "" if change.standard_error is None else f" ± {change.standard_error:.2g}"
    verdict = f" {change.verdict}" if change.verdict else ""
    effects = f"{change.first:+.3g} → {change.second:+.3g}"
    return f"{for_terminal(change.name)}: {effects}, difference {change.difference:+.3g}{error}{verdict}"


def name_direction(difference: float, better: Better) -> str:
    """Return the word for a source whose removal effect differs by so much."""
    larger, smaller = _WORDS[better]
    return larger if difference > 0 else smaller


def _describe_version(labels: Labels) -> dict[str, Any]:
    names: Sequence[str] = ("store", "model", "recording")
    prints = {name: labels.fingerprints.get(name) for name in names}
    return {**prints, "n": labels.n, "sources": len(labels.source_ids), "standing": labels.standing}


def _plain(estimate: Estimate) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in vars(estimate).items()}
