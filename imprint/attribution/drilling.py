"""Looks inside a source: which of its documents moved a query. This is computed on demand, for one source at a time."""

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from imprint.attribution.labels import MEANINGS
from imprint.attribution.result import Attribution
from imprint.attribution.scoring import attribute
from imprint.attribution.top import Credit, describe_warnings, explain_marks
from imprint.attribution.uncertainty import describe_error, has_errors
from imprint.data import Collate, Data, as_tensors, is_columns, length_of
from imprint.display import for_html, for_terminal, shorten
from imprint.errors import DataError, SourcesError, StoreError
from imprint.plan import Checkpoints, Plan
from imprint.runtime.progress import Advance
from imprint.simulation.recorded import Recorded
from imprint.simulation.runner import simulate
from imprint.simulation.states import States
from imprint.sources import Sources, find_source
from imprint.store.fingerprint import are_sources, of_tensors, recognise_data
from imprint.store.manifest import MANIFEST
from imprint.store.reading import Store
from imprint.task import Task

_TEXT = 400  # characters of a document on a page
_LISTED = 12  # documents of a query on a page


@dataclass(frozen=True)
class Inside:
    """The documents of one source, and what each does to the queries.

    source: the name of the source.
    result: an attribution whose sources are its documents.
    texts: what to show of each document; empty if nothing is known.
    asked: what to show of each query; empty if nothing is known.
    """

    source: str
    result: Attribution
    texts: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    def top(self, k: int = 5, query: int = 0) -> list[tuple[Credit, str]]:
        """Return the k documents that move a query most, each with its text."""
        (credits,) = self.result[query].top(k)
        return [(credit, self._find_text(credit)) for credit in credits]

    def _find_text(self, credit: Credit) -> str:
        return self.texts[self.result.labels.source_ids.index(credit.source)] if self.texts else ""

    def _describe_error(self) -> list[str]:
        return describe_error(self.result.labels, has_errors(self.result.noise_changes, self.result.replicates))

    def __repr__(self) -> str:
        labels, queries = self.result.labels, range(min(3, len(self.result)))
        lines = [f"Inside {for_terminal(self.source)}: {len(labels.source_ids):,} documents", for_terminal(labels.unit)]
        lines += [labels.meaning, labels.standing, *self._describe_error()]
        shown = []
        for query in queries:
            asked = f": {for_terminal(shorten(self.asked[query], 80))}" if self.asked else ""
            lines.append(f"  query {query}{asked}")
            for credit, text in self.top(3, query):
                shown.append(credit)
                named = f"    {credit.format_effect()}  {for_terminal(credit.name)}"
                lines.append(f"{named}: {for_terminal(shorten(text, 80))}" if text else named)
        return "\n".join([*lines, *explain_marks(shown), *describe_warnings(labels)])

    def to_html(self, most: int = _LISTED) -> str:
        """Return a page with the documents that move each query most, and a bar for the effect of each."""
        labels = self.result.labels
        notes = (labels.unit, labels.meaning, labels.standing, *self._describe_error(), *describe_warnings(labels))
        sections = "".join(self._render_query(query, most) for query in range(len(self.result)))
        return _PAGE.format(
            source=for_html(self.source),
            documents=f"{len(labels.source_ids):,}",
            notes="".join(f"<li>{for_html(note)}</li>" for note in notes),
            sections=sections,
        )

    def _render_query(self, query: int, most: int) -> str:
        found = self.top(most, query)
        largest = max((abs(credit.removal_effect) for credit, _ in found), default=0.0) or 1.0
        rows = "".join(_render_row(credit, text, largest) for credit, text in found)
        marks = "".join(f"<p>{for_html(line)}</p>" for line in explain_marks([credit for credit, _ in found]))
        asked = f"<blockquote>{for_html(shorten(self.asked[query], _TEXT))}</blockquote>" if self.asked else ""
        return f"<section><h2>Query {query}</h2>{asked}<table>{_HEAD}{rows}</table>{marks}</section>"

    def _repr_html_(self) -> str:
        return f'<iframe style="width:100%;height:32em;border:0" srcdoc="{for_html(self.to_html())}"></iframe>'


