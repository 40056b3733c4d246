"""Cleans what is shown: names, notes and paths come from files that anybody may have written.

One function for each medium. A terminal obeys escape sequences, a page obeys tags, a spreadsheet obeys cells that begin
with "=", a picture obeys "$". What is shown is then what was written, and does nothing.
"""

import html
import re
import unicodedata
from typing import Any

_JOINERS = "\u200c\u200d"  # between letters of some scripts, and in emoji: they turn and hide nothing
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four are wide forms of the first


def for_terminal(value: Any) -> str:
    r"""Return a text on one line in which control characters, line breaks and changes of direction are visible.

    >>> print(for_terminal("a\x1b[2Jb\nc\u202ed"))
    a\x1b[2Jb\nc\u202ed
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def for_html(value: Any) -> str:
    """Return a text that is no markup, neither between tags nor in an attribute.

    >>> for_html('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(for_terminal(value), quote=True)


def for_csv(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula; numbers stay numbers.

    >>> [for_csv(value) for value in (-1.5, "-1.5", "=1+1", "@sum", "times")]
    [-1.5, '-1.5', "'=1+1", "'@sum", 'times']
    """
    if not isinstance(value, str):
        return value
    text = for_terminal(value)
    harmless = _NUMBER.fullmatch(text) or not value.lstrip().startswith(_FORMULA)
    return text if harmless and not value.startswith(("\t", "\r", "\n")) else f"'{text}"


def for_picture(value: Any) -> str:
    r"""Return a text that matplotlib draws as it is, without looking for formulas between dollar signs.

    >>> print(for_picture("a $100 bill"))
    a \$100 bill
    """
    return for_terminal(value).replace("$", r"\$")


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS
    return character.encode("unicode_escape").decode() if hidden else character


def placeless(text: str) -> str:
    """A text without addresses in memory, which are others in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
