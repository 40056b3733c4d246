"""Which words of a completion each source moved: scores per token, in the terminal and as a page."""

import os
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from imprint.attribution.labels import Labels
from imprint.attribution.noise import assess_noise
from imprint.attribution.replicates import Replicates, replicate
from imprint.attribution.result import Attribution
from imprint.attribution.top import describe_warnings, explain_marks
from imprint.attribution.uncertainty import ERROR, LACKING, describe_error, explain_errors
from imprint.display import for_terminal
from imprint.errors import TaskError
from imprint.language.causal import LanguageTask
from imprint.language.data import Completions, Tokenizer
from imprint.readout.reader import Reader
from imprint.sources import find_source
from imprint.store.reading import Store
from imprint.tensors.vectors import root_mean_square
from imprint.validation.record import find_verdict

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult

_RAISES, _LOWERS = (33, 102, 172), (178, 24, 43)  # what a source makes likelier, and less likely
_LISTED = 12  # sources in the table of a page


@dataclass(frozen=True)
class TokenAttribution:
    """Scores s(b, t) of the tokens of one completion, shape (tokens, sources); over the tokens they add up to its own.

    tokens: the text that each token adds; "" for one that only begins a character, whose text the next one has.
    noise_changes: what a tiny change of the run's start changes of each token, (runs, tokens); None where unknown.
    replicates: how the scores of several runs deviate from their mean, as in an `Attribution`.
    """

    labels: Labels
    prompt: str
    tokens: tuple[str, ...]
    scores: Tensor
    noise_changes: Tensor | None = None
    replicates: tuple[Replicates, ...] = ()

    @property
    def removal_effect(self) -> Tensor:
        """Predicted change of log p of each token without the source, −s/N, shape (tokens, sources)."""
        return -self.scores / self.labels.n

    def top(self, k: int = 5) -> list[tuple[str, float]]:
        """Return the k sources that move the completion most, by name, with the removal effect on all of it."""
        effects = self.removal_effect.sum(0)
        order = effects.abs().argsort(descending=True, stable=True)[:k].tolist()
        return [(self.labels.source_names[index], float(effects[index])) for index in order]

    @property
    def completion(self) -> Attribution:
        """The attribution of the whole completion, as of one query: the sum over its tokens."""
        noise = None if self.noise_changes is None else self.noise_changes.sum(1, keepdim=True)
        replicates = tuple(each.change(lambda values: values.sum(1, keepdim=True)) for each in self.replicates)
        return Attribution(self.labels, self.scores.sum(0, keepdim=True), noise_changes=noise, replicates=replicates)

    def words(self, source: str | None = None) -> list[tuple[str, float]]:
        """Return the completion in words, each with what the source contributes to its log-probability.

        source: an id or a name; by default the source that moves the completion most. A source's contribution is the
            opposite of its removal effect. Words are the tokens up to the next that begins with a space.
        """
        contributions = (self.scores[:, self._index(source)] / self.labels.n).tolist()
        words: list[tuple[str, float]] = []
        for token, value in zip(self.tokens, contributions, strict=True):
            if not words or (token[:1].isspace() and words[-1][0].strip()):
                words.append((token, value))
            else:
                words[-1] = words[-1][0] + token, words[-1][1] + value
        return words

    def name_source(self, source: str | None = None) -> str:
        """Return the name of a source, by its id or name; by default of the one that moves the completion most."""
        return self.labels.source_names[self._index(source)]

    def _index(self, source: str | None) -> int:
        if source is None:
            return int(self.scores.sum(0).abs().argmax())
        return find_source(source, self.labels.source_ids, self.labels.source_names)

    def __repr__(self) -> str:
        tokens, sources = self.scores.shape
        credits = self.completion.top(3)[0]
        top = ", ".join(f"{for_terminal(credit.name)} {credit.format_effect()}" for credit in credits)
        head = f"TokenAttribution: {tokens} tokens × {sources} sources"
        about = (for_terminal(self.labels.unit), self.labels.meaning)
        notes = (*explain_marks(credits), *describe_error(self.labels), *describe_warnings(self.labels))
        return "\n".join((head, *about, f"  completion: {top}", *notes))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield self.shade()

    def shade(self, source: str | None = None) -> "Group":
        """Return the completion for a terminal, its words shaded by what a source contributes.

        source: an id or a name; by default the source that moves the completion most.
        """
        from rich.console import Group
        from rich.text import Text

        words = self.words(source)
        largest = _largest(words)
        legend = Text(for_terminal(_legend(self, self._index(source), largest)), style="italic")
        shown = Text("\n".join(map(for_terminal, self.prompt.split("\n"))), style="dim")
        for word, value in words:
            red, green, blue = _shade(value, largest)
            style = f"black on rgb({red},{green},{blue})"
            lead = len(word) - len(word.lstrip())  # the space before a word stays as it is
            shown.append(word[:lead]).append(for_terminal(word[lead:]), style=style)
        return Group(legend, shown)

    def to_html(self, source: str | None = None) -> str:
        """Return a page: the completion shaded by what a source contributes, and the first sources in a table.

        source: an id or a name; by default the source that moves the completion most.
        """
        index = self._index(source)
        words = self.words(source)
        largest = _largest(words)
        body = "".join(_span(word, value, largest) for word, value in words)
        credits = self.completion.top(_LISTED)[0]
        rows = "".join(
            f"<tr><td>{escape(c.name)}</td><td>{c.format_effect()}{c.format_error(' ± ')}</td></tr>" for c in credits
        )
        standing = self.labels.standing
        notes = (standing, *explain_marks(credits), *describe_error(self.labels), *describe_warnings(self.labels))
        bar = ", ".join(f"rgb{_shade(step, 1.0)}" for step in (-1.0, -0.5, 0.0, 0.5, 1.0))
        return _PAGE.format(
            name=escape(self.labels.source_names[index]),
            legend=escape(_legend(self, index, largest)),
            low=f"{-largest:+.2g}",
            high=f"{largest:+.2g}",
            bar=bar,
            prompt=escape(self.prompt),
            body=body,
            unit=escape(self.labels.unit),
            meaning=escape(self.labels.meaning),
            rows=rows,
            notes="".join(f'<p class="unit">{escape(note)}</p>' for note in notes),
        )

    def _repr_html_(self) -> str:
        return f'<iframe style="width:100%;height:24em;border:0" srcdoc="{escape(self.to_html())}"></iframe>'


