"""Asks the user to repeat the names in a store before anything is loaded.

A store may come from anybody, and loading what it names would run code that its author chose. Commands take the plan
and the precision from it; names of code and files are only shown, with the command that repeats them.
"""

import shlex
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import typer

from imprint.benchmarking.settings.catalogue import SETTINGS
from imprint.cli.experiment import Experiment
from imprint.cli.terminal import errors, escape_markup
from imprint.display import for_terminal
from imprint.errors import ConfigurationError
from imprint.store.reading import Store

_OPTIONS = {"collate_fn": "collate", "checkpoints": "checkpoint"}  # settings whose options have other names


def merge_with_store(given: Experiment, store: Store, names: Collection[str], context: typer.Context) -> Experiment:
    """Fill in the plan of a store; refuse if the store names one of `names` and the command line does not repeat it.

    Built-in settings are the library's own code, so they are taken from the store, and shown.
    """
    merged = given.override_store(store, SETTINGS)
    options: dict[str, Any] = {str(parameter.name): parameter for parameter in context.command.params}
    if left := merged.find_unrepeated(store, names):
        words = _format_options({_OPTIONS.get(name, name): values for name, values in left.items()}, options)
        raise ConfigurationError(
            f"{store.path} was made with {' '.join(words)}; code and files that a store names are not loaded on their "
            "own. If you trust it, run: "
            f"{' '.join([format_command(context), *words])}"
        )
    if merged.task is None:
        flag = "" if _is_argument(options["task"]) else "--task "
        raise ConfigurationError(f"{store.path} was made from Python and names no task: give {flag}FILE.py:task.")
    if given.task is None:
        errors.print(f"using the task that the store was made with: {escape_markup(merged.task)}", soft_wrap=True)
    return merged


def format_command(context: typer.Context) -> str:
    """Write the command that runs as it could be typed again: its arguments, then its options."""
    options: dict[str, Any] = {str(parameter.name): parameter for parameter in context.command.params}
    given = sorted(_read_options(context).items(), key=lambda pair: not _is_argument(options[pair[0]]))
    return " ".join([context.command_path, *_format_options(dict(given), options)])


def _read_options(context: typer.Context) -> dict[str, tuple[Any, ...]]:
    """Read the options that were given on the command line, by name."""
    found = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
    return found


def _format_options(values: Mapping[str, tuple[Any, ...]], options: Mapping[str, Any]) -> list[str]:
    """Write options as words of a command line, quoted for a shell and safe to show."""
    words = []
    for name, items in values.items():
        option = options[name]
        for item in items:
            text = shlex.quote(for_terminal(item.value if isinstance(item, Enum) else item))
            if isinstance(item, bool):
                words.append(max(option.opts if item else option.secondary_opts, key=len))
            else:
                words += [text] if _is_argument(option) else [max(option.opts, key=len), text]
    return words


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")
