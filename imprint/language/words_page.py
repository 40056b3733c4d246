"""The page that shows completions word by word, shaded by what a source contributes: `render_page`."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from imprint.attribution.top import describe_warnings, explain_marks
from imprint.attribution.uncertainty import describe_error
from imprint.errors import DataError
from imprint.language.words import Word, describe_total, explain_words

if TYPE_CHECKING:
    from imprint.language.tokens import TokenAttribution

_RAISES, _LOWERS = (33, 102, 172), (178, 24, 43)  # what a source makes likelier, and less likely
_LISTED = 12  # sources in the table of a completion


def render_page(results: "Sequence[TokenAttribution]", source: str | None = None) -> str:
    """Return one page for several completions: each shaded by what a source contributes, its first sources in a table.

    source: an id or a name, the same for all; by default that which moves a completion most, whichever way. A heading
        says which source it is and whether it makes the completion likelier.
    """
    if not results:
        raise DataError("there are no completions to show: give a list of what token_scores returned.")
    notes = [_list_notes(result, source) for result in results]
    shared = [note for note in notes[0] if all(note in others for others in notes)]
    sections = [
        _render_section(result, source, [note for note in own if note not in shared])
        for result, own in zip(results, notes, strict=True)
    ]
    title = results[0].name_source(source) if len(results) == 1 or source is not None else f"{len(results)} completions"
    return _PAGE.format(
        title=escape(title),
        bar=", ".join(f"rgb{shade(step, 1.0)}" for step in (-1.0, -0.5, 0.0, 0.5, 1.0)),
        sections="".join(sections),
        notes=_paragraphs(shared),
    )


def shade(value: float, largest: float) -> tuple[int, int, int]:
    """Return white at 0, the full colour of the sign at the largest value."""
    strength = min(1.0, abs(value) / largest) if largest else 0.0
    red, green, blue = ((round(255 - 0.75 * strength * (255 - c))) for c in (_RAISES if value > 0 else _LOWERS))
    return red, green, blue


def find_largest(words: Sequence[Word]) -> float:
    """Return the size of the largest contribution, which has the strongest shade."""
    return max((abs(word.contribution) for word in words), default=0.0)


def explain_shades(largest: float) -> str:
    """Say what the colours of words mean; the largest contribution has the strongest shade."""
    return (
        "Words are shaded by what it contributes to their log-probability, in nats: blue is likelier because of it, "
        f"red less likely; the strongest shade is ±{largest:.2g}."
    )


def _list_notes(result: "TokenAttribution", source: str | None) -> list[str]:
    """Return what to know of a completion's numbers, one thing each."""
    labels, credits = result.labels, result.completion.top(min(_LISTED, len(result.labels.source_ids)))[0]
    marks = [*explain_marks(credits), *explain_words(labels, result.rate_words(source or result.strongest))]
    about = [labels.meaning, labels.standing, *describe_error(labels)]
    return [*about, *dict.fromkeys(marks), *describe_warnings(labels)]


def _render_section(result: "TokenAttribution", source: str | None, notes: Sequence[str]) -> str:
    chosen = source or result.strongest
    words = result.rate_words(chosen)
    largest = find_largest(words)
    credits = result.completion.top(min(_LISTED, len(result.labels.source_ids)))[0]
    rows = "".join(
        f"<tr><td>{escape(c.name)}</td><td>{c.format_effect()}{c.format_error(' ± ')}</td></tr>" for c in credits
    )
    return _SECTION.format(
        heading=escape(f"{result.name_source(chosen)} {describe_total(result.total(chosen))}"),
        legend=escape(explain_shades(largest)),
        low=f"{-largest:+.2g}",
        high=f"{largest:+.2g}",
        prompt=escape(result.prompt),
        body="".join(_span(word, largest) for word in words),
        unit=escape(result.labels.unit),
        rows=rows,
        notes=_paragraphs(notes),
    )


def _span(word: Word, largest: float) -> str:
    text, lead = word.text, len(word.text) - len(word.text.lstrip())
    colour = "rgb({},{},{})".format(*shade(word.contribution, largest))
    error = "" if word.standard_error is None else f" ± {word.standard_error:.2g}"
    shaded = f'<span style="background:{colour}" title="{word.format(3)}{error}">{escape(text[lead:])}</span>'
    return escape(text[:lead]) + (shaded if text[lead:] else "")


def _paragraphs(notes: Sequence[str]) -> str:
    return "".join(f'<p class="unit">{escape(note)}</p>\n' for note in notes)


_SECTION = """<section>
<h2>{heading}</h2>
<p>{legend}</p>
<p class="scale"><span>{low}</span><i></i><span>{high} nats</span></p>
<p class="text"><span class="prompt">{prompt}</span>{body}</p>
<p class="unit">All of the completion: {unit}</p>
<table>{rows}</table>
{notes}</section>
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}: word by word</title>
<style>
body {{ font: 1rem/1.6 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }}
body {{ color: #222; background: #fff }}
h2 {{ font-size: 1.1rem; margin-top: 2.5rem }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere }}
.prompt {{ color: #666 }}
.text span[title] {{ border-radius: 3px; padding: 1px 0 }}
.scale {{ display: flex; gap: .6rem; align-items: center; font-size: .85rem }}
.scale i {{ flex: 0 0 12rem; height: .8rem; background: linear-gradient(to right, {bar}) }}
table {{ border-collapse: collapse; font-size: .9rem }}
.unit {{ margin: 1.5rem 0 .3rem; color: #666; font-size: .9rem }}
.unit + .unit {{ margin-top: .3rem }}
td {{ border-top: 1px solid #ddd; padding: .2rem .8rem .2rem 0 }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums }}
</style>
</head>
<body>
<h1>{title}</h1>
{sections}{notes}</body>
</html>
"""
