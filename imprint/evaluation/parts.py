"""Parts of a ground truth: each process trains some of the models, and the parts are merged into one folder.

A part is a folder of ground truth with the values of its models alone. What is shared is the description of the whole
(`truth.json`), by the first part that gets so far: it says how many models are trained together, so that those of one
part are neighbours who would have been trained together anyway.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from imprint.display import count_of, name_some
from imprint.errors import StoreError
from imprint.evaluation.models import Models, group_models
from imprint.evaluation.truth import SUBSETS, TRUTH, Truth, TruthFolder, describe_circumstances
from imprint.runtime.progress import Advance, Progress
from imprint.store.folder import write_sealed
from imprint.store.merging import find_finished, find_target, merging_into, remove_parts, tidy_up
from imprint.store.parts import (
    PART,
    REQUEST,
    Part,
    PartsFolder,
    Share,
    place_file,
    read_division,
)
from imprint.store.values import advised, read_json

_DIVISION = "parts.json"


@dataclass(frozen=True)
class TruthPart:
    """A part of a ground truth that is to be made in the folder `out`.

    same: whether all parts are known to train by the same function, as those that an executor makes.
    """

    work: Models
    request: dict[str, Any]
    share: Share
    out: str | os.PathLike[str]
    same: bool = False

    def make(self, progress: bool | Advance) -> Part:
        """Train the models of the part that are not there yet."""
        folder, content = PartsFolder(self.out), "the ground truth"
        if (folder.out / TRUTH).is_file():
            return self._return_merged(folder)
        folder.refuse_other_use(content)
        folder.refuse_other_number(self.share)
        files, was_there = TruthFolder(folder.of(self.share)), folder.out.exists()
        try:
            with files.opened(self.request, self.work.subsets) as found:
                self._train(folder, files, found, progress)
        except BaseException:
            with contextlib.suppress(OSError):  # there are models in it
                files.path.rmdir()
            folder.remove_empty(out=not was_there)
            raise
        mine = sum(map(len, self._mine(files.read_request())))
        return Part(self.share, files.path, mine, self._total, "model", folder.count_finished(self.share, PART))

    @property
    def _total(self) -> int:
        return len(self.work.seeds)

    def _mine(self, about: dict[str, Any]) -> list[range]:
        """Return the models of the part, in groups that are trained together."""
        work = self.work
        groups = group_models(work.subsets.kind, range(self._total), len(work.subsets), about["at_once"])
        share = self.share.of_chunks(len(groups))
        return groups[share.start : share.stop]

    def _return_merged(self, folder: PartsFolder) -> Part:
        """Say that a folder has all models; refuse one that lacks some, which are added without parts."""
        files = TruthFolder(folder.out)
        kept = files.read_request()
        files.compare(kept, self.request)
        there = sum(model < self._total for model in files.read_values(kept))
        if there < self._total:
            raise StoreError(
                f"{folder.out} already holds ground truth ({there} of {self._total} models are there): the others are "
                "trained without parts, by retrain; or give another folder."
            )
        return Part(self.share, folder.out, self._total, self._total, "model", self.share.of)

    def _train(
        self, folder: PartsFolder, files: TruthFolder, found: dict[str, Any] | None, progress: bool | Advance
    ) -> None:
        """Train the models that are missing, and write the record of the part."""
        work, rows = self.work, files.read_values(found) if found else {}
        about, tried = self._agree(folder, found, progress)
        missing = [models for models in self._mine(about) if not all(model in rows for model in models)]
        if not missing and (files.path / PART).is_file():
            return
        with contextlib.closing(self._bar(self._mine(about), progress)) as bar:
            bar.skip(len(rows) * work.units)
            if rows:
                work.refuse_changed_training(files.path, rows, about["noise"], bar)
            elif missing:
                tried |= self._compare_training(folder, about, tried, bar)
            files.write_request(about, work.subsets)
            for models in sorted(missing, key=lambda models: models.start not in tried):  # what is known is kept first
                known = len(models) == 1 and models.start in tried
                values = tried[models.start] if known else work.values(models, bar.advance)
                if known:
                    bar.advance(work.units)
                files.write_values(models, values, about)
        write_sealed(files.path / PART, {"part": str(self.share)})

    def _compare_training(
        self, folder: PartsFolder, about: dict[str, Any], tried: dict[int, Tensor], bar: Progress
    ) -> dict[int, Tensor]:
        """Refuse a `train` that does not make the models with which the first part tried its own; return what it made.

        Functions are known by their names only. One of the part's own models is trained for it, if one was tried.
        """
        place = folder.shared / REQUEST
        with folder.mending(REQUEST):
            kept = TruthFolder(place).read_values(about)
        if both := [model for model in kept if model in tried]:
            self.work.compare_training(folder.path, both[0], tried[both[0]], kept, about["noise"])
            return {}
        mine = {model for models in self._mine(about) for model in models}
        ordered = {model: kept[model] for model in sorted(kept, key=lambda model: model not in mine)}
        return {} if self.same else self.work.refuse_changed_training(folder.path, ordered, about["noise"], bar)

    def _bar(self, mine: Iterable[range], progress: bool | Advance) -> Progress:
        return Progress("retraining", sum(map(len, mine)) * self.work.units, self.work.unit, progress)

    def _agree(
        self, folder: PartsFolder, found: dict[str, Any] | None, progress: bool | Advance
    ) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """Return how all parts describe the ground truth, and the values of models trained to try `train`."""
        tried: dict[int, Tensor] = {}
        if (shared := self._read_shared(folder)) is None:
            about = found
            if about is None:
                at_once = min(self.work.at_once(), -(-self._total // self.share.of))
                about = {**self.request, **describe_circumstances(at_once, self.work.task.device)}
                mine = {model for models in self._mine(about) for model in models}
                with contextlib.closing(self._bar((), progress)) as bar:
                    others = [model for model in range(self._total) if model not in mine]
                    tried, about["noise"] = self.work.try_training(bar, others)
            folder.publish(REQUEST, lambda place: self._fill(place, about, tried))
            shared = self._read_shared(folder)
            assert shared is not None
        if found is not None and found != shared:
            path = folder.of(self.share)
            raise StoreError(
                f"{path} started with other choices than {folder.shared / REQUEST} records: delete {path}, and "
                "make the part again."
            )
        return shared, tried

    def _fill(self, place: Path, about: dict[str, Any], tried: dict[int, Tensor]) -> None:
        write_sealed(place / _DIVISION, {"of": self.share.of})
        for model, values in tried.items():
            TruthFolder(place).write_values(range(model, model + 1), values, about)
        write_sealed(place / TRUTH, about)

    def _read_shared(self, folder: PartsFolder) -> dict[str, Any] | None:
        """Read how the other parts describe the ground truth; refuse another one."""
        found = read_shared(folder)
        if found is None:
            return None
        of, about = found
        if of != self.share.of:
            raise StoreError(f"{folder.out} is divided into {of} parts, not {self.share.of}: give one of those.")
        if about["runs"] != self.request["runs"]:
            raise StoreError(
                f"{folder.out} is being made with runs={about['runs']}, not {self.request['runs']}: all parts need the "
                "same."
            )
        TruthFolder(folder.path).compare(about, self.request)
        if ("data" in about["fingerprints"]) != ("data" in self.request["fingerprints"]):
            first, now = ("with", "without") if "data" in about["fingerprints"] else ("without", "with")
            raise StoreError(
                f"{folder.path} was begun {first} data=, and this part is made {now}: the training data cannot be "
                "compared. Give the same data= to all parts."
            )
        return about


def read_shared(folder: PartsFolder) -> tuple[int, dict[str, Any]] | None:
    """Read of how many parts a ground truth is made, and how they describe it; None where none has come so far."""
    place = folder.shared / REQUEST
    if not (place / TRUTH).is_file():
        return None
    with folder.mending(REQUEST):
        of = read_division(read_json(place / _DIVISION).unsealed().record("of")["of"])
        return of, TruthFolder(place).read_request()


def name_models(folder: PartsFolder, total: int, share: Share) -> str:
    """Name the models of a part, by their numbers."""
    found = read_shared(folder)
    if found is None:
        return f"of {count_of(total, 'model')}"
    about = found[1]
    groups = group_models(about["kind"], range(total), about["subsets"], about["at_once"])
    chunks = share.of_chunks(len(groups))
    models = [str(model) for group in groups[chunks.start : chunks.stop] for model in group]
    return f"{'model' if len(models) == 1 else 'models'} {name_some(models, 6)}" if models else "no models"


def merge_truth(
    parts: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
) -> Truth:
    """Merge the parts of a ground truth.

    parts: the folder given as `out=` to `retrain_part`, or several of them.
    out: the folder of the ground truth; by default the one folder of the parts.

    The parts must be complete and of one ground truth, and all values are compared with their checksums. Parts in `out`
    are removed once it is complete, those in other folders stay. The same call again returns the ground truth.
    """
    folders, target = find_target(parts, out)
    with merging_into(folders, target, TRUTH, "ground truth") as merged:
        if merged:
            return _return_merged(folders, target)
        of, about = _read_same(folders)
        finished = find_finished(folders, of)
        _refuse_gaps(finished, about)
        for path in finished.values():
            own = path.absolute().is_relative_to(target.absolute())
            for file in (*path.glob("values-*.safetensors"), path / SUBSETS):
                place_file(file, target / file.name, link=own)
        write_sealed(target / TRUTH, about)
        truth = Truth.load(target)
        remove_parts(folders, target)
    return truth


def _return_merged(folders: list[PartsFolder], target: Path) -> Truth:
    """Return ground truth that was merged before, and remove what a killed process has left of its parts."""
    truth = Truth.load(target)
    for folder in folders:
        found = read_shared(folder)
        if found is not None and found[1] != TruthFolder(target).read_request():
            raise StoreError(
                f"{target} already holds ground truth, other than that of the parts in {folder.path}: give another "
                "folder with out=."
            )
    tidy_up(folders, target)
    return truth


def _read_same(folders: list[PartsFolder]) -> tuple[int, dict[str, Any]]:
    """Read what the parts in all folders share; refuse folders that differ in it."""
    first = read_shared(folders[0])
    if first is None and (folders[0].shared / REQUEST / f"{REQUEST}.json").is_file():
        raise StoreError(f"{folders[0].path} has parts of a store: imprint.merge merges them (or `imprint merge`).")
    if first is None:
        raise StoreError(f"{folders[0].shared} does not say what the parts are of: make any of them again.")
    for other in folders[1:]:
        if (found := read_shared(other)) != first:
            raise StoreError(
                f"the parts in {other.path} are not of the same ground truth as those in {folders[0].path}"
                f"{', or were begun apart' if found else ''}. Copy {folders[0].shared} to every machine before its "
                "first part begins."
            )
    return first


def _refuse_gaps(finished: dict[int, Path], about: dict[str, Any]) -> None:
    """Refuse parts whose values are damaged, or are not there."""
    groups = group_models(about["kind"], range(about["runs"] * about["subsets"]), about["subsets"], about["at_once"])
    for number, path in finished.items():
        files, share = TruthFolder(path), Share(number, len(finished))
        with advised(f"Delete {path}, and make the part again."):
            of_part = files.read_request()
        if of_part != about:
            raise StoreError(f"{path} is a part of another ground truth: delete it, and make it again.")
        files.read_subsets(about)
        there, chunks = files.read_values(about), share.of_chunks(len(groups))
        mine = [model for models in groups[chunks.start : chunks.stop] for model in models]
        if lacking := [model for model in mine if model not in there]:
            raise StoreError(
                f"{path} has no values of model {lacking[0]}: make part {share} again, which trains what is missing."
            )
