"""Defines `About`, what is known of a source beyond its examples: whose it is, its licence, and where it is from.

A description comes from tables that anybody may have written. It is text of bounded length, which every place that
shows it escapes, and an address that a page may link to: http or https, and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from imprint.display import suggest_names
from imprint.errors import SourcesError

_LONGEST = {"owner": 300, "licence": 300, "url": 2000}  # characters


@dataclass(frozen=True)
class About:
    """What is known of a source beyond its examples; an empty text where it is not known.

    owner: whose it is: a publisher, an author, an organisation.
    licence: the name or the address of its licence; several are joined with "; ".
    url: where it is from, an address that begins with http:// or https://.

    >>> About(owner="The Times", licence="CC-BY-4.0", url="https://times.example/archive")
    About(owner='The Times', licence='CC-BY-4.0', url='https://times.example/archive')
    >>> About(url="javascript:alert(1)")
    Traceback (most recent call last):
    imprint.errors.SourcesError: a source's url must begin with http:// or https:// and name a host, got \
'javascript:alert(1)'.
    """

    owner: str = ""
    licence: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        for name, longest in _LONGEST.items():
            object.__setattr__(self, name, text := _flatten(name, getattr(self, name)))
            if len(text) > longest:
                raise SourcesError(f"a source's {name} has at most {longest:,} characters, got {len(text):,}.")
        if self.url:
            _check_url(self.url)

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self.owner or self.licence or self.url)

    @property
    def licence_url(self) -> str:
        """The address of the licence, if that is how it is named and a page may link to it; empty otherwise."""
        return self.licence if is_address(self.licence) else ""


FIELDS = tuple(field.name for field in fields(About))


def read_about_values(value: object, whose: str) -> About:
    """Return a description from a mapping of its fields; `whose` it is, for the errors."""
    if isinstance(value, About):
        return value
    if not isinstance(value, Mapping):
        raise SourcesError(
            f"the description of {whose} must be an imprint.About or a mapping of {', '.join(FIELDS)}; got a "
            f"{type(value).__name__}."
        )
    for name in value:
        if name not in FIELDS:
            raise SourcesError(f"the description of {whose} has {name!r}{suggest_names(str(name), FIELDS)}")
    given: dict[str, Any] = dict(value)
    try:
        return About(**given)
    except SourcesError as error:
        raise SourcesError(f"the description of {whose} cannot be used: {error}") from error


def unite(every: Sequence[About]) -> About:
    """Return what holds for all of some sources: a field in which they agree, and nothing where they differ.

    >>> unite([About("The Times", "CC0"), About("The Times", "MIT")])
    About(owner='The Times', licence='', url='')
    """
    first = every[0]
    agreed = {name: getattr(first, name) for name in FIELDS if len({getattr(each, name) for each in every}) == 1}
    return About(**agreed)


def is_address(text: str) -> bool:
    """Tell whether a text is an address that a page may link to."""
    try:
        _check_url(text)
    except SourcesError:
        return False
    return True


def _flatten(name: str, text: object) -> str:
    """Return a text on one line; refuse anything else, and what is no valid Unicode."""
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        raise SourcesError(f"a source's {name} must be a valid Unicode string, got {_clip(text)}.")
    return " ".join(text.split())


def _check_url(url: str) -> None:
    """Refuse what a page must not link to. A password in an address would be published with it."""
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url
        secret = "@" in parts.netloc
    except ValueError:
        found = secret = False
    if not found:
        raise SourcesError(f"a source's url must begin with http:// or https:// and name a host, got {_clip(url)}.")
    if secret:
        raise SourcesError(f"a source's url must not hold a user name or password, got {_clip(url)}.")


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


NOTHING = About()
