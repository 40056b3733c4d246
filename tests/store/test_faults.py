"""Whatever happens to a store, on its disk or in its folder: the answer is right, or an error says what is wrong."""

import hashlib
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from imprint import Plan, Sources, Store, StoreError, Task, attribute, simulate
from imprint.cli.inspection import inspect_store
from imprint.simulation import snapshot
from imprint.store.manifest import SCHEMA
from imprint.store.values import sealed
from tests.simulation.test_resume import contents

N = 12
PLAN = Plan(engine="trajectories", steps=2, lr=0.1, keep_pair=True, weight=(1.0, 0.0, 2.0))
SOURCES = Sources.groups({"ann": [0, 1, 2], "bob": [2, 3], "cid": [4, 11]})


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), parameters="0.*")


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 3, generator=generator), torch.randint(0, 2, (N,), generator=generator)


def make(out: Path | str, plan: Plan = PLAN, sources: Sources = SOURCES, **options: Any) -> Store:
    """Three checkpoints, of which the second does not count, in shards of two sources and one."""
    states = [{name: scale * t for name, t in task().state().items()} for scale in (0.5, 0.8, 1.0)]
    options = {"checkpoints": states, "progress": False, "memory": "14kB", **options}
    return simulate(task(), data(), sources, plan, out=out, **options)


def scores(store: Store | Path, **options: Any) -> Tensor:
    x, y = data()
    found: Tensor = attribute(task(), store, (x[:2], y[:2]), progress=False, **options).scores
    return found


def both(store: Store) -> Tensor:
    """Scores by derivatives and by the pair of end points, which read different parts of a store."""
    return torch.stack([scores(store), scores(store, readout="literal")])


def snapshot_of(folder: Path) -> dict[str, tuple[bytes | None, int, int]]:
    """All there is in a folder: contents, permissions and times of change."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else None,
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nothing has happened to; not to be changed."""
    return make(tmp_path_factory.mktemp("sound") / "store").path


@pytest.fixture(scope="module")
def right(sound: Path) -> Tensor:
    return both(Store(sound))


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


# --- JSON that may hold anything


def resealed(values: Any) -> Any:
    """A manifest with a checksum that is right again."""
    if not isinstance(values, dict):
        return values
    try:
        return sealed({name: value for name, value in values.items() if name != "sha256"})
    except ValueError:  # NaN has no checksum
        return values


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON document has values."""
    yield path
    if isinstance(values, dict | list):
        for key in values if isinstance(values, dict) else range(len(values)):
            yield from places(values[key], (*path, key))


def changed(values: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with another value at a place."""
    if not path:
        return change(values)
    copy = dict(values) if isinstance(values, dict) else list(values)
    copy[path[0]] = changed(values[path[0]], path[1:], change)
    return copy


ODD: list[Any] = [
    *(-1, 0, 1, 0.5, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(10**400), 1e-320, 1e308),
    *(float("nan"), float("inf"), -float("inf"), True, False, None, [], {}, "", "0", [0, 1], [1, 0], [0, 10**9]),
    *(
        "\ud800",
        "\udfff",
        "..",
        "../x",
        "/etc/passwd",
        "sources.json",
        "manifest.json",
        "a\0b",
        "C:\\x",
        "\n",
        "é" * 99,
    ),
    *("tangent", "one_sided", "auto", "float64", "torch.float64", "torch.int64", "torch.nn", "0" * 64),
]
JSON = st.one_of(
    st.sampled_from(ODD),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
)


