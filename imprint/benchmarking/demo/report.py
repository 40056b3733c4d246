"""Writes the demo's report, one self-contained page, and prepares the table for the terminal."""

import base64
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from imprint.benchmarking.demo.experiment import Outcome
from imprint.benchmarking.demo.figures import draw
from imprint.display import for_terminal
from imprint.errors import MissingExtra
from imprint.evaluation.removal import RemovalCheck
from imprint.store.files import write as write_file


@dataclass(frozen=True)
class Row:
    """One contributor in the table; effects are changes of the mean loss if it were removed.

    error: two standard errors over retrainings.
    loss: the mean training loss of its examples.
    """

    name: str
    size: int
    predicted: float
    actual: float
    error: float
    mislabels: bool
    loss: float

    @property
    def verdict(self) -> str:
        return "helps" if self.predicted > 0 else "harms"


def make_rows(outcome: Outcome) -> list[Row]:
    """Return the contributors, most helpful first by prediction."""
    check = outcome.check
    predicted, actual = check.predicted.mean(0), check.truth.mean(0)
    error = 2 * check.standard_error
    bad = outcome.setting.mislabeller
    table = [
        Row(name, size, float(predicted[i]), float(actual[i]), float(error[i]), i == bad, outcome.losses[i])
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
    """Write report.html and its figures, and return the path of the page."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra("the report", "report") from error
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(outcome, folder)
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: for_terminal(value) if isinstance(value, str) else value,
    )
    from imprint import __version__ as version

    template = environment.from_string(
        files("imprint.benchmarking.demo").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    page = folder / "report.html"
    text = template.render(
        outcome=outcome,
        rows=make_rows(outcome),
        statistics=make_statistics(outcome),
        suspicion=compare_suspicion(outcome),
        culprit=outcome.sources.names[outcome.most_harmful],
        made=f"{datetime.now(UTC):%Y-%m-%d}, imprint {version}",
        found=outcome.most_harmful == outcome.setting.mislabeller,
        pictures={name: base64.b64encode(file.read_bytes()).decode() for name, file in pictures.items()},
    )
    write_file(page, lambda path: path.write_text(text, encoding="utf-8"))
    return page
