"""Makes text safe to show: names, notes and paths come from files that anybody may have written.

There is one function for each medium. A terminal obeys escape sequences, a page obeys tags, a spreadsheet obeys cells
that begin with "=", a picture obeys "$". The text shown then reads as it was written, and does nothing else.
"""

import html
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_JOINERS = "\u200c\u200d"  # harmless: some scripts and emoji need them
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four are wide forms of the first


def for_terminal(value: Any) -> str:
    r"""Return a value as one line of text with visible control characters, line breaks and changes of direction.

    >>> print(for_terminal("a\x1b[2Jb\nc\u202ed"))
    a\x1b[2Jb\nc\u202ed
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(map(_escape_hidden, text))


def for_html(value: Any) -> str:
    """Return a value as text that contains no markup, for use between tags and in attributes.

    >>> for_html('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(for_terminal(value), quote=True)


def for_csv(value: Any) -> Any:
    """Return a cell that no spreadsheet reads as a formula; numbers stay numbers.

    >>> [for_csv(value) for value in (-1.5, "-1.5", "=1+1", "@sum", "times")]
    [-1.5, '-1.5', "'=1+1", "'@sum", 'times']
    """
    if not isinstance(value, str):
        return value
    text = for_terminal(value)
    harmless = _NUMBER.fullmatch(text) or not value.lstrip().startswith(_FORMULA)
    return text if harmless and not value.startswith(("\t", "\r", "\n")) else f"'{text}"


def for_picture(value: Any) -> str:
    r"""Return a value as text that matplotlib draws literally, dollar signs included.

    >>> print(for_picture("a $100 bill"))
    a \$100 bill
    """
    return for_terminal(value).replace("$", r"\$")


def _escape_hidden(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS
    return character.encode("unicode_escape").decode() if hidden else character


def strip_addresses(text: str) -> str:
    """Remove memory addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def name_some(names: Sequence[str], most: int = 6) -> str:
    """List the first names, and count the rest.

    >>> name_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def count_of(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun.

    >>> count_of(1, "query", "queries"), count_of(2, "run")
    ('1 query', '2 runs')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def format_size(count: float | None) -> str:
    """Format a number of bytes for a person.

    >>> format_size(1_500_000), format_size(999_999), format_size(None)
    ('1.5 MB', '1 MB', 'unknown')
    """
    if count is None:
        return "unknown"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5:  # what three digits can say
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"