def drill_down(
    task: Task,
    data: Any,
    sources: Sources,
    source: str,
    queries: Any,
    *,
    documents: Sequence[Hashable] | Tensor | None = None,
    texts: Sequence[str] | None = None,
    asked: Sequence[str] | None = None,
    plan: Plan | None = None,
    checkpoints: Checkpoints | None = None,
    run: Recorded | None = None,
    store: Store | str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    collate_fn: Collate | None = None,
    query_collate_fn: Collate | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Inside:
    """Score the documents of one source: which of them moved these queries?

    The documents become sources of their own, for this source only. By default their effects are estimated as those of
    single examples are, by the spectral engine with a plan that `Plan.auto` chooses: the answer is "expected". With
    `run` the recorded run is repeated without each document, which answers "this_run" exactly, and takes one training
    for each of them.

    source: its id or name.
    documents: the document of each training example, as one label for each; by default every example is a document.
    texts, asked: what to show of each training example, and of each query.
    plan, checkpoints, run, out: as in `simulate`. With `out` the documents' imprints are kept, and the next call with
        other queries only reads them.
    store: the store that is looked into. Other sources or data than it was made from are refused, and so are other
        checkpoints, unless it repeats a run.
    query_collate_fn: for the queries, if it is another one than `collate_fn`.
    """
    count = length_of(data)
    inside = sources.inside(source, documents, count)
    name = sources.names[find_source(source, sources.ids, sources.names)]
    if texts is not None and len(texts) != count:
        raise DataError(f"there are {len(texts)} texts, and {count} training examples: give one for each, in order.")
    whole = None if store is None else Store.of(store)
    if whole is not None:
        _refuse_others(whole, task, Data(data, device=task.device, collate_fn=collate_fn), sources, checkpoints, run)
    shared: Any = {"batch_size": batch_size, "collate_fn": collate_fn, "progress": progress}
    if plan is None and run is None:
        plan = _find_kept_plan(out) or Plan.auto(task, data, Sources.per_example(count), checkpoints, **shared)
    kept = simulate(task, data, inside, plan, checkpoints=checkpoints, run=run, out=out, memory=memory, **shared)
    collate = None if is_columns(as_tensors(queries)) else query_collate_fn or collate_fn
    result = attribute(task, kept, queries, collate_fn=collate, memory=memory, progress=progress)
    if whole is not None and whole.question != result.question:
        result = result.with_warnings(
            f"{whole.path} answers {MEANINGS[whole.question]}, and the effects of its documents another question: "
            f"{MEANINGS[result.question]}. Repeating the run without each document (run=, --run) is exact for it."
        )
    if asked is not None and len(asked) != len(result):
        raise DataError(f"there are {len(asked)} texts of queries, and {len(result)} queries: give one for each.")
    return Inside(name, result, _join_texts(inside, texts), tuple(asked or ()))


def _refuse_others(
    store: Store, task: Task, data: Data, sources: Sources, checkpoints: Checkpoints | None, run: Recorded | None
) -> None:
    """Refuse sources, data and checkpoints that are not those of a store."""
    request = store.manifest.request
    if not are_sources(sources, request.sources):
        raise SourcesError(f"these are not the sources that {store.path} was made with.")
    likeness = recognise_data(vars(request.data), data)
    if likeness.by != "none" and not likeness.same:
        raise DataError(f"this is not the training data that {store.path} was made with{likeness.remark}.")
    if run is None and not store.removes:
        states = States(task, checkpoints)
        if tuple(of_tensors(states[index]) for index in range(len(states))) != request.states:
            raise StoreError(
                f"these are not the checkpoints that {store.path} was made from: give the same ones, because effects "
                "at other weights are those of another model."
            )


def _find_kept_plan(out: str | os.PathLike[str] | None) -> Plan | None:
    """Return the plan of the store that is kept in a folder; None if there is none yet."""
    if out is None or not (Path(out) / MANIFEST).is_file():
        return None
    return Store(out).manifest.request.plan


def _join_texts(inside: Sources, texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the text of each document, from those of its examples."""
    if texts is None:
        return ()
    return tuple(" ".join(texts[int(index)] for index in members) for members in inside.members)


def _render_row(credit: Credit, text: str, largest: float) -> str:
    width = 50 * abs(credit.removal_effect) / largest
    left = 50 if credit.removal_effect >= 0 else 50 - width
    bar = f'<div class="bar"><i style="left:{left:.1f}%;width:{width:.1f}%"></i></div>'
    effect = f"{for_html(credit.format_effect())}{for_html(credit.format_error(' ± '))}"
    shown = f"<br><small>{for_html(shorten(text, _TEXT))}</small>" if text else ""
    return f"<tr><td>{for_html(credit.name)}{shown}</td><td>{bar}</td><td>{effect}</td></tr>"


_HEAD = "<tr><th>document</th><th></th><th>effect of removal</th></tr>"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Inside {source}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
th {{ text-align: left; font-weight: 600 }}
td {{ border-top: 1px solid #8884; padding: .4rem .8rem .4rem 0; vertical-align: top; overflow-wrap: anywhere }}
td:nth-child(2) {{ width: 12rem }}
td:last-child, th:last-child {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }}
.bar {{ position: relative; height: 1.1rem; background: linear-gradient(#8886, #8886) 50% 0 / 1px 100% no-repeat }}
.bar i {{ position: absolute; top: .15rem; height: .8rem; background: #2166ac }}
blockquote {{ margin: 0 0 .8rem; padding-left: .8rem; border-left: 3px solid #8886 }}
ul {{ padding-left: 1.2rem; font-size: .9rem }}
</style>
</head>
<body>
<h1>Inside {source}</h1>
<p>{documents} documents, the most influential first.</p>
<ul>{notes}</ul>
{sections}
</body>
</html>
"""