@st.composite
def mutations(draw: st.DrawFn, document: Any) -> Any:
    """The document with a value replaced, removed, added, doubled, or swapped for one from elsewhere in it."""
    everywhere = list(places(document))
    path = draw(st.sampled_from(everywhere))

    def change(value: Any) -> Any:
        kind = draw(st.sampled_from(["replace", "elsewhere", "drop", "add"]))
        if kind == "elsewhere":
            other = document
            for key in draw(st.sampled_from(everywhere)):
                other = other[key]
            return other
        if kind == "drop" and isinstance(value, dict | list) and value:
            key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
            return (
                {k: v for k, v in value.items() if k != key}
                if isinstance(value, dict)
                else [item for index, item in enumerate(value) if index != key]
            )
        if kind == "add" and isinstance(value, dict):
            return {**value, draw(st.text(max_size=4)): draw(JSON)}
        if kind == "add" and isinstance(value, list):
            return [*value, draw(st.sampled_from(value) if value else JSON)]
        return draw(JSON)

    return changed(document, path, change)


@st.composite
def damages(draw: st.DrawFn, text: bytes) -> bytes:
    """The text cut short, with bits flipped, or with bytes put in."""
    where = draw(st.integers(0, len(text) - 1))
    kind = draw(st.sampled_from(["cut", "flip", "insert"]))
    if kind == "cut":
        return text[:where]
    if kind == "flip":
        return text[:where] + bytes([text[where] ^ (1 << draw(st.integers(0, 7)))]) + text[where + 1 :]
    return text[:where] + draw(st.binary(min_size=1, max_size=4)) + text[where:]


@contextmanager
def a_copy(sound: Path, **files: bytes) -> Iterator[Path]:
    """A copy of a store with other JSON files; its tensors are links within reach of no mutation."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(sound, Path(folder) / "store", copy_function=os.link))
        for name, content in files.items():
            (copy / f"{name}.json").unlink()
            (copy / f"{name}.json").write_bytes(content)
        yield copy


def outcome(folder: Path) -> Tensor | None:
    """What a user sees of a store: scores, or an error of one line. Anything else is raised here."""
    try:
        store = Store(folder)
        store.verify()
        json.dumps(inspect_store(store))
        return both(store)
    except StoreError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000
    return None


def manifest_of(sound: Path) -> Any:
    return json.loads((sound / "manifest.json").read_text())


@settings(max_examples=80)
@given(draw=st.data())
def test_a_changed_manifest_is_refused_or_changes_nothing(draw: st.DataObject, sound: Path, right: Tensor) -> None:
    text = json.dumps(draw.draw(mutations(manifest_of(sound)))).encode()
    with a_copy(sound, manifest=text) as folder:
        seen = outcome(folder)
        assert seen is None or torch.equal(seen, right)


@settings(max_examples=60)
@given(draw=st.data())
def test_a_damaged_manifest_is_refused_or_changes_nothing(draw: st.DataObject, sound: Path, right: Tensor) -> None:
    with a_copy(sound, manifest=draw.draw(damages((sound / "manifest.json").read_bytes()))) as folder:
        seen = outcome(folder)
        assert seen is None or torch.equal(seen, right)


@settings(max_examples=150)
@given(draw=st.data())
def test_a_manifest_written_by_another_hand_gives_finite_scores_or_an_error(draw: st.DataObject, sound: Path) -> None:
    """With a checksum that is right, so that every value is looked at for itself."""
    text = json.dumps(resealed(draw.draw(mutations(manifest_of(sound))))).encode()
    with a_copy(sound, manifest=text) as folder:
        seen = outcome(folder)
        assert seen is None or bool(seen.isfinite().all())


@settings(max_examples=80)
@given(draw=st.data())
def test_a_table_of_sources_with_anything_in_it_is_refused_or_changes_no_score(
    draw: st.DataObject, sound: Path, right: Tensor
) -> None:
    table = json.loads((sound / "sources.json").read_text())
    text = draw.draw(
        mutations(table).map(lambda values: json.dumps(values).encode()) | damages(json.dumps(table).encode())
    )
    file = {"path": "sources.json", "sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text), "rows": None}
    manifest = json.dumps(resealed({**manifest_of(sound), "sources": file})).encode()
    with a_copy(sound, manifest=manifest, sources=text) as folder:
        seen = outcome(folder)
        assert seen is None or torch.equal(seen, right)
        if seen is not None:
            assert len(set(Store(folder).source_ids)) == 3


FACTORED = Plan(engine="spectral", steps=2, lr=0.1, directions=3, weight=(1.0, 0.0, 2.0))


@pytest.fixture(scope="module")
def factored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with imprints in factored form; not to be changed."""
    store = make(tmp_path_factory.mktemp("factored") / "store", FACTORED, Sources.per_example(N).rows(0, 3))
    assert store.checkpoints[0].choices.layers == ("0",)
    return store.path


