"""Runs the command line, `imprint`.

Results go to standard output, everything else to standard error. With IMPRINT_TRACEBACK=1 errors come with a full
traceback.
"""

import logging
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.commands.access import access
from imprint.cli.commands.attributing import attribute
from imprint.cli.commands.bench import bench, sweep
from imprint.cli.commands.changing import drop, update
from imprint.cli.commands.comparing import compare
from imprint.cli.commands.credit import credit
from imprint.cli.commands.demo import demo
from imprint.cli.commands.evaluation import evaluate
from imprint.cli.commands.export import export
from imprint.cli.commands.inside import inside
from imprint.cli.commands.merging import merge
from imprint.cli.commands.retraining import retrain
from imprint.cli.commands.serving import serve
from imprint.cli.commands.signing import keys, sign
from imprint.cli.commands.stores import check, describe, inspect, simulate
from imprint.cli.commands.suspecting import suspects
from imprint.cli.commands.validation import validate
from imprint.cli.commands.verification import verify
from imprint.cli.loading import user_frames
from imprint.cli.terminal import console, errors, escape_markup
from imprint.display import for_terminal
from imprint.errors import ImprintError, first_line

_EXIT_STATUS = (
    "Exit status: 0 on success; 1 if the command was refused or failed (standard error gives the reason); 2 for an "
    "invalid command line; 130 if interrupted."
)

app = typer.Typer(
    help="""Measure how much each data source moves a model's predictions, with forward passes only.

    A source is a training example, or a named group of them. `imprint simulate` computes once how each source moves the
    parameters of the model, its imprint, and writes the imprints to a store. `imprint attribute` then reads out the
    effect of every source on any query.

    Start with `imprint demo`, or with `imprint check my_model.py:task` for a model of your own.
    """,
    epilog=_EXIT_STATUS,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(
        demo,
        check,
        simulate,
        update,
        drop,
        merge,
        attribute,
        inside,
        compare,
        suspects,
        inspect,
        describe,
        verify,
        validate,
    ),
    *(export, retrain, evaluate, bench, sweep, keys, sign, serve),
)
for command in _COMMANDS:
    app.command(epilog=_EXIT_STATUS)(command)
app.add_typer(credit, name="credit", epilog=_EXIT_STATUS)
app.add_typer(access, name="access", epilog=_EXIT_STATUS)

_TRACEBACK = "IMPRINT_TRACEBACK"


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"imprint {imprint.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _show_warning(message: Warning | str, *origin: Any, **more: Any) -> None:
    _print_line("[yellow]warning:[/yellow]", message)


def _print_line(head: str, message: Exception | str) -> None:
    text = " ".join(line.strip() for line in str(message).splitlines())
    errors.print(f"{head} {escape_markup(text)}", highlight=False, soft_wrap=True)


class _SafeFormatter(logging.Formatter):
    """Makes log records safe to print: a message becomes one line, a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (named by logging)
        record.message = for_terminal(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(for_terminal, super().format(record).split("\n")))


def main() -> None:
    """Run the command line; print this library's errors as one line, and errors in user code with their own frames."""
    handler = logging.StreamHandler()
    handler.setFormatter(_SafeFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    warnings.showwarning = _show_warning
    try:
        app()
    except ImprintError as error:
        if os.environ.get(_TRACEBACK):
            raise
        _print_line("[red]error:[/red]", error)
        raise SystemExit(1) from None
    except Exception as error:
        theirs = user_frames(error)
        if os.environ.get(_TRACEBACK) or not theirs:
            raise
        _print_line("[red]error:[/red]", first_line(error))
        notes, frames = getattr(error, "__notes__", []), "".join(traceback.format_list(theirs)).rstrip()
        details = "\n".join([*notes, frames, f"({_TRACEBACK}=1 shows the full traceback)"])
        details = "\n".join(map(for_terminal, details.split("\n")))
        errors.print(details, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