def token_scores(
    task: LanguageTask,
    store: Store | str | os.PathLike[str],
    prompt: str,
    completion: str,
    tokenizer: Tokenizer,
    **options: Any,
) -> TokenAttribution:
    """Score how much each source moves each token of a completion, at the cost of one readout of the whole.

    options: of `imprint.Reader`, such as readout=, step= or memory=.
    """
    store = Store.of(store)
    asked = Completions([prompt], [completion], tokenizer)
    columns = asked.columns
    _refuse_other_tokenizer(task, tokenizer, prompt + completion)
    count = int(columns["weights"].sum())
    last = lambda model, batch: task.token_log_probs(model, batch)[0, -count:]  # noqa: E731 (of a single row)
    reader = Reader(task, store, measure=last, **options)
    found, deviations = reader.scores_with_deviations(columns, count)
    scores, replicates = found.cpu(), replicate(reader.units, deviations)
    changes = reader.noise_changes(columns, count)
    noise = None if changes is None else changes.cpu()
    whole = None if noise is None else noise.sum(1, keepdim=True)  # chaotic is a run for the completion as one query
    chaos, warnings = assess_noise(whole, root_mean_square(scores.sum(0)) / store.n)
    errors = explain_errors(noise, replicates, LACKING[store.question])
    labels = Labels(
        n=store.n,
        source_ids=store.source_ids,
        source_names=store.source_names,
        source_sizes=store.source_sizes,
        measure=task.measure_name,
        better=task.better,
        details={"readout": reader.readout, **reader.details, **chaos, ERROR: errors},
        warnings=(*reader.warnings, *warnings, *asked.warnings),
        question=store.question,
        removes=store.removes,
        validation=find_verdict(store, task.measure_name),
        source_about=store.about,
    )
    texts = _texts(tokenizer, columns["input_ids"][0].tolist())
    return TokenAttribution(labels, "".join(texts[:-count]), tuple(texts[-count:]), scores, noise, replicates)


def _refuse_other_tokenizer(task: LanguageTask, tokenizer: Tokenizer, text: str) -> None:
    """Refuse a tokenizer that cuts a text otherwise than the task's own: other tokens mean other words to the model."""
    if task.tokenizer is not None and list(task.tokenizer(text)["input_ids"]) != list(tokenizer(text)["input_ids"]):
        raise TaskError(
            "this tokenizer is not the one that the task was made with: it cuts the text into other tokens."
        )


def _texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens goes to the last of them."""
    texts: list[str] = []
    seen = ""
    for end in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        whole = text if end == len(tokens) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        texts.append(whole[len(seen) :] if whole.startswith(seen) else "")
        seen = whole if whole.startswith(seen) else seen
    return texts


def _largest(words: list[tuple[str, float]]) -> float:
    return max((abs(value) for _, value in words), default=0.0)


def _shade(value: float, largest: float) -> tuple[int, int, int]:
    """Return white at 0, the full colour of the sign at the largest value."""
    strength = min(1.0, abs(value) / largest) if largest else 0.0
    red, green, blue = ((round(255 - 0.75 * strength * (255 - c))) for c in (_RAISES if value > 0 else _LOWERS))
    return red, green, blue


def _legend(result: TokenAttribution, index: int, largest: float) -> str:
    name = result.labels.source_names[index]
    return (
        f"What {name} contributes to the log-probability of each word, in nats: blue is likelier because of it, red "
        f"less likely; the strongest shade is ±{largest:.2g}."
    )


def _span(word: str, value: float, largest: float) -> str:
    lead = len(word) - len(word.lstrip())
    red, green, blue = _shade(value, largest)
    shaded = f'<span style="background:rgb({red},{green},{blue})" title="{value:+.3g}">{escape(word[lead:])}</span>'
    return escape(word[:lead]) + (shaded if word[lead:] else "")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{name}: word by word</title>
<style>
body {{ font: 1rem/1.6 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }}
body {{ color: #222; background: #fff }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere }}
.prompt {{ color: #666 }}
.text span[title] {{ border-radius: 3px; padding: 1px 0 }}
.scale {{ display: flex; gap: .6rem; align-items: center; font-size: .85rem }}
.scale i {{ flex: 0 0 12rem; height: .8rem; background: linear-gradient(to right, {bar}) }}
table {{ border-collapse: collapse; font-size: .9rem }}
.unit {{ margin: 1.5rem 0 .3rem; color: #666; font-size: .9rem }}
td {{ border-top: 1px solid #ddd; padding: .2rem .8rem .2rem 0 }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums }}
</style>
</head>
<body>
<h1>{name}</h1>
<p>{legend}</p>
<p class="scale"><span>{low}</span><i></i><span>{high} nats</span></p>
<p class="text"><span class="prompt">{prompt}</span>{body}</p>
<p class="unit">All of the completion: {unit}<br>{meaning}</p>
<table>{rows}</table>
{notes}
</body>
</html>
"""
