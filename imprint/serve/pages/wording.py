"""Says in plain words what numbers on pages mean: questions, verdicts, effects and drift."""

from collections.abc import Sequence
from typing import NamedTuple

from imprint.attribution.labels import Labels
from imprint.credit.drafting import SIGNS
from imprint.display import count_of
from imprint.serve.pages.charts import Kind
from imprint.validation.drift import Drift
from imprint.validation.verdict import LEVEL, Outcome, Verdict

OUTCOMES: dict[Outcome, str] = {
    "sizes validated": "Order and size of effects confirmed",
    "ranks validated": "Order of effects confirmed, not their size",
    "failed": "Failed: no better than chance",
    "undecided": "Undecided: too little was tested",
}
"""What a validation found."""
_MEANS: dict[Outcome, str] = {
    "sizes validated": "You can trust which sources move an answer more than others, and roughly by how much.",
    "ranks validated": "You can trust which sources move an answer more than others, but not by how much.",
    "failed": "Do not rely on these effects: they order sources no better than chance would.",
    "undecided": "Treat these effects as a guess until they are tested on more queries, removals or runs.",
}
NOT_VALIDATED = "Not validated"
_UNTESTED = (
    "Nobody compared these effects with what really happens when a source is removed. Treat them as a guess. The "
    "operator can test them with imprint.validate."
)


class Standing(NamedTuple):
    """How a validation ended: a few words, what that means, and whether it is good or bad news."""

    title: str
    meaning: str
    tone: str


def describe_standing(verdict: Verdict | None) -> Standing:
    """Say what a verdict means for whoever reads the numbers."""
    if verdict is None:
        return Standing(NOT_VALIDATED, _UNTESTED, "bad")
    tone = "good" if verdict.outcome in ("sizes validated", "ranks validated") else "bad"
    return Standing(OUTCOMES[verdict.outcome], _MEANS[verdict.outcome], tone)


def describe_tests(verdict: Verdict) -> str:
    """Say what was done to test effects."""
    figures = verdict.figures
    runs = count_of(figures.runs, "training run")
    which = "these queries" if verdict.own else count_of(figures.queries, "query", "queries")
    return (
        f"Predictions were compared with {count_of(figures.removals, 'real removal')}, of "
        f"{count_of(figures.sources, 'different source')} in all, each in {runs}, on {which}."
    )


def describe_p(verdict: Verdict) -> str:
    """Say how likely it is that chance alone explains the correlation; empty where that is unknown."""
    p = verdict.figures.p
    if p is None:
        return ""
    share = f"Shuffled predictions do as well in {100 * p:.2g}% of cases"
    return f"{share}, so this is not chance." if p <= LEVEL else f"{share}, so this may be chance."


def describe_effect(labels: Labels, noun: str = "source") -> str:
    """Say what the numbers beside sources are, in a sentence. noun: what a source is called."""
    after = labels.meaning.partition(": ")[2].replace("this source", f"this {noun}")
    if labels.question == "this_run":
        return f"Each number says how much the {labels.measure} of this answer would change {after}."
    return (
        f"Each number says how much the {labels.measure} of this answer would change without this {noun}: the {after}."
    )


def describe_sign(labels: Labels, noun: str = "source") -> str:
    """Say which sign means help; empty where the measurement has no better direction."""
    if labels.better is None:
        return ""
    sign, way = ("+", "lower") if labels.better == "lower" else ("−", "higher")
    return f"A {way} {labels.measure} is better, so {sign} means that the {noun} helps this answer."


def judge_effect(effect: float, distinguishable: bool | None, better: str | None) -> tuple[Kind, float, str]:
    """Return how an effect is drawn, which way, and what it says; to the right is help, or a rise without direction.

    >>> judge_effect(-0.5, True, "higher")
    ('helps', 0.5, 'helps')
    """
    drawn = SIGNS[better] * effect if better is not None else effect
    if better is None:
        words = "raised by its removal" if effect > 0 else "lowered by its removal"
    else:
        words = "helps" if drawn > 0 else "harms"
    if effect == 0:
        return "unclear", 0.0, "no effect"
    if distinguishable is False:
        return "unclear", drawn, "not clear"
    kind: Kind = "helps" if drawn > 0 else "harms"
    return kind, drawn, words if distinguishable else f"{words}, error unknown"


def describe_drift(drift: Drift | None, queries: int, fewest: int) -> str:
    """Say whether queries are like the validated ones."""
    if drift is None and queries < fewest:
        asked = count_of(queries, "different query was", "different queries were")
        return f"Unknown: {asked} answered since the service started, and it takes {fewest} to compare."
    if drift is None:
        return "Unknown: this store has no record of the validated queries to compare with."

    share = f"{drift.outside:.0%} of them have effects smaller or larger than any validated query."
    if drift.clear:
        return (
            "The queries asked here are not like those the store was validated on, so the validation may not hold for "
            f"them. {share} Validate the store again, on queries such as these."
        )
    return f"No sign that the queries asked here differ from the validated ones. {share}"


def name_ends(low: float | None, high: float | None) -> str:
    """Return an interval in words; empty where it is unknown."""
    return "" if low is None or high is None else f"95% interval {low:.2f} to {high:.2f}"


def speak_of_documents(warnings: Sequence[str]) -> list[str]:
    """Say of warnings about the documents inside a source that they are: whole sources may stand out from noise.

    >>> speak_of_documents(["this run is chaotic: beside it, the removal of a source moves little."])
    ['measured on single documents, this run is chaotic: beside it, the removal of a document moves little.']
    """
    changes = {
        "this run is chaotic": "measured on single documents, this run is chaotic",
        "the removal of a source": "the removal of a document",
        "about the source": "about the document",
    }
    spoken = list(warnings)
    for old, new in changes.items():
        spoken = [text.replace(old, new) for text in spoken]
    return spoken


def list_once(texts: Sequence[str]) -> list[str]:
    """Return texts in their order, each once, as sentences."""
    return [text[:1].upper() + text[1:] for text in dict.fromkeys(texts)]