@settings(max_examples=100)
@given(draw=st.data(), sealing=st.booleans())
def test_a_changed_manifest_of_a_factored_store_is_refused_or_gives_finite_scores(
    draw: st.DataObject, sealing: bool, factored: Path
) -> None:
    values = draw.draw(mutations(manifest_of(factored)))
    text = json.dumps(resealed(values) if sealing else values).encode()
    with a_copy(factored, manifest=text) as folder:
        try:
            store = Store(folder)
            store.verify()
            json.dumps(inspect_store(store))
            seen = torch.stack([scores(store), scores(store, readout="gradient")])
        except StoreError as error:
            message = str(error)
        else:
            message = ""
            assert bool(seen.isfinite().all())
        assert "\n" not in message and len(message) < 1000


FACTORED_WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no basis": (("basis",), None, r"checkpoints\[0\]\.basis and checkpoints\[0\]\.decided\.layers belong together"),
    "no layers": (
        ("decided", "layers"),
        [],
        r"checkpoints\[0\]\.basis and checkpoints\[0\]\.decided\.layers belong together",
    ),
    "another layer": (("decided", "layers"), ["7"], "'7', which is no linear layer of its parameters"),
    "no directions": (("decided", "directions"), None, r"checkpoints\[0\]\.basis has no place without directions"),
    "other directions": (("decided", "directions"), 2, "does not fit the manifest: tensor .* is .*, not"),
    "half a step": (("steps",), 0.5, r"checkpoints\[0\]\.steps must be a whole number"),
}


@pytest.mark.parametrize(("path", "value", "message"), FACTORED_WRONG.values(), ids=FACTORED_WRONG.keys())
def test_what_is_wrong_with_a_factored_checkpoint_is_named(
    path: tuple[Any, ...], value: Any, message: str, factored: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(factored, tmp_path / "store"))
    rewrite(folder, "checkpoints", 0, *path, value=value)
    with pytest.raises(StoreError, match=message):
        scores(folder)


def test_a_basis_belongs_to_the_spectral_engine(copied: Path) -> None:
    file = {"path": "checkpoint-000/basis.safetensors", "sha256": "0" * 64, "bytes": 1, "rows": None}
    rewrite(copied, "checkpoints", 0, "decided", "layers", value=["0"])
    rewrite(copied, "checkpoints", 0, "basis", value=file)
    with pytest.raises(StoreError, match=r"checkpoints\[0\]\.basis has no place without directions"):
        Store(copied)


def rewrite(folder: Path, *path: Any, value: Any) -> None:
    """Change one value of the manifest, with a checksum that is right again."""
    values = resealed(changed(manifest_of(folder), path, lambda _: value))
    (folder / "manifest.json").write_text(json.dumps(values))


