"""Parts that somebody else has written: merging refuses them in one line, whatever is in them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imprint import Store, StoreError, merge
from imprint.simulation.engines.spectral import Spectral
from imprint.store.folder import write_sealed
from tests.simulation.killing import PLANS, run_part

Change = Callable[[dict[str, Any]], object]
PART, SETTLED, REQUEST = "1-of-2/part.json", "shared/checkpoint-000/settled.json", "shared/request/request.json"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "store"
    for number in (1, 2):
        run_part(folder, f"{number}/2", PLANS["spectral"])
    return folder


def first(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["manifest"]["checkpoints"][0]
    return found


CHANGES: dict[str, tuple[str, Change]] = {
    "a file outside": (PART, lambda v: first(v)["base"].update(path="checkpoint-000/../../../base.safetensors")),
    "a file in place of another": (PART, lambda v: first(v)["base"].update(path="checkpoint-000/basis.safetensors")),
    "a base in place of the manifest": (PART, lambda v: first(v)["base"].update(path="manifest.json")),
    "a table in another place": (PART, lambda v: v["manifest"]["sources"].update(path="checkpoint-000/x.json")),
    "no base": (PART, lambda v: first(v).update(base=None)),
    "rows of another part": (PART, lambda v: first(v)["imprints"][0].update(rows=[4, 6])),
    "no imprints": (PART, lambda v: first(v).update(imprints=[])),
    "no checkpoints": (PART, lambda v: v["manifest"].update(checkpoints=[])),
    "too many checkpoints": (PART, lambda v: v["manifest"]["checkpoints"].append(first(v))),
    "another learning rate": (PART, lambda v: first(v)["decided"].update(lr=1.0)),
    "another part": (PART, lambda v: v.update(part="2/2")),
    "no part at all": (PART, lambda v: v.update(part="9/2")),
    "another size": (PART, lambda v: first(v)["imprints"][0].update(bytes=1)),
    "a field too many": (PART, lambda v: v.update(more=1)),
    "another engine": (PART, lambda v: v["manifest"]["request"]["plan"].update(engine="unheard-of")),
    "another version": (PART, lambda v: v.update(schema=1)),
    "a rate beyond all numbers": (SETTLED, lambda v: v["checkpoint"]["decided"].update(lr=1e300)),
    "files of no rows": (SETTLED, lambda v: v["checkpoint"]["decided"].update(rows_per_file=0)),
    "a basis outside": (SETTLED, lambda v: v["checkpoint"]["basis"].update(path="../x")),
    "a basis elsewhere": (SETTLED, lambda v: v["checkpoint"]["basis"].update(path="checkpoint-000/y.safetensors")),
    "no basis": (SETTLED, lambda v: v["checkpoint"].update(basis=None)),
    "remarks that are none": (SETTLED, lambda v: v.update(remarks=[1])),
    "many parts": (REQUEST, lambda v: v.update(of=10**15)),
    "no parts": (REQUEST, lambda v: v.update(of=0)),
    "three parts": (REQUEST, lambda v: v.update(of=3)),
    "more checkpoints": (REQUEST, lambda v: v["request"]["states"].append("0" * 64)),
    "other data": (REQUEST, lambda v: v["request"]["data"].update(all="0" * 64)),
}


@pytest.mark.parametrize(("file", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_parts_that_were_changed_are_refused_in_one_line(
    file: str, change: Change, parts: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(parts, tmp_path / "store"))
    place = folder / "parts" / file
    values = json.loads(place.read_text())
    del values["sha256"]
    change(values)
    write_sealed(place, values)
    with pytest.raises(StoreError) as error:
        merge(folder, progress=False)
    assert "\n" not in str(error.value)
    assert not (folder / "manifest.json").exists()
    assert not (tmp_path / "base.safetensors").exists()


def test_parts_whose_seal_is_broken_are_refused(parts: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(parts, tmp_path / "store"))
    place = folder / "parts" / PART
    place.write_text(place.read_text().replace('"seconds"', '"Seconds"'))
    with pytest.raises(StoreError, match=r"part.json was changed after it was written"):
        merge(folder, progress=False)


@pytest.mark.parametrize("text", ["{", "{}", '{"schema": 1, "description": 3}', '{"schema": 99}'])
def test_descriptions_that_are_damaged_are_refused_before_anything_is_merged(
    text: str, parts: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(parts, tmp_path / "store"))
    place = folder / "parts" / "shared" / "description" / "about.json"
    place.parent.mkdir()
    place.write_text(text)
    with pytest.raises(StoreError, match=r"description.about\.json") as error:
        merge(folder, progress=False)
    assert "\n" not in str(error.value) and not (folder / "manifest.json").exists()
    place.unlink()
    merge(folder, progress=False)
    copied = shutil.copytree(parts / "parts", folder / "parts")  # as if it had been killed right after the manifest
    (copied / "shared" / "description").mkdir()
    (copied / "shared" / "description" / "about.json").write_text(text)
    merge(folder, progress=False).verify()
    assert not copied.exists()


def test_a_remark_that_the_engine_needs_and_is_missing_is_refused_in_one_line(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(parts, tmp_path / "store"))
    monkeypatch.setattr(Spectral, "conclude", lambda found: found.remarks()["parting"])
    with pytest.raises(StoreError, match=r"shared.checkpoint-000 lacks the remark 'parting': delete .*parts, and"):
        merge(folder, progress=False)
    assert not (folder / "manifest.json").exists()


def test_unchanged_parts_are_merged(parts: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(parts, tmp_path / "store"))
    merge(folder, progress=False)
    Store(folder).verify()
