"""Reads what is known of sources from a file: a table of many sources, or a Croissant file of one.

A table is CSV with a header, or JSON: a list of rows, or an object by source. Croissant is MLCommons' description of a
dataset (https://docs.mlcommons.org/croissant): JSON-LD on the vocabulary of schema.org. One file describes one dataset,
and so one source. It is read as plain JSON: prefixes of schema.org are understood, other contexts are not.
"""

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from imprint.about import FIELDS, About, read_about_values
from imprint.display import name_some, suggest_names
from imprint.errors import SourcesError, StoreError
from imprint.store.files import refuse_unreadable
from imprint.store.values import Value, read_json, shown

_LONGEST = 64 << 20  # bytes
_SOURCE = "source"
_COLUMNS = (_SOURCE, *FIELDS)
_PREFIXES = ("", "sc:", "schema:", "https://schema.org/", "http://schema.org/")
_OWNERS = (
    "copyrightHolder",
    "creator",
    "publisher",
)  # the first that is there; of many platforms the last is the platform
_MOST = 10  # names of owners and of licences


def read_about(path: str | os.PathLike[str], source: str | None = None) -> dict[str, About]:
    """Read the owners, licences and addresses of sources from a file, by source.

    path: a table, as .csv or .json, with the columns source, owner, licence and url, of which only the first must be
        there; or a Croissant file, which describes one source.
    source: which source a Croissant file describes, by id or name; by default the name of its dataset.

    The owner of a Croissant dataset is its `copyrightHolder`, or else its `creator`, or else its `publisher`. Several
    licences are joined with "; ", since the format does not say whether all of them hold or any of them.
    """
    file = Path(path)
    if file.suffix.lower() not in (".csv", ".json", ".jsonld"):
        raise SourcesError(
            f"descriptions of sources are read from a .csv, .json or .jsonld file, got {os.fspath(path)!r}."
        )
    if file.suffix.lower() == ".csv":
        _refuse_source(source, file)
        return _collect(_read_csv(file), file)
    value = read_json(file, _LONGEST)
    if is_croissant(value.content):
        found = _read_croissant(value)
        name = _find_name(value) if source is None else source
        return {name: found}
    _refuse_source(source, file)
    return _collect(_read_rows(value), file)


def _refuse_source(source: str | None, file: Path) -> None:
    if source is not None:
        raise SourcesError(
            f"{file} is a table, which names its sources itself: {source!r} is for a Croissant file, which describes "
            "one source."
        )


def _collect(rows: Iterable[tuple[str, Mapping[str, Any]]], file: Path) -> dict[str, About]:
    """Return descriptions by source, from rows with their place in the file."""
    found: dict[str, About] = {}
    for place, row in rows:
        if unknown := [str(name) for name in row if name not in _COLUMNS]:
            more = f"{name_some(list(map(repr, unknown)), 5)}{suggest_names(unknown[0], _COLUMNS)}"
            raise SourcesError(f"{file}, {place} has unknown columns: {more}")
        source = row.get(_SOURCE)
        if not isinstance(source, str) or not source.strip():
            raise SourcesError(f"{file}, {place} must name its source, in a column {_SOURCE!r}; got {shown(source)}.")
        if source in found:
            raise SourcesError(f"{file}, {place} describes source {shown(source)} again: give one row for each source.")
        try:
            found[source] = read_about_values({k: v for k, v in row.items() if k != _SOURCE}, f"source {shown(source)}")
        except SourcesError as error:
            raise SourcesError(f"{file}, {place}: {error}") from error
    if not found:
        raise SourcesError(f"{file} describes no source.")
    return found