SHARD = ("checkpoints", 0, "imprints")
WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "n is none": (("request", "n"), 0, "n must be a whole number of at least 1, got 0"),
    "n is enormous": (("request", "n"), 10**30, "number '1000000000000000000000000000000' is too large"),
    "n is a flag": (("request", "n"), True, "n must be a whole number of at least 1, got True"),
    "unknown dtype": (("request", "dtype"), "int8", "dtype must be one of float32, bfloat16, float64, got 'int8'"),
    "infinite lr": (("request", "plan", "lr"), float("inf"), "Infinity is not a number of JSON"),
    "overflowing lr": (("request", "plan", "lr"), -0.5, "plan: lr must be a positive number"),
    "weights of nothing": (
        ("request", "plan", "weight"),
        [0.0, 0.0, 0.0],
        "plan: weight must be positive for at least one",
    ),
    "other weight": (("checkpoints", 0, "weight"), 3.0, r"checkpoints\[0\]\.weight is 3\.0, by the plan it is 1\.0"),
    "too few settings": (("request", "plan", "steps"), [2, 2], "plan: settings per checkpoint must be equally many"),
    "no epsilon": (("checkpoints", 0, "decided", "epsilon"), None, r"decided\.epsilon is None, by the plan it is 1\.0"),
    "no base": (("checkpoints", 0, "base"), None, r"checkpoints\[0\]\.base is missing"),
    "no shards": (SHARD, [], r"checkpoints\[0\]\.imprints is missing"),
    "no midpoints": (("checkpoints", 2, "midpoints"), [], r"checkpoints\[2\]\.midpoints is missing"),
    "gap": ((*SHARD, 1, "rows"), [3, 4], r"checkpoints\[0\]\.imprints\[1\]\.rows must begin at 2, got \(3, 4\)"),
    "overlap": ((*SHARD, 1, "rows"), [1, 3], r"checkpoints\[0\]\.imprints\[1\]\.rows must begin at 2, got \(1, 3\)"),
    "beyond the end": (
        (*SHARD, 1, "rows"),
        [2, 4],
        "it has 3 sources, but .*imprints-00001.safetensors ends with row 3",
    ),
    "backwards": ((*SHARD, 1, "rows"), [3, 2], r"rows must be the first row and the one after the last, got \[3, 2\]"),
    "negative bytes": ((*SHARD, 0, "bytes"), -1, r"imprints\[0\]\.bytes must be a whole number of at least 0, got -1"),
    "no checksum": ((*SHARD, 0, "sha256"), "abc", r"imprints\[0\]\.sha256 must be a SHA-256"),
    "absolute path": ((*SHARD, 0, "path"), "/etc/passwd", r"imprints\[0\]\.path must be a path inside the store"),
    "path upwards": ((*SHARD, 0, "path"), "../store/sources.json", r"path must be a path inside the store"),
    "path with NUL": ((*SHARD, 0, "path"), "a\0b", r"path must be a path inside the store"),
    "same file twice": (
        (*SHARD, 0, "path"),
        "checkpoint-002/imprints-00000.safetensors",
        "2 entries stand for the same file checkpoint-002/imprints-00000.safetensors",
    ),
    "half a character": (("created",), "\ud83d", "surrogates not allowed"),
    "another shape": (
        ("request", "parameters", "0.bias", "shape"),
        [3],
        "parameter '0.bias' was .3,. of torch.float32 in the store",
    ),
    "no type": (
        ("request", "parameters", "0.bias", "dtype"),
        "torch.nn",
        r"parameters\['0.bias'\].dtype must be one of .*'torch.nn'",
    ),
    "structure": (
        ("probes", "structure"),
        {"eval": "1"},
        "probes.structure must be one tensor, value, dict, list or tuple",
    ),
    "curvature": (
        ("checkpoints", 0, "measured", "curvature"),
        [1],
        r"checkpoints\[0\]\.measured\.curvature must be 2 values, got \[1\]",
    ),
    "versions": (("versions",), {"python": "3"}, "versions.torch is missing"),
}


@pytest.mark.parametrize(("path", "value", "message"), WRONG.values(), ids=WRONG.keys())
def test_the_field_that_is_wrong_is_named(path: tuple[Any, ...], value: Any, message: str, copied: Path) -> None:
    rewrite(copied, *path, value=value)
    with pytest.raises(StoreError, match=message):
        scores(copied)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "recursion"),
        (b"[" * 200 + b"]" * 200, "nested more than 64 levels deep"),
        (b'{"schema": 2, "note": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 levels deep"),
        (b"\xff\xfe{}", "utf-8"),
        (b'{"schema": NaN}', "NaN is not a number of JSON"),
        (b'{"schema": 1e999}', "too large"),
        (b'{"schema": 2', "Expecting"),
        (b"[]", "its content must be an object, got"),
    ],
)
def test_text_that_is_no_document_is_refused(text: bytes, message: str, copied: Path) -> None:
    (copied / "manifest.json").write_bytes(text)
    with pytest.raises(StoreError, match=rf"manifest\.json cannot be read: .*{message}"):
        Store(copied)


