"""Texts of a store that a terminal obeys, a browser runs or a spreadsheet calculates.

Control sequences, overrides of the direction of writing, HTML and formulas stand in every text that a store has: names
and ids of sources, keys and values of the manifest, the names of tensors. Whatever is shown of it, on a terminal, in a
notebook, in a table or in an error, they must have lost their effect.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.judging import attacked
from tests.attacks.stores import SHOWING, Attack, Bases, Scene, command, shards

pytestmark = pytest.mark.long

SEQUENCES = {
    "colour": "\x1b[31mred\x1b[0m",
    "clear": "a\x1b[2J\x1b[H",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "C1": "\x9b31mred",
    "override": "safe\u202egpj.exe",
    "isolate": "\u2067abc\u2069",
    "return": "harmless\rerror",
    "backspaces": "bad\x08\x08\x08good",
    "bell and NUL": "\x07\x00\x7f",
    "lines": "a\u2028b\u2029c\x85d",
    "markup": "[red]x[/red][link=http://evil.example]y[/link][/]",
    "newline": "ann\nerror: all is well",
    "backslashes": "x\\[/red]\\",
}
FIVE = ["ann", "bob", "cid", "dot", "eve"]


def sources(column: str, text: str) -> Callable[[Scene], None]:
    """The text in every entry of a column; ids stay apart."""
    return lambda scene: scene.table(**{column: [f"{text}{number}" for number in range(5)]})


NAMES = {
    f"{column}: {name}": Attack(sources(column, text), forged=True)
    for column in ("names", "ids")
    for name, text in SEQUENCES.items()
}


@pytest.mark.parametrize("attack", NAMES.values(), ids=NAMES.keys())
def test_no_source_commands_a_terminal(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- other texts of the manifest


def put(*path: Any, value: Any = None, key: bool = False) -> Callable[[str], Callable[[Scene], None]]:
    """The text as a value of the manifest, inside of `value` if that is given, or as a key."""

    def wrap(text: str) -> Any:
        return text if value is None else value(text)

    def change(text: str) -> Callable[[Scene], None]:
        if key:
            return lambda scene: scene.set(*path, text, value=wrap(text))
        return lambda scene: scene.set(*path, value=wrap(text))

    return change


FIGURES = ("checkpoints", 0, "measured")
PLACES: dict[str, Callable[[str], Callable[[Scene], None]]] = {
    "created": put("created"),
    "versions.torch": put("versions", "torch"),
    "a version's name": put("versions", key=True, value=lambda text: "1"),
    "device": put("execution", "device"),
    "a figure": put(*FIGURES, "lost"),
    "a figure's name": put(*FIGURES, key=True, value=lambda text: 1.0),
    "norms": put(*FIGURES, "norms", value=lambda text: {"median": text}),
    "norms' name": put(*FIGURES, "norms", value=lambda text: {text: 1.0}),
    "moments": put(*FIGURES, "moments"),
    "a warning": put("warnings", value=lambda text: [text]),
    "the note": put("note"),
    "the task in the note": put("note", value=lambda text: {"imprint": {"command": {"task": f"{text}.py:task"}}}),
    "a module in the note": put("note", value=lambda text: {"imprint": {"command": {"task": f"{text}:task"}}}),
    "a setting in the note": put("note", value=lambda text: {"imprint": {"command": {text: "x"}}}),
    "an estimate in the note": put("note", value=lambda text: {"imprint": {"estimate": {"seconds": text}}}),
    "the dtype": put("request", "dtype"),
    "the engine": put("request", "plan", "engine"),
    "a field of the plan": put("request", "plan", key=True, value=lambda text: 1),
    "a parameter": put("request", "parameters", key=True, value=lambda text: {"shape": [1], "dtype": "torch.float32"}),
    "a parameter's dtype": put("request", "parameters", "first.bias", "dtype"),
    "a frozen parameter": put("request", "fixed", key=True, value=lambda text: "0" * 64),
    "a path": put("checkpoints", 0, "imprints", 0, "path"),
    "a checksum": put("checkpoints", 0, "imprints", 0, "sha256"),
    "a layer": put("checkpoints", 0, "decided", "layers", value=lambda text: [text]),
    "a probe": put("probes", "structure", value=lambda text: {"tensor": text}),
    "an unknown field": put(key=True, value=lambda text: 1),
    "the schema": put("schema"),
}
NOTED = (command("attribute", "gift"), command("simulate", "--repeat", "gift", "--out", "again", "--no-check"))
SHOWN = ("attribute gift", command("verify", "gift"), *SHOWING, *NOTED)
MANIFESTS = {
    f"{place}: {name}": Attack(change(SEQUENCES[name]), SHOWN, forged=True)
    for place, change in PLACES.items()
    for name in ("colour", "C1", "override")
}


@pytest.mark.parametrize("attack", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_no_text_of_a_manifest_commands_a_terminal(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


def tensor(text: str, *, base: bool) -> Callable[[Scene], None]:
    """A tensor of that name in a file; one is missing in its stead."""

    def change(scene: Scene) -> None:
        name = scene.manifest["checkpoints"][0]["base"]["path"] if base else shards(scene)[0]
        tensors = scene.tensors(name)
        tensors[text] = tensors.pop("first.bias")
        scene.write_tensors(name, tensors)

    return change


def damaged(text: str) -> Callable[[Scene], None]:
    """A shard is gone: the error says whose."""

    def change(scene: Scene) -> None:
        scene.table(ids=[f"{text}{number}" for number in range(5)], names=[f"{text}n{number}" for number in range(5)])
        (scene.gift / shards(scene)[0]).unlink()

    return change


FILES = {
    **{f"a tensor: {name}": Attack(tensor(text, base=False)) for name, text in SEQUENCES.items()},
    **{f"a tensor of a base: {name}": Attack(tensor(text, base=True)) for name, text in SEQUENCES.items()},
    **{f"a lost source: {name}": Attack(damaged(text)) for name, text in SEQUENCES.items()},
}


@pytest.mark.parametrize("attack", FILES.values(), ids=FILES.keys())
def test_no_error_commands_a_terminal(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- other media

HTML = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</td></tr></table><iframe src=//evil.example>",
    "<b onmouseover=alert(1)>x</b>",
    "&lt;script&gt;<svg/onload=alert(1)>",
    "<style>*{display:none}</style>",
    "<!--",
)
FORMULAS = (
    "=1+1",
    "=cmd|'/c calc'!A0",
    '=HYPERLINK("http://evil.example","x")',
    "+1+1",
    "-2+3",
    "@SUM(1)",
    "\t=1+1",
    "\r=1+1",
    "＝1+1",
    "\n=1+1",
    " =1+1",
    '"=1+1',
    ";=1+1",
)
MEDIA = {f"{column}: {text!r}": Attack(sources(column, text), forged=True) for column in ("names", "ids") for text in (
    *HTML, *FORMULAS)}  # fmt: skip


@pytest.mark.parametrize("attack", MEDIA.values(), ids=MEDIA.keys())
def test_no_source_commands_a_browser_or_a_spreadsheet(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)
