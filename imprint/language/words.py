"""The words of a completion with what a source contributes to each, and those that a source is credited with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from imprint.attribution.labels import Labels
from imprint.attribution.noise import INDISTINGUISHABLE
from imprint.display import for_terminal


class Word(NamedTuple):
    """A word of a completion, and what a source contributes to its log-probability: above 0 it makes it likelier.

    text: the word, with the space before it.
    standard_error: of the contribution, by chance alone; None where nothing is known of it.
    distinguishable: whether the contribution is distinguishable from 0; None where nothing is known of its error.
    """

    text: str
    contribution: float
    standard_error: float | None = None
    distinguishable: bool | None = None

    def format(self, digits: int = 2) -> str:
        """Format the contribution; ~ marks one that is not distinguishable from 0.

        >>> Word(" sails", 0.25, 0.3, False).format()
        '+0.25~'
        """
        return f"{self.contribution:+.{digits}g}{'~' * (self.distinguishable is False)}"


@dataclass(frozen=True)
class Credited:
    """The words of a completion that a source makes likelier, those it moves most first.

    name: of the source; `total` is what it contributes to the whole completion.
    """

    labels: Labels
    name: str
    total: Word
    words: tuple[Word, ...]

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[Word]:
        return iter(self.words)

    def __getitem__(self, place: int) -> Word:
        return self.words[place]

    def __repr__(self) -> str:
        head = f"{for_terminal(self.name)} {describe_total(self.total)}"
        listed = ", ".join(f"{for_terminal(word.text.strip())} {word.format()}" for word in self.words)
        lines = [f"{head}; words that it makes likelier: {listed or 'none'}", self.labels.meaning, self.labels.standing]
        return "\n".join([*lines, *explain_words(self.labels, (self.total, *self.words))])


def describe_total(total: Word) -> str:
    """Say which way a source moves the whole completion, and how far."""
    if total.contribution == 0:
        return "does not move this completion"
    way = "likelier" if total.contribution > 0 else "less likely"
    return f"makes this completion {way} ({total.format(3)} nats)"


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
