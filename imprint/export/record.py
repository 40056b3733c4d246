"""`export.json`: what an exported folder holds, how its scores are to be read, and how it was tested.

It is written last, after the self-test, with a checksum of its own: a folder with it is a good export.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from imprint.batches import map_tensors
from imprint.display import for_terminal
from imprint.errors import ReadoutError, StoreError
from imprint.export.gains import DTYPES, Gains
from imprint.export.likelihood import COLUMNS, as_batches, log_likelihood, refuse_tokens
from imprint.export.point import Counted, Point
from imprint.readout.reader import forward_only
from imprint.store.checkpoint import INSIDE
from imprint.store.files import LOCK, Lock, clear_leftovers, sha256, temporary_folder, write, write_tensors
from imprint.store.reading import Store
from imprint.store.values import Value, read_json, sealed
from imprint.task import Batch, Task

logger = logging.getLogger(__name__)

RECORD, PROBES, MODEL = "export.json", "probes.safetensors", "model"
SCHEMA = 2
TOLERANCE = 1e-4
_ROUNDED = 3.0  # or so many times what rounding makes of the readout's own scores, …
_LOUD = 0.01  # … which must not be more than this
_PROBES = 4
_FAR = 0.05  # from the exact derivative, which is told
_NEAR = 1e-3  # log-likelihoods of one model in float32, by whatever engine; in half precision …
_ROUNDINGS = 8.0  # … they differ by up to 5 times what rounding makes of them

Kind = Literal["peft", "onnx"]


@dataclass(frozen=True)
class Exported:
    """A source of an export.

    gain: c_b, by which its imprint is multiplied. floor: the score under which it cannot be told from rounding.
    plus, minus: the folders of its adapters, where it has some.
    """

    id: str
    name: str
    gain: float
    floor: float
    plus: str | None = None
    minus: str | None = None


@dataclass(frozen=True)
class SelfTest:
    """Scores of the given queries read from the artefacts, in float32, beside the library's own.

    central: deviation from the readout `central` at the same gains. exact: deviation from the exact derivative, which
    `readout` tells how it was found. served: the latter in the serving precision. All relative, and over all scores at
    displacements of equal length.
    """

    queries: int
    central: float
    exact: float
    readout: str
    served: float


@dataclass(frozen=True)
class Export:
    """What is in a folder that `to_peft` or `to_onnx` wrote.

    layers: the adapted layers by their path in the plain model, as [rank, in, out].
    step: how far the gains move the adapted weights, relative to them. rounding: of a log-likelihood, see `Gains`.
    model: the plain model the adapters belong to: its name, or `model` for the folder written beside them.
    probes: log-likelihoods of a few queries at the checkpoint, by which another model is recognised, in float32 and in
        the serving precision.
    context, vocabulary: how many tokens a query may have, where the model tells, and how many tokens the model knows.
    """

    folder: Path
    kind: Kind
    n: int
    checkpoint: int
    dtype: str
    step: float
    rounding: float
    sources: tuple[Exported, ...]
    layers: dict[str, list[int]]
    model: str | None
    context: int | None
    vocabulary: int
    probes: dict[str, list[float]]
    self_test: SelfTest
    files: dict[str, str]
    versions: dict[str, str]

    def __repr__(self) -> str:
        test, floors = self.self_test, self.floors
        readout, dtype = for_terminal(test.readout), for_terminal(self.dtype)
        return (
            f"{len(self.sources)} sources in {for_terminal(self.folder)}\n"
            f"self-test on {test.queries} queries: {test.central:.1e} from central at the same gains, "
            f"{test.exact:.1e} from {readout}, {test.served:.1e} served in {dtype}\n"
            f"noise floors of scores: {float(floors.min()):.2g} to {float(floors.max()):.2g}"
        )

    @property
    def ids(self) -> list[str]:
        """The ids of the sources, in the order of their scores."""
        return [source.id for source in self.sources]

    @property
    def gains(self) -> Tensor:
        """c_b of every source, in float64."""
        return torch.tensor([source.gain for source in self.sources], dtype=torch.float64)

    @property
    def floors(self) -> Tensor:
        """The score of every source under which it is refused, in float64."""
        return torch.tensor([source.floor for source in self.sources], dtype=torch.float64)

    @classmethod
    def open(cls, folder: "str | os.PathLike[str] | Export", kind: Kind | None = None) -> "Export":
        """The export in a folder, once its record is known to be whole and its files to be there unchanged."""
        found = folder if isinstance(folder, Export) else cls._recorded(Path(folder))
        if kind is not None and found.kind != kind:
            raise StoreError(f"{found.folder} is an export of kind {found.kind!r}, not {kind!r}.")
        return found

    @classmethod
    def _recorded(cls, place: Path) -> "Export":
        if not (place / RECORD).is_file():
            raise StoreError(f"{place} holds no export: there is no {RECORD} (did its self-test pass?).")
        found = _read(read_json(place / RECORD).unsealed(), place)
        for name, checksum in found.files.items():
            if not (place / name).is_file():
                raise StoreError(f"{place / name} is missing: the export is damaged.")
            if sha256(place / name) != checksum:
                raise StoreError(f"{place / name} is not the file that was exported: its checksum is another one.")
        return found

    def probe_batch(self) -> Batch:
        """The queries of the probes."""
        with _tensors(self.folder / PROBES) as tensors:
            return {name: tensors.get_tensor(name) for name in COLUMNS}

    def batches(self, queries: Any, device: torch.device) -> list[Counted]:
        """Queries as batches that the model of the export can take."""
        found = as_batches(queries, device)
        refuse_tokens(found, self.context, self.vocabulary)
        return found

    def refuse_values(self, values: Tensor, precision: str) -> None:
        """Refuse log-likelihoods of the probes, of a model in some precision, that are not those at the checkpoint."""
        if precision not in self.probes:
            raise ReadoutError(
                f"the model is in {precision}, and gains and noise floors of the export are for {self.dtype}: export "
                f"with dtype={precision!r}, or load the model in float32."
            )
        full, expected = (torch.tensor(self.probes[name], dtype=torch.float64) for name in ("float32", precision))
        rounding = max(self.rounding, float((expected - full).square().mean().sqrt()))
        for index, (was, now) in enumerate(zip(expected.tolist(), values.tolist(), strict=True)):
            tolerance = _NEAR * (1 + abs(was)) if precision == "float32" else _ROUNDINGS * rounding
            if not abs(now - was) <= tolerance:
                raise ReadoutError(
                    f"the log-likelihood of probe {index} is {now:.6g}, and was {was:.6g} when the export was made: it "
                    "is read with another base model, or with other weights."
                )


def _tensors(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error


def _read(value: Value, folder: Path) -> Export:
    names = (*(name for name in Export.__dataclass_fields__ if name != "folder"), "schema")
    schema = value.mapping().get("schema")
    if schema is not None and schema.whole() != SCHEMA:  # before its fields, which may be others
        value.fail(f"its schema is {schema.content}, this version reads {SCHEMA}: export again")
    fields = value.record(*names)
    kind = fields["kind"].text()
    if kind not in ("peft", "onnx"):
        fields["kind"].refuse("'peft' or 'onnx'")
    sources = []
    for item in fields["sources"].items():
        about = item.record(*Exported.__dataclass_fields__)
        paths = [None if about[sign].content is None else _inside(about[sign]) for sign in ("plus", "minus")]
        gain, floor = about["gain"].positive(), about["floor"].at_least_zero()
        sources.append(Exported(about["id"].text(), about["name"].text(), gain, floor, *paths))
    test = fields["self_test"].record(*SelfTest.__dataclass_fields__)
    return Export(
        folder=folder,
        kind="peft" if kind == "peft" else "onnx",
        n=fields["n"].whole(1),
        checkpoint=fields["checkpoint"].whole(),
        dtype=fields["dtype"].text(),
        step=fields["step"].positive(),
        rounding=fields["rounding"].at_least_zero(),
        sources=tuple(sources),
        layers={name: list(item.wholes(1)) for name, item in fields["layers"].mapping().items()},
        model=None if fields["model"].content is None else fields["model"].text(),
        context=None if fields["context"].content is None else fields["context"].whole(1),
        vocabulary=fields["vocabulary"].whole(1),
        probes={name: list(item.numbers()) for name, item in fields["probes"].mapping().items()},
        self_test=SelfTest(
            test["queries"].whole(1),
            test["central"].at_least_zero(),
            test["exact"].at_least_zero(),
            test["readout"].text(),
            test["served"].at_least_zero(),
        ),
        files=_files(fields["files"]),
        versions={name: item.text() for name, item in fields["versions"].mapping().items()},
    )


def _inside(value: Value) -> str:
    """A path inside the export."""
    if not INSIDE.fullmatch(path := value.text()):
        value.refuse("a path inside the export")
    return path


def _files(value: Value) -> dict[str, str]:
    for name in value.mapping():
        _inside(Value(name, value.file, "files"))
    return {name: item.checksum() for name, item in value.mapping().items()}


def begun(
    task: Task,
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    queries: Any,
    sources: Sequence[str] | None,
    checkpoint: int | None,
) -> tuple[Point, list[Counted]]:
    """What is exported and the queries it is tested on, once all that is quickly seen to be wrong is refused."""
    _refuse_place(Path(folder).absolute())
    point = Point.of(task, Store.of(store), sources, checkpoint)
    batches = as_batches(queries, task.device)
    refuse_tokens(batches, point.context, point.vocabulary)
    point.refuse_measure(batches)
    if (count := sum(about.weight > 0 for about in point.store.checkpoints)) > 1:
        logger.warning(
            "checkpoint %d is exported, one of %d: scores of attribute are the mean over all of them, and differ",
            *(point.checkpoint, count),
        )
    return point, batches


def written(
    kind: Kind,
    folder: str | os.PathLike[str],
    point: Point,
    queries: list[Counted],
    gains: Gains,
    dtype: str,
    fill: Callable[[Path, Path], tuple[str | None, dict[str, tuple[str, str]]]],
    read: Callable[[Export], Tensor],
) -> Export:
    """Have `fill` write an export into a folder beside its place, test it through `read`, and put it there if good.

    fill(where, place): returns the plain model's name and the adapters (plus, minus) by source id.
    """
    place = Path(folder).absolute()
    with _alone(place) as beside:
        model, adapters = fill(beside, place)
        probes = _write_probes(beside, point, queries, dtype)
        draft = Export(
            folder=beside,
            kind=kind,
            n=point.store.n,
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
            files=_checksums(beside),
            versions={name: version(name) for name in ("torch", "transformers", "peft")},
        )
        export = _tested(draft, point, queries, gains, read(draft))
        values = {name: value for name, value in asdict(export).items() if name != "folder"}
        text = json.dumps(sealed({**values, "schema": SCHEMA}), indent=1)
        write(beside / RECORD, lambda path: path.write_text(text, encoding="utf-8"))
        if place.exists():
            place.rmdir()  # it is empty
        beside.rename(place)
    return replace(export, folder=place)


@contextmanager
def _alone(place: Path) -> Iterator[Path]:
    """A temporary folder for an export, while no other process exports to the same place."""
    prefix = f".{place.name}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(place.parent, f"{prefix}{LOCK}")
        try:
            _refuse_place(place)
            clear_leftovers(place.parent, prefix)
            with temporary_folder(place.parent, prefix) as folder:
                beside = folder / "export"  # with the permissions of any new folder
                beside.mkdir()
                yield beside
        finally:
            lock.release()
    except OSError as error:
        raise StoreError(f"could not write the export {place}: {error.strerror or error}.") from error


def _refuse_place(place: Path) -> None:
    if place.is_symlink():
        raise StoreError(f"{place} is a link: give a folder for the export.")
    if place.exists() and not place.is_dir():
        raise StoreError(f"{place} is a file: give a folder for the export.")
    if place.is_dir() and any(place.iterdir()):
        what = "an export already" if (place / RECORD).is_file() else "something else"
        raise StoreError(f"{place} holds {what}: give a new folder for the export, or remove that one.")


def _checksums(folder: Path) -> dict[str, str]:
    """Of every file but those of the plain model, which the probes recognise and which may be very large."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and folder / MODEL not in path.parents]
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def _write_probes(folder: Path, point: Point, queries: list[Counted], dtype: str) -> dict[str, list[float]]:
    """Keep the first few queries; their log-likelihoods at the checkpoint in float32 and in the serving precision."""
    count, batch = queries[0]
    few = map_tensors(lambda column: column[: min(count, _PROBES)].cpu().contiguous(), batch)
    write_tensors(folder / PROBES, {name: few[name] for name in COLUMNS})
    on_device = map_tensors(lambda column: column.to(point.task.device), few)
    states = {dtype: point.rounded(DTYPES[dtype]), "float32": point.state}
    with forward_only(point.task):
        found = {name: point.task.call(log_likelihood, state, on_device) for name, state in states.items()}
    return {name: values.double().tolist() for name, values in found.items()}