def test_a_newer_schema_asks_for_an_upgrade_whatever_else_it_says(copied: Path) -> None:
    (copied / "manifest.json").write_text(json.dumps({"schema": SCHEMA + 1, "unheard": "of"}))
    with pytest.raises(StoreError, match=f"schema {SCHEMA + 1}, this version reads up to {SCHEMA}: upgrade imprint"):
        Store(copied)
    with pytest.raises(StoreError, match="upgrade imprint"):
        make(copied)


TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "same id": ({"ids": ["ann", "ann", "cid"]}, "two sources have the same id"),
    "lengths": ({"names": ["ann", "bob"]}, "it has 3 ids, 2 names and 3 sizes"),
    "no sources": ({"ids": [], "names": [], "sizes": []}, "it has 0 ids"),
    "one more": ({"ids": [*"abcd"], "names": [*"abcd"], "sizes": [1] * 4}, "it has 4 sources, but .* ends with row 2"),
    "size of none": ({"sizes": [3, 0, 2]}, r"sizes\[1\] must be a whole number of at least 1, got 0"),
    "size beyond all": ({"sizes": [3, 13, 2]}, r"a source has 13 examples, more than the training data \(12\)"),
    "number for a name": ({"names": ["ann", 2, "cid"]}, r"names\[1\] must be a text, got 2"),
    "half a character": ({"names": ["ann", "\udc00", "cid"]}, "surrogates not allowed"),
    "another column": ({"weights": [1, 2, 3]}, "unknown field 'weights'"),
}


@pytest.mark.parametrize(("values", "message"), TABLES.values(), ids=TABLES.keys())
def test_a_table_of_sources_that_cannot_be_is_refused(values: dict[str, Any], message: str, copied: Path) -> None:
    place = copied / "sources.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **values}))
    recount(copied, "sources.json")
    with pytest.raises(StoreError, match=rf"sources\.json cannot be read: .*{message}"):
        Store(copied)


# --- tensors that are not what the manifest says


def recount(folder: Path, name: str) -> None:
    """Make the manifest say of a file what it now is: only its content can give it away."""
    content, manifest = (folder / name).read_bytes(), manifest_of(folder)
    (place,) = [path[:-1] for path in places(manifest) if path[-1:] == ("path",) and value_at(manifest, path) == name]
    rewrite(folder, *place, "sha256", value=hashlib.sha256(content).hexdigest())
    rewrite(folder, *place, "bytes", value=len(content))


def value_at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "a row less": (lambda t: {k: v[:1].clone() for k, v in t.items()}, r"is \(1, .* not \(2, "),
    "another shape": (lambda t: {**t, "0.bias": t["0.bias"][:, :1].clone()}, r"'0.bias' is \(2, 1\) .* not \(2, 2\)"),
    "another dtype": (lambda t: {**t, "0.bias": t["0.bias"].double()}, "'0.bias' is .*float64, not .*float32"),
    "whole numbers": (lambda t: {**t, "0.bias": t["0.bias"].long()}, "'0.bias' is .*int64, not .*float32"),
    "missing": (lambda t: {k: v for k, v in t.items() if k != "0.bias"}, "'0.bias' is missing"),
    "renamed": (lambda t: {f"x.{k}": v for k, v in t.items()}, "is missing"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS.keys())
@pytest.mark.parametrize("kind", ["imprints", "midpoints"])
def test_a_shard_with_other_tensors_is_refused_by_name(
    kind: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, copied: Path
) -> None:
    name = f"checkpoint-000/{kind}-00000.safetensors"
    save_file(change(load_file(copied / name)), copied / name)
    recount(copied, name)
    expected = (
        rf"{kind}-00000\.safetensors does not fit the manifest: tensor .*{message}.*rows 0 to 1: sources 'ann' to"
    )
    store = Store(copied)
    for use in (store.verify, lambda: both(store)):
        with pytest.raises(StoreError, match=expected):
            use()


def test_a_base_without_a_tensor_of_the_model_is_refused(copied: Path) -> None:
    """The model's own would be taken in its place, and the scores would depend on what it is now."""
    name = "checkpoint-002/base.safetensors"
    tensors = load_file(copied / name)
    del tensors["1.running_mean"]
    save_file(tensors, copied / name)
    recount(copied, name)
    with pytest.raises(StoreError, match=r"at checkpoint 2 it has no such tensor for '1\.running_mean'.*shape \(2,\)"):
        scores(copied)


def test_a_model_with_another_frozen_part_is_refused(sound: Path) -> None:
    other = Task.classifier(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 5)), parameters="0.*")
    with pytest.raises(StoreError, match=r"made with another model: .* shape \(2, 2\) for '2\.weight'.*shape \(5, 2\)"):
        attribute(other, sound, data(), progress=False)


def test_a_file_of_tensors_that_is_none_is_refused(copied: Path) -> None:
    name = "checkpoint-000/imprints-00001.safetensors"
    (copied / name).write_text("not tensors")
    recount(copied, name)
    with pytest.raises(StoreError, match=r"imprints-00001\.safetensors cannot be read: .*\(row 2: source 'cid'\)"):
        Store(copied).verify()


@pytest.mark.parametrize("name", ["sources.json", "checkpoint-000", "checkpoint-000/imprints-00000.safetensors"])
def test_a_link_out_of_the_store_is_not_followed(name: str, copied: Path, tmp_path: Path) -> None:
    (copied / name).rename(tmp_path / "outside")
    (copied / name).symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="is a link that leads out of the store"):
        Store(copied).verify()


def test_a_store_behind_a_link_is_read(sound: Path, right: Tensor, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sound)
    assert torch.equal(both(Store(tmp_path / "link")), right)


# --- a store that goes away


@pytest.mark.parametrize("used", [False, True], ids=["before its first use", "after it"])
def test_a_store_that_disappears_is_missed(used: bool, copied: Path) -> None:
    store = Store(copied)
    if used:
        both(store)
    shutil.rmtree(copied)
    for use in (lambda: both(store), store.verify):
        with pytest.raises(StoreError, match=str(copied)):
            use()


def test_a_folder_that_disappears_during_a_simulation_is_missed(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"could not write .*No such file or directory"):
        make(tmp_path / "store", progress=lambda done, total: shutil.rmtree(tmp_path / "store", ignore_errors=True))


# --- folders that hold something else


FOREIGN: dict[str, dict[str, str]] = {
    "a file": {"thesis.tex": "years of work"},
    "a hidden file": {".git/config": "[core]"},
    "a lock": {".lock": "mine", "thesis.tex": ""},
    "a manifest": {"manifest.json": '{"name": "My app", "icons": []}', "index.html": "<html>", ".lock": ""},
    "a journal": {"unfinished.json": '{"chapters": 3}', ".lock": "mine"},
    "tensors": {"checkpoint-000/base.safetensors": "?"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN.keys())
def test_nothing_is_touched_in_a_folder_that_holds_something_else(files: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    before = snapshot_of(folder)
    with pytest.raises(StoreError, match=str(folder)):
        make(folder)
    assert snapshot_of(folder) == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "within"):
        with pytest.raises(StoreError, match=r"is a file|Not a directory"):
            make(path)
    assert (tmp_path / "file").read_text() == "x"
    with pytest.raises(StoreError, match="holds no store"):
        Store(tmp_path / "file")


def test_what_others_put_into_the_folder_outlives_a_failed_simulation(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        (tmp_path / "store" / "thesis.tex").write_text("years of work")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        make(tmp_path / "store", progress=fail)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.tex"]


# --- names


NAMES = {
    "accents": "Žofia Ångström",
    "combining": "e\u0301 is not \u00e9",
    "emoji": "👩‍👩‍👧‍👦🏴‍☠️",
    "right to left": "שלום \u202eevil\u202c عالم",
    "slashes": "../../etc/passwd\\..\\x",
    "quotes": "\"'`$(rm -rf /)<script>",
    "newlines": "one\ntwo\r\nthree\ttab",
    "spaces": "   ",
    "nothing": "",
    "NUL": "a\0b",
    "control": "\x1b[31mred\x7f\x85\u2028",
    "long": "ü" * 5_000,
    "like JSON": '{"ids": [NaN]}\\ud800',
}


def test_names_of_any_characters_come_back_as_they_were(tmp_path: Path) -> None:
    groups = {name: [index % N] for index, name in enumerate(NAMES.values())}
    sources = Sources.groups(groups, names={name: f"{name}…{name}" for name in groups})
    made = make(tmp_path / "store", sources=sources, memory=None)
    for store in (made, Store(made.path)):
        assert store.source_ids == tuple(NAMES.values())
        assert store.source_names == tuple(f"{name}…{name}" for name in groups)
    x, y = data()
    labels = attribute(task(), made.path, (x[:1], y[:1]), progress=False).labels
    assert labels.source_ids == tuple(NAMES.values())
    assert make(tmp_path / "store", sources=sources, memory=None).source_names == made.source_names


@pytest.mark.parametrize("name", [NAMES["long"], NAMES["newlines"], NAMES["NUL"]], ids=["long", "newlines", "NUL"])
def test_odd_names_do_not_spoil_a_message(name: str, tmp_path: Path) -> None:
    store = make(tmp_path / "store", sources=Sources.groups({name: [0]}))
    next(store.path.rglob("imprints-*")).unlink()
    with pytest.raises(StoreError, match="is missing") as error:
        store.verify()
    assert "\n" not in str(error.value)
    assert "\0" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "name",
    [
        *("Žofia", "e\u0301", "👩‍👩‍👧‍👦", "שלום", "\"'`$x", "one\ntwo", " ", "[a] *?", "#%20&+", "-rf", "x" * 255),
    ],
)
def test_a_store_may_lie_anywhere(name: str, right: Tensor, tmp_path: Path) -> None:
    path = tmp_path / name
    assert torch.equal(both(make(path)), right)
    assert torch.equal(both(Store(path)), right)
    assert len(make(str(path))) == 3
    assert [found.name for found in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a\0b", "x" * 256, os.fsdecode(b"not \xff UTF-8")])
def test_a_path_that_no_store_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not make the folder"):
        make(tmp_path / name)
    with pytest.raises(StoreError, match="there is no folder"):
        Store(tmp_path / name)
    assert not list(tmp_path.iterdir())


# --- disks


def run_apart(call: str, *arguments: object, mounts: bool = False) -> str:
    """Call a function of this file in a process of its own, on request one that may mount file systems."""
    code = f"import sys; from tests.store import test_faults; test_faults.{call}(*sys.argv[1:])"
    command = [*(["unshare", "--map-root-user", "--mount"] if mounts else []), sys.executable, "-c", code]
    result = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def can_mount() -> bool:
    script = 'mount -t tmpfs tmpfs "$0"'
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, folder]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False


mounting = pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")


def fails_for_want_of_room(folder: Path, **options: Any) -> str | None:
    """Try; what could not be written, if something could not be, after a look at what is left."""
    try:
        make(folder, **options)
    except StoreError as error:
        message = str(error)
        assert "same call again: a simulation with out= resumes" in message, message
        assert "could not write" in message
        assert not list(folder.rglob(".*")), "a half-written file was left"
        return message
    return None


def full_disk(place: str) -> None:
    """Disks of more and more pages, each too small until it is made larger."""
    torch.set_num_threads(1)
    snapshot.SECONDS = 0.0
    expected = contents(make(Path(place) / "whole").path)
    for pages in range(1, 1000):
        disk = Path(place) / str(pages)
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4}k", "tmpfs", disk], check=True)
        message = fails_for_want_of_room(disk / "store")
        if message is None:
            break
        assert "No space left on device" in message
        print(message)
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        make(disk / "store")
        assert contents(disk / "store") == expected, pages


