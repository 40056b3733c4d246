"""Writes the demo's report, with the story of its contributors, and prepares the table for the terminal."""

from dataclasses import dataclass
from pathlib import Path

from imprint.benchmarking.demo.experiment import ATTRIBUTING, SEEDS, SIMULATING, Outcome
from imprint.benchmarking.demo.figures import draw
from imprint.evaluation.removal import RemovalCheck
from imprint.evaluation.reports.illustrations import Illustrations
from imprint.evaluation.reports.page import Preface, write_report


@dataclass(frozen=True)
class Row:
    """One contributor in the table; effects are changes of the mean loss if it were removed.

    this_run: the effect on the model of the recorded run; `predicted` that expected over seeds.
    error: two standard errors over retrainings.
    loss: the mean training loss of its examples.
    """

    name: str
    size: int
    this_run: float
    predicted: float
    actual: float
    error: float
    mislabels: bool
    loss: float


def make_rows(outcome: Outcome) -> list[Row]:
    """Return the contributors, most helpful first by prediction."""
    check = outcome.check
    predicted, actual = check.predicted.mean(0), check.truth.mean(0)
    own = outcome.this_run.removal_effect.double().mean(0).tolist()
    error = 2 * check.standard_error
    bad = outcome.setting.mislabeller
    table = [
        Row(name, size, own[i], float(predicted[i]), float(actual[i]), float(error[i]), i == bad, outcome.losses[i])
        for i, (name, size) in enumerate(zip(outcome.sources.names, outcome.sources.sizes, strict=True))
    ]
    return sorted(table, key=lambda row: -row.predicted)


def make_statistics(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """Return (name, Imprint, guess by size, ceiling) for each statistic that the demo reports."""
    bad = outcome.setting.mislabeller
    ours, sizes = outcome.check, outcome.by_size

    def correlation(what: str, ours: RemovalCheck, sizes: RemovalCheck) -> tuple[str, str, str, str]:
        return what, str(ours.correlation), str(sizes.correlation), f"{ours.ceiling:.2f}"

    return [
        correlation("correlation over contributors", ours, sizes),
        correlation("the same without the mislabeller", ours.without(bad), sizes.without(bad)),
        (
            "rank correlation per query",
            str(ours.rank_correlation),
            str(sizes.rank_correlation),
            f"{ours.rank_ceiling:.2f}",
        ),
        ("slope of actual on predicted", str(ours.mean_slope), "–", "1.00"),
    ]


def compare_suspicion(outcome: Outcome) -> str:
    """Say whom Imprint and plain loss suspect of wrong labels, and which of them is right."""
    names, bad = outcome.sources.names, outcome.setting.mislabeller
    ours, plain = outcome.most_harmful, outcome.highest_loss
    right = {
        (True, True): "both are right, and plain loss needs no simulation",
        (True, False): "Imprint is right",
        (False, True): "plain loss is right",
        (False, False): f"both are wrong: it is {names[bad]}",
    }[ours == bad, plain == bad]
    return (
        f"Who mislabels? Imprint, by the predicted effect: {names[ours]}. Plain loss, by the mean training loss: "
        f"{names[plain]}. Here {right}."
    )


def write(outcome: Outcome, folder: Path) -> Path:
    """Write report.html, and figures for use elsewhere; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(outcome, folder)
    queries = outcome.setting.queries
    pictures = -queries[0].reshape(-1, 8, 8)  # ink on paper
    illustrations = Illustrations(pictures, labels=queries[1].tolist())
    return write_report(
        outcome.attribution,
        outcome.truth,
        folder / "report.html",
        illustrations=illustrations,
        preface=_introduce(outcome),
        progress=False,
    )


def _introduce(outcome: Outcome) -> Preface:
    """Tell the story of the demo."""
    bad, n = outcome.setting.mislabeller, outcome.attribution.labels.n
    found = "and indeed the one who mislabels" if outcome.most_harmful == bad else "but another one mislabels"
    ours, guess = outcome.check.without(bad).correlation, outcome.by_size.without(bad).correlation
    milliseconds = 1000 * outcome.seconds[ATTRIBUTING] / len(outcome.attribution)
    return Preface(
        title="Who moved this prediction?",
        lead=f"Twelve contributors supplied {n:,} handwritten digits; one of them mislabelled a third of its images. "
        "Imprint recorded the training and replayed it without each contributor: what would this very model answer "
        f"without them? Averaged over {SEEDS} seeds, the replays predict what models like it would answer. Then models "
        f"were retrained without each contributor, {outcome.truth.runs} times, to see how well these predictions hold. "
        "Effects are changes of the cross-entropy, in nats.",
        tiles=[
            (outcome.sources.names[outcome.most_harmful], f"predicted to be the most harmful contributor, {found}"),
            (f"{milliseconds:.2f} ms", "per query for all twelve contributors, with forward passes only"),
            (
                f"{outcome.seconds[SIMULATING]:.1f} s",
                "to replay the training run without each contributor, all of them at once; the ground truth took "
                f"{outcome.retrained} further training runs",
            ),
        ],
        notes=[
            (
                "This very model",
                "The table's column *this run* has what removing a contributor would have done to the one model that "
                f"was recorded. {_capitalise(str(outcome.comparison.validation.verdict))}. The other columns are about "
                "models like it, on average over seeds; the luck of one seed is the difference.",
            ),
            (
                "Who mislabels?",
                f"{compare_suspicion(outcome)} Size alone says nothing about harm: a guess by size credits the "
                f"mislabeller for every wrong label. Without the mislabeller, the correlation is {ours}, and that of a "
                f"guess by size {guess}. The attributed model classifies {100 * outcome.accuracy:.1f}% of the held-out "
                "digits correctly.",
            ),
        ],
        marks={outcome.sources.ids[bad]: "mislabels a third"},
        columns={
            "this run": [f"{effect:+.4f}" for effect in outcome.this_run.removal_effect.double().mean(0).tolist()],
            "mean training loss": [f"{loss:.3f}" for loss in outcome.losses],
        },
        command=f"imprint demo --split {outcome.split}, on scikit-learn's bundled digits",
    )


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]
