"""Stores whose manifest or table of sources says what it should not.

Every manifest field takes several hostile values, with the manifest's own checksum made right again, so that each
field is looked at for itself; damage without a new checksum must change nothing or be refused. What counts as a failure
is in `tests.attacks.judging`. Tensors are in `test_hostile_tensors`, notes that name code in `test_hostile_notes`,
texts that a terminal obeys in `test_hostile_names`, links, devices and what is planted where the library writes in
`test_hostile_folders`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.judging import attacked
from tests.attacks.stores import CALLS, JSON, READ, Attack, Bases, Scene, doubled, set_field, without

pytestmark = pytest.mark.long
LITERAL = (*READ, "literal gift")
CHECKPOINT, SHARD = ("checkpoints", 0), ("checkpoints", 0, "imprints", 0)
HUGE, DEEP = 10**400, "[" * 100_000

# --- every field of the manifest, with a checksum that is right again

FIELDS: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("schema",): (0, -1, 10**6, "6", None, [6], 1.5),
    ("request", "n"): (0, -12, 2**63, "12", None, 1e300, True),
    ("request", "dtype"): ("int8", "torch.float32", "complex64", "float64", None),
    ("request", "plan"): ([], None, {"engine": "tangent"}, {"steps": {"__class__": "os"}}),
    ("request", "plan", "engine"): ("replayed", "__import__", "", 5),
    ("request", "plan", "steps"): (0, 10**9, [2, 2, 10**18], "infinite"),
    ("request", "plan", "lr"): (-1, 1e308, "auto", [0.1, 0.1, "auto"]),
    ("request", "plan", "weight"): (0, [1e308, 0.0, 1e308], [1.0, 0.0], [-1.0, 0.0, 2.0]),
    ("request", "plan", "directions"): (0, 2**62),
    ("request", "plan", "seed"): (-1, 2**64),
    ("request", "plan", "form"): ("projected", "dense", "pickle"),
    ("request", "parameters"): ({}, [], {"../x": {"shape": [1], "dtype": "torch.float32"}}),
    ("request", "parameters", "first.weight", "shape"): (
        [],
        [4, -3],
        [2**40, 2**40],
        [0],
        [4, 3, 1],
        [3, 4],
        [True, 3],
        "43",
    ),
    ("request", "parameters", "first.weight", "dtype"): ("torch.load", "torch.int64", "torch.float64", "float32", None),
    ("request", "fixed"): ({"first.weight": "0" * 64}, {"last.bias": "0" * 64}, [], None, {"nowhere": "0" * 64}),
    ("request", "states"): ([], ["0" * 64] * 2, [0, 0, 0], "0" * 64),
    ("request", "probes", "values", "losses"): ([], ["a"], [1e308] * 12, None, {}),
    ("request", "data"): ("", 5, "0" * 63),
    ("sources",): (None, {}, "sources.json", []),
    ("probes",): (None, {}, [], "probes"),
    ("probes", "structure"): ({"tensor": "nowhere"}, {"list": []}, {"eval": "1"}, {"value": "1"}, {"tuple": {}}),
    ("probes", "values", "losses"): ([], [1e308] * 8, ["nan"] * 8, None),
    ("checkpoints",): ([], {}, None, [[]], [None] * 3),
    (*CHECKPOINT, "weight"): (-1.0, 1e308, "1", None, 0.0),
    (*CHECKPOINT, "steps"): (0, -2, 0.5, "infinite", 2**63),
    (*CHECKPOINT, "decided", "lr"): (-0.1, "0.1", 1e-320),
    (*CHECKPOINT, "decided", "epsilon"): (0, -1, None, "auto"),
    (*CHECKPOINT, "decided", "layers"): (["first"], [5], None, ["../first"]),
    (*CHECKPOINT, "basis"): ({}, {"path": "sources.json", "sha256": "0" * 64, "bytes": 1, "rows": None}),
    (*CHECKPOINT, "decided"): ([], None, "lr", {}),
    (*CHECKPOINT, "measured"): ([], None, "norms", {}),
    (*CHECKPOINT, "measured", "norms"): ([1.0], "many", 5, {"median": []}, {"median": {"a": 1}}, {"median": "1"}),
    (*CHECKPOINT, "measured", "linearity"): ([1.0], {"median": "1"}, {"median": None}, 5),
    (*CHECKPOINT, "measured", "curvature"): ([1], ["a", "b"], {}, [1e308, -1e308]),
    (*CHECKPOINT, "measured", "lost"): ([], {}, "most", True),
    (*CHECKPOINT, "decided", "rows_at_once"): (0, 2**63, "5"),
    (*CHECKPOINT, "decided", "directions"): (0, "3", 2**62),
    (*SHARD, "path"): (
        *("/etc/passwd", "../outside/victim.txt", "checkpoint-000/../../x", "", ".", "a\0b", "C:\\x", "//x/y", "~/x"),
        *("manifest.json", "sources.json", "checkpoint-000", "checkpoint-000/", ".imprint.lock", "a" * 300, "a/" * 999),
    ),
    (*SHARD, "sha256"): ("", "0" * 64, None, "Z" * 64, 5),
    (*SHARD, "bytes"): (0, -1, 2**63, "1", None, 1.5, 2**62),
    (*SHARD, "rows"): ([0, 0], [-2, 2], [2, 0], [0, 2**62], [0], None, [0.0, 2.0], "02", [1, 2], [0, 3]),
    ("execution",): ([], None, {"threads": -1}, {"batch_size": 0}),
    ("cost",): ([], {"seconds": -1, "peak_bytes": 0, "resumed": 0}, None),
    ("cost", "seconds"): (1e308, "1", None),
    ("cost", "peak_bytes"): (-1, 2**63, 1e18),
    ("versions",): ({}, [], {"torch": None}),
    ("created",): (None, 0, "", "x" * 10_000),
    ("warnings",): (None, "careful", [5], [None], ["w" * 10_000] * 50),
    ("note",): ({"imprint": []}, {"imprint": {"command": []}}, {"imprint": {"command": {"task": []}}}),
    ("note", "imprint"): ({"estimate": {"seconds": 1e308, "peak_bytes": 1e308}}, {"estimate": {"seconds": "1"}}),
    ("__proto__",): ({"x": 1},),
}


def title(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}… of {len(text)}"


MANIFESTS = {
    f"{'.'.join(map(str, path))} = {title(value)}": Attack(set_field(path, value), forged=True)
    for path, values in FIELDS.items()
    for value in values
}


def crowded(count: int) -> Callable[[Scene], None]:
    """A store with many checkpoints more, which do not count."""

    def change(scene: Scene) -> None:
        values = scene.manifest
        spare = values["checkpoints"][1]
        values["checkpoints"] += [spare] * count
        values["request"]["plan"]["weight"] += [0.0] * count
        for name in ("states", "moments"):
            values["request"][name] += values["request"][name][-1:] * count
        scene.write_manifest(values)

    return change


def widened(count: int) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        values = scene.manifest
        values["request"]["parameters"] |= {f"p{i}": {"shape": [1], "dtype": "torch.float32"} for i in range(count)}
        values["checkpoints"][0]["measured"]["epsilon_disagreement"] |= {f"f{i}": i for i in range(count)}
        values["versions"] |= {f"v{i}": "1" for i in range(count)}
        scene.write_manifest(values)

    return change


MANIFESTS |= {
    "a thousand checkpoints more": Attack(crowded(1000), forged=True),
    "ten thousand checkpoints more": Attack(crowded(10_000), ("verify gift", "attribute gift"), forged=True),
    "twenty thousand parameters more": Attack(widened(20_000), CALLS, forged=True),
}


@pytest.mark.parametrize("attack", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_with_a_hostile_value_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- the text of the manifest


def text(change: Callable[[str], str | bytes]) -> Callable[[Scene], None]:
    def rewrite(scene: Scene) -> None:
        place = scene.gift / "manifest.json"
        found = change(place.read_text())
        place.write_bytes(found if isinstance(found, bytes) else found.encode("utf-8", "surrogatepass"))

    return rewrite


def cut(share: float) -> Attack:
    return Attack(text(lambda t: t[: int(share * len(t))]))


def flipped(place: float) -> Attack:
    def change(t: str) -> bytes:
        found = bytearray(t.encode())
        found[int(place * len(found))] ^= 4
        return bytes(found)

    return Attack(text(change))


TEXTS = {
    "deep lists": Attack(text(lambda t: DEEP)),
    "deep lists in a note": Attack(text(lambda t: t.replace('"note"', f'"note": {"[" * 500}{"]" * 500}, "x"', 1))),
    "deep objects": Attack(text(lambda t: '{"a":' * 50_000)),
    "huge whole number": Attack(text(lambda t: doubled(t, "n", HUGE))),
    "a number of a million digits": Attack(text(lambda t: "[" + "9" * 10**6 + "]")),
    "an exponent that overflows": Attack(text(lambda t: doubled(t, "n", 5).replace("5,", "1e999999999,", 1))),
    "NaN": Attack(text(lambda t: t.replace('"n"', '"n": NaN, "x"', 1))),
    "n given twice, the last right": Attack(text(lambda t: t.replace('"n": 12,', '"n": 1, "n": 12,', 1))),
    "n given twice, the last wrong": Attack(text(lambda t: t.replace('"n": 12,', '"n": 12, "n": 1,', 1))),
    "plan given twice": Attack(text(lambda t: doubled(t, "request", {"plan": {"engine": "tangent"}}))),
    "checksum given twice": Attack(text(lambda t: doubled(t, "sha256", "0" * 64))),
    "a byte-order mark": Attack(text(lambda t: b"\xef\xbb\xbf" + t.encode())),
    "UTF-16": Attack(text(lambda t: t.encode("utf-16"))),
    "Latin-1": Attack(text(lambda t: t.replace("torch", "t\xf6rch").encode("latin-1"))),
    "NULs": Attack(text(lambda t: b"\0" * 4096)),
    "half a character": Attack(text(lambda t: t.replace('"created": "', '"created": "\\ud800', 1))),
    "half a character, raw": Attack(text(lambda t: t.replace('"created": "', '"created": "\ud800', 1))),
    "a comment": Attack(text(lambda t: f"// {t}")),
    "something after the end": Attack(text(lambda t: t + "{}")),
    "an empty file": Attack(text(lambda t: "")),
    "a list": Attack(text(lambda t: f"[{t}]")),
    "a number": Attack(text(lambda t: "5")),
    "a text": Attack(text(lambda t: json.dumps(t))),
    "n changed, not sealed": Attack(lambda scene: scene.set("request", "n", value=1, seal=False)),
    "weight changed, not sealed": Attack(
        lambda scene: scene.set("request", "plan", "weight", value=[2.0, 0, 1.0], seal=False)
    ),
    "sealed, n a float": Attack(text(lambda t: t.replace('"n": 12,', '"n": 12.0,', 1))),
    "no checksum": Attack(lambda scene: scene.write_manifest(without(scene.manifest, "sha256"), seal=False)),
    "checksum null": Attack(lambda scene: scene.set("sha256", value=None, seal=False)),
    "schema 1 to pass without a checksum": Attack(lambda scene: scene.set("schema", value=1, seal=False)),
    "schema 2 and a checksum": Attack(lambda scene: scene.set("schema", value=2), forged=True),
    "schema 4 and a checksum": Attack(lambda scene: scene.set("schema", value=4), forged=True),
    **{f"cut at {share:.0%}": cut(share) for share in (0.01, 0.3, 0.6, 0.99)},
    **{f"a bit flipped at {place:.0%}": flipped(place) for place in (0.05, 0.15, 0.25, 0.45, 0.65, 0.85, 0.95)},
}


@pytest.mark.parametrize("attack", TEXTS.values(), ids=TEXTS.keys())
def test_a_manifest_that_is_no_such_text_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- the table of sources


def table(text: str | bytes) -> Callable[[Scene], None]:
    return lambda scene: scene.write_bytes("sources.json", text if isinstance(text, bytes) else text.encode())


FIVE = ["ann", "bob", "cid", "dot", "eve"]
TABLES = {
    "ids twice": Attack(lambda scene: scene.table(ids=["ann"] * 5)),
    "ids that differ in case": Attack(lambda scene: scene.table(ids=["ann", "Ann", "ANN", "aNn", "anN"]), forged=True),
    "ids that look alike": Attack(lambda scene: scene.table(ids=["é", "e\u0301", "е", "e", "ｅ"]), forged=True),
    "ids of nothing": Attack(lambda scene: scene.table(ids=["", " ", "  ", "\u200b", "\u3164"]), forged=True),
    "names all the same": Attack(lambda scene: scene.table(names=["ann"] * 5), steps=(*READ, *JSON)),
    "names of 100,000 characters": Attack(lambda scene: scene.table(names=["n" * 10**5] * 5)),
    "half characters": Attack(lambda scene: scene.table(names=["\ud800", *FIVE[1:]])),
    "numbers for ids": Attack(lambda scene: scene.table(ids=[1, 2, 3, 4, 5])),
    "null for a name": Attack(lambda scene: scene.table(names=[None, *FIVE[1:]])),
    "an object for a name": Attack(lambda scene: scene.table(names=[{"a": 1}, *FIVE[1:]])),
    "no sources": Attack(lambda scene: scene.table(ids=[], names=[], sizes=[])),
    "a source more": Attack(lambda scene: scene.table(ids=[*"abcdef"], names=[*"abcdef"], sizes=[1] * 6)),
    "a source less": Attack(lambda scene: scene.table(ids=[*"abcd"], names=[*"abcd"], sizes=[1] * 4)),
    "fewer names": Attack(lambda scene: scene.table(names=FIVE[:4])),
    "sizes of 0": Attack(lambda scene: scene.table(sizes=[0] * 5)),
    "negative sizes": Attack(lambda scene: scene.table(sizes=[-1] * 5)),
    "sizes beyond the data": Attack(lambda scene: scene.table(sizes=[13] * 5)),
    "enormous sizes": Attack(lambda scene: scene.table(sizes=[2**63] * 5)),
    "flags for sizes": Attack(lambda scene: scene.table(sizes=[True] * 5)),
    "fractions for sizes": Attack(lambda scene: scene.table(sizes=[1.5] * 5)),
    "a column of its own": Attack(lambda scene: scene.table(__class__=[1] * 5)),
    "a column twice": Attack(table('{"ids": ["x", "y", "z", "u", "v"], ' + json.dumps(
        {"ids": FIVE, "names": FIVE, "sizes": [1] * 5})[1:])),
    "a text for ids": Attack(lambda scene: scene.table(ids="abcde")),
    "an object for ids": Attack(lambda scene: scene.table(ids={"a": 1})),
    "no JSON": Attack(table("ids,names,sizes")),
    "deep": Attack(table(DEEP)),
    "a list": Attack(table("[]")),
    "empty": Attack(table(b"")),
    "not sealed": Attack(lambda scene: (scene.gift / "sources.json").write_text('{"ids": []}')),
    "ids in another order, not sealed": Attack(
        lambda scene: (scene.gift / "sources.json").write_text(
            json.dumps({**json.loads((scene.gift / "sources.json").read_text()), "ids": FIVE[::-1]})
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", TABLES.values(), ids=TABLES.keys())
def test_a_hostile_table_of_sources_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)
