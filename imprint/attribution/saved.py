"""The file of an attribution: scores and what they are about, with a checksum of both.

A file of tensors with a header of JSON. Whatever a file holds, reading it ends in scores that fit their labels, as they
were saved, or in a `StoreError` of one line. `Attribution.save` and `Attribution.load` are the callers.
"""

import json
import logging
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from imprint.attribution.labels import LAST_STEPS, LEFT_OUT, OUT_OF_BATCHES, SHARED, SHARED_EXAMPLES
from imprint.attribution.replicates import Replicates
from imprint.attribution.uncertainty import ERROR
from imprint.errors import StoreError, first_line
from imprint.plan import Question
from imprint.readout.units import Over
from imprint.store.describing import read_about_record
from imprint.store.files import write
from imprint.store.fingerprint import of_tensors
from imprint.store.records import read
from imprint.store.values import Value, parsed, sealed
from imprint.validation.verdict import Verdict

logger = logging.getLogger(__name__)
SCHEMA = 5  # the first had no checksum, the second no noise, the third no replicates, the fourth no owners
_CHECKED, _NOISY = 2, 3  # the first schema with a checksum, and with noise
_ABOUT, _SCORES, _NOISE, _REPLICATES = "imprint", "scores", "noise", "replicates"
_DEVIATIONS = "deviations-0", "deviations-1"  # of the runs of a result; of a difference, of both
Saved = tuple[dict[str, Any], Tensor, tuple[int | str, ...], Tensor | None, tuple[Replicates, ...]]


def save_scores(
    path: Path,
    labels: dict[str, Any],
    scores: Tensor,
    queries: Sequence[int | str],
    noise: Tensor | None = None,
    replicates: Sequence[Replicates] = (),
) -> None:
    """Write scores of shape (queries, sources), their labels, changes by noise, (runs, queries), and replicates."""
    if len(replicates) > len(_DEVIATIONS):
        raise StoreError(f"could not write {path}: a result has at most two sets of runs, not {len(replicates)}.")
    given = {_SCORES: scores, **({} if noise is None else {_NOISE: noise})}
    given |= {name: each.deviations for name, each in zip(_DEVIATIONS, replicates, strict=False)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in given.items()}
    checksums = {name: of_tensors({name: tensor}) for name, tensor in tensors.items()}
    values = {
        **{"schema": SCHEMA, "labels": labels, "queries": list(queries)},
        **{_SCORES: checksums[_SCORES], _NOISE: checksums.get(_NOISE)},
        _REPLICATES: [
            {"sha256": checksums[name], "shares": each.shares, "names": each.names, "over": each.over}
            for name, each in zip(_DEVIATIONS, replicates, strict=False)
        ],
    }
    try:
        text = json.dumps(sealed(values))
    except (TypeError, ValueError) as error:
        raise StoreError(f"could not write {path}: its labels are no JSON values ({first_line(error)}).") from error
    about = _read_labels(parsed(text.encode(), path), set(labels))
    _check_whole(*about, tensors[_SCORES])  # what could not be read is not written
    _check_noise(about[1], tensors.get(_NOISE), path)
    _read_replicates(parsed(text.encode(), path), tensors, tuple(tensors[_SCORES].shape))
    write(path, lambda beside: save_file(tensors, beside, {_ABOUT: text}))


