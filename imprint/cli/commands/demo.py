"""Implements `imprint demo`."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from imprint.cli.commands.options import AsJson
from imprint.cli.terminal import console, errors, escape_markup, render_demo
from imprint.errors import StoreError
from imprint.runtime.threads import set_threads


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the report and its figures.")] = Path("imprint-demo"),
    split: Annotated[int, typer.Option(min=0, help="Which random division of the digits among the contributors.")] = 0,
    retrainings: Annotated[int, typer.Option(min=2, help="How many times to retrain without each contributor.")] = 24,
    json: AsJson = False,
) -> None:
    """Credit twelve contributors of handwritten digits, then check the predictions by retraining without each of them.

    Records the training of a small model and replays it without each contributor: what would this very model answer
    without them? Validates that, averages it over a few seeds, and compares the average with actual retraining. Takes
    about half a minute on one core. Writes `imprint-demo/report.html` and its figures.

    For example: `imprint demo --split 3 --out runs/demo-3`
    """
    from imprint.benchmarking.demo.experiment import run
    from imprint.benchmarking.demo.report import compare_suspicion, make_rows, make_statistics, write
    from imprint.benchmarking.settings import digits

    if out.exists() and not out.is_dir():
        raise StoreError(f"{out} is a file: give a folder for the report with --out.")
    errors.print("[bold]Twelve contributors, one of whom mislabels. Who moved which prediction?[/bold]")
    set_threads(digits.model())
    outcome = run(split, retrainings, log=lambda text: errors.print(f"  {text}", style="dim"))
    page = write(outcome, out)
    if json:
        contributors = [asdict(row) for row in make_rows(outcome)]
        found = {
            "contributors": contributors,
            "statistics": make_statistics(outcome),
            "suspicion": compare_suspicion(outcome),
        }
        labels = outcome.attribution.labels
        found["validation"] = outcome.comparison.to_json()
        found |= {"question": labels.question, "meaning": labels.meaning, "warnings": labels.warnings}
        typer.echo(dumps({"report": str(page), **found}))
        return
    console.print(render_demo(make_rows(outcome), make_statistics(outcome), outcome.attribution.labels))
    console.print(f"This run: {escape_markup(outcome.comparison.validation.verdict)}")
    console.print(escape_markup(compare_suspicion(outcome)))
    console.print(f"Report: [bold]{escape_markup(page)}[/bold]")
