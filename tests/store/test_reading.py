"""The store: what is in the folder, and that nothing in it is believed without proof."""

import gc
import hashlib
import itertools
import json
import math
import os
import shutil
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from imprint import Plan, SimulationError, Sources, Store, StoreError, Task, attribute, simulate
from imprint.simulation.engines.paths import PathEngine
from imprint.store.manifest import SCHEMA
from imprint.store.request import Request
from imprint.store.values import parsed, sealed

N = 12
SOURCES = Sources.groups(
    {"ann": [0, 1, 2], "bob": [2, 3], "cid": [4], "dot": range(5, 12), "eve": [0, 11]}, names={"eve": "Eve & co"}
)
PLAN = Plan(engine="trajectories", steps=(2, 3), lr=0.1, keep_pair=True)
CPU = torch.device("cpu")


def _columns(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randint(2, (rows,), generator=generator)


def _task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        model(3 * _columns(N, 1)[0] + 1)  # so that the running statistics are not those of a new layer
    return Task.classifier(model, parameters=["0.*", "3.weight"])


def _simulate(task: Task, out: Path | None, plan: Plan = PLAN, **options: Any) -> Store:
    states = [{name: tensor.clone() for name, tensor in task.state().items()}, task.state()]
    states[0]["0.bias"] += 0.1
    options = {"checkpoints": states, "progress": False, **options}
    return simulate(task, _columns(N, 1), SOURCES, plan, out=out, **options)


def _scores(task: Task, store: Store) -> Tensor:
    return attribute(task, store, _columns(4, 2), progress=False).scores


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of five sources in shards of one, at two checkpoints; not to be changed."""
    return _simulate(_task(), tmp_path_factory.mktemp("made") / "store", memory="1B", batch_size=5)


@pytest.fixture
def copied(made: Store, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(made.path, tmp_path / "store"))


def _manifest(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return values


def _change(path: Path, **values: Any) -> None:
    """Change the manifest as if it had been written so, with a checksum that is right."""
    changed = {**_manifest(path), **values}
    del changed["sha256"]
    (path / "manifest.json").write_text(json.dumps(sealed(changed)))


# --- the layout


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
    store = _simulate(_task(), tmp_path / "store", Plan(steps=2, lr=0.1, weight=(0.0, 1.0)))
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
    task = _task()
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
    manifest = _manifest(made.path)
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
    manifest = _manifest(made.path)
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
    manifest = _manifest(made.path)
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
        store = _simulate(_task(), tmp_path / "store")
    finally:
        os.umask(before)
    files = [path for path in store.path.rglob("*") if path.is_file()]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: mode for path in files}


def test_a_note_is_kept_as_it_was_given(tmp_path: Path) -> None:
    note = {"model": "run 7 – 最終", "tags": ["a", None, 1.5], "nested": {"deep": [[]]}}
    assert _simulate(_task(), tmp_path / "store", note=note).manifest.note == note
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
        _simulate(_task(), tmp_path / "store", note=note, progress=lambda done, total: steps.append(done))
    assert not steps and not (tmp_path / "store").exists()
    assert "\n" not in str(refused.value)


def test_a_store_shows_what_it_is(made: Store) -> None:
    shown = repr(made)
    assert "5 sources, 2 checkpoints, trajectories" in shown
    assert f"{made.bytes:,} bytes" in shown


# --- reading


def test_a_reopened_store_gives_identical_scores(made: Store) -> None:
    task, reopened = _task(), Store(made.path)
    assert reopened.manifest == made.manifest
    assert torch.equal(_scores(task, reopened), _scores(task, made))
    assert torch.equal(_scores(task, Store(str(made.path))), _scores(task, made))


def test_a_store_can_be_moved(made: Store, copied: Path) -> None:
    assert torch.equal(_scores(_task(), Store(copied)), _scores(_task(), made))


def test_shards_do_not_change_the_imprints(made: Store) -> None:
    task = _task()
    whole = _simulate(task, None)
    assert len(whole.checkpoints[0].imprints) == 1
    for start, stop in ((0, 5), (1, 4), (2, 3)):
        pieces, at_once = (store.imprints(0, start, stop, CPU) for store in (made, whole))
        for name, tensor in at_once.items():
            torch.testing.assert_close(pieces[name], tensor, rtol=1e-4, atol=1e-5)


def test_scores_do_not_depend_on_the_live_weights(made: Store) -> None:
    task = _task()
    before = _scores(task, made)
    with torch.no_grad():
        for tensor in task.model.state_dict().values():
            tensor.add_(1)
    assert torch.equal(_scores(task, made), before)


def test_simulation_from_a_checkpoint_does_not_depend_on_the_live_weights(made: Store) -> None:
    task = _task()
    states = [task.state(), task.state()]
    states[0]["0.bias"] += 0.1
    with torch.no_grad():
        for tensor in task.model.state_dict().values():
            tensor.add_(1)
    store = _simulate(task, None, checkpoints=states, memory="1B", batch_size=5)
    assert torch.equal(_scores(task, store), _scores(task, made))


def test_a_simulation_is_repeated_to_the_bit(made: Store) -> None:
    again = _simulate(_task(), None, memory="1B", batch_size=5)
    for mine, theirs in zip(again.checkpoints, made.checkpoints, strict=True):
        assert [file.sha256 for file in mine.imprints] == [file.sha256 for file in theirs.imprints]


# --- damage


def test_a_removed_shard_names_itself_and_its_sources(copied: Path) -> None:
    (copied / "checkpoint-000" / "imprints-00003.safetensors").unlink()
    store = Store(copied)
    with pytest.raises(StoreError, match=r"imprints-00003\.safetensors is missing.*row 3: source 'dot'"):
        _scores(_task(), store)
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
    for use in (lambda: _scores(_task(), store), store.verify):
        with pytest.raises(StoreError, match=rf"checkpoint-001/{kind}\.safetensors is damaged.*{how}.*{which}"):
            use()


def test_a_shard_of_many_sources_names_the_first_and_the_last(tmp_path: Path) -> None:
    store = _simulate(_task(), tmp_path / "store")
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
    (copied / "manifest.json").write_text(json.dumps({**_manifest(copied), "created": "today"}))
    with pytest.raises(StoreError, match=r"manifest\.json was changed after it was written"):
        Store(copied)


def test_a_manifest_may_be_laid_out_in_another_way(made: Store, copied: Path) -> None:
    values = dict(reversed(_manifest(copied).items()))
    (copied / "manifest.json").write_text(json.dumps(values, indent=4, ensure_ascii=False))
    assert Store(copied).manifest == made.manifest


def test_verify_finds_damage_that_came_after_the_first_use(copied: Path) -> None:
    store = Store(copied)
    store.verify()
    _scores(_task(), store)
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


# --- what is left behind


def test_a_temporary_store_vanishes_with_its_object() -> None:
    store = _simulate(_task(), None)
    path = store.path
    assert (path / "manifest.json").is_file()
    del store
    gc.collect()
    assert not path.exists()


def test_a_temporary_store_vanishes_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    store = _simulate(_task(), None)
    recwarn.clear()
    del store
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)]


def test_a_kept_store_outlives_its_object(tmp_path: Path) -> None:
    store = _simulate(_task(), tmp_path / "deep" / "store")
    del store
    gc.collect()
    assert len(Store(tmp_path / "deep" / "store")) == 5


def _failing(after: int) -> Task:
    """A task whose loss is not finite any more after some calls."""
    calls = 0

    def output_loss(z: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return z.square().sum(1) * (torch.nan if calls > after else 1.0)

    return Task(nn.Linear(3, 2), outputs=lambda model, batch: model(batch[0]), output_loss=output_loss)


@pytest.mark.parametrize("after", [0, 40], ids=["at once", "later"])
def test_a_failed_simulation_leaves_no_folder_behind(after: int, tmp_path: Path) -> None:
    with pytest.raises(SimulationError):
        simulate(
            _failing(after), _columns(N, 1), SOURCES, Plan(steps=50, lr=0.1), out=tmp_path / "store", progress=False
        )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_only_an_interruption_keeps_the_steps_that_were_chosen(error: type[BaseException], tmp_path: Path) -> None:
    """Before the first file; other errors leave the folder as it was."""

    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        _simulate(_task(), tmp_path / "store", progress=stop)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    interrupted = error is not RuntimeError
    assert left == (["unfinished.json"] if interrupted else [])
    assert (tmp_path / "store").exists() == interrupted
    assert _simulate(_task(), tmp_path / "store").manifest.cost.resumed == interrupted


def test_an_interruption_before_steps_are_chosen_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PathEngine, "settle", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _simulate(_task(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_failed_simulation_keeps_a_folder_that_was_there_before(tmp_path: Path) -> None:
    with pytest.raises(SimulationError):
        simulate(_failing(0), _columns(N, 1), SOURCES, Plan(steps=2, lr=0.1), out=tmp_path, progress=False)
    assert tmp_path.exists()
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_may_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    assert len(_simulate(_task(), tmp_path / "store")) == 5


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("imprint.store.files.save_file", no_space)
    with pytest.raises(StoreError, match=r"could not write .*base\.safetensors.*No space left"):
        _simulate(_task(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


# --- batches that do not lend themselves to files


def _plain(data: Any, loss: Any, **options: Any) -> Store:
    plan, each = Plan(steps=2, lr=0.1), Sources.per_example(N)
    return simulate(Task(nn.Linear(3, 2), loss), data, each, plan, progress=False, **options)


def test_a_batch_may_hold_the_same_tensor_twice() -> None:
    x, y = _columns(N, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]) + model(batch["same"]), batch["y"], reduction="none")

    samples = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]

    def collate(samples: list[Any]) -> Any:
        rows = torch.stack([sample["x"] for sample in samples])
        return {"x": rows, "same": rows, "y": torch.stack([sample["y"] for sample in samples])}

    store = _plain(samples, loss, collate_fn=collate)
    probes = list(load_file(store.path / "probes.safetensors").values())
    assert len(probes) == 3 and sum(torch.equal(a, b) for a, b in itertools.combinations(probes, 2)) == 1


@pytest.mark.parametrize("odd", [math.inf, math.nan, 10**30, "half of \ud83d"], ids=str)
def test_examples_that_json_cannot_keep_mean_no_probes(odd: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def collate(samples: list[Any]) -> Any:
        return (*torch.utils.data.default_collate(samples), [odd])

    samples = list(zip(*_columns(N, 1), strict=True))
    assert _plain(samples, loss, collate_fn=collate).manifest.probes is None
    assert _plain(samples, loss).manifest.probes is not None


def test_a_folder_that_is_not_there_is_told_from_one_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no folder .*nowhere\.$"):
        Store(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(StoreError, match="holds no store"):
            Store(path)