def _read_csv(file: Path) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Read the rows of a table with a header, each with the number of its line."""
    try:
        refuse_unreadable(file, _LONGEST)
        with file.open(newline="", encoding="utf-8-sig") as text:
            table = csv.reader(text, strict=True)
            header = [name.strip() for name in next(table, [])]
            if _SOURCE not in header or len(set(header)) < len(header):
                raise SourcesError(
                    f"{file} must begin with a header of the columns {', '.join(_COLUMNS)}, each at most once, of "
                    f"which {_SOURCE!r} must be there; got {name_some(list(map(repr, header)), 8) or 'nothing'}."
                )
            for row in table:
                if not row:
                    continue
                if len(row) != len(header):
                    raise SourcesError(
                        f"{file}, line {table.line_num} has {len(row)} cells, and the header has {len(header)}: put "
                        "cells with commas between double quotes."
                    )
                yield f"line {table.line_num}", dict(zip(header, row, strict=True))
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourcesError(f"{file} is no table of comma-separated values in UTF-8: {error}.") from error


def _read_rows(value: Value) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Read the rows of a table in JSON: a list of them, or an object by source."""
    content = value.content
    if isinstance(content, dict) and "@context" in content:
        raise SourcesError(
            f"{value.file} is JSON-LD, but no Croissant file: its '@type' must be 'sc:Dataset', got "
            f"{content.get('@type')!r}."
        )
    if isinstance(content, dict):
        for source, item in value.mapping().items():
            yield (
                f"source {shown(source)}",
                {**{name: each.content for name, each in item.mapping().items()}, _SOURCE: source},
            )
        return
    if not isinstance(content, list):
        value.refuse("a list of rows, an object by source, or a Croissant file")
    for number, item in enumerate(value.items()):
        yield f"row {number}", {name: each.content for name, each in item.mapping().items()}


def is_croissant(content: object) -> bool:
    """Tell whether JSON is the description of a dataset in Croissant, or in plain schema.org."""
    kinds = content.get("@type") if isinstance(content, dict) else None
    listed = kinds if isinstance(kinds, list) else [kinds]
    return any(kind == f"{prefix}Dataset" for kind in listed for prefix in _PREFIXES)


def _read_croissant(value: Value) -> About:
    owner = next((found for name in _OWNERS if (found := _join(value, name, ", "))), "")
    url = _get(value, "url")
    place = "" if url is None else _read_text(url, ("@id", "url"))
    try:
        return About(owner, _join(value, "license", "; "), place)
    except SourcesError as error:
        raise SourcesError(f"{value.file}: {error}") from error


def _find_name(value: Value) -> str:
    """Return the name of a dataset, which stands for the source it describes."""
    found = _get(value, "name")
    name = "" if found is None else _read_text(found, ("name",))
    if not name:
        raise SourcesError(f"{value.file} has no name, so say which source it describes: SOURCE={value.file}.")
    return name


def _get(value: Value, name: str) -> Value | None:
    """Return a property of schema.org, whatever prefix it is written with; None where it is missing or null."""
    fields = value.mapping()
    found = [fields[f"{prefix}{name}"] for prefix in _PREFIXES if f"{prefix}{name}" in fields]
    if len(found) > 1:
        raise SourcesError(f"{value.file} gives its {name} twice, under two prefixes.")
    return found[0] if found and found[0].content is not None else None


def _join(value: Value, name: str, between: str) -> str:
    """Return the names of one or of several values of a property, such as creators or licences."""
    found = _get(value, name)
    if found is None:
        return ""
    every = found.items() if isinstance(found.content, list) else [found]
    texts = list(dict.fromkeys(text for each in every if (text := _read_text(each, ("name", "url", "@id")))))
    more = len(texts) - _MOST
    return between.join(texts[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _read_text(value: Value, names: tuple[str, ...]) -> str:
    """Return a text, or the first of these properties of an object, such as the name of an organisation."""
    if isinstance(value.content, str):
        return value.content.strip()
    if isinstance(value.content, dict):
        if "@value" in value.content:
            return value.mapping()["@value"].text().strip()
        for name in names:
            found = value.mapping().get(name) if name.startswith("@") else _get(value, name)
            if found is not None and found.content != value.content:
                if isinstance(found.content, list) and found.content:  # the first of perhaps millions
                    found = Value(found.content[0], found.file, f"{found.field}[0]")
                return _read_text(found, names)
    return value.refuse(f"a text, or an object with {' or '.join(names)}")
