"""Options and values that the commands of `imprint credit` have in common."""

import re
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from imprint.errors import ConfigurationError, StoreError
from imprint.store.files import refuse_unreadable
from imprint.store.values import parsed

if TYPE_CHECKING:
    from imprint.credit.heads import Head
    from imprint.credit.policy import Policy

Place = Annotated[
    str,
    typer.Option(
        "--ledger",
        "-l",
        envvar="IMPRINT_LEDGER",
        help="The ledger: a SQLite file, or a URL such as `postgresql://user@host/name`. The environment variable "
        "keeps a password off the command line.",
    ),
]
PublicKeys = Annotated[
    list[Path] | None,
    typer.Option(
        "--public-key", help="The public key that heads are signed with. Repeat it if it was exchanged.", dir_okay=False
    ),
]
Heads = Annotated[
    list[Path] | None,
    typer.Option("--heads", help="A file of signed heads that were published. Repeat it for several.", dir_okay=False),
]
PeriodName = Annotated[str, typer.Argument(metavar="PERIOD", help="The name of the period, such as `2026-11`.")]
Key = Annotated[Path, typer.Option("--key", help="The private key.", dir_okay=False)]

_AMOUNT = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?")
_LONGEST = 1 << 20  # bytes of a policy, or of terms


def parse_amount(text: str) -> int:
    """Return an amount in units of the currency as micro-units; refuse what has more than six decimals.

    >>> parse_amount("0.002"), parse_amount("12")
    (2000, 12000000)
    """
    if not (found := _AMOUNT.fullmatch(text)):
        raise ConfigurationError(
            f"an amount is a number such as 0.002, with at most six decimals and below 10¹²; got {text[:40]!r}."
        )
    return int(found[1]) * 1_000_000 + int((found[2] or "").ljust(6, "0"))


def read_policy(place: Path) -> "Policy":
    """Read a policy from a TOML or JSON file."""
    from imprint.credit import Policy

    return Policy.from_json(read_values(place))


def read_values(place: Path) -> dict[str, Any]:
    """Read names and values from a TOML or JSON file."""
    try:
        refuse_unreadable(place, _LONGEST)
        content = place.read_bytes()
        values = parsed(content, place).content if place.suffix == ".json" else tomllib.loads(content.decode())
    except StoreError as error:
        raise ConfigurationError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{place} must have names and values.")
    return values


def parse_time(text: str | None) -> datetime | None:
    """Read a time, in UTC unless it says otherwise."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(f"a time is written as 2026-12-01T00:00:00Z, got {text!r}.") from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def read_heads_of(files: Sequence[Path] | None) -> "list[Head]":
    """Read all heads of some files."""
    from imprint.credit.heads import read_heads

    return [head for file in files or () for head in read_heads(file)]
