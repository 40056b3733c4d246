"""Implements `imprint access`: makes, lists and revokes the keys of a service."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table

from imprint.cli.terminal import cell, console, errors, escape_markup
from imprint.errors import ConfigurationError

if TYPE_CHECKING:
    from imprint.serve.access import Access, KeyRecord
    from imprint.serve.access.roles import Role

access = typer.Typer(
    help="""Make, list and revoke the keys of a service.

    Whoever asks `imprint serve` for something shows a key. Its role says what it opens:

    - `query` asks for attributions, and credits what it asks

    - `publisher` sees the numbers of its own sources alone, and nobody's queries

    - `auditor` sees and verifies everything, and credits nothing

    - `admin` does all of this, and makes keys

    For example:

    - `imprint access create app --role query`

    - `imprint access create times --role publisher --source times --expires 90d`

    - `imprint access list`, then `imprint access revoke app`
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Place = Annotated[
    str,
    typer.Option(
        "--access",
        envvar="IMPRINT_SERVE_ACCESS",
        help="The database of keys: a SQLite file, or a URL such as `postgresql://user@host/name`. A service "
        "with the ledger `credit.db` has its keys in `credit.db.access`. The environment variable, which "
        "`imprint serve` reads too, keeps a password off the command line.",
    ),
]
Name = Annotated[str, typer.Argument(help="The name of the key. The ledger knows the caller by it.")]
_DEFAULT = "imprint-access.db"
_SPAN = re.compile("([0-9]{1,5})([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 168}


@access.command()
def create(
    name: Name,
    role: Annotated[str, typer.Option(help="`query`, `publisher`, `auditor` or `admin`.")],
    source: Annotated[
        list[str] | None, typer.Option(help="The id of a source that a publisher may see. Repeat it for several.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(help="How long the key is valid, such as `12h`, `90d` or `52w`. Default: it never expires."),
    ] = None,
    place: Place = _DEFAULT,
) -> None:
    """Make a key, and print it this once.

    Standard output is the key alone. It is stored nowhere, only a hash of it: if it gets lost, make another one.

    For example: `imprint access create times --role publisher --source times --expires 90d`
    """
    until = None if expires is None else datetime.now(UTC) + parse_span(expires)
    with _open(place, make=True) as opened:
        made = opened.create(name, cast("Role", role), sources=source or (), expires=until)
        where = opened.place
    errors.print(
        f"key [bold]{escape_markup(made.name)}[/bold], role {made.role}, "
        f"{'never expires' if until is None else f'expires {until:%Y-%m-%d %H:%M} UTC'}, in "
        f"{escape_markup(where)}. It is shown this once:",
        soft_wrap=True,
    )
    typer.echo(made.secret)


@access.command("list")
def list_keys(place: Place = _DEFAULT) -> None:
    """List all keys, revoked and expired ones too.

    For example: `imprint access list`
    """
    with _open(place) as opened:
        found, where = opened.list(), opened.place
    console.print(f"{'no keys yet' if not found else 'keys'} in {escape_markup(where)}", soft_wrap=True)
    if not found:
        return
    table = Table("name", "role", "sources", "begins with", "made", "expires", "last used", "state")
    for column in table.columns:
        column.overflow = "fold"  # in a narrow terminal nothing is left out
    for key in found:
        table.add_row(*map(cell, _describe(key, datetime.now(UTC))))
    console.print(table)


@access.command()
def revoke(name: Name, place: Place = _DEFAULT) -> None:
    """Revoke a key. A running service refuses it within two seconds, and ends its sessions.

    Its name is not free again, because entries of the ledger name it.

    For example: `imprint access revoke times`
    """
    with _open(place) as opened:
        opened.revoke(name)
        console.print(f"{escape_markup(name)} is revoked in {escape_markup(opened.place)}.", soft_wrap=True)


def parse_span(text: str) -> timedelta:
    """Return a span of time that is given as a number of hours, days or weeks.

    >>> parse_span("90d").days, parse_span("12h").total_seconds()
    (90, 43200.0)
    """
    found = _SPAN.fullmatch(text)
    if found is None or not 0 < (hours := int(found[1]) * _HOURS[found[2]]) <= 24 * 36_500:
        raise ConfigurationError(f"a key is valid for a time such as 12h, 90d or 52w; got {text[:40]!r}.")
    return timedelta(hours=hours)


def _describe(key: "KeyRecord", now: datetime) -> list[str]:
    return [
        key.name,
        key.role,
        ", ".join(key.sources) or "all",
        f"imprint_{key.prefix}…",
        f"{key.created:%Y-%m-%d}",
        "never" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M}",
        "never" if key.last_used is None else f"{key.last_used:%Y-%m-%d %H:%M}",
        key.describe_state(now.timestamp()),
    ]


@contextmanager
def _open(place: str, *, make: bool = False) -> "Iterator[Access]":
    from imprint.serve import Access

    opened = Access(place, make=make)
    try:
        yield opened
    finally:
        opened.close()
