"""The troubleshooting page quotes messages as the source has them.

An entry is a heading such as ### `source … has no members: leave it out, or give it examples.` in the section of its
error class, where … stands for a variable part or, at the end, for the rest of the message. Messages are read from the
syntax tree of the package: those of `ImprintError`s, of warnings and of logged warnings. Where a helper raises
what it is told, as in `_require(…, "steps", …, "at least 1")`, the words of each call are filled in.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from imprint import errors
from imprint.errors import ImprintError

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
Function = ast.FunctionDef | ast.AsyncFunctionDef
HOLE = "\0"  # a variable part of a message
FEWEST_WORDS = 10  # characters of a heading that are not variable: with fewer it would stand for anything
SPEAKING = {
    **{"warnings.warn": "Warnings", "ReliabilityWarning": "Warnings"},
    **{"logger.warning": "Logged", "logger.error": "Logged"},
}


@dataclass(frozen=True)
class Message:
    """What the user may be told; `shared` is the text before the words of one call were filled in."""

    where: str
    section: str
    text: str
    shared: str

    def __str__(self) -> str:
        return f"{self.where}: {self.section}: {re.sub(f'{HOLE}+', '…', self.text)}"

    def quoted_by(self, heading: str) -> bool:
        """Whether the heading is this message."""
        return any(_pattern(heading).fullmatch(text) for text in (self.text, self.shared))


@cache
def _pattern(heading: str) -> re.Pattern[str]:
    """A message with … for its variable parts and possibly for its end."""
    begin, open_end = heading.rstrip("…"), heading.endswith("…")
    pattern = f"{HOLE}+".join(re.escape(piece) for piece in begin.rstrip("." * (not open_end)).split("…"))
    return re.compile(pattern + (".+" if open_end else r"\.?"), re.DOTALL)


def _text(value: ast.expr, known: dict[str, str]) -> str:
    """A message with holes for what is only known when the program runs."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part, known) for part in value.values)
    if isinstance(value, ast.FormattedValue) and value.conversion == -1:
        return _text(value.value, known)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text(value.left, known) + _text(value.right, known)
    return known.get(value.id, HOLE) if isinstance(value, ast.Name) else HOLE


@cache
def _trees() -> dict[str, ast.Module]:
    files = sorted((ROOT / "imprint").rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def _calls() -> dict[str, list[ast.Call]]:
    """All calls of the package by what is called."""
    found: dict[str, list[ast.Call]] = {}
    for node in (node for tree in _trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.Call):
            found.setdefault(ast.unparse(node.func), []).append(node)
    return found


def _told(function: Function, call: ast.Call) -> dict[str, str]:
    """The texts that a call gives to the arguments of a function, with holes for what varies in them."""
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    given = [*zip(names, call.args, strict=False), *((word.arg or "", word.value) for word in call.keywords)]
    texts = {name: _text(value, {}) for name, value in given}
    return {name: text for name, text in texts.items() if text != HOLE}


def _spoken(node: ast.AST) -> tuple[str, ast.expr] | None:
    """The section a node's message belongs to, and the message."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = ast.unparse(node.func)
    if name == "warnings.warn" and ast.unparse(node.args[0]) in ("warning", "message"):
        return None  # its text is where the warning is made
    if name.endswith("notices.add"):
        return "Warnings", node.args[0]
    if name in SPEAKING:
        return SPEAKING[name], node.args[0]
    made = getattr(errors, name.split(".")[-1], None)
    if isinstance(made, type) and issubclass(made, ImprintError) and "__init__" not in vars(made):
        return made.__name__, node.args[0]
    return None


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    """Functions with the name they are called by, which for the making of an object is that of its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield owner if node.name == "__init__" else node.name, node
        yield from _functions(node, node.name if isinstance(node, ast.ClassDef) else owner)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, Function):
            yield node
            yield from _own_nodes(node)


@cache
def _messages() -> list[Message]:
    found = []
    for file, tree in _trees().items():
        for name, function in _functions(tree):
            for node in _own_nodes(function):
                spoken = _spoken(node)
                if file == "imprint/errors.py" and isinstance(node, ast.Call) and node.args:
                    spoken = (name, node.args[0]) if ast.unparse(node.func) == "super().__init__" else None
                if spoken is None:
                    continue
                section, value = spoken
                shared, where = _text(value, {}), f"{file}:{node.lineno}"  # type: ignore[attr-defined]
                texts = {_text(value, _told(function, call)) for call in _calls().get(name, [])} or {shared}
                if section == "Logged":
                    texts = {re.sub(r"%[-+.\d]*[sdgfr]", HOLE, text) for text in texts}
                found += [Message(where, section, text, shared) for text in sorted(texts)]
    return found


def _entries() -> list[tuple[str, str]]:
    """(section, message) of every entry of the page."""
    entries, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif match := re.fullmatch(r"### (`+)\s?(.*?)\s?\1", line):
            entries.append((section, match[2]))
    return entries


def test_every_quoted_message_is_one_of_the_source() -> None:
    unknown = [
        f"## {section}, ### {heading}"
        for section, heading in _entries()
        if not any(m.section == section and m.quoted_by(heading) for m in _messages())
    ]
    assert not unknown, "docs/troubleshooting.md quotes what no message says:\n" + "\n".join(unknown)


def test_headings_say_enough_to_be_found() -> None:
    assert [heading for _, heading in _entries() if len(heading.replace("…", "")) < FEWEST_WORDS] == []
    assert len(set(_entries())) == len(_entries())


def test_messages_are_read_from_the_source() -> None:
    """The reading itself works: a plain text, one with variable parts, and one whose words a call fills in."""
    texts = {message.text for message in _messages()}
    assert "the dataset is empty." in texts
    assert f"all columns of the data must have the same number of rows, got {HOLE}." in texts
    assert f"steps must be a whole number of at least 1, got {HOLE}." in texts
    assert 'plot needs an optional dependency: pip install "imprint-attribution[report]"' in texts
