"""Reports of planted comparisons, and pages taken apart: their text, tables and addresses."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from imprint import Attribution, Sources
from imprint.evaluation.reports.page import write_report
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from tests.evaluation.planted import N, attribution, draw, planted, scores_for

QUERIES = 24
NAMED = Sources.by_label([i % 5 for i in range(N)], names=dict(enumerate(["times", "post", "wire", "blog", "log"])))
SINGLES = Subsets.without_each(NAMED)
PAIRS = Subsets.without(NAMED, [[], [0, 1], [1, 2], [2, 3], [3, 4], [0, 4], [2]])
HALVES = Subsets.halves(NAMED, 8)
EACH = Subsets.without_each(N)
KINDS = {"single sources": SINGLES, "sets of sources": PAIRS, "halves": HALVES, "single examples": EACH}
_VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """A page taken apart. Elements that are not closed, or closed twice, are refused."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    @property
    def text(self) -> str:
        """What a person reads, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes <{self._open[-1:]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            return
        self.texts.append(data)
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] = f"{self.tables[-1][-1][-1]} {data}".strip()

    def table(self, heading: str) -> dict[str, list[str]]:
        """The rows of the table whose first column has this heading, by their first cell."""
        (found,) = (table for table in self.tables if table[0][0] == heading)
        return {" ".join(row[0].split()): [" ".join(each.split()) for each in row[1:]] for row in found[1:]}

    @property
    def addresses(self) -> set[str]:
        """Everything that a browser might load, but pictures that the page itself contains."""
        every = [pair for _, attributes in self.tags for pair in attributes.items()]
        named = {value for name, value in every if name in ("src", "href") and value}
        in_styles = set(re.findall(r"url\(([^)]*)\)|@import", self.source))
        return {each for each in named if not each.startswith("data:image/png;base64,")} | in_styles


def compared(
    subsets: Subsets = SINGLES, runs: int = 4, noise: float = 0.3, **changes: Any
) -> tuple[Attribution, Truth]:
    """Scores, and a ground truth that agrees with them but for some noise."""
    scores = scores_for(subsets, QUERIES)
    exact = scores + noise * draw(*scores.shape, seed=5)
    return attribution(scores, subsets, **changes), planted(exact, subsets, runs=runs, noise=noise)


def reported(folder: Path, result: Attribution, truth: Truth, **options: Any) -> Page:
    """The page that is written of a comparison."""
    options = {"progress": False, **options}
    return Page(write_report(result, truth, folder / "report.html", **options).read_text(encoding="utf-8"))


def pictures(*shape: int) -> torch.Tensor:
    return draw(QUERIES, *shape, seed=3)