def load_scores(path: Path, names: set[str]) -> Saved:
    """Read what `save_scores` wrote: the labels, with these names or some of them, scores, queries, noise and runs.

    Who signed the store is left out: a signature says nothing about a file that anybody could have written since.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise StoreError(f"{path} is not a saved attribution: it is no regular file.")
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_ABOUT)
            if text is None or not {_SCORES} <= set(file.keys()) <= {_SCORES, _NOISE, *_DEVIATIONS}:
                raise StoreError(f"{path} is not a saved attribution: it holds other tensors.")
            # tensors are mapped from their file, and may change with it
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, MemoryError, ValueError) as error:  # ValueError: a path that no file can have
        raise StoreError(f"{path} is not a saved attribution: {first_line(error)}.") from error
    value = parsed(text.encode(), path)
    if "labels" not in value.mapping():
        raise StoreError(f"{path} is not a saved attribution: it has no labels.")
    if value.mapping().keys() == {"labels", "queries"}:
        logger.warning("%s was saved without a checksum, so damage would not be seen: save it again", path)
    else:
        value = value.unsealed()
        _check_unchanged(value, tensors)
        value = Value({**value.content, "sha256": None}, path)
    labels, queries = _read_labels(value, names)
    scores, noise = tensors[_SCORES], tensors.get(_NOISE)
    _check_whole(labels, queries, scores)
    _check_noise(queries, noise, path)
    about = {name: _LABELS[name](item) if name in _RECORDS else item.content for name, item in labels.items()}
    about["fingerprints"] = {name: each for name, each in about.get("fingerprints", {}).items() if name != "signer"}
    replicates = _read_replicates(value, tensors, tuple(scores.shape))
    return about, scores, tuple(item.content for item in queries), noise, replicates


def _check_unchanged(value: Value, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors that are not those of the header."""
    runs = value.mapping().get(_REPLICATES)
    sealed_as = {_SCORES: value.content.get(_SCORES), _NOISE: value.content.get(_NOISE)}
    for name, each in zip(_DEVIATIONS, runs.items() if runs is not None else (), strict=False):
        sealed_as[name] = each.mapping().get("sha256", each).content
    for name in {*sealed_as, *tensors}:
        found = of_tensors({name: tensors[name]}) if name in tensors else None
        if sealed_as.get(name) != found:
            raise StoreError(f"{value.file} was changed after it was written: its {name} has another checksum.")


