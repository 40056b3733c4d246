"""The words of a completion with what a source contributes to each, and those that a source is credited with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from imprint.attribution.labels import Labels
from imprint.attribution.noise import INDISTINGUISHABLE
from imprint.attribution.uncertainty import describe_error
from imprint.display import for_terminal, shorten
from imprint.errors import DataError

if TYPE_CHECKING:
    from imprint.language.tokens import TokenAttribution


class Word(NamedTuple):
    """A word of a completion, and what a source contributes to its log-probability: above 0 it makes it likelier.

    text: the word, with the space before it.
    standard_error: of the contribution, by chance alone; None where nothing is known of it.
    distinguishable: whether the contribution is distinguishable from 0; None where nothing is known of its error.
    log_prob: the log-probability itself, which the contribution is a part of; None where it was not measured.
    """

    text: str
    contribution: float
    standard_error: float | None = None
    distinguishable: bool | None = None
    log_prob: float | None = None

    def format(self, digits: int = 2) -> str:
        """Format the contribution; ~ marks one that is not distinguishable from 0.

        >>> Word(" sails", 0.25, 0.3, False).format()
        '+0.25~'
        """
        return f"{self.contribution:+.{digits}g}{'~' * (self.distinguishable is False)}"


class Opponent(NamedTuple):
    """A source that moves a completion further than another does, the other way; `total` is what it contributes."""

    name: str
    total: Word


@dataclass(frozen=True)
class Credited:
    """The words of a completion that a source makes likelier, those it moves most first.

    name: of the source; `total` is what it contributes to the whole completion.
    opponent: the source that moves the completion most the other way, if it moves it further; None if there is none.
    any_helps: whether any source makes the completion likelier.
    """

    labels: Labels
    name: str
    total: Word
    words: tuple[Word, ...]
    opponent: Opponent | None = None
    any_helps: bool = True

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[Word]:
        return iter(self.words)

    def __getitem__(self, place: int) -> Word:
        return self.words[place]

    @property
    def totals(self) -> list[Word]:
        """What the source contributes to the whole completion, and its opponent."""
        return [self.total, *([] if self.opponent is None else [self.opponent.total])]

    @property
    def headline(self) -> str:
        """Which way the source moves the completion, and how far."""
        return f"{self.name} {describe_total(self.total)}"

    @property
    def caveats(self) -> list[str]:
        """Why the source does not stand out, if it does not: nothing helps, or another one moves it further."""
        if not self.any_helps:
            return ["no source makes this completion likelier"]
        if self.opponent is None:
            return []
        doubt = f", so {self.name} does not stand out" if self.total.contribution > 0 else ""
        effect = f"({self.opponent.total.format(3)} nats)"
        return [f"{self.opponent.name} moves the completion further the other way {effect}{doubt}"]

    @property
    def lines(self) -> list[str]:
        """What is said of this completion alone."""
        listed = ", ".join(f"{word.text.strip() or repr(word.text)} {word.format()}" for word in self.words)
        told = [f"{self.headline}; words that it makes likelier: {listed or 'none'}", *self.caveats]
        return list(map(for_terminal, told))

    @property
    def notes(self) -> list[str]:
        """What to know of these numbers, one thing each."""
        marks = explain_words(self.labels, (*self.totals, *self.words))
        errors = describe_error(self.labels, self.total.standard_error is not None)
        return [self.labels.meaning, self.labels.standing, *errors, *marks]

    def __repr__(self) -> str:
        return "\n".join([*self.lines, *self.notes])


def describe_credits(results: "Sequence[TokenAttribution]", k: int = 5) -> str:
    """Return what `credited` says of several completions, as text that says once what is true of all of them.

    results: what `token_scores` returned. k: how many words of each completion to list.
    """
    if not results:
        raise DataError("there are no completions to describe: give a list of what token_scores returned.")
    found = [result.credited(k) for result in results]
    shared, rest = split_notes([each.notes for each in found])
    text = []
    for result, each, own in zip(results, found, rest, strict=True):
        head = for_terminal(shorten(result.prompt + "".join(result.tokens), 100))
        text += [head, *(f"  {line}" for line in (*each.lines, *own))]
    return "\n".join([*text, *shared])


def split_notes(notes: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the notes that all have in common, and those that each has of its own.

    >>> split_notes([["a", "b"], ["a"]])
    (['a'], [['b'], []])
    """
    shared = [note for note in notes[0] if all(note in others for others in notes)]
    return shared, [[note for note in own if note not in shared] for own in notes]


def describe_total(total: Word) -> str:
    """Say which way a source moves the whole completion, and how far."""
    if total.contribution == 0:
        return "does not move this completion"
    way = "likelier" if total.contribution > 0 else "less likely"
    whole = "" if total.log_prob is None else f"; its log-likelihood is {total.log_prob:.3g}"
    return f"makes this completion {way} ({total.format(3)} nats{whole})"


def explain_words(labels: Labels, words: Sequence[Word]) -> list[str]:
    """Explain the mark of words that are not distinguishable from 0, if there are any."""
    marked = any(word.distinguishable is False for word in words)
    return [f"~ {INDISTINGUISHABLE[labels.question]}"] * marked


def find_words(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return where words begin and end among tokens: a word goes on until a token begins with a space.

    >>> find_words([" one", " tw", "o", " ", "three"])
    [(0, 1), (1, 3), (3, 5)]
    """
    begins: list[int] = []
    text = ""
    for place, token in enumerate(tokens):
        if not begins or (token[:1].isspace() and text.strip()):
            begins.append(place)
            text = ""
        text += token
    return list(zip(begins, [*begins[1:], len(tokens)], strict=True))
