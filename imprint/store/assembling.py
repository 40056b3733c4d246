"""Puts the imprints of a store together from rows that exist: its own, those of another store, or newly simulated ones.

Files of imprints are never changed. Those whose rows stay together are kept as they are; others are composed anew,
under names that no earlier version of the store has used. So the files of the version before stay where they are until
the next change, and whoever has opened it can go on reading.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from imprint.store.checkpoint import Checkpoint, File, ShardFigures, read_figures
from imprint.store.files import write_tensors
from imprint.store.manifest import Manifest
from imprint.store.opening import Files
from imprint.store.parts import place_file
from imprint.store.reading import Store, find_overlapping
from imprint.store.values import Value, parsed
from imprint.store.workspace import ABOUT, CHECKPOINTS, describe_file
from imprint.task import Parameters

Kind = Literal["imprints", "midpoints"]
_LATER: dict[str, object] = {"effects": [], "noise_effect": None, "deviation": None}
"""Figures that files of version 0.1 do not have, which repeated no recorded runs."""
Row = tuple[int, int]
"""The number of an origin, and a row there."""
_OURS = re.compile(r"(base|basis|noise|(imprints|midpoints)-\d{5}(-r\d+)?)\.safetensors|sources(-r\d+)?\.json")


@dataclass(frozen=True)
class Origin:
    """Rows of imprints that exist: the folder they are in, and its checkpoints, whose files share their rows out."""

    files: Files
    checkpoints: tuple[Checkpoint, ...]

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> "Origin":
        """Return the imprints of a folder that is laid out as a store."""
        files = Files(folder)
        files.advice = f"Delete {folder}, and make the same call again."
        return cls(files, manifest.checkpoints)

    @classmethod
    def of_store(cls, store: Store) -> "Origin":
        """Return the imprints of a store."""
        files = Files(store.path)
        files.sources = list(zip(store.source_ids, store.source_names, strict=True))
        files.advice = f"Restore it from a copy, or simulate the sources of {store.path} again, in another folder."
        return cls(files, store.manifest.checkpoints)


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one origin."""

    origin: int
    start: int
    stop: int


def lay_out(rows: Sequence[Row], cuts: Sequence[Sequence[tuple[int, int]]], most: int) -> list[list[Span]]:
    """Share rows out to files: those of a file that stay together are one span; others are put together, `most` each.

    cuts: for each origin, the rows of its files.

    >>> lay_out([(0, 0), (0, 1), (0, 3), (1, 0)], [[(0, 2), (2, 4)], [(0, 1)]], most=8)
    [[Span(origin=0, start=0, stop=2)], [Span(origin=0, start=3, stop=4)], [Span(origin=1, start=0, stop=1)]]
    """
    ends = [dict(each) for each in cuts]
    files, pending, place = list[list[Span]](), list[Row](), 0
    while place < len(rows):
        origin, row = rows[place]
        stop = ends[origin].get(row, row)
        whole = [(origin, each) for each in range(row, stop)]
        if whole and list(rows[place : place + len(whole)]) == whole:
            files += [_join(pending)] if pending else []
            files.append([Span(origin, row, stop)])
            pending, place = [], place + len(whole)
            continue
        pending.append((origin, row))
        place += 1
        if len(pending) == most:
            files.append(_join(pending))
            pending = []
    return [*files, _join(pending)] if pending else files


def _join(rows: Sequence[Row]) -> list[Span]:
    """Write rows as spans."""
    spans: list[Span] = []
    for origin, row in rows:
        if spans and (spans[-1].origin, spans[-1].stop) == (origin, row):
            spans[-1] = replace(spans[-1], stop=row + 1)
        else:
            spans.append(Span(origin, row, row + 1))
    return spans


