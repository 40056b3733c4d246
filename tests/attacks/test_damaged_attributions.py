"""Saved attributions that were damaged or rewritten: what is loaded is what was saved, or an error says no.

Bits are flipped all over the file, it is cut and lengthened; the JSON in it gets other values in every place, the
tensor other numbers, shapes and types. Nothing here knows what the fields are called. What the library has sealed
itself, and what is no such file at all, is in `test_made_up_attributions`.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from imprint import Attribution, ImprintError
from tests.attacks.judging import UNPRINTABLE
from tests.attacks.saved import is_same, joined, parts
from tests.store.manifests import changed, places

pytestmark = pytest.mark.long


def test_what_was_saved_is_loaded(saved: tuple[Attribution, Path]) -> None:
    result, file = saved
    assert is_same(Attribution.load(file), result)


def wrong(file: Path, expected: Attribution) -> str | None:
    """What is wrong with loading a damaged file; None if it gives what was saved, or an error of the library."""
    try:
        found = Attribution.load(file)
    except ImprintError as error:
        message = str(error)
        if "\n" in message or len(message) > 2000 or UNPRINTABLE.search(message):
            return f"a message that is no line of text: {message[:200]!r}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None if is_same(found, expected) else f"another attribution: {found.scores.flatten()[:5].tolist()}"


def check(content: bytes, saved: tuple[Attribution, Path], place: Path) -> None:
    file = place / "scores.safetensors"
    file.write_bytes(content)
    found = wrong(file, saved[0])
    assert found is None, found


# --- bits

REGIONS = {"length": 8, "header": 48, "scores": 40}


@pytest.mark.parametrize(
    ("region", "step"), [(region, step) for region, count in REGIONS.items() for step in range(count)]
)
def test_no_flipped_bit_gives_another_attribution(
    region: str, step: int, saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    """All eight bits of a byte, each for itself; bytes are spread over the header, and all of the others."""
    content = saved[1].read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    spans = {"length": (0, 8), "header": (8, start), "scores": (start, len(content))}
    first, last = spans[region]
    where = first + step * (last - first) // REGIONS[region]
    for bit in range(8):
        changed = bytearray(content)
        changed[where] ^= 1 << bit
        check(bytes(changed), saved, tmp_path)


BYTES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut to {size} bytes": lambda c, size=size: c[:size] for size in (0, 1, 7, 8, 9, 16, 100, 500)},  # type: ignore[misc]
    **{f"{size} bytes cut off": lambda c, size=size: c[:-size] for size in (1, 4, 8, 20, 39, 40, 41, 60)},  # type: ignore[misc]
    "first byte cut off": lambda c: c[1:],
    "header cut off": lambda c: c[8:],
    "a zero more": lambda c: c + b"\0",
    "a newline more": lambda c: c + b"\n",
    "four bytes more": lambda c: c + b"\0\0\x80?",
    "another row of scores": lambda c: c + c[-20:],
    "twice": lambda c: c + c,
    "a byte-order mark": lambda c: b"\xef\xbb\xbf" + c,
    "reversed": lambda c: c[::-1],
    "zeros": lambda c: bytes(len(c)),
    "ones": lambda c: b"\xff" * len(c),
    "line ends of Windows": lambda c: c.replace(b"\n", b"\r\n") + b"\r\n",
    "as UTF-8": lambda c: c.decode("latin-1").encode(),
    "scores negated": lambda c: c[:-40] + negated(c[-40:]),
    "scores in another byte order": lambda c: c[:-40] + b"".join(c[-40:][i : i + 4][::-1] for i in range(0, 40, 4)),
    "two scores exchanged": lambda c: c[:-8] + c[-4:] + c[-8:-4],
    "rows exchanged": lambda c: c[:-40] + c[-20:] + c[-40:-20],
    "scores of zeros": lambda c: c[:-40] + bytes(40),
    "NaN": lambda c: c[:-4] + struct.pack("<f", math.nan),
    "infinity": lambda c: c[:-4] + struct.pack("<f", math.inf),
    "a denormal number": lambda c: c[:-4] + struct.pack("<I", 1),
}  # fmt: skip


def negated(values: bytes) -> bytes:
    return b"".join(values[i : i + 3] + bytes([values[i + 3] ^ 128]) for i in range(0, len(values), 4))


@pytest.mark.parametrize("change", BYTES.values(), ids=BYTES.keys())
def test_no_damaged_bytes_give_another_attribution(
    change: Callable[[bytes], bytes], saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    check(change(saved[1].read_bytes()), saved, tmp_path)


# --- JSON


def rewritten(content: bytes, change: Callable[[Any], Any]) -> Iterator[bytes]:
    """The file with every value of its metadata changed, one at a time; texts that are JSON are looked into."""
    header, rest = parts(content)
    for name, text in header["__metadata__"].items():
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict | list):
            value = change(text)
            yield joined({**header, "__metadata__": {**header["__metadata__"], name: value}}, rest)
            continue
        for path in places(document):
            text = json.dumps(changed(document, path, change))
            yield joined({**header, "__metadata__": {**header["__metadata__"], name: text}}, rest)


def other_hash(value: Any) -> Any:
    return "0" * 64 if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value


def shuffled(value: Any) -> Any:
    return value[::-1] if isinstance(value, list) else value


def first_dropped(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(list(value.items())[1:])
    return value[1:] if isinstance(value, list | str) else value


def first_twice(value: Any) -> Any:
    return [*value[:1], *value] if isinstance(value, list) else value


def more(value: Any) -> Any:
    return {**value, "extra": 1} if isinstance(value, dict) else value


def nudged(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value + 1


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 12, 0.5, 1e300, 2**53, 2**63, 10**400, -(10**400), "", "0", "mean", "lower"),
    *([], {}, [[]], [None], [0, 1], ["ann"] * 5, {"a": 1}, float("nan"), float("inf"), "\ud800", "a\0b"),
    *("\x1b[31m", "<script>", "../../x", "0" * 64, "x" * 100_000, [0] * 10_000),
)
VALUES: dict[str, Callable[[Any], Any]] = {
    **{(repr(value) if len(repr(value)) < 30 else f"{repr(value)[:20]}…"): always(value) for value in ODD},
    "as text": lambda value: json.dumps(value),
    "in a list": lambda value: [value],
    "a number more": nudged,
    "negative": lambda value: -value if isinstance(value, int | float) else value,
    "lists reversed": shuffled,
    "the first left out": first_dropped,
    "the first twice": first_twice,
    "a key more": more,
    "another hash": other_hash,
    "upper case": lambda value: value.upper() if isinstance(value, str) else value,
    "a space more": lambda value: f"{value} " if isinstance(value, str) else value,
    "deep": lambda value: json.loads("[" * 300 + "]" * 300),
}


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES.keys())
def test_no_rewritten_value_gives_another_attribution(
    change: Callable[[Any], Any], saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    """In every place of the metadata, one after the other."""
    count, faults = 0, []
    for content in rewritten(saved[1].read_bytes(), change):
        file = tmp_path / "scores.safetensors"
        file.write_bytes(content)
        count += 1
        if found := wrong(file, saved[0]):
            faults.append(found)
    assert count
    assert not faults, f"{len(faults)} of {count}: {faults[:3]}"


Texts = Callable[[str], str]
TEXTS: dict[str, Texts] = {
    "no JSON": lambda text: "labels",
    "empty": lambda text: "",
    "cut short": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "an object of nothing": lambda text: "{}",
    "a number": lambda text: "5",
    "a text": lambda text: json.dumps(text),
    "null": lambda text: "null",
    "deep": lambda text: "[" * 100_000,
    "deep objects": lambda text: '{"labels":' * 50_000,
    "NaN": lambda text: re.sub(r"\d+", "NaN", text, count=1),
    "an enormous number": lambda text: re.sub(r"\d+", "9" * 5000, text, count=1),
    "an enormous exponent": lambda text: re.sub(r"\d+", "1e999999", text, count=1),
    "n a fraction": lambda text: re.sub(r'"n": ?12', '"n": 12.0', text, count=1) if '"n"' in text else text + " x",
    "every number one more": lambda text: re.sub(r"(?<=[ \[])\d+(?=[,\]])", lambda m: str(int(m[0]) + 1), text),
    "every key twice": lambda text: re.sub(r'("\w+"): (\d+)', r"\1: 99, \1: \2", text),
    "every key twice, the last another": lambda text: re.sub(r'("\w+"): (\d+)', r"\1: \2, \1: 99", text),
    "names exchanged": lambda text: text.replace("ann", "?").replace("bob", "ann").replace("?", "bob"),
    "one source called as another": lambda text: text.replace("ann", "bob"),
    "one source renamed": lambda text: text.replace("ann", "zoe"),
    "the measure renamed": lambda text: text.replace("loss", "accuracy"),
    "the direction reversed": lambda text: text.replace("lower", "higher"),
    "something after the end": lambda text: text + "{}",
    "trailing commas": lambda text: text.replace("]", ",]"),
    "comments": lambda text: "/* */" + text,
    "single quotes": lambda text: text.replace('"', "'"),
}


@pytest.mark.parametrize("change", TEXTS.values(), ids=TEXTS.keys())
def test_no_rewritten_text_gives_another_attribution(
    change: Texts, saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    header, rest = parts(saved[1].read_bytes())
    metadata = {name: change(text) if text[:1] in "[{" else text for name, text in header["__metadata__"].items()}
    check(joined({**header, "__metadata__": metadata}, rest), saved, tmp_path)


# --- tensors and headers

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def scores(change: Callable[[Tensor], Tensor], name: str = "scores") -> Change:
    return lambda tensors: {**tensors, name: change(tensors[name]).contiguous()}


def put(value: float) -> Change:
    def change(tensor: Tensor) -> Tensor:
        found = tensor.clone()
        found.view(-1)[3] = value
        return found

    return scores(change)


TENSORS: dict[str, Change] = {
    "half precision": scores(lambda t: t.half()),
    "double precision": scores(lambda t: t.double()),
    "bfloat16": scores(lambda t: t.bfloat16()),
    "whole numbers": scores(lambda t: t.view(torch.int32)),
    "flags": scores(lambda t: t > 0),
    "bytes": scores(lambda t: t.view(torch.uint8)),
    "complex numbers": scores(lambda t: t.to(torch.complex64)),
    "transposed": scores(lambda t: t.T),
    "of another shape": scores(lambda t: t.reshape(5, 2)),
    "flat": scores(lambda t: t.flatten()),
    "three dimensions": scores(lambda t: t[None]),
    "one number": scores(lambda t: t[0, 0]),
    "nothing": scores(lambda t: t[:0]),
    "no sources": scores(lambda t: t[:, :0]),
    "a query more": scores(lambda t: torch.cat([t, t[:1]])),
    "a query less": scores(lambda t: t[:1]),
    "a source more": scores(lambda t: torch.cat([t, t[:, :1]], 1)),
    "a source less": scores(lambda t: t[:, :4]),
    "sources in another order": scores(lambda t: t.flip(1)),
    "queries in another order": scores(lambda t: t.flip(0)),
    "negative": scores(lambda t: -t),
    "twice as large": scores(lambda t: 2 * t),
    "a little larger": scores(lambda t: t * (1 + 1e-6)),
    "zeros": scores(torch.zeros_like),
    "NaN": put(math.nan),
    "infinity": put(math.inf),
    "1e38": put(1e38),
    "1e-45": put(1e-45),
    "renamed": lambda tensors: {f"x{name}": tensor for name, tensor in tensors.items()},
    "in upper case": lambda tensors: {name.upper(): tensor for name, tensor in tensors.items()},
    "no runs": lambda tensors: {"scores": tensors["scores"]},
    "runs twice as far": scores(lambda t: 2 * t, "deviations-0"),
    "runs in another order": scores(lambda t: t.flip(0), "deviations-0"),
    "a run less": scores(lambda t: t[:1], "deviations-0"),
    "two sets of runs": lambda tensors: {**tensors, "deviations-1": tensors["deviations-0"].clone()},
    "no tensor": lambda tensors: {},
    "a tensor more": lambda tensors: {**tensors, "more": torch.ones(3)},
    "a tensor more of that shape": lambda tensors: {**tensors, "a": torch.ones(2, 5), "z": torch.ones(2, 5)},
    "a tensor of a path's name": lambda tensors: {**tensors, "../../x": torch.ones(1)},
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS.keys())
def test_no_other_tensor_gives_another_attribution(
    change: Change, saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    with safe_open(saved[1], framework="pt") as file:
        metadata = file.metadata()
    save_file(change(load_file(saved[1])), tmp_path / "scores.safetensors", metadata)
    found = wrong(tmp_path / "scores.safetensors", saved[0])
    assert found is None, found


def each(header: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {name: about if name == "__metadata__" else {**about, **values} for name, about in header.items()}


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no metadata": lambda header: {name: about for name, about in header.items() if name != "__metadata__"},
    "metadata of nothing": lambda header: {**header, "__metadata__": {}},
    "metadata of numbers": lambda header: {**header, "__metadata__": {"imprint": 5}},
    "metadata of null": lambda header: {**header, "__metadata__": None},
    "metadata under other names": lambda header: {
        **header, "__metadata__": {f"x{name}": text for name, text in header["__metadata__"].items()}},
    "metadata with more": lambda header: {**header, "__metadata__": {**header["__metadata__"], "more": "x" * 10_000}},
    "shape of another order": lambda header: each(header, shape=[5, 2]),
    "shape of one row": lambda header: each(header, shape=[10]),
    "shape of a row more": lambda header: each(header, shape=[3, 5]),
    "shape that overflows": lambda header: each(header, shape=[2**40, 2**40]),
    "shape that is negative": lambda header: each(header, shape=[-2, -5]),
    "shape of 10,000 dimensions": lambda header: each(header, shape=[2, 5, *[1] * 10_000]),
    "dtype of half the size": lambda header: each(header, dtype="F16"),
    "dtype of half the size, with its shape": lambda header: each(header, dtype="F16", shape=[2, 10]),
    "dtype of whole numbers": lambda header: each(header, dtype="I32"),
    "dtype that is unknown": lambda header: each(header, dtype="PICKLE"),
    "offsets of a part": lambda header: each(header, data_offsets=[0, 20]),
    "offsets moved": lambda header: each(header, data_offsets=[4, 44]),
    "offsets beyond the end": lambda header: each(header, data_offsets=[0, 2**40]),
    "offsets backwards": lambda header: each(header, data_offsets=[40, 0]),
    "a list": lambda header: [],
    "deep": lambda header: b"[" * 100_000,
    "spaces after it": lambda header: json.dumps(header).encode() + b" " * 64,
    "spaces in it": lambda header: json.dumps(header, indent=4).encode(),
    "no UTF-8": lambda header: json.dumps(header).encode("utf-16"),
}  # fmt: skip


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_no_other_header_gives_another_attribution(
    change: Callable[[dict[str, Any]], Any], saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    header, rest = parts(saved[1].read_bytes())
    check(joined(change(header), rest), saved, tmp_path)


@pytest.mark.parametrize("swap", ["metadata", "scores"])
def test_no_mixture_of_two_attributions_is_loaded(swap: str, saved: tuple[Attribution, Path], tmp_path: Path) -> None:
    """The scores of one with the labels of another: each is whole, together they are neither."""
    result, file = saved
    other = replace(result, scores=result.scores.flip(1), labels=replace(result.labels, n=24))
    other.save(tmp_path / "other.safetensors")
    one, two = parts(file.read_bytes()), parts((tmp_path / "other.safetensors").read_bytes())
    header, rest = (two[0], one[1]) if swap == "metadata" else (one[0], two[1])
    check(joined(header, rest), saved, tmp_path)
