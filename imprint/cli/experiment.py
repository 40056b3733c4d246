"""What to work on, named by strings: for the command line, configuration files, and manifests that are replayed.

Settings come from flags, a TOML file or a manifest, one put over the other; `imprint.cli.loading` finds what they name.
"""

import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from imprint.errors import ConfigurationError
from imprint.store.reading import Store

NOTE = "imprint"
"""Under which key of a store's note the command line keeps its own."""


PER_EXAMPLE = "per-example"
"""The sources that need no name: every training example is one."""


def named_by(store: Store) -> "Experiment":
    """What a store says that it was made with, as texts to show; nothing of what is no name."""
    command = noted(store.manifest.note).get("command")
    try:
        found = Experiment.from_values(command if isinstance(command, dict) else {}, "the manifest's command")
    except ConfigurationError:  # a note may say anything
        return Experiment()
    texts = [getattr(found, name) or "" for name in _OBJECTS] + list(found.checkpoints)
    return Experiment() if any(text.startswith("-") for text in texts) else found  # which would be an option


def noted(note: Any) -> dict[str, Any]:
    """What the command line has kept in a note; nothing, where the note is somebody else's."""
    found = note.get(NOTE) if isinstance(note, dict) else None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Experiment:
    """The settings of a command, as strings and plain values; None is left to its default.

    task, data, sources, queries, collate_fn: import strings; `task` may also be a ready-made setting, `sources`
        "per-example".
    checkpoints: .safetensors files, or one import string of a list.
    plan: fields of a `Plan`, over those of a `plan` in the task's module.
    """

    task: str | None = None
    data: str | None = None
    sources: str | None = None
    queries: str | None = None
    collate_fn: str | None = None
    checkpoints: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    dtype: str | None = None
    memory: str | int | None = None
    hash_data: str | None = None
    device: str | None = None
    out: str | None = None

    @classmethod
    def from_toml(cls, path: Path) -> "Experiment":
        """The settings in a file; its paths are relative to its folder."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        return cls.from_values(values, str(path)).beside(path.parent)

    def over_store(self, store: Store, library: Collection[str] = ()) -> "Experiment":
        """These settings over those of a store: its plan, dtype and batch size, and no more than that of its names.

        Nothing that a store names is loaded, since whoever made the store would decide what runs here. What is the
        library's own stays: a task that is one of the `library`'s settings, and "per-example" sources.
        """
        manifest, named = store.manifest, named_by(store)
        task = named.task if named.task in library else None
        sources = named.sources if named.sources == PER_EXAMPLE else None
        batch_size = manifest.execution.batch_size
        kept = Experiment(task=task, sources=sources, plan=manifest.plan.to_json(), dtype=manifest.dtype)
        return self.over(replace(kept, batch_size=batch_size))

    def unrepeated(self, store: Store, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """What a store was made with, of these settings, that is not given here: by setting."""
        theirs, found = named_by(store), {}
        for name in (*_OBJECTS, "checkpoints"):
            value = getattr(theirs, name)
            if name in names and value and not getattr(self, name):
                found[name] = value if isinstance(value, tuple) else (value,)
        return found

    @classmethod
    def from_values(cls, values: Mapping[str, Any], origin: str) -> "Experiment":
        """Settings from a mapping; unknown names and wrong types are errors."""
        known = {f.name for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigurationError(f"{origin} has an unknown setting {name!r}{close_matches(name, known)}")
            expected = _KINDS.get(name, str)
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ConfigurationError(f"{origin}: {name} must be {_KIND_NAMES.get(name, 'a text')}, got {value!r}.")
        given: dict[str, Any] = dict(values)
        if "checkpoints" in given:
            listed = [given["checkpoints"]] if isinstance(given["checkpoints"], str) else given["checkpoints"]
            if not all(isinstance(item, str) for item in listed):
                raise ConfigurationError(f"{origin}: checkpoints must be texts, got {listed!r}.")
            given["checkpoints"] = tuple(listed)
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """What names the objects, for a manifest: the rest stands there already."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _OBJECTS if getattr(self, name) is not None}
        return {**values, **({"checkpoints": list(self.checkpoints)} if self.checkpoints else {})}

    def beside(self, folder: Path) -> "Experiment":
        """The same with its paths, which were relative to `folder`, relative to where we are."""

        def moved(text: str) -> str:
            path, colon, name = text.rpartition(":")
            if text.endswith(".safetensors"):
                return os.path.normpath(folder / text)
            return f"{os.path.normpath(folder / path)}{colon}{name}" if path.endswith(".py") else text

        objects: dict[str, Any] = {name: moved(value) for name in _OBJECTS if (value := getattr(self, name))}
        return replace(
            self,
            **objects,
            checkpoints=tuple(map(moved, self.checkpoints)),
            out=None if self.out is None else os.path.normpath(folder / self.out),
        )

    def over_file(self, path: Path | None) -> "Experiment":
        """These settings over those of a TOML file, if there is one."""
        return self if path is None else self.over(Experiment.from_toml(path))

    def over(self, other: "Experiment") -> "Experiment":
        """These settings where they are given, those of `other` elsewhere."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (None, (), {})}
        plan = self.plan if self.plan.get("auto") else {**other.plan, **self.plan}  # what is chosen is chosen anew
        return replace(other, **{**given, "plan": plan})


_OBJECTS = ("task", "data", "sources", "queries", "collate_fn")
_KINDS: dict[str, Any] = {"plan": dict, "batch_size": int, "memory": str | int, "checkpoints": list | tuple | str}
_KIND_NAMES = {
    "plan": "a table",
    "batch_size": "a whole number",
    "memory": 'a number of bytes or a text such as "4GiB"',
    "checkpoints": "a list of texts",
}


def plan_values(pairs: list[str]) -> dict[str, Any]:
    """Fields of a plan from texts such as "steps=100" and "lr=0.1,auto"; "auto" alone stands for `Plan.auto`.

    >>> plan_values(["steps=100,200", "lr=auto", "keep_pair=true"])
    {'steps': [100, 200], 'lr': 'auto', 'keep_pair': True}
    >>> plan_values(["auto", "directions=100"])
    {'auto': True, 'directions': 100}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if pair.strip() == "auto":
            name, equals, text = "auto", "=", "true"
        if not equals:
            raise ConfigurationError(f"{pair!r} sets nothing: expected NAME=VALUE, such as steps=100, or auto.")
        values = [_value(part) for part in text.split(",")]
        found[name.strip()] = values if len(values) > 1 else values[0]
    return found


def _value(text: str) -> Any:
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


def close_matches(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: what may have been meant, or what there is.

    >>> close_matches("trian", ["train", "task"]), close_matches("x", ["train"]), close_matches("x", [])
    ('; did you mean train?', '; there are train.', '.')
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {', '.join(sorted(known)[:12])}." if known else "."
