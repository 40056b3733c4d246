"""Compares where the unperturbed paths of parts ended, before they are merged."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from imprint.errors import StoreError
from imprint.store.checkpoint import Checkpoint
from imprint.store.manifest import SOURCES
from imprint.store.part_writing import PartRecord, name_checkpoint
from imprint.store.path_ends import END, compare_ends, read_end
from imprint.store.table import Table
from imprint.store.values import read_json
from imprint.task import Parameters

Records = Mapping[int, tuple[Path, PartRecord]]


def refuse_other_ends(records: Records, agreed: Mapping[int, Checkpoint]) -> None:
    """Refuse parts whose paths ended apart: they read other data, or drew other random numbers.

    agreed: how all parts simulate the checkpoints that count.
    """
    for index, checkpoint in agreed.items():
        first: tuple[Path, Parameters] | None = None
        for path, end in _read_ends(records, index, checkpoint.choices.rows_per_file):
            first = first or (path, end)
            if apart := compare_ends(first[1], end):
                both = f"{first[0]} and {path}" if path != first[0] else f"sources of {path}"
                raise StoreError(
                    f"{both} are not of the same simulation: at checkpoint {index} the path ends elsewhere, "
                    f"{apart:.2g} times its length apart. They read other data, or such that changes from reading to "
                    "reading, or drew other random numbers: delete what is wrong, and make it again as the other parts "
                    "were made."
                )


def _read_ends(records: Records, index: int, rows: int) -> Iterator[tuple[Path, Parameters]]:
    """Yield where the path of every file of imprints ended, with the part that has it."""
    path, record = next(iter(records.values()))
    count = len(Table.read(read_json(path / SOURCES), record.manifest.request.n))
    for path, record in records.values():
        for chunk in record.part.of_chunks(-(-count // rows)):
            end = read_end(path / name_checkpoint(index) / f"{END}-{chunk:05}.safetensors")
            if end is not None:
                yield path, end
