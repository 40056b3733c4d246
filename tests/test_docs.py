"""Check that the docs say what is there: quoted messages, links, the navigation, names of functions and tests.

An entry of the troubleshooting page is a heading such as ### `source … has no members: …`, where … stands for a
variable part or, at the end, for the rest of the message. Messages are read from the syntax tree of the package: those
of `ImprintError`s, of warnings and of logged warnings. Where a function raises what it is given, as in
`_require(…, "steps", …, "at least 1")`, the words of each call are filled in.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from imprint import errors
from imprint.errors import ImprintError
from tests.test_import import _graph

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "troubleshooting.md"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
Function = ast.FunctionDef | ast.AsyncFunctionDef
HOLE = "\0"  # a variable part of a message
FEWEST_WORDS = 10  # characters of a heading that are not variable: with fewer it would stand for anything
WARNINGS = ("warnings.warn", "ReliabilityWarning")
LOGS = ("logger.warning", "logger.error")


@dataclass(frozen=True)
class Message:
    """A message that a user may see; `shared` is its text before the words of one call were filled in."""

    text: str
    shared: str

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


@cache
def _errors() -> set[str]:
    """The error classes whose argument is their message, in `imprint.errors` and derived from those elsewhere."""
    made = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ImprintError)}
    made -= {name for name in made if "__init__" in vars(getattr(errors, name))}
    classes = [node for tree in _trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return made | {node.name for node in classes if {ast.unparse(base) for base in node.bases} & made}


def _is_message(call: ast.Call, file: str) -> bool:
    """Whether the first argument of a call is a message to the user."""
    name = ast.unparse(call.func)
    if name == "warnings.warn" and ast.unparse(call.args[0]) in ("warning", "message"):
        return False  # its text is where the warning is made
    if name in (*WARNINGS, *LOGS) or name.endswith("notices.add"):
        return True
    if file == "imprint/errors.py":
        return name == "super().__init__"
    return name.split(".")[-1] in _errors()


def _phrases(function: Function) -> dict[str, str]:
    """The texts that a function gives names to, for use in its messages."""
    named = [node for node in _own_nodes(function) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    texts = {ast.unparse(node.targets[0]): _text(node.value, {}) for node in named}
    return {name: text for name, text in texts.items() if text.strip(HOLE)}


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
                if not (isinstance(node, ast.Call) and node.args and _is_message(node, file)):
                    continue
                known = _phrases(function)
                shared = _text(node.args[0], known)
                calls = _calls().get(name, [])
                texts = {_text(node.args[0], {**known, **_told(function, call)}) for call in calls} or {shared}
                if ast.unparse(node.func) in LOGS:
                    texts = {re.sub(r"%[-+.\d]*[sdgfr]", HOLE, text).replace("%%", "%") for text in texts}
                found += [Message(text, shared) for text in sorted(texts)]
    return found


def _entries() -> list[str]:
    """The messages that the troubleshooting page quotes."""
    headings = re.findall(r"^### (`+)\s?(.*?)\s?\1$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [message for _, message in headings]


def test_every_quoted_message_is_one_of_the_source() -> None:
    unknown = [heading for heading in _entries() if not any(message.quoted_by(heading) for message in _messages())]
    assert not unknown, "docs/troubleshooting.md quotes what no message says:\n" + "\n".join(unknown)


def test_headings_say_enough_to_be_found() -> None:
    assert [heading for heading in _entries() if len(heading.replace("…", "")) < FEWEST_WORDS] == []
    assert len(set(_entries())) == len(_entries()) > 100


def test_messages_are_read_from_the_source() -> None:
    """The reading itself works: a plain text, one with variable parts, and one whose words a call fills in."""
    texts = {message.text for message in _messages()}
    assert "the dataset is empty." in texts
    assert f"all columns of the data must have the same number of rows, got {HOLE}." in texts
    assert f"steps must be a whole number of at least 1, got {HOLE}." in texts
    assert 'plot needs an optional dependency: pip install "imprint-attribution[report]"' in texts


def _anchor(heading: str) -> str:
    """The anchor that both GitHub and mkdocs make of a heading."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def _prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", _prose(page)):
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        assert place.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", _prose(place), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def _bound(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The names that statements bind, with the statement that does."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update({alias.asname or alias.name: node for alias in node.names})
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: node for target in targets if isinstance(target, ast.Name)})
    return found


def _exists(dotted: str) -> bool:
    """Whether a dotted name is a module of the library, or is bound in one or in a class of one."""
    names = dotted.split(".")
    for count in range(len(names), 0, -1):
        path, rest = "/".join(names[:count]), names[count:]
        tree = _trees().get(f"{path}.py") or _trees().get(f"{path}/__init__.py")
        if tree is None:
            continue
        if not rest:
            return True
        owner = _bound(tree.body).get(rest[0])
        if isinstance(owner, ast.ImportFrom) and str(owner.module).startswith("imprint"):
            return _exists(".".join([str(owner.module), *rest]))
        if isinstance(owner, ast.ClassDef) and len(rest) > 1:
            return rest[1] in _bound(owner.body)
        return owner is not None
    return False


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_function_that_is_named_exists(page: Path) -> None:
    quoted = " ".join(re.findall(r"`[^`]+`|^::: .*$", _prose(page), re.MULTILINE))
    names = set(re.findall(r"(?<![\w/.-])imprint(?:\.[A-Za-z_]\w*)+", quoted))
    assert [name for name in sorted(names) if not _exists(name)] == []


def test_every_member_on_the_api_page_exists() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    members = re.findall(r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", page, re.MULTILINE)
    named = [f"{owner}.{name}" for owner, names in members for name in names.split(", ")]
    assert len(named) > 30
    assert [name for name in named if not _exists(name)] == []


def test_a_name_that_does_not_exist_would_be_noticed() -> None:
    assert _exists("imprint.Plan.auto") and _exists("imprint.evaluation.metrics.lds")
    assert not _exists("imprint.Plan.nothing") and not _exists("imprint.evaluation.metrics.nothing")
    assert not _exists("imprint.nothing")


def test_every_test_that_is_named_exists() -> None:
    named = {match for page in PAGES for match in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", _prose(page))}
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not (ROOT / file).exists() or f"def {test}" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []
    assert len(named) > 20


def test_the_diagram_of_the_packages_is_their_graph() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    diagram = page.split("```text\n")[1].split("```")[0].splitlines()
    level = {name: line for line, text in enumerate(diagram) for name in re.findall(r"(\w+)(?:/|\.py)", text)}
    graph = _graph()
    assert sorted(level) == sorted(graph)
    assert [(part, used) for part, all_used in graph.items() for used in all_used if level[used] > level[part]] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_that_is_named_exists(page: str) -> None:
    named = re.findall(r"`(?:imprint/)?([\w/]+(?:\.py|/))`", _prose(ROOT / page))
    missing = [name for name in named if not [*(ROOT / "imprint").rglob(name.rstrip("/")), *ROOT.glob(name)]]
    assert named and not missing


def test_the_page_on_the_paper_covers_every_equation() -> None:
    page = (DOCS / "paper.md").read_text(encoding="utf-8")
    assert all(f"| Eq. {number} |" in page for number in range(1, 11))
    assert all(f"**Figure {number}**" in page for number in (1, 2))


def test_the_readme_fits_a_screen_or_three() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