@pytest.mark.system
@mounting
def test_a_full_disk_names_the_file_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    told = run_apart("full_disk", tmp_path, mounts=True)
    for name in ("unfinished.json", "unfinished.files", "midpoints", "imprints", "manifest.json"):
        assert f"/{name}" in told, f"the disk was never full at {name}"
    assert "/snapshot" not in told  # which is not needed to go on


def small_files(place: str) -> None:
    """Shards too large for what a file may have, until it may have more."""
    torch.set_num_threads(1)
    folder = Path(place)
    large: dict[str, Any] = {"memory": "1GB", "sources": Sources.groups({str(i): [i % N] for i in range(200)})}
    expected = contents(make(folder / "whole", **large).path)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    message = fails_for_want_of_room(folder / "store", **large)
    print(message)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    make(folder / "store", **large)
    assert contents(folder / "store") == expected


@pytest.mark.system
def test_a_file_that_may_not_grow_is_named_and_the_run_goes_on_once_it_may(tmp_path: Path) -> None:
    """What a full disk is where none can be mounted."""
    told = run_apart("small_files", tmp_path)
    assert "midpoints-00000.safetensors: File too large" in told


def read_only(place: str) -> None:
    """A folder that cannot be written to: neither is a store made there, nor one missed that is there already."""
    torch.set_num_threads(1)
    folder = Path(place)
    for path in (folder / "new", folder / "empty"):
        try:
            make(path)
        except StoreError as error:
            print(error)
        else:
            raise AssertionError("it was written to")
    store = make(folder / "made")
    assert both(store).isfinite().all()


def prepared(folder: Path) -> Path:
    make(folder / "made")
    (folder / "empty").mkdir()
    return folder


REFUSED = re.compile(
    r"could not make the folder .*/new: .*(Read-only|Permission denied).*\n"
    r".*/empty cannot be written to: (Read-only|Permission denied)"
)


def mounted_read_only(place: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    prepared(Path(place))
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    read_only(place)


@pytest.mark.system
@mounting
def test_a_read_only_disk_is_told_and_its_stores_are_read(tmp_path: Path) -> None:
    told = run_apart("mounted_read_only", tmp_path, mounts=True)
    assert REFUSED.search(told), told


def without_rights(place: str) -> None:
    os.umask(0o022)
    prepared(Path(place))
    for path in (Path(place) / "empty", Path(place)):
        path.chmod(0o555)
    if os.geteuid() == 0:  # for whom permissions do not count
        os.setuid(65534)
    read_only(place)


@pytest.mark.system
def test_a_folder_without_the_right_to_write_is_told_and_its_stores_are_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = run_apart("without_rights", folder)
        assert REFUSED.search(told), told
        Path(folder).chmod(stat.S_IRWXU)


# --- many sources


@pytest.mark.long
def test_a_hundred_thousand_sources_are_a_matter_of_seconds(tmp_path: Path) -> None:
    many = 100_000
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(many, 2, generator=generator), torch.randint(0, 2, (many,), generator=generator)
    model = Task.classifier(nn.Linear(2, 2))
    plan = Plan(steps=2, lr=0.1, batch_size=8)
    begin = time.process_time()
    simulate(model, (x, y), Sources.per_example(many), plan, out=tmp_path / "store", progress=False)
    made = time.process_time()
    store = Store(tmp_path / "store")
    store.verify()
    top = attribute(model, store, (x[:3], y[:3]), top=5, progress=False)
    values = inspect_store(store)
    read = time.process_time()
    assert len(store) == values["sources"] == many
    assert top.scores.shape == (3, 5)
    assert made - begin < 60, "it takes five seconds"
    assert read - made < 20, "it takes half a second"
    assert store.bytes < 100 * many
