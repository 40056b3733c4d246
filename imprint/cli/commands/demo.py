"""`imprint demo`."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from imprint.cli.commands.options import AsJson
from imprint.cli.terminal import console, errors, marked, shown_demo
from imprint.errors import StoreError
from imprint.runtime.threads import set_threads


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and its pictures.")] = Path("imprint-demo"),
    split: Annotated[int, typer.Option(min=0, help="Which division of the digits among the contributors.")] = 0,
    retrainings: Annotated[int, typer.Option(min=2, help="How often to retrain without each contributor.")] = 24,
    json: AsJson = False,
) -> None:
    """Credit twelve contributors of handwritten digits, then check it by really removing them.

    Trains a small model, simulates the imprint of every contributor, predicts what removing each of them would do to
    held-out predictions, and retrains without each to compare. Takes about a minute on two cores and writes
    `imprint-demo/report.html`.

    For example: `imprint demo --split 3 --out runs/demo-3`
    """
    from imprint.benchmarking.demo.experiment import run
    from imprint.benchmarking.demo.report import rows, statistics, suspicion, write
    from imprint.benchmarking.settings import digits

    if out.exists() and not out.is_dir():
        raise StoreError(f"{out} is a file: give a folder for the report.")
    errors.print("[bold]Twelve contributors, one of whom mislabels. Who moved which prediction?[/bold]")
    set_threads(digits.model())
    outcome = run(split, retrainings, say=lambda text: errors.print(f"  {text}", style="dim"))
    page = write(outcome, out)
    if json:
        contributors = [asdict(row) for row in rows(outcome)]
        found = {"contributors": contributors, "statistics": statistics(outcome), "suspicion": suspicion(outcome)}
        found |= {"warnings": outcome.attribution.warnings}
        typer.echo(dumps({"report": str(page), **found}))
        return
    console.print(shown_demo(rows(outcome), statistics(outcome), outcome.attribution.warnings))
    console.print(marked(suspicion(outcome)))
    console.print(f"Report: [bold]{marked(page)}[/bold]")
