"""Keeps ground truth in a folder: F under models that were trained on subsets of the data.

`truth.json` records what was requested (kind, question, N, runs, seed, measurement, fingerprints, probes) and how it
was made (device, versions). `subsets.safetensors` holds the sources, and which of them each subset lacks.
`values-000000.safetensors` and so on hold F of every query under some of the models, and name the models and the ground
truth they belong to. Model number run · subsets + i is trained on subset i, so more runs only add files.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from imprint.attribution.result import Attribution
from imprint.display import count_of, for_terminal
from imprint.errors import DataError, StoreError
from imprint.evaluation.matching import leave_out_runs, match_scores, require_question
from imprint.evaluation.removal import compare_changes
from imprint.evaluation.subsets import Subsets
from imprint.plan import Question
from imprint.sources import Sources
from imprint.statistics import ROUNDING
from imprint.store.addresses import is_address
from imprint.store.files import refuse_unreadable, write_tensors
from imprint.store.fingerprint import changed, compare_data, of_sources
from imprint.store.folder import PARTS, locked, make_folder, write_sealed
from imprint.store.manifest import versions
from imprint.store.remote import name_place, open_whole
from imprint.store.uploading import Upload, begin_upload
from imprint.store.values import Value, read_json, sealed

logger = logging.getLogger(__name__)
TRUTH = "truth.json"
SUBSETS = "subsets.safetensors"
_CONTENT = "the ground truth"
SCHEMA = 4
SEEDED, NAMED, ASKED = 2, 3, 4  # the first schema with today's seeds; whose values name their truth; with a question
PROBES = {"losses": "loss on probe example", "measures": "F at random parameters of query"}
"""Values that distinguish one loss, or measurement, from another; for messages."""


@dataclass(frozen=True)
class Truth:
    """F of every query under every model: `values` has shape (runs, subsets, queries).

    question: "this_run" where sources are left out of one recorded run and all else is equal; "expected" where models
        are trained anew, from whatever seed, because their order and random numbers then differ too.
    replayed: whether the models are replays of recorded runs, in which a batch without its removed examples keeps the
        weight of the others, instead of models trained on what is left.
    """

    subsets: Subsets
    values: Tensor
    measure: str
    about: dict[str, Any] = field(default_factory=dict)
    question: Question = "expected"
    replayed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor):
            raise DataError(f"the values of a ground truth must be a tensor, got a {type(self.values).__name__}.")
        shape = tuple(self.values.shape)
        if len(shape) != 3 or shape[1] != len(self.subsets) or 0 in shape:
            raise DataError(
                f"the values of a ground truth must have shape (runs, {len(self.subsets)} subsets, queries), each at "
                f"least 1; got {shape}."
            )
        if not bool(self.values.isfinite().all()):
            raise DataError(
                "the values of a ground truth must be finite: retrain the models that are missing or diverged."
            )
        if self.question not in get_args(Question):
            raise DataError(f"question must be one of {', '.join(get_args(Question))}, got {self.question!r}.")
        object.__setattr__(self, "values", self.values.detach().double().cpu())

    @property
    def runs(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        runs, subsets, queries = self.values.shape
        counts = f"{count_of(subsets, 'subset')} × {count_of(runs, 'run')}"
        measure = for_terminal(self.measure)
        what = f"{self.subsets.kind}, {self.question}"
        return f"Truth({what}: {counts}, {measure} of {count_of(queries, 'query', 'queries')})"

    @cached_property
    def lacking(self) -> list[tuple[int, ...]]:
        """The removed sources of each removal, in the order of the columns of `effects`."""
        return [removed for removed in self.subsets.removed if removed]

    @cached_property
    def effects(self) -> Tensor:
        """The change in F due to each removal, relative to training on everything, shape (runs, queries, removals)."""
        whole = torch.tensor([not removed for removed in self.subsets.removed])
        if self.subsets.kind != "removal":
            raise DataError(
                "effects of removals need models trained on everything to compare with; these are trained on halves."
            )
        if not bool(whole.any()):
            raise DataError("effects of removals need models trained on everything to compare with: add a baseline.")
        baseline = self.values[:, whole].mean(1, keepdim=True)
        return (self.values[:, ~whole] - baseline).transpose(1, 2)

    @property
    def changes(self) -> Tensor:
        """F under halves, or effects of removals; (runs, queries, subsets)."""
        return self.values.transpose(1, 2) if self.subsets.kind == "halves" else self.significant_effects

    @property
    def significant_effects(self) -> Tensor:
        """The `effects`, zero where they are only rounding of F."""
        effects, largest = self.effects, self.values.abs().amax(1)[:, :, None]
        return effects * (effects.amax(2, keepdim=True) - effects.amin(2, keepdim=True) > ROUNDING * largest)

    def match(self, result: Attribution | Tensor, *, across: bool = False) -> Tensor:
        """Return scores (queries, sources) that belong to these sources and queries; refuse others.

        across: accept scores that answer the other question. A tensor of scores answers none, and is accepted.
        """
        if not across:
            require_question(result, self.question)
        return match_scores(result, self.subsets, self.values.shape[2], self.measure, self.about)

    def slope(self, result: Attribution) -> float:
        """Return the slope of actual on predicted changes of F, by which `result.calibrate` multiplies scores."""
        return compare_changes(self.match(result), self.subsets, self.changes, self.replayed).slope.value

    def match_left_out(self, result: Attribution | Tensor, *, across: bool = False) -> list[Tensor]:
        """Return the scores without each of the runs that they rest on, matched likewise; empty where it is one run."""
        if not isinstance(result, Attribution):
            return []
        return [self.match(replace(result, scores=each), across=across) for each in leave_out_runs(result)]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Truth":
        """Read a folder of ground truth, or one in a bucket. Incomplete runs are left out, with a warning."""
        folder, place = TruthFolder(open_whole(path)), name_place(path)
        request = folder.read_request()
        runs, subsets, count = (request[key] for key in ("runs", "subsets", "queries"))
        trained, kept = folder.read_subsets(request), folder.read_values(request)
        if len(trained) != subsets:
            raise StoreError(f"{place} is damaged: it has {len(trained)} subsets, and its truth.json says {subsets}.")
        there = min(runs, max(kept, default=0) // subsets + 1)  # runs of which a model is there
        values = torch.full((there * subsets, count), float("nan"), dtype=torch.float64)
        for model, value in kept.items():
            values[model] = value
        begun, runs = runs, there
        values = values.reshape(runs, subsets, count)
        complete = ~values.isnan().flatten(1).any(1)
        if not bool(complete.any()):
            done = int((~values.isnan()).any(2).sum())
            raise StoreError(
                f"{place} is unfinished: {done} of {begun * subsets} models are there and no run is complete. Make the "
                "same call again to resume."
            )
        if int(complete.sum()) < begun:
            logger.warning("%s: %d of %d runs are complete, the others are left out", place, complete.sum(), begun)
        return cls(
            trained, values[complete], request["measure"], request, request["question"], request.get("replayed", False)
        )


class TruthFolder:
    """The files of a ground truth.

    place: its folder, or the address of one in a bucket, which is written in a folder on this machine.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self._place = place
        self._upload: Upload | None = None
        self.path = Path(place)

    @contextlib.contextmanager
    def opened(self, request: dict[str, Any], subsets: Subsets) -> Iterator[dict[str, Any] | None]:
        """Lock the folder for writing; return what it records of the same request, or None."""
        with self._uploading():
            make_folder(self.path, _CONTENT, TRUTH)
            with locked(self.path):
                kept = self.read_request() if (self.path / TRUTH).is_file() else None
                if kept is not None:
                    self.compare(kept, request)
                    self._write_subsets(subsets)
                yield kept

    @contextlib.contextmanager
    def _uploading(self) -> Iterator[None]:
        """Upload what is written meanwhile, if the ground truth is in a bucket."""
        if not is_address(self._place):
            yield
            return
        self._upload = begin_upload(self._place, _CONTENT, TRUTH)
        self.path = self._upload.folder
        try:
            yield
            values = sorted(place.name for place in self.path.glob("values-*.safetensors"))
            self._upload.finish([*values, SUBSETS, TRUTH])
        finally:
            self._upload.close()

    def _publish(self, *names: str) -> None:
        if self._upload is not None:
            self._upload.push(*names)

    def compare(self, kept: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Refuse another request than the recorded one, except for the number of runs."""
        if kept["schema"] < SEEDED:
            raise StoreError(
                f"{self.path} was made by an earlier version, which drew other seeds: it can be read but not "
                "continued. Give a new folder."
            )
        for name, value in wanted.items():
            if name in ("schema", "runs"):
                continue
            if difference := _describe_difference(name, kept.get(name), value, wanted["n"]):
                raise StoreError(f"{self.path} holds another ground truth: {difference}.")

    def write_request(self, about: dict[str, Any], subsets: Subsets) -> None:
        """Write what was requested, unless it is recorded already."""
        if not (self.path / TRUTH).is_file() or self.read_request() != about:
            write_sealed(self.path / TRUTH, about)
        self._write_subsets(subsets)
        self._publish(SUBSETS, TRUTH)

    def _write_subsets(self, subsets: Subsets) -> None:
        if not (self.path / SUBSETS).is_file():
            names = {"ids": subsets.sources.ids, "names": subsets.sources.names}
            removed = [np.array(each, dtype=np.int64) for each in subsets.removed]
            tensors = {**_pack("removed", removed), **_pack("members", subsets.sources.members)}
            write_tensors(self.path / SUBSETS, tensors, {"imprint": json.dumps(names)})

    def read_request(self) -> dict[str, Any]:
        """Read what was requested of the ground truth in this folder."""
        file = self.path / TRUTH
        if not file.is_file():
            merging = f" Merge its parts first: imprint merge {self.path}." if (self.path / PARTS).is_dir() else ""
            raise StoreError(f"{self.path} holds no ground truth: there is no truth.json.{merging}")
        value = read_json(file)
        schema = value.mapping().get("schema")
        if schema is None or schema.whole() > SCHEMA:
            found = "none" if schema is None else schema.content
            raise StoreError(f"{file} has schema {found}, this version reads up to {SCHEMA}: upgrade imprint.")
        return {"question": "expected", **_check_request(value.unsealed())}  # no earlier schema had another

    def read_subsets(self, request: dict[str, Any]) -> Subsets:
        """Read the subsets that the models were trained on."""
        file = self.path / SUBSETS
        try:
            refuse_unreadable(file)
            tensors = load_file(file)
            with safe_open(file, framework="pt") as opened:
                table = json.loads(opened.metadata()["imprint"])
            members = tuple(part.numpy() for part in _unpack("members", tensors))
            sources = Sources(tuple(table["ids"]), tuple(table["names"]), members, request["n"])
            removed = tuple(tuple(part.tolist()) for part in _unpack("removed", tensors))
            found = Subsets(request["kind"], request["n"], sources, removed)
        except (OSError, SafetensorError, MemoryError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StoreError(f"{file} is damaged: {error}") from error
        if any(request["fingerprints"].get(part) != value for part, value in of_subsets(found).items()):
            raise StoreError(f"{file} is damaged: it differs from its fingerprint.")
        return found

    def write_values(self, models: range, values: Tensor, about: dict[str, Any]) -> None:
        """Write the values of some models, shape (models, queries)."""
        metadata = {"sha256": _hash(values), "truth": _identity(about), "models": f"{models.start}-{models.stop - 1}"}
        file = self.path / f"values-{models.start:06}.safetensors"
        write_tensors(file, {"values": values}, metadata)
        self._publish(file.name)

    def read_values(self, about: dict[str, Any]) -> dict[int, Tensor]:
        """Read the values of the finished models, by their number, in order."""
        found: dict[int, Tensor] = {}
        seal = _identity(about)
        for file in self.path.glob("values-*.safetensors"):
            if number := re.fullmatch(r"values-(\d+)", file.stem):
                start = int(number[1])
                found.update(enumerate(self._read_part(file, start, about, seal), start))
        return dict(sorted(found.items()))

    def _read_part(self, file: Path, start: int, about: dict[str, Any], seal: str) -> Tensor:
        """Read the values in a file, shape (models, queries); refuse damaged or foreign ones."""
        try:
            refuse_unreadable(file)
            with safe_open(file, framework="pt") as opened:
                values: Tensor = opened.get_tensor("values")
                recorded = opened.metadata()
            whole = _hash(values) == recorded["sha256"] and values.dim() == 2
        except (OSError, SafetensorError, MemoryError, KeyError, TypeError) as error:
            raise StoreError(f"{file} is damaged: {error}. Delete it to have it made again.") from error
        if not whole:
            raise StoreError(f"{file} is damaged: it differs from its checksum. Delete it to have it made again.")
        place = {"truth": seal, "models": f"{start}-{start + len(values) - 1}"}
        known = about["schema"] < NAMED or all(recorded.get(name) == value for name, value in place.items())
        fits = start + len(values) <= about["runs"] * about["subsets"] and values.shape[1] == about["queries"]
        if not (known and fits):
            raise StoreError(
                f"{file} does not hold the models that this ground truth has there: delete it to train them again."
            )
        return values


def _check_request(value: Value) -> dict[str, Any]:
    """Check the type of every field of a truth.json, and return it."""
    found = value.mapping()

    def field(name: str) -> Value:
        return found[name] if name in found else value.fail(f"{name} is missing")

    if field("kind").text() not in ("halves", "removal"):
        field("kind").refuse('"halves" or "removal"')
    if "question" in found and found["question"].text() not in get_args(Question):
        found["question"].refuse(" or ".join(f'"{each}"' for each in get_args(Question)))
    if "replayed" in found and not isinstance(found["replayed"].content, bool):
        found["replayed"].refuse("true or false")
    for name in ("n", "runs", "subsets", "queries"):
        field(name).whole(1)
    if field("schema").whole() >= SEEDED:  # it may be continued
        field("at_once").whole(1)
        field("noise").at_least_zero()
    if "model" in found and found["model"].content is not None:
        found["model"].texts()
    field("seed").whole()
    field("measure").text()
    probes = field("probes").mapping()
    for name in PROBES:
        probes[name].numbers() if name in probes else value.fail(f"probes.{name} is missing")
    for each in field("fingerprints").mapping().get("parameters", Value({}, value.file)).mapping().values():
        each.mapping()["shape"].wholes() if "shape" in each.mapping() else each.refuse("an object with a shape")
    content: dict[str, Any] = value.content
    return content


def _identity(about: dict[str, Any]) -> str:
    """Return the seal of a ground truth without its number of runs, which may grow, as its schema has it."""
    left = ("runs",) if about["schema"] >= ASKED else ("runs", "question")
    seal: str = sealed({name: value for name, value in about.items() if name not in left})["sha256"]
    return seal


def of_subsets(subsets: Subsets) -> dict[str, str]:
    """Fingerprint the sources, and which of them each subset lacks."""
    lacking = hashlib.sha256(json.dumps(subsets.removed).encode()).hexdigest()
    return {"sources": of_sources(subsets.sources), "subsets": lacking}


def describe_circumstances(at_once: int, device: torch.device) -> dict[str, Any]:
    """Describe how a ground truth was made; `noise` is how far F moves when the same model is trained again."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"at_once": at_once, "device": str(device), "noise": 0.0, "versions": versions(), "created": now}


def _describe_difference(name: str, was: Any, value: Any, n: int) -> str | None:
    """Describe how one part of a request differs from the saved one, or None."""
    if name == "probes":
        return next(filter(None, (changed(words, was[part], value[part]) for part, words in PROBES.items())), None)
    if name == "fingerprints":
        data = compare_data(was.get("data"), value.get("data"), n)
        if not data.same:
            return f"the data changed{data.remark}"
        if was.get("data") and value.get("data"):
            data.warn()
        was, value = ({**each, "data": None} for each in (was, value))
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
    """Return the first line that differs from the other list."""
    pairs = zip_longest(lines, others)
    return next((line.strip() for line, other in pairs if line != other and line), "nothing there")


def _pack(name: str, lists: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> dict[str, Tensor]:
    """Pack lists of numbers into two tensors: all of them, and the length of each."""
    flat = np.concatenate([*lists, np.empty(0, np.int64)])
    return {name: torch.from_numpy(flat), f"{name}_lengths": torch.tensor([len(each) for each in lists])}


def _unpack(name: str, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.split(tensors[name], tensors[f"{name}_lengths"].tolist())


def _hash(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
