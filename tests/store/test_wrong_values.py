"""A value that cannot be is refused, and the error names it."""

import json
from pathlib import Path
from typing import Any

import pytest

from imprint import Store, StoreError
from imprint.store.manifest import SCHEMA
from tests.store.making import make, scores
from tests.store.manifests import recount, rewrite

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
    "one more": (
        {"ids": [*"abcd"], "names": [*"abcd"], "sizes": [1] * 4, "members": ["0" * 32] * 4},
        "it has 4 sources, but .* ends with row 2",
    ),
    "members of others": ({"members": ["0" * 32] * 2}, "it must have a digest of 32 digits for each of its 3 sources"),
    "no digest": ({"members": ["0"] * 3}, "it must have a digest of 32 digits"),
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
