"""The command line, `imprint`."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import imprint
from imprint.errors import ImprintError, StoreError

app = typer.Typer(
    help="How much does each data source move this prediction? Answered with forward passes only.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
console = Console()


def _version(asked: bool) -> None:
    if asked:
        console.print(f"imprint {imprint.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and its pictures.")] = Path("imprint-demo"),
    split: Annotated[int, typer.Option(min=0, help="Which division of the digits among the contributors.")] = 0,
    retrainings: Annotated[int, typer.Option(min=2, help="How often to retrain without each contributor.")] = 24,
) -> None:
    """Credit twelve contributors of handwritten digits, then check it by really removing them.

    Trains a small model, simulates the imprint of every contributor, predicts what removing each of them would do to
    held-out predictions, and retrains without each to compare. Takes about a minute on two cores and writes
    `imprint-demo/report.html`.

    Example: `imprint demo --split 3 --out runs/demo-3`
    """
    from imprint.demo.experiment import run
    from imprint.demo.report import rows, statistics, write

    if out.exists() and not out.is_dir():
        raise StoreError(f"{out} is a file: give a folder for the report.")
    console.print("[bold]Twelve contributors, one of whom mislabels. Who moved which prediction?[/bold]")
    outcome = run(split, retrainings, say=lambda text: console.print(f"  {text}", style="dim"))
    table = Table(title="Change of the mean held-out loss (nats) if the contributor were removed")
    for column in ("contributor", "examples", "predicted", "actual", "by prediction"):
        table.add_column(column, justify="left" if column in ("contributor", "by prediction") else "right")
    for row in rows(outcome):
        name = f"{row.name} (mislabels a third)" if row.mislabels else row.name
        actual = f"{row.actual:+.4f} ± {row.error:.4f}"
        style = "red" if row.mislabels else None
        table.add_row(name, str(row.size), f"{row.predicted:+.4f}", actual, row.verdict, style=style)
    console.print(table)
    figures = Table("", "imprint", "guess by size", "ceiling", title="Predicted against actual, 95% intervals")
    for line in statistics(outcome):
        figures.add_row(*(escape(text) for text in line))
    console.print(figures)
    page = write(outcome, out)
    console.print(f"Report: [bold]{escape(str(page))}[/bold]")


StorePath = Annotated[Path, typer.Argument(help="Folder of a store, as given to `simulate(out=...)`.")]


@app.command()
def inspect(
    store: StorePath,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for programs.")] = False,
) -> None:
    """Show what a store holds: plan, sources, sizes, and the figures measured while it was made.

    Example: `imprint inspect runs/news`
    """
    from imprint.inspection import inspected

    values = inspected(imprint.Store(store))
    if json:
        typer.echo(dumps(values))
        return
    plan = {name: value for name, value in values["plan"].items() if value is not None}
    head = Table(title=f"Store {escape(values['path'])}", show_header=False)
    for name, value in (
        ("sources", f"{values['sources']:,} of {values['n']:,} training examples"),
        ("imprints", f"{values['parameters']:,} values each, {values['dtype']}; {values['bytes']:,} bytes in all"),
        ("plan", ", ".join(f"{name}={value}" for name, value in plan.items())),
        ("readouts", ", ".join(values["readouts"])),
        ("made", f"{values['created']} by torch {values['versions']['torch']}"),
    ):
        head.add_row(name, escape(value))
    console.print(head)
    columns = ("weight", "steps", "lr", "damping", "ε", "curvature", "‖I − ηH‖", "drift", "linearity", "‖u‖ median")
    table = Table("checkpoint", *columns)
    for index, checkpoint in enumerate(values["checkpoints"]):
        table.add_row(str(index), *_cells(checkpoint))
    console.print(table)


def _cells(checkpoint: dict[str, Any]) -> list[str]:
    """One checkpoint's row of figures; a dash for what it does not have."""
    figures = checkpoint["figures"]
    low, high = figures.get("curvature", (None, None))
    values = [checkpoint[name] for name in ("weight", "steps", "lr", "damping", "epsilon")]
    cells = ["–" if value is None else f"{value:.4g}" for value in values]
    cells.append("–" if low is None else f"{low:.3g} … {high:.3g}")
    more = (
        figures.get("stability"),
        figures.get("drift"),
        figures.get("linearity", {}).get("median"),
        checkpoint.get("imprint_norms", {}).get("median"),
    )
    return cells + ["–" if value is None else f"{value:.3g}" for value in more]


@app.command()
def verify(store: StorePath) -> None:
    """Check every file of a store against its checksum. Leaves with 1 if one is damaged or missing.

    Example: `imprint verify runs/news`
    """
    opened = imprint.Store(store)
    opened.verify()
    console.print(f"{escape(str(opened.path))}: all files are as they were written ({opened.bytes:,} bytes).")


def main() -> None:
    """Run the command line; errors of this library are one line, not a traceback."""
    try:
        app()
    except ImprintError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        raise SystemExit(1) from None
