"""Says in words what was found: what was asked, how well predictions did, how sure that is, what to do next.

The outcome and its reason are those of `imprint.validation`; the figures are those of `evaluate`.
"""

import math
from dataclasses import dataclass

from imprint.attribution.labels import LAST_STEPS
from imprint.display import count_of
from imprint.evaluation.metrics import Metric
from imprint.evaluation.reports.findings import Findings
from imprint.plan import Question
from imprint.statistics import Estimate
from imprint.store.checkpoint import CHAOTIC
from imprint.validation.verdict import LEVEL, QUERIES, SEEDS, SOURCES

_CALM = 0.1  # chaos figures up to which removals stand out clearly
_OUTCOMES = {
    "sizes validated": "Ranks and sizes validated",
    "ranks validated": "Ranks validated, sizes not",
    "failed": "Failed",
    "undecided": "Undecided",
    "not validated": "Not validated",
}


@dataclass(frozen=True)
class Conclusion:
    """What a report says before it shows any figure, in sentences.

    outcome: that of the verdict, or "not validated" where nothing was tested.
    """

    outcome: str
    headline: str
    reason: str
    evidence: str
    asked: str
    agreement: tuple[str, ...]
    certainty: tuple[str, ...]
    advice: tuple[str, ...]


def conclude(findings: Findings) -> Conclusion:
    """Put what was found into words."""
    outcome, reason = _find_outcome(findings)
    return Conclusion(
        outcome,
        _OUTCOMES[outcome],
        reason,
        "" if findings.by_construction else findings.verdict.evidence,
        describe_question(findings),
        tuple(_describe_metric(findings, place) for place in range(len(findings.metrics))),
        tuple(_describe_certainty(findings)),
        tuple(_advise(findings, outcome)),
    )


def _find_outcome(findings: Findings) -> tuple[str, str]:
    """Return the outcome and its reason, as a sentence."""
    if findings.by_construction:
        return "not validated", (
            "The predictions are replays of single removals, and the ground truth repeats the same replays: they "
            "agree by construction, so this comparison tests nothing."
        )
    verdict = findings.verdict
    reason = f"{verdict.reason[:1].upper()}{verdict.reason[1:]}."
    if findings.across:
        reason += " Scores and ground truth answer different questions."
    return verdict.outcome, reason


def describe_question(findings: Findings) -> str:
    """Return the question that the scores answer, in a sentence a newcomer understands."""
    labels = findings.result.labels
    queries = count_of(len(findings.result), "query", "queries")
    steps = labels.details.get(LAST_STEPS)
    last = "" if steps is None else f" in its last {count_of(steps, 'step')}"
    endings: dict[Question, str] = {
        "this_run": f"if a source had had weight 0{last} in the very training run that made this model, and everything "
        "else had stayed the same? (Question: this run.)",
        "expected": "if a source were left out, on average over training runs like this one, which differ in their "
        "random seeds only? (Question: expected.)",
    }
    return f"How would the {labels.measure} of these {queries} change {endings[labels.question]}"


def _describe_metric(findings: Findings, place: int) -> str:
    """Return one figure of merit as a sentence, beside its ceiling and what guesses reach."""
    metric = findings.metrics[place]
    removals = count_of(len(findings.removals.names), "half" if findings.halves else "removal", _plural(findings))
    if math.isnan(metric.estimate.value):
        return f"The {metric.name} is undefined: scores or ground truth are constant."
    value = metric.estimate.format(2)
    if metric.name.startswith("slope"):
        return _describe_slope(metric.estimate)
    sentence = {
        "correlation of removals, mean over queries": f"Averaged over queries, the predicted and the actual effects of "
        f"the {removals} have a correlation of {value}",
        "rank correlation of removals, per query": f"For a single query, the rank correlation is {value} on average",
        "LDS": f"Over the {removals}, summed scores and the actual {findings.result.labels.measure} have a rank "
        f"correlation of {value} per query, on average (the linear datamodelling score)",
        "LOO": f"For a single query, predicted and actual effects of the {removals} have a correlation of {value} on "
        "average",
    }.get(metric.name, f"The {metric.name} is {value}")
    return f"{sentence}{_describe_limits(findings, metric, place)}."


def _plural(findings: Findings) -> str:
    return "halves" if findings.halves else "removals"


def _describe_limits(findings: Findings, metric: Metric, place: int) -> str:
    """Finish a sentence about a figure: what a perfect prediction would reach, and what guesses do."""
    parts = []
    if not math.isnan(metric.ceiling):
        parts.append(f"a perfect prediction would reach about {metric.ceiling:.2f} against this ground truth")
    for name, metrics in findings.guesses.items():
        if not math.isnan(guessed := metrics[place].estimate.value):
            parts.append(f"a guess by {'size' if name == 'size' else 'common words (TF-IDF)'} reaches {guessed:.2f}")
    return f"; {', '.join(parts)}" if parts else ""


