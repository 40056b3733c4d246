"""Write an export beside its place, test it on queries, and move it there only if its scores are right."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imprint.batches import map_tensors
from imprint.errors import ReadoutError, StoreError
from imprint.export.gains import DTYPES, Gains
from imprint.export.likelihood import COLUMNS, as_batches, log_likelihood, refuse_tokens
from imprint.export.point import Counted, Point
from imprint.export.record import ENDS, MODEL, PROBES, RECORD, SCHEMA, Export, Exported, ExportKind, SelfTest
from imprint.readout.kernels import forward_only
from imprint.store.addresses import is_address
from imprint.store.checkpoint import CHAOTIC
from imprint.store.files import sha256, temporary_folder, write_tensors
from imprint.store.folder import locked, write_sealed
from imprint.store.reading import Store
from imprint.store.remote import name_place
from imprint.task import Task
from imprint.validation.record import find_verdict

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of scores read from an export, relative to the library's own at the same gains
_ROUNDED = 3.0  # or so many times what rounding makes of the readout's own scores, …
_LOUD = 0.01  # … which must not be more than this
_PROBES = 4
_FAR = 0.05  # from the exact derivative, which triggers a warning


def prepare_export(
    task: Task,
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    queries: Any,
    sources: Sequence[str] | None,
    checkpoint: int | None,
) -> tuple[Point, list[Counted]]:
    """Check everything that is quick to check; return what is exported, and the queries it is tested on."""
    _refuse_place(_find_place(folder))
    point = Point.of(task, Store.of(store), sources, checkpoint)
    batches = as_batches(queries, task.device)
    refuse_tokens(batches, point.context, point.vocabulary)
    point.refuse_measure(batches)
    chaos = point.store.checkpoints[point.checkpoint].measured.chaos
    if chaos is not None and chaos > CHAOTIC:
        logger.warning(
            "this run is chaotic (%.2g): its adapters without a source differ from the deployed one by chance too",
            chaos,
        )
    if (count := sum(about.weight > 0 for about in point.store.checkpoints)) > 1:
        logger.warning(
            "checkpoint %d is exported, one of %d: scores of attribute are the mean over all of them, and differ",
            *(point.checkpoint, count),
        )
    return point, batches


def write_export(
    kind: ExportKind,
    folder: str | os.PathLike[str],
    point: Point,
    queries: list[Counted],
    gains: Gains,
    dtype: str,
    fill: Callable[[Path, Path], tuple[str | None, dict[str, tuple[str, ...]]]],
    read: Callable[[Export], Tensor],
) -> Export:
    """Have `fill` write an export beside its place, test it through `read`, and move it there if it passes.

    fill(where, place): returns the plain model's name, and the two adapters of each source id.
    """
    place = _find_place(folder)
    with _lock_place(place) as beside:
        model, adapters = fill(beside, place)
        probes = _write_probes(beside, point, queries, dtype, gains if adapters else None)
        draft = Export(
            folder=beside,
            kind=kind,
            n=point.store.n,
            question=point.store.question,
            validation=find_verdict(point.store, point.task.measure_name),
            checkpoint=point.checkpoint,
            dtype=dtype,
            step=gains.step,
            rounding=gains.rounding,
            sources=_sources(point, gains, adapters),
            layers=_layers(point),
            model=model,
            context=point.context,
            vocabulary=point.vocabulary,
            probes=probes,
            self_test=SelfTest(sum(count for count, _ in queries), 0.0, 0.0, "", gains.deviation),
            files=_hash_files(beside),
            versions={name: version(name) for name in ("torch", "transformers", "peft")},
        )
        export = _test(draft, point, queries, gains, read(draft))
        values = {name: value for name, value in asdict(export).items() if name != "folder"}
        write_sealed(beside / RECORD, {**values, "schema": SCHEMA})
        if place.exists():
            place.rmdir()  # it is empty
        beside.rename(place)
    return replace(export, folder=place)


@contextmanager
def _lock_place(place: Path) -> Iterator[Path]:
    """Make a temporary folder for an export, while no other process exports to the same place."""
    prefix = f".{place.name}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.parent, prefix), temporary_folder(place.parent, prefix) as folder:
            _refuse_place(place)
            beside = folder / "export"  # with the permissions of any new folder
            beside.mkdir()
            yield beside
    except OSError as error:
        raise StoreError(f"could not write the export {place}: {error.strerror or error}.") from error


def _find_place(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that an export goes to; refuse the address of a bucket."""
    if is_address(folder):
        raise StoreError(f"{name_place(folder)} is in a bucket: give a folder of this machine for the export.")
    return Path(folder).absolute()


