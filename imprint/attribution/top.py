"""The first sources of each query, and the order that puts them first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from imprint.about import FIELDS, is_address
from imprint.attribution.labels import Labels, Query, describe_groups, describe_query
from imprint.attribution.noise import INDISTINGUISHABLE
from imprint.attribution.replicates import Replicates
from imprint.attribution.uncertainty import describe_error, find_distinguishable, find_errors, has_errors
from imprint.display import count_of, for_html, for_terminal
from imprint.errors import MissingExtra, ReadoutError
from imprint.plan import Question

if TYPE_CHECKING:
    import pandas as pd

Order = Literal["magnitude", "raises", "lowers"]
ESTIMATE = (
    "estimate: a sum of single removals, in measurements half to twice the effect of removing all of them, and of the "
    "other sign for some small effects; for the exact value simulate the unions themselves, sources.group({...})"
)


class Credit(NamedTuple):
    """What one source does to one query; `removal_effect` is the predicted change of F without the source.

    distinguishable: whether the effect is distinguishable from 0; None where nothing is known of its error.
    estimate: whether the effect is a sum of single removals, which only estimates the removal of all of them.
    standard_error: of the removal effect, by chance alone; None where nothing is known of it.
    owner, licence, url: what is known of the source, as `About` has it; empty where it is not.
    """

    query: Query
    source: str
    name: str
    score: float
    removal_effect: float
    question: Question
    distinguishable: bool | None
    estimate: bool
    standard_error: float | None = None
    owner: str = ""
    licence: str = ""
    url: str = ""

    def format_effect(self, digits: int = 3) -> str:
        """Format the removal effect with its marks, which `explain_marks` explains.

        >>> Credit(0, "a", "A", 1.0, -0.25, "this_run", False, True).format_effect()
        '≈-0.25~'
        """
        return f"{'≈' * self.estimate}{self.removal_effect:+.{digits}g}{'~' * (self.distinguishable is False)}"

    def format_error(self, before: str = "") -> str:
        """Format the standard error with two digits, after some text; empty where it is unknown."""
        return "" if self.standard_error is None else f"{before}{self.standard_error:.2g}"


@dataclass(frozen=True)
class Top:
    """The first sources of each query: `indices` and `scores` have shape (queries, k).

    Indexing and iterating give lists of `Credit`, one list for each query; `queries` are their numbers. `noise` has the
    root mean square of what chance changes of F, (queries,), or is None; `replicates` are those of an `Attribution`,
    for these sources.
    """

    labels: Labels
    indices: Tensor
    scores: Tensor
    queries: tuple[Query, ...]
    noise: Tensor | None = None
    replicates: tuple[Replicates, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing the scores."""
        return self.labels.warnings

    @property
    def question(self) -> Question:
        """The question that the scores answer: "this_run" or "expected"."""
        return self.labels.question

    @property
    def distinguishable(self) -> Tensor | None:
        """Which effects are distinguishable from 0, shape (queries, k); None where nothing is known of their errors."""
        return self._distinguish(self.standard_error)

    @property
    def standard_error(self) -> Tensor | None:
        """The standard error of each removal effect, shape (queries, k); None where nothing is known of it."""
        return find_errors(self.labels, self.labels.counts[self.indices], self.noise, self.replicates)

    def _distinguish(self, errors: Tensor | None) -> Tensor | None:
        return find_distinguishable(self.scores / self.labels.n, errors, self.noise, self.replicates)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, query: int) -> list[Credit]:
        errors = self.standard_error
        return self._list_credits(query, errors, self._distinguish(errors))

    def __iter__(self) -> Iterator[list[Credit]]:
        errors = self.standard_error
        marks = self._distinguish(errors)
        return (self._list_credits(query, errors, marks) for query in range(len(self)))

    def _list_credits(self, query: int, errors: Tensor | None, distinguishable: Tensor | None) -> list[Credit]:
        labels, number = self.labels, self.queries[query]
        scores = self.scores[query].tolist()
        known = ([None] * len(scores) if each is None else each[query].tolist() for each in (distinguishable, errors))
        return [
            Credit(
                *(number, labels.source_ids[i], labels.source_names[i], score, -score / labels.n),
                *(labels.question, mark, labels.is_estimate(i), error),
                **vars(labels.about(i)),
            )
            for i, score, mark, error in zip(self.indices[query].tolist(), scores, *known, strict=True)
        ]

    def __repr__(self) -> str:
        """Show as many sources of the first five queries as fit on lines of 120 characters."""
        return "\n".join([*self.describe(), *describe_warnings(self.labels)])

    def describe(self, earlier: Iterable[Credit] = ()) -> list[str]:
        """Return the lines of the first five queries, with unit and question; `earlier` credits were shown before."""
        lines, shown = [for_terminal(self.labels.unit), self.labels.meaning, self.labels.standing], list(earlier)
        lines += describe_error(self.labels, has_errors(self.noise, self.replicates))
        for query in range(min(5, len(self))):
            credits = self[query]
            head = f"  {for_terminal(describe_query(credits[0].query, self.labels.query_texts))}: "
            texts = [f"{for_terminal(credit.name)} {credit.format_effect()}" for credit in credits]
            ends = accumulate(len(each) + len(", ") for each in texts)
            fit = max(1, sum(len(head) + end <= 120 for end in ends))
            lines.append(head + ", ".join(texts[:fit] + ["…"] * (fit < len(texts))))
            shown += credits[:fit]
        more = count_of(len(self) - 5, "more query", "more queries")
        left = [f"  … and {more}: to_pandas() has all of them"] * (len(self) > 5)
        return [*lines, *left, *explain_marks(shown)]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: what was measured, and for each query its sources."""
        labels = self.labels
        queries = [[tabulate(credit, labels) for credit in credits] for credits in self]
        return {
            **{"n": labels.n, "measure": labels.measure, "better": labels.better, "unit": labels.unit},
            **{"question": labels.question, "meaning": labels.meaning, **describe_validation(labels)},
            **{"noise": None if self.noise is None else self.noise.tolist()},
            **{"details": labels.details, "warnings": list(labels.warnings), "queries": queries},
        }

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each query and source in the list."""
        rows = [tabulate(credit, self.labels) for credits in self for credit in credits]
        frame: pd.DataFrame = import_pandas().DataFrame(rows)
        frame.attrs.update(describe_table(self.labels))
        return frame


