"""The command line, `imprint`.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 refused or failed, with a
message, 2 a wrong command line, 130 interrupted. With IMPRINT_TRACEBACK=1 an error comes with all of its traceback.
"""

import logging
import os
import traceback
import warnings
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.commands.bench import bench, sweep
from imprint.cli.commands.demo import demo
from imprint.cli.commands.evaluation import evaluate, retrain
from imprint.cli.commands.export import export
from imprint.cli.commands.stores import attribute, check, inspect, simulate, verify
from imprint.cli.loading import own_frames
from imprint.cli.terminal import console, errors, marked
from imprint.display import for_terminal
from imprint.errors import ImprintError, first_line

app = typer.Typer(
    help="How much does each data source move this prediction? Answered with forward passes only.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (demo, check, simulate, attribute, inspect, verify, export, retrain, evaluate, bench, sweep):
    app.command()(command)


_TRACEBACK = "IMPRINT_TRACEBACK"


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
    errors.print(f"{head} {marked(text)}", highlight=False, soft_wrap=True)


class _Clean(logging.Formatter):
    """Log records have names and paths in them too: a message is one line, a traceback keeps its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the name is that of logging)
        record.message = for_terminal(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(for_terminal, super().format(record).split("\n")))


def main() -> None:
    """Run the command line; errors of this library are one line, those of the user's code have its own frames."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Clean("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    warnings.showwarning = _show_warning
    try:
        app()
    except ImprintError as error:
        if os.environ.get(_TRACEBACK):
            raise
        _one_line("[red]error:[/red]", error)
        raise SystemExit(1) from None
    except Exception as error:
        theirs = own_frames(error)
        if os.environ.get(_TRACEBACK) or not theirs:
            raise
        _one_line("[red]error:[/red]", first_line(error))
        notes, frames = getattr(error, "__notes__", []), "".join(traceback.format_list(theirs)).rstrip()
        told = "\n".join([*notes, frames, f"({_TRACEBACK}=1 shows all of it)"])
        told = "\n".join(map(for_terminal, told.split("\n")))
        errors.print(told, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