class Assembly:
    """The folder of a store into which rows go.

    origins: where rows come from. The first is the store itself, or the one whose base, basis and noise count.
    suffix: what tells its new files from those of all earlier versions.
    """

    def __init__(self, folder: Path, origins: Sequence[Origin], suffix: str = "") -> None:
        self.folder, self.origins, self.suffix = folder, origins, suffix
        self._known: dict[Path, ShardFigures] = {}

    def put_together(
        self, index: int, rows: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[tuple[File, ...], tuple[File, ...], list[ShardFigures]]:
        """Put the imprints of a checkpoint together; return files of imprints and midpoints, and what the first say.

        advance: called with the number of rows that are done.
        """
        own = self.origins[0].checkpoints[index]
        cuts = [_rows_of(origin.checkpoints[index].imprints) for origin in self.origins]
        layout = lay_out(rows, cuts, own.choices.rows_per_file)
        imprints, midpoints, figures, start = list[File](), list[File](), list[ShardFigures](), 0
        for number, spans in enumerate(layout):
            stop = start + sum(span.stop - span.start for span in spans)
            about = self._figures(index, spans, first=number == 0)
            place = f"checkpoint-{index:03}/{{}}-{number:05}{self.suffix}.safetensors"
            imprints.append(self._file("imprints", index, spans, place, (start, stop), about))
            if own.midpoints:
                midpoints.append(self._file("midpoints", index, spans, place, (start, stop), None))
            figures.append(about)
            advance(stop - start)
            start = stop
        return tuple(imprints), tuple(midpoints), figures

    def _file(
        self, kind: Kind, index: int, spans: list[Span], place: str, rows: tuple[int, int], about: ShardFigures | None
    ) -> File:
        """Return a file with these rows: one that is there, or a new one."""
        name, found = place.format(kind), self._find_whole(kind, index, spans)
        changed = found is not None and about is not None and about != self._read_figures(index, spans[0])
        if found is None or changed:
            content = {ABOUT: json.dumps({} if about is None else asdict(about), allow_nan=False)}
            write_tensors(self.folder / name, self._collect(kind, index, spans), content)
            return describe_file(self.folder, name, rows)
        origin = self.origins[spans[0].origin].files
        if origin.folder == self.folder.absolute():
            return replace(found, rows=rows)
        origin.check(found)
        place_file(origin.folder / found.path, self.folder / name, link=self._is_inside(origin))
        return replace(found, path=name, rows=rows)

    def _is_inside(self, origin: Files) -> bool:
        return origin.folder.is_relative_to(self.folder.absolute())

    def _find_whole(self, kind: Kind, index: int, spans: list[Span]) -> File | None:
        """Find the file that has exactly these rows, and no others."""
        files = getattr(self.origins[spans[0].origin].checkpoints[index], kind)
        wanted = (spans[0].start, spans[0].stop)
        return next((file for file in files if file.rows == wanted), None) if len(spans) == 1 else None

    def _collect(self, kind: Kind, index: int, spans: list[Span]) -> Parameters:
        """Read rows into memory."""
        pieces: dict[str, list[torch.Tensor]] = {}
        for origin, file, start, stop in self._go_through(kind, index, spans):
            with origin.files.open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    pieces.setdefault(name, []).append(tensors.get_slice(name)[start:stop])
        return {name: torch.cat(parts) for name, parts in pieces.items()}

    def _go_through(self, kind: Kind, index: int, spans: list[Span]) -> "list[tuple[Origin, File, int, int]]":
        """Return the files that hold rows, with the place of these in each."""
        found = []
        for span in spans:
            origin = self.origins[span.origin]
            for file in find_overlapping(getattr(origin.checkpoints[index], kind), span.start, span.stop):
                first, last = file.rows or (0, 0)
                found.append((origin, file, max(span.start, first) - first, min(span.stop, last) - first))
        return found

    def _figures(self, index: int, spans: list[Span], *, first: bool) -> ShardFigures:
        """Return what is said about some rows. What comes with the first sources stays with the first file."""
        parts = [
            (self._read(origin, file), start, stop)
            for origin, file, start, stop in self._go_through("imprints", index, spans)
        ]

        def of_each(name: str) -> tuple[float, ...]:
            return tuple(value for part, start, stop in parts for value in getattr(part, name)[start:stop])

        begin = self._read(self.origins[0], self.origins[0].checkpoints[index].imprints[0])
        return ShardFigures(
            drift=begin.drift if first else parts[0][0].drift,
            norms=of_each("norms"),
            linearity=of_each("linearity"),
            whole=of_each("whole"),
            effects=of_each("effects"),
            noise_effect=begin.noise_effect if first else None,
            deviation=begin.deviation if first else None,
        )

    def _read_figures(self, index: int, span: Span) -> ShardFigures:
        ((origin, file, _, _),) = self._go_through("imprints", index, [span])
        return self._read(origin, file)

    def _read(self, origin: Origin, file: File) -> ShardFigures:
        """Read what a file says, once."""
        place = origin.files.folder / file.path
        if place not in self._known:
            self._known[place] = read_figures_of(origin.files, file)
        return self._known[place]


def _rows_of(files: Sequence[File]) -> list[tuple[int, int]]:
    return [file.rows for file in files if file.rows]


def read_figures_of(files: Files, file: File) -> ShardFigures:
    """Read what a file says about its imprints."""
    place, (start, stop) = files.folder / file.path, file.rows or (0, 0)
    with files.open(file) as tensors:
        about = parsed((tensors.metadata() or {}).get(ABOUT, "").encode(), place).mapping()
        return read_figures(
            Value({**_LATER, **{name: each.content for name, each in about.items()}}, place), stop - start
        )


def adopt(folder: Path, origin: Origin, indices: Iterable[int]) -> list[Checkpoint]:
    """Put all files of some checkpoints into the folder of a store, under their own names; return the checkpoints."""
    found = [origin.checkpoints[index] for index in indices]
    for file in (file for checkpoint in found for file in checkpoint.files()):
        origin.files.check(file)
        place_file(origin.files.folder / file.path, folder / file.path, link=True)
    return found


def clear_unused(folder: Path, manifest: Manifest) -> int:
    """Remove files of earlier versions of a store, and of changes that did not come to their end; count them."""
    used, removed = {folder / file.path for file in manifest.files()}, 0
    for place in (folder, *folder.glob(CHECKPOINTS)):
        for file in place.iterdir() if place.is_dir() and not place.is_symlink() else ():
            if _OURS.fullmatch(file.name) and file not in used and file.is_file() and not file.is_symlink():
                with contextlib.suppress(OSError):  # it does no harm where it is
                    file.unlink()
                    removed += 1
        if place != folder:
            with contextlib.suppress(OSError):
                place.rmdir()
    return removed
