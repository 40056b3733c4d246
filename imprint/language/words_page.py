"""The page that shows completions word by word, shaded by what a source contributes: `render_page`."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from imprint.attribution.top import Credit, describe_warnings, explain_marks
from imprint.errors import DataError
from imprint.language.words import Word, explain_words, split_notes

if TYPE_CHECKING:
    from imprint.language.tokens import TokenAttribution

_RAISES, _LOWERS = (33, 102, 172), (178, 24, 43)  # what a source makes likelier, and less likely
_LISTED = 12  # sources in the table of a completion


def render_page(results: "Sequence[TokenAttribution]", source: str | Sequence[str] | None = None) -> str:
    """Return one page for several completions: each shaded by what a source contributes, its first sources in a table.

    source: an id or a name for all completions, or a list with one for each; by default the source that helps each
        completion most, which `credited` names too. A heading says which way it moves the completion, and which source
        moves it further the other way. `[each.strongest for each in results]` shades by those that move it most.
    """
    if not results:
        raise DataError("there are no completions to show: give a list of what token_scores returned.")
    chosen = _choose_sources(results, source)
    shared, rest = split_notes([_list_notes(*pair) for pair in zip(results, chosen, strict=True)])
    sections = [_render_section(*each) for each in zip(results, chosen, rest, strict=True)]
    alone = len(results) == 1 or isinstance(source, str)
    title = results[0].name_source(chosen[0]) if alone else f"{len(results)} completions"
    return _PAGE.format(
        title=escape(title),
        bar=", ".join(f"rgb{shade(step, 1.0)}" for step in (-1.0, -0.5, 0.0, 0.5, 1.0)),
        sections="".join(sections),
        notes=_paragraphs(shared),
    )


def _choose_sources(results: "Sequence[TokenAttribution]", source: str | Sequence[str] | None) -> list[str]:
    """Return the source that each completion is shaded by."""
    if source is None:
        return [result.most_helpful for result in results]
    chosen = [source] * len(results) if isinstance(source, str) else list(source)
    if len(chosen) != len(results):
        raise DataError(f"there must be one source for each completion: {len(results)} and {len(chosen)}.")
    return chosen


def shade(value: float, largest: float) -> tuple[int, int, int]:
    """Return white at 0, the full colour of the sign at the largest value."""
    strength = min(1.0, abs(value) / largest) if largest else 0.0
    red, green, blue = ((round(255 - 0.75 * strength * (255 - c))) for c in (_RAISES if value > 0 else _LOWERS))
    return red, green, blue


def find_largest(words: Sequence[Word]) -> float:
    """Return the size of the largest contribution, which has the strongest shade."""
    return max((abs(word.contribution) for word in words), default=0.0)


def explain_shades(name: str, largest: float) -> str:
    """Say what the colours of words mean; the largest contribution has the strongest shade."""
    return (
        f"Words are shaded by what {name} contributes to their log-probability, in nats: blue is likelier because of "
        f"it, red less likely; the strongest shade is ±{largest:.2g}."
    )


def _list_notes(result: "TokenAttribution", source: str) -> list[str]:
    """Return what to know of a completion's numbers, one thing each."""
    marks = [*explain_marks(_list_credits(result)), *explain_words(result.labels, result.rate_words(source))]
    return list(dict.fromkeys([*result.credited(source=source).notes, *marks, *describe_warnings(result.labels)]))


def _list_credits(result: "TokenAttribution") -> list[Credit]:
    return result.completion.top(min(_LISTED, len(result.labels.source_ids)))[0]


def _render_section(result: "TokenAttribution", source: str, notes: Sequence[str]) -> str:
    credited, words, credits = result.credited(source=source), result.rate_words(source), _list_credits(result)
    largest = find_largest(words)
    known = any(credit.standard_error is not None for credit in credits)
    return _SECTION.format(
        heading=escape(credited.headline),
        caveats="".join(f'<p class="caveat">{escape(text)}</p>\n' for text in credited.caveats),
        legend=escape(explain_shades(credited.name, largest)),
        low=f"{-largest:+.2g}",
        high=f"{largest:+.2g}",
        prompt=escape(result.prompt),
        body="".join(_span(word, largest) for word in words),
        unit=escape(result.labels.unit),
        head=_row("th", "source", "effect of removal", *["± standard error"] * known),
        rows="".join(_row("td", c.name, c.format_effect(), *[c.format_error("± ")] * known) for c in credits),
        notes=_paragraphs(notes),
    )


def _row(tag: str, *cells: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _span(word: Word, largest: float) -> str:
    text, lead = word.text, len(word.text) - len(word.text.lstrip())
    colour = "rgb({},{},{})".format(*shade(word.contribution, largest))
    error = "" if word.standard_error is None else f", standard error {word.standard_error:.2g}"
    own = "" if word.log_prob is None else f"; its log-probability is {word.log_prob:.3g}"
    shaded = f'<span style="background:{colour}" title="{word.format(3)}{error}{own}">{escape(text[lead:])}</span>'
    return escape(text[:lead]) + (shaded if text[lead:] else "")


def _paragraphs(notes: Sequence[str]) -> str:
    return "".join(f'<p class="unit">{escape(note)}</p>\n' for note in notes)


_SECTION = """<section>
<h2>{heading}</h2>
{caveats}<p>{legend}</p>
<p class="scale"><span>{low}</span><i></i><span>{high} nats</span></p>
<p class="text"><span class="prompt">{prompt}</span>{body}</p>
<p class="unit">All of the completion: {unit}</p>
<table>{head}{rows}</table>
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
th {{ color: #666; font-weight: normal; text-align: left }}
th, td {{ padding: .2rem .8rem .2rem 0 }}
td {{ border-top: 1px solid #ddd }}
th + th, td + td {{ text-align: right; font-variant-numeric: tabular-nums }}
.caveat {{ color: #8a5a00 }}
</style>
</head>
<body>
<h1>{title}</h1>
{sections}{notes}</body>
</html>
"""
