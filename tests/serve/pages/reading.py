"""Reads pages as a browser does: their forms, links and tables, and what a strict policy would block."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "link", "input", "img", "br", "hr"}


@dataclass
class Element:
    """A tag with its attributes, and the text inside of it."""

    tag: str
    attributes: dict[str, str]
    inside: "list[Element]" = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, with single spaces."""
        return " ".join(self.full.split())

    @property
    def full(self) -> str:
        """The text as it stands."""
        return "".join(self.pieces)

    def find(self, tag: str, **attributes: str) -> "list[Element]":
        """Return all such elements inside, in their order; `name_=` stands for the attribute `name`."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [each for each in self.inside if each.tag == tag and wanted.items() <= each.attributes.items()]

    def one(self, tag: str, **attributes: str) -> "Element":
        """Return the only such element."""
        (found,) = self.find(tag, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("document", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        for each in self._open:
            each.inside.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> ends <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for each in self._open:
            each.pieces.append(data)


def read_page(html: str) -> Element:
    """Return a page, and check that every tag is closed, nothing is inline, forms are protected and links are local.

    No page may show backticks, with which messages mark commands.
    """
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert len(reader._open) == 1, f"<{reader._open[-1].tag}> is not closed"
    page = reader.root
    for each in page.inside:
        assert each.tag not in ("style", "iframe", "object", "base"), each
        assert not [name for name in each.attributes if name == "style" or name.startswith("on")], each
        for name in ("href", "src", "action", "formaction"):
            address = each.attributes.get(name, "/")
            fine = address[:1] in ("/", "#") and address[:2] != "//"
            assert fine or (each.tag == "img" and address.startswith("data:image/png;")), each
    assert all("src" in each.attributes and not each.text for each in page.find("script"))
    for form in page.find("form", method="post"):
        if form.attributes["action"] != "/login":
            assert form.one("input", name="csrf").attributes["value"]
    identities = [each.attributes["id"] for each in page.inside if "id" in each.attributes]
    assert len(set(identities)) == len(identities), "an id is given twice"
    assert "`" not in page.text, "what is between backticks is to be code"
    assert len(page.find("h1")) == 1 and page.one("main") and page.one("html", lang="en")
    return page
