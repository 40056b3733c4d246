"""Renders templates in the common layout; every page comes from here."""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup, escape

from imprint.display import for_terminal
from imprint.serve.pages.static import address_of
from imprint.templates import make_environment

if TYPE_CHECKING:
    from jinja2 import Environment

    from imprint.serve.access.roles import Identity, Permission

_CODE = re.compile("`([^`]+)`")


class Link(NamedTuple):
    """An entry of the navigation, which is shown to those who may do one of some things there."""

    text: str
    path: str
    needs: "tuple[Permission, ...]"
    ledger: bool = False


_LINKS = (
    Link("Query", "/query", ("attribute",)),
    Link("Credit", "/credit", ("see_own_credit", "see_credit"), ledger=True),
    Link("Sources", "/sources", ("see_sources", "see_own_credit")),
    Link("Trust", "/trust", ("see_trust",)),
    Link("Keys", "/keys", ("manage_keys",)),
)


def list_links(request: Request, identity: "Identity | None") -> list[Link]:
    """Return the pages that somebody may see, in the order of the navigation."""
    if identity is None:
        return []
    there = request.app.state.credit is not None
    return [link for link in _LINKS if any(map(identity.may, link.needs)) and (there or not link.ledger)]


def render(
    request: Request, template: str, identity: "Identity | None", status: int = 200, **values: Any
) -> HTMLResponse:
    """Return a page; values that are text are escaped, and what is hidden in them is made visible.

    identity: whose page it is; None where nobody is logged in.
    """
    page = _open_environment().get_template(template)
    common = {"identity": identity, "links": list_links(request, identity), "path": request.url.path}
    return HTMLResponse(page.render(**common, **values), status)


@cache
def _open_environment() -> "Environment":
    environment = make_environment("imprint.serve.pages", "serving pages", "serve", folder="templates")
    filters: dict[str, Callable[..., Any]] = {
        "typed": show_typed,
        "text": show_text,
        "prose": mark_code,
        "verbatim": escape,
        "effect": format_effect,
        "measured": format_measured,
        "percent": format_percent,
    }
    environment.filters.update(filters)
    environment.globals["static"] = address_of
    return environment


def show_typed(text: str) -> Markup:
    """Return what somebody typed as the content of a text field, every character as it was."""
    return Markup("\n") + escape(text)  # a browser drops the first line break of a text field


def show_text(text: str) -> Markup:
    """Return a text of several lines; everything else in it that is hidden is made visible."""
    lines = text.replace("\r\n", "\n").split("\n")
    return Markup("\n").join(
        Markup("\t").join(escape(for_terminal(cell)) for cell in line.split("\t")) for line in lines
    )


def mark_code(text: str) -> Markup:
    """Return a message with what it has between backticks, such as commands, as code.

    >>> mark_code("run `imprint credit verify` & wait")
    Markup('run <code>imprint credit verify</code> &amp; wait')
    """
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(for_terminal(text)))))


def format_effect(value: float, digits: int = 3) -> str:
    """Format an effect or its error with its sign, and a minus that is as wide as the plus.

    >>> format_effect(-0.01234), format_effect(2.0)
    ('−0.0123', '+2')
    """
    return f"{value:+.{digits}g}".replace("-", "−")


def format_measured(value: float, error: float | None) -> str:
    """Format an effect with its standard error, to as many decimals as the error has digits that mean something.

    >>> format_measured(-0.15249, 0.0251), format_measured(0.15249, None)
    ('−0.152 ± 0.025', '+0.152')
    """
    if error is None:
        return format_effect(value)
    if not 1e-5 <= error < 100:
        return f"{format_effect(value)} ± {error:.2g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:+.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")


def format_percent(share: float | None) -> str:
    """Format a share of a whole; one that is not 0 never reads as 0.

    >>> format_percent(0.1234), format_percent(0.0), format_percent(0.00001), format_percent(None)
    ('12.3%', '0%', '<0.1%', 'unknown')
    """
    if share is None:
        return "unknown"
    if not share:
        return "0%"
    return "<0.1%" if abs(share) < 0.0005 else f"{share:.1%}"
