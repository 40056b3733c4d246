"""Describes an experiment by strings, as the command line, configuration files and manifests do.

Flags override a TOML file, which overrides a manifest. `imprint.cli.loading` loads the objects that the strings name.
"""

import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from imprint.display import suggest_names
from imprint.errors import ConfigurationError
from imprint.simulation.state_files import WEIGHTS, holds_weights
from imprint.store.reading import Store

NOTE = "imprint"
"""The key under which the command line keeps its own entry in a store's note."""

PER_EXAMPLE = "per-example"
"""Given instead of an import string: every training example is a source."""


def read_command(store: Store) -> "Experiment":
    """Read the names that a store was made with, to be shown but not loaded; empty where the note holds no names."""
    command = read_note(store.manifest.note).get("command")
    try:
        found = Experiment.from_values(command if isinstance(command, dict) else {}, "the manifest's command")
    except ConfigurationError:  # a note may hold anything
        return Experiment()
    texts = [getattr(found, name) or "" for name in _OBJECTS] + list(found.checkpoints)
    return Experiment() if any(text.startswith("-") for text in texts) else found  # it would be read as an option


def read_note(note: Any) -> dict[str, Any]:
    """Return the entry of the command line in a note; empty if the note is the caller's own."""
    found = note.get(NOTE) if isinstance(note, dict) else None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Experiment:
    """The settings of a command as strings and plain values; None stands for the default.

    task, data, sources, queries, collate_fn: import strings; `task` may also name a built-in setting, and `sources`
        may be "per-example".
    checkpoints: files or a Trainer's folders, or the import string of a list. Those with commas between or after them
        are of one of several training runs.
    run: the folder of a recorded run, or the import string of one.
    plan: fields of a `Plan`, which override the `plan` in the task's module.
    training_steps, training_batch: how long a training is, to compare a simulation with retraining.
    about: files with each source's owner, licence and address; "SOURCE=FILE" for a Croissant file of a source with
        another name.
    """

    task: str | None = None
    data: str | None = None
    sources: str | None = None
    queries: str | None = None
    collate_fn: str | None = None
    checkpoints: tuple[str, ...] = ()
    run: str | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    dtype: str | None = None
    memory: str | int | None = None
    hash_data: str | None = None
    device: str | None = None
    out: str | None = None
    training_steps: int | None = None
    training_batch: int | None = None
    about: tuple[str, ...] = ()

    @classmethod
    def from_toml(cls, path: Path) -> "Experiment":
        """Read settings from a TOML file; paths in it are relative to its folder."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        return cls.from_values(values, str(path)).relative_to(path.parent)

    def override_store(self, store: Store, library: Collection[str] = ()) -> "Experiment":
        """Fill in the plan, dtype and batch size of a store where they are not given.

        Names in a store are not used: loading them would let whoever made the store choose the code that runs here.
        Exceptions are the library's own: a task among the built-in settings, `library`, and "per-example" sources.
        """
        manifest, named = store.manifest, read_command(store)
        task = named.task if named.task in library else None
        sources = named.sources if named.sources == PER_EXAMPLE else None
        batch_size = manifest.execution.batch_size
        kept = Experiment(task=task, sources=sources, plan=manifest.plan.to_json(), dtype=manifest.dtype)
        return self.override(replace(kept, batch_size=batch_size))

    def find_unrepeated(self, store: Store, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Find the settings that a store was made with and that are not given here, by name."""
        theirs, found = read_command(store), {}
        for name in (*_OBJECTS, "checkpoints"):
            value = getattr(theirs, name)
            if name in names and value and not getattr(self, name):
                found[name] = value if isinstance(value, tuple) else (value,)
        return found

    @classmethod
    def from_values(cls, values: Mapping[str, Any], origin: str) -> "Experiment":
        """Read settings from a mapping; refuse unknown names and wrong types."""
        known = {f.name for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigurationError(f"{origin} has an unknown setting {name!r}{suggest_names(name, known)}")
            expected = _TYPES.get(name, str)
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ConfigurationError(
                    f"{origin}: {name} must be {_TYPE_NAMES.get(name, 'a string')}, got {value!r}."
                )
        given: dict[str, Any] = dict(values)
        if "checkpoints" in given:
            listed = [given["checkpoints"]] if isinstance(given["checkpoints"], str) else given["checkpoints"]
            runs = all(isinstance(run, list) and all(isinstance(file, str) for file in run) for run in listed)
            listed = [join_run(run) for run in listed] if runs else listed
            if not all(isinstance(item, str) for item in listed):
                raise ConfigurationError(
                    f"{origin}: checkpoints must be strings, or a list of strings for each run, got {listed!r}."
                )
            given["checkpoints"] = tuple(listed)
        if "about" in given:
            files = [given["about"]] if isinstance(given["about"], str) else given["about"]
            if not all(isinstance(file, str) for file in files):
                raise ConfigurationError(f"{origin}: about must be a list of strings, got {files!r}.")
            given["about"] = tuple(files)
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Return the names of the objects, for a manifest, which has the other settings already."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _OBJECTS if getattr(self, name) is not None}
        return {**values, **({"checkpoints": list(self.checkpoints)} if self.checkpoints else {})}

    def relative_to(self, folder: Path) -> "Experiment":
        """Make paths that are relative to `folder` relative to the current folder."""

        def resolve(text: str) -> str:
            path, colon, name = text.rpartition(":")
            if text == self.run and not colon:
                return os.path.normpath(folder / text)
            return f"{os.path.normpath(folder / path)}{colon}{name}" if path.endswith(".py") else text

        def resolve_checkpoint(text: str) -> str:
            return os.path.normpath(folder / text) if is_checkpoint(text, folder) else resolve(text)

        objects: dict[str, Any] = {name: resolve(value) for name in _OBJECTS if (value := getattr(self, name))}
        return replace(
            self,
            **objects,
            checkpoints=tuple(
                join_run(map(resolve_checkpoint, run)) if (run := split_run(each, folder)) else resolve_checkpoint(each)
                for each in self.checkpoints
            ),
            out=None if self.out is None else os.path.normpath(folder / self.out),
            about=tuple(_resolve_about(text, folder) for text in self.about),
        )

    def override_file(self, path: Path | None) -> "Experiment":
        """Fill in what is not given from a TOML file, if there is one."""
        return self if path is None else self.override(Experiment.from_toml(path))

    def override(self, other: "Experiment") -> "Experiment":
        """Fill in what is not given from `other`."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (None, (), {})}
        plan = (
            self.plan if self.plan.get("auto") else {**other.plan, **self.plan}
        )  # an automatic plan replaces the other
        return replace(other, **{**given, "plan": plan})


_OBJECTS = ("task", "data", "sources", "queries", "collate_fn", "run")
_WHOLE = ("batch_size", "training_steps", "training_batch")
_TYPES: dict[str, Any] = {
    "plan": dict,
    "memory": str | int,
    **dict.fromkeys(("checkpoints", "about"), list | tuple | str),
}
_TYPES |= dict.fromkeys(_WHOLE, int)
_TYPE_NAMES = {
    "plan": "a table",
    **dict.fromkeys(_WHOLE, "a whole number"),
    "memory": 'a number of bytes or a string such as "4GiB"',
    **dict.fromkeys(("checkpoints", "about"), "a list of strings"),
}


def is_checkpoint(text: str, folder: Path = Path()) -> bool:
    """Tell whether a setting names the file or the folder of a checkpoint, and not an object by an import string."""
    if Path(text).suffix in WEIGHTS:
        return True
    return (folder / text).is_dir() and (holds_weights(folder / text) or not text.isidentifier())


def split_run(text: str, folder: Path = Path()) -> tuple[str, ...]:
    """Split the checkpoints of one of several training runs, files or folders with commas between or after them.

    Anything else is of no run, and there are none.

    >>> split_run("a/1.safetensors,a/2.safetensors"), split_run("a/1.safetensors,"), split_run("a,b.safetensors")
    (('a/1.safetensors', 'a/2.safetensors'), ('a/1.safetensors',), ())
    """
    files = tuple(text.removesuffix(",").split(","))
    return files if "," in text and all(file and is_checkpoint(file, folder) for file in files) else ()


def join_run(run: Iterable[str]) -> str:
    """Join the checkpoints of a run as `split_run` splits them."""
    files = tuple(run)
    return ",".join(files) + "," * (len(files) == 1)


def split_about(text: str, folder: Path = Path()) -> tuple[str | None, str]:
    """Split what names a file about sources: into the source, if one is named, and the file.

    >>> split_about("owners.csv"), split_about("times=croissant.json")
    ((None, 'owners.csv'), ('times', 'croissant.json'))
    """
    source, equals, file = text.rpartition("=")
    return (source, file) if equals and not (folder / text).exists() else (None, text)


def _resolve_about(text: str, folder: Path) -> str:
    source, file = split_about(text, folder)
    place = os.path.normpath(folder / file)
    return place if source is None else f"{source}={place}"


def parse_plan(pairs: list[str]) -> dict[str, Any]:
    """Parse fields of a plan from strings such as "steps=100" and "lr=0.1,auto"; "auto" alone stands for `Plan.auto`.

    >>> parse_plan(["steps=100,200", "lr=auto", "keep_pair=true"])
    {'steps': [100, 200], 'lr': 'auto', 'keep_pair': True}
    >>> parse_plan(["auto", "directions=100"])
    {'auto': True, 'directions': 100}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if pair.strip() == "auto":
            name, equals, text = "auto", "=", "true"
        if not equals:
            raise ConfigurationError(f"{pair!r} is not a plan field: expected NAME=VALUE, such as steps=100, or auto.")
        values = [_parse_value(part) for part in text.split(",")]
        found[name.strip()] = values if len(values) > 1 else values[0]
    return found


def _parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    text = text.strip()
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
