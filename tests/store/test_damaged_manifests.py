"""A manifest with anything in it: it is refused in one line, or the scores are right."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from imprint import Plan, Sources, Store, StoreError
from imprint.cli.inspection import inspect_store
from tests.store.making import N, both, make, scores
from tests.store.manifests import changed, manifest_of, places, resealed, rewrite

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
