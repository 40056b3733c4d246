"""Draws the conclusions of a store anew whose sources have changed: what follows from all imprints together."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from imprint.simulation import engines
from imprint.simulation.engines import Simulated
from imprint.simulation.figures import summarise
from imprint.simulation.guards import check_weights
from imprint.store.assembling import read_figures_of
from imprint.store.checkpoint import Checkpoint, Measured, ShardFigures
from imprint.store.manifest import Manifest
from imprint.store.opening import Files

_NUMBER = re.compile(r"\d[\d.,]*(e[-+]?\d+)?")


def conclude(
    manifest: Manifest, figures: Sequence[Sequence[ShardFigures]], before: Sequence[tuple[Manifest, Files]]
) -> Manifest:
    """Return a manifest with the figures and the warnings that follow from its imprints.

    figures: what the files of each checkpoint say about their sources; none where it does not count.
    before: the stores that it was made from. Their warnings no longer hold where they were concluded from their
        imprints. A warning that takes what only a simulation knows stays as it was written.
    """
    past: set[str] = set()
    for each, files in before:
        if each.warnings:
            past |= set(map(_strip_numbers, _conclude(each, [_read(files, c) for c in each.checkpoints])[1]))
    found, now = _conclude(manifest, figures)
    kept = [each for each in manifest.warnings if _strip_numbers(each) not in past]
    checkpoints = tuple(replace(c, measured=m) for c, m in zip(manifest.checkpoints, found, strict=True))
    return replace(manifest, checkpoints=checkpoints, warnings=tuple(dict.fromkeys([*kept, *now])))


def _read(files: Files, checkpoint: Checkpoint) -> list[ShardFigures]:
    return [read_figures_of(files, file) for file in checkpoint.imprints]


def _conclude(manifest: Manifest, figures: Sequence[Sequence[ShardFigures]]) -> tuple[list[Measured], list[str]]:
    """Return what every checkpoint's imprints say, and the warnings that follow."""
    measured, notices = list[Measured](), list[str]()
    for index, (checkpoint, shards) in enumerate(zip(manifest.checkpoints, figures, strict=True)):
        if checkpoint.decided is None or not shards:
            measured.append(checkpoint.measured)
            continue
        remarks = _Remarks()

        def notice(message: str, remarks: _Remarks = remarks) -> None:
            if not remarks.asked:
                notices.append(message)
            remarks.asked = False

        found = Simulated(
            *(index, manifest.plan, checkpoint.decided, checkpoint.measured, list(shards), notice), remarks.ask
        )
        measured.append(summarise(engines.get(manifest.plan), found))
    if warning := check_weights([c.weight for c in manifest.checkpoints], [each.norms for each in measured]):
        notices.append(str(warning))
    return measured, notices


class _Remarks:
    """Stands for what only an engine knows that has simulated: a warning that takes it is not written anew."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> Mapping[str, str]:
        self.asked = True
        return _Nothing()


class _Nothing(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


def _strip_numbers(text: str) -> str:
    return _NUMBER.sub("#", text)