def _describe_slope(slope: Estimate) -> str:
    return f"Actual effects are {slope.format(2)} times the predicted ones, each query about its mean (the slope)."


def _describe_certainty(findings: Findings) -> list[str]:
    """Return what is known about how sure the figures are."""
    truth, queries = findings.truth, len(findings.result)
    found = [_describe_runs(findings)]
    if queries > 1:
        levels = findings.metrics[0].over.replace("queries", f"the {queries:,} queries")
        found.append(f"In brackets: 95% intervals over {levels}.")
    if (chaos := findings.result.details.get("chaos")) is not None:
        found.append(_describe_chaos(chaos))
    if (judged := findings.verdict.figures.removals) < (made := len(findings.removals.names)):
        found.append(f"The verdict looks at {judged:,} of the {made:,} {_plural(findings)}, drawn at random.")
    if (validation := findings.result.labels.validation) is not None:
        found.append(f"The validation that the scores carry: {validation}.")
    if truth.question == "expected" and truth.runs > 1 and not all(math.isnan(m.ceiling) for m in findings.metrics):
        found.append("Ceilings are upper estimates, and rough ones if there are few runs.")
    return found


def _describe_runs(findings: Findings) -> str:
    truth = findings.truth
    subsets = "half" if findings.halves else "removal"
    how = "a recorded run was repeated" if truth.replayed else "a model was trained"
    if truth.question == "this_run":
        return (
            f"For every {subsets}, the recorded run was repeated once, with everything else equal: actual effects have "
            "no error from other seeds."
        )
    if truth.runs == 1:
        return f"For every {subsets}, {how} once: how noisy actual effects are is unknown, and there is no ceiling."
    return f"For every {subsets}, {how} in {truth.runs} runs: ± is their standard error, whiskers are 95% intervals."


def _describe_chaos(chaos: float) -> str:
    meaning = (
        "removals stand out clearly from chance"
        if chaos <= _CALM
        else "usable, but small effects drown in chance"
        if chaos <= CHAOTIC
        else "this run is chaotic, and most effects say more about chance than about the source"
    )
    return f"A tiny change of the run's start moves these queries {chaos:.2g} times as much as a removal: {meaning}."


def _advise(findings: Findings, outcome: str) -> list[str]:
    """Return what to do next, the most useful first."""
    verdict = findings.verdict
    if outcome == "not validated":
        return [
            "Trust single removals as far as the replay repeats its recording (`imprint inspect` shows the deviation).",
            "To test something that was not simulated, remove several sources at once: `imprint validate`, or `imprint "
            "retrain TASK --run FOLDER --kind unions --out truth/unions`.",
        ]
    found = []
    if findings.across:
        found.append(
            "Make ground truth of the question that the scores answer: `imprint retrain --run FOLDER` for this run, "
            "`imprint retrain --runs 3` for the mean over runs."
        )
    low, high = verdict.figures.slope_low, verdict.figures.slope_high
    if outcome == "sizes validated":
        found.append("Use the effects as they are, for queries like these. Others need a comparison of their own.")
        if verdict.calibrates and low is not None and high is not None and not low <= 1 <= high and not findings.across:
            found.append("Sizes are within a factor of two; `result.calibrate(truth)` brings them closer.")
    elif outcome == "ranks validated":
        found.append("Rely on the order of the sources, and not on the size of their effects.")
        if verdict.calibrates and not findings.across:
            found.append("The slope is known well enough to set the scale: `result.calibrate(truth)` applies it.")
    elif outcome == "failed":
        found += [
            "Do not use these effects, for credit least of all.",
            "Try other settings (`-p auto`, earlier checkpoints, a preconditioner for models trained with Adam), or "
            "record a training run and replay it, if you can afford one training per source.",
        ]
    return [*found, *_ask_for_more(findings, outcome)]


def _ask_for_more(findings: Findings, outcome: str) -> list[str]:
    """Return which queries, removals or runs are lacking for a decision."""
    figures, truth, found = findings.verdict.figures, findings.truth, []
    if figures.queries < QUERIES:
        found.append(f"Evaluate at least {QUERIES} queries; these are {figures.queries}.")
    if min(figures.sources, figures.removals) < SOURCES:
        found.append(f"Remove at least {SOURCES} different sources; these are {figures.sources}.")
    noisy = outcome == "undecided" and figures.agreement is not None and figures.agreement > LEVEL
    if truth.question == "expected" and (truth.runs < SEEDS or noisy):
        wanted = SEEDS if truth.runs < SEEDS else 2 * truth.runs
        found.append(f"Add runs to the ground truth: the same `imprint retrain`, with `--runs {wanted}`.")
    chaos = findings.result.details.get("chaos")
    if chaos is not None and chaos > CHAOTIC and findings.result.question == "this_run":
        found.append(
            "Ask for the expectation over seeds instead, which chaos does not blur: simulate from the checkpoints of "
            "the run."
        )
    if not found and outcome == "undecided":
        found.append("Remove larger sources, or several at once: `imprint retrain --kind unions`.")
    return found
