"""The store: what is in its folder."""

import hashlib
import json
import math
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from imprint import Plan, Store, StoreError
from imprint.store.manifest import SCHEMA
from imprint.store.request import Request
from imprint.store.values import parsed
from tests.store.manifests import manifest_of
from tests.store.sharded import CPU, PLAN, N, new_task, simulated


def test_the_folder_holds_a_manifest_the_sources_and_shards_for_each_checkpoint(made: Store) -> None:
    files = {str(path.relative_to(made.path)) for path in made.path.rglob("*") if path.is_file()}
    shards = {
        f"checkpoint-00{checkpoint}/{kind}-0000{shard}.safetensors"
        for checkpoint in range(2)
        for kind in ("imprints", "midpoints")
        for shard in range(5)
    }
    bases = {f"checkpoint-00{checkpoint}/base.safetensors" for checkpoint in range(2)}
    assert files == {"manifest.json", "sources.json", "probes.safetensors"} | shards | bases


def test_what_does_not_fit_is_kept_out_of_the_folder(tmp_path: Path) -> None:
    """Without a pair there are no midpoints, and with room for all there is one shard."""
    store = simulated(new_task(), tmp_path / "store", Plan(steps=2, lr=0.1, weight=(0.0, 1.0)))
    files = {str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file()}
    checkpoint = {f"checkpoint-001/{name}.safetensors" for name in ("base", "imprints-00000")}
    assert files == {"manifest.json", "sources.json", "probes.safetensors"} | checkpoint


def test_a_shard_has_one_row_per_source_for_each_selected_parameter(made: Store) -> None:
    for checkpoint in made.checkpoints:
        assert [file.rows for file in checkpoint.imprints] == [(i, i + 1) for i in range(5)]
        for file in checkpoint.imprints:
            with safe_open(made.path / file.path, framework="pt") as tensors:
                shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
            assert shapes == {"0.weight": [1, 4, 3], "0.bias": [1, 4], "3.weight": [1, 2, 4]}


def test_the_base_holds_every_parameter_and_buffer(made: Store) -> None:
    task = new_task()
    base = made.base(1, CPU)
    assert base.keys() == task.model.state_dict().keys()
    for name, tensor in task.model.state_dict().items():
        assert torch.equal(base[name], tensor) == (name not in task.names), f"only what is selected moves: {name}"


def test_sources_are_listed_with_ids_names_and_sizes(made: Store) -> None:
    table = json.loads((made.path / "sources.json").read_text())
    assert table["ids"] == ["ann", "bob", "cid", "dot", "eve"]
    assert table["names"] == ["ann", "bob", "cid", "dot", "Eve & co"]
    assert table["sizes"] == [3, 2, 1, 7, 2]
    assert (made.source_ids, made.source_names, made.source_sizes) == tuple(
        tuple(table[key]) for key in ("ids", "names", "sizes")
    )


def test_the_manifest_says_how_the_store_was_made(made: Store) -> None:
    manifest = manifest_of(made.path)
    assert manifest["schema"] == SCHEMA
    request = manifest["request"]
    assert (request["n"], request["dtype"], request["fixed"]) == (N, "float32", {})
    assert Plan.from_json(request["plan"]) == PLAN
    assert request["parameters"] == {
        "0.weight": {"shape": [4, 3], "dtype": "torch.float32"},
        "0.bias": {"shape": [4], "dtype": "torch.float32"},
        "3.weight": {"shape": [2, 4], "dtype": "torch.float32"},
    }
    assert [checkpoint["steps"] for checkpoint in manifest["checkpoints"]] == [2, 3]
    for checkpoint in manifest["checkpoints"]:
        decided, measured = checkpoint["decided"], checkpoint["measured"]
        assert (decided["lr"], decided["epsilon"], decided["rows_at_once"], decided["vectorised"]) == (
            0.1,
            1.0,
            1,
            True,
        )
        assert all(measured[name] is not None for name in ("curvature", "stability", "drift", "norms", "linearity"))
    assert request.keys() >= {"states", "moments", "sources", "data", "probes", "modules", "regulariser"}
    assert manifest["execution"] == {"device": "cpu", "threads": torch.get_num_threads(), "batch_size": 5}
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"].keys() >= {"python", "torch", "numpy", "safetensors"}
    assert manifest["created"].endswith("+00:00")


def test_checksums_and_sizes_are_those_of_the_files(made: Store) -> None:
    manifest = manifest_of(made.path)
    files = [manifest["sources"], manifest["probes"]["file"]]
    for checkpoint in manifest["checkpoints"]:
        files += [checkpoint["base"], *checkpoint["imprints"], *checkpoint["midpoints"]]
    assert len(files) == len([path for path in made.path.rglob("*") if path.is_file()]) - 1
    for file in files:
        content = (made.path / file["path"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["bytes"] == len(content)
    assert made.bytes == sum(file["bytes"] for file in files)


def test_the_manifest_has_a_checksum_of_everything_else_in_it(made: Store) -> None:
    manifest = manifest_of(made.path)
    checksum = manifest.pop("sha256")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert checksum == hashlib.sha256(canonical.encode()).hexdigest()


def test_a_request_is_read_as_it_was_written(made: Store) -> None:
    request = made.manifest.request
    assert Request.from_json(parsed(json.dumps(asdict(request)).encode(), Path("request"))) == request


@pytest.mark.skipif(os.name == "nt", reason="permissions of files are another matter there")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_permissions_the_umask_leaves_them(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        store = simulated(new_task(), tmp_path / "store")
    finally:
        os.umask(before)
    files = [path for path in store.path.rglob("*") if path.is_file()]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: mode for path in files}


def test_a_note_is_kept_as_it_was_given(tmp_path: Path) -> None:
    note = {"model": "run 7 – 最終", "tags": ["a", None, 1.5], "nested": {"deep": [[]]}}
    assert simulated(new_task(), tmp_path / "store", note=note).manifest.note == note
    assert Store(tmp_path / "store").manifest.note == note


def _nested(depth: int) -> Any:
    inner: Any = None
    for _ in range(depth):
        inner = [inner]
    return inner


NOTES: dict[str, Any] = {
    "half of a character": "half of \ud83d",
    "a large number": 10**30,
    "deep": json.loads("[" * 70 + "]" * 70),
    "deeper than Python goes": _nested(100_000),
    "NaN": [math.nan],
    "a tensor": {"loss": torch.ones(1)},
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_a_note_that_could_not_be_read_again_is_refused_before_the_work(note: Any, tmp_path: Path) -> None:
    steps: list[int] = []
    with pytest.raises(StoreError, match=r"^note must be made of JSON values: ") as refused:
        simulated(new_task(), tmp_path / "store", note=note, progress=lambda done, total: steps.append(done))
    assert not steps and not (tmp_path / "store").exists()
    assert "\n" not in str(refused.value)


def test_a_store_shows_what_it_is(made: Store) -> None:
    shown = repr(made)
    assert "5 sources, 2 checkpoints, trajectories" in shown
    assert f"{made.bytes:,} bytes" in shown
