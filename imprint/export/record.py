"""`export.json`: what an exported folder holds, how its scores are to be read, and how it was tested.

It is written last, after the self-test, with a checksum of its own: a folder with it is a good export.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from imprint.attribution.labels import MEANINGS, NOT_VALIDATED
from imprint.display import for_terminal
from imprint.errors import ReadoutError, StoreError
from imprint.export.likelihood import COLUMNS, as_batches, refuse_tokens
from imprint.export.point import Counted
from imprint.plan import Question
from imprint.store.checkpoint import INSIDE
from imprint.store.files import sha256
from imprint.store.records import read
from imprint.store.remote import name_place
from imprint.store.values import Value, read_json
from imprint.task import Batch
from imprint.validation.verdict import Verdict

RECORD, PROBES, MODEL = "export.json", "probes.safetensors", "model"
ADAPTERS, BASE = "adapters", "adapters/base"
ENDS = ("plus", "minus")  # of the probes, in their file: log-likelihoods under the adapters of every source
SCHEMA = 3
_NEAR = 1e-3  # log-likelihoods of one model in float32, by whatever engine; in half precision …
ROUNDINGS = 8.0  # … they differ by up to 5 times what rounding makes of them

ExportKind = Literal["peft", "onnx"]


@dataclass(frozen=True)
class Exported:
    """A source of an export.

    gain: c_b, by which its imprint is multiplied. floor: the score below which it is noise.
    plus, minus: the folders of its adapters, where it has some. Of a removal they are the deployed adapter and the one
        without the source, and the gain is 1/2N: (F(plus) − F(minus))/2c is N·(F(deployed) − F(without)).
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

    central: deviation from the readout `central` at the same gains, or of removals from `removed`.
    exact: deviation from the exact scores, which the readout `readout` computed; `served` in the serving precision.

    All are relative, and over all scores at displacements of equal length.
    """

    queries: int
    central: float
    exact: float
    readout: str
    served: float


@dataclass(frozen=True)
class Export:
    """What is in a folder that `to_peft` or `to_onnx` wrote.

    question, validation: what the scores answer, and whether those of the store were validated.
    layers: the adapted layers by their path in the plain model, as [rank, in, out].
    step: how far the gains move the adapted weights, relative to them. rounding: of a log-likelihood, see `Gains`.
    model: the plain model the adapters belong to: its name, or `model` for the folder written beside them.
    probes: log-likelihoods of a few queries at the checkpoint, by which another model is recognised, in float32 and in
        the serving precision.
    context, vocabulary: how many tokens a query may have, where the model says, and how many tokens the model knows.
    """

    folder: Path
    kind: ExportKind
    n: int
    question: Question
    validation: Verdict | None
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
        own = "" if self.removes else f"{test.central:.1e} from central at the same gains, "
        return (
            f"{len(self.sources)} sources in {for_terminal(self.folder)}"
            f"{', an adapter without each' if self.removes else ''}\n"
            f"self-test on {test.queries} queries: {own}{test.exact:.1e} from {readout}, {test.served:.1e} served in "
            f"{dtype}\n"
            f"noise floors of scores: {float(floors.min()):.2g} to {float(floors.max()):.2g}\n"
            f"{MEANINGS[self.question]}\n{NOT_VALIDATED if self.validation is None else self.validation}"
        )

    @property
    def removes(self) -> bool:
        """Whether each source has an adapter of the training without it, beside the deployed one."""
        return any(source.plus == BASE for source in self.sources)

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
    def open(cls, folder: "str | os.PathLike[str] | Export", kind: ExportKind | None = None) -> "Export":
        """Open the export in a folder, once its record and its files are known to be complete and unchanged."""
        found = folder if isinstance(folder, Export) else cls._recorded(Path(folder))
        if kind is not None and found.kind != kind:
            raise StoreError(f"{found.folder} is an export of kind {found.kind!r}, not {kind!r}.")
        return found

    @classmethod
    def _recorded(cls, place: Path) -> "Export":
        if not (place / RECORD).is_file():
            raise StoreError(f"{name_place(place)} holds no export: there is no {RECORD} (did its self-test pass?).")
        found = _read(read_json(place / RECORD).unsealed(), place)
        for name, checksum in found.files.items():
            if not (place / name).is_file():
                raise StoreError(f"{place / name} is missing: the export is damaged.")
            if sha256(place / name) != checksum:
                raise StoreError(f"{place / name} is not the file that was exported: its checksum is another one.")
        return found

    def probe_batch(self) -> Batch:
        """Return the queries of the probes."""
        with _tensors(self.folder / PROBES) as tensors:
            return {name: tensors.get_tensor(name) for name in COLUMNS}

    def probe_ends(self) -> tuple[Tensor, Tensor] | None:
        """Return log-likelihoods of the probes under both adapters of every source, if the export has them."""
        with _tensors(self.folder / PROBES) as tensors:
            if not set(ENDS) <= set(tensors.keys()):
                return None
            plus, minus = (tensors.get_tensor(name).double() for name in ENDS)
        return plus, minus

    def batches(self, queries: Any, device: torch.device) -> list[Counted]:
        """Return queries as batches that the model of the export can take."""
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
            tolerance = _NEAR * (1 + abs(was)) if precision == "float32" else ROUNDINGS * rounding
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
        question=_read_question(fields["question"]),
        validation=None if fields["validation"].content is None else read(Verdict, fields["validation"]),
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


def _read_question(value: Value) -> Question:
    if value.content not in MEANINGS:
        value.refuse(" or ".join(MEANINGS))
    question: Question = value.content
    return question


def _inside(value: Value) -> str:
    """Return a path, which must lie inside the export."""
    if not INSIDE.fullmatch(path := value.text()):
        value.refuse("a path inside the export")
    return path


def _files(value: Value) -> dict[str, str]:
    for name in value.mapping():
        _inside(Value(name, value.file, "files"))
    return {name: item.checksum() for name, item in value.mapping().items()}
