"""A saved attribution that attacks start from, and its file taken apart and put together again."""

import json
import runpy
import struct
from pathlib import Path
from typing import Any

import torch

import imprint
from imprint import Attribution
from tests.attacks.stores import MODEL_TEXT


def make_saved(folder: Path) -> tuple[Attribution, Path]:
    """An attribution of two queries and five sources, and the file that it was saved to; not to be changed."""
    (folder / "model.py").write_text(MODEL_TEXT["dense"])
    mine = runpy.run_path(str(folder / "model.py"))
    given = (mine["task"], mine["data"], mine["sources"], mine["plan"])
    store = imprint.simulate(*given, checkpoints=mine["checkpoints"], out=folder / "store", progress=False)
    result = imprint.attribute(mine["task"], store, mine["queries"], progress=False)
    result.save(folder / "scores.safetensors")
    return result, folder / "scores.safetensors"


def is_same(found: Attribution, expected: Attribution) -> bool:
    """Whether two attributions are the same to the bit."""
    numbers = found.scores.dtype == expected.scores.dtype and torch.equal(found.scores, expected.scores)
    numbers = numbers and (found.noise_changes is None) == (expected.noise_changes is None)
    if numbers and found.noise_changes is not None and expected.noise_changes is not None:
        numbers = torch.equal(found.noise_changes, expected.noise_changes)
    runs = [[(each.shares, each.names, each.over) for each in result.replicates] for result in (found, expected)]
    numbers = numbers and runs[0] == runs[1]
    for one, other in zip(found.replicates, expected.replicates, strict=False):
        numbers = numbers and torch.equal(one.deviations, other.deviations)
    return numbers and plain(found.labels) == plain(expected.labels) and found.queries == expected.queries


def plain(labels: Any) -> Any:
    """Labels as JSON keeps them."""
    return json.loads(json.dumps(vars(labels)))


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, rest: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest
