"""Which words of a completion each source moved: scores per token, in the terminal and as a page."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from imprint.attribution.labels import Labels
from imprint.attribution.noise import assess_noise
from imprint.attribution.replicates import Replicates, replicate
from imprint.attribution.result import Attribution
from imprint.attribution.top import describe_warnings, explain_marks
from imprint.attribution.uncertainty import ERROR, LACKING, explain_errors
from imprint.display import for_terminal
from imprint.errors import DataError, ReadoutError, TaskError
from imprint.language.causal import LanguageTask
from imprint.language.data import Completions, TokenIds, Tokenizer
from imprint.language.words import Credited, Opponent, Word, find_words
from imprint.language.words_page import explain_shades, find_largest, render_page, shade
from imprint.readout.reader import Reader
from imprint.sources import find_source
from imprint.store.reading import Store
from imprint.tensors.vectors import root_mean_square
from imprint.validation.record import find_verdict

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult


@dataclass(frozen=True)
class TokenAttribution:
    """Scores s(b, t) of the tokens of one completion, shape (tokens, sources); over the tokens they add up to its own.

    tokens: the text that each token adds; "" for one that only begins a character, whose text the next one has.
    noise_changes: what a tiny change of the run's start changes of each token, (runs, tokens); None where unknown.
    replicates: how the scores of several runs deviate from their mean, as in an `Attribution`.
    log_probs: log p of each token under the model itself, the mean over checkpoints, (tokens,); None where unknown.
    """

    labels: Labels
    prompt: str
    tokens: tuple[str, ...]
    scores: Tensor
    noise_changes: Tensor | None = None
    replicates: tuple[Replicates, ...] = ()
    log_probs: Tensor | None = None

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
        return self._add_up([(0, len(self.tokens))])

    @property
    def of_words(self) -> Attribution:
        """The attribution of each word of the completion, as of one query each: the sums over their tokens."""
        return self._add_up(find_words(self.tokens))

    def _add_up(self, spans: Sequence[tuple[int, int]]) -> Attribution:
        """Add up the tokens of each span, which become the queries of an attribution."""
        belongs = self.scores.new_zeros(len(spans), len(self.tokens), dtype=torch.float64)
        for row, (begin, end) in enumerate(spans):
            belongs[row, begin:end] = 1

        def add_up(values: Tensor) -> Tensor:
            return (belongs @ values.double()).to(values.dtype)

        noise = None if self.noise_changes is None else add_up(self.noise_changes.T).T
        replicates = tuple(each.change(add_up) for each in self.replicates)
        return Attribution(self.labels, add_up(self.scores), noise_changes=noise, replicates=replicates)

    @property
    def strongest(self) -> str:
        """The id of the source that moves the completion most, whichever way."""
        return self.labels.source_ids[int(self.scores.sum(0).abs().argmax())]

    @property
    def most_helpful(self) -> str:
        """The id of the source that helps the completion most; where none helps, the least harmful."""
        return self.labels.source_ids[int(self.scores.sum(0).argmax())]

    def credited(self, k: int = 5, source: str | None = None) -> Credited:
        """Return the k words that a source makes likelier most, with their size and standard error.

        source: an id or a name; by default the source that helps the completion most. If no source makes it likelier,
            that one has no words.

        Words whose contribution is not distinguishable from 0 are among them and marked: where nothing is known of the
        errors, none is.
        """
        if k < 1:
            raise ReadoutError(f"credited lists at least 1 word, got k={k}.")
        chosen = self.most_helpful if source is None else source
        any_helps = bool((self.scores.sum(0) > 0).any())
        words = [word for word in self.rate_words(chosen) if word.contribution > 0 and (any_helps or source)]
        first = sorted(words, key=lambda word: -word.contribution)[:k]
        given = (self.labels, self.name_source(chosen), self.total(chosen), tuple(first))
        return Credited(*given, self.find_opponent(chosen), any_helps)

    def find_opponent(self, source: str | None = None) -> Opponent | None:
        """Return the source that moves the completion most the other way, if it moves it further than a source does.

        source: an id or a name; by default the source that helps the completion most.
        """
        contributions = self.scores.sum(0)
        own = contributions[self._index(source or self.most_helpful)]
        against = -own.sign() * contributions
        if not float(against.max()) > float(own.abs()) > 0:
            return None
        place = int(against.argmax())
        return Opponent(self.labels.source_names[place], self.total(self.labels.source_ids[place]))

    def total(self, source: str) -> Word:
        """Return the whole completion with what a source contributes to it."""
        return self._rate([(0, len(self.tokens))], source)[0]

    def rate_words(self, source: str) -> list[Word]:
        """Return the completion in words, each with what a source contributes, and how sure that is."""
        return self._rate(find_words(self.tokens), source)

    def _rate(self, spans: Sequence[tuple[int, int]], source: str) -> list[Word]:
        place, result = self._index(source), self._add_up(spans)
        errors, marks = result.standard_error, result.distinguishable
        contributions = (result.scores[:, place] / self.labels.n).tolist()
        sure = [None] * len(spans) if errors is None else errors[:, place].tolist()
        distinct = [None] * len(spans) if marks is None else marks[:, place].tolist()
        texts = ["".join(self.tokens[begin:end]) for begin, end in spans]
        own = None if self.log_probs is None else self.log_probs.double()
        likely = [None if own is None else float(own[begin:end].sum()) for begin, end in spans]
        return list(map(Word, texts, contributions, sure, distinct, likely))

    def words(self, source: str | None = None) -> list[tuple[str, float]]:
        """Return the completion in words, each with what the source contributes to its log-probability.

        source: an id or a name; by default the source that helps the completion most. A source's contribution is the
            opposite of its removal effect. Words are the tokens up to the next that begins with a space.
        """
        return [(word.text, word.contribution) for word in self.rate_words(source or self.most_helpful)]

    def name_source(self, source: str | None = None) -> str:
        """Return the name of a source, by its id or name; by default of the one that helps the completion most."""
        return self.labels.source_names[self._index(source or self.most_helpful)]

    def _index(self, source: str) -> int:
        return find_source(source, self.labels.source_ids, self.labels.source_names)

    def __repr__(self) -> str:
        tokens, sources = self.scores.shape
        credits, credited = self.completion.top(min(3, sources))[0], self.credited(3)
        top = ", ".join(f"{for_terminal(credit.name)} {credit.format_effect()}" for credit in credits)
        words = ", ".join(f"{for_terminal(word.text.strip())} {word.format()}" for word in credited)
        likelier = [f"  likelier because of {for_terminal(credited.name)}: {words}"] * bool(words)
        head = f"TokenAttribution: {tokens} tokens × {sources} sources"
        notes = dict.fromkeys([for_terminal(self.labels.unit), *credited.notes, *explain_marks(credits)])
        told = [f"  effect of removal: {top}", *likelier, *(f"  {for_terminal(each)}" for each in credited.caveats)]
        return "\n".join((head, *told, *notes, *describe_warnings(self.labels)))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield self.shade()
        yield from (Text(for_terminal(note), style="italic") for note in self.credited().notes)

    def shade(self, source: str | None = None) -> "Group":
        """Return the completion for a terminal, its words shaded by what a source contributes.

        source: an id or a name; by default the source that helps the completion most, which `credited` names too. The
            first lines say which way it moves the completion, and which source moves it further the other way.
            `strongest` is the one that moves it most, whichever way.
        """
        from rich.console import Group
        from rich.text import Text

        chosen = source or self.most_helpful
        credited, words = self.credited(source=chosen), self.rate_words(chosen)
        largest = find_largest(words)
        told = [credited.headline, *credited.caveats, explain_shades(credited.name, largest)]
        legend = Text("\n".join(map(for_terminal, told)), style="italic")
        shown = Text("\n".join(map(for_terminal, self.prompt.split("\n"))), style="dim")
        for word in words:
            red, green, blue = shade(word.contribution, largest)
            style, text = f"black on rgb({red},{green},{blue})", word.text
            lead = len(text) - len(text.lstrip())  # the space before a word stays as it is
            shown.append(text[:lead]).append(for_terminal(text[lead:]), style=style)
        return Group(legend, shown)

    def to_html(self, source: str | None = None) -> str:
        """Return a page: the completion shaded by what a source contributes, and the first sources in a table.

        source: an id or a name; by default the source that helps the completion most, as for `shade`. `render_page`
            shows several completions.
        """
        return render_page([self], source)

    def _repr_html_(self) -> str:
        return f'<iframe style="width:100%;height:24em;border:0" srcdoc="{escape(self.to_html())}"></iframe>'


def token_scores(
    task: LanguageTask,
    store: Store | str | os.PathLike[str],
    prompt: str | TokenIds,
    completion: str | TokenIds,
    tokenizer: Tokenizer,
    **options: Any,
) -> TokenAttribution:
    """Score how much each source moves each token of a completion, at the cost of one readout of the whole.

    prompt, completion: texts; or, of an answer that a model has just said, both as token ids, which decoding and
        tokenising again may change (see `Completions.from_tokens`).
    options: of `imprint.Reader`, such as readout=, step= or memory=.
    """
    store = Store.of(store)
    if isinstance(prompt, str) and isinstance(completion, str):
        asked = Completions([prompt], [completion], tokenizer)
    elif isinstance(prompt, str) or isinstance(completion, str):
        raise DataError("prompt and completion are given in the same way: both as texts, or both as token ids.")
    else:
        asked = Completions.from_tokens([(prompt, completion)], tokenizer)
    columns = asked.columns
    _refuse_other_tokenizer(task, tokenizer, asked.texts[0])
    count = int(columns["weights"].sum())
    last = lambda model, batch: task.token_log_probs(model, batch)[0, -count:]  # noqa: E731 (of a single row)
    reader = Reader(task, store, measure=last, **options)
    found, deviations = reader.scores_with_deviations(columns, count)
    scores, replicates = found.cpu(), replicate(reader.units, deviations)
    log_probs = reader.values(columns, count).cpu()
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
    given = columns["input_ids"][0].tolist()
    texts = _texts(tokenizer, given)
    begins = given[0] == getattr(tokenizer, "bos_token_id", None)  # which nobody wants to read
    prompt, tokens = "".join(texts[begins:-count]), tuple(texts[-count:])
    return TokenAttribution(labels, prompt, tokens, scores, noise, replicates, log_probs)


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
