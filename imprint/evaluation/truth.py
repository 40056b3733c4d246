"""Ground truth: what F really is for models retrained on subsets of the data, kept in a folder.

`truth.json` says what was asked for: kind, N, runs, seed, measurement, fingerprints, probes; and how it was made:
device, versions. `subsets.safetensors` has the sources, and which of them each subset lacks;
`values-000000.safetensors` and so on have F of every query under some of the models.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from imprint.errors import DataError, StoreError
from imprint.evaluation.subsets import Kind, Subsets
from imprint.files import LOCK, Lock, write
from imprint.fingerprint import changed, of_sources
from imprint.manifest import versions
from imprint.sources import Sources
from imprint.values import read_json, sealed

if TYPE_CHECKING:
    from imprint.attribution import Attribution

logger = logging.getLogger(__name__)
SCHEMA = 2  # the first had other seeds
PROBES = {"losses": "loss on probe example", "measures": "F at random parameters of query"}
"""Values that tell one loss, or measurement, from another; in words."""


@dataclass(frozen=True)
class Truth:
    """F of every query under every retrained model: `values` has shape (runs, subsets, queries)."""

    subsets: Subsets
    values: Tensor
    measure: str
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        runs, subsets, queries = self.values.shape
        counts = f"{_counted(subsets, 'subset')} × {_counted(runs, 'run')}"
        return f"Truth({self.subsets.kind}: {counts}, {self.measure} of {_counted(queries, 'query', 'queries')})"

    @cached_property
    def lacking(self) -> list[tuple[int, ...]]:
        """Of a removal: what is removed, in the order of the columns of `effects`."""
        return [removed for removed in self.subsets.removed if removed]

    @cached_property
    def effects(self) -> Tensor:
        """Of a removal: the change of F against the models that lack nothing, shape (runs, queries, removals)."""
        whole = torch.tensor([not removed for removed in self.subsets.removed])
        if self.subsets.kind != "removal":
            raise DataError("effects of removals need models trained on everything beside them: these are halves.")
        if not bool(whole.any()):
            raise DataError("effects of removals need models trained on everything beside them: ask for a baseline.")
        baseline = self.values[:, whole].mean(1, keepdim=True)
        return (self.values[:, ~whole] - baseline).transpose(1, 2)

    def slope(self, result: "Attribution") -> float:
        """Of actual on predicted changes of F: what `result.calibrate` multiplies scores by."""
        from imprint.evaluation.metrics import slope

        return slope(result, self).estimate.value

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Truth":
        """Read a folder; runs that are not complete are left out, and said."""
        folder = Folder(Path(path))
        request = folder.request()
        values = folder.values(request)
        complete = ~values.isnan().flatten(1).any(1)
        if not bool(complete.any()):
            done = int((~values.isnan()).any(2).sum())
            raise StoreError(
                f"{path} is unfinished: {done} of {values.shape[0] * values.shape[1]} models are there and no run is "
                "complete. Make the same call again to go on."
            )
        if not bool(complete.all()):
            logger.warning("%s: %d of %d runs are complete, the others left out", path, complete.sum(), len(values))
        return cls(folder.subsets(request), values[complete], request["measure"], request)


class Folder:
    """The files of a truth."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def opened(self, request: dict[str, Any], subsets: Subsets) -> Iterator[dict[str, Any] | None]:
        """The folder locked for writing. Gives what is kept of the same request, None if nothing is."""
        file = self.path / "truth.json"
        if self.path.exists() and not file.is_file() and (not self.path.is_dir() or self._strange()):
            raise StoreError(f"{self.path} holds something else: give a new folder for the ground truth.")
        self.path.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.path)
        try:
            kept = self.request() if file.is_file() else None
            if kept is not None:
                self._compare(kept, request)
                self.begin(kept, subsets)
            yield kept
        finally:
            lock.release()

    def _compare(self, kept: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Refuse another request than the one that was kept."""
        if kept["schema"] < SCHEMA:
            raise StoreError(
                f"{self.path} was made by an earlier version, which drew other seeds: it can be read but not "
                "continued. Give a new folder."
            )
        for name, value in wanted.items():
            if difference := _difference(name, kept.get(name), value):
                raise StoreError(f"{self.path} holds another ground truth: {difference}.")

    def begin(self, about: dict[str, Any], subsets: Subsets) -> None:
        """Write what the folder is a truth of, as far as it is not there."""
        if not (self.path / "truth.json").is_file():
            text = json.dumps(sealed(about), indent=1)
            write(self.path / "truth.json", lambda path: path.write_text(text))
        if not (self.path / "subsets.safetensors").is_file():
            write(self.path / "subsets.safetensors", lambda path: _write_subsets(subsets, path))

    def _strange(self) -> bool:
        """Whether there is more than what a call leaves that is killed as it begins."""
        return any(file.name not in (LOCK, ".truth.json.tmp") for file in self.path.iterdir())

    def request(self) -> dict[str, Any]:
        """What the folder is a truth of."""
        file = self.path / "truth.json"
        if not file.is_file():
            raise StoreError(f"{self.path} holds no ground truth: there is no truth.json.")
        value = read_json(file)
        schema = value.mapping().get("schema")
        if schema is None or schema.whole() > SCHEMA:
            found = "none" if schema is None else schema.content
            raise StoreError(f"{file} has schema {found}, this version reads up to {SCHEMA}: upgrade imprint.")
        values: dict[str, Any] = value.unsealed().content
        return values

    def subsets(self, request: dict[str, Any]) -> Subsets:
        """The subsets the models were trained on."""
        file = self.path / "subsets.safetensors"
        try:
            tensors = load_file(file)
            with safe_open(file, framework="pt") as opened:
                table = json.loads(opened.metadata()["imprint"])
            members = tuple(part.numpy() for part in _unpacked("members", tensors))
            sources = Sources(tuple(table["ids"]), tuple(table["names"]), members, request["n"])
            removed = tuple(tuple(part.tolist()) for part in _unpacked("removed", tensors))
            found = Subsets(request["kind"], request["n"], sources, removed)
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StoreError(f"{file} is damaged: {error}") from error
        if any(request["fingerprints"].get(part) != value for part, value in of_subsets(found).items()):
            raise StoreError(f"{file} is damaged: it differs from its fingerprint.")
        return found

    def keep(self, models: range, values: Tensor) -> None:
        """Write the values of some models."""
        metadata = {"sha256": _hash(values)}
        write(self._part(models), lambda path: save_file({"values": values}, path, metadata))

    def part(self, models: range, count: int) -> Tensor | None:
        """The values of some models, if they are there."""
        file = self._part(models)
        if not file.is_file():
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                values: Tensor = opened.get_tensor("values")
                expected = opened.metadata()["sha256"]
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise StoreError(f"{file} is damaged: {error}. Delete it to have it made again.") from error
        if _hash(values) != expected or tuple(values.shape) != (len(models), count):
            raise StoreError(f"{file} is damaged: it differs from its checksum. Delete it to have it made again.")
        return values

    def kept(self, spans: Sequence[range], count: int) -> dict[int, Tensor]:
        """The values that are there, by the first of the models."""
        parts = {models.start: self.part(models, count) for models in spans}
        return {start: part for start, part in parts.items() if part is not None}

    def values(self, request: dict[str, Any]) -> Tensor:
        """All values, shape (runs, subsets, queries); NaN where a model is missing."""
        runs, subsets, count = (request[key] for key in ("runs", "subsets", "queries"))
        values = torch.full((runs * subsets, count), float("nan"), dtype=torch.float64)
        for start, part in self.kept(together(request["kind"], runs, subsets, request["at_once"]), count).items():
            values[start : start + len(part)] = part
        return values.reshape(runs, subsets, count)

    def _part(self, models: range) -> Path:
        return self.path / f"values-{models.start:06}.safetensors"


def together(kind: Kind, runs: int, subsets: int, at_once: int) -> list[range]:
    """Which models are trained together: model number run · subsets + i is that of subset i.

    The models of a removal share their seed and with it their dropout, so those of different runs are kept apart.
    """
    apart = 1 if kind == "halves" else runs
    size = runs * subsets // apart
    wholes = [range(part * size, (part + 1) * size) for part in range(apart)]
    return [whole[start : start + at_once] for whole in wholes for start in range(0, size, at_once)]


def of_subsets(subsets: Subsets) -> dict[str, str]:
    """Fingerprints of the sources, and of which of them each subset lacks."""
    lacking = hashlib.sha256(json.dumps(subsets.removed).encode()).hexdigest()
    return {"sources": of_sources(subsets.sources), "subsets": lacking}


def circumstances(at_once: int, device: torch.device) -> dict[str, Any]:
    """What is kept with a truth beside what was asked for; `noise` is how far F moves if the same is trained again."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"at_once": at_once, "device": str(device), "noise": 0.0, "versions": versions(), "created": now}


def _difference(name: str, was: Any, value: Any) -> str | None:
    """How one part of a request differs from what was kept, in words; None if it does not."""
    if name == "probes":
        return next(filter(None, (changed(words, was[part], value[part]) for part, words in PROBES.items())), None)
    if was == value:
        return None
    if name == "model" and was and value:
        return f"the model has {_first_change(value, was)}, had {_first_change(was, value)}"
    if not (isinstance(was, dict) and isinstance(value, dict)):
        return f"{name} was {was}, is {value}"
    part = next(part for part in {**was, **value} if was.get(part) != value.get(part))
    if name == "fingerprints":
        return f"the {part} changed"
    return f"the {name}'s {part} was {was.get(part)}, is {value.get(part)}"


def _first_change(lines: list[str], others: list[str]) -> str:
    """The first of some lines that is not the same in others."""
    pairs = zip_longest(lines, others)
    return next((line.strip() for line, other in pairs if line != other and line), "nothing there")


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _write_subsets(subsets: Subsets, path: Path) -> None:
    tensors = {
        **_packed("removed", [np.array(r, dtype=np.int64) for r in subsets.removed]),
        **_packed("members", subsets.sources.members),
    }
    names = {"ids": subsets.sources.ids, "names": subsets.sources.names}
    save_file(tensors, path, {"imprint": json.dumps(names)})


def _packed(name: str, lists: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> dict[str, Tensor]:
    """Lists of numbers as two tensors: all of them, and how long each is."""
    flat = np.concatenate([*lists, np.empty(0, np.int64)])
    return {name: torch.from_numpy(flat), f"{name}_lengths": torch.tensor([len(each) for each in lists])}


def _unpacked(name: str, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.split(tensors[name], tensors[f"{name}_lengths"].tolist())


def _hash(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
