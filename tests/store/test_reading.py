"""A store is read as it was written, and nothing in it is believed without proof."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imprint import Store, StoreError, Task, attribute
from imprint.store.manifest import SCHEMA
from imprint.store.values import sealed
from tests.store.manifests import manifest_of
from tests.store.sharded import CPU, columns, new_task, simulated


def _scores(task: Task, store: Store) -> Tensor:
    return attribute(task, store, columns(4, 2), progress=False).scores


@pytest.fixture
def copied(made: Store, tmp_path: Path) -> Path:
    """A copy of a store that may be damaged."""
    return Path(shutil.copytree(made.path, tmp_path / "store"))


def _change(path: Path, **values: Any) -> None:
    """Change the manifest as if it had been written so, with a checksum that is right."""
    changed = {**manifest_of(path), **values}
    del changed["sha256"]
    (path / "manifest.json").write_text(json.dumps(sealed(changed)))


def test_a_reopened_store_gives_identical_scores(made: Store) -> None:
    task, reopened = new_task(), Store(made.path)
    assert reopened.manifest == made.manifest
    assert torch.equal(_scores(task, reopened), _scores(task, made))
    assert torch.equal(_scores(task, Store(str(made.path))), _scores(task, made))


def test_a_store_can_be_moved(made: Store, copied: Path) -> None:
    assert torch.equal(_scores(new_task(), Store(copied)), _scores(new_task(), made))


def test_shards_do_not_change_the_imprints(made: Store) -> None:
    task = new_task()
    whole = simulated(task, None)
    assert len(whole.checkpoints[0].imprints) == 1
    for start, stop in ((0, 5), (1, 4), (2, 3)):
        pieces, at_once = (store.imprints(0, start, stop, CPU) for store in (made, whole))
        for name, tensor in at_once.items():
            torch.testing.assert_close(pieces[name], tensor, rtol=1e-4, atol=1e-5)


def test_scores_do_not_depend_on_the_live_weights(made: Store) -> None:
    task = new_task()
    before = _scores(task, made)
    with torch.no_grad():
        for tensor in task.model.state_dict().values():
            tensor.add_(1)
    assert torch.equal(_scores(task, made), before)


def test_simulation_from_a_checkpoint_does_not_depend_on_the_live_weights(made: Store) -> None:
    task = new_task()
    states = [task.state(), task.state()]
    states[0]["0.bias"] += 0.1
    with torch.no_grad():
        for tensor in task.model.state_dict().values():
            tensor.add_(1)
    store = simulated(task, None, checkpoints=states, memory="1B", batch_size=5)
    assert torch.equal(_scores(task, store), _scores(task, made))


def test_a_simulation_is_repeated_to_the_bit(made: Store) -> None:
    again = simulated(new_task(), None, memory="1B", batch_size=5)
    for mine, theirs in zip(again.checkpoints, made.checkpoints, strict=True):
        assert [file.sha256 for file in mine.imprints] == [file.sha256 for file in theirs.imprints]


def test_a_removed_shard_names_itself_and_its_sources(copied: Path) -> None:
    (copied / "checkpoint-000" / "imprints-00003.safetensors").unlink()
    store = Store(copied)
    with pytest.raises(StoreError, match=r"imprints-00003\.safetensors is missing.*row 3: source 'dot'"):
        _scores(new_task(), store)
    with pytest.raises(StoreError, match=r"imprints-00003\.safetensors is missing"):
        store.verify()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied"])
@pytest.mark.parametrize("kind", ["imprints-00002", "base"])
def test_a_damaged_file_names_itself(damage: str, kind: str, copied: Path) -> None:
    place = copied / "checkpoint-001" / f"{kind}.safetensors"
    content = place.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    place.write_bytes({"flipped": flipped, "truncated": content[:-5], "emptied": b""}[damage])
    store = Store(copied)
    how = "checksum" if damage == "flipped" else f"{len(place.read_bytes())} bytes, {len(content)} were written"
    which = "row 2: source 'cid'" if kind != "base" else ""
    for use in (lambda: _scores(new_task(), store), store.verify):
        with pytest.raises(StoreError, match=rf"checkpoint-001/{kind}\.safetensors is damaged.*{how}.*{which}"):
            use()


def test_a_shard_of_many_sources_names_the_first_and_the_last(tmp_path: Path) -> None:
    store = simulated(new_task(), tmp_path / "store")
    (store.path / "checkpoint-000" / "imprints-00000.safetensors").unlink()
    with pytest.raises(StoreError, match=r"\(rows 0 to 4: sources 'ann' to 'eve', 'Eve & co'\)"):
        store.verify()


def test_damage_elsewhere_does_not_stop_what_is_whole(copied: Path) -> None:
    (copied / "checkpoint-001" / "imprints-00002.safetensors").unlink()
    store = Store(copied)
    assert store.imprints(1, 0, 2, CPU)["0.bias"].shape == (2, 4)


def test_damaged_sources_are_noticed_on_opening(copied: Path) -> None:
    (copied / "sources.json").write_text((copied / "sources.json").read_text().replace("bob", "rob"))
    with pytest.raises(StoreError, match=r"sources\.json is damaged"):
        Store(copied)


def test_a_changed_manifest_is_noticed_on_opening(copied: Path) -> None:
    (copied / "manifest.json").write_text(json.dumps({**manifest_of(copied), "created": "today"}))
    with pytest.raises(StoreError, match=r"manifest\.json was changed after it was written"):
        Store(copied)


def test_a_manifest_may_be_laid_out_in_another_way(made: Store, copied: Path) -> None:
    values = dict(reversed(manifest_of(copied).items()))
    (copied / "manifest.json").write_text(json.dumps(values, indent=4, ensure_ascii=False))
    assert Store(copied).manifest == made.manifest


def test_verify_finds_damage_that_came_after_the_first_use(copied: Path) -> None:
    store = Store(copied)
    store.verify()
    _scores(new_task(), store)
    (copied / "checkpoint-000" / "midpoints-00001.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match=r"midpoints-00001\.safetensors is damaged"):
        store.verify()


def test_a_folder_without_a_manifest_is_no_store(copied: Path) -> None:
    (copied / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"holds no store.*manifest\.json"):
        Store(copied)


def test_a_store_of_a_newer_version_asks_for_an_upgrade(copied: Path) -> None:
    _change(copied, schema=SCHEMA + 1)
    with pytest.raises(StoreError, match=f"schema {SCHEMA + 1}.*upgrade imprint"):
        Store(copied)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"schema": "one"}', '{"schema": 1}', "\x00\x01"])
def test_garbage_for_a_manifest_is_refused(text: str, copied: Path) -> None:
    (copied / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match="manifest"):
        Store(copied)


def test_bytes_that_are_no_text_are_refused(copied: Path) -> None:
    (copied / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read"):
        Store(copied)


@pytest.mark.parametrize(
    "values",
    [
        {"surprise": 1},
        {"request": {"plan": {"engine": "magic"}}},
        {"request": None},
        {"checkpoints": [{}]},
        {"checkpoints": 3},
        {"sources": {"path": "sources.json"}},
    ],
    ids=["unknown field", "few fields", "no request", "empty checkpoint", "no list", "no checksum"],
)
def test_a_manifest_that_does_not_fit_is_refused(values: dict[str, Any], copied: Path) -> None:
    _change(copied, **values)
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read: .*" + next(iter(values)) + "[^\n]*$"):
        Store(copied)


def test_a_folder_that_is_not_there_is_told_from_one_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no folder .*nowhere\.$"):
        Store(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(StoreError, match="holds no store"):
            Store(path)
