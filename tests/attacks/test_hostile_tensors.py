"""Stores whose shards, bases, probes and bases of directions are damaged, exchanged, forged, or lie about themselves.

Damage without a new checksum must change nothing or be refused; where everything was sealed again, scores may be
others, but they are numbers, and no header makes the library crash or eat the memory. The last ones are read by a
repeat, which believes what a store says about how it was made.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attacks.judging import attacked
from tests.attacks.stores import READ, REPEAT, Attack, Bases, Scene, doubled, entries, set_field, shards

pytestmark = pytest.mark.long
LITERAL = (*READ, "literal gift")
CHECKPOINT = ("checkpoints", 0)
DEEP = "[" * 100_000

# --- files of tensors

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def shard(change: Change, kind: str = "imprints", number: int = 0) -> Callable[[Scene], None]:
    """Another shard, with all checksums made right."""

    def rewrite(scene: Scene) -> None:
        name = shards(scene, 0, kind)[number]
        scene.write_tensors(name, {key: t.contiguous() for key, t in change(scene.tensors(name)).items()})

    return rewrite


def base(change: Change) -> Callable[[Scene], None]:
    def rewrite(scene: Scene) -> None:
        name = scene.manifest["checkpoints"][0]["base"]["path"]
        scene.write_tensors(name, {key: t.contiguous() for key, t in change(scene.tensors(name)).items()})

    return rewrite


def swapped(first: int, second: int, kind: str = "imprints", *, reseal: bool) -> Callable[[Scene], None]:
    """Two files of checkpoints exchanged: their contents, or with `reseal` their entries in the manifest too."""

    def swap(scene: Scene) -> None:
        names = [scene.manifest["checkpoints"][index][kind] for index in (first, second)]
        paths = [(entry if isinstance(entry, dict) else entry[0])["path"] for entry in names]
        texts = [(scene.gift / path).read_bytes() for path in paths]
        for path, content in zip(paths, reversed(texts), strict=True):
            scene.write_bytes(path, content) if reseal else (scene.gift / path).write_bytes(content)

    return swap


def swapped_shards(*, reseal: bool) -> Callable[[Scene], None]:
    def swap(scene: Scene) -> None:
        paths = shards(scene)[:2]
        texts = [(scene.gift / path).read_bytes() for path in paths]
        for path, content in zip(paths, reversed(texts), strict=True):
            scene.write_bytes(path, content) if reseal else (scene.gift / path).write_bytes(content)

    return swap


def swapped_entries(key: str) -> Callable[[Scene], None]:
    """What the manifest says of two shards, exchanged in part."""

    def swap(scene: Scene) -> None:
        values = scene.manifest
        one, two = values["checkpoints"][0]["imprints"][:2]
        one[key], two[key] = two[key], one[key]
        scene.write_manifest(values)

    return swap


def header(change: Callable[[dict[str, Any]], Any], tail: bytes | None = None) -> Callable[[Scene], None]:
    """Another safetensors header in a shard, with all checksums made right."""

    def rewrite(scene: Scene) -> None:
        name = shards(scene)[0]
        content = (scene.gift / name).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        about = change(json.loads(content[8 : 8 + length]))
        text = about if isinstance(about, bytes) else json.dumps(about).encode()
        rest = content[8 + length :] if tail is None else tail
        scene.write_bytes(name, struct.pack("<Q", len(text)) + text + rest)

    return rewrite


def each(about: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {name: entry if name == "__metadata__" else {**entry, **values} for name, entry in about.items()}


def raw(change: Callable[[bytes], bytes]) -> Callable[[Scene], None]:
    def rewrite(scene: Scene) -> None:
        name = shards(scene)[0]
        scene.write_bytes(name, change((scene.gift / name).read_bytes()))

    return rewrite


def unsealed(change: Callable[[bytes], bytes], kind: str) -> Callable[[Scene], None]:
    """A file of tensors that was damaged after it was written."""

    def rewrite(scene: Scene) -> None:
        entry = scene.manifest["checkpoints"][2][kind] if kind != "probes" else scene.manifest["probes"]["file"]
        place = scene.gift / (entry if isinstance(entry, dict) else entry[-1])["path"]
        place.write_bytes(change(place.read_bytes()))

    return rewrite


def put(tensors: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    next(iter(found.values())).view(-1)[0] = value
    return found


def bit(content: bytes) -> bytes:
    return content[:-2] + bytes([content[-2] ^ 64]) + content[-1:]


NAN, INFINITE = float("nan"), float("inf")
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit flipped": bit,
    "cut short": lambda content: content[:-4],
    "a byte more": lambda content: content + b"\0",
    "emptied": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}
TENSORS = {
    **{
        f"{kind}: {name}": Attack(unsealed(change, kind), steps=LITERAL)
        for kind in ("base", "imprints", "midpoints", "probes")
        for name, change in DAMAGES.items()
    },
    "NaN in an imprint": Attack(shard(lambda t: put(t, NAN)), forged=True),
    "infinity in an imprint": Attack(shard(lambda t: put(t, INFINITE)), forged=True),
    "1e38 in an imprint": Attack(shard(lambda t: put(t, 3e38)), forged=True),
    "NaN in a midpoint": Attack(shard(lambda t: put(t, NAN), "midpoints"), steps=LITERAL, forged=True),
    "NaN in a base": Attack(base(lambda t: put(t, NAN)), forged=True),
    "infinity in a base": Attack(base(lambda t: put(t, INFINITE)), forged=True),
    "zeros for imprints": Attack(shard(lambda t: {k: 0 * v for k, v in t.items()}), forged=True),
    "another base": Attack(base(lambda t: {k: 2 * v for k, v in t.items()}), forged=True),
    "a row more": Attack(shard(lambda t: {k: v.repeat(2, *[1] * (v.dim() - 1)) for k, v in t.items()})),
    "a row less": Attack(shard(lambda t: {k: v[:1] for k, v in t.items()})),
    "no rows": Attack(shard(lambda t: {k: v[:0] for k, v in t.items()})),
    "half precision": Attack(shard(lambda t: {k: v.half() for k, v in t.items()})),
    "double precision": Attack(shard(lambda t: {k: v.double() for k, v in t.items()})),
    "whole numbers": Attack(shard(lambda t: {k: v.view(torch.int32) for k, v in t.items()})),
    "flags": Attack(shard(lambda t: {k: v > 0 for k, v in t.items()})),
    "another shape of as many values": Attack(shard(lambda t: {k: v.reshape(len(v), -1) for k, v in t.items()})),
    "transposed": Attack(shard(lambda t: {k: v.mT if v.dim() == 3 else v for k, v in t.items()})),
    "a tensor less": Attack(shard(lambda t: dict(list(t.items())[1:]))),
    "a tensor more": Attack(shard(lambda t: {**t, "extra": torch.ones(2)})),
    "a tensor of a path's name": Attack(shard(lambda t: {**t, "../../evil": torch.ones(2)})),
    "no tensors": Attack(shard(lambda t: {})),
    "names in another case": Attack(shard(lambda t: {k.upper(): v for k, v in t.items()})),
    "two tensors exchanged by name": Attack(
        shard(lambda t: {**t, "first.bias": t["first.weight"], "first.weight": t["first.bias"]})
    ),
    "a base with a tensor more": Attack(base(lambda t: {**t, "extra": torch.ones(2)})),
    "a base with a tensor less": Attack(base(lambda t: {k: v for k, v in t.items() if k != "shift"})),
    "a base with another shape": Attack(base(lambda t: {**t, "shift": torch.ones(5)})),
    "a base with a buffer of another precision": Attack(base(lambda t: {**t, "shift": t["shift"].half()}), forged=True),
    "a base with a buffer of whole numbers": Attack(base(lambda t: {**t, "shift": t["shift"].long()}), forged=True),
    "a base with NaN in a buffer": Attack(base(lambda t: {**t, "shift": NAN * t["shift"]}), forged=True),
    "two shards exchanged": Attack(swapped_shards(reseal=False)),
    "two shards exchanged and sealed": Attack(swapped_shards(reseal=True), forged=True),
    "shards of two checkpoints exchanged": Attack(swapped(0, 2, reseal=False)),
    "shards of two checkpoints exchanged and sealed": Attack(swapped(0, 2, reseal=True), forged=True),
    "bases of two checkpoints exchanged": Attack(swapped(0, 2, "base", reseal=False)),
    "bases of two checkpoints exchanged and sealed": Attack(swapped(0, 2, "base", reseal=True), forged=True),
    "midpoints of two checkpoints exchanged": Attack(swapped(0, 2, "midpoints", reseal=False), steps=LITERAL),
    "checksums of two shards exchanged": Attack(swapped_entries("sha256")),
    "paths of two shards exchanged": Attack(swapped_entries("path")),
    "sizes of two shards exchanged": Attack(swapped_entries("bytes")),
    "rows of two shards exchanged": Attack(swapped_entries("rows")),
    "imprints for midpoints": Attack(
        lambda scene: scene.write_bytes(
            shards(scene, 0, "midpoints")[0], (scene.gift / shards(scene)[0]).read_bytes()
        ),
        steps=LITERAL,
        forged=True,
    ),
    "a header that says 2⁶³": Attack(raw(lambda content: struct.pack("<Q", 2**63) + content[8:])),
    "a header that says 100 MB": Attack(raw(lambda content: struct.pack("<Q", 10**8) + content[8:])),
    "a header of 0 bytes": Attack(raw(lambda content: struct.pack("<Q", 0) + content[8:])),
    "a header of 1 byte less": Attack(raw(lambda c: struct.pack("<Q", struct.unpack("<Q", c[:8])[0] - 1) + c[8:])),
    "a header of 8 bytes more": Attack(raw(lambda c: struct.pack("<Q", struct.unpack("<Q", c[:8])[0] + 8) + c[8:])),
    "a header of 90 MB of spaces": Attack(header(lambda about: json.dumps(about).encode() + b" " * 90_000_000)),
    "a header that is deep": Attack(header(lambda about: DEEP.encode())),
    "a header that is a list": Attack(header(lambda about: [])),
    "a header with a name twice": Attack(
        header(lambda about: doubled(json.dumps(about), "first.bias", about["first.weight"]).encode())
    ),
    "a header of 30,000 tensors": Attack(
        header(
            lambda about: {
                **about,
                **{f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(30_000)},
            }
        )
    ),
    "shapes that overflow": Attack(header(lambda about: each(about, shape=[2**40, 2**40]))),
    "shapes that are huge": Attack(header(lambda about: each(about, shape=[2**40], data_offsets=[0, 2**42]))),
    "negative shapes": Attack(header(lambda about: each(about, shape=[-2, 4]))),
    "a shape of 10,000 dimensions": Attack(header(lambda about: each(about, shape=[1] * 10_000))),
    "offsets beyond the end": Attack(header(lambda about: each(about, data_offsets=[0, 2**40]))),
    "offsets backwards": Attack(header(lambda about: each(about, data_offsets=[96, 0]))),
    "offsets that overlap": Attack(header(lambda about: each(about, data_offsets=[0, 96]))),
    "an unknown dtype": Attack(header(lambda about: each(about, dtype="F8_E5M2"))),
    "a dtype that does not exist": Attack(header(lambda about: each(about, dtype="PICKLE"))),
    "no data after the header": Attack(header(lambda about: about, tail=b"")),
    "a pickle": Attack(raw(lambda content: b"\x80\x04cos\nsystem\n(S'touch ran'\ntR.")),
    "a zip file": Attack(raw(lambda content: b"PK\x03\x04" + content)),
    "JSON for tensors": Attack(raw(lambda content: b"{}")),
}  # fmt: skip


@pytest.mark.parametrize("attack", TENSORS.values(), ids=TENSORS.keys())
def test_hostile_tensors_harm_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- what a factored store adds, and what a repeat believes


def factored(*path: Any, value: Any) -> Attack:
    return Attack(set_field((*CHECKPOINT, *path), value), base="factored", forged=True)


def first_entry_of(kind: str) -> Callable[[Scene], None]:
    """All files of tensors become one that is there already."""

    def change(scene: Scene) -> None:
        values = scene.manifest
        chosen = values["checkpoints"][0][kind]
        chosen = chosen if isinstance(chosen, dict) else chosen[0]
        for file in entries(values["checkpoints"]):
            file |= {key: chosen[key] for key in ("path", "sha256", "bytes")}
        scene.write_manifest(values)

    return change


def factored_tensors(kind: str, change: Change) -> Attack:
    def rewrite(scene: Scene) -> None:
        entry = scene.manifest["checkpoints"][0][kind]
        name = (entry if isinstance(entry, dict) else entry[0])["path"]
        scene.write_tensors(name, {key: t.contiguous() for key, t in change(scene.tensors(name)).items()})

    return Attack(rewrite, base="factored", forged=True)


OTHERS = {
    "no basis": factored("basis", value=None),
    "no layers": factored("decided", "layers", value=[]),
    "layers twice": factored("decided", "layers", value=["first", "first"]),
    "layers that overlap": factored("decided", "layers", value=["first", "last", "first"]),
    "a layer that is none": factored("decided", "layers", value=["shift"]),
    "no directions": factored("decided", value=None),
    "2⁶² directions": factored("decided", "directions", value=2**62),
    "directions as text": factored("decided", "directions", value="3"),
    "NaN in a basis": factored_tensors("basis", lambda t: put(t, NAN)),
    "a basis of fewer directions": factored_tensors("basis", lambda t: {k: v[:1] for k, v in t.items()}),
    "a basis without a tensor": factored_tensors("basis", lambda t: dict(list(t.items())[1:])),
    "NaN in coefficients": factored_tensors("imprints", lambda t: {**t, "coefficients": NAN * t["coefficients"]}),
    "coefficients less": factored_tensors("imprints", lambda t: {**t, "coefficients": t["coefficients"][:, :1]}),
    "factors exchanged": factored_tensors(
        "imprints", lambda t: {**t, "inputs/first": t["outputs/first"], "outputs/first": t["inputs/first"]}
    ),
    "one file for all": Attack(first_entry_of("imprints")),
    "the base for all": Attack(first_entry_of("base")),
    "a billion threads": Attack(set_field(("execution", "threads"), 10**9), steps=REPEAT, forged=True),
    "2⁶³ − 1 threads": Attack(set_field(("execution", "threads"), 2**63 - 1), steps=REPEAT, forged=True),
    "threads as text": Attack(set_field(("execution", "threads"), "2"), steps=REPEAT, forged=True),
    "an enormous batch": Attack(set_field(("execution", "batch_size"), 2**62), steps=REPEAT, forged=True),
    "a batch as text": Attack(set_field(("execution", "batch_size"), "5"), steps=REPEAT, forged=True),
    "rows at once, of a repeat": Attack(
        set_field((*CHECKPOINT, "decided", "rows_at_once"), 2**62), steps=REPEAT, forged=True
    ),
    "no rows at once, of a repeat": Attack(set_field((*CHECKPOINT, "decided"), {}), steps=REPEAT, forged=True),
    "vectorised as text, of a repeat": Attack(
        set_field((*CHECKPOINT, "decided", "vectorised"), "no"), steps=REPEAT, forged=True
    ),
    "an enormous curvature, of a repeat": Attack(
        set_field((*CHECKPOINT, "measured", "curvature"), [-1e308, 1e308]), steps=REPEAT, forged=True
    ),
    "an enormous lr, of a repeat": Attack(set_field((*CHECKPOINT, "decided", "lr"), 1e308), steps=REPEAT, forged=True),
}  # fmt: skip


@pytest.mark.parametrize("attack", OTHERS.values(), ids=OTHERS.keys())
def test_a_hostile_store_that_is_factored_or_repeated_harms_nothing(
    attack: Attack, bases: Bases, tmp_path: Path
) -> None:
    assert not attacked(attack, bases, tmp_path)