def list_columns(labels: Labels) -> tuple[str, ...]:
    """Return the fields of a credit that a table has: owner, licence and address only where sources are described."""
    return tuple(name for name in Credit._fields if labels.source_about or name not in FIELDS)


def tabulate(credit: Credit, labels: Labels) -> dict[str, Any]:
    """Return the values of a credit by column."""
    return {name: getattr(credit, name) for name in list_columns(labels)}


def explain_marks(credits: Iterable[Credit]) -> list[str]:
    """Explain the marks of these effects, one to a line."""
    shown = list(credits)
    found = {
        f"≈ {ESTIMATE}": any(credit.estimate for credit in shown),
        **{
            f"~ {text}": any(credit.distinguishable is False and credit.question == question for credit in shown)
            for question, text in INDISTINGUISHABLE.items()
        },
    }
    return [text for text, appears in found.items() if appears]


def describe_warnings(labels: Labels) -> list[str]:
    """Return what else to know before believing the scores, one thing to a line."""
    return [*describe_groups(labels), *(f"warning: {for_terminal(message)}" for message in labels.warnings)]


def describe_table(labels: Labels) -> dict[str, Any]:
    """Return what a table's numbers mean, for its `attrs`."""
    about = {"question": labels.question, "meaning": labels.meaning, "unit": labels.unit, "n": labels.n}
    return {**about, **describe_validation(labels)}


def describe_validation(labels: Labels) -> dict[str, Any]:
    """Return whether scores were validated, in plain JSON values: the outcome, and what is behind it."""
    verdict = labels.validation
    return {"validation": {"outcome": "not validated"} if verdict is None else verdict.to_json()}


def link_source(credit: Credit) -> str:
    """Return the name of a source for a page: with what is known of it as a title, linked to its address."""
    about = ", ".join(text for text in (credit.owner, credit.licence) if text)
    title = f' title="{for_html(about)}"' if about else ""
    if is_address(credit.url):
        return f'<a href="{for_html(credit.url)}" rel="noopener noreferrer nofollow"{title}>{for_html(credit.name)}</a>'
    return f"<span{title}>{for_html(credit.name)}</span>" if title else for_html(credit.name)


def rank_scores(scores: Tensor, by: Order) -> Tensor:
    """Return values that are largest for the sources that come first."""
    if by == "magnitude":
        return scores.abs()
    if by in ("raises", "lowers"):
        return -scores if by == "raises" else scores  # a removal's effect is −s/N
    raise ReadoutError(f'sources can be ordered by "magnitude", "raises" or "lowers", not by {by!r}.')


Best = tuple[Tensor, Tensor, Tensor | None]
"""The indices and scores of the first sources, (queries, k), and the deviations of each run, (runs, queries, k)."""


def merge_best(best: Best | None, block: Tensor, deviations: Tensor | None, start: int, k: int, by: Order) -> Best:
    """Return the k first, of what was best so far and a new block of sources."""
    indices = torch.arange(start, start + block.shape[1]).expand_as(block)
    if best is not None:
        indices, block = torch.cat([best[0], indices], 1), torch.cat([best[1], block], 1)
        deviations = None if deviations is None or best[2] is None else torch.cat([best[2], deviations], 2)
    order = rank_scores(block, by).topk(min(k, block.shape[1]), dim=1).indices
    kept = None if deviations is None else gather_sources(deviations, order)
    return indices.gather(1, order), block.gather(1, order), kept


def gather_sources(values: Tensor, indices: Tensor) -> Tensor:
    """Return the values of some sources of each query, (runs, queries, k), from those of all, (runs, queries, …)."""
    return values.gather(2, indices.expand(len(values), *indices.shape))


def limit_top(k: int, sources: int) -> int:
    """Return how many sources to list: k, or all if there are fewer."""
    if k < 1:
        raise ReadoutError(f"top needs at least 1 source, got {k}.")
    return min(k, sources)


def import_pandas() -> Any:
    """Import pandas, or say how to install it."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("to_pandas", "report") from error
    return pandas