def _read_replicates(value: Value, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> tuple[Replicates, ...]:
    """Return the deviations of runs from scores of this shape, once they are checked; none in files without."""
    listed = value.mapping().get(_REPLICATES)
    entries = [] if listed is None else listed.items()
    if len(entries) > len(_DEVIATIONS):
        value.fail(f"{_REPLICATES} has {len(entries)} entries, a result has at most {len(_DEVIATIONS)}")
    found = []
    for name, entry in zip(_DEVIATIONS, entries, strict=False):
        about = entry.record("sha256", "shares", "names", "over")
        about["sha256"].checksum()
        shares, names = about["shares"].numbers(), about["names"].texts()
        if about["over"].content not in get_args(Over):
            about["over"].refuse(" or ".join(get_args(Over)))
        if len(shares) < 2 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
            about["shares"].refuse("at least two positive numbers that add up to 1")
        if len(names) != len(shares):
            about["names"].refuse(f"{len(shares)} texts, one for each share")
        deviations = tensors[name]
        if tuple(deviations.shape) != (len(shares), *shape):
            entry.fail(f"its {name} have shape {tuple(deviations.shape)}, expected {(len(shares), *shape)}")
        if not deviations.is_floating_point() or not bool(deviations.isfinite().all()):
            entry.fail(f"its {name} must be finite numbers")
        found.append(Replicates(deviations, tuple(shares), tuple(names), about["over"].content))
    return tuple(found)


def _read_labels(value: Value, names: set[str]) -> tuple[dict[str, Value], list[Value]]:
    """Return the labels and the queries of a file, once each is checked."""
    fields = value.mapping()
    newer: tuple[str, ...] = ()
    if fields.keys() != {"labels", "queries"}:
        schema = fields["schema"].whole(_CHECKED) if "schema" in fields else SCHEMA
        if schema > SCHEMA:
            value.fail(f"its schema is {schema}, this version reads up to {SCHEMA}: upgrade imprint")
        newer = ("schema", _SCORES, "sha256", *[_NOISE] * (schema >= _NOISY), *[_REPLICATES] * (schema > _NOISY))
    values = value.record("labels", "queries", *newer)
    known = {name: read for name, read in _LABELS.items() if name in names}
    given = values["labels"].mapping()
    lacking = [name for name in _REQUIRED if name not in given]
    labels = values["labels"].record(*(given if not lacking and given.keys() <= known.keys() else known))
    for name, item in labels.items():
        known[name](item)
    for query in (queries := values["queries"].items()):
        if query.content != "mean":
            query.whole()
    return labels, queries


def _check_whole(labels: dict[str, Value], queries: list[Value], scores: Tensor) -> None:
    """Refuse labels that do not fit each other, or scores that do not fit them."""
    about = {name: value.content for name, value in labels.items()}
    ids, sizes = labels["source_ids"], about["source_sizes"]
    if not 0 < len(ids.content) == len(about["source_names"]) == len(sizes):
        ids.fail("labels.source_ids, source_names and source_sizes are not equally many, and at least one")
    if len(set(ids.content)) < len(ids.content):
        ids.fail("two sources have the same id")
    for name in ("summed", "source_about"):
        if len(about.get(name, ())) not in (0, len(sizes)):
            ids.fail(f"labels.{name} and labels.source_ids are not equally many")
    if max(sizes) > about["n"]:
        ids.fail(f"a source has {max(sizes)} examples, more than the training data ({about['n']})")
    expected = (len(queries), len(ids.content))
    if tuple(scores.shape) != expected:
        ids.fail(f"its scores have shape {tuple(scores.shape)}, and its labels are of {expected}")
    if scores.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        ids.fail(f"its scores are of {scores.dtype}, which is no kind of score")
    if not bool(scores.isfinite().all()):
        query, source = (~scores.isfinite()).nonzero()[0].tolist()
        ids.fail(f"the score in row {query}, column {source} is {float(scores[query, source])}")


def _check_noise(queries: list[Value], noise: Tensor | None, path: Path) -> None:
    """Refuse changes by noise that are no numbers, or not of these queries."""
    if noise is None:
        return
    place = Value(None, path)
    if noise.dim() != 2 or len(noise) == 0 or noise.shape[1] != len(queries):
        place.fail(f"its noise has shape {tuple(noise.shape)}, expected (runs, {len(queries)} queries)")
    if not noise.is_floating_point() or not bool(noise.isfinite().all()):
        place.fail("its noise must be finite numbers")


def _check_better(value: Value) -> None:
    if value.content not in ("lower", "higher", None):
        value.refuse("lower, higher or null")


def _check_details(value: Value) -> None:
    for name, item in value.mapping().items():
        if name in ("calibration", "central_step"):
            item.positive()
        if name == "chaos":
            item.at_least_zero()
        if name in (LEFT_OUT, SHARED, LAST_STEPS):
            item.whole(1)
        if name == SHARED_EXAMPLES:
            item.whole()
        if name == OUT_OF_BATCHES:
            item.flag()
        if name == ERROR:
            item.text()


def _check_question(value: Value) -> None:
    if value.content not in get_args(Question):
        value.refuse(" or ".join(get_args(Question)))


def _check_fingerprints(value: Value) -> None:
    found = value.mapping()
    for name in found.keys() & {"sources", "queries", "store", "model", "recording", "signer"}:
        found[name].text()
    if "plan" in found:
        found["plan"].mapping()
    if "measures" in found:
        found["measures"].numbers()
    for parameter in found["parameters"].mapping().values() if "parameters" in found else ():
        about = parameter.record("shape", "dtype")
        about["shape"].wholes()
        about["dtype"].text()


_VERDICTS = ("validation", "store_validation")
_RECORDS = (*_VERDICTS, "source_about")
_LABELS: dict[str, Callable[[Value], Any]] = {
    "n": lambda value: value.whole(1),
    "source_ids": Value.texts,
    "source_names": Value.texts,
    "source_sizes": lambda value: value.wholes(1),
    "measure": Value.text,
    "better": _check_better,
    "details": _check_details,
    "fingerprints": _check_fingerprints,
    "warnings": Value.texts,
    "question": _check_question,
    "removes": Value.flag,
    "summed": lambda value: value.wholes(1),
    "difference": Value.flag,
    "source_about": lambda value: tuple(map(read_about_record, value.items())),
    **dict.fromkeys(_VERDICTS, lambda value: None if value.content is None else read(Verdict, value)),
}
_REQUIRED = ("n", "source_ids", "source_names", "source_sizes", "measure", "better")