def _refuse_place(place: Path) -> None:
    if place.is_symlink():
        raise StoreError(f"{place} is a link: give a folder for the export.")
    if place.exists() and not place.is_dir():
        raise StoreError(f"{place} is a file: give a folder for the export.")
    if place.is_dir() and any(place.iterdir()):
        what = "an export already" if (place / RECORD).is_file() else "something else"
        raise StoreError(f"{place} holds {what}: give a new folder for the export, or remove that one.")


def _hash_files(folder: Path) -> dict[str, str]:
    """Hash every file but those of the plain model, which the probes recognise and which may be very large."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and folder / MODEL not in path.parents]
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def _write_probes(
    folder: Path, point: Point, queries: list[Counted], dtype: str, gains: Gains | None
) -> dict[str, list[float]]:
    """Write a few queries; return their log-likelihoods at the checkpoint, in float32 and in the serving precision.

    gains: where there are adapters, to write the log-likelihoods under each of them too, by which engines are tested.
    """
    count, batch = queries[0]
    few = map_tensors(lambda column: column[: min(count, _PROBES)].cpu().contiguous(), batch)
    on_device = map_tensors(lambda column: column.to(point.task.device), few)
    ends = {} if gains is None else dict(zip(ENDS, point.ends(on_device, gains.values), strict=True))
    write_tensors(folder / PROBES, {**{name: few[name] for name in COLUMNS}, **ends})
    states = {dtype: point.rounded(DTYPES[dtype]), "float32": point.state}
    with forward_only(point.task):
        found = {name: point.task.call(log_likelihood, state, on_device) for name, state in states.items()}
    return {name: values.double().tolist() for name, values in found.items()}


def _sources(point: Point, gains: Gains, adapters: dict[str, tuple[str, ...]]) -> tuple[Exported, ...]:
    floors = gains.floors.tolist()
    return tuple(
        Exported(
            point.store.source_ids[row],
            point.store.source_names[row],
            gain,
            floors[index],
            *adapters.get(point.store.source_ids[row], (None, None)),
        )
        for index, (row, gain) in enumerate(zip(point.rows, gains.values.tolist(), strict=True))
    )


def _layers(point: Point) -> dict[str, list[int]]:
    shapes = {layer.path: (layer.rank, point.state[layer.down].shape[1], layer.up) for layer in point.layers}
    return {path: [rank, width, len(point.state[up])] for path, (rank, width, up) in shapes.items()}


def _test(draft: Export, point: Point, queries: list[Counted], gains: Gains, found: Tensor) -> Export:
    """Return the export with its self-test; refuse one whose scores are not the library's own."""
    exact, readout = point.exact(queries)
    own = point.read(queries, gains.values)
    deviation = _deviation(found, own, gains.values)
    if not deviation <= TOLERANCE:
        wide = point.served(queries, gains.values, range(len(point.rows)), torch.float64)
        rounding = _deviation(own, wide, gains.values)
        if not (deviation <= _ROUNDED * rounding and rounding <= _LOUD):
            raise ReadoutError(
                "the self-test failed, and nothing was exported: scores read from the artefacts deviate from the "
                f"readout {point.readout} at the same gains by {deviation:.1e}, more than {TOLERANCE:.0e}; rounding "
                f"makes {rounding:.0e}."
            )
        logger.warning(
            "scores of the export and of the readout %s differ by %.2g, where rounding makes %.1g",
            *(point.readout, deviation, rounding),
        )
    test = SelfTest(
        draft.self_test.queries, deviation, _deviation(found, exact, gains.values), readout, draft.self_test.served
    )
    if max(test.exact, test.served) > _FAR:
        what, reason = "exact derivative", "at no gain are both rounding and curvature small"
        if point.removes:
            what, reason = "removals", "effects are as small as rounding"
        logger.warning(
            "scores of the export deviate from the %s by %.2g, and by %.2g served in %s: %s",
            *(what, test.exact, test.served, draft.dtype, reason),
        )
    return replace(draft, self_test=test)


def _deviation(found: Tensor, expected: Tensor, gains: Tensor) -> float:
    """Return a relative deviation, over all scores at displacements of equal length."""
    return float(((found - expected) * gains).norm() / (expected * gains).norm())
