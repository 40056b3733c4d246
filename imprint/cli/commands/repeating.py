"""Has the user repeat what a store names, before any of it is loaded.

A store may come from anybody, and loading what it names would run code that its maker chose. Commands take its plan and
precision from it; names of code and of files are shown, with the command that repeats them.
"""

import shlex
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import typer

from imprint.benchmarking.settings.catalogue import SETTINGS
from imprint.cli.experiment import Experiment
from imprint.cli.terminal import errors, marked
from imprint.display import for_terminal
from imprint.errors import ConfigurationError
from imprint.store.reading import Store

_OPTIONS = {"collate_fn": "collate", "checkpoints": "checkpoint"}  # options that are not called as their settings are


def over_store(given: Experiment, store: Store, names: Collection[str], context: typer.Context) -> Experiment:
    """The settings as given, over the plan of a store; refused where one of `names` is the store's and not repeated.

    The ready-made settings are the library's own code: they are taken from a store as they are, and shown.
    """
    merged = given.over_store(store, SETTINGS)
    options: dict[str, Any] = {str(parameter.name): parameter for parameter in context.command.params}
    if left := merged.unrepeated(store, names):
        words = _words({_OPTIONS.get(name, name): values for name, values in left.items()}, options)
        raise ConfigurationError(
            f"{store.path} was made with {' '.join(words)}, and nothing that a store names is loaded by itself. If you "
            f"trust it, repeat it: {' '.join([context.command_path, *_words(_given(context), options), *words])}"
        )
    if merged.task is None:
        flag = "" if _is_argument(options["task"]) else "--task "
        raise ConfigurationError(f"{store.path} was made by Python code and names no task: give {flag}FILE.py:task.")
    if given.task is None:
        errors.print(f"the task is {marked(merged.task)}, by which the store was made", soft_wrap=True)
    return merged


def _given(context: typer.Context) -> dict[str, tuple[Any, ...]]:
    """What stands on the command line, by option."""
    found = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
    return found


def _words(values: Mapping[str, tuple[Any, ...]], options: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give these values: quoted for a shell, and safe to show."""
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
