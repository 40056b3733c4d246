"""The command line, `imprint`.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 refused or failed, with a
message, 2 a wrong command line, 130 interrupted.
"""

import logging
import warnings
from typing import Annotated, Any

import typer
from rich.markup import escape

import imprint
from imprint.commands.demo import demo
from imprint.commands.evaluation import evaluate, retrain
from imprint.commands.stores import attribute, check, inspect, simulate, verify
from imprint.errors import ImprintError
from imprint.terminal import console, errors

app = typer.Typer(
    help="How much does each data source move this prediction? Answered with forward passes only.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (demo, check, simulate, attribute, inspect, verify, retrain, evaluate):
    app.command()(command)


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


def _show_warning(message: Warning | str, *origin: Any, **more: Any) -> None:
    _one_line("[yellow]warning:[/yellow]", message)


def _one_line(head: str, message: Exception | str) -> None:
    text = " ".join(line.strip() for line in str(message).splitlines())
    errors.print(f"{head} {escape(text)}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; errors of this library are one line, not a traceback."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    warnings.showwarning = _show_warning
    try:
        app()
    except ImprintError as error:
        _one_line("[red]error:[/red]", error)
        raise SystemExit(1) from None