def _sources(point: Point, gains: Gains, adapters: dict[str, tuple[str, str]]) -> tuple[Exported, ...]:
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


def _tested(draft: Export, point: Point, queries: list[Counted], gains: Gains, found: Tensor) -> Export:
    """The export with the outcome of its self-test; refused where its scores are not those of `central`."""
    exact, readout = point.exact(queries)
    central = point.central(queries, gains.values)
    deviation = _deviation(found, central, gains.values)
    if not deviation <= TOLERANCE:
        wide = point.served(queries, gains.values, range(len(point.rows)), torch.float64)
        rounding = _deviation(central, wide, gains.values)
        if not (deviation <= _ROUNDED * rounding and rounding <= _LOUD):
            raise ReadoutError(
                "the self-test failed, and nothing was exported: scores read from the artefacts deviate from the "
                f"readout central at the same gains by {deviation:.1e}, more than {TOLERANCE:.0e}; rounding makes "
                f"{rounding:.0e}."
            )
        logger.warning(
            "scores of the export and of the readout central differ by %.2g, where rounding makes %.1g: at larger "
            "gains the curvature would show",
            deviation,
            rounding,
        )
    test = SelfTest(
        draft.self_test.queries, deviation, _deviation(found, exact, gains.values), readout, draft.self_test.served
    )
    if max(test.exact, test.served) > _FAR:
        logger.warning(
            "scores of the export deviate from the exact derivative by %.2g, and by %.2g served in %s: at no gain are "
            "both rounding and curvature small",
            test.exact,
            test.served,
            draft.dtype,
        )
    return replace(draft, self_test=test)


def _deviation(found: Tensor, expected: Tensor, gains: Tensor) -> float:
    """Relative, over all scores at displacements of equal length."""
    return float(((found - expected) * gains).norm() / (expected * gains).norm())
