"""Manifests with other values in them, and checksums that are right all the same."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from imprint.store.values import sealed


def resealed(values: Any) -> Any:
    """A manifest with a checksum that is right again."""
    if not isinstance(values, dict):
        return values
    try:
        return sealed({name: value for name, value in values.items() if name != "sha256"})
    except ValueError:  # NaN has no checksum
        return values


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON document has values."""
    yield path
    if isinstance(values, dict | list):
        for key in values if isinstance(values, dict) else range(len(values)):
            yield from places(values[key], (*path, key))


def changed(values: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with another value at a place."""
    if not path:
        return change(values)
    copy = dict(values) if isinstance(values, dict) else list(values)
    copy[path[0]] = changed(values[path[0]], path[1:], change)
    return copy


def manifest_of(sound: Path) -> Any:
    return json.loads((sound / "manifest.json").read_text())


def rewrite(folder: Path, *path: Any, value: Any) -> None:
    """Change one value of the manifest, with a checksum that is right again."""
    values = resealed(changed(manifest_of(folder), path, lambda _: value))
    (folder / "manifest.json").write_text(json.dumps(values))


def recount(folder: Path, name: str) -> None:
    """Make the manifest say of a file what it now is: only its content can give it away."""
    content, manifest = (folder / name).read_bytes(), manifest_of(folder)
    (place,) = [path[:-1] for path in places(manifest) if path[-1:] == ("path",) and value_at(manifest, path) == name]
    rewrite(folder, *place, "sha256", value=hashlib.sha256(content).hexdigest())
    rewrite(folder, *place, "bytes", value=len(content))


def value_at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values
