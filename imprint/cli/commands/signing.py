"""Implements `imprint keys` and `imprint sign`."""

from pathlib import Path
from typing import Annotated

import typer

import imprint
from imprint.cli.commands.options import StorePath
from imprint.cli.terminal import console, escape_markup
from imprint.keys import identify_key, load_public_key, make_keys
from imprint.store.signing import sign_store


def keys(
    file: Annotated[Path, typer.Argument(help="The file of the private key.", dir_okay=False)],
) -> None:
    """Make a pair of keys: FILE, which only you can read and must keep, and FILE.pub, which you hand out.

    The private key is encrypted if the environment variable IMPRINT_KEY_PASSPHRASE is set.

    For example: `imprint keys credit.key`
    """
    private, public = make_keys(file)
    name = identify_key(load_public_key(public))
    console.print(
        f"key [bold]{name}[/bold]: keep {escape_markup(private)}, hand out {escape_markup(public)}", soft_wrap=True
    )


def sign(
    store: StorePath,
    key: Annotated[Path, typer.Option("--key", help="The private key.", dir_okay=False)],
) -> None:
    """Sign a store, so that whoever opens it with --signed-by knows that nobody changed it since.

    Checksums show damage, a signature shows malice: without one, somebody could exchange two sources unnoticed. Sign a
    store again after you validated it.

    For example: `imprint sign runs/news --key credit.key`
    """
    opened = imprint.Store(store)
    file = sign_store(opened, key)
    console.print(f"{escape_markup(opened.place)} signed: {escape_markup(file.name)}", soft_wrap=True)
